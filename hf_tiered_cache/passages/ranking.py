"""Rankings of a passage's tokens by how much they need their true context, and the sidecar that holds the scores.

A ranking is by energy at low frequencies (CacheTune, Section 4.1) or by change of KV (ours). All layers share one
ranking, since hidden states are dropped once. All rankings share the KV.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ..store.disk import SegmentStore
from ..store.lazy import torch
from ..store.segment import SegmentReader

Ranking = Literal["low_frequency", "random", "context"]
RANKINGS: tuple[Ranking, ...] = ("low_frequency", "random", "context")
"""Rankings: the paper's, a baseline, and ours (`context`): how much a token's KV changes after other text."""

RANKED_IN_CONTEXT = ("context",)
"""Rankings that compute a passage once more, after other text. Their scores are comparable between passages."""

LOW_FREQUENCIES = 0.5
"""Share of the frequencies that are low, for "low_frequency" (CacheTune, Section 4.1)."""

KV: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Keys before rotation, and values, of one layer: `[heads, tokens, dim]`."""


def low_frequency_energy(tensor: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the norm of each token, float32 `[tokens]`, over all heads, after a low-pass filter along the tokens.

    The tensor, `[heads, tokens, dim]`, has keys before rotation or values; `alpha` is the share of low frequencies.
    """
    tokens = tensor.shape[1]
    spectrum = torch.fft.rfft(tensor.float(), dim=1)  # [heads, tokens // 2 + 1, dim]
    spectrum[:, int(alpha * spectrum.shape[1]) :] = 0
    filtered = torch.fft.irfft(spectrum, n=tokens, dim=1)
    return filtered.square().sum((0, 2)).sqrt_()


def kv_deviation(stored: KV, computed: KV) -> torch.Tensor:
    """Return how far each token's computed KV is from the stored KV, relative to it: float32 `[..., tokens]`.

    Keys and values, `[..., heads, tokens, dim]` each, count equally.
    """
    squares = []
    for stored_tensor, computed_tensor in zip(stored, computed, strict=True):
        wide = stored_tensor.float()
        squared_norm = wide.square().sum((-3, -1)).clamp_min(1e-30)
        squares.append((computed_tensor.float() - wide).square().sum((-3, -1)) / squared_norm)
    return (squares[0] + squares[1]).sqrt_()


def rank_tokens(
    layers: Iterable[KV],
    ranking: Ranking,
    kv_in_context: Iterable[KV] | None = None,
    alpha: float = LOW_FREQUENCIES,
) -> np.ndarray:
    """Return a score for each token of a passage: how much it needs to be computed in its true context.

    Args:
        layers: KV of the passage computed alone, for each layer.
        ranking: One of `RANKINGS`.
        kv_in_context: KV of the passage computed after other text, for each layer; for `RANKED_IN_CONTEXT`.
        alpha: See `low_frequency_energy`.

    Returns:
        float32 `[tokens]`, summed over the layers. Energies are normalized per layer; changes are relative already.
    """
    scores = []
    context_layers = iter(kv_in_context or ())
    for pair in layers:
        if ranking == "random":
            return np.random.default_rng(pair[0].shape[1]).random(pair[0].shape[1]).astype(np.float32)
        if ranking == "context":
            score = kv_deviation(pair, next(context_layers))
        else:
            keys, values = (low_frequency_energy(tensor, alpha) for tensor in pair)
            energy = keys + values
            score = energy / energy.sum().clamp_min(1e-30)
        scores.append(score.double())
    return torch.stack(scores).sum(0).float().numpy()


RANKINGS_KIND = "rankings"
"""Kind of the sidecar, which holds float32 `[tokens]` for each ranking name."""
RankingScores = dict[str, np.ndarray]
"""Scores by ranking name, float32 `[tokens]`: how much it matters that each token is computed in its true context."""


class KeptRankings:
    """Token rankings in sidecars of their segments.

    A lost ranking only changes the order in which tokens are taken.
    """

    def __init__(self, disk: SegmentStore) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._cache = WeakKeyDictionary[SegmentReader, RankingScores]()

    def keep(self, reader: SegmentReader, scores: Mapping[str, np.ndarray]) -> bool:
        """Add or replace scores. Return whether they are stored now (see `Sidecars.keep`)."""
        arrays = self.read(reader) | {name: np.asarray(values, np.float32) for name, values in scores.items()}
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        is_stored = self._disk.sidecars.keep(reader, RANKINGS_KIND, tensors, {})
        with self._lock:
            self._cache.pop(reader, None)
        return is_stored

    def of(self, reader: SegmentReader, name: str) -> np.ndarray | None:
        """Return the scores of a segment by a ranking, or None. Those just written by another process are found."""
        with self._lock:
            scores = self._cache.get(reader, {})
        if name not in scores:
            scores = self.read(reader)
            with self._lock:
                self._cache[reader] = scores
        return scores.get(name)

    def read(self, reader: SegmentReader) -> RankingScores:
        """Read the scores of a segment from its sidecar, by ranking."""
        tensors = self._disk.sidecars.kept(reader, RANKINGS_KIND, {}) or {}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        fit = {name: array for name, array in arrays.items() if array.shape == (reader.shape.tokens,)}
        return {name: array for name, array in fit.items() if np.isfinite(array).all()}
