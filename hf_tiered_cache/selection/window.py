"""Selection of chunks for each head at each token, from a window in device memory and the tiers (KVDRIVE).

Of the prefix positions that a layer holds, the first and last tokens are fixed, and the chunks between follow the
queries: at each token, an index ranks the chunks of each kv head. Newly selected chunks replace deselected ones in
place, which are set aside in the window. Chunks that the layer holds neither in place nor aside are fetched from the
tiers. Attention does not depend on the order, since every key carries its position, nor on where a chunk came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from ..restore.fetch import Fetcher, FetchUnit
from ..restore.gather import Gather, gather_chunks, holds_chunks
from ..stats import StatsCollector
from ..store.geometry import BlockGroup
from ..store.memory import to_device, to_host
from ..store.segment import SegmentReader
from ..tiers.residency import Residency
from .by_index import ByIndex, Span
from .decode_index import DecodeIndex
from .indexes import RowIndexes
from .offload import INDEXED_TOKENS, MicroBatches, OffloadedChunks, append_offloaded
from .selected import Rotate, RowPrefix, parts_of, restoring_groups
from .window_slots import Fetches, Moves, Window


@dataclass(eq=False)
class WindowRow:
    """Chunks that one layer holds of one row.

    Args:
        prefix: Number of the row's prefix.
        window: Tells which chunks are at its positions, and which are set aside.
        aside: Keys and values of the chunks set aside, `[slots, chunk_tokens, dim]` each; None before there are any.
        offloaded: Offloaded generated KV that is selected from, too, if any.
    """

    prefix: int
    window: Window
    aside: tuple[torch.Tensor, torch.Tensor] | None = None
    offloaded: OffloadedChunks | None = None

    def fork(self) -> WindowRow:
        """Return an independent copy."""
        aside = None if self.aside is None else (self.aside[0].clone(), self.aside[1].clone())
        return WindowRow(self.prefix, self.window.copy(), aside, self.offloaded)


@dataclass(frozen=True, eq=False)
class WindowDecodeSelector:
    """Decode selector of a cache, kept for the lifetime of the cache (see `DecodeSelector`).

    Args:
        residency: Memory tiers.
        device_of: Returns the device of a layer.
        prefixes: Restored tokens of each row group.
        selector: Ranks chunks.
        indexes: Indexes of the chunks.
        columns: Number of restored positions that a layer holds of each row.
        micro_batches: Determines how many rows are ranked together.
        may_stay: See `DecodeSelector`.
    """

    residency: Residency
    device_of: Callable[[int], torch.device]
    prefixes: Sequence[RowPrefix]
    selector: ByIndex
    indexes: RowIndexes
    columns: int
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    may_stay: bool = False

    def span(self, prefix: int) -> Span | None:
        """Return how a row's tokens are selected; None if the row holds all of them."""
        return self.selector.span(self.prefixes[prefix].tokens, self.columns)

    def row(self, layer: int, prefix: int, tokens: np.ndarray) -> WindowRow | None:
        """Return the state of a layer's row that holds `tokens`, int64 `[kv_heads, columns]`; None if that is all."""
        if (span := self.span(prefix)) is None:
            return None
        inside = tokens[:, span.first : tokens.shape[1] - span.last : span.chunk_tokens]
        capacities = self.selector.capacities(layer, len(tokens), span.chunks)
        window = Window(span.chunks, capacities, span.candidates.stop, self.selector.eviction)
        window.commit(window.plan(inside // span.chunk_tokens))
        if self.selector.trace is not None:
            self.selector.trace(layer, window.columns)
        return WindowRow(prefix, window)

    def num_to_offload(self, rows: Sequence[WindowRow | None], computed: int) -> int:
        """See `DecodeSelector`. The last `selector.local` positions stay; all stay if a row does not select."""
        excess = max(0, computed - max(1, self.selector.local)) if None not in rows else 0
        return excess // INDEXED_TOKENS * INDEXED_TOKENS

    def offload(
        self, rows: Sequence[WindowRow | None], keys: torch.Tensor, values: torch.Tensor
    ) -> list[WindowRow | None]:
        """See `DecodeSelector`."""
        states: list[WindowRow | None] = []
        for state, row_keys, row_values in zip(rows, keys, values, strict=True):
            assert state is not None
            size, kind = self.selector.chunk_tokens, self.selector.kind
            offloaded = append_offloaded(
                state.offloaded, self._num_chunks(state.prefix), row_keys, row_values, size, kind
            )
            state.window.grow(offloaded.numbers.stop)
            states.append(replace(state, offloaded=offloaded))
        return states

    def _num_chunks(self, prefix: int) -> int:
        """Return the number of chunks in the indexes of a row's restored tokens."""
        row, size = self.prefixes[prefix], self.selector.chunk_tokens
        return sum(-(-min(piece.count, row.tokens - piece.at) // size) for piece in row.pieces())

    def begin(self, collector: StatsCollector) -> WindowDecodeSelection:
        """Begin the decode selections of a pass."""
        self.micro_batches.begin()
        return WindowDecodeSelection(self, collector)


@dataclass(frozen=True, eq=False)
class _GroupRequest:
    """Chunks that one row fetches from one KV cache group of a segment.

    Args:
        unit: Blocks that hold them.
        entries: int64 `[n]`, indexes into the row's fetches.
        tokens: int64 `[n]`, first token of each chunk, counted in the segment.
        is_block: Whether each chunk is one block.
    """

    unit: FetchUnit
    entries: np.ndarray
    tokens: np.ndarray
    is_block: bool


@dataclass(frozen=True, eq=False)
class _RowUpdate:
    """Update of one row at one layer."""

    row: int
    state: WindowRow
    span: Span
    moves: Moves
    requests: list[_GroupRequest] = field(default_factory=list)

    @cached_property
    def restored(self) -> Fetches:
        """Chunks to fetch from the tiers."""
        return self._select_fetches(self.moves.fetched.chunks < self._first_computed)

    @cached_property
    def computed(self) -> Fetches:
        """Chunks to copy from offloaded generated KV."""
        return self._select_fetches(self.moves.fetched.chunks >= self._first_computed)

    @property
    def _first_computed(self) -> int:
        return self.state.window.num_chunks if self.state.offloaded is None else self.state.offloaded.first

    def _select_fetches(self, mask: np.ndarray) -> Fetches:
        return Fetches(*(values[mask] for values in self.moves.fetched))


class WindowDecodeSelection:
    """Decode selections of one pass.

    Args:
        decode_selector: Decode selector of the cache.
        collector: Statistics of the pass.
    """

    def __init__(self, decode_selector: WindowDecodeSelector, collector: StatsCollector) -> None:
        self._decode_selector, self._collector = decode_selector, collector
        self._fetcher = Fetcher(decode_selector.residency, collector, decode_selector.device_of)

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""
        self._fetcher.cancel()

    def reselect(
        self,
        layer: int,
        rows: Sequence[WindowRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> Sequence[WindowRow | None]:
        """Copy the chunks selected for a layer's queries to its positions. See `DecodeSelection`."""
        updates: list[_RowUpdate] = []
        units: dict[tuple[SegmentReader, int], FetchUnit] = {}
        start_time = time.perf_counter()
        size = self._decode_selector.micro_batches.of(len(rows))
        for first in range(0, len(rows), size):  # ranking overlaps with fetches of other rows
            with self._collector.timing("select_seconds"):
                batch = self._plan(layer, first, rows[first : first + size], query, rotate_, scaling)
            self._fetcher.bring([request for update in batch for request in self._find(update, layer, units)])
            updates += batch
        self._fetcher.wait_for(units.values())
        self._fetcher.confirm()  # writes in place cannot be undone
        for update in updates:
            self._move(update, layer, keys[update.row], values[update.row], rotate_)
        self._fetcher.finish(units.values())
        self._decode_selector.micro_batches.took(time.perf_counter() - start_time)
        return rows

    def _plan(
        self,
        layer: int,
        first: int,
        rows: Sequence[WindowRow | None],
        query: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> list[_RowUpdate]:
        """Rank the chunks of rows, numbered from `first` on, wait once for the results, and plan the moves."""
        decode_selector, ranked = self._decode_selector, []
        for row, state in enumerate(rows, first):
            if state is not None and (span := decode_selector.span(state.prefix)) is not None:
                indexes: Sequence[DecodeIndex] = decode_selector.indexes.of(layer, state.prefix, rotate_)
                if state.offloaded is not None:
                    indexes = [*indexes, *state.offloaded.indexes]
                    span = replace(span, offloaded=state.offloaded.numbers)
                ranked.append((row, state, span, decode_selector.selector.rank(indexes, query[row], scaling, span)))
        updates: list[_RowUpdate] = []
        if not ranked:  # these rows hold all restored tokens
            return updates
        for (row, state, span, _), host_ranking in zip(ranked, to_host(*(entry[3] for entry in ranked)), strict=True):
            pool = decode_selector.selector.candidates(host_ranking, span)
            if decode_selector.selector.trace is not None:
                decode_selector.selector.trace(layer, pool)
            updates.append(_RowUpdate(row, state, span, state.window.plan(pool[:, : span.chunks], pool)))
        return updates

    def _find(
        self, update: _RowUpdate, layer: int, units: dict[tuple[SegmentReader, int], FetchUnit]
    ) -> Iterator[tuple[FetchUnit, np.ndarray]]:
        """Yield the blocks that a row fetches, and record them in its step."""
        fetched, size = update.restored, update.span.chunk_tokens
        firsts = fetched.chunks * size  # counted in the row
        for piece in self._decode_selector.prefixes[update.state.prefix].pieces() if len(firsts) else ():
            inside = (firsts >= piece.at) & (firsts < piece.at + piece.count)
            for group in restoring_groups(piece.reader.shape, (layer,)):
                heads = _heads_of(group)
                entries = np.flatnonzero(inside & (fetched.heads >= heads.start) & (fetched.heads < heads.stop))
                if not len(entries):
                    continue
                unit = units.setdefault((piece.reader, group.index), FetchUnit(piece.reader, group))
                tokens = firsts[entries] - piece.at + piece.first
                is_block = holds_chunks(piece.reader.shape, group, size) and piece.at % size == piece.first % size == 0
                update.requests.append(_GroupRequest(unit, entries, tokens, is_block))
                block_tokens = tokens if is_block else _chunk_tokens(tokens, size).ravel()
                yield unit, np.unique(unit.chunk_of_each(block_tokens))

    def _move(
        self,
        update: _RowUpdate,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
    ) -> None:
        """Exchange chunks in `[kv_heads, columns, dim]`, a row's positions, with those set aside; copy fetched ones."""
        state, span, moves, device = update.state, update.span, update.moves, keys.device
        size, (brought, set_aside) = span.chunk_tokens, (moves.brought, moves.set_aside)
        restored, computed = update.restored, update.computed
        *gathered, order = self._gather(update, layer, keys, values, rotate_)
        if state.aside is None and state.window.num_slots:
            slots = state.window.num_slots
            state.aside = (
                keys.new_empty(slots, size, keys.shape[2]),
                values.new_empty(slots, size, values.shape[2]),
            )
        targets = [_chunk_rows(tensor, span) for tensor in (keys, values)]
        head_stride = targets[0][1]  # rows from one head to the next, in keys and values
        index_parts = [
            *(brought.heads * head_stride + brought.columns, brought.slots),
            *(set_aside.heads * head_stride + set_aside.columns, set_aside.slots),
            (restored.heads * head_stride + restored.columns)[order],
            computed.heads * head_stride + computed.columns,
        ]
        split_indices = to_device(np.concatenate(index_parts), device).split([len(indices) for indices in index_parts])
        b_row, b_slot, s_row, s_slot, r_row, c_row = split_indices
        offloaded = (
            state.offloaded.get(computed.heads, computed.chunks, device) if state.offloaded and len(c_row) else None
        )
        for index, (rows, _) in enumerate(targets):
            if state.aside is not None:
                aside = state.aside[index].flatten(1)
                displaced = rows.index_select(0, s_row)
                rows.index_copy_(0, b_row, aside.index_select(0, b_slot))
                aside.index_copy_(0, s_slot, displaced)
            if len(r_row):
                rows.index_copy_(0, r_row, gathered[index].flatten(1))
            if offloaded is not None:
                rows.index_copy_(0, c_row, offloaded[index].flatten(1))
        state.window.commit(moves)

    def _gather(
        self, update: _RowUpdate, layer: int, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Return the chunks of a row that were fetched from the tiers, in any order.

        Returns:
            Rotated keys and values, `[n, chunk_tokens, dim]` each, and the index of each chunk in `restored`, int64
            `[n]`.
        """
        fetched, size = update.restored, update.span.chunk_tokens
        prefix = self._decode_selector.prefixes[update.state.prefix]
        requests, order = update.requests, np.arange(len(fetched.chunks))
        if not requests:
            return keys.new_empty(0, size, keys.shape[2]), values.new_empty(0, size, values.shape[2]), order
        if all(request.is_block for request in requests):
            first_unit = requests[0].unit
            sources = [
                (request.unit.blocks, request.unit.chunk_of_each(request.tokens), request.entries)
                for request in requests
            ]
            chunk_keys, chunk_values, order = gather_chunks(first_unit.reader.shape, first_unit.block_group, sources)
        else:
            chunk_keys, chunk_values = (
                _gather_tokens(requests, fetched, size, layer, name, tensor)
                for name, tensor in (("key", keys), ("value", values))
            )
        for request in requests:
            if request.unit.from_disk:
                heads, tokens = fetched.heads[request.entries], _chunk_tokens(request.tokens, size)
                request.unit.use((layer,), [tokens[heads == head].ravel() for head in range(len(keys))])
        chunk_keys, positions = chunk_keys.contiguous(), _chunk_tokens(fetched.chunks[order] * size, size)
        rotate_(chunk_keys.view(1, -1, chunk_keys.shape[2]), positions.reshape(1, -1), prefix.tokens)
        return chunk_keys, chunk_values, order


def _chunk_rows(columns: torch.Tensor, span: Span) -> tuple[torch.Tensor, int]:
    """Return the selected chunks of `[kv_heads, columns, dim]`, one row each, to move chunks of all heads at once.

    Returns:
        View `[rows, chunk_tokens * dim]` that begins with the first head's chunks, and the number of rows from one head
        to the next.
    """
    length = span.chunk_tokens * columns.shape[2]
    head_stride, remainder = divmod(columns.stride(0), length)
    assert not remainder and columns[0].is_contiguous(), "a buffer holds whole chunks"
    count = (len(columns) - 1) * head_stride + span.chunks
    return columns.as_strided((count, length), (length, 1), columns[0, span.first].storage_offset()), head_stride


def _gather_tokens(
    requests: Sequence[_GroupRequest], fetched: Fetches, size: int, layer: int, name: str, like: torch.Tensor
) -> torch.Tensor:
    """Return what was fetched of one tensor, like `[kv_heads, _, dim]`, from any blocks: `[fetches, size, dim]`."""
    count = len(fetched.chunks)
    target = like.new_empty(len(like), count * size, like.shape[2])
    for request in requests:
        shape, group = request.unit.reader.shape, request.unit.block_group
        gather, heads = Gather(shape, group), fetched.heads[request.entries]
        for head in np.unique(heads).tolist():
            head_mask = heads == head
            tokens, columns = (
                _chunk_tokens(first, size).ravel()
                for first in (request.tokens[head_mask], request.entries[head_mask] * size)
            )
            gather.add(shape, request.unit.blocks, tokens, columns, head)
        for part in parts_of(group, layer, name):
            gather.copy(part, target)
    head = to_device(fetched.heads, like.device)
    return target.unflatten(1, (count, size))[head, torch.arange(count, device=like.device)]


def _chunk_tokens(firsts: np.ndarray, size: int) -> np.ndarray:
    """Return the tokens of chunks with these first tokens: int64 `[n, size]`."""
    return firsts[:, None] + np.arange(size)


def _heads_of(group: BlockGroup) -> range:
    """Return the kv heads of a KV cache group."""
    return range(
        min(part.first_head for part in group.parts), max(part.first_head + part.heads for part in group.parts)
    )
