"""Quest's index (Tang et al. 2024, Section 3.3): the minimum and maximum of each channel in a page.

No key of a page can have a larger product with the query than the sum over channels of max(q · min, q · max). Quest has
pages of 16 tokens. Differs from the paper if several query heads share keys, since one selection is made for all of
them: softmax over a head's bounds, summed over the heads. For a single head this keeps Quest's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.decode_index import (
    DecodeIndex,
    best_first,
    cut_in_chunks,
    head_slices,
    log_attention,
    ranking_dtype,
)

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
