"""Computed tokens far behind, which are chosen like restored ones: their KV lies in host memory, and is indexed.

While decoding, what a layer has computed stands in its columns. When that is `INDEXED_TOKENS` more than the last ones
that are attended to always, those in front leave the columns (KVDRIVE: the index grows while decoding). They are in no
store, since what stands behind a choice is no exact KV: the memory is the cache's own, beside the store's budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..select.decode_index import DecodeIndex
from ..transfers import to_device

INDEXED_TOKENS = 1024
"""Tokens that leave a layer's columns together, and get an index of their own."""


@dataclass(frozen=True, eq=False)
class GrownChunks:
    """What has left the columns of one layer and row. It never changes: what leaves later makes a new one.

    Args:
        first: the number of the first chunk; restored ones come before.
        keys: rotated, `[kv_heads, chunks, chunk_tokens, dim]`, on the host; values likewise.
        indexes: of these, in order, on the layer's device.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    indexes: tuple[DecodeIndex, ...]

    @property
    def numbers(self) -> range:
        """The chunks."""
        return range(self.first, self.first + self.keys.shape[1])

    def get(self, heads: np.ndarray, chunks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of chunks, int64 `[n]`, of these heads: `[n, chunk_tokens, dim]` each."""
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
    """What has left the columns so far, and rotated keys and values, `[kv_heads, tokens, dim]`, that leave now.

    Args:
        before: what has left before, if anything.
        first: the number of the first chunk of all.
        chunk_tokens: of a chunk; the tokens are whole chunks.
        kind: of the index.
    """
    index = kind.build(keys, chunk_tokens)
    some = [tensor.unflatten(1, (-1, chunk_tokens)).cpu() for tensor in (keys, values)]
    if before is None:
        return GrownChunks(first, some[0].clone(), some[1].clone(), (index,))
    whole = [torch.cat(pair, dim=1) for pair in zip((before.keys, before.values), some, strict=True)]
    return GrownChunks(before.first, whole[0], whole[1], (*before.indexes, index))
