"""Indexes of all rotated keys. They rank chunks by the actual attention weights of their tokens.

`Int8KeysIndex` has a quarter of the size of float32 keys, and selects the same tokens except among nearly equal ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from .decode_index import DecodeIndex, best_first, log_attention, side_by_side

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class KeysIndex(DecodeIndex):
    """Index that holds every key individually."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of keys."""

    @abstractmethod
    def keys_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rotated keys in `dtype`, `[kv_heads, tokens, dim]`."""

    @property
    def chunks(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens)

    @classmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        weights, _ = log_attention(query, [index.keys_as(query.dtype) for index in indexes], scaling)
        parts = weights.split([index.num_tokens for index in indexes], dim=1)
        scores = side_by_side([index._chunk_weights(part) for index, part in zip(indexes, parts, strict=True)])
        return best_first(scores, count)

    def _chunk_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Add up the weights of each chunk's tokens: from log weights `[kv_heads, tokens]` to `[kv_heads, chunks]`."""
        if self.chunk_tokens == 1:
            return weights
        missing = -weights.shape[1] % self.chunk_tokens
        return pad(weights, (0, missing), value=-torch.inf).unflatten(1, (-1, self.chunk_tokens)).logsumexp(-1)


@dataclass(frozen=True, eq=False)
class Int8KeysIndex(KeysIndex):
    """Index of all keys in int8, with one scale per token and head.

    Args:
        codes: int8 `[kv_heads, tokens, dim]`.
        scales: float32 `[kv_heads, tokens, 1]`. A key is its codes times its scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    divisible = True

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        float_keys = keys.float()
        scales = float_keys.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        return cls(chunk_tokens, (float_keys / scales).round_().to(torch.int8), scales)

    @property
    def num_tokens(self) -> int:
        return self.codes.shape[1]

    def keys_as(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codes.to(dtype).mul_(self.scales)

    def part(self, first: int, tokens: int) -> Self:
        span = slice(first, first + tokens)
        return type(self)(self.chunk_tokens, self.codes[:, span], self.scales[:, span])

    @classmethod
    def merged(cls, indexes: Sequence[Self]) -> Sequence[Self]:
        size = indexes[0].chunk_tokens
        if len(indexes) == 1 or any(index.num_tokens % size for index in indexes[:-1]):
            return indexes
        codes, scales = (torch.cat([getattr(index, name) for index in indexes], 1) for name in ("codes", "scales"))
        return [cls(size, codes, scales)]
