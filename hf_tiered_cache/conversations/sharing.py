"""Selection of the layers of a conversation that share their KV.

The two nearest layers form a pair, then the next two, until enough layers are paired. Layers can be near by what their
merge does to their keys and values (ours, `changes.py`), or by their attention (Krul, Section 4.2, Algorithm 1). In the
paper, candidates are only the layers that attend to the two ends of their context, whatever the prompt
(initial-recent, I-R).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from .acceptance import Pairs
from .attention_sums import AttentionSums

I_R_SHARE = 0.75
"""Default share of layers that are I-R, as the paper finds it in a model of 32 layers (Table 3)."""


END_PERCENT = 10
"""Share of a sequence that counts as its beginning, and as its end, in % (Algorithm 1)."""


@dataclass(frozen=True, eq=False)
class LayerDistances:
    """Distances between the attention of layers.

    Args:
        layers: Layer numbers; the arrays have this order.
        euclidean: float64 `[layers, layers]`, the paper's distance: over the weights of all rows, mean over the heads;
            divided by the root of the number of rows, so that it does not grow with the conversation.
        initial_recent: float64 `[layers]`, share of attention that the first and last tenth of the sequence receive.
        rows: Number of sampled rows.
        missing: Reason why there are no distances, or "".
    """

    layers: tuple[int, ...]
    euclidean: np.ndarray
    initial_recent: np.ndarray
    rows: int
    missing: str = ""

    @classmethod
    def of(cls, layers: Sequence[int], sums: AttentionSums, rows: int, positions: int) -> LayerDistances:
        """Compute the distances from the sums of one sequence, on the host.

        Args:
            layers: Layer numbers.
            sums: Sums of the sequence.
            rows: Number of sampled rows.
            positions: Length of the sequence, with its left padding.
        """
        products = sums.products[0].double().numpy()  # [heads, layers, layers]
        count = float(sums.rows)
        squared_norms = np.diagonal(products, axis1=1, axis2=2)
        norm_sums = squared_norms[:, :, None] + squared_norms[:, None, :]
        squared = np.maximum(0, norm_sums - products - products.swapaxes(1, 2))
        return cls(
            tuple(layers),
            np.sqrt(squared / count).mean(0),
            _at_ends(sums.received[0].double().numpy(), int(sums.pads), positions) / count,
            rows,
        )

    @classmethod
    def none(cls, missing: str) -> LayerDistances:
        """Return empty distances, with the reason `missing`."""
        return cls((), np.zeros((0, 0)), np.zeros(0), 0, missing)


def _at_ends(received: np.ndarray, begin: int, stop: int) -> np.ndarray:
    """Return the attention that the first and last tenth of the positions `begin` to `stop` receive, `[layers]`.

    Args:
        received: float64 `[layers, positions]`, attention that each position receives.
        begin: First position of the sequence.
        stop: Position after its last one.
    """
    tokens = stop - begin
    initial, recent = begin + END_PERCENT * tokens // 100, begin + (100 - END_PERCENT) * tokens // 100
    ends: np.ndarray = received[:, begin:initial].sum(1) + received[:, recent:].sum(1)
    return ends


def nearest_pairs(
    layers: Sequence[int],
    distances: np.ndarray,
    most_pairs: int,
    shared: Pairs = (),
    most_distance: float = np.inf,
) -> Pairs:
    """Pair the nearest layers, then the next ones. No layer is in two pairs.

    Args:
        layers: Layers that may be paired, ascending.
        distances: float `[layers, layers]`, distance of the layer of the row from the later layer of the column.
        most_pairs: Maximum number of pairs.
        shared: Existing pairs, which are kept.
        most_distance: Maximum distance of a new pair.

    Returns:
        Pairs of layers, the lower one first: existing ones, then new ones with the smallest distance first.
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
    """Pair the layers with the most similar attention (Algorithm 1).

    Args:
        distances: Distances of the conversation's layers.
        gamma: Minimum share of attention at the two ends for a layer to be I-R; see `calibrated_gamma`.
        layers_shared: Share of `distances.layers` to pair.
        shared: Existing pairs, which are kept.
    """
    candidates = np.flatnonzero(distances.initial_recent >= gamma)
    layers = [distances.layers[place] for place in candidates]
    among = distances.euclidean[np.ix_(candidates, candidates)]
    return nearest_pairs(layers, among, target_pairs(len(distances.layers), layers_shared), shared)


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
