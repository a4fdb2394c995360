"""Similarity of the attention of layers, and its share at the two ends of the sequence (Krul, Sections 4.2 and 5).

The distance of two layers is Euclidean, over all attention weights of a head, and averaged over the heads. It is
computed from sums of products over rows and keys: |a - b|² = a·a + b·b - 2 a·b. The attention row of each query is
computed, added to the sums and dropped, so no tokens × tokens matrix is ever held.

The ends are the first and last tenth of the whole sequence. Where these are is not known before the sequence ends, so
the attention that each position receives is summed up. Uniform attention gives 0.335: the rows near the beginning see
only the first tenth.

A sum cannot be undone, since queries are not kept. So that the last positions can be cropped, sums are kept separately,
in small windows at the end and large ones before (as in an exponential histogram: Datar et al. 2002). Few sums are
held, and cropping loses the sums of about as many more positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from torch.nn.functional import pad

from ..store.memory import to_device

_LARGEST = 1 << 24
"""Maximum number of attention weights held at a time: 64 MiB of float32."""


@dataclass(frozen=True, eq=False)
class AttentionSums:
    """Sums over attention rows, for each sequence of a batch.

    Args:
        products: float32 `[batch, heads, layers, layers]`: products of the weights of two layers, summed over keys and
            rows.
        received: float32 `[batch, layers, positions]`: weights that each position received, summed over rows, mean over
            the heads. Positions after the last one received nothing.
        rows: float32 `[batch]`: number of rows in the sums.
        pads: int64 `[batch]`: number of left-padding positions.
    """

    products: torch.Tensor
    received: torch.Tensor
    rows: torch.Tensor
    pads: torch.Tensor

    def __add__(self, other: AttentionSums) -> AttentionSums:
        shorter, longer = sorted((self.received, other.received), key=lambda received: received.shape[-1])
        received = longer + pad(shorter, (0, longer.shape[-1] - shorter.shape[-1]))
        return AttentionSums(self.products + other.products, received, self.rows + other.rows, self.pads)

    def times(self, weight: float) -> AttentionSums:
        """Return these sums with every row counted `weight` times."""
        return AttentionSums(self.products * weight, self.received * weight, self.rows * weight, self.pads)

    def select(self, rows: torch.Tensor) -> AttentionSums:
        """Return the sums of reordered sequences: sequence i becomes sequence `rows[i]`, or the only one there is."""
        rows = rows.to(self.rows.device)
        if len(self.rows) == 1:
            rows = torch.zeros_like(rows)
        return AttentionSums(*(tensor.index_select(0, rows) for tensor in self._tensors))

    def to(self, device: torch.device) -> AttentionSums:
        """Return these sums on a device."""
        return AttentionSums(*(tensor.to(device) for tensor in self._tensors))

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.products, self.received, self.rows, self.pads


@dataclass(frozen=True, eq=False)
class QueryRows:
    """Queries of some positions in every layer.

    Args:
        positions: Padded positions, int64 `[n]`, ascending, on the host.
        pads: Number of left-padding positions of each sequence.
        queries: Queries of each layer, `[batch, heads, n, dim]`, rotated.
        scalings: Scale of the logits of each layer; None for dim ** -0.5.
    """

    positions: np.ndarray
    pads: Sequence[int]
    queries: Sequence[torch.Tensor]
    scalings: Sequence[float | None]

    def first(self, count: int) -> QueryRows:
        """Return the queries of the first `count` positions."""
        return replace(self, positions=self.positions[:count], queries=[query[:, :, :count] for query in self.queries])

    def select(self, rows: torch.Tensor) -> QueryRows:
        """Return the queries of reordered sequences: sequence i becomes sequence `rows[i]`."""
        queries = [query.index_select(0, rows.to(query.device)) for query in self.queries]
        return replace(self, pads=[self.pads[row] for row in rows.tolist()], queries=queries)


def attention_sums(
    rows: QueryRows, keys: Sequence[torch.Tensor], device: torch.device, group_rows: int
) -> list[AttentionSums]:
    """Compute attention sums for consecutive groups of `group_rows` rows.

    Args:
        rows: Queries of the attention rows.
        keys: Keys of each layer, `[batch, kv_heads, positions, dim]`, rotated, from padded position 0 on.
        device: Device to compute on. Keys on other devices are copied there, a few KV heads at a time.
        group_rows: Number of rows per group.
    """
    batch, heads, _, _ = rows.queries[0].shape
    kv_heads, count = keys[0].shape[1], len(rows.positions)
    group, layers = heads // kv_heads, len(keys)
    # [batch, kv_heads, group, n, dim]; float32, as attention kernels compute logits
    queries = [
        query.to(device).float().mul(query.shape[-1] ** -0.5 if scaling is None else scaling).unflatten(1, (-1, group))
        for query, scaling in zip(rows.queries, rows.scalings, strict=True)
    ]
    visible = _Visibility(rows, device)
    products = torch.zeros(-(-count // group_rows), batch, heads, layers, layers, device=device)
    num_keys = int(rows.positions[-1]) + 1
    received = torch.zeros(len(products), batch, layers, num_keys, device=device)
    heads_per_step = min(kv_heads, max(1, _LARGEST // (layers * batch * group * num_keys)))
    for head in range(0, kv_heads, heads_per_step):
        kv = slice(head, head + heads_per_step)
        # [batch, kv, dim, keys] for each layer
        layer_keys = [layer[:, kv, :num_keys].to(device).float().transpose(2, 3) for layer in keys]
        width = group * layer_keys[0].shape[1]  # query heads
        rows_per_step = min(group_rows, max(1, _LARGEST // (layers * batch * width * num_keys)))
        for number in range(len(products)):
            stop = min(count, (number + 1) * group_rows)
            for first in range(number * group_rows, stop, rows_per_step):
                span = slice(first, min(stop, first + rows_per_step))
                weights = visible.attention([query[:, kv, :, span] for query in queries], layer_keys, span)
                flat = weights.flatten(3).flatten(1, 2)  # [layers, batch * width, n * keys]
                head_products = torch.bmm(flat.transpose(0, 1), flat.permute(1, 2, 0)).unflatten(0, (batch, width))
                products[number, :, head * group : head * group + width] += head_products
                # [layers, batch, keys]
                received[number, :, :, : weights.shape[-1]] += weights.sum((2, 3)).transpose(0, 1) / heads
    spans = [slice(first, first + group_rows) for first in range(0, count, group_rows)]
    pads = to_device(np.array(rows.pads, np.int64), device)
    return [
        AttentionSums(products[number], received[number], visible.rows(span), pads) for number, span in enumerate(spans)
    ]


class _Visibility:
    """Positions that each row sees: those up to its own, without padding."""

    def __init__(self, rows: QueryRows, device: torch.device) -> None:
        self._positions, self._pads = rows.positions, rows.pads
        self._padded = any(rows.pads)
        self._device = device

    def rows(self, span: slice) -> torch.Tensor:
        """Return the number of rows that are not padding, float32 `[batch]`."""
        count = [(self._positions[span] >= pad).sum() for pad in self._pads]
        return to_device(np.array(count, np.float32), self._device)

    def attention(self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], span: slice) -> torch.Tensor:
        """Return attention weights, float32 `[layers, batch, kv_heads * group, n, keys]`; 0 for padding rows."""
        num_keys = int(self._positions[span][-1]) + 1
        batch, kv_heads, group, count, _ = queries[0].shape
        weights = torch.empty(len(keys), batch, kv_heads, group * count, num_keys, device=self._device)
        for layer, (query, layer_keys) in enumerate(zip(queries, keys, strict=True)):
            torch.matmul(query.flatten(2, 3), layer_keys[..., :num_keys], out=weights[layer])
        weights = weights.view(len(keys), batch, kv_heads * group, count, num_keys)
        if count > 1 or self._padded:
            weights.masked_fill_(self._hidden(span, num_keys), -torch.inf)
        weights = weights.softmax(-1)
        return weights.nan_to_num_() if self._padded else weights

    def _hidden(self, span: slice, num_keys: int) -> torch.Tensor:
        """Return the mask of positions that rows do not see, bool `[batch or 1, 1, n, keys]`."""
        positions, place = to_device(self._positions[span], self._device), torch.arange(num_keys, device=self._device)
        hidden = place > positions.view(1, 1, -1, 1)
        if not self._padded:
            return hidden
        return hidden | (place < to_device(np.array(self._pads), self._device).view(-1, 1, 1, 1))


@dataclass(frozen=True, eq=False)
class SampledWindow:
    """Attention sums of one sampled window.

    Args:
        stop: Position after the last sampled one.
        sampled: Number of sampled positions.
        parts: Number of windows that it was merged from.
        sums: Sums over the sampled positions, each weighted by the number of positions that it represents.
    """

    stop: int
    sampled: int
    parts: int
    sums: AttentionSums

    def __add__(self, other: SampledWindow) -> SampledWindow:
        sampled, parts = self.sampled + other.sampled, self.parts + other.parts
        return SampledWindow(max(self.stop, other.stop), sampled, parts, self.sums + other.sums)

    def select(self, rows: torch.Tensor) -> SampledWindow:
        """Return the window with reordered rows: row i is the former row `rows[i]`."""
        return replace(self, sums=self.sums.select(rows))

    def to(self, device: torch.device) -> SampledWindow:
        """Return the window on `device`."""
        return replace(self, sums=self.sums.to(device))


class SampledWindows:
    """Attention sums of one cache, in sampled windows."""

    def __init__(self, windows: Sequence[SampledWindow] = ()) -> None:
        self._windows = list(windows)  # ascending
        self._order: torch.Tensor | None = None  # former row of each current row, not applied yet

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def stop(self) -> int:
        """Position after the last one that was counted."""
        return max((window.stop for window in self._windows), default=0)

    def add(self, windows: Sequence[SampledWindow]) -> None:
        """Add windows, and merge older ones."""
        self._apply_order()
        sorted_windows = sorted([*self._windows, *windows], key=lambda window: window.stop)
        merged_windows, parts = list[SampledWindow](), 0  # from the last one back
        for window in reversed(sorted_windows):
            if merged_windows and merged_windows[-1].parts + window.parts <= parts - merged_windows[-1].parts:
                merged_windows[-1] = window + merged_windows[-1]
            else:
                merged_windows.append(window)
            parts += window.parts
        self._windows = merged_windows[::-1]

    def crop(self, num_positions: int) -> None:
        """Keep only windows within the first `num_positions` positions."""
        self._windows = [window for window in self._windows if window.stop <= num_positions]

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i by the former row `rows[i]`. Sums follow later, since beam search does this at every token."""
        self._order = reordered(self._order, rows)

    def to(self, device: torch.device) -> None:
        """Move the sums to `device`."""
        self._windows = [window.to(device) for window in self._windows]

    def total(self) -> SampledWindow | None:
        """Return the sum of all windows, or None if there are none."""
        self._apply_order()
        return reduce(add, self._windows) if self._windows else None

    def copy(self) -> SampledWindows:
        """Return an independent copy."""
        self._apply_order()
        return SampledWindows(self._windows)

    def _apply_order(self) -> None:
        if (order := self._order) is not None:
            self._windows, self._order = [window.select(order) for window in self._windows], None


def reordered(order: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the row order `order` (None: unchanged) followed by the reordering `rows`."""
    return rows if order is None else order.index_select(0, rows.to(order.device))
