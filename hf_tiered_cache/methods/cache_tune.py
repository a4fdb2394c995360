"""CacheTune: passages anywhere in a prompt; the tokens that carry meaning between them are computed (its Section 4)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from ..codecs import coded_provenance
from ..errors import ConfigError
from ..geometry import Geometry
from ..restore.plan import PlanContext, SegmentSlice
from ..restore.recompute import LOWEST
from ..restore.spectral import KV, RANKED_IN_CONTEXT, RANKINGS, Ranking, rank_tokens
from ..store import PASSAGE
from .base import Method

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True, kw_only=True)
class Passages(Method, ABC):
    """What methods that reuse passages share: everything is computed but what `reused_tokens` says of each passage.

    A prefix that is stored as such is restored first, and whole: it is exact.

    Args:
        ranking: by what the tokens of a passage are ranked, for methods that go by it: "low_frequency" (the paper's),
            "high_frequency" or "random" (what it is compared with), or "context" (ours: by how far their KV moves when
            other text stands before them, for which each passage is computed twice). The KV is the same for all, and
            found by all; passages that are not ranked so go by the order in which their tokens were stored.
        alpha: share of the frequencies that are low (Section 4.1), where these rank.
        check_layer: the first layer that computes no more than these tokens; 0 or 1. Before it, all are computed.
    """

    geometry: Geometry = field(default=Geometry(16, 1))
    ranking: Ranking = "low_frequency"
    alpha: float = 0.5
    check_layer: Literal[0, 1] = 0

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

    def rank(self, layers: Iterable[KV], kv_in_context: Iterable[KV] | None = None) -> np.ndarray:
        """How much it matters that each token of a new passage is computed in context: float32 `[tokens]`.

        Args:
            layers: its keys and values.
            kv_in_context: the same behind other text, for rankings that look at these too.
        """
        return rank_tokens(layers, self.ranking, self.alpha, kv_in_context)

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        restored = self._restored(context, self.reused_tokens)
        exact = self._restored(context, lambda pieces: [np.empty(0, np.int64)] * len(pieces))
        every, chosen = np.flatnonzero(~exact), np.flatnonzero(~restored)
        return (every,) * self.check_layer + (chosen,) * (context.layers - self.check_layer)

    def _restored(
        self, context: PlanContext, reused_tokens: Callable[[Sequence[SegmentSlice]], Sequence[np.ndarray]]
    ) -> np.ndarray:
        """bool `[columns]`: what every row can restore, of passages the tokens that `reused_tokens` gives."""
        result = np.ones(context.columns, bool)
        for group in context.groups:
            mine = np.zeros(context.columns, bool)
            mine[: max(0, group.pad - context.base)] = True  # padding
            exact = [piece for piece in group.pieces if piece.exact]
            passages = [piece for piece in group.pieces if not piece.exact]
            tokens_of = [*(np.arange(piece.count) for piece in exact), *reused_tokens(passages)]
            for piece, tokens in zip(exact + passages, tokens_of, strict=True):
                columns = tokens + piece.at + group.pad - context.base
                mine[columns[columns >= 0]] = True
            result &= mine
        result[context.columns - context.must_compute :] = False
        return result

    @abstractmethod
    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        """Of each passage in a row the tokens that are restored, counted from the piece's first: int64 each."""


@dataclass(frozen=True, kw_only=True)
class CacheTune(Passages):
    """Of each passage the tokens with most energy at low frequencies are computed in their true context.

    Their places are the first in the passage's blocks, so that no more than the others is read.

    Args:
        recompute: share of a passage's tokens that is computed; 0 reuses all as they are, 1 is full recompute. "auto"
            takes what `KVStore.calibrate` found to be fastest on this machine (Section 4.3).
        across: with the ranking "context", whose scores compare between passages, whether the share is of all passages
            of a row together, so that those which depend more on what stands before them get more of it (ours).
    """

    recompute: float | Literal["auto"] = field(default=0.15, kw_only=False)
    across: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute != "auto":
            check_share(self.recompute)

    @property
    def ranked_by(self) -> str:
        return f"{self.ranking} {self.alpha}" if self.ranking.endswith("frequency") else self.ranking

    def with_calibrated_ratio(self, ratio: Callable[[], float | None]) -> CacheTune:
        if self.recompute != "auto":
            return self
        if (found := ratio()) is None:
            logger.warning(
                'CacheTune(recompute="auto"): nothing was measured for this model on this device, so %s is taken; '
                "run `hf-tiered-cache calibrate`, or KVStore.calibrate(model)",
                LOWEST,
            )
        return replace(self, recompute=LOWEST if found is None else found)

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        if not passages:
            return []
        importance = [importance_of(piece) for piece in passages]
        # orders, which unranked ones go by, do not compare
        together = self.across and self.ranking in RANKED_IN_CONTEXT and all(p.scores is not None for p in passages)
        pools = [np.concatenate(importance)] if together else importance
        kept = np.concatenate([self._least(pool) for pool in pools])
        return [np.flatnonzero(part) for part in np.split(kept, np.cumsum([len(each) for each in importance[:-1]]))]

    def _least(self, importance: np.ndarray) -> np.ndarray:
        """bool `[tokens]`: which are not among the most important ones, of equals the last."""
        assert self.recompute != "auto"  # `with_calibrated_ratio` has filled it in
        least = np.ones(len(importance), bool)
        least[np.argsort(-importance, kind="stable")[: int(self.recompute * len(importance) + 1e-9)]] = False
        return least


@dataclass(frozen=True, kw_only=True)
class Epic(Passages):
    """The first tokens of each passage are computed, where those that took it for a beginning attended (LegoLink).

    Args:
        recompute: a share of each passage, or None for the `first` tokens.
        first: how many (Hu et al. 2025).
    """

    recompute: float | None = field(default=None, kw_only=False)
    first: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first < 0:
            raise ConfigError(f"first is a number of tokens, not {self.first!r}")
        if self.recompute is not None:
            check_share(self.recompute)

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        return [np.arange(min(self._beginning(piece.count), piece.count), piece.count) for piece in passages]

    def _beginning(self, count: int) -> int:
        return self.first if self.recompute is None else int(self.recompute * count + 1e-9)


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Passages):
    """The tokens whose values at layer 1 are furthest from the stored ones are computed (Yao et al. 2025).

    All tokens are computed up to that layer, and all KV behind it is read.

    Args:
        recompute: share of all reused tokens that is computed.
    """

    recompute: float = field(default=0.15, kw_only=False)
    check_layer: Literal[1] = 1

    compare_layer: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.recompute)
        if self.check_layer != 1:
            raise ConfigError("CacheBlend's check_layer is 1")

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        every, *_, least = super().positions_to_compute(context)
        return (every,) * (self.compare_layer + 1) + (least,) * (context.layers - self.compare_layer - 1)

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        return [np.arange(piece.count) for piece in passages]

    def select_deviating(self, deviation: np.ndarray) -> np.ndarray:
        return np.argsort(-deviation, kind="stable")[: int(self.recompute * len(deviation) + 1e-9)]


def importance_of(piece: SegmentSlice) -> np.ndarray:
    """How much it matters that each token of a passage is computed: float `[tokens]`."""
    every, tables = piece.scores, piece.reader.shape.tables
    if every is None:  # not ranked as it is asked for: by the order in which it was stored, one for all layers
        if tables is None or not len(tables.slot_of_token):
            return -np.arange(piece.first, piece.first + piece.count, dtype=np.float64)
        every = -tables.slot_of_token[0].astype(np.float64)
    return every[piece.first : piece.first + piece.count]


def check_share(recompute: float) -> None:
    """Raises ConfigError if it is no share."""
    if isinstance(recompute, bool) or not isinstance(recompute, int | float) or not 0 <= recompute <= 1:
        raise ConfigError(f"recompute is a share of each passage, between 0 and 1, not {recompute!r}")
