"""KVDRIVE's index with boxes for means: beyond the paper, for keys that a mean hides.

A chunk's mean says nothing of a single key that a query looks for among seven others. The bounds of its channels do
(Quest), but promise what no key has in all channels at once. What lies between is better than both: the product with
the middle of the box, and a part of what the box's extent can add to it, `spread`; 1 would be Quest's bound.

Clusters are of the middles, and have a box around those of their chunks. These differ more from chunk to chunk, so half
the spread is taken, and clusters only say where to look: into those that have four times the chunks to choose, of which
the best by their own boxes are chosen.
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
    """Clusters of boxes.

    Centroids and representatives are as wide as two keys: one for the query, one for its magnitudes.
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
            most = centroids.scatter_reduce(1, towards, most, "amax")  # a centroid lies in its box
            least = centroids.scatter_reduce(1, towards, least, "amin")
            inner = torch.lerp(centroids, (most + least) / 2, spread / 2)
            boxes, chunk_order, starts = by_position(torch.cat([inner, (most - least) * (spread / 4)], -1), cluster_of)
            own = torch.cat([middles, extents * spread], -1)
            parts.append((boxes.to(keys.dtype), chunk_order, starts, own.to(keys.dtype)))
        return cls(chunk_tokens, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @classmethod
    def _as_compared(cls, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query, query.abs()], -1)
