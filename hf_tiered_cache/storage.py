"""The inside of a `KVStore`: the segments, the tiers of memory before them, and the thread that writes.

Caches see this; users see `KVStore`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm.auto import tqdm

from .errors import ConfigError, StoreClosedError, StoreError
from .methods import Method
from .restore.match import MatchedRun, longest_prefix
from .restore.passage_index import PassageIndex, Seeds
from .restore.plan import RowGroup
from .restore.prefix_hasher import PassageHasher, PrefixHasher
from .restore.rankings import KeptRankings
from .rewriter import SegmentRewriter
from .shape import SegmentShape
from .spot_check import SpotChecks
from .stats import StatsCollector, StoreStats
from .store import maintain
from .store.catalogue import Catalogue, SegmentRow
from .store.cipher import Hidden
from .store.conversations import ConversationInfo, ConversationRecord, Conversations, conversation_name
from .store.disk import SegmentStore
from .store.documents import Documents
from .store.root import StoreRoot
from .store.segment import SegmentReader
from .store.writer import PendingSegment, Writer
from .tiers.lease import BlockRequest
from .tiers.residency import Residency
from .tiers.scores import ScoreTable

if TYPE_CHECKING:
    from .record import Recorder

DEFAULT_POLICY = "lru"


class Storage:
    """KV in segments, kept in memory as long as it has room. Serves many caches and threads.

    What is still to be written is written when it is collected, or the interpreter ends.

    Args:
        files: the store's folder, for messages and for what is kept beside the segments.
        disk: the segments; closed with this.
        residency: the tiers before them.
        secret: keys the hashes of tokens, if anything does.
        policy: by which blocks leave memory.
        codec: of what is stored by methods that name none.
        ttl: seconds a new segment lives, or None.
        queue_bytes: of KV that may wait to be written.
        queue_device_bytes: of this in the memory of GPUs.
        spot_checks: share of what is restored that is computed again and compared.

    Raises:
        ConfigError: what is stored is encrypted with another key.
    """

    def __init__(
        self,
        files: StoreRoot,
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
    ) -> None:
        self.files, self.path, self.disk, self.residency = files, files.path, disk, residency
        self.conversations, self.documents = Conversations(files), Documents(files)
        self.policy, self.codec, self.ttl = policy, codec, ttl
        self.spot_checks = SpotChecks(spot_checks)
        self._secret = secret
        self._lock = threading.RLock()
        self._used: list[str] | None = None  # segments that were found since `note_uses`; None without a look-up
        self._pid = os.getpid()
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        try:
            if (other := disk.other_key()) is not None:
                named = f"{other}, and not {disk.cipher.key_id}, as the two are called"
                raise ConfigError(f"{self.path} is encrypted with another key: {named}")
            self.rankings = KeptRankings(disk)
            self.rewriter = SegmentRewriter(disk, residency, self.rankings)
            self.passage_index = PassageIndex(disk.index)
            close = partial(_close, self.rewriter, disk, residency.scores, self.conversations)
            seal = partial(_seal, self._recorders, self._lock)
            self.writer = Writer(disk, queue_bytes, queue_device_bytes, seal, close)
            self._close = weakref.finalize(self, self.writer.end)  # anywhere: the writer's thread does the rest
        except BaseException:  # also Ctrl-C: nobody is going to close it
            disk.close()
            raise
        self._close.atexit = False  # the writer sees to that
        disk.on_gone += [residency.forget, self.rewriter.forget, self.rewriter.importance.forget, self.rankings.forget]
        residency.scores.load(disk.index.scores())

    def note_policy(self, method: Method) -> None:
        """Say so if blocks leave memory by another policy than the method was published with."""
        if method.policy not in (DEFAULT_POLICY, self.policy):
            self.disk.warn(
                f"policy {method.policy}",
                f"{type(method).__name__} was published with the eviction policy {method.policy!r}, and this store "
                f"evicts by {self.policy!r}; open it with KVStore(path, policy=method.policy)",
            )

    # --- looking up

    def hasher(self, fingerprint: str, provenance: str, regime: str) -> PrefixHasher:
        """The prefix hasher of KV made by this model, in this way, under these RoPE frequencies."""
        return PrefixHasher((fingerprint, provenance, regime), self._secret.value)

    def passage_hasher(self, fingerprint: str, provenance: str, sink: int | None, regime: str) -> PassageHasher:
        """The same of passages that are computed behind this token."""
        return PassageHasher((fingerprint, f"{provenance} {sink}", regime), self._secret.value)

    def match(
        self,
        prefix_hashes: list[bytes],
        start: int = 0,
        *,
        usable: Callable[[SegmentShape], int] = attrgetter("whole_hashes"),
        asking: Recorder | None = None,
    ) -> list[tuple[MatchedRun, SegmentReader]]:
        """The longest stored prefix of a sequence, from prefix hash number `start` on: runs of segments, opened.

        What other caches of this process than the `asking` one have computed but not stored yet is stored first, as far
        as it matters.

        Args:
            usable: says how many prefix hashes of a segment can be used; those that are stored whole, by default.
        """
        self.check_open()
        if start >= len(prefix_hashes):
            return []
        self.seal(prefix_hashes[0], asking)
        self.writer.wait_for(prefix_hashes[start:])
        rows, asked_again = self.disk.find(prefix_hashes), False
        while True:
            runs = longest_prefix(prefix_hashes, rows, start)
            readers = [self.disk.found(run.row) for run in runs]
            found = [(run, reader) for run, reader in zip(runs, readers, strict=True) if reader is not None]
            most = {run.row.id: 0 for run in runs} | {run.row.id: usable(reader.shape) for run, reader in found}
            if all(run.num_hashes <= most[run.row.id] for run in runs):
                break
            if None in readers and not asked_again:  # perhaps another has taken its place meanwhile
                rows, asked_again = self.disk.find(prefix_hashes), True
            rows = [  # gone, damaged or there in part: look for a way around it
                replace(row, valid_hashes=min(row.valid_hashes, most.get(row.id, row.valid_hashes))) for row in rows
            ]
        self._used = (self._used or []) + [run.row.id for run, _ in found]
        return found

    def find_parts(self, scan_hashes: np.ndarray) -> Seeds:
        """The parts of stored passages that may stand where these, uint32 `[n]`, are a prompt's."""
        self.check_open()
        found = self.passage_index.seeds(scan_hashes)
        hidden = np.array([self.disk.is_hidden(row.id) for row in found.rows], bool)
        if not hidden.any():
            return found
        seen = ~hidden[found.passage]
        return Seeds(found.at[seen], found.passage[seen], found.part[seen], found.rows)

    def found_passage(self, row: SegmentRow) -> SegmentReader | None:
        """The segment of a passage that is going to be restored, opened; None if it cannot be used."""
        if (reader := self.disk.found(row)) is not None:
            self._used = [*(self._used or []), row.id]
        return reader

    def note_uses(self) -> None:
        """What was looked up was used: note it in the catalogue, and forget what another process has removed.

        Called behind a pass, since the writer's thread would work beside it.
        """
        if self._used is not None:
            used, self._used = self._used, None
            self.writer.later(partial(_after_look_up, self.disk, self.residency, used))

    def lay_out_after(self, groups: Iterable[RowGroup]) -> None:
        """Leave the segments that a plan restores from as they are as long as anybody holds its groups of rows.

        Until then caches choose from these segments, again and again, and blocks of one that was replaced would not
        stay in memory.
        """
        for group in groups:
            used = frozenset(piece.reader.id for piece in group.pieces)
            self.rewriter.begin_use(used)
            over = weakref.finalize(group, self.writer.soon, partial(self.rewriter.end_use, used))
            over.atexit = False

    # --- storing

    def submit(self, pending: PendingSegment, wait: bool = True) -> None:
        """Queue a segment for writing; its blocks are cached in host memory on the way."""
        written, refused = partial(_admit, pending, self.residency), partial(_refused, pending, self.residency)
        self.writer.submit(replace(pending, written=written, refused=refused), wait)

    def blocks_of(self, reader: SegmentReader, block_group: int) -> torch.Tensor:
        """All blocks of a segment's block group: from host memory as far as they lie there, else from disk.

        Returns:
            uint8 `[chunks, block_bytes]`, a copy.

        Raises:
            IntegrityError, OSError: they cannot be read.
        """
        blocks, cpu = reader.room_for(block_group), torch.device("cpu")
        left = np.arange(len(blocks))
        held = self.residency.find(reader.owner(block_group), left, cpu)["host"]
        if len(held):
            lease = self.residency.fetch([BlockRequest(reader, block_group, held)], cpu, StatsCollector(), ahead=True)
            try:
                lease.wait()
                for first, memory in lease.leased[0].arrived.runs():
                    blocks[first : first + len(memory)] = memory
            finally:
                lease.release()
            left = np.setdiff1d(left, lease.leased[0].chunks, assume_unique=True)
        if len(left):
            runs = np.split(left, np.flatnonzero(np.diff(left) != 1) + 1)
            reader.read(block_group, [(int(run[0]), blocks[run[0] : run[-1] + 1]) for run in runs]).result()
        return blocks

    def register(self, recorder: Recorder) -> None:
        """Let `flush`, `close` and other caches' look-ups seal what this recorder has caught."""
        with self._lock:
            self._recorders.add(recorder)

    def seal(self, beginning: bytes | None = None, but: Recorder | None = None) -> None:
        """Queue what live caches have computed and not stored, between their passes.

        Args:
            beginning: if given, only of caches that hold a sequence with this first prefix hash.
            but: is left alone.
        """
        with self._lock:
            recorders = list(self._recorders)
        for recorder in recorders:
            if recorder is not but and (beginning is None or recorder.begins_with(beginning)):
                recorder.seal()

    def flush(self) -> None:
        """Write everything that has been computed, and make it durable; background work is done then, too."""
        self.check_open()
        self.note_uses()
        self.seal()
        self.writer.flush()  # behind what is queued there may be something to lay out anew
        self.rewriter.wait()
        self.rewriter.keep_importance()
        self.disk.sync()
        _keep_scores(self.disk, self.residency.scores)

    # --- looking after it

    def segments(self) -> list[SegmentRow]:
        """What is stored, last used last."""
        self.check_open()
        return self.disk.index.rows()

    def each(self, action: Callable[[str], bool], ids: Iterable[str] | None, name: str, progress: bool) -> int:
        """Do something to segments, all if `ids` is None, and say for how many it was done."""
        self.check_open()
        self.disk.check_writable()
        self.flush()
        wanted = [row.id for row in self.segments()] if ids is None else list(ids)
        changed = sum(action(old) for old in tqdm(wanted, unit="segment", desc=name, disable=not progress))
        self.disk.sync()
        return changed

    def clear(self, disk: bool) -> None:
        """Let go of all blocks in memory, and with `disk` of all segments."""
        self.check_open()
        if disk:
            self.disk.check_writable()
        self.flush()
        if disk:
            self.remove(row.id for row in self.segments())
            self.conversations.sweep(())
            self.documents.sweep(())
        self.residency.clear()

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments by id. Returns how many there were."""
        self.check_open()
        self.disk.check_writable()
        return self.disk.remove(ids)

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Keep segments from eviction, or (`pinned=False`) let them go again. Raises ConfigError for unknown ids."""
        self.check_open()
        self.disk.check_writable()
        ids = list(ids)
        unknown = set(ids) - self.disk.index.ask(Catalogue.ids, set(ids))
        if pinned and unknown:
            raise ConfigError(
                f"no segment is called {min(map(str, unknown))!r}; store.segments() lists them, and "
                "store.precompute(model, input_ids, pin=True) pins a prompt"
            )
        self.disk.pin(ids, pinned)

    def verify(self, progress: bool, repair: bool) -> maintain.VerifyReport:
        """Read every stored byte and compare every checksum."""
        self.check_open()
        self.writer.flush()
        return maintain.verify(self.disk, progress=progress, repair=repair)

    def gc(self, dry_run: bool) -> maintain.GcReport:
        """Delete what no request can use, and what is over the quota."""
        self.check_open()
        if not dry_run:
            self.disk.check_writable()
        there = self.disk.index.ask(Catalogue.ids, None)  # before anything goes: what is said beforehand is done
        gone = [] if there is None else self.conversations.sweep(there, dry_run)
        report = maintain.gc(self.disk, dry_run=dry_run)
        deleted = report.deleted | dict.fromkeys(gone, "its segments are gone")
        return replace(report, conversations=len(gone), deleted=deleted)

    def list_conversations(self) -> list[ConversationInfo]:
        """Those that were suspended, last used last."""
        return self.conversations.listed(self.segments())

    def keep_conversation(self, record: ConversationRecord) -> None:
        """Write a conversation's record. Its segments do not go for it. Raises StoreError or OSError."""

        @contextmanager
        def room(nbytes: int) -> Iterator[None]:
            with self.disk.backend.locked():
                self.disk.make_room(nbytes, record.segments)
                yield

        self.check_open()
        if not self.disk.backend.writable:
            raise StoreError(f"{self.path} cannot be written")
        self.conversations.write(record, room)

    def remove_conversations(self, ids: Sequence[str]) -> int:
        """Delete conversations, and `segments_of_conversations`. Returns how many segments went."""
        self.disk.check_writable()
        mine = self.segments_of_conversations(ids)
        self.conversations.remove(ids)
        return self.remove(row.id for row in mine)

    def segments_of_conversations(self, ids: Sequence[str]) -> list[SegmentRow]:
        """The segments that only these conversations lie in, but pinned ones.

        Those, too, that no record names: of a history that was edited, or of a process that was killed.

        Raises:
            ConfigError: one is not there.
        """
        own = set[str]()  # provenances that name one of them
        for conversation_id in ids:
            record = self.conversations.read(conversation_id)
            if record is None:
                raise ConfigError(f"no conversation is called {conversation_id!r}; store.conversations() lists them")
            if conversation_name(conversation_id) in record.provenance:
                own.add(record.provenance)
        mine, pinned = self.conversations.only_of(ids), self.disk.pinned()
        return [row for row in self.segments() if (row.id in mine or row.provenance in own) and row.id not in pinned]

    def stats(self) -> StoreStats:
        """What it holds, and what happened since it was opened."""
        stats, residency = self.disk.counters.snapshot(), self.residency
        if self._close.alive:
            counts = self.disk.index.ask(Catalogue.counts, (0, 0, 0, 0))
            stats.segments, stats.tokens, stats.disk.bytes, stats.encrypted_segments = counts
            with suppress(OSError):  # then without what lies beside them
                stats.disk.bytes += sum(self.disk.beside.by_segment().values())
        stats.disk.budget = self.disk.limits.quota
        stats.host.bytes, stats.host.budget = residency.host.nbytes, residency.host.budget
        stats.device.bytes, stats.device.budget = residency.device_bytes
        stats.index.bytes, stats.index.budget = residency.resident.allocated, residency.resident.budget
        stats.evicted_blocks, stats.evicted_indexes = residency.evicted, residency.resident.evicted
        stats.queued_bytes, stats.queued_device_bytes = self.writer.queued_bytes, self.writer.queued_device_bytes
        return stats

    # --- its life

    def check_open(self) -> None:
        """Raises StoreClosedError: it was closed, or opened by another process."""
        if not self._close.alive:
            raise StoreClosedError(f"the store {self.path} is closed; open it anew")
        if os.getpid() != self._pid:
            raise StoreClosedError(f"the store {self.path} was opened before this process was forked; open it anew")

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    @property
    def usable(self) -> bool:
        """Whether it is open, and was opened by this process."""
        return self._close.alive and os.getpid() == self._pid

    def close(self) -> None:
        """Write everything that has been computed, and let files, threads and memory go."""
        if self.usable:
            self.seal()
            self._close()
            self.writer.close()
            self.residency.clear()
            self.conversations.release_all()  # if the writer is stuck, and has not done it


