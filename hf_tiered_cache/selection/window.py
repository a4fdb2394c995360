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
from .offload import INDEXED_TOKENS, GrownChunks, MicroBatches, grown
from .selected import Rotate, RowPrefix, parts_of, restoring_groups
from .window_slots import Fetches, Moves, Window


@dataclass(eq=False)
class WindowRow:
    """Chunks that one layer holds of one row.

    Args:
        prefix: Number of the row's prefix.
        window: Tells which chunks are at its positions, and which are set aside.
        aside: Keys and values of the chunks set aside, `[slots, chunk_tokens, dim]` each; None before there are any.
        grown: Offloaded generated KV that is selected from, too, if any.
    """

    prefix: int
    window: Window
    aside: tuple[torch.Tensor, torch.Tensor] | None = None
    grown: GrownChunks | None = None

    def fork(self) -> WindowRow:
        """Return an independent copy."""
        aside = None if self.aside is None else (self.aside[0].clone(), self.aside[1].clone())
        return WindowRow(self.prefix, self.window.copy(), aside, self.grown)


@dataclass(frozen=True, eq=False)
class WindowedSelection:
    """Decode selector of a cache, kept for the lifetime of the cache (see `Live`).

    Args:
        residency: Memory tiers.
        device_of: Returns the device of a layer.
        prefixes: Restored tokens of each row group.
        selector: Ranks chunks.
        indexes: Indexes of the chunks.
        columns: Number of restored positions that a layer holds of each row.
        micro_batches: Determines how many rows are ranked together.
        may_stay: See `Live`.
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

    def row(self, layer: int, prefix: int, chosen: np.ndarray) -> WindowRow | None:
        """Return the state of a layer's row that holds `chosen`, int64 `[kv_heads, columns]`; None if that is all."""
        if (span := self.span(prefix)) is None:
            return None
        inside = chosen[:, span.first : chosen.shape[1] - span.last : span.chunk_tokens]
        capacities = self.selector.capacities(layer, len(chosen), span.chunks)
        window = Window(span.chunks, capacities, span.candidates.stop, self.selector.eviction)
        window.commit(window.plan(inside // span.chunk_tokens))
        if self.selector.trace is not None:
            self.selector.trace(layer, window.columns)
        return WindowRow(prefix, window)

    def leaving(self, rows: Sequence[WindowRow | None], computed: int) -> int:
        """See `Live`. The last `selector.local` positions stay, and all if some row holds all its restored tokens."""
        beyond = max(0, computed - max(1, self.selector.local)) if None not in rows else 0
        return beyond // INDEXED_TOKENS * INDEXED_TOKENS

    def grown(
        self, rows: Sequence[WindowRow | None], keys: torch.Tensor, values: torch.Tensor
    ) -> list[WindowRow | None]:
        """See `Live`."""
        found: list[WindowRow | None] = []
        for held, some_keys, some_values in zip(rows, keys, values, strict=True):
            assert held is not None
            size, kind = self.selector.chunk_tokens, self.selector.kind
            more = grown(held.grown, self._num_chunks(held.prefix), some_keys, some_values, size, kind)
            held.window.grow(more.numbers.stop)
            found.append(replace(held, grown=more))
        return found

    def _num_chunks(self, prefix: int) -> int:
        """Return the number of chunks in the indexes of a row's restored tokens."""
        row, size = self.prefixes[prefix], self.selector.chunk_tokens
        return sum(-(-min(piece.count, row.tokens - piece.at) // size) for piece in row.pieces())

    def begin(self, collector: StatsCollector) -> WindowChoices:
        """Begin the decode selections of a pass."""
        self.micro_batches.begin()
        return WindowChoices(self, collector)


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Chunks that one row fetches from one KV cache group of a segment.

    Args:
        unit: Blocks that hold them.
        entries: int64 `[n]`, indexes into the row's fetches.
        tokens: int64 `[n]`, first token of each chunk, counted in the segment.
        whole: Whether each chunk is one block.
    """

    unit: FetchUnit
    entries: np.ndarray
    tokens: np.ndarray
    whole: bool


@dataclass(frozen=True, eq=False)
class _Step:
    """Update of one row at one layer."""

    row: int
    held: WindowRow
    span: Span
    moves: Moves
    wanted: list[_Wanted] = field(default_factory=list)

    @cached_property
    def restored(self) -> Fetches:
        """Chunks to fetch from the tiers."""
        return self._fetched(self.moves.fetched.chunks < self._first_computed)

    @cached_property
    def computed(self) -> Fetches:
        """Chunks to copy from offloaded generated KV."""
        return self._fetched(self.moves.fetched.chunks >= self._first_computed)

    @property
    def _first_computed(self) -> int:
        return self.held.window.num_chunks if self.held.grown is None else self.held.grown.first

    def _fetched(self, those: np.ndarray) -> Fetches:
        return Fetches(*(each[those] for each in self.moves.fetched))


class WindowChoices:
    """Decode selections of one pass.

    Args:
        live: Decode selector of the cache.
        collector: Statistics of the pass.
    """

    def __init__(self, live: WindowedSelection, collector: StatsCollector) -> None:
        self._live, self._collector = live, collector
        self._fetcher = Fetcher(live.residency, collector, live.device_of)

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""
        self._fetcher.cancel()

    def follow(
        self,
        layer: int,
        rows: Sequence[WindowRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> Sequence[WindowRow | None]:
        """Copy the chunks selected for a layer's queries to its positions. See `Choices`."""
        steps: list[_Step] = []
        units: dict[tuple[SegmentReader, int], FetchUnit] = {}
        started = time.perf_counter()
        size = self._live.micro_batches.of(len(rows))
        for first in range(0, len(rows), size):  # ranking overlaps with fetches of other rows
            with self._collector.timing("select_seconds"):
                some = self._plan(layer, first, rows[first : first + size], query, rotate_, scaling)
            self._fetcher.bring([wanted for step in some for wanted in self._find(step, layer, units)])
            steps += some
        self._fetcher.wait_for(units.values())
        self._fetcher.confirm()  # writes in place cannot be undone
        for step in steps:
            self._move(step, layer, keys[step.row], values[step.row], rotate_)
        self._fetcher.finish(units.values())
        self._live.micro_batches.took(time.perf_counter() - started)
        return rows

    def _plan(
        self,
        layer: int,
        first: int,
        rows: Sequence[WindowRow | None],
        query: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> list[_Step]:
        """Rank the chunks of rows, numbered from `first` on, wait once for the results, and plan the moves."""
        live, ranked = self._live, []
        for row, held in enumerate(rows, first):
            if held is not None and (span := live.span(held.prefix)) is not None:
                indexes: Sequence[DecodeIndex] = live.indexes.of(layer, held.prefix, rotate_)
                if held.grown is not None:
                    indexes, span = [*indexes, *held.grown.indexes], replace(span, grown=held.grown.numbers)
                ranked.append((row, held, span, live.selector.rank(indexes, query[row], scaling, span)))
        steps: list[_Step] = []
        if not ranked:  # these rows hold all restored tokens
            return steps
        for (row, held, span, _), on_host in zip(ranked, to_host(*(one[3] for one in ranked)), strict=True):
            pool = live.selector.candidates(on_host, span)
            if live.selector.trace is not None:
                live.selector.trace(layer, pool)
            steps.append(_Step(row, held, span, held.window.plan(pool[:, : span.chunks], pool)))
        return steps

    def _find(
        self, step: _Step, layer: int, units: dict[tuple[SegmentReader, int], FetchUnit]
    ) -> Iterator[tuple[FetchUnit, np.ndarray]]:
        """Yield the blocks that a row fetches, and record them in its step."""
        fetched, size = step.restored, step.span.chunk_tokens
        firsts = fetched.chunks * size  # counted in the row
        for piece in self._live.prefixes[step.held.prefix].pieces() if len(firsts) else ():
            inside = (firsts >= piece.at) & (firsts < piece.at + piece.count)
            for group in restoring_groups(piece.reader.shape, (layer,)):
                heads = _heads_of(group)
                entries = np.flatnonzero(inside & (fetched.heads >= heads.start) & (fetched.heads < heads.stop))
                if not len(entries):
                    continue
                unit = units.setdefault((piece.reader, group.index), FetchUnit(piece.reader, group))
                tokens = firsts[entries] - piece.at + piece.first
                whole = holds_chunks(piece.reader.shape, group, size) and piece.at % size == piece.first % size == 0
                step.wanted.append(_Wanted(unit, entries, tokens, whole))
                every = tokens if whole else _each_token(tokens, size).ravel()
                yield unit, np.unique(unit.chunk_of_each(every))

    def _move(
        self,
        step: _Step,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
    ) -> None:
        """Exchange chunks in `[kv_heads, columns, dim]`, a row's positions, with those set aside; copy fetched ones."""
        held, span, moves, device = step.held, step.span, step.moves, keys.device
        size, (brought, set_aside) = span.chunk_tokens, (moves.brought, moves.set_aside)
        restored, computed = step.restored, step.computed
        *came, order = self._gather(step, layer, keys, values, rotate_)
        if held.aside is None and held.window.num_slots:
            slots = held.window.num_slots
            held.aside = (
                keys.new_empty(slots, size, keys.shape[2]),
                values.new_empty(slots, size, values.shape[2]),
            )
        targets = [_chunk_rows(tensor, span) for tensor in (keys, values)]
        apart = targets[0][1]  # rows from one head to the next, in keys and values
        where = [
            *(brought.heads * apart + brought.columns, brought.slots),
            *(set_aside.heads * apart + set_aside.columns, set_aside.slots),
            (restored.heads * apart + restored.columns)[order],
            computed.heads * apart + computed.columns,
        ]
        at = to_device(np.concatenate(where), device).split([len(each) for each in where])
        b_row, b_slot, s_row, s_slot, r_row, c_row = at
        more = held.grown.get(computed.heads, computed.chunks, device) if held.grown and len(c_row) else None
        for index, (rows, _) in enumerate(targets):
            if held.aside is not None:
                aside = held.aside[index].flatten(1)
                out = rows.index_select(0, s_row)
                rows.index_copy_(0, b_row, aside.index_select(0, b_slot))
                aside.index_copy_(0, s_slot, out)
            if len(r_row):
                rows.index_copy_(0, r_row, came[index].flatten(1))
            if more is not None:
                rows.index_copy_(0, c_row, more[index].flatten(1))
        held.window.commit(moves)

    def _gather(
        self, step: _Step, layer: int, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Return the chunks of a row that were fetched from the tiers, in any order.

        Returns:
            Rotated keys and values, `[n, chunk_tokens, dim]` each, and the index of each chunk in `restored`, int64
            `[n]`.
        """
        fetched, size, prefix = step.restored, step.span.chunk_tokens, self._live.prefixes[step.held.prefix]
        wanted, order = step.wanted, np.arange(len(fetched.chunks))
        if not wanted:
            return keys.new_empty(0, size, keys.shape[2]), values.new_empty(0, size, values.shape[2]), order
        if all(each.whole for each in wanted):
            one = wanted[0].unit
            some = [(each.unit.blocks, each.unit.chunk_of_each(each.tokens), each.entries) for each in wanted]
            came_keys, came_values, order = gather_chunks(one.reader.shape, one.block_group, some)
        else:
            came_keys, came_values = (
                _gather_tokens(wanted, fetched, size, layer, name, tensor)
                for name, tensor in (("key", keys), ("value", values))
            )
        for each in wanted:
            if each.unit.from_disk:
                heads, tokens = fetched.heads[each.entries], _each_token(each.tokens, size)
                each.unit.use((layer,), [tokens[heads == head].ravel() for head in range(len(keys))])
        came_keys, positions = came_keys.contiguous(), _each_token(fetched.chunks[order] * size, size)
        rotate_(came_keys.view(1, -1, came_keys.shape[2]), positions.reshape(1, -1), prefix.tokens)
        return came_keys, came_values, order


def _chunk_rows(columns: torch.Tensor, span: Span) -> tuple[torch.Tensor, int]:
    """Return the selected chunks of `[kv_heads, columns, dim]`, one row each, to move chunks of all heads at once.

    Returns:
        View `[rows, chunk_tokens * dim]` that begins with the first head's chunks, and the number of rows from one head
        to the next.
    """
    length = span.chunk_tokens * columns.shape[2]
    apart, rest = divmod(columns.stride(0), length)
    assert not rest and columns[0].is_contiguous(), "a buffer holds whole chunks"
    count = (len(columns) - 1) * apart + span.chunks
    return columns.as_strided((count, length), (length, 1), columns[0, span.first].storage_offset()), apart


def _gather_tokens(
    wanted: Sequence[_Wanted], fetched: Fetches, size: int, layer: int, name: str, like: torch.Tensor
) -> torch.Tensor:
    """Return what was fetched of one tensor, like `[kv_heads, _, dim]`, from any blocks: `[fetches, size, dim]`."""
    count = len(fetched.chunks)
    target = like.new_empty(len(like), count * size, like.shape[2])
    for each in wanted:
        shape, group = each.unit.reader.shape, each.unit.block_group
        gather, heads = Gather(shape, group), fetched.heads[each.entries]
        for head in np.unique(heads).tolist():
            mine = heads == head
            tokens, columns = (
                _each_token(first, size).ravel() for first in (each.tokens[mine], each.entries[mine] * size)
            )
            gather.add(shape, each.unit.blocks, tokens, columns, head)
        for part in parts_of(group, layer, name):
            gather.copy(part, target)
    head = to_device(fetched.heads, like.device)
    return target.unflatten(1, (count, size))[head, torch.arange(count, device=like.device)]


def _each_token(firsts: np.ndarray, size: int) -> np.ndarray:
    """Return the tokens of chunks with these first tokens: int64 `[n, size]`."""
    return firsts[:, None] + np.arange(size)


def _heads_of(group: BlockGroup) -> range:
    """Return the kv heads of a KV cache group."""
    return range(
        min(part.first_head for part in group.parts), max(part.first_head + part.heads for part in group.parts)
    )
