"""CacheTune: passages anywhere in a prompt; the tokens that carry meaning between them are computed (its Section 4).

And what we make of it. The paper says when a passage is stored which of its tokens are computed, whatever is asked.
Here the first layers compute many tokens; where their KV turns out to be near what is stored, or the question does not
attend to it, the other layers do without. The question may also be asked first: it then goes by itself through the
first half of the layers, over stored KV, and what it attends to counts for more from the first layer on (as in
ProphetKV, arXiv 2602.02579, FusionRAG, 2601.12904, and QCFuse, 2606.05875, by other means).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from ..errors import ConfigError
from ..restore.plan import PlanContext, SegmentSlice, UnderWay
from ..restore.recompute import LOWEST, narrowed_shares
from ..restore.spectral import RANKED_IN_CONTEXT
from ..sources import LayerTensors
from .passages import Passages, check_share, columns_of_passages, count_of, importance_of, questions_of

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True, kw_only=True)
class CacheTune(Passages):
    """Of passages the tokens that depend on what stands before them, and that the question asks for, are computed.

    Args:
        recompute: share of the passages' tokens that is computed, a mean over the layers; 0 reuses all as they are, 1
            is full recompute. "auto" takes what `KVStore.calibrate` found to be fastest on this machine (Section 4.3).
        across: with the ranking "context", whose scores compare between passages, whether the share is of all passages
            of a row together, so that those which depend more on what stands before them get more of it (ours).
        probe: whether the question goes through the first half of the layers, over stored KV, before anything is
            chosen: these layers are loaded before any other is computed. On real text that comes a little nearer to
            full recompute, on questions whose answer crosses passages it finds less (docs/evaluation.md). "auto" asks
            unless `calibrate` found that more is worth computing than the least, since loading takes longer.
        question: tokens at the end of the prompt that ask; None for those behind the last passage, 32 at most.
            Where a prompt ends in a passage nobody asks: tokens are chosen by how far they move alone.
        widen: how many times the tokens are computed in the first layers that are computed in the others; 1 computes
            the same in all.
        narrow_at: the first layer that computes fewer; None for 3, or 3 / 8 of the layers of a model that has few.
        floor: how much a token counts that nobody attends to, beside one that gets a mean share of the attention. Those
            count too: what the question asks for may depend on them.
    """

    recompute: float | Literal["auto"] = field(default=0.15, kw_only=False)
    across: bool = True
    probe: bool | Literal["auto"] = False
    question: int | None = None
    widen: float = 6.0
    narrow_at: int | None = None
    floor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute != "auto":
            check_share(self.recompute)
        if self.probe not in (True, False, "auto"):
            raise ConfigError(f'probe is True, False or "auto", not {self.probe!r}')
        if self.question is not None and self.question < 0:
            raise ConfigError(f"question is a number of tokens, not {self.question!r}")
        if self.widen < 1:
            raise ConfigError(f"widen is 1 or more, not {self.widen!r}")
        if self.narrow_at is not None and self.narrow_at < 1:
            raise ConfigError(f"narrow_at is the number of a layer behind the first, not {self.narrow_at!r}")
        if self.floor < 0:
            raise ConfigError(f"floor is not negative, {self.floor!r} is")

    @classmethod
    def paper(cls, recompute: float | Literal["auto"] = 0.15) -> CacheTune:
        """The paper's: low frequencies choose when a passage is stored, the same tokens in all layers."""
        return cls(recompute, lead=1, ranking="low_frequency", probe=False, question=0, widen=1)

    @property
    def ranked_by(self) -> str:
        return f"{self.ranking} {self.alpha}" if self.ranking.endswith("frequency") else self.ranking

    def with_calibrated_ratio(self, ratio: Callable[[], float | None]) -> CacheTune:
        if self.recompute != "auto" and self.probe != "auto":
            return self
        found = ratio()
        if found is None and self.recompute == "auto":
            logger.warning(
                'CacheTune(recompute="auto"): nothing was measured for this model on this device, so %s is taken; '
                "run `hf-tiered-cache calibrate`, or KVStore.calibrate(model)",
                LOWEST,
            )
        share = self.recompute if self.recompute != "auto" else LOWEST if found is None else found
        probe = (found is None or found <= LOWEST) if self.probe == "auto" else self.probe
        return replace(self, recompute=share, probe=probe)

    # --- what is computed

    def narrowing(self, layers: int) -> tuple[tuple[int, float], ...]:
        """See `Passages`."""
        at, (_, few) = self._narrow_at(layers), self._shares(layers)
        return ((at, few),) if self.widen > 1 and 0 < self._share < 1 and at < layers else ()

    def _narrow_at(self, layers: int) -> int:
        return min(_NARROW_AT, max(1, 3 * layers // 8)) if self.narrow_at is None else self.narrow_at

    @property
    def _share(self) -> float:
        assert self.recompute != "auto"  # `with_calibrated_ratio` has filled it in
        return self.recompute

    def _shares(self, layers: int) -> tuple[float, float]:
        """Of tokens, before and from `narrow_at` on."""
        if (at := self._narrow_at(layers)) >= layers:
            return self._share, self._share
        return narrowed_shares(self._share, self.widen, at, layers)

    def under_way(self, context: PlanContext) -> UnderWay | None:
        """See `Method`."""
        every, least = columns_of_passages(context)
        if not 0 < self._share < 1 or np.array_equal(every, least):
            return None
        questions = questions_of(context, _LONGEST_QUESTION if self.question is None else self.question)
        asked = context.layers // 2 if self.probe and questions else 0
        compared = tuple(layer for layer, _ in self.narrowing(context.layers))
        if not asked and not compared:
            return None
        return UnderWay(context, every, least, questions, asked, compared)

    def reused_tokens(
        self, passages: Sequence[SegmentSlice], attention: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        if not passages:
            return []
        importance = [importance_of(piece) for piece in passages]
        if attention is not None:
            mean = float(np.concatenate(attention).mean())
            importance = [
                score * self.asked_for(given, mean) for score, given in zip(importance, attention, strict=True)
            ]
        # orders, which unranked ones go by, do not compare
        together = self.across and self.ranking in RANKED_IN_CONTEXT and all(p.scores is not None for p in passages)
        pools = [np.concatenate(importance)] if together else importance
        share = self._shares(len(passages[0].reader.shape.layout.layers))[0]
        kept = np.concatenate([_least(pool, share) for pool in pools])
        return [np.flatnonzero(part) for part in np.split(kept, np.cumsum([len(each) for each in importance[:-1]]))]

    def asked_for(self, attention: np.ndarray, mean: float) -> np.ndarray:
        """See `Passages`."""
        return attention / max(mean, _SMALL) + self.floor

    def moved(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """See `Method`: as a share of what is stored, keys and values alike."""
        keys, values = (_distance(old, new) for old, new in zip(stored, computed, strict=True))
        return (keys + values).sqrt()


_LONGEST_QUESTION = 32
_NARROW_AT = 3
_SMALL = 1e-30


def _least(importance: np.ndarray, share: float) -> np.ndarray:
    """bool `[tokens]`: which are not among the share of the most important ones, of equals the last."""
    least = np.ones(len(importance), bool)
    least[np.argsort(-importance, kind="stable")[: count_of(share, len(importance))]] = False
    return least


def _distance(stored: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """Squared, over all heads, as a share of what is stored: of `[batch, heads, n, dim]` float32 `[batch, n]`."""
    wide = stored.float()
    return (computed.float() - wide).square().sum((1, 3)) / wide.square().sum((1, 3)).clamp_min(_SMALL)
