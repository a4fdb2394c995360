"""Reselection while decoding: at each token, layers replace deselected chunks by newly selected ones, in place.

A row's restored positions hold leading and trailing tokens that never change, and selected chunks between them. A
deselected chunk may be set aside in device memory (see `Window`). Chunks that a layer holds neither in place nor aside
are fetched from the tiers. Attention does not depend on the order, since every key carries its position, nor on where a
chunk came from.

Two subclasses of `DecodeSelector` select: `TokenDecodeSelector` tokens by attention, once per period of layers, and
`WindowDecodeSelector` (`window.py`) chunks by an index. `DecodeSelection` moves what they select. The papers of
ContiguousKV and IMPRESS select only once per prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import torch

from ..restore.fetch import Fetcher
from ..store.memory import to_device
from ..tiers.collector import StatsCollector
from ..tiers.residency import Residency
from .fetched import Request, Rotate, RowPrefix, RowTokens, UnitTable
from .held import Fetches, HeldChunks, Moves, Window
from .indexes import RowIndexes
from .selectors import SelectionInput, Selector, check_selection

MICRO_BATCH = 8
"""Number of rows that are ranked together (KVDRIVE, Section 6.1). Reads of earlier rows overlap with ranking the next.
The selection does not depend on it."""

Choice = tuple[np.ndarray, np.ndarray | None]
"""Selected chunks, int64 `[sets, chunks]`, and candidates, best first, for the eviction of the window; see `Window`."""


@dataclass(frozen=True, eq=False)
class DecodeSelector(ABC):
    """Decode selector of a cache, kept for the lifetime of the cache.

    Args:
        periods: Groups of layers that share a selection.
        prefixes: Restored tokens of each row group.
        budgets: Number of restored tokens that each layer holds of each prefix.
    """

    residency: Residency
    device_of: Callable[[int], torch.device]
    periods: Sequence[Sequence[int]]
    prefixes: Sequence[RowPrefix]
    budgets: Sequence[int]

    may_stay: ClassVar[bool]
    """True if the last selection may be kept if blocks of the next one cannot be read."""

    @cached_property
    def number_of(self) -> dict[int, int]:
        """Number of the period of each layer."""
        return {layer: number for number, period in enumerate(self.periods) for layer in period}

    @abstractmethod
    def row(self, layer: int, prefix: int, tokens: np.ndarray, first: int) -> HeldChunks | None:
        """Return the state of a layer's row, or None if the row never reselects, because it holds all tokens.

        The layer holds the restored `tokens` of a prefix, int64 `[sets, n]`, in order, from position `first` on.
        """

    @abstractmethod
    def select(
        self, layer: int, rows: Mapping[int, HeldChunks], query: torch.Tensor, keys: torch.Tensor, scaling: float | None
    ) -> dict[int, Choice]:
        """Select for the queries of a period's first layer, for some rows. See `DecodeSelection.reselect`."""


@dataclass(frozen=True, eq=False)
class TokenDecodeSelector(DecodeSelector):
    """Decode selector of single tokens by their attention, for all layers of a period.

    Args:
        selector: Selects one set of tokens for all heads, or one for each.
        keys: For each period and prefix, the rotated keys of the restored tokens at the period's first layer,
            `[kv_heads, tokens, dim]`, for as many heads as the selector needs. They stay in memory. Empty if it uses
            an index.
        indexes: Indexes of these keys, for a selector that uses them.
    """

    selector: Selector
    keys: Mapping[tuple[int, int], torch.Tensor]
    indexes: RowIndexes | None

    may_stay = True

    def row(self, layer: int, prefix: int, tokens: np.ndarray, first: int) -> HeldChunks | None:
        if tokens.shape[1] == self.prefixes[prefix].tokens:
            return None
        return HeldChunks(prefix, Window.filled(tokens, self.prefixes[prefix].tokens), first, 1)

    def select(
        self, layer: int, rows: Mapping[int, HeldChunks], query: torch.Tensor, keys: torch.Tensor, scaling: float | None
    ) -> dict[int, Choice]:
        choices: dict[int, Choice] = {}
        for row, state in rows.items():
            request = SelectionInput(
                query[row],
                keys[row, :, state.first + state.window.num_columns :],
                partial(self._keys_of, layer, state.prefix),
                scaling,
                self.prefixes[state.prefix].chunks(layer, self.selector.per_head),
                state.window.num_columns,
                tuple if self.indexes is None else partial(self.indexes.held, layer, state.prefix),
                layer,
            )
            tokens = self.selector.reselect(request, state.window.columns)  # a chunk is a token
            check_selection(self.selector, tokens, request)
            choices[row] = tokens, None
        return choices

    def _keys_of(self, layer: int, prefix: int, heads: int | None) -> torch.Tensor:
        return self.keys[self.number_of[layer], prefix]


