"""Decision whether to prefetch speculatively, based on how much the hit rate so far exceeds chance."""

from __future__ import annotations

from collections.abc import Hashable

_LEAST = 0.25
"""Minimum gain over chance; below it, speculative reads cost more than they save."""
_WEIGHT = 0.25
"""Weight of the latest gain in the moving average."""


class Guesses:
    """Moving average of the gain over chance, for each kind of speculation.

    Speculations that were not carried out are noted, too. The gain is 0 if the hit rate equals that of a random guess
    of the same size, and 1 if all guesses are hits.
    """

    def __init__(self) -> None:
        self._gains: dict[Hashable, float] = {}

    def note(self, kind: Hashable, share: float, chance: float) -> None:
        """Note a speculation with the hit rate `share`, where random guesses would have the hit rate `chance`."""
        gain = (share - chance) / (1 - chance) if chance < 1 else 0.0
        known = self._gains.get(kind)
        self._gains[kind] = gain if known is None else (1 - _WEIGHT) * known + _WEIGHT * gain

    def worth(self, kind: Hashable) -> bool:
        """Return whether to speculate; True for a kind that was never noted."""
        return self._gains.get(kind, 1.0) >= _LEAST
