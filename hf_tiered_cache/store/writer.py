"""Writer thread: packs, writes and publishes segments in the background of the requests that computed them."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import KVRefusedError, StoreBusyError, StoreClosedError
from .container import Group, PackedBlocks
from .disk import SegmentStore, Written
from .faults import LOGGER
from .format import SegmentHeader
from .lazy import torch
from .threads import OneShotEvent, Progress

_PATIENCE_SECONDS = 10.0  # seconds that a request waits for a writer that makes no progress
_MOST_PATIENCE_SECONDS = 60.0  # seconds that `flush` and `close` wait for a writer that makes no progress


@dataclass(frozen=True, eq=False)
class KeptOnDevice:
    """GPU memory that several pending segments keep alive: the rows of a batch share the same tensors."""

    nbytes: int
    device: torch.device


@dataclass(eq=False)
class PendingSegment:
    """Segment that is still to be written. The header has no sections yet.

    Args:
        block_groups: Function that returns an iterator which packs one KV cache group at a time. Each item is valid
            until the next one is requested. It may raise KVRefusedError.
        ancestors: Ids of the segments that this segment continues.
        refused: Callback with this object if the segment is not stored.
        on_device: GPU memory that the segment keeps alive, if its KV is on a GPU.
        objection: Function that is called before publication. It returns the reason why the KV must not be stored,
            or an empty string.
        refusal: Reason why the KV was refused, or an empty string.
        done: True when the segment was written or dropped.
    """

    header: SegmentHeader
    prefix_hashes: list[bytes]
    block_groups: Callable[[], Iterator[Group]]
    ancestors: tuple[str, ...] = ()
    refused: Callable[[PendingSegment], None] = lambda pending: None
    written: Written = lambda owner, blocks: None
    on_device: KeptOnDevice | None = None
    objection: Callable[[], str] = lambda: ""
    refusal: str = ""
    done: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its KV in the queue: as computed by the model or as packed into blocks, whichever is larger."""
        shape = self.header.shape
        return max(shape.blocks_bytes, shape.tokens * shape.layout.bytes_per_token)


Action = Callable[[], object]