@dataclass(frozen=True, eq=False)
class _Update:
    """Update of one row at one layer: planned moves, and the chunks to fetch from the tiers, by head and chunk.

    Args:
        restored: Chunks to fetch.
        place: Index of each of these chunks among those of its head, int64 `[n]`.
        tokens: Tokens of these chunks.
    """

    row: int
    state: HeldChunks
    moves: Moves
    restored: Fetches
    place: np.ndarray
    tokens: RowTokens
    requests: list[Request]


class DecodeSelection:
    """Decode selections of one pass of the cache that owns the decode selector."""

    def __init__(self, decode_selector: DecodeSelector, collector: StatsCollector) -> None:
        self._decode_selector, self._collector = decode_selector, collector
        self.fetcher = Fetcher(decode_selector.residency, collector, decode_selector.device_of)
        """Fetcher of the pass. Its `cancel` releases all block handles, wherever the pass has stopped."""
        self._number = -1  # of the current period
        self._choices: dict[int, Choice] = {}  # of the current period, by row

    def reselect(
        self,
        layer: int,
        rows: Sequence[HeldChunks | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> None:
        """Select for a layer's queries and replace deselected tokens by newly selected ones, in place.

        Args:
            layer: Index of a layer with full attention.
            rows: State of each row, updated in place; None for a row that never reselects (see `DecodeSelector.row`).
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, entries, dim]`, all keys that the layer holds, restored ones first.
            values: Like `keys`.
            rotate_: Rotates stored keys.
            scaling: Scale of the logits; None for dim ** -0.5.

        Raises:
            RestoreError: A block did not arrive; nothing has changed.
        """
        decode_selector = self._decode_selector
        number = decode_selector.number_of[layer]
        period = decode_selector.periods[number]
        selects = layer == period[0]
        if selects:
            self._number, self._choices, self._table = number, {}, UnitTable(self.fetcher, period)
        elif number != self._number:  # the first layer keeps its selection since it could not be read
            return
        states = {row: state for row, state in enumerate(rows) if state is not None}
        updates: list[_Update] = []
        for first in range(0, len(rows), MICRO_BATCH):  # selection overlaps with fetches of other rows
            batch = {row: states[row] for row in range(first, first + MICRO_BATCH) if row in states}
            if selects and batch:
                with self._collector.timing("select_seconds"):
                    self._choices |= decode_selector.select(layer, batch, query, keys, scaling)
            planned = [self._plan(row, state, period if selects else (layer,)) for row, state in batch.items()]
            if requests := [request for update in planned for request in update.requests]:
                self.fetcher.fetch(requests)
            updates += planned
        if units := self._table.wait(layer):
            self.fetcher.confirm()  # writes in place cannot be undone
        for update in updates:
            if len(update.moves.fetched.heads) or len(update.moves.brought.heads):
                self._move(update, layer, keys[update.row], values[update.row], rotate_)
            update.state.window.commit(update.moves)
        if units:
            self._table.finish(layer)

    def _plan(self, row: int, state: HeldChunks, layers: Sequence[int]) -> _Update:
        """Plan the moves of a row, which fetches for `layers`: they hold the same, unless a pass has failed."""
        chunks, pool = self._choices[row]
        if len(chunks) > state.window.num_heads:  # heads begin to select for themselves
            state.window = Window.filled(np.broadcast_to(state.window.columns, chunks.shape), state.window.num_chunks)
        chunks = np.broadcast_to(chunks, (state.window.num_heads, chunks.shape[1]))
        moves = state.window.plan(chunks, pool)
        fetched, size = moves.fetched, state.size
        order = np.lexsort((fetched.chunks, fetched.heads))
        if state.offloaded is not None:
            order = order[fetched.chunks[order] < state.offloaded.first]
        restores = Fetches(*(values[order] for values in fetched))
        counts = np.bincount(restores.heads, minlength=len(chunks))
        place = np.arange(len(order)) - (counts.cumsum() - counts)[restores.heads]
        tokens = np.zeros((len(chunks), counts.max(), size), np.int64)
        tokens[restores.heads, place] = restores.chunks[:, None] * size + np.arange(size)
        prefix = self._decode_selector.prefixes[state.prefix]
        row_tokens = RowTokens(prefix, tokens.reshape(len(chunks), -1), counts * size)
        requests = self._table.want(row_tokens, layers) if len(order) else []
        return _Update(row, state, moves, restores, place, row_tokens, requests)

    def _move(self, update: _Update, layer: int, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate) -> None:
        """Exchange chunks in `[kv_heads, entries, dim]`, a row's positions, with those set aside; copy fetched ones."""
        state, (_, loaded_chunks, set_aside, fetched, _) = update.state, update.moves
        slots, size, device = state.window.num_slots, state.size, keys.device
        if state.aside is None and slots:
            state.aside = (keys.new_empty(slots, size, keys.shape[2]), values.new_empty(slots, size, values.shape[2]))
        targets = [_chunk_rows(tensor, state.first, state.window.num_columns, size) for tensor in (keys, values)]
        stride = targets[0][1]  # rows from one head to the next, in keys and values
        is_computed = fetched.chunks >= (state.window.num_chunks if state.offloaded is None else state.offloaded.first)
        offloads = Fetches(*(indices[is_computed] for indices in fetched))
        restores, source, *chunks_of = self._restore(update, layer, keys, values, rotate_)
        parts = [
            *(loaded_chunks.heads * stride + loaded_chunks.columns, loaded_chunks.slots),
            *(set_aside.heads * stride + set_aside.columns, set_aside.slots),
            *(restores.heads * stride + restores.columns, source),
            offloads.heads * stride + offloads.columns,
        ]
        on_device = to_device(np.concatenate(parts), device).split([len(indices) for indices in parts])
        b_row, b_slot, s_row, s_slot, r_row, r_source, c_row = on_device
        offloaded = (
            state.offloaded.get(offloads.heads, offloads.chunks, device) if state.offloaded and len(c_row) else None
        )
        for index, (rows, _) in enumerate(targets):
            if state.aside is not None:
                aside = state.aside[index].flatten(1)
                displaced = rows.index_select(0, s_row)
                rows.index_copy_(0, b_row, aside.index_select(0, b_slot))
                aside.index_copy_(0, s_slot, displaced)
            if len(r_row):
                rows.index_copy_(0, r_row, chunks_of[index].flatten(1).index_select(0, r_source))
            if offloaded is not None:
                rows.index_copy_(0, c_row, offloaded[index].flatten(1))

    def _restore(
        self, update: _Update, layer: int, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate
    ) -> tuple[Fetches, np.ndarray, torch.Tensor, torch.Tensor]:
        """Return the chunks of a row that were fetched from the tiers.

        Returns:
            Chunks to copy to the row's positions; the index of each in the tensors that follow, int64 `[n]`; and
                rotated keys and values, `[m, chunk_tokens, dim]` each.
        """
        restores, tokens, size, place = update.restored, update.tokens, update.state.size, update.place
        if not update.requests:
            return restores, place, keys, values
        heads, width = len(keys), tokens.tokens.shape[1]
        fetched = [tensor.new_empty(heads, width, tensor.shape[2]) for tensor in (keys, values)]
        self._table.restore(tokens, layer, fetched[0], fetched[1], rotate_)
        if len(tokens.tokens) < heads:  # one set for all heads
            of_heads = np.arange(heads).repeat(len(place))
            restores, place = Fetches(of_heads, *(np.tile(part, heads) for part in restores[1:])), np.tile(place, heads)
        source = restores.heads * (width // size) + place
        return restores, source, *(tensor.view(-1, size, tensor.shape[2]) for tensor in fetched)


def _chunk_rows(columns: torch.Tensor, first: int, chunks: int, size: int) -> tuple[torch.Tensor, int]:
    """Return `chunks` chunks of `size` tokens from position `first` on, for all heads at once.

    Returns:
        View `[rows, size * dim]` that begins with the first head's chunks, and the rows from one head to the next.
    """
    length = size * columns.shape[2]
    head_stride, remainder = divmod(columns.stride(0), length)
    assert not remainder and columns[0].is_contiguous(), "a buffer holds whole chunks"
    count = (len(columns) - 1) * head_stride + chunks
    return columns.as_strided((count, length), (length, 1), columns[0, first].storage_offset()), head_stride
