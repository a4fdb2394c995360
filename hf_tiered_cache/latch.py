"""One-shot event that is safe if Ctrl-C arrives at any time."""

from __future__ import annotations

import threading


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
