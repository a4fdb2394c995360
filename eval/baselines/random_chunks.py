"""random selection, which any index must beat at the same budget.

Random numbers are derived from the query's bits and the chunk's number. So another query selects other chunks, the same
query selects the same ones, and several indexes behave as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.decode_index import DecodeIndex, best_first

if TYPE_CHECKING:
    from typing_extensions import Self

_PRIME = 2_654_435_761
"""Knuth's multiplier for 32-bit hashing."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class RandomIndex(DecodeIndex):
    """Index that knows only the number of chunks.

    Args:
        sizes: Number of chunks, int32 `[kv_heads, 1]`.
    """

    sizes: torch.Tensor

    def __post_init__(self) -> None:
        _ = self.chunks  # synchronizes with the device now, not at the first query

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int) -> Self:
        chunks = -(-keys.shape[1] // chunk_tokens)
        return cls(chunk_tokens, torch.full((len(keys), 1), chunks, dtype=torch.int32, device=keys.device))

    @cached_property
    def chunks(self) -> int:
        return int(self.sizes[0, 0])

    @classmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        bits = query.float().contiguous().view(torch.int32).long().unflatten(0, (len(indexes[0].sizes), -1))
        number = torch.arange(sum(index.chunks for index in indexes), device=query.device)
        drawn = _mixed(bits.sum((1, 2, 3))[:, None] * _PRIME + number).float() / 2**32  # [kv_heads, chunks]
        return best_first(drawn, count)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Map int64 numbers to pseudorandom numbers below 2 ** 32, by the last steps of MurmurHash3."""
    numbers = numbers & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & _MASK
    return numbers ^ (numbers >> 16)
