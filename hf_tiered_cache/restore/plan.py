"""The plan of one forward pass: which columns each layer computes, and from which segments the rest comes.

A column is a place in the batch's rectangle, counted from the first one that this pass adds to the cache. Prefix
reuse is the simplest plan: every layer computes the suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..geometry import BlockGroup
from ..store.segment import SegmentReader
from .columns import Columns, of_row, places, row_by_row


@dataclass(frozen=True)
class PlanContext:
    """Tells a method what to plan for: the pass, and what can be restored."""

    base: int
    """Columns the cache holds already."""
    columns: int
    """Columns of this pass."""
    restorable: int
    """The first column that not every row can restore; in front of it all can (padding counts as restored)."""
    must_compute: int
    """The last columns, whose logits are asked for."""
    layers: int
    groups: tuple[RowGroup, ...] = ()
    """Where the rows' other columns can come from."""


@dataclass(frozen=True)
class SegmentSlice:
    """A run of a segment's tokens and where they stand in their row."""

    reader: SegmentReader
    first: int
    """First token, counted in the segment."""
    count: int
    at: int
    """Position of that token in the row, padding not counted."""
    exact: bool = True
    """Whether this is the KV that computing the row would give: a passage's lacks what stands before it."""
    scores: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Of a passage: how much it matters that each token of the segment is computed, float32 `[segment's tokens]`, by
    the ranking that the method asks for; None where it has not been ranked so."""


@dataclass(frozen=True)
class RowGroup:
    """Rows with the same tokens and padding: restored once, copied to each."""

    rows: tuple[int, ...]
    pad: int
    pieces: tuple[SegmentSlice, ...]


@dataclass(frozen=True, eq=False)
class UnderWay:
    """What of a plan for passages is settled while it is followed.

    Args:
        context: what was planned for.
        every: the columns that may be computed: all that are not exact.
        least: those that are computed in any case.
        questions: the first column of each row's question, which is computed in every layer, as all behind it are; the
            pass's columns for a row in which nobody asks; () for none that does.
        asked_layers: through so many of the first layers the question goes by itself before the pass, over stored KV,
            to say what is computed there; 0 where that is planned. The plan then computes the least.
        compare_layers: the layers, ascending, at which stored KV is compared with computed KV; from there on, or from
            the next layer on, fewer columns are computed.
    """

    context: PlanContext
    every: Columns
    least: Columns
    questions: tuple[int, ...] = ()
    asked_layers: int = 0
    compare_layers: tuple[int, ...] = ()

    @property
    def asking_tokens(self) -> tuple[int, ...]:
        """How many tokens each row's question has; () where none has one."""
        return tuple(self.context.columns - first for first in self.questions)

    def wants_all(self, layers: Sequence[int]) -> bool:
        """Whether one of `layers`, ascending, needs the stored KV of tokens that it computes, too."""
        return layers[0] < self.asked_layers or not set(layers).isdisjoint(self.compare_layers)


