"""Eviction policy interface: scores for buffer slots, based on the usage of their blocks and not on tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Usage:
    """Usage of the blocks in some slots, as arrays of one length."""

    last_used: np.ndarray
    """Clock of the tier at the last use, int64. The clock ticks once per fetch and stays below 2^32."""
    uses: np.ndarray
    """Number of requests for the block since it was inserted, int64."""
    importance: np.ndarray
    """Importance of the chunk as computed by `learn` from selector reports, float64."""
    accesses: np.ndarray
    """Number of times that selectors chose the chunk, float64."""


class EvictionPolicy(ABC):
    """Base class of eviction policies."""

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return the new importance of chunks that a selector chose. The default is the sum of the attention.

        Args:
            importance: importance of each chunk so far.
            accesses: how often each chunk was chosen before.
            mass: attention to each chunk in this selection.
            share: fraction of each chunk's tokens that was chosen.
        """
        return importance + mass

    @abstractmethod
    def score(self, usage: Usage) -> np.ndarray:
        """Return a score for each slot. The lowest scores are evicted first."""

    def victims(self, usage: Usage, count: int) -> np.ndarray:
        """Return the indices of the `count` slots with the lowest scores, in any order."""
        score = self.score(usage)
        if count >= len(score):
            return np.arange(len(score))
        return np.argpartition(score, count)[:count] if count else np.empty(0, np.intp)

    def keeps(self, arriving: Usage, resident: Usage, free: int) -> np.ndarray:
        """Return a bool mask of the arriving blocks that the tier keeps.

        Args:
            arriving: usage of blocks that arrive from disk, or are evicted from a faster tier.
            resident: usage of the evictable blocks in the tier.
            free: number of free slots.
        """
        return np.ones(len(arriving.last_used), bool)
