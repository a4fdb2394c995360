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
class TokenDecodeSelector:
    """Decode selector of a cache, kept for the lifetime of the cache (see `DecodeSelector`).

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
        may_stay: See `DecodeSelector`.
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

    def row(self, layer: int, prefix: int, tokens: np.ndarray) -> TokenRow:
        """See `DecodeSelector`."""
        return TokenRow(prefix, tokens)

    def num_to_offload(self, rows: Sequence[TokenRow | None], computed: int) -> int:
        """See `DecodeSelector`. Generated KV is not offloaded."""
        return 0

    def offload(
        self, rows: Sequence[TokenRow | None], keys: torch.Tensor, values: torch.Tensor
    ) -> list[TokenRow | None]:
        """See `DecodeSelector`."""
        raise TypeError("generated KV is not offloaded")

    def begin(self, collector: StatsCollector) -> TokenDecodeSelection:
        """See `DecodeSelector`."""
        return TokenDecodeSelection(self, collector)

    def indexes_of(self, layer: int, prefix: int) -> Sequence[DecodeIndex]:
        """Return the indexes of a prefix at a layer; empty if the keys themselves are held."""
        return () if self.indexes is None else self.indexes.of(layer, prefix, rotate_nothing)

    def period_of(self, layer: int) -> int:
        """Return the number of a layer's period."""
        return next(number for number, period in enumerate(self.periods) if layer in period)


@dataclass(eq=False)
class TokenRow:
    """Tokens that one layer holds of one row.

    Args:
        prefix: Number of the row's prefix.
        tokens: int64 `[sets, n]`, restored tokens that the layer holds, in the order of their positions. They are at
            the last n of its restored positions, after padding. One set for all kv heads, or one for each.
    """

    prefix: int
    tokens: np.ndarray

    def fork(self) -> TokenRow:
        """Return this object, which is immutable."""
        return self


@dataclass(frozen=True, eq=False)
class _Change:
    """Update of layers of a period that hold the same tokens, to the tokens selected."""

    old_tokens: np.ndarray
    """Tokens that the layers hold, int64 `[sets, n]`."""
    new_tokens: np.ndarray
    """Tokens that the layers hold after the update, int64 `[sets, n]`."""
    gathers: Gathers
    """Copies of the tokens to fetch. Sets may have different numbers of them."""
    moves: torch.Tensor
    """Head of each fetched key, its index among those of its set, and its target position: int64 `[3, k]`."""


