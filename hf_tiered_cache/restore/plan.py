"""Plan of one forward pass: the positions that each layer computes, and the segments that the others come from.

Positions include left padding, and are counted from the first one that the pass adds to the cache. The rows of a batch
compute the same positions, or different ones, stacked. `Plan` restores a prefix, and every layer computes the suffix.
`BudgetPlan`, `RecomputePlan` and `PassagesPlan` are the other kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..store.geometry import BlockGroup
from ..store.segment import SegmentReader
from .rows import PlanContext, Positions, RowGroup, SegmentSlice, by_row, count_tokens, first_of_end, row_by_row


@dataclass(frozen=True)
class Plan:
    """Computed and restored positions of one forward pass.

    This plan restores all that a layer does not compute. `BudgetPlan`, `RecomputePlan` and `PassagesPlan` differ.

    Args:
        base: Number of padded positions that the cache holds already.
        num_positions: Number of padded positions that this pass adds, restored and computed.
        computed: Positions that each layer computes. In each row they are a subset of those of the layer before, and
            include the last one.
        groups: Sources of the other positions of each row.
    """

    base: int
    num_positions: int
    computed: tuple[Positions, ...]
    groups: tuple[RowGroup, ...]

    def __post_init__(self) -> None:
        before: Positions | None = None
        for layer, positions in enumerate(self.computed):
            if positions is before:
                continue
            for row, superset in row_by_row(positions, positions if before is None else before):
                if not len(row) or row[-1] != self.num_positions - 1 or row[0] < 0 or (np.diff(row) <= 0).any():
                    raise ValueError(f"layer {layer} must compute ascending positions that end with the last one")
                if superset is not row and not np.isin(row, superset).all():
                    raise ValueError(f"layer {layer} computes positions that layer {layer - 1} does not")
            before = positions

    def streamed(self) -> BudgetPlan:
        """Return this plan of one row, which computes a suffix, with all of the prefix streamed and none of it held."""
        (group,) = self.groups
        assert self.suffix is not None
        budget = RowBudget(group, self.suffix - group.pad, self.num_positions - self.suffix, 0, True)
        return BudgetPlan(self.base, self.num_positions, self.computed, self.groups, (budget,))

    def with_recompute_lengths(self, lengths: Sequence[int]) -> RecomputePlan:
        """Return this plan with a recomputed prefix per layer. Every layer of this plan computes exactly the suffix."""
        suffix = self.computed[0]
        positions_by_length = {length: np.concatenate([np.arange(length), suffix]) for length in set(lengths)}
        by_layer = tuple(positions_by_length[length] for length in lengths)
        return RecomputePlan(self.base, self.num_positions, by_layer, self.groups, tuple(lengths))

    @cached_property
    def exact(self) -> bool:
        """True if the results of this plan equal those of computing everything."""
        return all(piece.exact for group in self.groups for piece in group.pieces)

    @cached_property
    def readers(self) -> tuple[SegmentReader, ...]:
        """Segments that the plan restores from."""
        return tuple(dict.fromkeys(piece.reader for group in self.groups for piece in group.pieces))

    @cached_property
    def suffix(self) -> int | None:
        """First computed position if every layer computes exactly the suffix from there, else None."""
        if any(positions.ndim > 1 for positions in self.computed):
            return None
        first = self.computed[0]
        is_suffix = len(first) == self.num_positions - first[0]
        return int(first[0]) if is_suffix and all(c is first or len(c) == len(first) for c in self.computed) else None

    @cached_property
    def restored_until(self) -> int:
        """First position from which on every layer computes all positions, in every row."""
        return first_of_end(self.computed[-1]) if self.suffix is None else self.suffix  # no layer computes less

    def first_position(self, window: int) -> int:
        """Return the first position that a layer with this sliding window (0: none) needs when the pass begins."""
        return max(-self.base, int(self.computed[0].min()) - (window - 1)) if window else -self.base

    def restores_all(self, window: int) -> bool:
        """Return whether a layer with this sliding window (0: none) restores all that it does not compute."""
        return True

    def tokens_to_restore(
        self, block_group: BlockGroup, group: RowGroup, piece: SegmentSlice, layer: int | None = None
    ) -> np.ndarray:
        """Return the tokens of `piece`, counted in its segment, that a layer of a KV cache group needs and lacks.

        Tokens that are needed only if they are selected do not count, nor tokens that the KV cache group does not hold.
        Without a `layer`, those that any layer of the group needs.
        """
        if block_group.identifies or not self.restores_all(block_group.window):
            return np.empty(0, np.int64)
        layers = block_group.layers if layer is None else (layer,)
        tokens = self._needed_tokens(block_group.window, layers, group, piece)
        shape = piece.reader.shape
        return tokens if shape.tables is None else shape.held_by(block_group, tokens)

    def _needed_tokens(self, window: int, layers: tuple[int, ...], group: RowGroup, piece: SegmentSlice) -> np.ndarray:
        """Return the tokens of `piece`, counted in its segment, not computed by one of `layers` of this window."""
        start = piece.at + group.pad - self.base - piece.first  # position of the segment's first token
        low = max(piece.first, max(0, self.first_position(window)) - start)
        high = piece.first + piece.count
        if (span := self.restored_span(layers[-1], window)) is not None:
            return np.arange(max(low, span[0] - start), min(high, span[1] - start))
        tokens, is_computed = np.arange(low, high), self._is_computed[layers[-1]]
        return tokens[~is_computed[group.rows[0] if len(is_computed) > 1 else 0, tokens + start]]

    @cached_property
    def _is_computed(self) -> list[np.ndarray]:
        """Positions that each layer computes, bool `[rows, positions]`; one row if all rows compute the same ones."""
        masks = {}
        for positions in {id(positions): positions for positions in self.computed}.values():
            mask = np.zeros((1 if positions.ndim == 1 else len(positions), self.num_positions), bool)
            np.put_along_axis(mask, np.atleast_2d(positions), True, axis=1)
            masks[id(positions)] = mask
        return [masks[id(positions)] for positions in self.computed]

    def restores_alike(self, layers: Sequence[int]) -> bool:
        """Return whether full-attention layers may get the same stored tokens, and overwrite what they compute."""
        return True

    def restored_span(self, layer: int, window: int) -> tuple[int, int] | None:
        """Return the half-open range of positions that a layer restores, or None if they are not consecutive.

        A layer with a sliding window (0: none) restores what the suffix sees: a recomputed prefix sees only itself.
        """
        return None if self.suffix is None else (max(0, self.first_position(window)), self.suffix)

    def check_stored(self, group: RowGroup, piece: SegmentSlice) -> None:
        """Raise ValueError if a layer neither computes a token of `piece` nor can restore it."""
        shape = piece.reader.shape
        if shape.tables is None or shape.whole:
            return
        is_held = group.held_by_any(piece)
        for layer, kind in enumerate(shape.layout.layers):
            if kind is None or not self.restores_all(kind.window):
                continue
            needed_tokens = self._needed_tokens(kind.window, (layer,), group, piece)
            if not is_held[layer][needed_tokens - piece.first].all():
                raise ValueError(f"segment {piece.reader.id} lacks tokens of layer {layer} that the plan restores")

    @cached_property
    def _new_tokens(self) -> int:
        """Number of tokens in all rows that are not restored."""
        return count_tokens(self.groups, self.base, self.computed[-1])

    @cached_property
    def restored_tokens(self) -> int:
        """Number of restored tokens in all rows: those not computed by the last layer, and recomputed prefixes."""
        tokens = sum(len(group.rows) * (self.num_positions - max(0, group.pad - self.base)) for group in self.groups)
        return tokens - self._new_tokens

    @property
    def recomputed_tokens(self) -> float:
        """Number of restored tokens that a layer computes nevertheless (mean over the layers)."""
        if self.suffix is not None:
            return 0.0
        distinct = {id(positions): positions for positions in self.computed}
        counts = {key: count_tokens(self.groups, self.base, positions) for key, positions in distinct.items()}
        return sum(counts[id(positions)] - self._new_tokens for positions in self.computed) / len(self.computed)

    @property
    def attended_tokens(self) -> int:
        """Number of restored tokens that layers with full attention may attend to."""
        return self.restored_tokens


@dataclass(frozen=True)
class RowBudget:
    """Tokens of a row in a `BudgetPlan`, the same for all rows of a group.

    Args:
        group: Group of rows.
        restored: Number of restored tokens.
        computed: Number of tokens that each layer computes after them.
        held: Number of the restored tokens that a layer with full attention holds.
        streamed: Whether the queries of this pass attend to all restored tokens nevertheless, which are fetched and
            released run by run. The results are exact; `held` applies to what is held for later tokens.
    """

    group: RowGroup
    restored: int
    computed: int
    held: int
    streamed: bool

    @cached_property
    def entries(self) -> int:
        """Number of entries in a layer with full attention."""
        return self.held + self.computed

    @property
    def exact(self) -> bool:
        """True if the results equal those of computing everything."""
        attends_to_all = self.streamed or self.held == self.restored
        return attends_to_all and all(piece.exact for piece in self.group.pieces)


@dataclass(frozen=True)
class BudgetPlan(Plan):
    """Plan in which layers with full attention attend to a part of the restored tokens, selected by their queries.

    Each row has its own number of entries in a layer: restored tokens, then computed ones. Rows are aligned at the end.
    The first entries of a row with fewer of them hold nothing.

    Args:
        base, num_positions, computed, groups: See `Plan`. Every layer computes exactly a suffix of each row.
        budgets: Budget of each group of rows.
    """

    budgets: tuple[RowBudget, ...]

    @cached_property
    def exact(self) -> bool:
        return not self.inexact_rows

    @cached_property
    def inexact_rows(self) -> tuple[int, ...]:
        """Rows with results that differ from those of computing everything."""
        return tuple(row for budget in self.budgets if not budget.exact for row in budget.group.rows)

    def restores_alike(self, layers: Sequence[int]) -> bool:
        return False

    def restores_all(self, window: int) -> bool:
        return bool(window)

    @cached_property
    def restored_until(self) -> int:
        """First position that some row computes. Other rows repeat their first computed position before it."""
        return int(self.computed[0].min())

    @cached_property
    def row_budgets(self) -> list[RowBudget]:
        """Budget of each row."""
        return by_row(self.groups, self.budgets)

    @cached_property
    def num_entries(self) -> int:
        """Number of entries of the row with most in a layer with full attention."""
        return max(budget.entries for budget in self.budgets)

    @cached_property
    def num_skipped(self) -> int:
        """Number of leading positions that exceed the budget in every row."""
        return self.num_positions - self.num_entries

    @cached_property
    def streams_all(self) -> bool:
        """True if every row that restores tokens is streamed."""
        return all(budget.streamed or not budget.restored for budget in self.budgets)

    @property
    def attended_tokens(self) -> int:
        return sum(len(b.group.rows) * (b.restored if b.streamed else b.held) for b in self.budgets)


@dataclass(frozen=True)
class RecomputePlan(Plan):
    """Plan in which layers compute the beginning of a stored prefix while the rest is loaded (Krul).

    Args:
        base, num_positions, computed, groups: See `Plan`. `computed` includes the recomputed prefixes. The cache is
            empty, and rows have no padding.
        recompute_lengths: Length of each layer's recomputed prefix. The layer loads the positions between it and the
            suffix.
    """

    recompute_lengths: tuple[int, ...]

    @cached_property
    def suffix(self) -> int | None:
        return None

    @cached_property
    def restored_until(self) -> int:
        return self.num_positions - (len(self.computed[-1]) - self.recompute_lengths[-1])

    def restored_span(self, layer: int, window: int) -> tuple[int, int]:
        until, length = self.restored_until, self.recompute_lengths[layer]
        return (max(length, until - (window - 1)) if window else length), until

    @cached_property
    def _new_tokens(self) -> int:
        return count_tokens(self.groups, self.base, np.arange(self.restored_until, self.num_positions))


@dataclass(frozen=True)
class PassagesPlan(Plan):
    """Plan for passages that the pass itself completes: it compares stored with computed KV, and computes the rest.

    Args:
        base, num_positions, computed, groups: See `Plan`. The positions in `computed` shrink with the decision.
        context: Input of the plan: the decision is between `context.inexact` and `context.missing`.
        compare_layer: Layer at which stored KV is compared with computed KV. It needs the stored KV of tokens that it
            computes, too.
        share: Share of the passages' tokens that is computed from there on, or from the next layer on.
        question_tokens: Number of tokens of each row's query probe, the last ones of the row; 0 for a row without a
            probe, () if no row has one.
    """

    context: PlanContext
    compare_layer: int
    share: float
    question_tokens: tuple[int, ...] = ()

    @cached_property
    def suffix(self) -> int | None:
        return None

    def first_position(self, window: int) -> int:
        return max(-self.base, int(self.context.inexact.min()) - (window - 1)) if window else -self.base

    def restores_alike(self, layers: Sequence[int]) -> bool:
        return self.compare_layer not in layers

    def _needed_tokens(self, window: int, layers: tuple[int, ...], group: RowGroup, piece: SegmentSlice) -> np.ndarray:
        if piece.exact or self.compare_layer not in layers:
            return super()._needed_tokens(window, layers, group, piece)
        start = piece.at + group.pad - self.base - piece.first  # position of the segment's first token
        return np.arange(max(piece.first, max(0, self.first_position(window)) - start), piece.first + piece.count)
