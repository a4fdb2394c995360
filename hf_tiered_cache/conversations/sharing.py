"""Selection of the layers of a conversation that share their KV (Krul, Section 4.2, Algorithm 1).

Candidates are layers that attend to the two ends of their context, whatever the prompt (initial-recent, I-R). The two
candidates with the most similar attention form a pair, then the next two, until enough layers are paired.

Differs from the paper in two ways. Distances are relative to the norms of the rows, which vary among models and layers:
attention that is spread over many tokens has small weights, and therefore small differences. And layers beyond a
maximum distance never share, however many pairs are requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from .attention_sums import AttentionSums

I_R_SHARE = 0.75
"""Default share of layers that are I-R, as the paper finds it in a model of 32 layers (Table 3)."""
ALIKE = 0.3
"""Maximum relative distance of layers that count as similar. Neighboring layers 2 to 6 of the reference model xs, which
merge without loss, have 0.15 to 0.26 on average. In SmolLM2-135M the nearest layers have 0.39 and more, and merging
them loses 0.5 nats per token and more (`bench/conversation_answers.py`)."""


@dataclass(frozen=True, eq=False)
class LayerDistances:
    """Distances between the attention of layers.

    Args:
        layers: Layer numbers; the arrays have this order.
        euclidean: float64 `[layers, layers]`, the paper's distance: over the weights of all rows, mean over the heads;
            divided by the root of the number of rows, so that it does not grow with the conversation.
        relative: float64 `[layers, layers]`, distance relative to the weights: the root of |a - b|² / (|a|² + |b|²) for
            two layers, mean over the heads. 0 for equal attention, 1 for attention to disjoint tokens.
        initial_recent: float64 `[layers]`, share of attention at the two ends of the context.
        rows: Number of sampled rows.
        missing: Reason why there are no distances, or "".
    """

    layers: tuple[int, ...]
    euclidean: np.ndarray
    relative: np.ndarray
    initial_recent: np.ndarray
    rows: int
    missing: str = ""

    @classmethod
    def of(cls, layers: Sequence[int], sums: AttentionSums, rows: int) -> LayerDistances:
        """Compute the distances from the sums of one sequence, on the host."""
        products = sums.products[0].double().numpy()  # [heads, layers, layers]
        count = float(sums.rows)
        squared_norms = np.diagonal(products, axis1=1, axis2=2)
        norm_sums = squared_norms[:, :, None] + squared_norms[:, None, :]
        squared = np.maximum(0, norm_sums - products - products.swapaxes(1, 2))
        return cls(
            tuple(layers),
            np.sqrt(squared / count).mean(0),
            np.sqrt(squared / norm_sums).mean(0),
            sums.ends[0].double().numpy() / count,
            rows,
        )

    @classmethod
    def none(cls, missing: str) -> LayerDistances:
        """Return empty distances, with the reason `missing`."""
        return cls((), np.zeros((0, 0)), np.zeros((0, 0)), np.zeros(0), 0, missing)


@dataclass(frozen=True, eq=False)
class SharedLayers:
    """Layers that share their KV.

    Args:
        pairs: Pairs of layers, the lower one first; pairs with the smallest distance come first.
        initial_recent: Layers that are I-R.
        distances: Distances by which the pairs were selected.
        why_fewer: Reason why fewer layers are paired than requested, or "".
    """

    pairs: tuple[tuple[int, int], ...]
    initial_recent: tuple[int, ...]
    distances: LayerDistances
    why_fewer: str = ""


def share_layers(
    distances: LayerDistances,
    gamma: float,
    layers_shared: float = 0.5,
    alike: float = ALIKE,
    shared: Sequence[tuple[int, int]] = (),
) -> SharedLayers:
    """Pair layers (Algorithm 1).

    Args:
        distances: Distances of the conversation's layers.
        gamma: Minimum share of attention at the two ends for a layer to be I-R; see `calibrated_gamma`.
        layers_shared: Share of `distances.layers` to pair.
        alike: Maximum relative distance of a pair.
        shared: Existing pairs, which are kept.
    """
    layers, relative = distances.layers, distances.relative
    candidates = np.flatnonzero(distances.initial_recent >= gamma)
    initial_recent = tuple(layers[place] for place in candidates)
    target_pairs = min(len(layers) // 2, ceil(layers_shared * len(layers) / 2))
    if distances.missing:
        return SharedLayers(tuple(shared), (), distances, distances.missing)
    low, high = (candidates[side] for side in np.triu_indices(len(candidates), 1))
    pairs, refused_distance = list(shared), 0.0
    paired_layers = {layers.index(layer) for pair in shared for layer in pair}
    for place in np.argsort(relative[low, high], kind="stable"):
        first, second = int(low[place]), int(high[place])
        if len(pairs) >= target_pairs or not paired_layers.isdisjoint((first, second)):
            continue
        if (distance := float(relative[first, second])) > alike:
            refused_distance = distance
            break
        pairs.append((layers[first], layers[second]))
        paired_layers |= {first, second}
    why_fewer = _why_fewer(len(pairs), target_pairs, refused_distance, alike)
    return SharedLayers(tuple(pairs), initial_recent, distances, why_fewer)


def _why_fewer(num_pairs: int, target_pairs: int, refused_distance: float, alike: float) -> str:
    if num_pairs >= target_pairs:
        return ""
    shortfall = (
        f"{2 * num_pairs} layers share KV instead of {2 * target_pairs}: " if num_pairs else "no layers share KV: "
    )
    if refused_distance:
        return f"{shortfall}the attention of the next two differs by {refused_distance:.2f}, and the limit is {alike:g}"
    return f"{shortfall}no other two layers attend to both ends of their context"


def calibrated_gamma(shares: Iterable[np.ndarray], target: float = I_R_SHARE) -> float:
    """Return the γ at which the share `target` of a model's layers is I-R, over conversations (Section 4.2, Table 3).

    Args:
        shares: `LayerDistances.initial_recent` of each conversation.
        target: Share of layers that are I-R, over all conversations.

    Raises:
        ValueError: `shares` is empty.
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
