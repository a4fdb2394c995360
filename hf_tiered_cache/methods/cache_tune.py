"""CacheTune: passages are reused anywhere in a prompt, and tokens that depend on other text recomputed (its Section 4).

In the paper, the tokens to recompute are determined when a passage is stored, whatever the prompt. This implementation
refines them during the pass: the first layers compute many tokens; the other layers skip those with computed KV close
to the stored KV, or with little attention from the query probe (the prompt's question). ProphetKV (arXiv 2602.02579),
FusionRAG (2601.12904) and QCFuse (2606.05875) use the question by other means.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ..passages.ranking import LOW_FREQUENCIES, RANKED_IN_CONTEXT
from ..passages.recompute import LOWEST
from ..restore.rows import SegmentSlice
from .base import count_of, is_count, is_number, require
from .passages import Passages, check_share

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..layers import LayerTensors

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True, kw_only=True)
class CacheTune(Passages):
    """CacheTune: passages are reused, and tokens that depend on preceding text and matter to the question recomputed.

    A passage is stored without the text that precedes it in a prompt, so the stored KV of some of its tokens is
    inaccurate there. The paper ranks a passage's tokens once, when it is stored, and recomputes the same share of them
    in all layers. Ours are the ranking "context" (see `Passages`), and the refinement during the pass: `widen` times as
    many tokens are recomputed in the first layers, and the deviation of their KV from the stored KV, weighted by the
    attention of the query probe, determines which tokens the other layers recompute. `CacheTune.paper()` has the
    paper's settings. See `Passages` for the other arguments.

    Args:
        recompute: Share of the passages' tokens that is recomputed, mean over the layers: 0 reuses all stored KV, 1 is
            full recompute. The default is the lowest share that keeps quality in the paper (Section 5.2). "auto" is the
            fastest share that `KVStore.calibrate` measured on this machine (Section 4.3).
            With the ranking "context" it applies to all passages of a row together, so that passages that depend more
            on preceding text get more of it (ours). Scores of other rankings are not comparable between passages, so it
            applies to each passage.
        question: Maximum number of tokens after the last passage that form the query probe (ours); 0 for no probe. A
            prompt that ends in a passage has no probe: tokens are then selected by KV deviation alone.
        widen: Number of tokens recomputed in the first layers, as a multiple of the number in the other layers (ours);
            1 recomputes the same tokens in all layers. Layer 6 is the first that recomputes fewer, or 3 / 8 of the
            layers of a small model.
    """

    recompute: float | Literal["auto"] = field(default=0.15, kw_only=False)
    question: int = 32
    widen: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute != "auto":
            check_share(self.recompute)
        require(is_count(self.question), "question", "a number of tokens, an int", self.question)
        require(is_number(self.widen, 1), "widen", "a number of at least 1", self.widen)

    @classmethod
    def paper(cls, recompute: float | Literal["auto"] = 0.15) -> CacheTune:
        """Return the paper's settings: tokens are ranked by low frequencies at storage time, the same in all layers."""
        return cls(recompute, lead=1, ranking="low_frequency", question=0, widen=1)

    @cached_property
    def ranked_by(self) -> str:
        return f"{self.ranking} {LOW_FREQUENCIES}" if self.ranking == "low_frequency" else self.ranking

    def with_calibrated_ratio(self, ratio: Callable[[], float | None]) -> Self:
        if self.recompute != "auto":
            return self
        measured_ratio = ratio()
        if measured_ratio is None:
            logger.warning(
                'CacheTune(recompute="auto"): nothing was measured for this model on this device, so %s is used; run '
                "`hf-tiered-cache calibrate`, or call KVStore.calibrate(model)",
                LOWEST,
            )
        return replace(self, recompute=LOWEST if measured_ratio is None else measured_ratio)

    def with_equal_positions(self) -> Self:
        return replace(self, widen=1.0)

    # --- tokens to compute

    def narrowing(self, layers: int) -> tuple[int, float] | None:
        layer = _narrow_at(layers)
        if self.widen <= 1 or not 0 < self._share < 1 or layer >= layers:
            return None
        return layer, self._shares(layers)[1]

    @property
    def _share(self) -> float:
        assert self.recompute != "auto"  # replaced by `with_calibrated_ratio`
        return self.recompute

    def _shares(self, layers: int) -> tuple[float, float]:
        """Return the shares of tokens that are computed before `_narrow_at`, and from there on.

        Their mean over all layers is `recompute`, and their ratio `widen`. If the first layers compute everything, the
        others get the rest.
        """
        mean, wide_layers = self._share, _narrow_at(layers)
        if wide_layers >= layers:
            return mean, mean
        narrow_share = mean * layers / ((self.widen - 1) * wide_layers + layers)
        if self.widen * narrow_share <= 1:
            return self.widen * narrow_share, narrow_share
        return 1.0, max(0.0, (mean * layers - wide_layers) / (layers - wide_layers))

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        if not passages:
            return []
        importance = [_importance_of(piece) for piece in passages]
        # unranked passages use token order, which is not comparable between passages
        together = self.ranking in RANKED_IN_CONTEXT and all(p.scores is not None for p in passages)
        pools = [np.concatenate(importance)] if together else importance
        share = self._shares(len(passages[0].reader.shape.layout.layers))[0]
        is_reused = [np.ones(len(pool), bool) for pool in pools]
        for mask, pool in zip(is_reused, pools, strict=True):  # the first tokens win ties
            mask[np.argsort(-pool, kind="stable")[: count_of(share, len(pool))]] = False
        ends = np.cumsum([len(scores) for scores in importance[:-1]])
        return [np.flatnonzero(part) for part in np.split(np.concatenate(is_reused), ends)]

    def probe_weights(self, attention: np.ndarray, mean: float) -> np.ndarray:
        return attention / max(mean, _SMALL) + _FLOOR


