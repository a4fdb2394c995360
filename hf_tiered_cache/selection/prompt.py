"""Restore within a budget: a period's tokens are selected when its first layer has its queries.

Before that, the keys that the selection scores are prefetched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import product
from typing import Literal

import torch

from ..errors import ConfigError
from ..patches.scope import AttentionCall
from ..restore.fetch import Fetcher
from ..restore.plan import BudgetPlan
from ..restore.prefetch import share_row
from ..store.geometry import in_groups
from ..store.segment import SegmentReader
from ..tiers.scores import TokenImportance
from .decode import DecodeSelector, TokenDecodeSelector
from .fetched import Rotate, RowPrefix, RowTokens, UnitTable, attention_of
from .held import HeldChunks
from .indexes import IndexSidecars, RowIndexes
from .selectors import SelectionInput, Selector, check_mass, check_selection, check_selector
from .window import ByIndex, WindowDecodeSelector

Prefetched = Literal["period", "keys"]
"""Kinds of prefetched blocks.

"period": selected blocks of the later layers of a period (ContiguousKV's intra-period prefetch). "keys": blocks that
the next period selects from (the part of its inter-period prefetch that needs no speculation)."""
PREFETCHED: frozenset[Prefetched] = frozenset(("period", "keys"))


class SelectiveRestore:
    """Restore of one pass that attends to a part of the restored tokens.

    Args:
        layers: Layers with full attention, ascending.
        sidecars: Stored indexes, for a selector that uses indexes.
        importance: Records the attention of each token, if not None.
        reselect: Whether each generated token reselects.
        observed: Number of last queries to select for, of streamed rows (see `RowBudget`).
        method: Name of the method, for messages.
    """

    def __init__(
        self,
        plan: BudgetPlan,
        layers: list[int],
        selector: Selector,
        fetcher: Fetcher,
        sidecars: IndexSidecars,
        prefetches: Collection[Prefetched],
        importance: TokenImportance | None,
        reselect: bool,
        observed: int,
        method: str,
    ) -> None:
        check_selector(selector, method)
        if unknown := set(prefetches) - PREFETCHED:
            raise ConfigError(f"prefetches may name {sorted(PREFETCHED)}, not {sorted(unknown)}")
        self.plan, self.selector, self.fetcher = plan, selector, fetcher
        self.residency, self.collector = fetcher.residency, fetcher.collector
        self._importance, self.observed, self._method = importance, observed, method
        self._probe_keys: dict[tuple[int, int], torch.Tensor] = {}  # scored keys, by period and index in _rows
        self._periods = in_groups(layers, selector.period, selector.solo_layers)
        self._period_of = {layer: number for number, period in enumerate(self._periods) for layer in period}
        self._rows = [RowPrefix(budget.group, budget.restored) for budget in plan.budgets]
        self._selecting = {  # the other rows hold all of their tokens
            place: row for place, row in enumerate(self._rows) if plan.budgets[place].held < row.tokens
        }
        self._selected: dict[int, list[RowTokens]] = {}  # by period, for each of _rows
        self._tables = [UnitTable(fetcher, period) for period in self._periods]
        self._scanned_groups: set[tuple[SegmentReader, int]] = set()  # groups that the last selection read as a whole
        self._indexes: RowIndexes | None = None
        self.index_fits = True
        """True if memory has room for the indexes used; otherwise the next request reads them again."""
        if selector.index is not None:
            selecting_layers = [period[0] for period in self._periods]
            self._indexes = RowIndexes(*selector.index, fetcher, self._selecting, selecting_layers, sidecars)
        # the keys of a streamed row come with its tokens
        streams_keys = self._indexes is not None and any(budget.streamed for budget in plan.budgets)
        self._prefetches = frozenset(prefetches) - ({"keys"} if streams_keys else set())
        self._decode_selector: DecodeSelector | None = None
        if reselect:
            num_held = [budget.held for budget in plan.budgets]
            common = self.residency, fetcher.device_of, self._periods, self._rows, num_held
            if isinstance(selector, ByIndex):
                assert self._indexes is not None
                self._decode_selector = WindowDecodeSelector(*common, selector, self._indexes)
            else:
                self._decode_selector = TokenDecodeSelector(*common, selector, self._probe_keys, self._indexes)

    def start(self) -> None:
        """Start to fetch what the first selection needs."""
        with self.collector.timing("select_seconds", stalls="select_stall_seconds"):
            self._fetch_keys(0)

    def restore(
        self, layer: int, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate
    ) -> tuple[DecodeSelector, list[HeldChunks | None]] | None:
        """Select what `layer` attends to, if its period has not selected yet, and copy it to the layer's entries.

        Args:
            layer: Index of a layer with full attention.
            call: Attention of the computed tokens, with rotated queries and keys.
            keys: `[batch, kv_heads, entries, dim]`, rotated. The computed ones are at the end; those before them are
                filled in place, and unused ones are set to zero.
            values: Like `keys`.
            rotate_: Rotates stored keys.

        Returns:
            Decode selector, and what the layer holds of each row; None if nothing reselects.

        Raises:
            RestoreError: A block did not arrive.
        """
        number, decode_selector = self._period_of[layer], self._decode_selector
        table = self._tables[number]
        row_states: list[HeldChunks | None] = [None] * len(keys)
        if number not in self._selected:
            self._select(number, call, rotate_)
            table.fetch(self._selected[number], self._periods[number], "period" in self._prefetches)
            if "keys" in self._prefetches and number + 1 < len(self._periods):
                self._fetch_keys(number + 1, ahead=True)
        elif table.begins_at(layer):
            table.fetch(self._selected[number], (layer,))  # chunks that a prefetch had no room for
        self._selected.pop(number - 1, None)
        table.wait(layer)
        for place, (selected, budget) in enumerate(zip(self._selected[number], self.plan.budgets, strict=True)):
            rows, stop, count = budget.group.rows, keys.shape[2] - budget.computed, selected.tokens.shape[1]
            begin = stop - count
            if decode_selector is not None:
                for row in rows:
                    row_states[row] = decode_selector.row(layer, place, selected.tokens, begin)
            if count:
                table.restore(selected, layer, keys[rows[0], :, begin:stop], values[rows[0], :, begin:stop], rotate_)
            if begin or len(rows) > 1:
                for tensor in (keys, values):
                    share_row(tensor, rows, begin, stop)
        table.finish(layer)
        if layer == self._periods[-1][-1] and self._indexes is not None:
            self.index_fits = self._indexes.finish()
        return None if decode_selector is None else (decode_selector, row_states)

    def keys_to_index(self, layer: int, like: torch.Tensor) -> list[torch.Tensor | None]:
        """Return, for each group of rows, an empty tensor `[kv_heads, tokens, dim]` for the keys to index, or None.

        Streamed rows that lack an index get one. `like` are keys of the layer, `[batch, kv_heads, n, dim]`.
        """
        return [
            like.new_empty(like.shape[1], row.tokens, like.shape[3])
            if self._indexes is not None and self.plan.budgets[place].streamed and self._indexes.lacks(layer, place)
            else None
            for place, row in enumerate(self._rows)
        ]

    def index(self, layer: int, keys: Sequence[torch.Tensor | None]) -> None:
        """Build the missing indexes from these keys, rotated."""
        with self.collector.timing("select_seconds"):
            for place, row_keys in enumerate(keys):
                if row_keys is not None and self._indexes is not None:
                    self._indexes.make(layer, place, row_keys)

    # --- selection

    def _select(self, number: int, call: AttentionCall, rotate_: Rotate) -> None:
        """Select for the layers of a period."""
        layer, indexes = self._periods[number][0], self._indexes
        self._scanned_groups.clear()
        with self.collector.timing("select_seconds", stalls="select_stall_seconds"):
            by_place: dict[int, RowTokens] = {}
            for place, row in self._selecting.items():
                budget = self.plan.budgets[place]
                queries = min(budget.computed, self.observed) if budget.streamed else budget.computed
                request = SelectionInput(
                    call.query[row.group.rows[0], :, -queries:],
                    call.keys[row.group.rows[0], :, -budget.computed :],
                    partial(self._keys_of, number, place, rotate_),
                    call.scaling,
                    row.chunks(layer, self.selector.per_head),
                    budget.held,
                    tuple if indexes is None else partial(indexes.of, layer, place, rotate_),
                    layer,
                )
                choice = self.selector.choose(request)
                check_mass(self.selector, choice, request, self._method)
                check_selection(self.selector, choice.tokens, request)
                by_place[place] = RowTokens(row, choice.tokens)
                if self._importance is not None:
                    for piece, sharing in product(row.pieces, self._periods[number]):
                        tokens = slice(piece.first, piece.first + piece.count)
                        mass = choice.mass[:, piece.at : piece.stop]
                        self._importance.note(piece.reader.id, piece.reader.shape, sharing, tokens, mass)
                attention = attention_of(by_place[place], choice.mass, self._periods[number], self._scanned_groups)
                self.residency.note_attention(attention)
        self._selected[number] = [by_place.get(place) or row.all_tokens for place, row in enumerate(self._rows)]
        if indexes is None:
            self._tables[number].finish_keys()

    # --- keys for scoring

    def _fetch_keys(self, number: int, ahead: bool = False) -> None:
        """Start to fetch the keys, or the indexes of keys, that a period selects from, if not done yet."""
        if self._indexes is not None:
            self._indexes.fetch(self._periods[number][0], ahead)
        else:
            self._bring_keys(number, self.selector.probe_heads, ahead)

    def _bring_keys(self, number: int, heads: int | None, ahead: bool = False) -> None:
        """Start to fetch the keys of a period's first layer, for the first `heads` heads or all, if not done yet."""
        table, layer = self._tables[number], self._periods[number][0]
        rows = self._selecting.values()
        requests = [request for row in rows for request in table.want_keys(row.all_tokens, layer, heads)]
        self.fetcher.fetch(requests, ahead, attends=False)

    def _keys_of(self, number: int, place: int, rotate_: Rotate, heads: int | None) -> torch.Tensor:
        """Return the rotated keys of a row's restored tokens at a period's first layer: `[kv_heads, tokens, dim]`."""
        self._bring_keys(number, heads)
        table, layer, tokens = self._tables[number], self._periods[number][0], self._rows[place].all_tokens
        units = [unit for unit, _ in table.want_keys(tokens, layer, heads)]
        self.fetcher.wait_for(units)
        self.fetcher.confirm()  # scores and probe keys outlive the pass
        self._scanned_groups.update((unit.reader, unit.block_group.index) for unit in units)
        keys = table.keys(tokens, units, layer, heads)
        rotate_(keys, tokens.tokens, tokens.row.tokens)
        if self._decode_selector is not None:
            self._probe_keys[number, place] = keys
        return keys
