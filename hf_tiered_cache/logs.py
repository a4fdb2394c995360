"""How this library's log lines look where the program has not configured logging."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOGGER = logging.getLogger("hf_tiered_cache")
LINE_FORMAT = "[hf_tiered_cache] %(message)s"
"""As transformers marks its own lines: `[transformers] ...`."""


class StandaloneHandler(logging.StreamHandler):
    """A handler that prints to standard error, unless another handler gets the record."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(LINE_FORMAT))

    @property
    def stream(self) -> TextIO:
        """Standard error, as it is now: programs and notebooks replace it."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore what the base class sets."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record. Formats that the program chose itself come first."""
        others = [handler for handler in LOGGER.handlers if handler is not self]
        if not others and not (LOGGER.propagate and logging.getLogger().handlers):
            super().emit(record)


def mark_lines() -> None:
    """Give the library's logger its handler; once, however often it is called."""
    if not any(isinstance(handler, StandaloneHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(StandaloneHandler())
