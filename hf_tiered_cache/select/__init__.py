"""Selectors and decode indexes: choose, within a token budget, the stored tokens that queries attend to."""

from __future__ import annotations

from .all_keys import AllKeysIndex, Int8KeysIndex
from .chunk_means import ChunkMeanIndex
from .cluster_boxes import ClusterBoxIndex
from .clusters import ClusterIndex
from .decode_index import DecodeIndex
from .page_bounds import PageBoundsIndex
from .random_chunks import RandomIndex
from .token_clusters import TokenClusterIndex

DECODE_INDEXES: dict[str, type[DecodeIndex]] = {
    "clusters": ClusterIndex,
    "cluster_boxes": ClusterBoxIndex,
    "page_bounds": PageBoundsIndex,
    "chunk_means": ChunkMeanIndex,
    "token_clusters": TokenClusterIndex,
    "keys": AllKeysIndex,
    "int8_keys": Int8KeysIndex,
    "random": RandomIndex,
}

__all__ = ["DECODE_INDEXES", "DecodeIndex"]
