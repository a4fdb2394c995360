"""Spherical k-means for many heads at once, with reproducible results.

Follows RetroInfer's "segmented clustering" (Chen et al. 2025, Section 4.2): subtract the mean of the points; take
initial centroids at even strides; run several iterations of spherical k-means within each segment of some thousand
points, which has its own centroids; run one step over all points and centroids, with plain means as centroids; add the
mean again.

Differs in three ways. Initial centroids are unit vectors like all later ones, so that the first assignment does not
favor long keys. A cluster that becomes empty keeps its direction. And sums do not depend on the order in which threads
finish.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import embedding_bag, normalize

from .decode_index import LARGEST


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
    found = []
    for (begin, first), (end, last) in pairwise(ends):
        some = centred[:, begin:end].contiguous()
        directions = strided_directions(some, last - first)
        for _ in range(iterations):
            directions = spherical_step(some, directions)
        found.append(directions)
    cluster_of = nearest(centred, torch.cat(found, 1))
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
    return torch.cat([(some @ columns).argmax(-1) for some in points.split(rows, dim=1)], 1)


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
