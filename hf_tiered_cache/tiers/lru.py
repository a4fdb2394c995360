"""Least recently used."""

from __future__ import annotations

import numpy as np

from .policy import EvictionPolicy, Usage


class LRU(EvictionPolicy):
    """What was used longest ago goes first."""

    def score(self, usage: Usage) -> np.ndarray:
        return usage.last_used
