"""Internals of a `KVStore`: its segments, the memory tiers, and the writer thread.

Caches use this class; users use `KVStore`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError, StoreClosedError, StoreError
from ..passages.finder import PassageIndex
from ..passages.ranking import KeptRankings
from ..reasons import EXPECTED
from ..remote.tier import RemoteTier, Seconds
from ..restore.hashes import MatchedRun, PassageHasher, PrefixHasher, longest_prefix
from ..restore.rows import RowGroup
from ..store.catalogue import SegmentRow
from ..store.cipher import Hidden
from ..store.conversations import Conversations
from ..store.disk import SegmentStore
from ..store.documents import Documents
from ..store.lazy import torch
from ..store.objects import ObjectBackend
from ..store.records import Calibrations
from ..store.segment import SegmentReader
from ..store.shape import SegmentShape
from ..store.writer import PendingSegment, Writer
from ..tiers.residency import Residency
from ..tiers.scores import ScoreTable
from .captured import SegmentTable
from .rewriter import SegmentRewriter
from .spot_check import SpotChecks
from .unstored import UnstoredPrefixes, blocks_in_memory

if TYPE_CHECKING:
    from ..methods import Method
    from .recorder import Recorder

DEFAULT_POLICY = "lru"


class Storage:
    """Stored segments of KV and their memory tiers, shared by many caches and threads.

    KV that is not written yet is written when this object is garbage collected, or when the interpreter exits.

    Args:
        disk: Segments and their backend; closed with this object, as is the remote.
        secret: Key of the token hashes, if there is one.
        codec: Codec for methods that name none.
        ttl: Lifetime of a new segment in seconds, or None.
        queue_bytes: Maximum bytes of KV that wait to be written.
        queue_device_bytes: Maximum GPU memory that this KV keeps allocated.
        spot_checks: Fraction of what is restored that is computed again and compared.
        remote_write: Which segments are sent to the remote (see `WriteBack`).

    Raises:
        ConfigError: The stored segments are encrypted with another key.
    """

    def __init__(
        self,
        disk: SegmentStore,
        residency: Residency,
        *,
        secret: Hidden,
        policy: str,
        codec: str,
        ttl: float | None,
        queue_bytes: int,
        queue_device_bytes: int,
        spot_checks: float = 0.0,
        remote: ObjectBackend | None = None,
        remote_write: str = "always",
    ) -> None:
        self.remote: RemoteTier | None = None
        self.disk, self.place, self.residency = disk, disk.place, residency
        self.unstored = UnstoredPrefixes(residency)
        records = disk.backend.records
        self.conversations, self.documents = Conversations(records), Documents(records)
        self.calibrations = Calibrations(records)
        self.policy, self.codec, self.ttl = policy, codec, ttl
        self.spot_checks = SpotChecks(spot_checks)
        self._secret = secret
        self._lock = threading.RLock()
        self._used: list[str] | None = None  # segments found since `note_uses`; None if there was no lookup
        self._measuring = 0  # number of bodies of `without_remote`
        self._pid = os.getpid()
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        try:
            if (other_key := disk.other_key()) is not None:
                named = f"key id {other_key}, not {disk.cipher.key_id}"
                raise ConfigError(f"{self.place} is encrypted with another key: {named}")
            self.rankings = KeptRankings(disk)
            self.rewriter = SegmentRewriter(disk, residency, self.rankings, self.conversations)
            self.passage_index = PassageIndex(disk)
            if remote is not None:
                self.remote = RemoteTier(remote, disk, remote_write, residency.admit)
            close = partial(_close, self.rewriter, disk, residency, self.conversations, self.remote)
            seal = partial(_seal, self._recorders, self._lock)
            self.writer = Writer(disk, queue_bytes, queue_device_bytes, seal, close)
            self._close = weakref.finalize(self, self.writer.end)  # in any thread: the writer's thread does the rest
        except BaseException:  # also Ctrl-C: nothing else would close it
            disk.close()
            raise
        self._close.atexit = False  # the writer handles that
        self.recent_segments = SegmentTable()
        """Segments that were stored recently, for sequences that are recorded at the same time."""
        disk.on_gone += [
            residency.forget,
            self.unstored.forget,
            self.recent_segments.forget,
            self.rewriter.forget,
            self.rewriter.importance.forget,
        ]
        residency.scores.load(disk.index.scores())

    def warn_of(self, reason: str) -> None:
        """Log a reason as a warning, once, unless it is part of ordinary use."""
        if reason and not reason.startswith(EXPECTED):
            self.disk.warn(reason, reason)

    def note_policy(self, method: Method) -> None:
        """Warn if blocks leave memory by another eviction policy than the one the method was published with."""
        if method.policy not in (DEFAULT_POLICY, self.policy):
            self.disk.warn(
                f"policy {method.policy}",
                f"{type(method).__name__} was published with the eviction policy {method.policy!r}, but this store "
                f"uses {self.policy!r}; open it with KVStore(path, policy={method.policy!r})",
            )

    # --- lookup

    def hasher(self, fingerprint: str, provenance: str, regime: str) -> PrefixHasher:
        """Return the prefix hasher for KV of a model, a provenance and a RoPE regime."""
        return PrefixHasher((fingerprint, provenance, regime), self._secret.value)

    def passage_hasher(self, fingerprint: str, provenance: str, sink: int | None, regime: str) -> PassageHasher:
        """Return the hasher for passages of a model, a provenance and a RoPE regime, computed after a sink token."""
        return PassageHasher((fingerprint, f"{provenance} {sink}", regime), self._secret.value, sink)

    def match(
        self,
        prefix_hashes: list[bytes],
        start: int,
        usable: Callable[[SegmentShape], int],
        own_recorder: Recorder,
        seconds: Seconds | None = None,
    ) -> list[tuple[MatchedRun, SegmentReader]]:
        """Return the longest stored prefix of a sequence from one of its hashes on: runs, and the open segments.

        KV that other caches of this process have computed but not stored is stored first, if it can be part of the
        prefix.

        Args:
            prefix_hashes: Prefix hashes of the sequence.
            start: Index of the first prefix hash to match; the cache holds what precedes it.
            usable: Returns how many prefix hashes of a segment can be used.
            own_recorder: Recorder of the cache that does the lookup; its KV is not stored first.
            seconds: Returns the time to compute a prompt, which bounds how long the remote is waited for, or None.
        """
        self.check_open()
        if start >= len(prefix_hashes):
            return []
        self.seal(prefix_hashes[0], own_recorder)
        self.writer.wait_for(prefix_hashes[start:])
        rows, asked_again = self.disk.find(prefix_hashes), False
        seconds = None if self._measuring else seconds
        if (
            self.remote is not None
            and seconds is not None
            and self.remote.fetch_for_prompt(prefix_hashes, rows, start, seconds)
        ):
            rows = self.disk.find(prefix_hashes)
        matched: list[tuple[MatchedRun, SegmentReader]] = []
        while runs := longest_prefix(prefix_hashes, rows, start):
            readers = self.disk.found([run.row for run in runs])
            matched = [(run, reader) for run, reader in zip(runs, readers, strict=True) if reader is not None]
            most = {run.row.id: 0 for run in runs} | {run.row.id: usable(reader.shape) for run, reader in matched}
            if all(run.num_hashes <= most[run.row.id] for run in runs):
                break
            if None in readers and not asked_again:  # another segment may have replaced it meanwhile
                rows, asked_again = self.disk.find(prefix_hashes), True
            rows = [  # missing, damaged or incomplete: search for other segments
                replace(row, valid_hashes=min(row.valid_hashes, most.get(row.id, row.valid_hashes))) for row in rows
            ]
            matched = []
        self._used = (self._used or []) + [run.row.id for run, _ in matched]
        return matched

    def found(self, rows: Iterable[SegmentRow]) -> list[SegmentReader | None]:
        """Open the segments of passages that are going to be restored; None for one that cannot be used."""
        readers = self.disk.found(list(rows))
        self._used = [*(self._used or []), *(reader.id for reader in readers if reader is not None)]
        return readers

    def note_uses(self) -> None:
        """Record the use of looked-up segments in the catalogue, and forget segments that other processes removed.

        Called after a pass, since the writer's thread would compete with it.
        """
        if self._used is not None:
            used_segments, self._used = self._used, None
            self.writer.later(partial(_after_look_up, self.disk, self.residency, used_segments))

    def lay_out_after(self, groups: Iterable[RowGroup]) -> None:
        """Defer rewrites of the segments that a plan restores from while its groups of rows are referenced.

        Until then, caches select from these segments repeatedly, and blocks of a replaced segment would not stay in
        memory.
        """
        for group in groups:
            used_segments = frozenset(piece.reader.id for piece in group.pieces)
            self.rewriter.begin_use(used_segments)
            over = weakref.finalize(group, self.writer.soon, partial(self.rewriter.end_use, used_segments))
            over.atexit = False

    # --- storing

    def submit(self, pending: PendingSegment, wait: bool = True) -> None:
        """Queue a segment for writing, and cache its blocks in host memory."""
        if pending.on_device is not None:
            self.residency.prepare(pending.on_device.device)
        pending.written = self.residency.admit
        pending.refused = partial(_refused, self.residency, pending.refused)
        self.writer.submit(pending, wait)

    def blocks_of(self, reader: SegmentReader, block_group: int) -> torch.Tensor:
        """Return a copy of all blocks of a KV cache group, uint8 `[chunks, block_bytes]`, from host memory or disk.

        Raises IntegrityError or OSError if a block cannot be read.
        """
        blocks, missing = blocks_in_memory(self.residency, reader, block_group)
        if len(missing):
            runs = np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1)
            reader.read(block_group, [(int(run[0]), blocks[run[0] : run[-1] + 1]) for run in runs]).result()
        return blocks

    def register(self, recorder: Recorder) -> None:
        """Let `flush`, `close` and the lookups of other caches seal what this recorder has captured."""
        with self._lock:
            self._recorders.add(recorder)

    def seal(self, beginning: bytes | None = None, but: Recorder | None = None) -> None:
        """Queue what live caches have computed and not stored, between their passes, except of the recorder `but`.

        With a `beginning`, a first prefix hash, only caches that hold a sequence with it.
        """
        with self._lock:
            recorders = list(self._recorders)
        for recorder in recorders:
            if recorder is not but and (beginning is None or recorder.begins_with(beginning)):
                recorder.seal()

    def flush(self) -> None:
        """Write all computed KV, make it durable, and wait for background work."""
        self.check_open()
        self.note_uses()
        self.seal()
        self.writer.flush()  # rewrites may follow what is queued
        self.rewriter.wait()
        self.rewriter.keep_importance()
        self.disk.sync()
        _keep_scores(self.disk, self.residency.scores)
        if self.remote is not None:
            self.remote.writes.flush()

    @contextmanager
    def without_remote(self) -> Iterator[None]:
        """Leave the remote out while something is measured: it is not asked, and KV that is deleted again is not sent.

        What else is stored meanwhile is sent afterwards.
        """
        with self._lock:
            self._measuring += 1
        try:
            with nullcontext() if self.remote is None else self.remote.writes.holding():
                yield
        finally:
            with self._lock:
                self._measuring -= 1

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments that the user no longer wants, also from the remote. See `SegmentStore.remove`."""
        ids = list(ids)
        rows = [] if self.remote is None else [row for i in ids if (row := self.disk.index.row(i)) is not None]
        removed = self.disk.remove(ids)
        if self.remote is not None:
            self.remote.remove(rows)
        return removed

    # --- lifetime

    def check_open(self) -> None:
        """Raise StoreClosedError if the store was closed, or was opened by another process."""
        if not self._close.alive:
            raise StoreClosedError(f"the store {self.place} is closed; open it again")
        if os.getpid() != self._pid:
            raise StoreClosedError(f"the store {self.place} was opened before this process was forked; open it again")

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    @property
    def usable(self) -> bool:
        """True if the store is open, and was opened by this process."""
        return self._close.alive and os.getpid() == self._pid

    def close(self) -> None:
        """Write all computed KV, and release files, threads and memory."""
        if self.usable:
            self.seal()
            if self.remote is not None:  # here: closing waits only while the writer makes progress
                with suppress(StoreError):
                    self.writer.flush()
                self.remote.writes.flush()
            self._close()
            self.writer.close()
            self.residency.clear()
            self.conversations.release_all()  # if the writer is stuck and has not done it


