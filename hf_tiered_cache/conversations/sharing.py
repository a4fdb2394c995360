"""Compaction of a conversation: the layers that share their KV, by the effect on predictions, and rewritten segments.

The two nearest layers form a pair, then the next two, until enough layers are paired. Layers can be near by what their
merge does to their keys and values (ours, `merge_changes`), or by their attention (Krul, Section 4.2, Algorithm 1). In
the paper, candidates are only the layers that attend to the two ends of their context, whatever the prompt
(initial-recent, I-R).

Similar attention does not mean KV that may be merged: in SmolLM2-135M, the keys and values of any two layers are almost
orthogonal. The angles between the vectors of two layers state exactly what a merge does to them (`store.pairs`),
and some tokens are enough to estimate it for all pairs of layers at once.

Proposed pairs are accepted by a replay: the last tokens of a conversation are computed again over the merged KV, and
compared with the predictions over the unmerged KV. Both replays use the same kernels.

A turn appends a segment. Rewriting the whole chain at each turn would write bytes in proportion to the square of the
number of turns, so only its last segments are rewritten, as few as possible:

- Segments that were not compacted yet are, if layers share KV or a part of them is not stored: once for each segment.
- Older segments are rewritten with them if this saves a fifth of their bytes. A rewrite then writes at most four times
  the bytes that it drops, and each byte is dropped at most once. Such rewrites together write at most four times the
  bytes that the turns append.
- More than `MOST_SMALL` consecutive segments of less than `SMALL_TOKENS` tokens at the end of a chain are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import normalize

from ..store.geometry import ALIGNMENT, Geometry, KVLayout, block_groups
from ..store.segment import SegmentReader
from .distances import LayerDistances

LayerTensors = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""
Pairs = tuple[tuple[int, int], ...]
"""Pairs of layers, the lower one first."""
REPLAYED_TOKENS = 32
"""Number of last tokens that are replayed."""
MIN_TOKENS = 128
"""Number of tokens of a conversation before new pairs are selected (measured in `bench/replay_margin.py`)."""
MOST_CHANGE = 0.12
"""Default of the maximum relative distance by which a merge moves keys and values. The last tokens need not show what a
larger change does to later ones. Pairs of `xs` that merge well are below it, pairs of near layers of the pretrained
models above 0.64 (`bench/pair_loss.py`)."""
MARGIN = 4
"""Factor by which the loss of a replay must be below the target, since the next turn may lose more."""
SAMPLED_TOKENS = 128
"""Maximum number of tokens that are compared to estimate a merge, evenly spread over the conversation."""
I_R_SHARE = 0.75
"""Default share of layers that are I-R, as the paper finds it in a model of 32 layers (Table 3)."""
SMALL_TOKENS = 512
"""Number of tokens below which a segment is small."""
MOST_SMALL = 8
"""Maximum number of small segments at the end of a chain."""
_WORTH = 0.8  # bytes of a joined segment, as a share of those of its parts, below which old segments are rewritten
_HEAD_BYTES = 3 * ALIGNMENT  # bytes of a segment before its blocks, at least


# --- proposal


def nearest_pairs(
    layers: Sequence[int], distances: np.ndarray, most_pairs: int, shared: Pairs = (), most_distance: float = np.inf
) -> Pairs:
    """Pair the nearest layers, then the next ones. No layer is in two pairs.

    Args:
        layers: Layers that may be paired, ascending.
        distances: float `[layers, layers]`, distance of the layer of the row from the later layer of the column.
        most_pairs: Maximum number of pairs, which begin with the existing ones.
        shared: Existing pairs, which are kept.
        most_distance: Maximum distance of a new pair.
    """
    low, high = np.triu_indices(len(layers), 1)
    pairs, paired_layers = list(shared), {layer for pair in shared for layer in pair}
    for place in np.argsort(distances[low, high], kind="stable"):  # NaN comes last
        pair = layers[low[place]], layers[high[place]]
        if len(pairs) >= most_pairs or not distances[low[place], high[place]] <= most_distance:
            break
        if paired_layers.isdisjoint(pair):
            pairs.append(pair)
            paired_layers.update(pair)
    return tuple(pairs)


def target_pairs(num_layers: int, layers_shared: float) -> int:
    """Return the number of pairs that hold the share `layers_shared` of the layers."""
    return min(num_layers // 2, ceil(layers_shared * num_layers / 2))


def share_layers(distances: LayerDistances, gamma: float, layers_shared: float = 0.5, shared: Pairs = ()) -> Pairs:
    """Pair the share `layers_shared` of the layers with the most similar attention (Algorithm 1), and keep `shared`.

    `gamma` is the minimum share of attention at the two ends for a layer to be I-R (see `calibrated_gamma`).
    """
    candidates = np.flatnonzero(distances.initial_recent >= gamma)
    layers = [distances.layers[place] for place in candidates]
    among = distances.euclidean[np.ix_(candidates, candidates)]
    return nearest_pairs(layers, among, target_pairs(len(distances.layers), layers_shared), shared)


def calibrated_gamma(shares: Iterable[np.ndarray], target: float = I_R_SHARE) -> float:
    """Return the γ at which the share `target` of a model's layers is I-R, over conversations (Section 4.2, Table 3).

    `shares` are the `LayerDistances.initial_recent` of each conversation. Raises ValueError if there are none.
    """
    sorted_shares = np.sort(np.concatenate(list(shares) or [np.empty(0)]))
    if not len(sorted_shares):
        raise ValueError("gamma requires at least one conversation")
    num_below = len(sorted_shares) - round(target * len(sorted_shares))
    if num_below == 0:
        return float(sorted_shares[0])
    if num_below == len(sorted_shares):
        return float(np.nextafter(sorted_shares[-1], np.inf))
    return float((sorted_shares[num_below - 1] + sorted_shares[num_below]) / 2)


@torch.no_grad()
def merge_changes(kv: Sequence[LayerTensors], kinds: Sequence[Hashable], toward: float, retained: float) -> np.ndarray:
    """Return the relative distance by which a merge of two layers moves their keys and values.

    Args:
        kv: Keys and values of each layer, `[1, heads, tokens, dim]`.
        kinds: Kind of each layer. Layers of different kinds cannot be merged; their distance is infinite.
        toward: Direction of merged vectors, from that of the first layer (0) to that of the second (1).
        retained: Share of the tokens that stay unmerged: those with the largest angle.

    Returns:
        float `[layers, layers]`: root of the mean of both layers' relative squared distances, for the layer of the row
        and a later one of the column.
    """
    changes = np.full((len(kv), len(kv)), np.inf)
    for kind in dict.fromkeys(kinds):
        places = [place for place, other_kind in enumerate(kinds) if other_kind == kind]
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
        later_layers = slice(first + 1, None)
        # keys, values: [later, heads, tokens]
        angles = [(unit[later_layers] * unit[first]).sum(-1).clamp(-1, 1).acos() for unit in directions]
        mean_angles = torch.stack([angle.mean(1) for angle in angles]).mean(0)  # [later, tokens]
        mask = torch.ones_like(mean_angles)
        mask.scatter_(1, mean_angles.topk(round(retained * mask.shape[1]), dim=1).indices, 0.0)
        squares = [
            (_moved(angle, toward) * weight[first] + _moved(angle, 1 - toward) * weight[later_layers]) * mask[:, None]
            for angle, weight in zip(angles, weights, strict=True)
        ]
        total = torch.stack([square.sum((1, 2)) for square in squares]).mean(0) / 2
        changes[first, later_layers] = total.sqrt().double().numpy()
    return changes


def _sampled(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return evenly spread tokens of one sequence, float32 `[layers, heads, tokens, dim]`, on the host."""
    count = tensors[0].shape[2]
    tokens = torch.linspace(0, count - 1, min(count, SAMPLED_TOKENS)).round().long()
    return torch.stack([tensor[0].index_select(1, tokens.to(tensor.device)).float().cpu() for tensor in tensors])


