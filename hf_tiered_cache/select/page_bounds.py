"""Quest's index (Tang et al. 2024, Section 3.3), as a baseline: the least and largest value of each channel in a page.

No key of a page can have a larger product with the query than the sum over channels of max(q · min, q · max). Pages
of 16 tokens are Quest's. Differs from the paper where several query heads share keys, since one choice is made for
all of them: softmax over a head's bounds, summed over the heads. For a single head that leaves Quest's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .decode_index import DecodeIndex, best_first, cut_in_chunks, head_slices, log_attention

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class PageBoundsIndex(DecodeIndex):
    """Bounds of the keys of each chunk.

    Args:
        bounds: `[kv_heads, chunks, 2 * dim]`, in the dtype of the keys: largest values, then least ones.
    """

    bounds: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 16) -> Self:
        parts = []
        for some in head_slices(keys):
            cut = cut_in_chunks(keys[some], chunk_tokens)
            parts.append(torch.cat([cut.amax(2), cut.amin(2)], -1))
        return cls(chunk_tokens, torch.cat(parts))

    @property
    def chunks(self) -> int:
        return self.bounds.shape[1]

    @classmethod
    def rank_together(
        cls, indexes: Sequence[Self], query: torch.Tensor, scaling: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # max(q · min, q · max) is q · max where q is positive, else q · min: one product of twice the channels
        halves = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
        weights, _ = log_attention(halves, [index.bounds for index in indexes], scaling)
        best = best_first(weights, count)
        return best, weights.gather(1, best).exp_()
