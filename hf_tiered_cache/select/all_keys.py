"""The index that leaves nothing out: every rotated key. It ranks chunks by the very attention that their tokens get.

It is as large as the keys, so it is a baseline. With chunks of one token it ranks as InfiniGen (Lee et al., OSDI 2024)
would with whole keys and queries, where that takes parts of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from .decode_index import DecodeIndex, best_first, log_attention, side_by_side

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class AllKeysIndex(DecodeIndex):
    """All keys.

    Args:
        keys: `[kv_heads, tokens, dim]`, in their dtype.
    """

    keys: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        return cls(chunk_tokens, keys.clone())

    @property
    def chunks(self) -> int:
        return -(-self.keys.shape[1] // self.chunk_tokens)

    @classmethod
    def rank_together(
        cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, _ = log_attention(query, [index.keys for index in indexes], scaling)
        each = weights.split([index.keys.shape[1] for index in indexes], dim=1)
        scores = side_by_side([index._of_chunks(some) for index, some in zip(indexes, each, strict=True)])
        best = best_first(scores, count)
        return best, scores.gather(1, best).exp_()

    def _of_chunks(self, weights: torch.Tensor) -> torch.Tensor:
        """Logarithms `[kv_heads, tokens]`, summed as numbers to `[kv_heads, chunks]`."""
        if self.chunk_tokens == 1:
            return weights
        missing = -weights.shape[1] % self.chunk_tokens
        return pad(weights, (0, missing), value=-torch.inf).unflatten(1, (-1, self.chunk_tokens)).logsumexp(-1)
