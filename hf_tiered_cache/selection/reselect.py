"""Reselection while decoding: what a period attends to follows the queries of generated tokens.

The rotated keys that the selection scores stay in memory. Newly selected tokens replace deselected ones in place:
attention does not depend on the order, since every key carries its position. Blocks that were released are fetched from
the tiers again. The paper selects only once per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..restore.fetch import Fetcher, FetchUnit
from ..stats import StatsCollector
from ..store.memory import to_device
from ..store.segment import SegmentReader
from ..tiers.residency import Residency
from .decode_index import DecodeIndex
from .indexes import RowIndexes, rotate_nothing
from .selected import Gathers, Rotate, RowPrefix
from .selector import SelectionInput, Selector, check_selection


@dataclass(frozen=True, eq=False)
class LiveSelection:
    """Decode selector of a cache, kept for the lifetime of the cache (see `Live`).

    Args:
        selector: Selects one set of tokens for all heads, or one for each.
        residency: Memory tiers.
        device_of: Returns the device of a layer.
        periods: Groups of layers that share a selection.
        prefixes: Restored tokens of each row group.
        keys: For each period and prefix, the rotated keys of the restored tokens at the period's first layer,
            `[kv_heads, tokens, dim]`, for as many heads as the selector needs; empty if it uses an index.
        indexes: Indexes of these keys, for a selector that uses them.
        columns: For each layer, the number of restored positions that it holds of each row.
        may_stay: See `Live`.
    """

    selector: Selector
    residency: Residency
    device_of: Callable[[int], torch.device]
    periods: Sequence[Sequence[int]]
    prefixes: Sequence[RowPrefix]
    keys: dict[tuple[int, int], torch.Tensor]
    indexes: RowIndexes | None
    columns: Mapping[int, int]
    may_stay: bool = True

    def row(self, layer: int, prefix: int, chosen: np.ndarray) -> LiveRow:
        """See `Live`."""
        return LiveRow(prefix, chosen)

    def leaving(self, rows: Sequence[LiveRow | None], computed: int) -> int:
        """See `Live`. Generated KV is not offloaded."""
        return 0

    def grown(self, rows: Sequence[LiveRow | None], keys: torch.Tensor, values: torch.Tensor) -> list[LiveRow | None]:
        """See `Live`."""
        raise TypeError("generated KV is not offloaded")

    def begin(self, collector: StatsCollector) -> Rechoice:
        """See `Live`."""
        return Rechoice(self, collector)

    def indexes_of(self, layer: int, prefix: int) -> Sequence[DecodeIndex]:
        """Return the indexes of a prefix at a layer; empty if the keys themselves are held."""
        return () if self.indexes is None else self.indexes.of(layer, prefix, rotate_nothing)

    def period_of(self, layer: int) -> int:
        """Return the number of a layer's period."""
        return next(number for number, period in enumerate(self.periods) if layer in period)


@dataclass(eq=False)
class LiveRow:
    """Tokens that one layer holds of one row.

    Args:
        prefix: Number of the row's prefix.
        tokens: int64 `[sets, n]`, restored tokens that the layer holds, in the order of their positions. They are at
            the last n of its restored positions, after padding. One set for all kv heads, or one for each.
    """

    prefix: int
    tokens: np.ndarray

    def fork(self) -> LiveRow:
        """Return this object, which is immutable."""
        return self


@dataclass(frozen=True, eq=False)
class _Change:
    """Update of layers of a period that hold the same tokens, to the tokens selected."""

    before: np.ndarray
    """Tokens that the layers hold, int64 `[sets, n]`."""
    after: np.ndarray
    new: Gathers
    """Copies of the tokens to fetch. Sets may have different numbers of them."""
    moves: torch.Tensor
    """Head of each fetched key, its index among those of its set, and its target position: int64 `[3, k]`."""


