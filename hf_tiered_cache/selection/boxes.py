"""Indexes of the bounds of each chunk's keys: Quest's, and clusters of such bounds.

`PageBoundsIndex` is Quest's (Tang et al. 2024, Section 3.3): the minimum and maximum of each channel in a page. No key
of a page can have a larger product with the query than the sum over channels of max(q · min, q · max). Quest has pages
of 16 tokens. Differs from the paper if several query heads share keys, since one selection is made for all of them:
softmax over a head's bounds, summed over the heads. For a single head this keeps Quest's order.

`ClusterBoxIndex` is ours, for keys that a mean hides. The mean of a chunk of eight keys says little about a single key
that matches a query. Per-channel bounds show such a key, but overestimate it: no key reaches the bounds of all channels
at once. A score between the two is better than both: the product with the center of the box, plus a share, `spread`, of
what the extent of the box can add to it. A spread of 1 is Quest's bound. Clusters are formed from the centers. Each
cluster has a box around the boxes of its chunks. These boxes fit their chunks less closely, so they use half the spread
and only preselect candidates: the chunks of the best clusters, four times as many as are selected. The best of these by
their own boxes are selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from .clusters import ClusterIndex, num_clusters, segmented_kmeans
from .decode_index import DecodeIndex, best_first, cut_in_chunks, head_slices, log_attention, ranking_dtype

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class PageBoundsIndex(DecodeIndex):
    """Index of the bounds of each chunk's keys.

    Args:
        boxes: `[kv_heads, chunks, 2 * dim]`, see `ranking_dtype`: middle of the bounds, and distance from it to
            the maximum, times `spread`.
    """

    boxes: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 16, spread: float = 1.0) -> Self:
        """Build the index, see `DecodeIndex`. A `spread` below Quest's 1 ranks between the middle and the bound."""
        parts = []
        for heads in head_slices(keys):
            chunked_keys = cut_in_chunks(keys[heads], chunk_tokens)
            upper, lower = chunked_keys.amax(2).float(), chunked_keys.amin(2).float()
            parts.append(
                torch.cat([(upper + lower) / 2, (upper - lower) * (spread / 2)], -1).to(ranking_dtype(keys.dtype))
            )
        return cls(chunk_tokens, torch.cat(parts))

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
class ClusterBoxIndex(ClusterIndex):
    """Index of clusters of boxes.

    Centroids and representatives have twice the key dimension: one half for the query, one for its absolute values.
    """

    candidates: ClassVar[int] = 4

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int, spread: float = 0.5) -> Self:
        clusters, dtype = num_clusters(keys.shape[1], chunk_tokens), ranking_dtype(keys.dtype)
        parts = []
        for heads in head_slices(keys):
            chunked_keys = cut_in_chunks(keys[heads], chunk_tokens)
            upper, lower = chunked_keys.amax(2).float(), chunked_keys.amin(2).float()  # [heads, chunks, dim]
            middles, extents = (upper + lower) / 2, (upper - lower) / 2
            centroids, cluster_of = segmented_kmeans(middles, clusters)
            cluster_index = cluster_of[..., None].expand_as(middles)
            upper = centroids.scatter_reduce(1, cluster_index, upper, "amax")  # a box includes its centroid
            lower = centroids.scatter_reduce(1, cluster_index, lower, "amin")
            inner = torch.lerp(centroids, (upper + lower) / 2, spread / 2)
            boxes = torch.cat([inner, (upper - lower) * (spread / 4)], -1)
            chunk_boxes = torch.cat([middles, extents * spread], -1)
            parts.append((boxes.to(dtype), cluster_of, chunk_boxes.to(dtype)))
        return cls(chunk_tokens, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @classmethod
    def _comparison_query(cls, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query, query.abs()], -1)
