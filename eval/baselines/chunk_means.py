"""ShadowKV's index (Sun et al. 2024, Section 4), the mean rotated key of each chunk and outlier chunks.

The score of a chunk is the softmax over the means for each query head, the largest weight among the query heads of a KV
head, summed over queries. A mean represents a chunk badly if one of its keys points in another direction. The 48 chunks
with the lowest such cosine are always selected, before all others, and take no part in the softmax.

Differs from the paper in two ways. Outliers count against the budget, of which they are at most a quarter (in the paper
there are 48 in addition to 256). And they are determined across all indexes together. The paper's low-rank keys on the
device are not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.decode_index import (
    DecodeIndex,
    best_first,
    cut_in_chunks,
    head_slices,
    logits,
    mean_keys,
    ranking_dtype,
    side_by_side,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class ChunkMeanIndex(DecodeIndex):
    """Index of chunk means.

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