def _keep_scores(disk: SegmentStore, scores: ScoreTable) -> None:
    if disk.backend.writable and (changes := scores.changes()):
        disk.index.keep_scores(changes)


def _refused(residency: Residency, refused: Callable[[PendingSegment], None], pending: PendingSegment) -> None:
    residency.forget([pending.header.id])
    refused(pending)


def _after_look_up(disk: SegmentStore, residency: Residency, used_segments: list[str]) -> None:
    if used_segments:
        disk.index.touch(used_segments)
    else:
        disk.index.catch_up()
    disk.forget_deleted(residency.segments())


def _seal(recorders: weakref.WeakSet[Recorder], lock: threading.RLock) -> bool:
    """Queue what live caches have computed. Returns False while another thread uses one of them."""
    with lock:  # others may be registered meanwhile
        live_recorders = list(recorders)
    return False not in [recorder.finish() for recorder in live_recorders]  # a list, so that no recorder is left out


def _close(
    rewriter: SegmentRewriter,
    disk: SegmentStore,
    residency: Residency,
    conversations: Conversations,
    remote: RemoteTier | None,
) -> None:
    rewriter.close()
    rewriter.keep_importance()
    if remote is not None:
        remote.close()
    _keep_scores(disk, residency.scores)
    residency.clear()  # also if the store is collected: a GPU may be using its memory
    conversations.release_all()
    disk.close()
