"""The writer thread: segments are packed, written and published behind the request that computed them."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ..errors import ModelChangedError, StoreBusyError, StoreClosedError
from ..latch import Latch
from .digest import Group, PackedBlocks
from .disk import SegmentStore
from .format import SegmentHeader
from .publish import Written

logger = logging.getLogger("hf_tiered_cache")

_PATIENCE_SECONDS = 10.0
"""How long a request waits for a writer that gets nothing done."""
_MOST_PATIENCE_SECONDS = 60.0
"""The same for `flush` and `close`."""
_POLL_SECONDS = 0.005


@dataclass(frozen=True, eq=False)
class KeptOnDevice:
    """Memory of GPUs that pending segments keep alive, together: the rows of a batch lie in the same tensors."""

    nbytes: int


@dataclass(eq=False)
class PendingSegment:
    """A segment that is still to be written.

    Args:
        block_groups: packs one block group after the other, when the writer asks for it; each is good until the next.
        ancestors: segments it continues.
        refused: is called if there turns out to be no room for it.
        written: is told of each block group.
        on_device: what it keeps alive, if its KV lies on a GPU.
        confirmed: is asked before the segment becomes visible, whether its KV is what its name says.
    """

    header: SegmentHeader
    prefix_hashes: list[bytes]
    block_groups: Callable[[], Iterator[Group]]
    ancestors: tuple[str, ...] = ()
    refused: Callable[[], None] = lambda: None
    written: Written = lambda block_group, blocks, content: None
    on_device: KeptOnDevice | None = None
    confirmed: Callable[[], bool] = lambda: True
    done: Latch = field(default_factory=Latch)

    @property
    def nbytes(self) -> int:
        """Memory that its KV takes while it waits: as the model computed it, or as it is laid out, if that is more."""
        shape = self.header.shape
        return max(shape.blocks_bytes, shape.tokens * shape.layout.bytes_per_token)


Action = Callable[[], object]


class Writer:
    """Writes pending segments one after the other, in a thread of its own.

    Args:
        store: where they go.
        queue_bytes: of segments that may wait. When there are more, `submit` waits, as long as something gets done;
            what cannot wait, and has no room, is dropped. A segment that is larger waits for an empty queue.
        device_bytes: of these in the memory of GPUs. Where more is wanted, what waits is brought down to the host,
            before the next block group is written.
        seal: is called when the writer is to end, to queue what is left; again until it does not return False.
        close: is called when all is written.
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
        # finalizers put things in at any moment and in any thread: this queue may be entered again
        self._queue: queue.SimpleQueue[PendingSegment | Action | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._queue_bytes = queue_bytes
        self._waiting_bytes = 0
        self._most_on_devices, self._on_devices = device_bytes, Counter[KeptOnDevice]()
        self._waiting: list[PendingSegment] = []  # in the order of the queue, without the one that is being written
        self._short = False  # whether somebody waits for memory of a GPU
        self._pending: dict[bytes, PendingSegment] = {}
        self._closed = False
        self._ended = Latch()
        self._steps = 0  # that the writer has done, so that who waits sees whether it is stuck
        self._stuck = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hf-tiered-writer", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, when it runs already
            self._queue.put(None)
            raise
        weakref.finalize(self._thread, _end_with_the_interpreter, self._queue, self._ended, self._pid)

    def submit(self, pending: PendingSegment, wait: bool = True) -> None:
        """Queue a segment. With `wait`, not before there is room in the queue; one that gets none is dropped.

        Raises:
            StoreClosedError: the writer was closed.
        """
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self._store.place} was opened before this process was forked; open it anew")
        while True:
            with self._lock:
                if self._closed:
                    raise StoreClosedError(f"{self._store.place} was closed")
                if self._has_room(pending):
                    self._pending[pending.prefix_hashes[0]] = pending
                    self._waiting_bytes += pending.nbytes
                    self._waiting.append(pending)
                    if pending.on_device is not None:
                        self._on_devices[pending.on_device] += 1
                    self._queue.put(pending)
                    return
                self._short = not self._has_device_room(pending)
            if self._short and self._is_here():
                self._relieve()
                wait = True  # which this thread does not: it looks once more
            if not wait or not self._wait(lambda: self._closed or self._has_room(pending)):
                break
        self._store.counters.add("dropped_writes")
        self._store.warn(
            "queue",
            f"a segment of {pending.nbytes} bytes was not stored: as much as queue_memory, or on a GPU "
            "queue_device_memory, allows was waiting to be written; raise it, or choose a faster disk",
        )
        pending.refused()

    @property
    def queued_bytes(self) -> int:
        """Of segments that are not written yet."""
        return self._waiting_bytes

    @property
    def queued_device_bytes(self) -> int:
        """What these keep alive in the memory of GPUs."""
        with self._lock:
            return sum(memory.nbytes for memory in self._on_devices)

    def _has_room(self, pending: PendingSegment) -> bool:
        fits = not self._waiting_bytes or self._waiting_bytes + pending.nbytes <= self._queue_bytes
        return fits and self._has_device_room(pending)

    def _has_device_room(self, pending: PendingSegment) -> bool:
        wanted, used = pending.on_device, self.queued_device_bytes
        return wanted is None or wanted in self._on_devices or not used or used + wanted.nbytes <= self._most_on_devices

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _relieve(self) -> None:
        """Bring what waits down from GPUs, in the writer's thread, where it is the one that has the time."""
        self._short = False
        for pending in list(self._waiting):
            if pending.on_device is not None:
                with suppress(Exception):  # it fails once more when its turn comes, and is counted then
                    pending.block_groups = partial(iter, _kept(pending.block_groups()))
                    self._leave_device(pending)
                self._progress()

    def _leave_device(self, pending: PendingSegment) -> None:
        """It keeps no memory of a GPU alive any more."""
        with self._lock:
            memory, pending.on_device = pending.on_device, None
            if memory is not None:
                self._on_devices[memory] -= 1
                self._on_devices += Counter()  # without those that nobody has

    def later(self, action: Action) -> bool:
        """Run something small behind what is queued. Returns whether it will be."""
        with self._lock:
            if not self._closed:
                self._queue.put(action)
            return not self._closed

    def soon(self, action: Action) -> None:
        """The same for finalizers: without a lock. What returns False is run again."""
        if not self._closed and os.getpid() == self._pid:
            self._queue.put(action)

    def wait_for(self, prefix_hashes: Iterable[bytes]) -> None:
        """Wait until queued segments that begin with one of `prefix_hashes` are stored, unless the writer is stuck."""
        with self._lock:
            pending_segments = [
                self._pending[prefix_hash] for prefix_hash in prefix_hashes if prefix_hash in self._pending
            ]
        if pending_segments and not self._wait(lambda: all(pending.done.is_open for pending in pending_segments)):
            self._store.warn("stuck", "nothing gets written; requests go on without what waits for it")

    def flush(self) -> None:
        """Wait until everything queued so far is written, and make it durable.

        Raises:
            StoreBusyError: nothing gets written.
        """
        written = Latch()
        if self.later(written.open) and not self._wait(
            lambda: written.is_open or self._ended.is_open, _MOST_PATIENCE_SECONDS
        ):
            raise StoreBusyError(f"nothing gets written to {self._store.place}; check the disk and call flush() again")
        self._store.sync()

    def end(self) -> None:
        """Let the thread write what is queued, close what is to be closed, and end. Finalizers may ask for it."""
        if os.getpid() == self._pid:
            self._queue.put(None)

    def close(self) -> None:
        """End, and wait for it; a thread that is stuck is left behind."""
        self.end()
        if os.getpid() == self._pid and not self._wait(lambda: self._ended.is_open, _MOST_PATIENCE_SECONDS):
            logger.warning("%s was closed, and what was still to be written is lost: the disk hangs", self._store.place)

    def _wait(self, condition: Callable[[], bool], patience: float | None = None) -> bool:
        """Wait until `condition` holds, or nothing has been done for so many seconds.

        Once in vain, requests do not wait at all until something is done again. It sleeps without a lock, which an
        interrupt could leave taken.

        Returns:
            Whether the condition holds.
        """
        if os.getpid() != self._pid or self._is_here():
            return condition()
        if self._stuck and patience is None:
            return condition()
        seconds, nap = _PATIENCE_SECONDS if patience is None else patience, 0.0002
        seen, deadline = self._steps, time.monotonic() + seconds
        while not condition():
            time.sleep(nap)
            nap = min(2 * nap, _POLL_SECONDS)
            if self._steps != seen:
                seen, deadline = self._steps, time.monotonic() + seconds
            elif time.monotonic() >= deadline:
                self._stuck = True
                return condition()
        return True

    def _progress(self) -> None:
        """Something has been done: who waits may go on waiting."""
        self._steps += 1
        self._stuck = False

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._do(item)
                item = None  # frees the KV before waiting for the next segment
            while self._seal() is False:
                self._drain()
            with self._lock:
                self._closed = True
            self._drain()
            self._close()
        except Exception:
            logger.exception("the store %s was not closed properly", self._store.place)
        finally:
            self._closed = True
            self._ended.open()

    def _drain(self) -> None:
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                self._do(item)

    def _do(self, item: PendingSegment | Action) -> None:
        try:
            if isinstance(item, PendingSegment):
                self._write(item)
            elif item() is False:  # the other thread that is at it may be waiting for room
                time.sleep(0.001)
                self._queue.put(item)
            self._progress()
        except Exception:
            self._store.counters.add("dropped_writes")
            logger.exception("a segment was not stored")

    def _write(self, pending: PendingSegment) -> None:
        stored = False
        with self._lock:
            self._waiting.remove(pending)
        try:
            block_groups = self._block_groups(pending)
            stored = self._store.publish(
                pending.header, pending.prefix_hashes, block_groups, pending.ancestors, pending.written
            )
        finally:
            if not stored:
                pending.refused()
            with self._lock:
                if self._pending.get(pending.prefix_hashes[0]) is pending:
                    del self._pending[pending.prefix_hashes[0]]
                self._waiting_bytes -= pending.nbytes
            self._leave_device(pending)
            pending.done.open()

    def _block_groups(self, pending: PendingSegment) -> Iterator[Group]:
        groups = pending.block_groups()
        while (blocks := next(groups, None)) is not None:
            self._progress()
            yield blocks
            if self._short or self.queued_device_bytes > self._most_on_devices:
                if pending.on_device is not None:
                    groups, pending.block_groups = iter(_kept(groups)), partial(iter, ())
                    self._leave_device(pending)
                self._relieve()
        if not pending.confirmed():
            raise ModelChangedError("the model's weights have changed since its KV was computed")


def _kept(groups: Iterator[Group]) -> list[Group]:
    """Block groups in memory of their own, of which each would be good until the next."""
    return [
        PackedBlocks(group.blocks.clone(), group.lin64) if isinstance(group, PackedBlocks) else group
        for group in groups
    ]


def _end_with_the_interpreter(actions: queue.SimpleQueue, ended: Latch, pid: int) -> None:
    """A writer that still has something to write when the interpreter ends is waited for, but not in a forked child."""
    if os.getpid() == pid and not ended.is_open:
        actions.put(None)
        ended.wait()
