"""Attention-guided eviction: keep blocks that often get much attention (ContiguousKV, Section 4.4)."""

from __future__ import annotations

import numpy as np

from .policy import EvictionPolicy, Usage


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
        score, there = self.score(arriving), self.score(resident)
        order = np.lexsort((arriving.last_used, score))[::-1]  # best first
        lowest = np.lexsort((resident.last_used, there))[: max(0, len(order) - free)]
        kept = np.zeros(len(order), bool)
        kept[order[:free]] = True
        rivals = order[free : free + len(lowest)]
        later = arriving.last_used[rivals] > resident.last_used[lowest]
        kept[rivals] = (score[rivals] > there[lowest]) | ((score[rivals] == there[lowest]) & later)
        return kept


class ImportanceGuided(AttentionGuided):
    """Attention-guided eviction with another importance I (IMPRESS, Section 4.3).

    I is a moving average of the selected share of a block's tokens, in place of the attention.
    """

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        return np.where(accesses == 0, share, 0.5 * importance + 0.5 * share)
