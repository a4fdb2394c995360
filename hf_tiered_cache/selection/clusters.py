"""KVDRIVE's index (Section 4, "hierarchical index"): mean rotated keys of chunks, and clusters of these means.

A query is compared with the centroids only: half as many as there are chunks of 8 tokens. The best clusters are taken
whole until the budget is spent. The last one is truncated by the query's scores for the means of its chunks; the paper
does not specify this. A chunk is never split. Clusters are numbered by their first chunk, and the chunks of a cluster
are ordered by position.

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
    head_slices,
    joined,
    log_attention,
    log_sum,
    logits,
    mean_keys,
    positions_at_once,
    ranking_dtype,
)

if TYPE_CHECKING:
    from typing_extensions import Self


def segmented_kmeans(
    points: torch.Tensor, clusters: int, segment: int, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster `points` separately for each head.

    Args:
        points: float32 `[heads, n, dim]`.
        clusters: Number of clusters, from 1 to n. Some may remain empty.
        segment: Approximate number of points that are clustered together, except in the last step.
        iterations: Number of iterations within a segment.

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


_MAX_LOG_SCORE = 80.0
"""Maximum logarithm of a score, so that float32 can hold the score. A chunk may score higher than its cluster."""


@dataclass(frozen=True, eq=False)
class ClusterIndex(DecodeIndex):
    """Index of clusters of chunks.

    Args:
        centroids: `[kv_heads, clusters, dim]`, see `ranking_dtype`.
        chunk_order: Chunks, cluster by cluster, int32 `[kv_heads, chunks]`.
        starts: Index in `chunk_order` at which each cluster begins, int32 `[kv_heads, clusters + 1]`. Empty clusters
            come last.
        representatives: Mean of each chunk, `[kv_heads, chunks, dim]`, see `ranking_dtype`; None to order the
            chunks of a cluster by position.
    """

    centroids: torch.Tensor
    chunk_order: torch.Tensor
    starts: torch.Tensor
    representatives: torch.Tensor | None = None
    candidates: ClassVar[int] = 1
    """Number of candidate chunks per chunk to select, for which clusters are searched; 1 takes clusters whole."""

    def __post_init__(self) -> None:
        _ = self.largest, self.has_empty  # synchronizes with the device now, not at the first query

    @classmethod
    def build(
        cls,
        keys: torch.Tensor,
        chunk_tokens: int,
        tokens_per_centroid: int = 16,
        segment_chunks: int = 8192,
        iterations: int = 9,
        keep_representatives: bool = True,
    ) -> Self:
        clusters = -(-keys.shape[1] // max(chunk_tokens, tokens_per_centroid))
        parts = []
        for heads in head_slices(keys):
            means = mean_keys(keys[heads], chunk_tokens)
            clustering = segmented_kmeans(means, clusters, segment_chunks, iterations)
            centroids, chunk_order, starts = by_position(*clustering)
            dtype = ranking_dtype(keys.dtype)
            parts.append((centroids.to(dtype), chunk_order, starts, *([means.to(dtype)] * keep_representatives)))
        return cls(chunk_tokens, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @classmethod
    def merged(cls, indexes: Sequence[Self]) -> Sequence[Self]:
        if len(indexes) < 2:
            return indexes
        chunk_order, starts = _merged_clusters(indexes)
        optional_means = [index.representatives for index in indexes]
        representatives = [means for means in optional_means if means is not None]
        merged_means = torch.cat(representatives, 1) if len(representatives) == len(optional_means) else None
        centroids = torch.cat([index.centroids for index in indexes], 1)
        return [cls(indexes[0].chunk_tokens, centroids, chunk_order.int(), starts.int(), merged_means)]

    @property
    def chunks(self) -> int:
        return self.chunk_order.shape[1]

    @cached_property
    def sizes(self) -> torch.Tensor:
        """Number of chunks per cluster, int32 `[kv_heads, clusters]`."""
        return self.starts.diff(dim=1)

    @cached_property
    def largest(self) -> int:
        """Number of chunks of the largest cluster."""
        return int(self.sizes.max())

    @cached_property
    def has_empty(self) -> bool:
        """True if a cluster has no chunks."""
        return int(self.sizes.min()) == 0

    @classmethod
    def rank_together(
        cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        firsts = list(accumulate((index.chunks for index in indexes), initial=0))  # per index, and the total
        chunk_order, starts = _merged_clusters(indexes)
        sizes = indexes[0].sizes if len(indexes) == 1 else starts.diff(dim=1)
        query = cls._comparison_query(query)
        absent = sizes == 0 if any(index.has_empty for index in indexes) else None
        # rough logits are enough if the candidates are ranked again
        centroids, roughly = [index.centroids for index in indexes], cls.candidates > 1
        weights, totals = log_attention(query, centroids, scaling, absent, roughly=roughly)

        num_candidates = min(count * cls.candidates, firsts[-1])
        best = best_first(weights, min(num_candidates, weights.shape[1]))  # [kv_heads, clusters that may be needed]
        best_sizes = sizes.gather(1, best)
        ends = best_sizes.cumsum(1)
        slots = min(num_candidates + max(index.largest for index in indexes) - 1, firsts[-1])
        place = torch.arange(slots, device=query.device).expand(len(ends), -1).contiguous()
        cluster_rank = torch.searchsorted(ends, place, right=True)  # [kv_heads, slots]: index into `best`
        # mask of the chunks in clusters after the needed ones
        surplus = cluster_rank > cluster_rank[:, num_candidates - 1 : num_candidates]
        cluster_rank.clamp_(max=ends.shape[1] - 1)
        shift = starts.gather(1, best) - ends.sub_(best_sizes)  # offset from a place to its index in `chunk_order`
        chunks = chunk_order.gather(1, place.add_(shift.gather(1, cluster_rank)).clamp_(max=firsts[-1] - 1)).long()
        if cls.candidates > 1:
            rating = _log_weights(query, _representatives_of(indexes, firsts, chunks), scaling, totals)
            chunks, rating = best_named(rating.masked_fill_(surplus, -torch.inf), chunks, count)
            return chunks, rating.clamp_(max=_MAX_LOG_SCORE).exp_()
        cluster = best.gather(1, cluster_rank)
        if all(index.representatives is not None for index in indexes):
            cluster_rank.masked_fill_(surplus, ends.shape[1])
            rating = _log_weights(query, _representatives_of(indexes, firsts, chunks), scaling, totals)
            by_rating = rating.argsort(dim=1, descending=True, stable=True)
            by_cluster = cluster_rank.gather(1, by_rating).argsort(dim=1, stable=True)
            chunks, cluster = (t.gather(1, by_rating).gather(1, by_cluster) for t in (chunks, cluster))
        return chunks[:, :count], weights.gather(1, cluster[:, :count]).exp_()

    @classmethod
    def _comparison_query(cls, query: torch.Tensor) -> torch.Tensor:
        """Return the query as it is multiplied with centroids and representatives."""
        return query


def _merged_clusters(indexes: Sequence[ClusterIndex]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `chunk_order` and `starts` of the clusters of several indexes, numbered across all of them.

    Empty clusters may come at any position.
    """
    if len(indexes) == 1:
        return indexes[0].chunk_order, indexes[0].starts
    firsts = list(accumulate((index.chunks for index in indexes), initial=0))
    order = torch.cat([index.chunk_order + first for index, first in zip(indexes, firsts, strict=False)], 1)
    starts = [index.starts[:, :-1] + first for index, first in zip(indexes, firsts, strict=False)]
    return order, torch.cat([*starts, starts[0].new_full((len(order), 1), firsts[-1])], 1)  # [kv_heads, clusters + 1]


