"""Attention-guided: what queries paid attention to, and often, stays (ContiguousKV, Section 4.4)."""

from __future__ import annotations

import numpy as np

from .policy import EvictionPolicy, Usage


class AttentionGuided(EvictionPolicy):
    """A block's score is S = I · F: the attention it ever got times how often it was chosen. The lowest go first.

    Of equals, what was used longest ago goes first. What arrives, from disk or from a faster tier, stays only if
    something that is there stands lower.
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
    """The same with the chosen share of a block's tokens, as a moving average, in place of attention (IMPRESS, 4.3)."""

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        return np.where(accesses == 0, share, 0.5 * importance + 0.5 * share)
