"""Computing a front of a stored prefix while its back is loaded: bubble-free restoration (Krul, Section 6).

Two streams work at once. Layer l computes the first n_l tokens of the prefix, beside the suffix, and loads the others.
What a layer computes needs its tokens' hidden states, so n_l never grows with depth: the early layers compute much and
load little, and while they do, the disk brings what the late ones load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..geometry import HASH_TOKENS

RATIOS = np.linspace(0, 1, 65)
"""The shares that `best_ratio` compares: nothing, ..., everything is computed."""

_WORTH = 0.95
"""What is computed beside loading must save so much of the time that the better of the two takes alone."""


def fronts(
    tokens: int,
    ratio: float | np.ndarray,
    layers: int,
    groups: Sequence[Sequence[int]] = (),
    step: int = HASH_TOKENS,
    flat: bool = False,
) -> np.ndarray:
    """For each layer how many tokens of a prefix it computes: n_l of Section 6.2.

    They fall evenly with depth, to nothing at the last layer or, above a ratio of one half, from all of them; their
    mean is `ratio * tokens`, but for rounding.

    Args:
        tokens: of the prefix.
        ratio: share of it to compute, between 0 and 1; or several, `[ratios]`.
        layers: of the model.
        groups: layers whose KV is loaded together, each ascending: they compute the same front, for what one of them
            loads comes for all. Those of different groups may take turns; then a front may be longer than the formula
            says.
        step: fronts are a multiple of this, or all of the prefix.
        flat: whether all layers compute the same front instead.

    Returns:
        int64 `[layers]`, or `[ratios, layers]`, never growing along the layers.
    """
    share = np.asarray(ratio, float)[..., None]
    depth = np.linspace(0, 1, layers) if layers > 1 and not flat else np.full(layers, 0.5)
    shares = np.where(share <= 0.5, 2 * share * (1 - depth), 1 - 2 * (1 - share) * depth)
    for group in groups:
        shares[..., list(group)] = shares[..., list(group)].mean(axis=-1, keepdims=True)
    shares = np.maximum.accumulate(shares[..., ::-1], axis=-1)[..., ::-1]  # a layer lacks what one before it drops
    rounded = (step * np.rint(shares * tokens / step)).astype(np.int64)
    return np.where(shares >= 1, tokens, np.minimum(rounded, tokens))


@dataclass(frozen=True)
class Load:
    """What some layers load together.

    Args:
        layers: which, ascending. The first one waits for it.
        ends: int64 `[blocks]`, ascending: the column behind the last token of each block.
        seconds: float `[blocks]`, that each takes to load.
    """

    layers: tuple[int, ...]
    ends: np.ndarray
    seconds: np.ndarray

    def behind(self, fronts: np.ndarray) -> np.ndarray:
        """How long it takes to load what lies behind fronts, int64 `[n]`: float `[n]`."""
        left = np.append(np.cumsum(self.seconds[::-1])[::-1], 0.0)  # [blocks + 1]: from each block on
        return left[np.searchsorted(self.ends, fronts, side="right")]


@dataclass(frozen=True)
class Streams:
    """What each of the two streams has to do for a prompt.

    Args:
        tokens: of the prefix.
        suffix: seconds that a layer takes for what stands behind it.
        compute: gives the seconds that a layer takes for fronts of so many tokens, `[n]` to `[n]`.
        restore: seconds that a layer takes for each token that it restores, once it is there.
        loads: in the order in which layers need them, which is that in which they are loaded, one after the other.
    """

    tokens: int
    suffix: float
    compute: Callable[[np.ndarray], np.ndarray]
    restore: float
    loads: tuple[Load, ...]

    def seconds(self, fronts: np.ndarray) -> np.ndarray:
        """How long the prompt takes, float `[n]`, with these fronts, int64 `[n, layers]`."""
        computed = self.suffix + self.compute(fronts) + self.restore * (self.tokens - fronts)  # [n, layers]
        done, loaded = np.zeros(len(fronts)), np.zeros(len(fronts))
        waiting = list(self.loads)
        for layer in range(fronts.shape[1]):
            while waiting and waiting[0].layers[0] == layer:
                load = waiting.pop(0)
                loaded = loaded + load.behind(fronts[:, load.layers[-1]])
                done = np.maximum(done, loaded)
            done = done + computed[:, layer]
        return done


def best_ratio(seconds: np.ndarray, may_compute_all: bool = True) -> float:
    """The ratio, one of `RATIOS`, with which a prompt is expected to be done first.

    Args:
        seconds: float `[ratios]`, that it takes with each.
        may_compute_all: whether nothing need be restored.

    Returns:
        0 or 1 where what lies between saves too little to be worth it.
    """
    alone = 1 if may_compute_all and seconds[-1] < seconds[0] else 0
    best = int(seconds[:-1].argmin())
    return float(RATIOS[best if seconds[best] < _WORTH * seconds[-alone] else -alone])
