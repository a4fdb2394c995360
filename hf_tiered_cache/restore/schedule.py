"""Layer-wise recompute schedule for a prefix that is loaded meanwhile: bubble-free restoration (Krul, Section 6).

Computing and loading overlap. Layer l computes the first n_l tokens of the prefix, in addition to the suffix, and loads
the others. A layer needs the hidden states of the tokens that it computes, so n_l never grows with depth: the early
layers compute much and load little, and meanwhile the disk reads what the late ones load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..store.geometry import HASH_TOKENS

RATIOS = np.linspace(0, 1, 65)
"""Recompute ratios to compare, from 0 (load everything) to 1 (compute everything)."""
STEEPNESS: tuple[float, ...] = (1, 3)
"""Degrees of steepness to compare. With 8 to 48 layers in the simulation of `test_bubbles_are_few`, the best of both
takes at most 2 % longer than without idle time. 1 stays, because attention makes many tokens in few layers costly in
long prompts."""

_WORTH = 0.85
"""Maximum expected time with overlap, as a share of the faster of loading and computing alone, for which it is used.

A pass that recomputes a prefix takes time that no cost contains. With 0.95, returns of SmolLM2's conversations from a
disk of 20 MB/s recomputed 6 % of the history, and took 1.09 times as long as a full load in int8
(`bench/conversation.py --host-share 0.1`, results of commit 1f1ba1ae). Schedules that saved time saved 26 % or more
(`bench/auto.py`).
"""


def recompute_lengths(
    tokens: int,
    ratio: float | np.ndarray,
    layers: int,
    groups: Sequence[Sequence[int]] = (),
    step: int = HASH_TOKENS,
    steepness: float = 1,
) -> np.ndarray:
    """Return the number of prefix tokens that each layer recomputes: n_l of Section 6.2.

    It falls linearly with depth: to 0 at the last layer or, for a ratio above one half, from all tokens at the first.
    The mean is `ratio * tokens`, except for rounding, to tokens and to layers.

    Args:
        tokens: Number of tokens of the prefix.
        ratio: Share of it to compute, between 0 and 1; or several, `[ratios]`.
        layers: Number of layers of the model.
        groups: Layers that load their KV together, ascending. They recompute the same tokens, because what one of them
            loads comes for all. Groups may interleave; a layer may then recompute more than the formula says.
        step: Results are a multiple of this, or the whole prefix.
        steepness: How fast the number falls: 1 over all layers, n over an n-th of them, and 0 not at all.

    Returns:
        int64 `[layers]`, or `[ratios, layers]`, never growing along the layers.
    """
    share, depth = np.asarray(ratio, float)[..., None], np.linspace(0, 1, layers)
    # above one half, the tokens that are not computed rise with depth as those of 1 - ratio fall
    low, along = np.minimum(share, 1 - share), np.where(share <= 0.5, depth, 1 - depth)
    peak = 2 * low * steepness
    falling = np.where(peak <= 1, peak * (1 - steepness * along), steepness * (low - along) + 0.5).clip(0, 1)
    shares = np.where(share <= 0.5, falling, 1 - falling)
    if not steepness or layers == 1:
        shares = np.repeat(share, layers, axis=-1)
    for group in groups:
        shares[..., list(group)] = shares[..., list(group)].mean(axis=-1, keepdims=True)
    shares = np.maximum.accumulate(shares[..., ::-1], axis=-1)[..., ::-1]  # a later layer lacks dropped tokens
    rounded = (step * np.rint(shares * tokens / step)).astype(np.int64)
    return np.where(shares >= 1, tokens, np.minimum(rounded, tokens))


@dataclass(frozen=True)
class Load:
    """Blocks that some layers, ascending, load together. The first layer waits for them.

    Args:
        ends: int64 `[blocks]`, ascending: position after the last token of each block.
        seconds: float `[blocks]`, load time of each block.
    """

    layers: tuple[int, ...]
    ends: np.ndarray
    seconds: np.ndarray

    def seconds_after(self, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds, float `[n]`, to load what follows recomputed prefixes of these lengths, int64 `[n]`."""
        remaining = np.append(np.cumsum(self.seconds[::-1])[::-1], 0.0)  # [blocks + 1]: from each block on
        return remaining[np.searchsorted(self.ends, lengths, side="right")]


@dataclass(frozen=True)
class Streams:
    """Work of the two overlapping streams, computing and loading, for a prompt.

    Args:
        tokens: Number of tokens of the prefix.
        suffix: Seconds that a layer takes to compute what follows the prefix.
        compute: Returns the seconds that a layer takes for recomputed prefixes of these lengths, `[n]` to `[n]`.
        restore: Seconds that a layer takes for each restored token after it is loaded.
        loads: Loads in the order in which layers need them. They are loaded in this order, one after the other.
    """

    tokens: int
    suffix: float
    compute: Callable[[np.ndarray], np.ndarray]
    restore: float
    loads: tuple[Load, ...]

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds that the prompt takes, float `[n]`, for recomputed prefixes, int64 `[n, layers]`."""
        computed_by = self.suffix + self.compute(lengths) + self.restore * (self.tokens - lengths)  # [n, layers]
        finished, loaded = np.zeros(len(lengths)), np.zeros(len(lengths))
        waiting = list(self.loads)
        for layer in range(lengths.shape[1]):
            while waiting and waiting[0].layers[0] == layer:
                load = waiting.pop(0)
                loaded = loaded + load.seconds_after(lengths[:, load.layers[-1]])
                finished = np.maximum(finished, loaded)
            finished = finished + computed_by[:, layer]
        return finished


def fastest(seconds: np.ndarray, may_compute_all: bool = True) -> int:
    """Return which schedule has the shortest expected time of a prompt, given float `[schedules]` seconds.

    The first schedule loads everything and only the last computes everything. The result is the first or, if restoring
    nothing is allowed, the last one, if a schedule between takes more than `_WORTH` times as long as that.
    """
    last = len(seconds) - 1
    alone = last if may_compute_all and seconds[last] < seconds[0] else 0
    best = int(seconds[:last].argmin())
    return best if seconds[best] < _WORTH * seconds[alone] else alone
