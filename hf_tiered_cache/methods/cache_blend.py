"""CacheBlend and EPIC, with which CacheTune's paper compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..restore.plan import SegmentSlice
from .base import is_count, require
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
        require(is_count(self.first), "first", "a number of tokens, an int", self.first)
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
        recompute: Share of all reused tokens that is recomputed, from layer 1 on, as in the authors' public code.
    """

    recompute: float = field(default=0.15, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.recompute)

    @classmethod
    def paper(cls, recompute: float = 0.15) -> CacheBlend:
        """Return the paper's settings: passages are computed alone."""
        return cls(recompute, lead=1)

    def narrowing(self, layers: int) -> tuple[int, float] | None:
        """See `Passages`."""
        return (1, self.recompute) if layers > 1 else None

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        return [np.empty(0, np.int64)] * len(passages)

    def kv_deviation(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """See `Passages`. Only values are compared."""
        return (stored[1].float() - computed[1].float()).square().sum((1, 3))
