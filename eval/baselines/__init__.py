"""Methods and indexes that exist for comparison only. An import registers them, as a plug-in would."""

from __future__ import annotations

from hf_tiered_cache.methods import register_method
from hf_tiered_cache.selection import register_index

from .indexes import AllKeysIndex, ChunkMeanIndex, PageBoundsIndex, RandomIndex, TokenClusterIndex
from .methods import H2O, AttentionStore, MiniCache, PartialRecompute, Recompute, TopTokens

__all__ = ["H2O", "AttentionStore", "MiniCache", "PartialRecompute", "Recompute", "TopTokens"]

register_method("recompute", Recompute)
register_method("attention_store", AttentionStore)
register_method("partial_recompute", PartialRecompute)
register_method("h2o", H2O)
register_method("mini_cache", MiniCache)
register_index("chunk_means", ChunkMeanIndex)
register_index("token_clusters", TokenClusterIndex)
register_index("keys", AllKeysIndex)
register_index("page_bounds", PageBoundsIndex)
register_index("random", RandomIndex)
