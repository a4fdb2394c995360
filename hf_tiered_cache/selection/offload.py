"""Offloaded generated KV: older computed tokens move to host memory, are indexed, and are selected like restored ones.

While decoding, a layer holds the KV that it computes. When it holds `INDEXED_TOKENS` tokens more than the recent ones
that are always attended to, the oldest are offloaded (KVDRIVE: the index grows while decoding). They are not stored,
because KV computed after a selection is not exact. Their memory belongs to the cache and is not part of the store's
budgets.

`MicroBatches` determines how many rows are ranked together before their blocks are requested, by measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..store.memory import to_device
from .decode_index import DecodeIndex

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


_ROUNDS = 3
"""Number of passes measured per size; the median counts."""


class MicroBatches:
    """Size of micro-batches (KVDRIVE, Section 6.1), tuned on this machine.

    Smaller micro-batches overlap ranking with more reads, but cost more processor time per row. Which effect is larger
    depends on the machine and on the tier of the blocks. So all rows, halves, quarters and so on down to single rows
    are measured in turn, after an unmeasured first pass that finds no blocks in place, and the fastest size is kept.
    The selection does not depend on the size.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        """Rows per micro-batch; None until it is measured."""
        self._rows = 0
        self._seconds: dict[int, list[float]] = {}
        self._schedule: Iterator[int] = iter(())
        self._current_size: int | None = None
        self._elapsed = 0.0

    def begin(self) -> None:
        """Begin a pass: record the time of the last pass for its size, and take the next size to measure."""
        if self.size is None and self._elapsed:
            if self._current_size is not None:
                self._seconds.setdefault(self._current_size, []).append(self._elapsed)
            self._current_size, self._elapsed = next(self._schedule, None), 0.0
            if self._current_size is None and self._seconds:
                self.size = min(self._seconds, key=lambda size: statistics.median(self._seconds[size]))

    def of(self, rows: int) -> int:
        """Return the micro-batch size for a layer with `rows` rows."""
        if rows != self._rows:  # first pass, or another batch size
            self._rows, self.size, self._current_size = rows, rows if rows == 1 else None, None
            self._seconds.clear()
            self._schedule = (size for _ in range(_ROUNDS) for size in _sizes(rows))
        return self.size or self._current_size or rows

    def took(self, seconds: float) -> None:
        """Add the time of one layer of this pass."""
        self._elapsed += seconds


def _sizes(rows: int) -> Iterator[int]:
    """Yield all rows, half of them (rounded up), and so on down to 1: 6, 3, 2, 1."""
    while rows > 1:
        yield rows
        rows = -(-rows // 2)
    yield 1
