"""Waiting for one thing to happen, safely also where Ctrl-C may come at any moment."""

from __future__ import annotations

import threading


class Latch:
    """Closed until `open`, which says what went wrong, if anything did.

    `threading.Event` and `Future` take their lock in Python code: an interrupt just then leaves it taken for ever, and
    whoever opens them hangs. A lock by itself is taken and given back in one step.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.error: BaseException | None = None
        self.is_open = False

    def open(self, error: BaseException | None = None) -> None:
        """Let everybody through. To be called by one thread, once."""
        self.error = error
        self.is_open = True
        self._gate.release()

    def wait(self) -> None:
        """Wait until it is open; raises what went wrong."""
        with self._gate:
            pass
        if self.error is not None:
            raise self.error
