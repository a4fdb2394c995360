"""Ranking of a passage's tokens by how much they need their true context: energy at low frequencies, or change of KV.

All layers share one ranking, since hidden states are dropped once. Sources: CacheTune, Section 4.1; the ranking by
change is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch

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