def _keep_scores(disk: SegmentStore, scores: ScoreTable) -> None:
    if disk.backend.writable:
        disk.index.keep_scores(scores.changes())


def _admit(pending: PendingSegment, residency: Residency, block_group: int, blocks: torch.Tensor, content: int) -> None:
    """Put a block group of a pending segment into memory, under what it contains: another file may yet come first."""
    residency.admit((pending.header.id, block_group, content), blocks)


def _refused(pending: PendingSegment, residency: Residency) -> None:
    residency.forget([pending.header.id])
    pending.refused()


def _after_look_up(disk: SegmentStore, residency: Residency, used: list[str]) -> None:
    if used:
        disk.index.touch(used)
    disk.forget_deleted(residency.segments())


def _seal(recorders: weakref.WeakSet[Recorder], lock: threading.RLock) -> bool:
    """Queue what live caches have computed. Returns False while another thread holds one of them."""
    with lock:  # others may be registered meanwhile
        found = list(recorders)
    return False not in [recorder.finish() for recorder in found]  # none is left out


def _close(rewriter: SegmentRewriter, disk: SegmentStore, scores: ScoreTable, conversations: Conversations) -> None:
    rewriter.close()
    rewriter.keep_importance()
    _keep_scores(disk, scores)
    conversations.release_all()
    disk.close()