class Rechoice:
    """Decode selections of one pass.

    Args:
        live: Decode selector of the cache.
        collector: Statistics of the pass.
    """

    def __init__(self, live: LiveSelection, collector: StatsCollector) -> None:
        self._live, self._account = live, collector
        self._fetcher = Fetcher(live.residency, collector, live.device_of)
        self._chosen: dict[int, list[np.ndarray | None]] = {}  # by period, for each row int64 [sets, n]
        self._changes: dict[int, list[list[_Change]]] = {}  # by period, for each row
        self._units: dict[int, dict[tuple[SegmentReader, int], FetchUnit]] = {}

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""
        self._fetcher.cancel()

    def follow(
        self,
        layer: int,
        rows: Sequence[LiveRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> list[LiveRow | None]:
        """See `Choices`."""
        live, number = self._live, self._live.period_of(layer)
        period = live.periods[number]
        if layer == period[0]:
            self._choose(number, rows, query, keys, scaling)
        changes = [self._change(number, row, held, layer, keys) for row, held in enumerate(rows)]
        units = [unit for unit in self._units[number].values() if layer in unit.block_group.layers]
        self._fetcher.wait_for(units)
        self._fetcher.confirm()  # writes in place cannot be undone
        now: list[LiveRow | None] = []
        for row, (held, change) in enumerate(zip(rows, changes, strict=True)):
            if held is None or change is None:
                now.append(held)
                continue
            now.append(LiveRow(held.prefix, change.after))
            if not change.moves.shape[1]:
                continue
            tokens, (head, place, column) = live.prefixes[held.prefix].tokens, change.moves
            for name, target in (("key", keys), ("value", values)):
                came = target.new_empty(target.shape[1], change.new.chosen.shape[1], target.shape[3])
                change.new.copy(units, layer, name, came)  # [kv_heads, most, dim]
                if name == "key":
                    rotate_(came, change.new.chosen, tokens)
                target[row][head, column] = came[head, place]
            change.new.note_use(units, (layer,))
        if layer == period[-1]:
            self._fetcher.finish(self._units.pop(number).values())
        return now

    def _choose(
        self,
        number: int,
        rows: Sequence[LiveRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Select for a period, and start to fetch what its layers do not hold."""
        live = self._live
        own_keys = keys[:, :, live.columns[live.periods[number][0]] :]
        with self._account.timing("select_seconds"):
            self._chosen[number] = [
                None if held is None else self._chosen_for(number, held, query[row], own_keys[row], scaling)
                for row, held in enumerate(rows)
            ]
        self._units[number], self._changes[number] = {}, [[] for _ in rows]
        for row, held in enumerate(rows):
            if held is not None:
                self._add_change(number, row, held, live.periods[number], keys)

    def _change(self, number: int, row: int, held: LiveRow | None, layer: int, keys: torch.Tensor) -> _Change | None:
        """Return the update of a row at a layer, which may hold other tokens than its period after a failed pass."""
        if held is None:
            return None
        known = self._changes[number][row]
        same = next((change for change in known if np.array_equal(change.before, held.tokens)), None)
        return same or self._add_change(number, row, held, (layer,), keys)

    def _add_change(
        self, number: int, row: int, held: LiveRow, layers: Sequence[int], keys: torch.Tensor
    ) -> _Change | None:
        """Create the update of layers that hold the same tokens, and start to fetch what they lack."""
        live, chosen = self._live, self._chosen[number][row]
        if chosen is None:
            return None
        prefix, sets = live.prefixes[held.prefix], max(len(chosen), len(held.tokens))
        chosen, before = (np.broadcast_to(tokens, (sets, tokens.shape[1])) for tokens in (chosen, held.tokens))
        new_set, new_at = np.nonzero(~_among(before, chosen, prefix.tokens))
        gone_set, gone_at = np.nonzero(~_among(chosen, before, prefix.tokens))  # equally many per set
        new, counts = chosen[new_set, new_at], np.bincount(new_set, minlength=sets)
        after = before.copy()
        after[gone_set, gone_at] = new
        place = np.arange(len(new)) - (counts.cumsum() - counts)[new_set]
        coming = np.zeros((sets, counts.max()), np.int64)
        coming[new_set, place] = new
        column = gone_at + live.columns[layers[0]] - before.shape[1]
        moves = np.stack([new_set, place, column])
        if sets == 1:  # all heads share one set
            heads = np.arange(keys.shape[1]).repeat(len(new))
            moves = np.concatenate([heads[None], np.tile(moves[1:], keys.shape[1])])
        change = _Change(held.tokens, after, Gathers(prefix, coming, counts), to_device(moves, keys.device))
        self._changes[number][row].append(change)
        units = self._units[number]
        wanted = []
        for piece, block_group, tokens in change.new.wanted(layers) if len(new) else ():
            unit = units.setdefault((piece.reader, block_group.index), FetchUnit(piece.reader, block_group))
            wanted.append((unit, unit.chunks_of(tokens)))
        self._fetcher.bring(wanted)
        return change

    def _chosen_for(
        self, number: int, held: LiveRow, query: torch.Tensor, own_keys: torch.Tensor, scaling: float | None
    ) -> np.ndarray:
        """Return the selected tokens, int64 `[sets, n]`, ascending: as many as the row holds."""
        live, prefix = self._live, self._live.prefixes[held.prefix]
        first = live.periods[number][0]
        asked = SelectionInput(
            query,
            own_keys,
            lambda heads: live.keys[number, held.prefix],
            scaling,
            prefix.chunks(first, live.selector.per_head),
            held.tokens.shape[1],
            lambda: live.indexes_of(first, held.prefix),
        )
        tokens = live.selector.choose_again(asked, held.tokens)
        check_selection(live.selector, tokens, asked, exactly=True)
        return tokens


def _among(some: np.ndarray, others: np.ndarray, tokens: int) -> np.ndarray:
    """Return whether each of `others`, int64 `[sets, m]`, all below `tokens`, is in `some`, int64 `[sets, n]`."""
    marks = np.zeros((len(some), tokens), bool)
    np.put_along_axis(marks, some, True, 1)
    return np.take_along_axis(marks, others, 1)
