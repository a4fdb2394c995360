"""InfiniGen's ranking with complete keys and queries (Lee et al. 2024): an index as large as the keys themselves.

InfiniGen uses parts of both. Chunks of one token rank as it would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.decode_index import Int8KeysIndex

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class AllKeysIndex(Int8KeysIndex):
    """Index of all keys in their own dtype: scales are 1."""

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        return cls(chunk_tokens, keys.clone(), torch.ones_like(keys[..., :1], dtype=torch.int8))

    def keys_as(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codes.to(dtype)
