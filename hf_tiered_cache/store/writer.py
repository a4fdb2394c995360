"""The writer thread: segments are packed, written and published behind the request that computed them."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..errors import StoreBusyError, StoreClosedError
from .disk import SegmentStore
from .format import SegmentHeader

logger = logging.getLogger("hf_tiered_cache")

_PATIENCE_SECONDS = 10.0
"""How long a request waits for a writer that gets nothing done: its disk, or a lock, may be stuck for ever."""
_MOST_PATIENCE_SECONDS = 60.0
"""The same for `flush` and `close`, which are asked to lose nothing."""


@dataclass
class Draft:
    """A segment that is still to be written.

    Args:
        lanes: packs one lane after the other, when the writer asks for it.
        ancestors: segments it continues.
        refused: is called if there turns out to be no room for it.
    """

    header: SegmentHeader
    links: list[bytes]
    lanes: Callable[[], Iterator[torch.Tensor]]
    ancestors: tuple[str, ...] = ()
    refused: Callable[[], None] = lambda: None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def nbytes(self) -> int:
        """Memory that its KV takes while it waits."""
        return self.header.shape.blocks_bytes


class Writer:
    """Writes drafts one after the other, in a thread of its own.

    Args:
        store: where they go.
        queue_bytes: of drafts that may wait. When there are more, `submit` waits, as long as something gets done;
            what cannot wait, and has no room, is dropped. A draft that is larger waits for an empty queue.
    """

    def __init__(self, store: SegmentStore, queue_bytes: int = 2 << 30) -> None:
        self._store = store
        # finalizers submit too, at any moment and in any thread: this queue and this lock may be entered again
        self._queue: queue.SimpleQueue[Draft | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Condition(threading.RLock())
        self._queue_bytes = queue_bytes
        self._waiting_bytes = 0
        self._pending: dict[bytes, Draft] = {}
        self._closed = self._ended = False
        self._steps = 0  # that the writer has done, so that who waits sees whether it is stuck
        self._stuck = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hf-tiered-writer", daemon=True)
        self._thread.start()

    def submit(self, draft: Draft, wait: bool = True) -> None:
        """Queue a segment. With `wait`, not before there is room in the queue; one that gets none is dropped.

        Raises:
            StoreClosedError: the writer was closed.
        """
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self._store.root} was opened before this process was forked")
        with self._lock:
            if wait:
                self._wait(lambda: self._has_room(draft))
            if self._closed:
                raise StoreClosedError(f"{self._store.root} was closed")
            if self._has_room(draft):
                self._pending[draft.links[0]] = draft
                self._waiting_bytes += draft.nbytes
                self._queue.put(draft)
                return
        self._store.counters.add("dropped_writes")
        self._store.warn(
            "queue",
            f"a segment of {draft.nbytes} bytes was not stored: as much as queue_memory allows was waiting to be "
            "written; raise it, or choose a faster disk",
        )
        draft.refused()

    def _has_room(self, draft: Draft) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + draft.nbytes <= self._queue_bytes

    def later(self, action: Callable[[], None]) -> None:
        """Run something small behind what is queued."""
        with self._lock:
            if not self._closed:
                self._queue.put(action)

    def wait_for(self, links: Iterable[bytes]) -> None:
        """Wait until the queued segments that begin with one of `links` are published, unless the writer is stuck."""
        with self._lock:
            drafts = [self._pending[link] for link in links if link in self._pending]
            if drafts and not self._wait(lambda: all(draft.done.is_set() for draft in drafts)):
                self._store.warn("stuck", "nothing gets written; requests go on without what waits for it")

    def flush(self) -> None:
        """Wait until everything queued so far is written, and make it durable.

        Raises:
            StoreBusyError: nothing gets written.
        """
        written = threading.Event()

        def note() -> None:
            written.set()
            self._progress()

        self.later(note)
        with self._lock:
            done = self._wait(lambda: written.is_set() or not self._thread.is_alive(), _MOST_PATIENCE_SECONDS)
        if not done:
            raise StoreBusyError(f"nothing gets written to {self._store.root}; check the disk and call flush() again")
        self._store.sync()

    def close(self) -> None:
        """Write what is queued and end the thread; one that is stuck is left behind."""
        if os.getpid() != self._pid:
            return  # the thread is the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
            self._lock.notify_all()
            mine = threading.current_thread() is self._thread
            ended = mine or self._wait(lambda: self._ended, _MOST_PATIENCE_SECONDS)
        if mine:  # a finalizer, in the writer's own thread: nobody else will write what is left
            self._run()
            self._queue.put(None)
        elif ended:
            self._thread.join()
        else:
            logger.warning("%s was closed, and what was still to be written is lost: the disk hangs", self._store.root)

    def _wait(self, condition: Callable[[], bool], patience: float | None = None) -> bool:
        """Wait, under the lock, until `condition` holds, or nothing has been done for so many seconds.

        Once in vain, requests do not wait at all until something is done again. Returns whether the condition holds.
        """
        if os.getpid() != self._pid or threading.current_thread() is self._thread:
            return condition()
        if self._stuck and patience is None:
            return condition()
        seconds = _PATIENCE_SECONDS if patience is None else patience
        seen, deadline = self._steps, time.monotonic() + seconds
        while not condition():
            self._lock.wait(max(0.0, deadline - time.monotonic()))
            if self._steps != seen:
                seen, deadline = self._steps, time.monotonic() + seconds
            elif time.monotonic() >= deadline:
                self._stuck = True
                return condition()
        return True

    def _progress(self) -> None:
        """Something has been done: who waits may go on waiting."""
        with self._lock:
            self._steps += 1
            self._stuck = False
            self._lock.notify_all()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(item) if isinstance(item, Draft) else item()
            except Exception:
                self._store.counters.add("dropped_writes")
                logger.exception("a segment was not stored")
            item = None  # frees the KV before waiting for the next draft
        self._ended = True
        self._progress()

    def _write(self, draft: Draft) -> None:
        stored = False
        try:
            stored = self._store.publish(draft.header, draft.links, self._lanes(draft), draft.ancestors)
        finally:
            if not stored:
                draft.refused()
            with self._lock:
                if self._pending.get(draft.links[0]) is draft:
                    del self._pending[draft.links[0]]
                self._waiting_bytes -= draft.nbytes
            draft.done.set()
            self._progress()

    def _lanes(self, draft: Draft) -> Iterator[torch.Tensor]:
        for blocks in draft.lanes():
            self._progress()
            yield blocks
