"""Restore within a budget: a period's tokens are selected when its first layer has its queries.

Before that, the keys that the selection scores are prefetched, and speculatively the chunks that the period before has
selected, as long as their hit rate is high enough. Attention uses only the period's own selection, so speculation
affects only the run time. Alternatively, the selection itself is made ahead, from queries predicted some layers before:
its blocks are then fetched while these layers run, without speculation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from ..errors import ConfigError
from ..patches.lookahead import PredictedQuery
from ..restore.fetch import Fetcher, FetchUnit
from ..restore.plan import Plan
from ..restore.prefetch import share_row
from ..store.geometry import in_groups
from ..store.memory import to_host
from ..store.segment import SegmentReader
from ..tiers.scores import TokenImportance
from .by_index import ByIndex
from .decode_index import DecodeIndex, rank
from .indexes import KeptIndexes, RowIndexes, rotate_nothing
from .reselect import LiveSelection
from .selected import Gathers, Live, Rotate, RowPrefix, key_groups, restoring_groups, sets_in
from .selector import Selection, SelectionInput, Selector, check_mass, check_selection
from .warm_up import WarmUp
from .window import WindowedSelection

Prefetched = Literal["period", "keys", "guesses"]
"""Kinds of prefetched blocks. "period": those of a selection for the later layers of its period (ContiguousKV's
intra-period prefetch). "keys": those that the next period selects from, and "guesses": those that it is expected to
select (the two parts of ContiguousKV's inter-period prefetch)."""
PREFETCHED: frozenset[Prefetched] = frozenset(("period", "keys", "guesses"))


class SelectiveRestore:
    """Restore of one pass that attends to a part of the restored tokens.

    Args:
        plan: Plan with `budget_tokens`.
        layers: Layers with full attention, ascending.
        selector: Selects the tokens.
        fetcher: Fetcher of the pass.
        kept: Indexes in sidecars, for a selector that uses indexes.
        prefetches: Kinds of blocks to prefetch.
        importance: Records the attention of each token, if not None.
        rechoose: Whether each generated token reselects.
        observed: Number of last queries to select for, if queries attend to all restored tokens (`plan.streamed`).
    """

    def __init__(
        self,
        plan: Plan,
        layers: list[int],
        selector: Selector,
        fetcher: Fetcher,
        kept: KeptIndexes,
        prefetches: Collection[Prefetched],
        importance: TokenImportance | None,
        rechoose: bool,
        observed: int = 0,
    ) -> None:
        if unknown := set(prefetches) - PREFETCHED:
            raise ConfigError(f"prefetches may name {sorted(PREFETCHED)}, not {sorted(unknown)}")
        self.plan, self.selector, self.fetcher = plan, selector, fetcher
        self.residency, self.collector = fetcher.residency, fetcher.collector
        self._prefetches, self._importance, self._rechoose = prefetches, importance, rechoose
        self.observed = observed
        restored = plan.suffix or 0
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # scored keys, by period and index in _rows
        self._periods = in_groups(layers, selector.period, selector.solo_layers)
        self._period_of = {layer: number for number, period in enumerate(self._periods) for layer in period}
        self._rows = [RowPrefix(group, restored - group.pad) for group in plan.groups if restored > group.pad]
        self._padding = [row for group in plan.groups if restored <= group.pad for row in group.rows]
        self._chosen: dict[int, list[Gathers]] = {}  # by period, for each of _rows
        self._columns: dict[int, int] = {}  # restored positions held, by layer
        self._units: dict[int, dict[tuple[SegmentReader, int], FetchUnit]] = {}  # by period
        self._keys: dict[int, dict[tuple[SegmentReader, int], FetchUnit]] = {}  # by period, of index groups
        self._asked_whole: set[tuple[SegmentReader, int]] = set()  # groups that the last selection read as a whole
        self._live: Live | None = None
        self._indexes: RowIndexes | None = None
        self.index_fits = True
        """True if memory has room for the indexes used; otherwise the next request reads them again."""
        self._warm_up: WarmUp | None = None
        if selector.index is not None:
            self._indexes = RowIndexes(*selector.index, fetcher, self._rows, kept)
            if plan.streamed:
                lists = len(layers) * len(self._rows)
                self._warm_up = WarmUp(self.residency, self.collector, kept.later, lists)

    def start(self) -> None:
        """Start to fetch what the first selection needs."""
        with self._identifying():
            self._fetch_keys(0, self.selector.probe_heads)

    def choose(
        self, layer: int, query: torch.Tensor, own_keys: torch.Tensor, rotate_: Rotate, scaling: float | None
    ) -> int:
        """Select what `layer` attends to, if its period has not selected yet, and start to fetch it.

        Args:
            layer: Index of a layer with full attention.
            query: `[batch, heads, queries, dim]`, rotated. Not used if the selection was made ahead.
            own_keys: `[batch, kv_heads, queries, dim]`, rotated. Not used if the selection was made ahead.
            rotate_: Rotates stored keys.
            scaling: Scale of the logits; None for dim ** -0.5.

        Returns:
            Number of positions that the selected tokens take, at most `plan.num_selected`.

        Raises:
            RestoreError: A block did not arrive.
        """
        number = self._period_of[layer]
        if number not in self._chosen:
            self._choose(number, query, own_keys, rotate_, scaling)
        elif any(min(set(unit.block_group.layers) & set(self._periods[number])) == layer for unit in self._of(layer)):
            self._bring(number, (layer,))  # chunks that a prefetch had no room for
        for before in [one for one in self._chosen if one < number]:
            del self._chosen[before]
        self._columns[layer] = max(gathers.chosen.shape[1] for gathers in self._chosen[number])
        return self._columns[layer]

    def fill(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate) -> None:
        """Wait for the selected tokens of a layer, and copy them.

        Args:
            layer: Index of a layer with full attention.
            keys: `[batch, kv_heads, columns, dim]`, filled in place; as many positions as `choose` returned.
            values: Like `keys`.
            rotate_: Rotates stored keys.

        Raises:
            RestoreError: A block did not arrive.
        """
        number = self._period_of[layer]
        period, mine = self._periods[number], self._of(layer)
        self.fetcher.wait_for(mine)
        for row, gathers in zip(self._rows, self._chosen[number], strict=True):
            one, chosen = row.group.rows[0], gathers.chosen
            begin = keys.shape[2] - chosen.shape[1]  # a shorter row has padding before its tokens
            for tensor, name in ((keys, "key"), (values, "value")):
                gathers.copy(mine, layer, name, tensor[one, :, begin:])
            rotate_(keys[one, :, begin:], chosen, row.tokens)
            for tensor in (keys, values):
                share_row(tensor, row.group.rows, begin, tensor.shape[2])
            gathers.note_use(mine, (layer,))
        for tensor in (keys, values):
            share_row(tensor, self._padding, keys.shape[2], 0)  # rows that restore nothing
        over = [unit for unit in mine if max(set(unit.block_group.layers) & set(period)) == layer]
        for gathers in self._chosen[number]:
            gathers.forget(over)
        self.fetcher.finish(over)
        if layer == self._periods[-1][-1]:
            self._end()

    def _end(self) -> None:
        """Write new indexes, merge the indexes for decoding, and start the warm-up. Call when all layers are filled."""
        if self._indexes is not None:
            self.collector.add(index_bytes=self._indexes.nbytes)
            self._indexes.keep()
            self.index_fits = self._indexes.fit
            self._indexes.merge()
            if self._warm_up is not None:
                self._warm_up.start()

    def _of(self, layer: int) -> list[FetchUnit]:
        """Return the units that hold the selected tokens of a layer."""
        units = self._units[self._period_of[layer]].values()
        return [unit for unit in units if layer in unit.block_group.layers]

    def followed(self) -> Plan:
        """Return the plan, with the number of positions that each layer selected unless all equal the maximum."""
        columns = tuple(self._columns.values())
        return self.plan if set(columns) <= {self.plan.num_selected} else replace(self.plan, selected=columns)

    def prepare(self, layer: int, predicted: PredictedQuery) -> None:
        """Select for a period from the queries predicted for its first layer, and start to fetch the selection.

        This needs existing indexes: to build one, the layer's own pass must provide the rotation of its keys. Without
        them, the keys are fetched, and the layer selects later from the same prediction.
        """
        number = self._period_of[layer]
        if number in self._chosen or layer != self._periods[number][0] or self._indexes is None:
            return
        if any(self._indexes.lacks(layer, place) for place in range(len(self._rows))):
            self._fetch_keys(number, None, ahead=True)
            return
        self._choose(number, predicted.query, predicted.own_keys, rotate_nothing, predicted.scaling, ahead=True)

    def keys_to_index(self, layer: int, like: torch.Tensor) -> list[torch.Tensor | None]:
        """Return empty tensors, `[kv_heads, tokens, dim]`, for the keys of rows that lack an index; None for others.

        Args:
            layer: Layer index.
            like: `[batch, kv_heads, n, dim]`, keys of the layer.
        """
        return [
            like.new_empty(like.shape[1], row.tokens, like.shape[3])
            if self._indexes is not None and self._indexes.lacks(layer, place)
            else None
            for place, row in enumerate(self._rows)
        ]

    def index(self, layer: int, keys: Sequence[torch.Tensor | None]) -> None:
        """Build the missing indexes from these keys, rotated."""
        with self.collector.timing("select_seconds"):
            for place, every in enumerate(keys):
                if every is not None and self._indexes is not None:
                    self._indexes.make(layer, place, every)

    def live(self, layer: int, batch: int) -> tuple[Live, list[Any]] | None:
        """Return the decode selector, and what a filled layer holds of each row; None if nothing reselects."""
        if not self._rechoose:
            return None
        device_of = self.fetcher.device_of
        if self._live is None and isinstance(self.selector, ByIndex):
            assert self._indexes is not None
            self._live = WindowedSelection(
                self.residency, device_of, self._rows, self.selector, self._indexes, self.plan.num_selected
            )
        elif self._live is None:
            self._live = LiveSelection(
                replace(self.selector, ahead=0),
                self.residency,
                device_of,
                self._periods,
                self._rows,
                self._kept,
                self._indexes,
                self._columns,
            )
        held: list[Any] = [None] * batch
        for place, (row, gathers) in enumerate(zip(self._rows, self._chosen[self._period_of[layer]], strict=True)):
            for one in row.group.rows:
                held[one] = self._live.row(layer, place, gathers.chosen)
        return self._live, held

    # --- selection

    @contextmanager
    def _identifying(self) -> Iterator[None]:
        """Count the time within this context as selection time, and its stalls as stalls of the selection."""
        stalled = self.collector.stats.stall_seconds
        with self.collector.timing("select_seconds"):
            yield
        self.collector.add(select_stall_seconds=self.collector.stats.stall_seconds - stalled)

    def _choose(
        self,
        number: int,
        query: torch.Tensor,
        own_keys: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
        ahead: bool = False,
    ) -> None:
        """Select for a period, start to fetch its tokens, and prefetch for the next period."""
        if self._warm_up is not None and self._indexes is not None:
            self._note_warm(self._warm_up, self._indexes, self._periods[number][0], query, rotate_, scaling)
        before = self._chosen.get(number - 1, [])
        chosen = self._chosen[number] = []
        self._asked_whole.clear()
        with self._identifying():
            asked = [
                SelectionInput(
                    query[row.group.rows[0]],
                    own_keys[row.group.rows[0]],
                    partial(self._keys_of, number, place, rotate_),
                    scaling,
                    row.chunks(self._periods[number][0], self.selector.per_head),
                    min(self.plan.num_selected, row.tokens),
                    partial(self._indexes_of, self._periods[number][0], place, rotate_),
                )
                for place, row in enumerate(self._rows)
            ]
            for row, request, choice in zip(self._rows, asked, self.selector.choose_rows(asked), strict=True):
                check_mass(self.selector, choice, request)
                check_selection(self.selector, choice.tokens, request)
                chosen.append(Gathers(row, choice.tokens))
                self._note(number, row, choice)
        if before and "guesses" in self._prefetches:
            right = [np.isin(now.chosen, then.chosen).mean() for now, then in zip(chosen, before, strict=True)]
            chance = [then.chosen.shape[1] / then.row.tokens for then in before]
            self.residency.guesses.note((self.selector, number), float(np.mean(right)), float(np.mean(chance)))
        self.fetcher.finish(self._keys.pop(number, {}).values())
        self._bring(number, self._periods[number], ahead=ahead)
        if number + 1 < len(self._periods) and not (self.plan.streamed and self._indexes is not None):
            if "keys" in self._prefetches:
                self._fetch_keys(number + 1, self.selector.probe_heads, ahead=True)
            guesses = "guesses" in self._prefetches and not self.selector.ahead
            if guesses and self.residency.guesses.worth((self.selector, number + 1)):
                self._bring(number + 1, self._periods[number + 1], guess=True)

    def _note_warm(
        self,
        warm_up: WarmUp,
        indexes: RowIndexes,
        layer: int,
        query: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> None:
        """Record which chunks matter most to a layer's last queries."""
        with self.collector.timing("select_seconds"):
            for place, row in enumerate(self._rows):
                size = indexes.chunk_tokens
                if count := min(warm_up.chunks_of_each(row, layer, size), -(-row.tokens // size)):
                    every = indexes.of(layer, place, rotate_)
                    ranked, _ = rank(every, query[row.group.rows[0]], scaling, count)
                    warm_up.note(row, layer, to_host(ranked)[0], size)

    def _bring(self, number: int, layers: Sequence[int], ahead: bool = False, guess: bool = False) -> None:
        """Start to fetch the selection of some layers of a period: the first layer's now, the others' ahead of need.

        Args:
            number: Number of the period.
            layers: Layers of the period, ascending.
            ahead: Whether the first layer's blocks are fetched ahead of need, too.
            guess: Whether to fetch speculatively what the period before has selected.
        """
        units = self._units.setdefault(number, {})
        wanted: dict[FetchUnit, list[np.ndarray]] = {}
        for gathers in self._chosen[number - 1 if guess else number]:
            for piece, block_group, tokens in gathers.wanted(layers):
                unit = units.setdefault((piece.reader, block_group.index), FetchUnit(piece.reader, block_group))
                wanted.setdefault(unit, []).append(unit.chunks_of(tokens))
        due = sorted(wanted.items(), key=lambda item: item[0].block_group.layers)
        for _, batch in groupby(due, lambda item: item[0].block_group.layers):  # a layer waits only for its own batch
            asked = [(unit, np.unique(np.concatenate(chunks))) for unit, chunks in batch]
            first = layers[0] in asked[0][0].block_group.layers
            if first and not guess and not ahead:
                self.fetcher.bring(asked)
            elif first or guess or "period" in self._prefetches:
                self.fetcher.bring(asked, ahead=True, attends=not guess)

    def _note(self, number: int, row: RowPrefix, choice: Selection) -> None:
        """Report the selected chunks and their attention to the tiers, and the tokens' attention to the store."""
        for piece in row.pieces():
            shape, count = piece.reader.shape, min(piece.count, row.tokens - piece.at)
            mass = choice.mass[:, piece.at : piece.at + count]  # [rows, count]
            if self._importance is not None:
                for layer in self._periods[number]:
                    self._importance.note(piece.reader.id, shape, layer, slice(piece.first, piece.first + count), mass)
            asked = {group for reader, group in self._asked_whole if reader is piece.reader}
            for block_group in restoring_groups(shape, self._periods[number]):
                if block_group.index in asked:
                    continue
                sets = [(head, row.inside(piece, tokens)[1]) for head, tokens in sets_in([*choice.tokens], block_group)]
                tokens, times = np.unique(np.concatenate([inside for _, inside in sets]), return_counts=True)
                if not len(tokens):
                    continue
                got = (mass[[head for head, _ in sets]] if len(mass) > 1 else mass).mean(axis=0)[tokens - piece.first]
                step = shape.geometry.chunk_tokens
                chunks, which = np.unique(shape.slot_of_token(block_group, tokens) // step, return_inverse=True)
                held = np.minimum(step, shape.tokens_in(block_group) - chunks * step)  # tokens of each chunk
                self.residency.note_attention(
                    piece.reader.owner(block_group.index),
                    shape.chunks_in(block_group),
                    chunks,
                    np.bincount(which, got),
                    np.bincount(which, times / len(sets)) / held,  # share of heads that select a token
                )
            for index in asked:  # every selection reads all of these chunks, and all attention depends on them
                block_group = shape.block_groups[index]
                every = np.arange(piece.first, piece.first + min(piece.count, row.tokens - piece.at))
                chunks = shape.chunks_of(block_group, every)
                total = np.full(len(chunks), choice.mass.sum() / len(choice.mass))
                self.residency.note_attention(
                    piece.reader.owner(index), shape.chunks_in(block_group), chunks, total, np.ones(len(chunks))
                )

    # --- keys for scoring

    def _indexes_of(self, layer: int, place: int, rotate_: Rotate) -> list[DecodeIndex]:
        """Return the indexes of a row's restored tokens."""
        assert self._indexes is not None
        return self._indexes.of(layer, place, rotate_)

    def _fetch_keys(self, number: int, heads: int | None, ahead: bool = False) -> None:
        """Start to fetch the keys, of some first heads or all, that a period selects from, unless fetched already."""
        layer, wanted = self._periods[number][0], []
        if self._indexes is not None:
            self._indexes.fetch(layer, ahead)
            return
        for row in self._rows:
            for piece in row.pieces():
                tokens = np.arange(piece.first, piece.first + min(piece.count, row.tokens - piece.at))
                for block_group in key_groups(piece.reader.shape, layer, heads):
                    # groups that also hold attended tokens are kept
                    units = (self._keys if block_group.identifies else self._units).setdefault(number, {})
                    unit = units.setdefault((piece.reader, block_group.index), FetchUnit(piece.reader, block_group))
                    unit.identifies = True
                    wanted.append((unit, unit.chunks_of(tokens)))
        self.fetcher.bring(wanted, ahead, attends=False)

    def _keys_of(self, number: int, place: int, rotate_: Rotate, heads: int | None) -> torch.Tensor:
        """Return the rotated keys of a row's restored tokens at a period's first layer: `[kv_heads, tokens, dim]`."""
        row = self._rows[place]
        self._fetch_keys(number, heads)
        layer, every = self._periods[number][0], np.arange(row.tokens)
        keys = self._empty_keys(row.group.pieces[0].reader, layer, heads, row.tokens)
        asked: list[FetchUnit] = []
        for piece in row.pieces():
            apart, among = (held.get(number, {}) for held in (self._keys, self._units))
            names = [(piece.reader, block_group.index) for block_group in key_groups(piece.reader.shape, layer, heads)]
            units = [apart.get(name) or among[name] for name in names]
            self.fetcher.wait_for(units)
            self.fetcher.confirm()  # scores and kept keys outlive the pass
            asked.extend(units)
            self._asked_whole.update(names)
        Gathers(row, every[None]).copy(asked, layer, "key", keys)
        rotate_(keys, every[None], row.tokens)
        if self._rechoose:
            self._kept[number, place] = keys
        return keys

    def _empty_keys(self, reader: SegmentReader, layer: int, heads: int | None, tokens: int) -> torch.Tensor:
        layout = reader.shape.layout
        kind = layout.layer(layer)
        count = kind.key_heads if heads is None else min(heads, kind.key_heads)
        return torch.empty(count, tokens, kind.key_dim, dtype=layout.dtype, device=self.fetcher.device_of(layer))
