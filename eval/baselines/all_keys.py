"""InfiniGen's ranking with complete keys and queries (Lee et al. 2024): an index as large as the keys themselves.

InfiniGen uses parts of both. Chunks of one token rank as it would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_tiered_cache.selection.decode_index import KeysIndex

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class AllKeysIndex(KeysIndex):
    """Index of all keys in their own dtype.

    Args:
        keys: Rotated keys, `[kv_heads, tokens, dim]`.
    """

    keys: torch.Tensor

    @classmethod
    def build(cls, keys: torch.Tensor, chunk_tokens: int = 1) -> Self:
        return cls(chunk_tokens, keys.clone())

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]

    def keys_as(self, dtype: torch.dtype) -> torch.Tensor:
        return self.keys.to(dtype)
