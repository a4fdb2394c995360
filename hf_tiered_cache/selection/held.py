"""Chunks that a layer holds of a row while decoding: in place, set aside in device memory, and offloaded.

A layer also holds the KV that it computes. When it holds `INDEXED_TOKENS` tokens more than the recent ones that are
always attended to, the oldest are offloaded: they move to host memory, are indexed, and are selected like restored ones
(KVDRIVE: the index grows while decoding). They are not stored, because KV computed after a selection is not exact.
Their memory belongs to the cache and is not part of the store's budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..store.memory import to_device
from .decode_index import DecodeIndex
from .window_slots import Window

INDEXED_TOKENS = 1024
"""Number of tokens that are offloaded together and share one index."""


@dataclass(frozen=True, eq=False)
class OffloadedChunks:
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


def append_offloaded(
    previous: OffloadedChunks | None,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk_tokens: int,
    kind: type[DecodeIndex],
) -> OffloadedChunks:
    """Append newly offloaded keys and values to the KV offloaded before, and return both with their indexes.

    Args:
        previous: KV offloaded before; None if this is the first.
        first: Number of the first offloaded chunk; used if `previous` is None.
        keys: `[kv_heads, tokens, dim]`, rotated.
        values: `[kv_heads, tokens, dim]`.
        chunk_tokens: Tokens per chunk; divides `tokens`.
        kind: Index class.
    """
    index = kind.build(keys, chunk_tokens)
    blocks = [tensor.unflatten(1, (-1, chunk_tokens)).cpu() for tensor in (keys, values)]
    if previous is None:
        return OffloadedChunks(first, blocks[0].clone(), blocks[1].clone(), (index,))
    merged = [torch.cat(pair, dim=1) for pair in zip((previous.keys, previous.values), blocks, strict=True)]
    return OffloadedChunks(previous.first, merged[0], merged[1], (*previous.indexes, index))


@dataclass(eq=False)
class HeldChunks:
    """Chunks that one layer holds of one row.

    Args:
        prefix: Number of the row's prefix.
        window: Tells which chunks are at its positions, and which are set aside: for each kv head, or for all together.
        first: Position of the first chunk that may be replaced.
        size: Tokens per chunk.
        aside: Keys and values of the chunks set aside, `[slots, chunk_tokens, dim]` each; None before there are any.
        offloaded: Offloaded generated KV that is selected from, too, if any.
    """

    prefix: int
    window: Window
    first: int
    size: int
    aside: tuple[torch.Tensor, torch.Tensor] | None = None
    offloaded: OffloadedChunks | None = None

    def fork(self) -> HeldChunks:
        """Return an independent copy, because rows may be copied."""
        aside = None if self.aside is None else (self.aside[0].clone(), self.aside[1].clone())
        return replace(self, window=self.window.copy(), aside=aside)
