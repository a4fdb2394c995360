"""Which tokens of a passage carry its meaning to what stands behind it: its energy at low frequencies.

Source: CacheTune, Section 4.1. One ranking for all layers, since hidden states are dropped once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch

from ..geometry import TokenOrder

Ranking = Literal["low_frequency", "high_frequency", "random"]
RANKINGS: tuple[Ranking, ...] = ("low_frequency", "high_frequency", "random")
"""The paper's, and what it compares it with."""


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


def rank_tokens(layers: Iterable[tuple[torch.Tensor, torch.Tensor]], ranking: Ranking, alpha: float) -> np.ndarray:
    """How much it matters that each token of a passage is computed in its true context.

    Args:
        layers: of each layer keys before their rotation and values, `[heads, tokens, dim]`.
        ranking: by which energy, or none.
        alpha: see `band_energy`.

    Returns:
        float64 `[tokens]`, summed over the layers, each of which counts alike.
    """
    scores = []
    for keys, values in layers:
        if ranking == "random":
            return np.random.default_rng(keys.shape[1]).random(keys.shape[1])
        energy = sum(band_energy(tensor, alpha, ranking == "low_frequency") for tensor in (keys, values))
        scores.append((energy / energy.sum().clamp_min(1e-30)).double())
    return torch.stack(scores).sum(0).numpy()


def ranked(scores: np.ndarray, layers: int) -> TokenOrder:
    """The tokens by falling score, of equals the first, in the same order at every layer."""
    return TokenOrder.by_importance(np.broadcast_to(scores, (layers, len(scores))))
