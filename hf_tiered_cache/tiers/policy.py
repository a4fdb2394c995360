"""The eviction policy interface: scores slots by what is known of their blocks. It knows no tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Usage:
    """What is known of some slots, as arrays of one length."""

    last_used: np.ndarray
    """int64, the tier's clock at the last use; the clock ticks once a fetch and stays below 2^32."""
    uses: np.ndarray
    """int64, how often the block was asked for since it came in."""
    importance: np.ndarray
    """float64, what `learn` has made of what selectors told of the block's chunk."""
    accesses: np.ndarray
    """float64, how often a selector ever chose it."""


class EvictionPolicy(ABC):
    """Says which blocks go first."""

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        """The importance of chunks that a selector has chosen. Its sum over time, unless said otherwise.

        Args:
            importance: of each chunk so far.
            accesses: how often each was chosen before.
            mass: what attention each gets this time.
            share: which part of its tokens was chosen.
        """
        return importance + mass

    @abstractmethod
    def score(self, usage: Usage) -> np.ndarray:
        """A number for each slot; the lowest go first."""

    def victims(self, usage: Usage, count: int) -> np.ndarray:
        """Indices of the `count` slots that score lowest, in no order."""
        score = self.score(usage)
        if count >= len(score):
            return np.arange(len(score))
        return np.argpartition(score, count)[:count] if count else np.empty(0, np.intp)

    def keeps(self, arriving: Usage, resident: Usage, free: int) -> np.ndarray:
        """Which blocks that come to this tier, from disk or from a faster one that gives them up, stay in it: bool.

        Args:
            arriving: those blocks.
            resident: the blocks here that could go in their place.
            free: slots that nobody needs to leave.
        """
        return np.ones(len(arriving.last_used), bool)
