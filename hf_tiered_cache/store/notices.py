"""Log lines: their format if the program has not configured logging, and warnings logged once per topic."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOGGER = logging.getLogger("hf_tiered_cache")
LINE_FORMAT = "[hf_tiered_cache] %(message)s"
"""Format in the style of transformers: `[transformers] ...`."""


class StandaloneHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that prints to standard error, unless another handler gets the record."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(LINE_FORMAT))

    @property
    def stream(self) -> TextIO:
        """Current standard error stream, which programs and notebooks may replace."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream that the base class sets."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless a handler that the program configured gets it."""
        other_handlers = [handler for handler in LOGGER.handlers if handler is not self]
        if not other_handlers and not (LOGGER.propagate and logging.getLogger().handlers):
            super().emit(record)


def mark_lines() -> None:
    """Add the library's handler to its logger. Further calls have no effect."""
    if not any(isinstance(handler, StandaloneHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(StandaloneHandler())


logger = logging.getLogger("hf_tiered_cache")


class Notices:
    """Logger of warnings, once per topic. Occurrences are counted elsewhere."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, topic: str, message: str) -> None:
        """Log a warning, unless a warning on this topic was logged before."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("%s", message)
