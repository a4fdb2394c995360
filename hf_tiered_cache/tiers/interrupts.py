"""Protection of state changes from Ctrl-C, which Python may raise between any two instructions of the main thread."""

from __future__ import annotations

import _thread
import queue
import weakref
from collections.abc import Callable
from functools import partial

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
        gone = weakref.ref(self, partial(self._actions.put, None))  # C code only: signals cannot interrupt it
        # not `Thread.start`: it waits in Python until the thread runs, and may hang the thread if interrupted
        _thread.start_new_thread(_do_all, (self._actions, gone))

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
