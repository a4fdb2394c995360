"""Acceptance of merged layers by their effect on predictions.

Similar attention does not mean KV that may be merged: in SmolLM2-135M, the keys and values of any two layers are almost
orthogonal. So the last tokens of a conversation are replayed: computed again over the merged KV, and compared with the
predictions over the unmerged KV. Both replays use the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

LayerTensors = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""
Pairs = tuple[tuple[int, int], ...]
"""Pairs of layers, the lower one first."""
REPLAYED_TOKENS = 32
"""Number of last tokens that are replayed."""
LEAST_TOKENS = 128
"""Number of tokens of a conversation before new pairs are selected (measured in `bench/replay_margin.py`)."""
MOST_CHANGE = 0.12
"""Default of the maximum relative distance by which a merge moves keys and values. The last tokens need not show what a
larger change does to later ones. Pairs of `xs` that merge well are below it, pairs of near layers of the pretrained
models above 0.64 (`bench/pair_loss.py`)."""
MARGIN = 4
"""Factor by which the loss of a replay must be below the target, since the next turn may lose more."""


class Replay(Protocol):
    """Replay of the last tokens of a conversation."""

    def kv(self, layer: int) -> LayerTensors:
        """Return the rotated keys and values of a layer before the replayed tokens, `[1, heads, n, dim]`."""

    def loss(self, changed: Mapping[int, LayerTensors]) -> float:
        """Return the mean KL divergence from the predictions over the unchanged KV, in nats.

        Args:
            changed: Keys and values of changed layers, in the form of `kv`.
        """


@dataclass(frozen=True)
class AcceptedPairs:
    """Pairs of layers that may be merged.

    Args:
        pairs: Accepted pairs.
        loss: Mean KL divergence of the replay with these pairs, in nats; 0 without pairs.
        refused_loss: The same with the fewest pairs that were refused for it; 0 if none were.
        refused_change: Smallest change of the KV of a pair that was refused for it; 0 if none was.
    """

    pairs: Pairs
    loss: float = 0.0
    refused_loss: float = 0.0
    refused_change: float = 0.0


def accepted_pairs(
    replay: Replay,
    pairs: Pairs,
    merge: Callable[[LayerTensors, LayerTensors], tuple[LayerTensors, LayerTensors]],
    most: float,
    most_change: float,
) -> AcceptedPairs:
    """Return the pairs with a replay loss of at most `most`: all, else the half whose KV changes least, and so on.

    Pairs whose KV changes by more than `most_change` are not replayed. The others take one replay without pairs, and at
    most 1 + log2(pairs) with pairs.

    Args:
        replay: Replay of the conversation.
        pairs: Proposed pairs of layers.
        merge: Function that returns the merged keys and values of two layers.
        most: Maximum mean KL divergence, in nats.
        most_change: Maximum relative distance between a pair's merged and unmerged KV.
    """
    merged, changes = dict[int, LayerTensors](), dict[tuple[int, int], float]()
    for pair in pairs:
        before = tuple(map(replay.kv, pair))
        after = merge(*before)
        merged |= zip(pair, after, strict=True)
        changes[pair] = math.sqrt(sum(map(_relative_change, before, after)) / len(pair))
    ranked = sorted((pair for pair in pairs if changes[pair] <= most_change), key=changes.__getitem__)
    refused_change = min((change for change in changes.values() if not change <= most_change), default=0.0)
    refused_loss = 0.0
    while ranked:
        loss = replay.loss({layer: merged[layer] for pair in ranked for layer in pair})
        if loss <= most:  # False for NaN
            return AcceptedPairs(tuple(ranked), loss, refused_loss, refused_change)
        ranked, refused_loss = ranked[: len(ranked) // 2], loss
    return AcceptedPairs((), 0.0, refused_loss, refused_change)


def _relative_change(before: LayerTensors, after: LayerTensors) -> float:
    """Return the relative squared distance, mean of keys and values."""
    squares = [
        float((new.float() - old.float()).square().sum() / old.float().square().sum().clamp_min(1e-30))
        for old, new in zip(before, after, strict=True)
    ]
    return sum(squares) / len(squares)
