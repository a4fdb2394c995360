"""Threads for calls that may hang, state of the process, and protection of state changes from Ctrl-C.

Python may raise KeyboardInterrupt between any two instructions of the main thread.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from operator import methodcaller
from typing import Any, Generic, TypeVar

_POLL_SECONDS = 0.005
_FORK_SECONDS = 10.0  # longest time that a fork waits for a lock of `fork_lock`
_T = TypeVar("_T")


class PerProcess(Generic[_T]):
    """Object that all stores of a process share, with its lock. A forked child gets another one.

    That of the parent is kept, so that the child does not close its parent's files.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make, self._by_pid = make, dict[int, tuple[threading.RLock, _T]]()

    def _own(self) -> tuple[threading.RLock, _T]:
        own = self._by_pid.get(os.getpid())
        return own or self._by_pid.setdefault(os.getpid(), (threading.RLock(), self._make()))  # atomic

    def get(self) -> _T:
        """Return the object of this process without its lock."""
        return self._own()[1]

    @contextmanager
    def locked(self) -> Iterator[_T]:
        """Yield the object of this process, and hold its lock. Finalizers may do so, too."""
        lock, own = self._own()
        with lock:
            yield own


def fork_lock() -> threading.RLock:
    """Return a lock that a fork of the process waits for.

    If a child is forked while another thread holds a lock in memory, it is never released in the child. SQLite holds
    such locks during its calls.
    """
    lock = threading.RLock()
    _fork_locks[id(lock)] = lock
    return lock


class _Taken(threading.local):
    """Locks that the thread has taken to fork."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []


_fork_locks: weakref.WeakValueDictionary[int, threading.RLock] = weakref.WeakValueDictionary()
_taken = _Taken()


def _before_fork() -> None:
    alive = [lock for reference in _fork_locks.valuerefs() if (lock := reference()) is not None]
    alive.sort(key=id)  # threads that fork at once must not wait for each other
    # in C: an interrupt leaves no lock taken
    _taken.locks.extend(compress(alive, map(methodcaller("acquire", True, _FORK_SECONDS), alive)))


def _after_fork() -> None:
    while _taken.locks:
        _taken.locks.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class DaemonPool:
    """Pool of threads, like `ThreadPoolExecutor`, that ends with the process, whatever its threads wait for."""

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
        futures = []
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while (item := self._queue.get_nowait()) is not None:
                    futures.append(item[0])
            for _ in self._threads:
                self._queue.put(None)
        for future in futures:  # without the lock, since their callbacks may use the pool
            future.cancel()
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


class Progress:
    """Steps of a worker, by which threads that wait for it see that it is not stuck."""

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> None:
        """Record a step: waiting threads continue to wait."""
        self._steps += 1

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition` holds, or no step is recorded for some seconds. Returns whether it holds.

        Polls without a lock, since an interrupt could leave a lock acquired.
        """
        steps_seen, deadline, nap = self._steps, time.monotonic() + seconds, 0.0002
        while not condition():
            time.sleep(nap)
            nap = min(2 * nap, _POLL_SECONDS)
            if self._steps != steps_seen:
                steps_seen, deadline = self._steps, time.monotonic() + seconds
            elif time.monotonic() >= deadline:
                return condition()
        return True


class OneShotEvent:
    """Event that is set once, with an error if there was one.

    `threading.Event` and `Future` acquire their lock in Python code. An interrupt at that point leaves the lock held
    forever, and the thread that sets the event hangs. A plain lock is acquired and released in one step.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.error: BaseException | None = None
        self.is_set = False

    def set(self, error: BaseException | None = None) -> None:
        """Release all waiting threads. Call this once, from one thread."""
        self.error = error
        self.is_set = True
        self._gate.release()

    def wait(self) -> None:
        """Block until the event is set, and raise its error, if any."""
        with self._gate:
            pass
        if self.error is not None:
            raise self.error


Action = Callable[[], None]


class RepairGuard:
    """Context manager around a change of state: before the next one, an incomplete change is repaired.

    An error or interrupt may leave a change incomplete; the next entry then calls `repair` first. It takes no lock: an
    interrupt in these Python methods would leave the lock taken.
    """

    def __init__(self, repair: Action) -> None:
        self._repair = weakref.WeakMethod(repair)
        self.broken = False

    def __enter__(self) -> None:
        if self.broken and (repair := self._repair()) is not None:
            repair()
        self.broken = True

    def __exit__(self, error: object, *_: object) -> None:
        self.broken = error is not None


class Worker:
    """Thread that runs short actions while this object lives. Signals interrupt only the main thread."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        worker_ref = weakref.ref(self, partial(self._actions.put, None))  # C code only: signals cannot interrupt it
        # not `Thread.start`: it waits in Python until the thread runs, and may hang the thread if interrupted
        _thread.start_new_thread(_do_all, (self._actions, worker_ref))

    def do(self, action: Action) -> None:
        """Queue an action. This is atomic with respect to interrupts."""
        self._actions.put(action)


def _do_all(actions: queue.SimpleQueue[Action | None], worker: weakref.ref[Worker]) -> None:
    """Run actions until None. `worker` puts None into the queue when its object is deleted, if kept alive here."""
    while (action := actions.get()) is not None:
        action()
        action = None  # drop the reference while waiting
