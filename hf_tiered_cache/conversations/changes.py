"""Changes of keys and values by merging layers, estimated for all pairs of layers at once.

What a merge does to KV cannot be seen in attention: layers with similar attention can have orthogonal keys and values.
The angles between the vectors of two layers state it exactly (`store.codecs.pairs`), and some tokens are enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch.nn.functional import normalize

from .acceptance import LayerTensors

SAMPLED_TOKENS = 128
"""Maximum number of tokens that are compared, evenly spread over the conversation."""


@torch.no_grad()
def merge_changes(kv: Sequence[LayerTensors], kinds: Sequence[Hashable], toward: float, retained: float) -> np.ndarray:
    """Return the relative distance by which a merge of two layers moves their keys and values.

    Args:
        kv: Keys and values of each layer, `[1, heads, tokens, dim]`.
        kinds: Kind of each layer. Layers of different kinds cannot be merged.
        toward: Direction of merged vectors, from that of the first layer (0) to that of the second (1).
        retained: Share of the tokens that stay unmerged: those with the largest angle.

    Returns:
        float `[layers, layers]`: root of the mean of both layers' relative squared distances, for the layer of the row
        and a later one of the column. Infinite for layers of different kinds.
    """
    changes = np.full((len(kv), len(kv)), np.inf)
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        changes[np.ix_(places, places)] = _changes([kv[place] for place in places], toward, retained)
    return changes


def _changes(kv: Sequence[LayerTensors], toward: float, retained: float) -> np.ndarray:
    """Return the same for layers of one kind; only columns after the row's layer count."""
    changes = np.full((len(kv), len(kv)), np.inf)
    sampled = [_sampled(tensors) for tensors in zip(*kv, strict=True)]  # keys, values: [layers, heads, tokens, dim]
    directions = [normalize(tensor, dim=-1) for tensor in sampled]
    weights = [tensor.square().sum(-1) for tensor in sampled]  # [layers, heads, tokens]
    weights = [weight / weight.sum((1, 2), keepdim=True).clamp_min(1e-30) for weight in weights]
    for first in range(len(kv) - 1):
        later = slice(first + 1, None)
        # keys, values: [later, heads, tokens]
        angles = [(unit[later] * unit[first]).sum(-1).clamp(-1, 1).acos() for unit in directions]
        mean_angles = torch.stack([angle.mean(1) for angle in angles]).mean(0)  # [later, tokens]
        merged = torch.ones_like(mean_angles)
        merged.scatter_(1, mean_angles.topk(round(retained * merged.shape[1]), dim=1).indices, 0.0)
        squares = [
            (_moved(angle, toward) * weight[first] + _moved(angle, 1 - toward) * weight[later]) * merged[:, None]
            for angle, weight in zip(angles, weights, strict=True)
        ]
        total = torch.stack([square.sum((1, 2)) for square in squares]).mean(0) / 2
        changes[first, later] = total.sqrt().double().numpy()
    return changes


def _sampled(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return evenly spread tokens of one sequence, float32 `[layers, heads, tokens, dim]`, on the host."""
    count = tensors[0].shape[2]
    tokens = torch.linspace(0, count - 1, min(count, SAMPLED_TOKENS)).round().long()
    return torch.stack([tensor[0].index_select(1, tokens.to(tensor.device)).float().cpu() for tensor in tensors])


def _moved(angle: torch.Tensor, share: float) -> torch.Tensor:
    """Return the squared distance between unit vectors, one of which is turned by a share of the angle."""
    return (2 * (angle * share / 2).sin()).square()
