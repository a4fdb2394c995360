"""Acceptance of merged layers by their effect on predictions.

Similar attention does not mean KV that may be merged: in SmolLM2-135M, the keys and values of any two layers are almost
orthogonal. So the last tokens of a conversation are replayed: computed again over the merged KV, and compared with the
predictions over the unmerged KV. Both replays use the same kernels.
"""

from __future__ import annotations

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
LEAST_TOKENS, LEAST_ROWS = 128, 8
"""Number of tokens of a conversation, and of attention rows observed in its turn, before new pairs are selected. In the
reference model `xs`, pairs that a replay accepts after 48 to 64 tokens may lose 0.09 nats in the next turn; from 128
tokens on, they lose at most 0.005. Pairs by 8 rows lose no more than those by 32 (docs/evaluation.md)."""
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
        refused_loss: The same with the fewest pairs that were refused; 0 if none were.
    """

    pairs: Pairs
    loss: float = 0.0
    refused_loss: float = 0.0


def accepted_pairs(
    replay: Replay,
    pairs: Pairs,
    merge: Callable[[LayerTensors, LayerTensors], tuple[LayerTensors, LayerTensors]],
    most: float,
) -> AcceptedPairs:
    """Return the pairs with a replay loss of at most `most`: all, else the half whose KV changes least, and so on.

    This takes one replay without pairs, and at most 1 + log2(pairs) others.

    Args:
        replay: Replay of the conversation.
        pairs: Proposed pairs of layers.
        merge: Function that returns the merged keys and values of two layers.
        most: Maximum mean KL divergence, in nats.
    """
    merged, changes = dict[int, LayerTensors](), dict[tuple[int, int], float]()
    for pair in pairs:
        before = tuple(map(replay.kv, pair))
        after = merge(*before)
        merged |= zip(pair, after, strict=True)
        changes[pair] = sum(map(_relative_change, before, after))
    ranked, refused_loss = sorted(pairs, key=changes.__getitem__), 0.0
    while ranked:
        loss = replay.loss({layer: merged[layer] for pair in ranked for layer in pair})
        if loss <= most:  # False for NaN
            return AcceptedPairs(tuple(ranked), loss, refused_loss)
        ranked, refused_loss = ranked[: len(ranked) // 2], loss
    return AcceptedPairs((), 0.0, refused_loss)


def _relative_change(before: LayerTensors, after: LayerTensors) -> float:
    """Return the relative squared distance of keys and of values, summed."""
    pairs_of_tensors = zip(before, after, strict=True)
    return sum(
        float((new.float() - old.float()).square().sum() / old.float().square().sum().clamp_min(1e-30))
        for old, new in pairs_of_tensors
    )
