"""The writer thread: segments are packed, written and published behind the request that computed them."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..errors import StoreClosedError
from .disk import SegmentStore
from .format import SegmentHeader

logger = logging.getLogger("hf_tiered_cache")


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
        queue_bytes: of drafts that may wait. When there are more, `submit` waits: memory stays bounded, and nothing is
            lost. A draft that is larger waits for an empty queue.
    """

    def __init__(self, store: SegmentStore, queue_bytes: int = 2 << 30) -> None:
        self._store = store
        # finalizers submit too, at any moment and in any thread: this queue and this lock may be entered again
        self._queue: queue.SimpleQueue[Draft | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Condition(threading.RLock())
        self._queue_bytes = queue_bytes
        self._waiting_bytes = 0
        self._pending: dict[bytes, Draft] = {}
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hf-tiered-writer", daemon=True)
        self._thread.start()

    def submit(self, draft: Draft, wait: bool = True) -> None:
        """Queue a segment. With `wait`, not before there is room in the queue.

        Raises:
            StoreClosedError: the writer was closed.
        """
        with self._lock:
            while wait and self._waiting_bytes and self._waiting_bytes + draft.nbytes > self._queue_bytes:
                self._lock.wait()
            if self._closed or os.getpid() != self._pid:
                raise StoreClosedError(f"{self._store.root} was closed, or opened before this process was forked")
            self._pending[draft.links[0]] = draft
            self._waiting_bytes += draft.nbytes
            self._queue.put(draft)

    def later(self, action: Callable[[], None]) -> None:
        """Run something small behind what is queued."""
        with self._lock:
            if not self._closed:
                self._queue.put(action)

    def wait_for(self, links: Iterable[bytes]) -> None:
        """Wait until the queued segments that begin with one of `links` are published."""
        with self._lock:
            drafts = [self._pending[link] for link in links if link in self._pending]
        for draft in drafts:
            draft.done.wait()

    def flush(self) -> None:
        """Wait until everything queued so far is written, and make it durable."""
        written = threading.Event()
        self.later(written.set)
        if self._thread.is_alive():
            written.wait()
        self._store.sync()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(item) if isinstance(item, Draft) else item()
            except Exception:
                self._store.counters.add("dropped_writes")
                logger.exception("a segment was not stored")
            item = None  # frees the KV before waiting for the next draft

    def _write(self, draft: Draft) -> None:
        stored = False
        try:
            stored = self._store.publish(draft.header, draft.links, draft.lanes(), draft.ancestors)
        finally:
            if not stored:
                draft.refused()
            with self._lock:
                if self._pending.get(draft.links[0]) is draft:
                    del self._pending[draft.links[0]]
                self._waiting_bytes -= draft.nbytes
                self._lock.notify_all()
            draft.done.set()
