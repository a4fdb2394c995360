"""What methods share that restore passages anywhere in a prompt, and compute some of their tokens in true context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from transformers import PreTrainedConfig

from ..codecs import coded_provenance
from ..errors import ConfigError
from ..geometry import Geometry
from ..restore.asking import Asked
from ..restore.columns import Columns, of_row, repeats, side_by_side
from ..restore.passages import sink_token
from ..restore.plan import PlanContext, RowGroup, SegmentSlice, UnderWay
from ..restore.spectral import KV, RANKED_IN_CONTEXT, RANKINGS, Ranking, rank_tokens
from ..store.format import passage_provenance
from .base import Method

_RANKED_BEHIND = 64


@dataclass(frozen=True, kw_only=True)
class Passages(Method, ABC):
    """Everything is computed but what `reused_tokens` says of each passage.

    A prefix that is stored as such is restored first, and whole: it is exact.

    Args:
        ranking: by what the tokens of a passage are ranked, for methods that go by it: "context" (ours: by how far
            their KV moves when text stands before them, for which each passage is computed with it and without),
            "low_frequency" (the paper's), "high_frequency" or "random" (what it is compared with). The KV is the same
            for all, and found by all; passages that are not ranked so go by the order in which they were stored.
        alpha: share of the frequencies that are low (CacheTune, Section 4.1), where these rank.
        check_layer: the first layer that computes no more than these tokens; 0 or 1. Before it, all are computed.
        lead: tokens that stand before a passage while its KV is computed, and whose KV is left out: the model's first
            token, and behind it a text that is nobody's (see `hf_tiered_cache.lead`). A passage in a prompt stands
            behind other text, and KV of one that seems to begin all text is far from what it is there. At 1 it is the
            first token alone, so that no token of the passage takes its part; 0: nothing. Passages are found by methods
            of the same lead.
    """

    geometry: Geometry = field(default=Geometry(16, 1))
    ranking: Ranking = "context"
    alpha: float = 0.5
    check_layer: Literal[0, 1] = 0
    lead: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranking not in RANKINGS:
            raise ConfigError(f"ranking is one of {', '.join(RANKINGS)}, not {self.ranking!r}")
        if isinstance(self.lead, bool) or not isinstance(self.lead, int) or self.lead < 0:
            raise ConfigError(f"lead is a number of tokens, not {self.lead!r}")
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha is a share of the frequencies, above 0 and at most 1, not {self.alpha!r}")
        if self.check_layer not in (0, 1):
            raise ConfigError(f"check_layer is 0 or 1, not {self.check_layer!r}")

    @property
    def passages(self) -> str:
        return coded_provenance(passage_provenance(self.lead), self.geometry.codec)

    def sink_token(self, config: PreTrainedConfig) -> int | None:
        """Return the first token that stands before a passage while its KV is computed, or None."""
        return sink_token(config) if self.lead else None

    @property
    def ranks_in_context(self) -> bool:
        """Return whether a passage is computed once more to be ranked."""
        return bool(self.ranked_by) and self.ranking in RANKED_IN_CONTEXT

    @property
    def ranked_behind(self) -> int:
        """Tokens of the lead that stands before a passage then: the first alone, or text where that is stored."""
        return 1 if self.lead > 1 else _RANKED_BEHIND

    @property
    def ranks_alone(self) -> bool:
        """Whether a passage is ranked by its own KV."""
        return bool(self.ranked_by) and self.ranking not in RANKED_IN_CONTEXT

    def rank(self, layers: Iterable[KV], kv_in_context: Iterable[KV] | None = None) -> np.ndarray:
        """How much it matters that each token of a new passage is computed in context: float32 `[tokens]`.

        Args:
            layers: its keys and values.
            kv_in_context: the same behind another lead, for rankings that look at these too.
        """
        return rank_tokens(layers, self.ranking, self.alpha, kv_in_context)

    # --- what is computed

    @abstractmethod
    def reused_tokens(
        self, passages: Sequence[SegmentSlice], attention: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Of each passage in a row the tokens that are restored, counted from the piece's first: int64 each.

        Args:
            passages: in order.
            attention: of the question to the tokens of each, where it is known.
        """

    def narrowing(self, layers: int) -> tuple[tuple[int, float], ...]:
        """Layers, ascending, at which stored KV is compared with computed KV, and the share of the passages' tokens
        that is computed from there on.
        """
        return ()

    def positions_to_compute(self, context: PlanContext) -> tuple[Columns, ...]:
        under_way = self.under_way(context)
        if under_way is not None and under_way.asked_layers:
            return (under_way.least,) * context.layers
        return self.first_computed(context, None)

    def first_computed(self, context: PlanContext, attention: Asked | None) -> tuple[Columns, ...]:
        """See `Method`."""
        every, least = columns_of_passages(context)
        chosen = self._computed(context, attention)
        narrowing = self.narrowing(context.layers)
        wide = narrowing[0][0] + 1 if narrowing else context.layers
        checked = min(self.check_layer, wide)
        return (every,) * checked + (chosen,) * (wide - checked) + (least,) * (context.layers - wide)

    def under_way(self, context: PlanContext) -> UnderWay | None:
        """See `Method`."""
        narrowing = self.narrowing(context.layers)
        every, least = columns_of_passages(context)
        if not narrowing or np.array_equal(every, least):
            return None
        return UnderWay(context, every, least, compare_layers=tuple(layer for layer, _ in narrowing))

    def go_on(
        self, under_way: UnderWay, layer: int, columns: Columns, moved: np.ndarray, attention: Asked | None
    ) -> Columns:
        """See `Method`. Of each row the share that `narrowing` says."""
        share, chosen = dict(self.narrowing(under_way.context.layers))[layer], []
        for group in under_way.context.groups:
            row = group.rows[0]
            mine, there = _reusable(under_way, group), of_row(columns, row)
            asked = None if attention is None else attention[row]
            found = np.isin(there, mine)
            score = moved[row, repeats(columns, row) :][found]
            if asked is not None and len(mine):
                score = score * self.asked_for(asked[there[found]], asked[mine].mean())
            most = np.argsort(-score, kind="stable")[: count_of(share, len(mine))]
            chosen.append(np.union1d(of_row(under_way.least, row), there[found][most]))
        return _of_rows(under_way.context, chosen)

    def asked_for(self, attention: np.ndarray, mean: float) -> np.ndarray:
        """By how much the question's attention makes tokens matter more.

        Args:
            attention: to each.
            mean: to a token of a passage.
        """
        return np.ones_like(attention)

    def _computed(self, context: PlanContext, attention: Asked | None) -> Columns:
        """The columns of tokens that a row does not restore."""
        restored = []
        for group in context.groups:
            mine, asked = _held(context, group), None if attention is None else attention[group.rows[0]]
            passages = [piece for piece in group.pieces if not piece.exact]
            columns = [_columns_of(context, group, piece) for piece in passages]
            given = None if asked is None else [asked[each] for each in columns]
            for each, tokens in zip(columns, self.reused_tokens(passages, given), strict=True):
                mine[_in_pass(each[tokens])] = True
            restored.append(mine)
        return _not_restored(context, restored)


def columns_of_passages(context: PlanContext) -> tuple[Columns, Columns]:
    """The columns that may be computed, all that are not exact, and those that must be."""
    exact = [_held(context, group) for group in context.groups]
    stored = [mine.copy() for mine in exact]
    for group, mine in zip(context.groups, stored, strict=True):
        for piece in group.pieces:
            mine[_in_pass(_columns_of(context, group, piece))] = True
    return _not_restored(context, exact), _not_restored(context, stored)


def questions_of(context: PlanContext, most: int) -> tuple[int, ...]:
    """Of each row the first column behind its last passage, of so many at most; () if nothing stands behind any.

    A row without passages, or that ends in one, has no question: its first column is behind the last one.
    """
    firsts = {row: context.columns for group in context.groups for row in group.rows}
    for group in context.groups:
        if any(not piece.exact for piece in group.pieces):
            end = max(_columns_of(context, group, piece)[-1] + 1 for piece in group.pieces)
            firsts |= dict.fromkeys(group.rows, int(max(end, context.columns - most)))
    found = tuple(firsts[row] for row in sorted(firsts))
    return found if any(first < context.columns for first in found) else ()


def _not_restored(context: PlanContext, restored: Sequence[np.ndarray]) -> Columns:
    """What is computed where rows restore other columns, bool `[columns]` for each group of them.

    Rows share their columns where all that is restored is exact: then each layer computes a suffix, of which all is
    recorded, with the bits of any other pass over it.
    """
    if all(piece.exact for group in context.groups for piece in group.pieces):
        restored = [np.logical_and.reduce(restored)] * len(restored)
    computed = [~mine for mine in restored]
    for mine in computed:
        mine[context.columns - context.must_compute :] = True
    return _of_rows(context, [np.flatnonzero(mine) for mine in computed])


def _of_rows(context: PlanContext, columns: Sequence[np.ndarray]) -> Columns:
    """Those of each group of rows, for all rows."""
    rows = {row: mine for group, mine in zip(context.groups, columns, strict=True) for row in group.rows}
    return side_by_side([rows[row] for row in sorted(rows)])


def _held(context: PlanContext, group: RowGroup) -> np.ndarray:
    """bool `[columns]`: where a row needs nothing computed: padding, and what is exact."""
    held = np.zeros(context.columns, bool)
    held[: max(0, group.pad - context.base)] = True
    for piece in group.pieces:
        if piece.exact:
            held[_in_pass(_columns_of(context, group, piece))] = True
    return held


def _columns_of(context: PlanContext, group: RowGroup, piece: SegmentSlice) -> np.ndarray:
    """Where the tokens of a piece stand; below 0 where the cache holds them already."""
    return np.arange(piece.count) + piece.at + group.pad - context.base


def _in_pass(columns: np.ndarray) -> np.ndarray:
    return columns[columns >= 0]


def _reusable(under_way: UnderWay, group: RowGroup) -> np.ndarray:
    """The columns of a row's passages that it can restore, int64 ascending."""
    pieces = [piece for piece in group.pieces if not piece.exact]
    columns = [_in_pass(_columns_of(under_way.context, group, piece)) for piece in pieces]
    every, least = np.concatenate([np.empty(0, np.int64), *columns]), of_row(under_way.least, group.rows[0])
    return np.setdiff1d(every, least, assume_unique=True)


def importance_of(piece: SegmentSlice) -> np.ndarray:
    """How much it matters that each token of a passage is computed: float `[tokens]`."""
    every, tables = piece.scores, piece.reader.shape.tables
    if every is None:  # not ranked as it is asked for: by the order in which it was stored, one for all layers
        if tables is None or not len(tables.slot_of_token):
            return -np.arange(piece.first, piece.first + piece.count, dtype=np.float64)
        every = -tables.slot_of_token[0].astype(np.float64)
    return every[piece.first : piece.first + piece.count]


def count_of(share: float, tokens: int) -> int:
    """How many of some tokens a share is: in floating point 0.15 x 20 is less than 3."""
    return int(share * tokens + 1e-9)


def check_share(recompute: float) -> None:
    """Raises ConfigError if it is no share."""
    if isinstance(recompute, bool) or not isinstance(recompute, int | float) or not 0 <= recompute <= 1:
        raise ConfigError(f"recompute is a share of each passage, between 0 and 1, not {recompute!r}")
