"""Protection of state changes from Ctrl-C, which Python may raise between any two instructions of the main thread."""

from __future__ import annotations

import _thread
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial


class Latch:
    """One-shot event that `open` sets, with an error if there was one.

    `threading.Event` and `Future` acquire their lock in Python code. An interrupt at that point leaves the lock held
    forever, and the thread that sets the event hangs. A plain lock is acquired and released in one step.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.error: BaseException | None = None
        self.is_open = False

    def open(self, error: BaseException | None = None) -> None:
        """Release all waiting threads. Call this once, from one thread."""
        self.error = error
        self.is_open = True
        self._gate.release()

    def wait(self) -> None:
        """Block until the latch is open, and raise its error, if any."""
        with self._gate:
            pass
        if self.error is not None:
            raise self.error


Action = Callable[[], None]


class Step:
    """Repair guard: a context manager around a change of state.

    If an error or interrupt leaves a change incomplete, the next entry calls `mend` first. The guard takes no lock: an
    interrupt in these Python methods would leave the lock taken.
    """

    def __init__(self, mend: Action) -> None:
        self._mend = weakref.WeakMethod(mend)
        self.broken = False

    def __enter__(self) -> None:
        if self.broken and (mend := self._mend()) is not None:
            mend()
        self.broken = True

    def __exit__(self, error: object, *_: object) -> None:
        self.broken = error is not None


class Apart:
    """Worker thread that runs short actions one after another; signals interrupt only the main thread.

    The thread ends when this object is deleted.
    """

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        worker_ref = weakref.ref(self, partial(self._actions.put, None))  # C code only: signals cannot interrupt it
        # not `Thread.start`: it waits in Python until the thread runs, and may hang the thread if interrupted
        _thread.start_new_thread(_do_all, (self._actions, worker_ref))

    def do(self, action: Action) -> None:
        """Queue an action. This is atomic with respect to interrupts."""
        self._actions.put(action)


def _do_all(actions: queue.SimpleQueue[Action | None], gone: weakref.ref[Apart]) -> None:
    """Run actions until the worker object is deleted.

    Args:
        actions: queue of actions; None ends the loop.
        gone: weak reference that puts None into the queue. This argument keeps it alive.
    """
    while (action := actions.get()) is not None:
        action()
        action = None  # drop the reference while waiting
