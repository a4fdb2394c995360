"""Write-back: sends new segments to the remote, in the background and one at a time, from a bounded queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

from ..errors import TieredCacheError
from ..store import HASH_BYTES
from ..store.backend import SegmentBackend
from ..store.catalogue import SegmentRow
from ..store.disk import SegmentStore
from ..store.engines import ReadOp
from ..store.format import HEADER_BYTES, decode_header
from ..store.kinds import ENTRY
from ..store.memory import aligned_bytes
from ..store.objects import ObjectBackend
from ..store.segment import is_damaged
from ..store.threads import DaemonPool, Progress
from .entries import delete_entry, encode_entry, entry_names, find_entries, is_found_by_prefix, is_shared
from .link import Breaker

WRITES = ("always", "pinned", "never")
"""Which segments are sent: all, those that are pinned, or none."""
_MOST_QUEUED = 4096  # maximum number of segments that wait. They are on the disk, so only their ids wait
_WINDOW_BYTES = 16 << 20
_PATIENCE_SECONDS = 30.0  # seconds that `flush` and `close` wait for a remote that makes no progress
_REFUSED = "it is not used for a while, after several failures"


class WriteBack:
    """Thread that sends segments to a remote, and deletes them there, if it is `writable`. `write` is one of `WRITES`.

    `count` adds amounts to `RemoteStats`, and `note_sent` receives the names of the entries of what was sent.
    """

    def __init__(
        self,
        remote: ObjectBackend,
        disk: SegmentStore,
        write: str,
        count: Callable[..., None],
        note_sent: Callable[[Sequence[str]], None],
    ) -> None:
        self._remote, self._disk, self._write, self._count, self._sent = remote, disk, write, count, note_sent
        self._breaker = Breaker()
        self._pool = DaemonPool(1, "hf-tiered-remote")
        self._waiting: dict[str, object] = {}  # the offer of each segment that waits, which only its own `_send` takes
        self._holding = 0  # number of bodies of `holding`
        self._held: list[str] = []  # segments that were stored meanwhile
        self._unfinished = 0  # number of queued and running works
        self._progress = Progress()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def queued(self) -> int:
        """Number of segments that wait to be sent."""
        return len(self._waiting)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Send what is stored in the body after it, and only what is still stored then."""
        with self._lock:
            self._holding += 1
        try:
            yield
        finally:
            held_segments: list[str] = []
            with self._lock:
                self._holding -= 1
                if not self._holding:
                    held_segments, self._held = self._held, []
            self.offer([segment_id for segment_id in held_segments if self._disk.index.row(segment_id) is not None])

    def offer(self, ids: Collection[str]) -> None:
        """Queue segments that were stored or pinned, unless they wait already. If the queue is full, count them."""
        if not self._remote.writable:
            return
        with self._lock:
            if self._holding:
                self._held += ids
                return
        for segment_id in ids:
            with self._lock:
                if segment_id in self._waiting:
                    continue
                is_full = self._ended or len(self._waiting) >= _MOST_QUEUED
                if not is_full:
                    self._waiting[segment_id] = offer = object()
            if is_full:
                self._drop("the queue is full")
            else:
                self._put(partial(self._send, segment_id, offer))

    def remove(self, rows: Sequence[SegmentRow]) -> None:
        """Queue the deletion of segments. A store that only reads the remote leaves them there.

        Call this after they were deleted here. Those that were stored again since are sent after the deletion.
        """
        if not self._remote.writable:
            return
        for row in rows:
            with self._lock:
                self._waiting.pop(row.id, None)
            self._put(partial(self._delete, row))
        self.offer([row.id for row in rows if self._disk.index.row(row.id) is not None])

    def flush(self) -> None:
        """Wait until all that was queued is done, or nothing is done for `_PATIENCE_SECONDS`."""
        if not self._progress.wait(lambda: not self._unfinished, _PATIENCE_SECONDS):
            self._disk.warn("remote queue", f"{self._remote.place} does not answer; {self.queued} segments wait")

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        with self._lock:
            self._ended = True
        self.flush()
        if self._unfinished:
            self._count(dropped_writes=len(self._waiting))
        self._pool.close(0.0)

    def _put(self, work: Callable[[], object]) -> None:
        try:
            with self._lock:
                self._pool.submit(self._run, work)
                self._unfinished += 1
        except RuntimeError as error:  # closed meanwhile
            self._drop(error)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # whatever a client library raises
            if not isinstance(error, TieredCacheError):  # a damaged segment says nothing about the remote
                self._breaker.failed()
                self._count(errors=1)
            self._drop(error)
        finally:
            with self._lock:
                self._unfinished -= 1
            self._progress.step()

    def _drop(self, why: object) -> None:
        self._count(dropped_writes=1)
        self._disk.warn("remote writes", f"a segment was not sent to {self._remote.place}: {why}")

    # --- one segment

    @property
    def _is_refused(self) -> bool:
        return self._breaker.is_open and not self._breaker.wants_probe()

    def _send(self, segment_id: str, offer: object) -> None:
        with self._lock:
            if self._waiting.get(segment_id) is not offer:
                return  # it was deleted meanwhile, and perhaps offered again
            del self._waiting[segment_id]
        if self._write == "pinned" and segment_id not in self._disk.backend.pinned():
            return None
        if self._is_refused:
            return self._drop(_REFUSED)
        start_time = time.monotonic()
        try:
            upload = send_segment(self._disk.backend, self._remote, segment_id, self._progress.step)
        except FileNotFoundError:
            if self._disk.backend.find(segment_id) is not None:
                raise  # something is missing in the remote, such as the whole bucket
            return self._drop("it was evicted before it was sent")
        self._breaker.succeeded()
        if upload is None:
            return None
        if not upload.nbytes:
            return self._count(duplicate_writes=1)
        self._sent(upload.names)
        return self._count(segments_written=1, bytes_written=upload.nbytes, write_seconds=time.monotonic() - start_time)

    def _delete(self, row: SegmentRow) -> None:
        if self._is_refused:
            return self._keep(_REFUSED)
        try:
            names = entry_names(row.chain) if is_found_by_prefix(row.provenance) else []
            entry_ids = {delete_entry(self._remote, name, row.id, row.chain) for name in names}
            for segment_id in {row.id, *entry_ids} - {""}:
                self._remote.delete(segment_id)
        except Exception as error:  # whatever a client library raises
            self._breaker.failed()
            self._count(errors=1)
            return self._keep(error)
        return self._breaker.succeeded()

    def _keep(self, why: object) -> None:
        self._count(failed_deletions=1)
        self._disk.warn("remote deletions", f"a segment that was deleted here stays in {self._remote.place}: {why}")