class TokenDecodeSelection:
    """Decode selections of one pass.

    Args:
        decode_selector: Decode selector of the cache.
        collector: Statistics of the pass.
    """

    def __init__(self, decode_selector: TokenDecodeSelector, collector: StatsCollector) -> None:
        self._decode_selector, self._collector = decode_selector, collector
        self._fetcher = Fetcher(decode_selector.residency, collector, decode_selector.device_of)
        self._tokens: dict[int, list[np.ndarray | None]] = {}  # by period, for each row int64 [sets, n]
        self._changes: dict[int, list[list[_Change]]] = {}  # by period, for each row
        self._units: dict[int, dict[tuple[SegmentReader, int], FetchUnit]] = {}

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""
        self._fetcher.cancel()

    def reselect(
        self,
        layer: int,
        rows: Sequence[TokenRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> list[TokenRow | None]:
        """See `DecodeSelection`."""
        decode_selector, number = self._decode_selector, self._decode_selector.period_of(layer)
        period = decode_selector.periods[number]
        if layer == period[0]:
            self._choose(number, rows, query, keys, scaling)
        changes = [self._change(number, row, state, layer, keys) for row, state in enumerate(rows)]
        units = [unit for unit in self._units[number].values() if layer in unit.block_group.layers]
        self._fetcher.wait_for(units)
        self._fetcher.confirm()  # writes in place cannot be undone
        states: list[TokenRow | None] = []
        for row, (state, change) in enumerate(zip(rows, changes, strict=True)):
            if state is None or change is None:
                states.append(state)
                continue
            states.append(TokenRow(state.prefix, change.new_tokens))
            if not change.moves.shape[1]:
                continue
            tokens, (head, place, column) = decode_selector.prefixes[state.prefix].tokens, change.moves
            for name, target in (("key", keys), ("value", values)):
                fetched_kv = target.new_empty(target.shape[1], change.gathers.tokens.shape[1], target.shape[3])
                change.gathers.copy(units, layer, name, fetched_kv)  # [kv_heads, largest set, dim]
                if name == "key":
                    rotate_(fetched_kv, change.gathers.tokens, tokens)
                target[row][head, column] = fetched_kv[head, place]
            change.gathers.note_use(units, (layer,))
        if layer == period[-1]:
            self._fetcher.finish(self._units.pop(number).values())
        return states

    def _choose(
        self,
        number: int,
        rows: Sequence[TokenRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Select for a period, and start to fetch what its layers do not hold."""
        decode_selector = self._decode_selector
        own_keys = keys[:, :, decode_selector.columns[decode_selector.periods[number][0]] :]
        with self._collector.timing("select_seconds"):
            self._tokens[number] = [
                None if state is None else self._select_for(number, state, query[row], own_keys[row], scaling)
                for row, state in enumerate(rows)
            ]
        self._units[number], self._changes[number] = {}, [[] for _ in rows]
        for row, state in enumerate(rows):
            if state is not None:
                self._add_change(number, row, state, decode_selector.periods[number], keys)

    def _change(self, number: int, row: int, state: TokenRow | None, layer: int, keys: torch.Tensor) -> _Change | None:
        """Return the update of a row at a layer, which may hold other tokens than its period after a failed pass."""
        if state is None:
            return None
        changes = self._changes[number][row]
        matching_change = next((change for change in changes if np.array_equal(change.old_tokens, state.tokens)), None)
        return matching_change or self._add_change(number, row, state, (layer,), keys)

    def _add_change(
        self, number: int, row: int, state: TokenRow, layers: Sequence[int], keys: torch.Tensor
    ) -> _Change | None:
        """Create the update of layers that hold the same tokens, and start to fetch what they lack."""
        decode_selector, target_tokens = self._decode_selector, self._tokens[number][row]
        if target_tokens is None:
            return None
        prefix, sets = decode_selector.prefixes[state.prefix], max(len(target_tokens), len(state.tokens))
        target_tokens, old_tokens = (
            np.broadcast_to(tokens, (sets, tokens.shape[1])) for tokens in (target_tokens, state.tokens)
        )
        new_set, new_at = np.nonzero(~_is_member(old_tokens, target_tokens, prefix.tokens))
        old_set, old_at = np.nonzero(~_is_member(target_tokens, old_tokens, prefix.tokens))  # equally many per set
        added_tokens, counts = target_tokens[new_set, new_at], np.bincount(new_set, minlength=sets)
        new_tokens = old_tokens.copy()
        new_tokens[old_set, old_at] = added_tokens
        place = np.arange(len(added_tokens)) - (counts.cumsum() - counts)[new_set]
        fetch_tokens = np.zeros((sets, counts.max()), np.int64)
        fetch_tokens[new_set, place] = added_tokens
        column = old_at + decode_selector.columns[layers[0]] - old_tokens.shape[1]
        moves = np.stack([new_set, place, column])
        if sets == 1:  # all heads share one set
            heads = np.arange(keys.shape[1]).repeat(len(added_tokens))
            moves = np.concatenate([heads[None], np.tile(moves[1:], keys.shape[1])])
        change = _Change(state.tokens, new_tokens, Gathers(prefix, fetch_tokens, counts), to_device(moves, keys.device))
        self._changes[number][row].append(change)
        units = self._units[number]
        requests = []
        for piece, block_group, tokens in change.gathers.sources(layers) if len(added_tokens) else ():
            unit = units.setdefault((piece.reader, block_group.index), FetchUnit(piece.reader, block_group))
            requests.append((unit, unit.chunks_of(tokens)))
        self._fetcher.bring(requests)
        return change

    def _select_for(
        self, number: int, state: TokenRow, query: torch.Tensor, own_keys: torch.Tensor, scaling: float | None
    ) -> np.ndarray:
        """Return the selected tokens, int64 `[sets, n]`, ascending: as many as the row holds."""
        decode_selector, prefix = self._decode_selector, self._decode_selector.prefixes[state.prefix]
        first = decode_selector.periods[number][0]
        request = SelectionInput(
            query,
            own_keys,
            lambda heads: decode_selector.keys[number, state.prefix],
            scaling,
            prefix.chunks(first, decode_selector.selector.per_head),
            state.tokens.shape[1],
            lambda: decode_selector.indexes_of(first, state.prefix),
        )
        tokens = decode_selector.selector.reselect(request, state.tokens)
        check_selection(decode_selector.selector, tokens, request, exactly=True)
        return tokens


def _is_member(members: np.ndarray, candidates: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return which `candidates`, int64 `[sets, m]` below `num_tokens`, are in `members`, int64 `[sets, n]`: a mask."""
    marks = np.zeros((len(members), num_tokens), bool)
    np.put_along_axis(marks, members, True, 1)
    return np.take_along_axis(marks, candidates, 1)
