"""Decides whether to fetch ahead speculatively, by how much the hit rate so far beats chance."""

from __future__ import annotations

from collections.abc import Hashable

_LEAST = 0.25
"""Least gain over chance; below it speculative reads cost more than they save."""
_WEIGHT = 0.25
"""Of the last time in the moving average."""


class Guesses:
    """A moving average for each kind of guess. It learns also from those that were not acted upon.

    What is averaged is the gain over chance: 0 for a hit rate that any guess of that size has, 1 for hits only.
    """

    def __init__(self) -> None:
        self._gains: dict[Hashable, float] = {}

    def note(self, kind: Hashable, share: float, chance: float) -> None:
        """This share of what was wanted would have been guessed, and `chance` of it at random."""
        gain = (share - chance) / (1 - chance) if chance < 1 else 0.0
        known = self._gains.get(kind)
        self._gains[kind] = gain if known is None else (1 - _WEIGHT) * known + _WEIGHT * gain

    def worth(self, kind: Hashable) -> bool:
        """Whether to act upon such a guess; the first time, yes."""
        return self._gains.get(kind, 1.0) >= _LEAST
