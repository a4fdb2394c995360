"""Share of tokens to compute rather than load that is fastest on a machine (CacheTune, Section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LOWEST = 0.15
"""Lowest ratio; below it, quality suffers (Section 5.2)."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Costs:
    """Cost of a token in one layer, in seconds.

    Args:
        compute: t_c, to compute it.
        load: t_i, to load its KV from its tier.
        overhead: t_o, fixed cost of a layer.
    """

    compute: float
    load: float
    overhead: float

    @property
    def balanced(self) -> float:
        """Ratio r0 = t_i / (t_c + t_i), at which computing and loading take equally long (Equation 11)."""
        return self.load / (self.compute + self.load)

    def layer_seconds(self, ratio: float, tokens: int) -> float:
        """Return the time of a layer if computing and loading overlap (Equation 9)."""
        return max(ratio * tokens * self.compute, (1 - ratio) * tokens * self.load) + self.overhead


def fastest_ratio(
    seconds: Callable[[float], float], warm: float, low: float = LOWEST, high: float = 1.0, width: float = 0.01
) -> float:
    """Return the ratio with the least `seconds`, to within `width`, if `seconds` falls and then rises.

    A golden-section search. The paper's Algorithm 1 takes the warm value for one of its two probes, which then do not
    divide the interval as the search needs them to. Here the warm value and one probe narrow the interval first, and
    then both probes are chosen again.

    Args:
        seconds: Function to minimize; called at most 14 times at the default width.
        warm: Expected minimum.
        low: Lowest ratio.
        high: Highest ratio.
        width: Width of the final interval.
    """
    known: dict[float, float] = {}

    def at(ratio: float) -> float:
        if ratio not in known:
            known[ratio] = seconds(ratio)
        return known[ratio]

    warm = min(max(warm, low), high)
    other = warm + (1 - _GOLDEN) * (high - warm) if high - warm > warm - low else warm - (1 - _GOLDEN) * (warm - low)
    left, right = sorted((warm, other))
    if at(left) <= at(right):
        high = right
    else:
        low = left
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    while high - low > width:
        if at(left) <= at(right):
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
    return min(known, key=known.__getitem__)


def narrowed_shares(mean: float, widen: float, wide_layers: int, layers: int) -> tuple[float, float]:
    """Return the shares of tokens to compute in the first layers and in the others, at a ratio of `widen`.

    Args:
        mean: Mean share over all layers. If the first layers compute everything, the others get the rest.
        widen: Ratio of the two shares, at least 1.
        wide_layers: Number of first layers, less than `layers`.
        layers: Number of layers of the model.
    """
    few = mean * layers / ((widen - 1) * wide_layers + layers)
    if widen * few <= 1:
        return widen * few, few
    return 1.0, max(0.0, (mean * layers - wide_layers) / (layers - wide_layers))
