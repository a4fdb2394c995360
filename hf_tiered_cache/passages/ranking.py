"""Rankings of a passage's tokens by how much they need their true context, and the sidecar that holds the scores.

A ranking is by energy at low frequencies (CacheTune, Section 4.1) or by change of KV (ours). All layers share one
ranking, since hidden states are dropped once. All rankings share the KV.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Literal

import numpy as np
import torch

from ..store.disk import SegmentStore
from ..store.segment import SegmentReader

Ranking = Literal["low_frequency", "high_frequency", "random", "context"]
RANKINGS: tuple[Ranking, ...] = ("low_frequency", "high_frequency", "random", "context")
"""Rankings: the paper's, its baselines, and ours (`context`): how much a token's KV changes when other text precedes
it."""

RANKED_IN_CONTEXT = ("context",)
"""Rankings that compute a passage once more, after other text. Their scores are comparable between passages."""

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys before rotation, and values, of one layer: `[heads, tokens, dim]`."""


def band_energy(tensor: torch.Tensor, alpha: float, low: bool = True) -> torch.Tensor:
    """Return the norm of each token, over all heads, after a low-pass or high-pass filter along the tokens.

    Args:
        tensor: `[heads, tokens, dim]`, keys before rotation or values.
        alpha: Share of the frequencies that are low.
        low: Whether to keep the low frequencies; otherwise the high ones.

    Returns:
        float32 `[tokens]`.
    """
    tokens = tensor.shape[1]
    spectrum = torch.fft.rfft(tensor.float(), dim=1)  # [heads, tokens // 2 + 1, dim]
    cut = int(alpha * spectrum.shape[1])
    spectrum[:, slice(cut, None) if low else slice(0, cut)] = 0
    kept = torch.fft.irfft(spectrum, n=tokens, dim=1)
    return kept.square().sum((0, 2)).sqrt_()


def change(here: KV, kv_in_context: KV) -> torch.Tensor:
    """Return how much each token's keys and values change in context, relative to their norms: float32 `[tokens]`."""
    moved = torch.zeros(here[0].shape[1])
    for mine, other in zip(here, kv_in_context, strict=True):
        wide = mine.float()
        moved += (wide - other.float()).square().sum((0, 2)) / wide.square().sum((0, 2)).clamp_min(1e-30)
    return moved.sqrt_()


def rank_tokens(
    layers: Iterable[KV], ranking: Ranking, alpha: float, kv_in_context: Iterable[KV] | None = None
) -> np.ndarray:
    """Return how much it matters that each token of a passage is computed in its true context.

    Args:
        layers: KV of each layer, of the passage computed alone.
        ranking: One of `RANKINGS`.
        alpha: See `band_energy`.
        kv_in_context: KV of each layer, of the passage computed after other text; for `RANKED_IN_CONTEXT`.

    Returns:
        float32 `[tokens]`, summed over the layers. Energies are normalized per layer; changes are relative already.
    """
    scores = []
    others = iter(kv_in_context or ())
    for pair in layers:
        if ranking == "random":
            return np.random.default_rng(pair[0].shape[1]).random(pair[0].shape[1]).astype(np.float32)
        if ranking == "context":
            score = change(pair, next(others))
        else:
            keys, values = (band_energy(tensor, alpha, ranking == "low_frequency") for tensor in pair)
            energy = keys + values
            score = energy / energy.sum().clamp_min(1e-30)
        scores.append(score.double())
    return torch.stack(scores).sum(0).float().numpy()


RANKINGS_KIND = "rankings"
"""Kind of the sidecar, which holds float32 `[tokens]` for each ranking name."""
Columns = dict[str, np.ndarray]
"""Scores by ranking name, float32 `[tokens]`: how much it matters that each token is computed in its true context."""


class KeptRankings:
    """Token rankings in sidecars of their segments.

    Losing one does no harm: tokens are then taken in another order.

    Args:
        disk: Segment store.
    """

    def __init__(self, disk: SegmentStore) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Hashable, dict[str, np.ndarray]]] = {}  # by segment: version and scores

    def of(self, reader: SegmentReader) -> Columns:
        """Return the scores of a segment by ranking, including those just written by another process."""
        return dict(self._arrays(reader))

    def keep(self, reader: SegmentReader, columns: Mapping[str, np.ndarray]) -> bool:
        """Add or replace scores. Return whether they are stored now (see `Sidecars.keep`)."""
        arrays = dict(self._arrays(reader))
        arrays |= {name: np.asarray(column, np.float32) for name, column in columns.items()}
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        return self._disk.sidecars.keep(reader, RANKINGS_KIND, tensors, {})

    def _arrays(self, reader: SegmentReader) -> dict[str, np.ndarray]:
        """Return all scores in the sidecar of a segment."""
        version = self._version(reader)
        with self._lock:
            known = self._known.get(reader.id)
        if known is not None and known[0] == version:
            return known[1]
        kept = {} if version is None else self._disk.sidecars.kept(reader, RANKINGS_KIND, {}) or {}
        arrays = {name: tensor.numpy() for name, tensor in kept.items() if tensor.dtype == torch.float32}
        found = {name: array for name, array in arrays.items() if _is_column(array, reader)}
        with self._lock:
            self._known[reader.id] = version, found
        return found

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments; their ids may be reused."""
        with self._lock:
            for segment in segments:
                self._known.pop(segment, None)

    def _version(self, reader: SegmentReader) -> Hashable:
        """Return the version of a segment's sidecar, or None if there is none."""
        try:
            found = self._disk.backend.find(f"{reader.id}.{RANKINGS_KIND}")
        except OSError:
            return None
        return None if found is None else (reader.header.digests.digest, found.version)


def _is_column(array: np.ndarray, reader: SegmentReader) -> bool:
    right = array.dtype == np.float32 and array.shape == (reader.shape.tokens,)
    return right and bool(np.isfinite(array).all())