_NARROW_AT = 6  # on 16 questions of HotpotQA SmolLM2 (30 layers) loses 0.131 nats with 6, 0.166 with 3, 0.137 with 10
_FLOOR = 1.0
"""Weight of a token that the query probe does not attend to, where mean attention adds 1. It is not 0, since what the
probe asks for may depend on such tokens."""
_SMALL = 1e-30


def _narrow_at(layers: int) -> int:
    """Return the first layer that computes fewer tokens."""
    return min(_NARROW_AT, max(1, 3 * layers // 8))


def _importance_of(piece: SegmentSlice) -> np.ndarray:
    """Return how important it is to compute each token of a passage: float `[tokens]`."""
    scores, tables = piece.scores, piece.reader.shape.tables
    if scores is None:  # without the requested ranking: the order in which it was stored, one for all layers
        if tables is None or not len(tables.slot_of_token):
            return -np.arange(piece.first, piece.first + piece.count, dtype=np.float64)
        scores = -tables.slot_of_token[0].astype(np.float64)
    return scores[piece.first : piece.first + piece.count]


# --- methods with which the paper compares


@dataclass(frozen=True, kw_only=True)
class Epic(Passages):
    """EPIC baseline (LegoLink): the first tokens of each passage are recomputed.

    In a passage that was computed alone, the first tokens are an attention sink, which they are not within a prompt.

    Args:
        recompute: Share of each passage that is recomputed; None for `first` tokens.
        first: Number of tokens to recompute; 16 is the paper's (Hu et al. 2025).
        lead: See `Passages`. The paper's is 0: the first token of each passage is then an attention sink, and the
            purpose of the method is to recompute it.
    """

    recompute: float | None = field(default=None, kw_only=False)
    first: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_count(self.first), "first", "a number of tokens, an int", self.first)
        if self.recompute is not None:
            check_share(self.recompute)

    @classmethod
    def paper(cls, recompute: float | None = None) -> Epic:
        """Return the paper's settings: passages are computed with nothing before them."""
        return cls(recompute, lead=0)

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        counts = [piece.count for piece in passages]
        firsts = [self.first if self.recompute is None else count_of(self.recompute, count) for count in counts]
        return [np.arange(min(first, count), count) for first, count in zip(firsts, counts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Passages):
    """CacheBlend baseline: the tokens with the largest deviation of values at layer 1 are recomputed (Yao et al. 2025).

    Layer 0 computes all tokens. Layer 1 computes the keys and values of all tokens, and its other outputs for the
    selected tokens only. Stored KV of all tokens is read from layer 1 on.

    Args:
        recompute: Share of all reused tokens that is recomputed, from layer 1 on, as in the authors' public code.
    """

    recompute: float = field(default=0.15, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.recompute)

    @classmethod
    def paper(cls, recompute: float = 0.15) -> CacheBlend:
        """Return the paper's settings: passages are computed alone."""
        return cls(recompute, lead=1)

    def narrowing(self, layers: int) -> tuple[int, float] | None:
        return (1, self.recompute) if layers > 1 else None

    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        return [np.empty(0, np.int64)] * len(passages)

    def kv_deviation(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """See `Passages`. Only values are compared."""
        return (stored[1].float() - computed[1].float()).square().sum((1, 3))
