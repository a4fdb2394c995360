"""Makes changes safe from Ctrl-C, which Python raises in the main thread between any two of its instructions."""

from __future__ import annotations

import _thread
import queue
import weakref
from collections.abc import Callable
from functools import partial

Action = Callable[[], None]


class Step:
    """Within this, something is changed; an error or an interrupt on the way leaves it broken, and the next step mends.

    It takes no lock itself: an interrupt in these methods, which are Python, would leave the lock taken.
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
    """A thread that does one small thing after the other, since signals interrupt the main thread alone.

    It ends when this object is gone.
    """

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        gone = weakref.ref(self, partial(self._actions.put, None))  # all of it C code, which no signal interrupts
        # not `Thread.start`, which waits in Python for the thread to begin: interrupted, it may leave it hanging
        _thread.start_new_thread(_do_all, (self._actions, gone))

    def do(self, action: Action) -> None:
        """Do it soon. Either it is queued or it is not: an interrupt finds nothing in between."""
        self._actions.put(action)


def _do_all(actions: queue.SimpleQueue[Action | None], gone: weakref.ref[Apart]) -> None:
    """Until the object is gone: `gone`, which says so, is kept here."""
    while (action := actions.get()) is not None:
        action()
        action = None  # lets go of what it holds