def _moved(angle: torch.Tensor, share: float) -> torch.Tensor:
    """Return the squared distance between unit vectors, one of which is turned by a share of the angle."""
    return (2 * (angle * share / 2).sin()).square()


# --- acceptance


class Replay(Protocol):
    """Replay of the last tokens of a conversation."""

    def kv(self, layer: int) -> LayerTensors:
        """Return rotated keys and values of a layer before the replayed tokens, as they are stored: without a bias.

        They are `[1, heads, n, dim]` each.
        """

    def loss(self, changed: Mapping[int, LayerTensors]) -> float:
        """Return the mean KL divergence from the predictions over unchanged KV, in nats. `changed` is as by `kv`."""


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
    """Return the pairs with a replay loss of at most `most` nats: all, else the half that changes least, and so on.

    Pairs whose KV changes by a relative distance of more than `most_change` are not replayed. The others take one
    replay without pairs, and at most 1 + log2(pairs) with pairs. `merge` returns the merged keys and values of two
    layers.
    """
    merged_layers, changes = dict[int, LayerTensors](), dict[tuple[int, int], float]()
    for pair in pairs:
        before = tuple(map(replay.kv, pair))
        after = merge(*before)
        merged_layers |= zip(pair, after, strict=True)
        changes[pair] = sqrt(sum(map(_relative_change, before, after)) / len(pair))
    ranked = sorted((pair for pair in pairs if changes[pair] <= most_change), key=changes.__getitem__)
    refused_change = min((change for change in changes.values() if not change <= most_change), default=0.0)
    refused_loss = 0.0
    while ranked:
        loss = replay.loss({layer: merged_layers[layer] for pair in ranked for layer in pair})
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


