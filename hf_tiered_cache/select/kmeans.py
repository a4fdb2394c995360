"""k-means over directions, for many heads at once and with the same result each time.

RetroInfer's recipe (Chen et al. 2025, Section 4.2, "segmented clustering"): points less their mean; first centroids at
even strides; several iterations of spherical k-means inside each segment of some thousand points, whose centroids are
apart; one step over all points and centroids, whose centroids are plain means; the mean is added back.

It differs in that the first centroids are unit vectors as all later ones, so that the first assignment does not favour
long keys, that a cluster which gets empty keeps its direction, and that sums do not depend on the order in which
threads arrive.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import embedding_bag, normalize

from .decode_index import LARGEST


def segmented_kmeans(
    points: torch.Tensor, clusters: int, segment: int, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of `points`, float32 `[heads, n, dim]`, for each head.

    Args:
        clusters: from 1 to n, some of which may remain empty.
        segment: about as many points are clustered together, but for the last step.
        iterations: inside a segment.

    Returns:
        Centroids, float32 `[heads, clusters, dim]`, of empty clusters the mean of all points, and the cluster of each
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
    """The directions of `count` of the points, the middles of equal strides: `[heads, count, dim]`."""
    middles = (torch.arange(count, device=points.device) * 2 + 1) * points.shape[1] // (2 * count)
    return normalize(points[:, middles], dim=-1)


def spherical_step(points: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """One iteration: the sum over all points of their product with their own direction never falls."""
    sums, counts = cluster_sums(points, nearest(points, directions), directions.shape[1])
    return torch.where(counts[..., None] > 0, normalize(sums, dim=-1), directions)


def nearest(points: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """The direction with which each point has the largest product, of equals the first: int64 `[heads, n]`."""
    columns = directions.transpose(1, 2)
    rows = max(1, LARGEST // (len(points) * columns.shape[2]))
    return torch.cat([(some @ columns).argmax(-1) for some in points.split(rows, dim=1)], 1)


def cluster_sums(points: torch.Tensor, cluster_of: torch.Tensor, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of each cluster's points, added in their order, `[heads, clusters, dim]`, and how many they are."""
    heads = len(points)
    names = torch.arange(heads * clusters, device=points.device)
    cluster_of = (cluster_of + names[::clusters, None]).flatten()
    ascending, order = cluster_of.sort(stable=True)
    starts = torch.searchsorted(ascending, names)  # int64 [heads * clusters]
    sums = embedding_bag(order, points.reshape(-1, points.shape[2]), starts, mode="sum")
    counts = starts.diff(append=starts.new_tensor([len(order)]))
    return sums.unflatten(0, (heads, clusters)), counts.unflatten(0, (heads, clusters))
