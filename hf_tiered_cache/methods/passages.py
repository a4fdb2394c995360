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
from ..restore.passages import sink_token
from ..restore.plan import PlanContext, RowGroup, SegmentSlice, UnderWay
from ..restore.spectral import KV, RANKINGS, Ranking, rank_tokens
from ..store import PASSAGE
from .base import Method


@dataclass(frozen=True, kw_only=True)
class Passages(Method, ABC):
    """Everything is computed but what `reused_tokens` says of each passage.

    A prefix that is stored as such is restored first, and whole: it is exact.

    Args:
        ranking: by what the tokens of a passage are ranked, for methods that go by it: "context" (ours: by how far
            their KV moves when other text stands before them, for which each passage is computed twice),
            "low_frequency" (the paper's), "high_frequency" or "random" (what it is compared with). The KV is the same
            for all, and found by all; passages that are not ranked so go by the order in which they were stored.
        alpha: share of the frequencies that are low (CacheTune, Section 4.1), where these rank.
        check_layer: the first layer that computes no more than these tokens; 0 or 1. Before it, all are computed.
        sink: whether passages are computed behind the model's first token, so that no token of theirs takes its part.
    """

    geometry: Geometry = field(default=Geometry(16, 1))
    ranking: Ranking = "context"
    alpha: float = 0.5
    check_layer: Literal[0, 1] = 0
    sink: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranking not in RANKINGS:
            raise ConfigError(f"ranking is one of {', '.join(RANKINGS)}, not {self.ranking!r}")
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha is a share of the frequencies, above 0 and at most 1, not {self.alpha!r}")
        if self.check_layer not in (0, 1):
            raise ConfigError(f"check_layer is 0 or 1, not {self.check_layer!r}")

    @property
    def passages(self) -> str:
        return coded_provenance(PASSAGE, self.geometry.codec)

    def sink_token(self, config: PreTrainedConfig) -> int | None:
        """What is set before a passage while its KV is computed, or None."""
        return sink_token(config) if self.sink else None

    def rank(self, layers: Iterable[KV], kv_in_context: Iterable[KV] | None = None) -> np.ndarray:
        """How much it matters that each token of a new passage is computed in context: float32 `[tokens]`.

        Args:
            layers: its keys and values.
            kv_in_context: the same behind other text, for rankings that look at these too.
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

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        under_way = self.under_way(context)
        if under_way is not None and under_way.asked_layers:
            return (under_way.least,) * context.layers
        return self.first_computed(context, None)

    def first_computed(self, context: PlanContext, attention: np.ndarray | None) -> tuple[np.ndarray, ...]:
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
        if not narrowing or len(every) == len(least):
            return None
        return UnderWay(context, every, least, compare_layers=tuple(layer for layer, _ in narrowing))

    def go_on(
        self, under_way: UnderWay, layer: int, columns: np.ndarray, moved: np.ndarray, attention: np.ndarray | None
    ) -> np.ndarray:
        """See `Method`. Of each row the share that `narrowing` says; rows share their columns."""
        share = dict(self.narrowing(under_way.context.layers))[layer]
        chosen = [under_way.least]
        for group in under_way.context.groups:
            row, mine = group.rows[0], _reusable(under_way, group)
            found = np.isin(columns, mine)
            score = moved[row, found]
            if attention is not None:
                score = score * self.asked_for(attention[row, columns[found]], attention[row, mine].mean())
            most = np.argsort(-score, kind="stable")[: count_of(share, len(mine))]
            chosen.append(columns[found][most])
        return np.unique(np.concatenate(chosen))

    def asked_for(self, attention: np.ndarray, mean: float) -> np.ndarray:
        """By how much the question's attention makes tokens matter more.

        Args:
            attention: to each.
            mean: to a token of a passage.
        """
        return np.ones_like(attention)

    def _computed(self, context: PlanContext, attention: np.ndarray | None) -> np.ndarray:
        """The columns of tokens that some row does not restore, int64 ascending."""
        restored = np.ones(context.columns, bool)
        for group in context.groups:
            mine = _held(context, group)
            passages = [piece for piece in group.pieces if not piece.exact]
            columns = [_columns_of(context, group, piece) for piece in passages]
            asked = None if attention is None else [attention[group.rows[0], each] for each in columns]
            for each, tokens in zip(columns, self.reused_tokens(passages, asked), strict=True):
                mine[each[tokens]] = True
            restored &= mine
        restored[context.columns - context.must_compute :] = False
        return np.flatnonzero(~restored)


def columns_of_passages(context: PlanContext) -> tuple[np.ndarray, np.ndarray]:
    """The columns that may be computed, all that are not exact, and those that must be: int64 ascending, each."""
    exact, stored = np.ones(context.columns, bool), np.ones(context.columns, bool)
    for group in context.groups:
        mine = _held(context, group)
        exact &= mine
        for piece in group.pieces:
            mine[_columns_of(context, group, piece)] = True
        stored &= mine
    for restored in (exact, stored):
        restored[context.columns - context.must_compute :] = False
    return np.flatnonzero(~exact), np.flatnonzero(~stored)


def question_of(context: PlanContext, most: int) -> int | None:
    """The first column behind the last passage of every row, of so many at most; None if there is none behind it."""
    ends = [_columns_of(context, group, piece)[-1] + 1 for group in context.groups for piece in group.pieces]
    first = int(max(max(ends, default=0), context.columns - most))
    return None if first >= context.columns else first


def _held(context: PlanContext, group: RowGroup) -> np.ndarray:
    """bool `[columns]`: where a row needs nothing computed: padding, and what is exact."""
    held = np.zeros(context.columns, bool)
    held[: max(0, group.pad - context.base)] = True
    for piece in group.pieces:
        if piece.exact:
            columns = _columns_of(context, group, piece)
            held[columns[columns >= 0]] = True
    return held


def _columns_of(context: PlanContext, group: RowGroup, piece: SegmentSlice) -> np.ndarray:
    return np.arange(piece.count) + piece.at + group.pad - context.base


def _reusable(under_way: UnderWay, group: RowGroup) -> np.ndarray:
    """The columns of a row's passages that every row can restore, int64 ascending."""
    pieces = [piece for piece in group.pieces if not piece.exact]
    columns = [_columns_of(under_way.context, group, piece) for piece in pieces]
    return np.setdiff1d(np.concatenate([np.empty(0, np.int64), *columns]), under_way.least, assume_unique=True)


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
