"""Least-frequently-used (LFU) eviction."""

from __future__ import annotations

import numpy as np

from .policy import EvictionPolicy, Usage


class LFU(EvictionPolicy):
    """Eviction of the blocks with the fewest requests; ties are broken by least recent use."""

    def score(self, usage: Usage) -> np.ndarray:
        return (usage.uses << 32) + usage.last_used
