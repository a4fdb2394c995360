"""Least frequently used."""

from __future__ import annotations

import numpy as np

from .policy import EvictionPolicy, Usage


class LFU(EvictionPolicy):
    """What was asked for least often goes first; of equals, what was used longest ago."""

    def score(self, usage: Usage) -> np.ndarray:
        return (usage.uses << 32) + usage.last_used
