"""Decode indexes that the papers compare with, and two bounds: all keys, and random selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.clusters import ClusterIndex
from hf_tiered_cache.selection.decode_index import (
    DecodeIndex,
    Int8KeysIndex,
    best_first,
    cut_in_chunks,
    head_slices,
    log_attention,
    logits,
    mean_keys,
    ranking_dtype,
    side_by_side,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_PRIME = 2_654_435_761
"""Knuth's multiplier for 32-bit hashing."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class ChunkMeanIndex(DecodeIndex):
    """ShadowKV's index (Sun et al. 2024, Section 4): the mean rotated key of each chunk, and outlier chunks.

    The score of a chunk is the softmax over the means for each query head, the largest weight among the query heads of
    a KV head, summed over queries. A mean represents a chunk badly if one of its keys points in another direction. The
    48 chunks with the lowest such cosine are always selected, before all others, and take no part in the softmax.

    Differs from the paper in two ways. Outliers count against the budget, of which they are at most a quarter (in the
    paper there are 48 in addition to 256). And they are determined across all indexes together. The paper's low-rank
    keys on the device are not implemented.

    Args:
        means: Mean keys, `[kv_heads, chunks, dim]`, see `ranking_dtype`.
        outliers: Chunks with the lowest cosines, int32 `[kv_heads, most]`, lowest first.
        cosines: Lowest cosine of a key with its chunk's mean, for each outlier, float32 `[kv_heads, most]`.
    """

    means: torch.Tensor
    outliers: torch.Tensor
    cosines: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 8, outliers: int = 48) -> Self:
        parts = []
        for heads in head_slices(keys):
            means = mean_keys(keys[heads], chunk_tokens)
            chunk_keys = cut_in_chunks(keys[heads], chunk_tokens).float()
            cosines = torch.cosine_similarity(chunk_keys, means[:, :, None], dim=-1).amin(2)  # [some, chunks]
            lowest = best_first(-cosines, min(outliers, means.shape[1]))
            parts.append((means.to(ranking_dtype(keys.dtype)), lowest.int(), cosines.gather(1, lowest)))
        return cls(chunk_tokens, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @property
    def chunks(self) -> int:
        return self.means.shape[1]

    @classmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        firsts = accumulate((index.chunks for index in indexes), initial=0)
        outliers = side_by_side([index.outliers + first for index, first in zip(indexes, firsts, strict=False)]).long()
        num_outliers = min(max(index.outliers.shape[1] for index in indexes), count // 4)
        lowest = best_first(-side_by_side([index.cosines for index in indexes]), num_outliers)
        always = outliers.gather(1, lowest)  # [kv_heads, outliers]
        absent = torch.zeros(len(always), sum(index.chunks for index in indexes), dtype=torch.bool, device=query.device)
        absent.scatter_(1, always, True)
        weights = logits(query, [index.means for index in indexes], scaling)  # [kv_heads, group, n, chunks]
        weights = weights.masked_fill_(absent[:, None, None], -torch.inf).log_softmax(-1).amax(1).logsumexp(1)
        return torch.cat([always, best_first(weights, count - num_outliers)], 1)


@dataclass(frozen=True, eq=False)
class PageBoundsIndex(DecodeIndex):
    """Quest's index (Tang et al. 2024, Section 3.3): the minimum and maximum of each channel in a page.

    No key of a page can have a larger product with the query than the sum over channels of max(q · min, q · max). Quest
    has pages of 16 tokens. Differs from the paper if several query heads share keys, since one selection is made for
    all of them: softmax over a head's bounds, summed over the heads. For a single head this keeps Quest's order.

    Args:
        boxes: `[kv_heads, chunks, 2 * dim]`, see `ranking_dtype`: middle of the bounds, and distance from it to
            the maximum, times `spread`.
    """

    boxes: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 16, spread: float = 1.0) -> Self:
        """Build the index, see `DecodeIndex`. A `spread` below Quest's 1 ranks between the middle and the bound."""

        def boxes(heads: slice) -> torch.Tensor:
            chunked_keys = cut_in_chunks(keys[heads], chunk_tokens)
            upper, lower = chunked_keys.amax(2).float(), chunked_keys.amin(2).float()
            box = torch.cat([(upper + lower) / 2, (upper - lower) * (spread / 2)], -1)
            return box.to(ranking_dtype(keys.dtype))

        return cls(chunk_tokens, torch.cat([boxes(heads) for heads in head_slices(keys)]))

    @property
    def chunks(self) -> int:
        return self.boxes.shape[1]

    @classmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        # max(q · min, q · max) is q · middle + |q| · (max - middle): one product of twice the channels
        query_and_abs = torch.cat([query, query.abs()], -1)
        weights, _ = log_attention(query_and_abs, [index.boxes for index in indexes], scaling)
        return best_first(weights, count)


@dataclass(frozen=True, eq=False)
class TokenClusterIndex(ClusterIndex):
    """RetroInfer's index (Chen et al. 2025, Section 4.2): clusters of the rotated keys of single tokens.

    It is KVDRIVE's index with chunks of one token and without a second stage, since means of one-token chunks would be
    all keys. So the last cluster is truncated by position. Differs from the paper: tokens that are not selected are
    left out of attention, not estimated by their centroid (KVDRIVE also compares with this variant, Section 9.1).
    """

    keeps_representatives = False

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        if chunk_tokens != 1:
            raise ValueError(f"clusters of tokens have chunks of 1 token, not {chunk_tokens}")
        return super().build(keys, chunk_tokens)


@dataclass(frozen=True, eq=False)
class AllKeysIndex(Int8KeysIndex):
    """InfiniGen's ranking with complete keys and queries (Lee et al. 2024): an index as large as the keys themselves.

    InfiniGen uses parts of both. Chunks of one token rank as it would. Keys have their own dtype, and scales are 1.
    """

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        return cls(chunk_tokens, keys.clone(), torch.ones_like(keys[..., :1], dtype=torch.int8))

    def keys_as(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codes.to(dtype)


@dataclass(frozen=True, eq=False)
class RandomIndex(DecodeIndex):
    """Random selection, which any index must beat at the same budget. Knows only the number of chunks.

    Random numbers are derived from the query's bits and the chunk's number. So another query selects other chunks, the
    same query selects the same ones, and several indexes behave as one.

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
