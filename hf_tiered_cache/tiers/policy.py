"""Eviction policies: scores for buffer slots, by the usage of their blocks and not by tensors.

`lru` and `lfu` are least recently and least frequently used. `attention` keeps blocks that often get much attention
(ContiguousKV, Section 4.4).
"""

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


class LRU(EvictionPolicy):
    """Eviction of the least recently used blocks."""

    def score(self, usage: Usage) -> np.ndarray:
        return usage.last_used


class LFU(EvictionPolicy):
    """Eviction of the blocks with the fewest requests; ties are broken by least recent use."""

    def score(self, usage: Usage) -> np.ndarray:
        return (usage.uses << 32) + usage.last_used


class AttentionGuided(EvictionPolicy):
    """Eviction by the score S = I · F: the total attention to a block times how often it was selected.

    The blocks with the lowest scores are evicted first; ties are broken by least recent use. If no slot is free, a
    block that arrives from disk or from a faster tier is kept only if a block in the tier ranks lower.
    """

    def score(self, usage: Usage) -> np.ndarray:
        return usage.importance * usage.accesses

    def victims(self, usage: Usage, count: int) -> np.ndarray:
        return np.lexsort((usage.last_used, self.score(usage)))[:count]

    def keeps(self, arriving: Usage, resident: Usage, free: int) -> np.ndarray:
        score, resident_score = self.score(arriving), self.score(resident)
        order = np.lexsort((arriving.last_used, score))[::-1]  # best first
        lowest = np.lexsort((resident.last_used, resident_score))[: max(0, len(order) - free)]
        mask = np.zeros(len(order), bool)
        mask[order[:free]] = True
        rivals = order[free : free + len(lowest)]
        is_newer = arriving.last_used[rivals] > resident.last_used[lowest]
        mask[rivals] = (score[rivals] > resident_score[lowest]) | ((score[rivals] == resident_score[lowest]) & is_newer)
        return mask


class ImportanceGuided(AttentionGuided):
    """Attention-guided eviction with another importance I (IMPRESS, Section 4.3).

    I is a moving average of the selected share of a block's tokens, in place of the attention.
    """

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        return np.where(accesses == 0, share, 0.5 * importance + 0.5 * share)
