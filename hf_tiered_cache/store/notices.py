"""Warnings of a store to its user: each one once, however often it happens."""

from __future__ import annotations

import logging

logger = logging.getLogger("hf_tiered_cache")


class Notices:
    """Says things the first time; how often they happen is counted elsewhere."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, topic: str, message: str) -> None:
        """Log a warning, unless one on this topic was logged before."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("%s", message)
