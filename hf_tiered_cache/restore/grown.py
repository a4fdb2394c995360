"""Offloaded generated KV: older computed tokens move to host memory, are indexed, and are selected like restored ones.

While decoding, a layer holds the KV that it computes. When it holds `INDEXED_TOKENS` tokens more than the recent ones
that are always attended to, the oldest are offloaded (KVDRIVE: the index grows while decoding). They are not stored,
because KV computed after a selection is not exact. Their memory belongs to the cache and is not part of the store's
budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..select.decode_index import DecodeIndex
from ..transfers import to_device

INDEXED_TOKENS = 1024
"""Number of tokens that are offloaded together and share one index."""


@dataclass(frozen=True, eq=False)
class GrownChunks:
    """Offloaded generated KV of one layer and row. Immutable: offloading more tokens creates a new object.

    Args:
        first: Number of the first chunk; restored chunks come before it.
        keys: Rotated keys, `[kv_heads, chunks, chunk_tokens, dim]`, in host memory.
        values: Like `keys`.
        indexes: Indexes of these chunks, in order, on the layer's device.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    indexes: tuple[DecodeIndex, ...]

    @property
    def numbers(self) -> range:
        """Range of chunk numbers."""
        return range(self.first, self.first + self.keys.shape[1])

    def get(self, heads: np.ndarray, chunks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of `chunks` of `heads`, int64 `[n]`: `[n, chunk_tokens, dim]` each, on `device`."""
        at = to_device(heads, torch.device("cpu")), to_device(chunks - self.first, torch.device("cpu"))
        keys, values = (tensor[at].to(device, non_blocking=True) for tensor in (self.keys, self.values))
        return keys, values


def grown(
    before: GrownChunks | None,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk_tokens: int,
    kind: type[DecodeIndex],
) -> GrownChunks:
    """Append newly offloaded keys and values to the KV offloaded before, and return both with their indexes.

    Args:
        before: KV offloaded before; None if this is the first.
        first: Number of the first offloaded chunk; used if `before` is None.
        keys: `[kv_heads, tokens, dim]`, rotated.
        values: `[kv_heads, tokens, dim]`.
        chunk_tokens: Tokens per chunk; divides `tokens`.
        kind: Index class.
    """
    index = kind.build(keys, chunk_tokens)
    some = [tensor.unflatten(1, (-1, chunk_tokens)).cpu() for tensor in (keys, values)]
    if before is None:
        return GrownChunks(first, some[0].clone(), some[1].clone(), (index,))
    whole = [torch.cat(pair, dim=1) for pair in zip((before.keys, before.values), some, strict=True)]
    return GrownChunks(before.first, whole[0], whole[1], (*before.indexes, index))
