"""CacheBlend and EPIC, with which CacheTune's paper compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ConfigError, with_type
from ..restore.plan import SegmentSlice
from .base import is_count
from .passages import Passages, check_share, count_of

if TYPE_CHECKING:
    from ..layers import LayerTensors


@dataclass(frozen=True, kw_only=True)
class Epic(Passages):
    """EPIC baseline (LegoLink): the first tokens of each passage are recomputed.

    In a passage that was computed alone, the first tokens are an attention sink, which they are not within a prompt.

    Args:
        recompute: Share of each passage that is recomputed; None for `first` tokens.
        first: Number of tokens to recompute; 16 is the paper's (Hu et al. 2025).
        lead: See `Passages`. The paper's is 0: the first token of each passage is then an attention sink, and the
            purpose of the method is to recompute it.
    """

    recompute: float | None = field(default=None, kw_only=False)
    first: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.first):
            raise ConfigError(f"first must be a number of tokens, an int, not {with_type(self.first)}")
        if self.recompute is not None:
            check_share(self.recompute)

    @classmethod
    def paper(cls, recompute: float | None = None) -> Epic:
        """Return the paper's settings: passages are computed with nothing before them."""
        return cls(recompute, lead=0)

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        return [np.arange(min(self._beginning(piece.count), piece.count), piece.count) for piece in passages]

    def _beginning(self, count: int) -> int:
        return self.first if self.recompute is None else count_of(self.recompute, count)


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Passages):
    """CacheBlend baseline: the tokens with the largest deviation of values at layer 1 are recomputed (Yao et al. 2025).

    Layer 0 computes all tokens. Layer 1 computes the keys and values of all tokens, and its other outputs for the
    selected tokens only. Stored KV of all tokens is read from layer 1 on.

    Args:
        recompute: Final share of all reused tokens that is recomputed.
        gradual: Number of further layers over which the share falls from twice this value, with a comparison at each
            (the paper's Section 5.1). 0 uses the final share at layer 1, as the authors' public code does.
    """

    recompute: float = field(default=0.15, kw_only=False)
    gradual: int = 0

    check_layer = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.recompute)
        if not is_count(self.gradual):
            raise ConfigError(f"gradual must be a number of layers, an int, not {with_type(self.gradual)}")

    @classmethod
    def paper(cls, recompute: float = 0.15) -> CacheBlend:
        """Return the paper's settings: passages are computed alone."""
        return cls(recompute, lead=1)

    def narrowing(self, layers: int) -> tuple[tuple[int, float], ...]:
        """See `Passages`."""
        last = max(0, min(self.gradual, layers - 2))
        shares = (self.recompute * (1 + (last - step) / max(1, last)) for step in range(last))
        return tuple(enumerate([*(min(1.0, share) for share in shares), self.recompute], start=1))[: layers - 1]

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        return [np.empty(0, np.int64)] * len(passages)

    def kv_deviation(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """See `Passages`. Only values are compared."""
        return (stored[1].float() - computed[1].float()).square().sum((1, 3))
