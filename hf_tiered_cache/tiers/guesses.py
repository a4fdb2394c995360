"""Decides whether to fetch ahead speculatively, by the hit rate so far."""

from __future__ import annotations

from collections.abc import Hashable

_LEAST = 0.25
"""Minimum hit rate; below it speculative reads cost more than they save."""
_WEIGHT = 0.25
"""Of the last time in the moving average."""


class Guesses:
    """A moving average for each kind of guess. It learns also from those that were not acted upon."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, float] = {}

    def note(self, kind: Hashable, share: float) -> None:
        """This share of what was wanted would have been guessed."""
        known = self._shares.get(kind)
        self._shares[kind] = share if known is None else (1 - _WEIGHT) * known + _WEIGHT * share

    def worth(self, kind: Hashable) -> bool:
        """Whether to act upon such a guess; the first time, yes."""
        return self._shares.get(kind, 1.0) >= _LEAST
