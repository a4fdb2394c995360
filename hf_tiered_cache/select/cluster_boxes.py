"""KVDRIVE's index with bounding boxes instead of means: beyond the paper, for keys that a mean hides.

The mean of a chunk of eight keys says little about a single key that matches a query. Per-channel bounds (Quest) show
such a key, but overestimate it: no key reaches the bounds of all channels at once. A score between the two is better
than both: the product with the center of the box, plus a share, `spread`, of what the extent of the box can add to it.
A spread of 1 is Quest's bound.

Clusters are formed from the centers. Each cluster has a box around the boxes of its chunks. These boxes fit their
chunks less closely, so they use half the spread and only preselect candidates: clusters are searched until they have
four times the chunks to select, and the best of these chunks by their own boxes are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from .clusters import ClusterIndex, by_position
from .decode_index import cut_in_chunks, head_slices
from .kmeans import segmented_kmeans

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class ClusterBoxIndex(ClusterIndex):
    """Index of clusters of boxes.

    Centroids and representatives have twice the key dimension: one half for the query, one for its absolute values.
    """

    candidates: ClassVar[int] = 4

    @classmethod
    def build(
        cls,
        keys: torch.Tensor,
        chunk_tokens: int,
        tokens_per_centroid: int = 16,
        segment_chunks: int = 8192,
        iterations: int = 9,
        keep_representatives: bool = True,
        spread: float = 0.5,
    ) -> Self:
        if not keep_representatives:
            raise ValueError("candidates are chosen by what represents them")
        clusters = -(-keys.shape[1] // max(chunk_tokens, tokens_per_centroid))
        parts = []
        for some in head_slices(keys):
            cut = cut_in_chunks(keys[some], chunk_tokens)
            most, least = cut.amax(2).float(), cut.amin(2).float()  # [some, chunks, dim]
            middles, extents = (most + least) / 2, (most - least) / 2
            centroids, cluster_of = segmented_kmeans(middles, clusters, segment_chunks, iterations)
            towards = cluster_of[..., None].expand_as(middles)
            most = centroids.scatter_reduce(1, towards, most, "amax")  # a box includes its centroid
            least = centroids.scatter_reduce(1, towards, least, "amin")
            inner = torch.lerp(centroids, (most + least) / 2, spread / 2)
            boxes, chunk_order, starts = by_position(torch.cat([inner, (most - least) * (spread / 4)], -1), cluster_of)
            own = torch.cat([middles, extents * spread], -1)
            parts.append((boxes.to(keys.dtype), chunk_order, starts, own.to(keys.dtype)))
        return cls(chunk_tokens, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @classmethod
    def _as_compared(cls, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query, query.abs()], -1)
