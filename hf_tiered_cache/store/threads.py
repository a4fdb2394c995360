"""Threads for calls that may hang, such as those of a network client. A hanging call keeps no process alive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


class DaemonPool:
    """Pool of threads, like `ThreadPoolExecutor`, that ends with the process, whatever its threads wait for.

    Args:
        count: Maximum number of threads.
        name: Name of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run a call, and return its future. Raises RuntimeError if the pool was closed."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool was closed")
            self._queue.put((future, partial(call, *arguments)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self, seconds: float) -> None:
        """Drop the calls that have not begun, and wait up to `seconds` for the others."""
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while (item := self._queue.get_nowait()) is not None:
                    item[0].cancel()
            for _ in self._threads:
                self._queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call  # what they refer to
            self._idle.release()
