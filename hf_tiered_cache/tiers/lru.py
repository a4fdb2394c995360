"""Least-recently-used (LRU) eviction."""

from __future__ import annotations

import numpy as np

from .policy import EvictionPolicy, Usage


class LRU(EvictionPolicy):
    """Eviction of the least recently used blocks."""

    def score(self, usage: Usage) -> np.ndarray:
        return usage.last_used
