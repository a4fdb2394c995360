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
        self._turns: Iterator[int] = iter(())
        self._now: int | None = None
        self._took = 0.0

    def begin(self) -> None:
        """Begin a pass: record the time of the last pass for its size, and take the next size to measure."""
        if self.size is None and self._took:
            if self._now is not None:
                self._seconds.setdefault(self._now, []).append(self._took)
            self._now, self._took = next(self._turns, None), 0.0
            if self._now is None and self._seconds:
                self.size = min(self._seconds, key=lambda size: statistics.median(self._seconds[size]))

    def of(self, rows: int) -> int:
        """Return the micro-batch size for a layer with `rows` rows."""
        if rows != self._rows:  # first pass, or another batch size
            self._rows, self.size, self._now = rows, rows if rows == 1 else None, None
            self._seconds.clear()
            self._turns = (size for _ in range(_ROUNDS) for size in _sizes(rows))
        return self.size or self._now or rows

    def took(self, seconds: float) -> None:
        """Add the time of one layer of this pass."""
        self._took += seconds


def _sizes(rows: int) -> Iterator[int]:
    """Yield all rows, half of them (rounded up), and so on down to 1: 6, 3, 2, 1."""
    while rows > 1:
        yield rows
        rows = -(-rows // 2)
    yield 1