# --- rewriting


def first_rewritten(
    readers: Sequence[SegmentReader], geometry: Geometry, stored_from: np.ndarray, retained: float
) -> int | None:
    """Return the index of the first segment of a chain to rewrite, or None to rewrite none.

    All segments from this one on become one segment.

    Args:
        readers: Segments of the chain, in order.
        geometry: Geometry of the new segment.
        stored_from: For each layer, the first token of the chain that is to be stored: int64 `[layers]`.
        retained: Share of a merged pair's tokens that stay unmerged.
    """
    layout, last = readers[0].shape.layout, readers[-1].header
    starts = [reader.header.position - readers[0].header.position for reader in readers]
    stop = last.position + last.shape.tokens - readers[0].header.position
    old_bytes = 0
    first = None
    for index in reversed(range(len(readers))):
        old_bytes += readers[index].shape.blocks_bytes + _HEAD_BYTES
        num_stored = stop - np.clip(stored_from, starts[index], stop)
        if _blocks_bytes(layout, geometry, num_stored, retained) + _HEAD_BYTES < _WORTH * old_bytes:
            first = index
    if first is not None:
        return first
    if (small := _run_at_end([reader.shape.tokens < SMALL_TOKENS for reader in readers])) > MOST_SMALL:
        return len(readers) - small
    new = _run_at_end([reader.shape.tables is None and not reader.shape.geometry.pairs for reader in readers])
    if new and (geometry.pairs or stored_from.max() > starts[-new]):
        return len(readers) - new
    return None


def first_stored_tokens(readers: Sequence[SegmentReader]) -> np.ndarray:
    """Return the first token from which on each layer of a chain is stored: int64 `[layers]`, non-increasing."""
    first_stored = np.zeros(len(readers[0].shape.layout.layers), np.int64)
    for number, reader in enumerate(readers):
        offset = reader.header.position - readers[0].header.position
        count = readers[number + 1].header.position - reader.header.position if number + 1 < len(readers) else None
        is_missing = ~reader.shape.held[:, :count]  # [layers, tokens]; the next segment may begin inside this one
        last = is_missing.shape[1] - is_missing[:, ::-1].argmax(1)
        first_stored = np.where(is_missing.any(1), offset + last, first_stored)
    return np.maximum.accumulate(first_stored[::-1])[::-1]


def _blocks_bytes(layout: KVLayout, geometry: Geometry, num_tokens: np.ndarray, retained: float) -> int:
    """Return the bytes of a segment's blocks if each layer holds so many last tokens, int64 `[layers]`."""
    alone, merged_tokens = num_tokens.astype(np.int64), dict[tuple[int, ...], int]()
    for pair in geometry.pairs:
        num_shared = min(alone[layer] for layer in pair)
        merged_tokens[pair] = num_shared - round(retained * num_shared)
        alone[list(pair)] -= merged_tokens[pair]
    total = 0
    for group in block_groups(layout, geometry):
        tokens = merged_tokens[group.layers] if group.merged else max(alone[layer] for layer in group.layers)
        total += -(-int(tokens) // geometry.chunk_tokens) * group.block_bytes
    return total


def _run_at_end(flags: Sequence[bool]) -> int:
    """Return the number of true flags at the end of a sequence."""
    return next((number for number, flag in enumerate(reversed(flags)) if not flag), len(flags))
