"""KVDRIVE's index (Section 4, "hierarchical index"): mean rotated keys of chunks, and clusters of these means.

A query is compared with the centroids only: half as many as there are chunks of 8 tokens. The best clusters are taken
whole until the budget is spent. The last one is truncated by the query's scores for the means of its chunks; the paper
does not specify this. A chunk is never split.

Details that the paper leaves open follow RetroInfer, the source of the clustering: softmax over the centroids for each
query head, summed over the query heads of a KV head, regardless of cluster size. Differs from RetroInfer in that the
chunks of a cluster are ordered by their means even if the cluster is taken whole, so that a larger count only adds
chunks to the selection for a smaller one.

Clustering is spherical k-means for many heads at once, with reproducible results. It follows RetroInfer's "segmented
clustering" (Chen et al. 2025, Section 4.2): subtract the mean of the points; take initial centroids at even strides;
run several iterations within each segment of some thousand points, which has its own centroids; run one step over all
points and centroids, with plain means as centroids; add the mean again. Differs in three ways. Initial centroids are
unit vectors like all later ones, so that the first assignment does not favor long keys. A cluster that becomes empty
keeps its direction. And sums do not depend on the order in which threads finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import embedding_bag, normalize

from .decode_index import (
    LARGEST,
    DecodeIndex,
    best_first,
    best_named,
    cut_in_chunks,
    head_slices,
    joined,
    log_attention,
    log_sum,
    logits,
    mean_keys,
    positions_at_once,
    ranking_dtype,
    side_by_side,
)

if TYPE_CHECKING:
    from typing_extensions import Self


_TOKENS_PER_CENTROID = 16
_SPREAD = 0.5  # share of the extent of a box that counts (see `ClusterBoxIndex`)


def num_clusters(tokens: int, chunk_tokens: int) -> int:
    """Return the number of clusters of the chunks of `tokens` tokens."""
    return -(-tokens // max(chunk_tokens, _TOKENS_PER_CENTROID))


def segmented_kmeans(
    points: torch.Tensor, clusters: int, segment: int = 8192, iterations: int = 9
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster `points`, float32 `[heads, n, dim]`, separately for each head. Some clusters may remain empty.

    Before the last step, about `segment` points are clustered together, in `iterations` steps. `clusters` is 1 to n.

    Returns:
        Centroids, float32 `[heads, clusters, dim]`, the mean of all points for empty clusters; and the cluster of each
            point, int64 `[heads, n]`.
    """
    mean = points.mean(1, keepdim=True)
    centred = points - mean
    pieces = min(clusters, -(-points.shape[1] // segment))
    ends = [(points.shape[1] * i // pieces, clusters * i // pieces) for i in range(pieces + 1)]
    segment_directions = []
    for (begin, first), (end, last) in pairwise(ends):
        segment_points = centred[:, begin:end].contiguous()
        directions = strided_directions(segment_points, last - first)
        for _ in range(iterations):
            directions = spherical_step(segment_points, directions)
        segment_directions.append(directions)
    cluster_of = nearest(centred, torch.cat(segment_directions, 1))
    sums, counts = cluster_sums(centred, cluster_of, clusters)
    return sums.div_(counts.clamp(min=1)[..., None]).add_(mean), cluster_of


def strided_directions(points: torch.Tensor, count: int) -> torch.Tensor:
    """Return the directions of `count` points at the middle of equal strides: `[heads, count, dim]`."""
    middles = (torch.arange(count, device=points.device) * 2 + 1) * points.shape[1] // (2 * count)
    return normalize(points[:, middles], dim=-1)


def spherical_step(points: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Run one iteration. It never decreases the sum over points of the product with their direction."""
    sums, counts = cluster_sums(points, nearest(points, directions), directions.shape[1])
    return torch.where(counts[..., None] > 0, normalize(sums, dim=-1), directions)


def nearest(points: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Return the direction with the largest product for each point, the first on ties: int64 `[heads, n]`."""
    columns = directions.transpose(1, 2)
    rows = max(1, LARGEST // (len(points) * columns.shape[2]))
    return torch.cat([(part @ columns).argmax(-1) for part in points.split(rows, dim=1)], 1)


def cluster_sums(points: torch.Tensor, cluster_of: torch.Tensor, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of each cluster's points, added in order, `[heads, clusters, dim]`, and their number."""
    heads = len(points)
    names = torch.arange(heads * clusters, device=points.device)
    cluster_of = (cluster_of + names[::clusters, None]).flatten()
    ascending, order = cluster_of.sort(stable=True)
    starts = torch.searchsorted(ascending, names)  # int64 [heads * clusters]
    sums = embedding_bag(order, points.reshape(-1, points.shape[2]), starts, mode="sum")
    counts = starts.diff(append=starts.new_tensor([len(order)]))
    return sums.unflatten(0, (heads, clusters)), counts.unflatten(0, (heads, clusters))


@dataclass(frozen=True, eq=False)
class ClusterIndex(DecodeIndex):
    """Index of clusters of chunks.

    Args:
        centroids: `[kv_heads, clusters, dim]`, see `ranking_dtype`.
        cluster_of: Cluster of each chunk, int64 `[kv_heads, chunks]`. Some clusters may be empty.
        representatives: Mean of each chunk, `[kv_heads, chunks, dim]`, see `ranking_dtype`; None to order the
            chunks of a cluster by position.
    """

    centroids: torch.Tensor
    cluster_of: torch.Tensor
    representatives: torch.Tensor | None = None
    candidates: ClassVar[int] = 1
    """Number of candidate chunks per chunk to select, taken from the best clusters; 1 takes clusters whole."""
    keeps_representatives: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self.largest, self.is_empty  # synchronizes with the device now, not at the first query

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int) -> Self:
        parts = [cls._tensors_of(keys[heads], chunk_tokens) for heads in head_slices(keys)]
        return cls(chunk_tokens, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @classmethod
    def _tensors_of(cls, keys: torch.Tensor, chunk_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the index for some heads."""
        means, dtype = mean_keys(keys, chunk_tokens), ranking_dtype(keys.dtype)
        centroids, cluster_of = segmented_kmeans(means, num_clusters(keys.shape[1], chunk_tokens))
        return centroids.to(dtype), cluster_of, *([means.to(dtype)] * cls.keeps_representatives)

    @classmethod
    def merged(cls, indexes: Sequence[Self]) -> Sequence[Self]:
        if len(indexes) < 2:
            return indexes
        optional_means = [index.representatives for index in indexes]
        representatives = [means for means in optional_means if means is not None]
        merged_means = torch.cat(representatives, 1) if len(representatives) == len(optional_means) else None
        cluster_of, _ = _joined_clusters(indexes)
        centroids = torch.cat([index.centroids for index in indexes], 1)
        return [cls(indexes[0].chunk_tokens, centroids, cluster_of, merged_means)]

    @property
    def chunks(self) -> int:
        return self.cluster_of.shape[1]

    def sizes(self) -> torch.Tensor:
        """Return the number of chunks per cluster, int64 `[kv_heads, clusters]`."""
        sizes = self.cluster_of.new_zeros(self.centroids.shape[:2])
        return sizes.scatter_add_(1, self.cluster_of, torch.ones_like(self.cluster_of))

    @cached_property
    def largest(self) -> int:
        """Number of chunks of the largest cluster."""
        return int(self.sizes().max())

    @cached_property
    def is_empty(self) -> torch.Tensor:
        """Mask of empty clusters, bool `[kv_heads, clusters]`."""
        return self.sizes() == 0

    @classmethod
    def rank_together(cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int) -> torch.Tensor:
        cluster_of, is_empty = _joined_clusters(indexes)
        query, centroids = cls._comparison_query(query), [index.centroids for index in indexes]
        # rough logits are enough if the candidates are ranked again
        weights, totals = log_attention(query, centroids, scaling, is_empty, roughly=cls.candidates > 1)
        weights = weights.gather(1, cluster_of)  # [kv_heads, chunks]
        if any(index.representatives is None for index in indexes):
            return best_first(weights, count)
        total = weights.shape[1]
        if cls.candidates > 1:
            chunks = best_first(weights, min(count * cls.candidates, total))
        else:  # the last cluster is ranked whole, too
            chunks = best_first(weights, min(count + max(index.largest for index in indexes) - 1, total))
        rating = _log_weights(query, _representatives_of(indexes, chunks), scaling, totals)
        if cls.candidates > 1:
            return best_named(rating, chunks, count)
        by_rating = rating.argsort(dim=1, descending=True, stable=True)
        chunks = chunks.gather(1, by_rating)
        by_cluster = weights.gather(1, chunks).argsort(dim=1, descending=True, stable=True)
        return chunks.gather(1, by_cluster)[:, :count]

    @classmethod
    def _comparison_query(cls, query: torch.Tensor) -> torch.Tensor:
        """Return the query as it is multiplied with centroids and representatives."""
        return query


@dataclass(frozen=True, eq=False)
class ClusterBoxIndex(ClusterIndex):
    """Index of clusters of boxes (ours), for keys that a mean hides.

    The mean of a chunk of eight keys says little about a single key that matches a query. The bounds of each channel
    (Quest, Tang et al. 2024) show such a key, but overestimate it: no key reaches the bounds of all channels at once. A
    score between the two is better than both: the product with the center of the box, plus a share, the spread, of what
    the extent of the box can add to it. A spread of 1 is Quest's bound. Clusters are formed from the centers. Each
    cluster has a box around the boxes of its chunks. These boxes fit their chunks less closely, so they use half the
    spread and only preselect candidates: the chunks of the best clusters, four times as many as are selected. The best
    of these by their own boxes are selected.

    Centroids and representatives have twice the key dimension: one half for the query, one for its absolute values.
    """

    candidates: ClassVar[int] = 4

    @classmethod
    def _tensors_of(cls, keys: torch.Tensor, chunk_tokens: int) -> tuple[torch.Tensor, ...]:
        chunked_keys, dtype = cut_in_chunks(keys, chunk_tokens), ranking_dtype(keys.dtype)
        upper, lower = chunked_keys.amax(2).float(), chunked_keys.amin(2).float()  # [heads, chunks, dim]
        middles, extents = (upper + lower) / 2, (upper - lower) / 2
        centroids, cluster_of = segmented_kmeans(middles, num_clusters(keys.shape[1], chunk_tokens))
        cluster_index = cluster_of[..., None].expand_as(middles)
        upper = centroids.scatter_reduce(1, cluster_index, upper, "amax")  # a box includes its centroid
        lower = centroids.scatter_reduce(1, cluster_index, lower, "amin")
        inner = torch.lerp(centroids, (upper + lower) / 2, _SPREAD / 2)
        boxes = torch.cat([inner, (upper - lower) * (_SPREAD / 4)], -1)
        chunk_boxes = torch.cat([middles, extents * _SPREAD], -1)
        return boxes.to(dtype), cluster_of, chunk_boxes.to(dtype)

    @classmethod
    def _comparison_query(cls, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query, query.abs()], -1)


def _joined_clusters(indexes: Sequence[ClusterIndex]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cluster of each chunk, int64 `[kv_heads, chunks]`, and a mask of empty clusters, bool.

    Clusters and chunks are numbered across all indexes.
    """
    if len(indexes) == 1:
        return indexes[0].cluster_of, indexes[0].is_empty
    firsts = accumulate((index.centroids.shape[1] for index in indexes), initial=0)
    cluster_of = side_by_side([index.cluster_of + first for index, first in zip(indexes, firsts, strict=False)])
    return cluster_of, side_by_side([index.is_empty for index in indexes])


def _representatives_of(indexes: Sequence[ClusterIndex], chunks: torch.Tensor) -> torch.Tensor:
    """Return representatives, float32 `[kv_heads, n, dim]`, of chunks, int64 `[kv_heads, n]`, across all indexes."""
    result: torch.Tensor | None = None
    first, heads = 0, torch.arange(len(chunks), device=chunks.device)[:, None]
    for index in indexes:
        assert index.representatives is not None
        local_chunks = chunks if len(indexes) == 1 else (chunks - first).clamp_(0, index.chunks - 1)
        rows = local_chunks + heads * index.chunks
        means = index.representatives.flatten(0, 1).index_select(0, rows.flatten())  # much faster than gather
        means = means.float().unflatten(0, chunks.shape)
        result = means if result is None else torch.where((chunks >= first)[..., None], means, result)
        first += index.chunks
    assert result is not None
    return result


def _log_weights(query: torch.Tensor, keys: torch.Tensor, scaling: float, totals: torch.Tensor) -> torch.Tensor:
    """Return the log weights of keys, `[kv_heads, n, dim]`, relative to the totals of the centroids."""
    step = positions_at_once(query, keys.shape[1])
    pairs = zip(query.split(step, dim=1), totals.split(step, dim=2), strict=True)
    return joined([log_sum(logits(query_part, [keys], scaling).sub_(total)) for query_part, total in pairs])
