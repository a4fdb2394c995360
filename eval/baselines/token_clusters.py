"""RetroInfer's index (Chen et al. 2025, Section 4.2), clusters of the rotated keys of single tokens.

It is KVDRIVE's index with chunks of one token and without a second stage, since means of one-token chunks would be all
keys. So the last cluster is truncated by position. Differs from the paper: tokens that are not selected are left out of
attention, not estimated by their centroid (KVDRIVE also compares with this variant, Section 9.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.clusters import ClusterIndex

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class TokenClusterIndex(ClusterIndex):
    """Index of clusters of tokens."""

    keeps_representatives = False

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        if chunk_tokens != 1:
            raise ValueError(f"clusters of tokens have chunks of 1 token, not {chunk_tokens}")
        return super().build(keys, chunk_tokens)