class Sent(NamedTuple):
    """A segment that a remote has."""

    names: Sequence[str]
    """Names of its entries; none if prompts do not find it by its prefix hashes."""
    nbytes: int
    """Number of bytes that were sent; 0 if the remote had all of its tokens already."""


def send_segment(
    local: SegmentBackend, remote: ObjectBackend, segment_id: str, progress: Callable[[], None] = lambda: None
) -> Sent | None:
    """Copy a segment to a remote, unless that has it, or all of its tokens. `progress` is called after each part.

    Returns None if other stores cannot use it. Raises FormatError if it is damaged, or OSError.
    """
    _, beginning, file = local.open(segment_id, lambda _, page: decode_header(page)[0].blocks.offset)
    header, num_hashes = decode_header(beginning[:HEADER_BYTES])
    if not is_shared(header):
        return None
    chain = beginning[HEADER_BYTES:][: num_hashes * HASH_BYTES]
    names = entry_names(chain) if is_found_by_prefix(header.provenance) else []
    entries = find_entries(remote, names) if names else {}
    longest = entries.get(names[-1]) if names else None
    if longest is not None and longest.row.id != segment_id:
        row, stop = longest.row, header.position + header.shape.tokens
        if row.position <= header.position and row.position + row.tokens >= stop:  # it has all of the tokens
            if remote.find(row.id) is not None:  # a server may have dropped it and kept the entry
                return Sent(names, 0)
            entries = {name: entry for name, entry in entries.items() if entry.row.id != row.id}
    is_there = damaged = False
    with suppress(FileNotFoundError):
        damaged = is_damaged(remote.head, segment_id)
        is_there = not damaged
    if not is_there:
        with remote.write(segment_id, header.file_bytes) as upload:
            upload.write(memoryview(beginning), 0)
            memory = aligned_bytes(min(_WINDOW_BYTES, header.blocks.nbytes))
            for offset in range(header.blocks.offset, header.file_bytes, _WINDOW_BYTES):
                window = memory[: min(_WINDOW_BYTES, header.file_bytes - offset)]
                local.read([ReadOp(file, offset, window)]).result()
                upload.write(window.numpy().data.cast("B"), offset)
                progress()
            with nullcontext() if damaged else suppress(FileExistsError):
                upload.publish(replace=damaged)
    content = encode_entry(beginning)
    for name in names:
        if name not in entries or entries[name].num_hashes < num_hashes:
            remote.records.write(ENTRY, name, content)
            progress()
    return Sent(names, 0 if is_there else header.file_bytes)
