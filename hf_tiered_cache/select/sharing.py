"""Which layers of a conversation may share their KV (Krul, Section 4.2, Algorithm 1).

Layers that attend to the two ends of their context, whatever is asked (initial-recent, I-R), are candidates; the two
whose attention is nearest form a pair, then the next two, until enough layers are in pairs.

Differs from the paper in two ways. Distances are relative to the rows' own norms, which vary among models and layers:
attention spread over many tokens has small weights, and small differences. And layers beyond a bound are not alike:
nothing is shared there, however much is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from .attention_sums import AttentionSums

I_R_SHARE = 0.75
"""Share of layers that are I-R unless said otherwise: what the paper finds in a model of 32 layers (Table 3)."""
ALIKE = 0.55
"""Relative distance beyond which layers are not alike. Of neighbours, layers 2 to 6 of the reference model xs have 0.13
to 0.42 (14 conversations of 500 tokens, all rows), those of stories260K, where none are alike, 0.71 to 0.85."""


@dataclass(frozen=True, eq=False)
class LayerDistances:
    """How alike layers are.

    Args:
        layers: which; the arrays follow this order.
        euclidean: float64 `[layers, layers]`, the paper's distance: over the weights of all rows, mean over the heads;
            divided by the root of the number of rows, so that it does not grow with the conversation.
        relative: likewise, but relative to the weights themselves: of two layers the root of |a - b|² / (|a|² + |b|²),
            0 for the same attention, 1 where none goes to the same tokens. Mean over the heads.
        initial_recent: float64 `[layers]`, share of attention at the two ends of the context.
        rows: sampled ones that it comes from.
        missing: why there is nothing, or "".
    """

    layers: tuple[int, ...]
    euclidean: np.ndarray
    relative: np.ndarray
    initial_recent: np.ndarray
    rows: int
    missing: str = ""

    @classmethod
    def of(cls, layers: Sequence[int], sums: AttentionSums, rows: int) -> LayerDistances:
        """From the sums of one sequence, on the host."""
        products = sums.products[0].double().numpy()  # [heads, layers, layers]
        count = float(sums.rows)
        own = np.diagonal(products, axis1=1, axis2=2)
        both = own[:, :, None] + own[:, None, :]
        squared = np.maximum(0, both - products - products.swapaxes(1, 2))
        return cls(
            tuple(layers),
            np.sqrt(squared / count).mean(0),
            np.sqrt(squared / both).mean(0),
            sums.ends[0].double().numpy() / count,
            rows,
        )

    @classmethod
    def none(cls, missing: str) -> LayerDistances:
        """Of no layer."""
        return cls((), np.zeros((0, 0)), np.zeros((0, 0)), np.zeros(0), 0, missing)


@dataclass(frozen=True, eq=False)
class SharedLayers:
    """Which layers share.

    Args:
        pairs: of layers, the lower one first, nearest pairs first.
        initial_recent: the layers that are I-R.
        distances: what was chosen by.
        why_fewer: why fewer layers are in pairs than asked for, or "".
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
        distances: of the conversation's layers.
        gamma: share of attention at the two ends from which on a layer is I-R; see `calibrated_gamma`.
        layers_shared: share of `distances.layers` that pairs are made for, until it is reached.
        alike: relative distance up to which layers may form a pair.
        shared: pairs that there are already, and that stay.
    """
    layers, relative = distances.layers, distances.relative
    candidates = np.flatnonzero(distances.initial_recent >= gamma)
    initial_recent = tuple(layers[place] for place in candidates)
    wanted = min(len(layers) // 2, ceil(layers_shared * len(layers) / 2))
    if distances.missing:
        return SharedLayers(tuple(shared), (), distances, distances.missing)
    low, high = (candidates[side] for side in np.triu_indices(len(candidates), 1))
    pairs, refused = list(shared), 0.0
    used = {layers.index(layer) for pair in shared for layer in pair}
    for place in np.argsort(relative[low, high], kind="stable"):
        first, second = int(low[place]), int(high[place])
        if len(pairs) >= wanted or not used.isdisjoint((first, second)):
            continue
        if (distance := float(relative[first, second])) > alike:
            refused = distance
            break
        pairs.append((layers[first], layers[second]))
        used |= {first, second}
    return SharedLayers(tuple(pairs), initial_recent, distances, _why_fewer(len(pairs), wanted, refused, alike))


def _why_fewer(found: int, wanted: int, refused: float, alike: float) -> str:
    if found >= wanted:
        return ""
    few = f"{2 * found} layers share instead of {2 * wanted}: " if found else "no layers share: "
    if refused:
        return f"{few}the attention of the next two differs by {refused:.2f}, and up to {alike:g} they count as alike"
    return f"{few}no other two attend to the two ends of their context"


def calibrated_gamma(shares: Iterable[np.ndarray], target: float = I_R_SHARE) -> float:
    """The γ by which `target` of a model's layers are I-R, over several conversations (Section 4.2, Table 3).

    Args:
        shares: for each conversation `LayerDistances.initial_recent`.
        target: share of layers that are to be I-R, over all conversations.

    Raises:
        ValueError: there are no shares.
    """
    every = np.sort(np.concatenate(list(shares) or [np.empty(0)]))
    if not len(every):
        raise ValueError("γ comes of at least one conversation")
    below = len(every) - round(target * len(every))
    if below == 0:
        return float(every[0])
    if below == len(every):
        return float(np.nextafter(every[-1], np.inf))
    return float((every[below - 1] + every[below]) / 2)