class Writer:
    """Background thread that writes pending segments one at a time.

    Args:
        store: Store to write to.
        queue_bytes: Maximum size in bytes of the queued segments. When the queue is full, `submit` waits while the
            writer makes progress, or drops the segment. A larger segment waits until the queue is empty.
        device_bytes: Maximum GPU memory in bytes that queued segments keep alive. If more is needed, queued segments
            are copied to host memory before the next KV cache group is written.
        seal: Called when the writer is to end, to queue remaining segments. It is repeated while it returns False.
        close: Called when all segments are written.
    """

    def __init__(
        self,
        store: SegmentStore,
        queue_bytes: int = 2 << 30,
        device_bytes: int = 1 << 30,
        seal: Action = lambda: None,
        close: Action = lambda: None,
    ) -> None:
        self._store, self._seal, self._close = store, seal, close
        # SimpleQueue is reentrant: finalizers call `put` at any time and in any thread
        self._queue: queue.SimpleQueue[PendingSegment | Action | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._queue_bytes = queue_bytes
        self.queued_bytes = 0
        """Size in bytes of the segments that are not written yet."""
        self._most_on_devices = device_bytes
        self._pending: list[PendingSegment] = []  # in queue order; the first one may be being written
        self._short = False  # whether a thread waits for GPU memory
        self._closed = False
        self._ended = OneShotEvent()
        self._progress = Progress()
        self._stuck = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hf-tiered-writer", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C after the thread has started
            self._queue.put(None)
            raise
        weakref.finalize(self._thread, _end_with_the_interpreter, self._queue, self._ended, self._pid)

    def submit(self, pending: PendingSegment, wait: bool = True) -> None:
        """Queue a segment. It is dropped, with a warning, if the queue has no room.

        With `wait`, first wait for room while the writer makes progress. Raises StoreClosedError if the writer was
        closed, or this process was forked after the store was opened.
        """
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self._store.place} was opened before this process was forked; open it again")
        while True:
            with self._lock:
                if self._closed:
                    raise StoreClosedError(f"{self._store.place} was closed")
                if self._has_room(pending):
                    self.queued_bytes += pending.nbytes
                    self._pending.append(pending)
                    self._queue.put(pending)
                    return
                self._short = not self._has_device_room(pending)
            if self._short and threading.current_thread() is self._thread:
                self._relieve()
                wait = True  # in the writer thread, `_wait` only checks again
            if not wait or not self._wait(lambda: self._closed or self._has_room(pending)):
                break
        self._store.counters.add("dropped_writes")
        self._store.warn(
            "queue",
            f"a segment of {pending.nbytes} bytes was not stored, because the write queue has reached queue_memory, "
            "or on a GPU queue_device_memory; raise that limit, or use a faster disk",
        )
        pending.refused(pending)

    @property
    def queued_device_bytes(self) -> int:
        """GPU memory in bytes that queued segments keep alive."""
        return sum(memory.nbytes for memory in self._on_devices())

    def _on_devices(self) -> set[KeptOnDevice]:
        with self._lock:
            return {memory for pending in self._pending if (memory := pending.on_device) is not None}

    def _has_room(self, pending: PendingSegment) -> bool:
        fits = not self.queued_bytes or self.queued_bytes + pending.nbytes <= self._queue_bytes
        return fits and self._has_device_room(pending)

    def _has_device_room(self, pending: PendingSegment) -> bool:
        new, waiting = pending.on_device, self._on_devices()
        nbytes = sum(memory.nbytes for memory in waiting)
        return new is None or new in waiting or not nbytes or nbytes + new.nbytes <= self._most_on_devices

    def _relieve(self) -> None:
        """Copy KV of queued segments to host memory. Runs in the writer thread, so requests are not delayed."""
        self._short = False
        for pending in list(self._pending):
            if pending.on_device is not None:
                with suppress(Exception):  # it fails again, and is counted, when it is written
                    pending.block_groups = partial(iter, _kept(pending.block_groups()))
                    pending.on_device = None
                self._step()

    def later(self, action: Action, nbytes: int = 0) -> bool:
        """Queue a short action after the items in the queue. It keeps `nbytes` in memory until it has run.

        Returns False, and nothing is queued, if the writer is closed or the queue has no room for `nbytes`.
        """
        with self._lock:
            if self._closed or (nbytes and self.queued_bytes + nbytes > self._queue_bytes):
                return False
            self.queued_bytes += nbytes
            self._queue.put(partial(self._run_counted, action, nbytes) if nbytes else action)
            return True

    def _run_counted(self, action: Action, nbytes: int) -> None:
        try:
            action()
        finally:
            with self._lock:
                self.queued_bytes -= nbytes

    def soon(self, action: Action) -> None:
        """Queue an action without taking a lock, for finalizers. An action that returns False is run again."""
        if not self._closed and os.getpid() == self._pid:
            self._queue.put(action)

    def wait_for(self, prefix_hashes: Iterable[bytes]) -> None:
        """Wait until queued segments with one of `prefix_hashes` as first hash are written, or the writer is stuck."""
        with self._lock:
            firsts = set(prefix_hashes) if self._pending else ()
            pending_segments = [pending for pending in self._pending if pending.prefix_hashes[0] in firsts]
        if pending_segments and not self._wait(lambda: all(pending.done for pending in pending_segments)):
            self._store.warn(
                "stuck", "writing has stalled, and requests continue without the KV that waits to be written"
            )

    def flush(self) -> None:
        """Wait until queued segments are written, and make them durable. Raises StoreBusyError or StoreError."""
        is_written = OneShotEvent()
        if self.later(is_written.set) and not self._wait(
            lambda: is_written.is_set or self._ended.is_set, _MOST_PATIENCE_SECONDS
        ):
            raise StoreBusyError(
                f"nothing is being written to {self._store.place}; check the disk and call flush() again"
            )
        self._store.sync()

    def end(self) -> None:
        """Ask the thread to write all queued segments, call `seal` and `close`, and end. Finalizers may call this."""
        if os.getpid() == self._pid:
            self._queue.put(None)

    def close(self) -> None:
        """End the thread and wait for it. A thread that makes no progress is abandoned, with a warning."""
        self.end()
        if os.getpid() == self._pid and not self._wait(lambda: self._ended.is_set, _MOST_PATIENCE_SECONDS):
            LOGGER.warning(
                "%s was closed, and KV that was still to be written is lost, because the disk does not respond",
                self._store.place,
            )

    def _wait(self, condition: Callable[[], bool], patience: float | None = None) -> bool:
        """Wait until `condition` holds, or nothing progresses for `patience` seconds. Returns whether it holds.

        Requests wait for `_PATIENCE_SECONDS`, and after a timeout not until the writer makes progress again.
        """
        if os.getpid() != self._pid or threading.current_thread() is self._thread or (self._stuck and patience is None):
            return condition()
        holds = self._progress.wait(condition, _PATIENCE_SECONDS if patience is None else patience)
        if not holds:
            self._stuck = True
        return holds

    def _step(self) -> None:
        self._progress.step()
        self._stuck = False

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._do(item)
                item = None  # frees the KV before the wait for the next segment
            while self._seal() is False:
                self._drain()
            with self._lock:
                self._closed = True
            self._drain()
            self._close()
        except Exception:
            LOGGER.exception("the store %s was not closed properly", self._store.place)
        finally:
            self._closed = True
            self._ended.set()

    def _drain(self) -> None:
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                self._do(item)

    def _do(self, item: PendingSegment | Action) -> None:
        try:
            if isinstance(item, PendingSegment):
                self._write(item)
            elif item() is False:  # another thread that runs it may be waiting for room
                time.sleep(0.001)
                self._queue.put(item)
            self._step()
        except Exception:
            self._store.counters.add("dropped_writes")
            LOGGER.exception("a segment was not stored")

    def _write(self, pending: PendingSegment) -> None:
        is_stored = False
        try:
            is_stored = self._store.publish(
                pending.header, pending.prefix_hashes, self._block_groups(pending), pending.ancestors, pending.written
            )
        finally:
            if not is_stored:
                pending.refused(pending)
            with self._lock:
                self._pending.remove(pending)
                self.queued_bytes -= pending.nbytes
            pending.on_device, pending.done = None, True

    def _block_groups(self, pending: PendingSegment) -> Iterator[Group]:
        """Yield the KV cache groups of a segment, and note why it is refused, if it is."""
        try:
            groups = pending.block_groups()
            while (blocks := next(groups, None)) is not None:
                self._step()
                yield blocks
                if self._short or self.queued_device_bytes > self._most_on_devices:
                    if pending.on_device is not None:
                        groups, pending.block_groups = iter(_kept(groups)), partial(iter, ())
                        pending.on_device = None
                    self._relieve()
            if reason := pending.objection():
                raise KVRefusedError(reason)
        except KVRefusedError as error:
            pending.refusal = str(error)
            raise


def _kept(groups: Iterator[Group]) -> list[Group]:
    """Copy packed KV cache groups, since each item is only valid until the next one is requested."""
    return [
        PackedBlocks(group.blocks.clone(), group.lin64) if isinstance(group, PackedBlocks) else group
        for group in groups
    ]


def _end_with_the_interpreter(actions: queue.SimpleQueue[Any], ended: OneShotEvent, pid: int) -> None:
    """Wait for an unfinished writer when the interpreter exits, except in a forked child."""
    if os.getpid() == pid and not ended.is_set:
        actions.put(None)
        ended.wait()