def by_position(centroids: torch.Tensor, cluster_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return centroids, `chunk_order` and `starts`, clusters numbered by their first chunk, empty clusters last."""
    clusters, chunks = centroids.shape[1], cluster_of.shape[1]
    position = torch.arange(chunks, device=cluster_of.device).expand_as(cluster_of)
    first = cluster_of.new_full(centroids.shape[:2], chunks).scatter_reduce_(1, cluster_of, position, "amin")
    renumbered = first.argsort(dim=1, stable=True)  # [heads, clusters]: old number of each cluster
    ascending, chunk_order = renumbered.argsort(dim=1).gather(1, cluster_of).sort(dim=1, stable=True)
    numbers = torch.arange(clusters + 1, device=cluster_of.device).expand(len(centroids), -1).contiguous()
    starts = torch.searchsorted(ascending, numbers)
    return centroids.take_along_dim(renumbered[..., None], 1), chunk_order.int(), starts.int()


def _representatives_of(indexes: Sequence[ClusterIndex], firsts: Sequence[int], chunks: torch.Tensor) -> torch.Tensor:
    """Return representatives, `[kv_heads, n, dim]`, of chunks, `[kv_heads, n]`, numbered across all indexes."""
    result: torch.Tensor | None = None
    heads = torch.arange(len(chunks), device=chunks.device)[:, None]
    for index, first in zip(indexes, firsts, strict=False):
        assert index.representatives is not None
        local_chunks = chunks if len(indexes) == 1 else (chunks - first).clamp_(0, index.chunks - 1)
        rows = local_chunks + heads * index.chunks
        means = index.representatives.flatten(0, 1).index_select(0, rows.flatten())  # much faster than gather
        means = means.unflatten(0, chunks.shape)
        result = means if result is None else torch.where((chunks >= first)[..., None], means, result)
    assert result is not None
    return result


def _log_weights(query: torch.Tensor, keys: torch.Tensor, scaling: float, totals: torch.Tensor) -> torch.Tensor:
    """Return the log weights of keys, `[kv_heads, n, dim]`, relative to the totals of the centroids."""
    step = positions_at_once(query, keys.shape[1])
    pairs = zip(query.split(step, dim=1), totals.split(step, dim=2), strict=True)
    return joined([log_sum(logits(query_part, [keys], scaling).sub_(total)) for query_part, total in pairs])