@dataclass(frozen=True)
class Plan:
    """What is computed and what restored in one forward pass.

    Args:
        base: columns the cache holds already.
        columns: columns that this pass adds, restored and computed.
        computed: for each layer the columns it computes; in no row more than the layer before, and always the last one.
        groups: where the rows' other columns come from.
        budget_tokens: how many restored tokens of a row the layers with full attention may attend to, or None for all.
            Which ones is chosen when the queries are there.
        streamed: whether their queries attend to all restored tokens nevertheless, which come run by run and go again:
            what is computed is exact, and what the budget says is held for the tokens to come.
        under_way: how it is settled while it is followed; None for a plan that stays as it is.
        fronts: for each layer how many columns, from the first on, it computes though they are stored, and loads what
            lies behind them up to the suffix; () for none. `computed` holds them, too. The cache is empty then, and
            rows have no padding.
        selected: for each layer with full attention how many restored columns it has come to hold, where a choice was
            content with fewer than `num_selected`; () before that is known, and where all hold as many.
    """

    base: int
    columns: int
    computed: tuple[Columns, ...]
    groups: tuple[RowGroup, ...]
    budget_tokens: int | None = None
    streamed: bool = False
    under_way: UnderWay | None = None
    fronts: tuple[int, ...] = ()
    selected: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        before: Columns | None = None
        for layer, columns in enumerate(self.computed):
            if columns is before:
                continue
            for mine, its in row_by_row(columns, columns if before is None else before):
                if not len(mine) or mine[-1] != self.columns - 1 or mine[0] < 0 or (np.diff(mine) <= 0).any():
                    raise ValueError(f"layer {layer} must compute ascending columns that end in the last one")
                if not np.isin(mine, its).all():
                    raise ValueError(f"layer {layer} computes columns that layer {layer - 1} does not")
            before = columns

    @property
    def exact(self) -> bool:
        """Whether what is computed under this plan is what computing everything would give."""
        return (self.budget_tokens is None or self.streamed) and all(
            piece.exact for group in self.groups for piece in group.pieces
        )

    @cached_property
    def readers(self) -> tuple[SegmentReader, ...]:
        """The segments that it restores from."""
        return tuple(dict.fromkeys(piece.reader for group in self.groups for piece in group.pieces))

    @cached_property
    def suffix(self) -> int | None:
        """The first computed column if every layer computes just the suffix from there, else None."""
        if self.fronts or self.under_way is not None or any(columns.ndim > 1 for columns in self.computed):
            return None
        first = self.computed[0]
        whole = len(first) == self.columns - first[0]
        return int(first[0]) if whole and all(c is first or len(c) == len(first) for c in self.computed) else None

    @cached_property
    def restored_until(self) -> int:
        """The first column from which on every layer computes all, in every row."""
        last = self.computed[-1]  # no layer computes less
        if self.fronts:
            return self.columns - (len(last) - self.fronts[-1])
        return max(_run_at_end(mine) for (mine,) in row_by_row(last))

    def with_fronts(self, fronts: Sequence[int]) -> Plan:
        """This plan, by which every layer computes just the suffix, with a front that each computes as well."""
        suffix = self.computed[0]
        made = {front: np.concatenate([np.arange(front), suffix]) for front in set(fronts)}  # layers may share one
        return replace(self, computed=tuple(made[front] for front in fronts), fronts=tuple(fronts))

    def kept(self, layer: int) -> Columns | None:
        """Which of the hidden states of the layer before `layer` keeps, int64 `[n]` or `[rows, n]`, or None for all."""
        return places(self.computed[layer], self.computed[layer - 1]) if layer else None

    def rows(self, layer: int) -> Columns | None:
        """Which of the first layer's queries are `layer`'s, int64 `[n]` or `[rows, n]`, or None for all."""
        return places(self.computed[layer], self.computed[0])

    def first_kept(self, window: int) -> int:
        """The first column that a layer with this sliding window (0: none) still needs when the pass begins."""
        if not window:
            return -self.base
        first = self.computed[0] if self.under_way is None else self.under_way.every
        return max(-self.base, int(first.min()) - (window - 1))

    def wanted_tokens(
        self, block_group: BlockGroup, group: RowGroup, piece: SegmentSlice, layer: int | None = None
    ) -> np.ndarray:
        """The tokens of `piece`, counted in its segment, that a layer needs and does not compute.

        Those that are needed only if they are chosen do not count, nor those that the block group does not hold.

        Args:
            block_group: whose blocks they are read from.
            layer: of that block group, or None for any.
        """
        if block_group.identifies or (self.budget_tokens is not None and not block_group.window):
            return np.empty(0, np.int64)
        layers = block_group.layers if layer is None else (layer,)
        tokens = self._needed_tokens(block_group.window, layers, group, piece)
        return piece.reader.shape.held_by(block_group, tokens)

    def _needed_tokens(self, window: int, layers: tuple[int, ...], group: RowGroup, piece: SegmentSlice) -> np.ndarray:
        """The tokens of `piece`, counted in its segment, that one of `layers`, of this window, does not compute."""
        start = piece.at + group.pad - self.base - piece.first  # column of the segment's first token
        low = max(piece.first, max(0, self.first_kept(window)) - start)
        high = piece.first + piece.count
        if self.suffix is not None or self.fronts:
            begin, end = self.restored_columns(layers[-1], window)
            return np.arange(max(low, begin - start), min(high, end - start))
        tokens = np.arange(low, high)
        if self.under_way is not None and self.under_way.wants_all(layers) and not piece.exact:
            return tokens
        computed = of_row(self.computed[layers[-1]], group.rows[0])
        return tokens[~np.isin(tokens + start, computed, assume_unique=True)]

    def restored_columns(self, layer: int, window: int) -> tuple[int, int]:
        """Between which columns those lie that a layer restores, under a plan of a suffix, and fronts or none.

        Of a layer with a sliding window (0: none) those that the suffix sees: the front sees nothing but itself.
        """
        until = self.restored_until
        front = self.fronts[layer] if self.fronts else 0
        return (max(front, until - (window - 1)) if window else front), until

    def check_held(self, group: RowGroup, piece: SegmentSlice) -> None:
        """Raises ValueError if a layer neither computes a token of `piece` nor finds it in its segment."""
        shape = piece.reader.shape
        if shape.whole:
            return
        for layer, kind in enumerate(shape.layout.layers):
            if kind is None or (self.budget_tokens is not None and not kind.window):
                continue
            needed = self._needed_tokens(kind.window, (layer,), group, piece)
            if not shape.held[layer][needed].all():
                raise ValueError(f"segment {piece.reader.id} lacks tokens of layer {layer} that a plan restores")

    @property
    def num_selected(self) -> int:
        """Restored columns that layers with full attention hold at most: all, if these choose none."""
        return (self.suffix or 0) if self.budget_tokens is None else self.budget_tokens

    @property
    def num_skipped(self) -> int:
        """Restored columns that they have no room for."""
        return (self.suffix or 0) - self.num_selected

    @property
    def restored_tokens(self) -> int:
        """Tokens, over all rows, that a layer restores: those that the last one does not compute, or a front holds."""
        least = np.arange(self.restored_until, self.columns) if self.fronts else self.computed[-1]
        return sum(
            len(group.rows) * (self.columns - max(0, group.pad - self.base)) for group in self.groups
        ) - self._tokens_in(least)

    @property
    def recomputed_tokens(self) -> float:
        """Of these, those that a layer computes all the same, a mean over the layers; a question's own pass counts."""
        layers = len(self.computed)
        if self.fronts:
            return sum(len(group.rows) for group in self.groups) * sum(self.fronts) / layers
        counts = {id(columns): self._tokens_in(columns) for columns in self.computed}
        more = sum(counts[id(columns)] for columns in self.computed) - layers * counts[id(self.computed[-1])]
        if self.under_way is not None:
            more += sum(self.under_way.asking_tokens) * self.under_way.asked_layers
        return more / layers

    @property
    def attended_tokens(self) -> float:
        """Of those restored, the ones that layers with full attention may attend to, a mean over these layers."""
        if self.budget_tokens is None or self.streamed:
            return self.restored_tokens
        each = self.selected or (self.num_selected,)
        of_rows = [(len(group.rows), max(0, (self.suffix or 0) - group.pad)) for group in self.groups]
        return sum(rows * min(columns, tokens) for rows, tokens in of_rows for columns in each) / len(each)

    def _tokens_in(self, columns: Columns) -> int:
        """How many tokens, over all rows, stand in some columns."""
        return sum(
            len(group.rows) * int((of_row(columns, group.rows[0]) >= max(0, group.pad - self.base)).sum())
            for group in self.groups
        )


def _run_at_end(columns: np.ndarray) -> int:
    """The first of those columns, ascending, that follow one another up to the last."""
    alone = np.flatnonzero(np.diff(columns) > 1)
    return int(columns[alone[-1] + 1] if len(alone) else columns[0])
