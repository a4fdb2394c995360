"""Warnings of a store, logged once per topic."""

from __future__ import annotations

import logging

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
