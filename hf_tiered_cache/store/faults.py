"""Faults: their causes, the figures that count them, and log lines, which are written once per topic."""

from __future__ import annotations

import copy
import errno
import logging
import sys
import threading

from ..errors import FormatError, IntegrityError, NotOursError, OtherKeyError
from ..stats import StoreStats

LOGGER = logging.getLogger("hf_tiered_cache")
LINE_FORMAT = "[hf_tiered_cache] %(message)s"
"""Format in the style of transformers: `[transformers] ...`."""


class StandaloneHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that prints to standard error, unless a handler that the program configured gets the record."""

    def emit(self, record: logging.LogRecord) -> None:
        other_handlers = [handler for handler in LOGGER.handlers if handler is not self]
        if not other_handlers and not (LOGGER.propagate and logging.getLogger().handlers):
            self.stream = sys.stderr  # programs and notebooks may replace it
            super().emit(record)


def mark_lines() -> None:
    """Add the library's handler to its logger. Further calls have no effect."""
    if not any(isinstance(handler, StandaloneHandler) for handler in LOGGER.handlers):
        handler = StandaloneHandler()
        handler.setFormatter(logging.Formatter(LINE_FORMAT))
        LOGGER.addHandler(handler)


class Notices:
    """Logger of warnings, once per topic. Occurrences are counted elsewhere."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, topic: str, message: str, error: Exception | None = None) -> None:
        """Log a warning, with the traceback of an error, unless a warning on this topic was logged before."""
        if topic not in self._logged:
            self._logged.add(topic)
            LOGGER.warning("%s", message, exc_info=error)


class Counters(Notices):
    """Thread-safe collector of a `StoreStats`, which also logs the faults that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self._stats = StoreStats()
        self._lock = threading.RLock()  # reentrant: finalizers count, too

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            setattr(self._stats, name, getattr(self._stats, name) + amount)

    def note(self, figure: str, topic: str, message: str) -> None:
        """Count a fault in a figure of the statistics, and log it, unless a fault on this topic was logged before."""
        self.add(figure)
        self.warn(topic, message)

    def snapshot(self) -> StoreStats:
        with self._lock:
            return copy.deepcopy(self._stats)


def figure_of(error: BaseException) -> str:
    """Return the figure of the statistics that counts an error of a file."""
    if isinstance(error, NotOursError):
        return "other_key_files" if isinstance(error, OtherKeyError) else "newer_files"
    return "verification_failures" if isinstance(error, FormatError | IntegrityError) else "read_errors"


_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_OF_THE_PROCESS = _NO_DESCRIPTORS | {
    *(errno.ENOMEM, errno.ENOBUFS, errno.EINTR, errno.EAGAIN, errno.EACCES, errno.EPERM, errno.ETIMEDOUT),
    errno.EFAULT,  # the destination memory is at fault
}


def out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error means that no file descriptors are left."""
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS


def is_of_the_process(error: BaseException) -> bool:
    """Return whether an error comes from this process or is temporary, and says nothing about the file to be read."""
    if isinstance(error, OSError):
        return error.errno in _OF_THE_PROCESS
    return isinstance(error, MemoryError | RuntimeError)
