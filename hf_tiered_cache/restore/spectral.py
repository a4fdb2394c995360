"""Which tokens of a passage most need their true context: by their energy at low frequencies, or by how far they move.

One ranking for all layers, since hidden states are dropped once. Sources: CacheTune, Section 4.1; the change is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch

Ranking = Literal["low_frequency", "high_frequency", "random", "context"]
RANKINGS: tuple[Ranking, ...] = ("low_frequency", "high_frequency", "random", "context")
"""The paper's, what it compares it with, and ours: how far a token's KV moves when other text stands before it."""

RANKED_IN_CONTEXT = ("context",)
"""Those for which a passage is computed once more, behind other text; their scores compare between passages."""

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys before their rotation, and values, of one layer: `[heads, tokens, dim]`."""


def band_energy(tensor: torch.Tensor, alpha: float, low: bool = True) -> torch.Tensor:
    """What is left of each token below (or above) a cut-off frequency: its norm over all heads together.

    Args:
        tensor: `[heads, tokens, dim]`, keys before their rotation or values.
        alpha: share of the frequencies that are low.
        low: whether these are kept, or the others.

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
    """How far each token's keys and values move when computed in context, as a share of their norms: `[tokens]`."""
    moved = torch.zeros(here[0].shape[1])
    for mine, other in zip(here, kv_in_context, strict=True):
        wide = mine.float()
        moved += (wide - other.float()).square().sum((0, 2)) / wide.square().sum((0, 2)).clamp_min(1e-30)
    return moved.sqrt_()


def rank_tokens(
    layers: Iterable[KV], ranking: Ranking, alpha: float, kv_in_context: Iterable[KV] | None = None
) -> np.ndarray:
    """How much it matters that each token of a passage is computed in its true context.

    Args:
        layers: of each layer what the passage has, computed alone.
        ranking: one of `RANKINGS`.
        alpha: see `band_energy`.
        kv_in_context: the same, computed behind other text, for those `RANKED_IN_CONTEXT`.

    Returns:
        float32 `[tokens]`, summed over the layers. Energies count alike in each; a change is a share already.
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
