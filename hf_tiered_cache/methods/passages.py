"""Base of methods that restore passages anywhere in a prompt, and recompute some of their tokens in context."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ConfigError, UnsupportedModelError, unknown_name
from ..passages.ranking import RANKED_IN_CONTEXT, RANKINGS, Ranking, kv_deviation
from ..passages.recompute import ProbeAttention
from ..restore.plan import PassagesPlan, Plan
from ..restore.rows import PlanContext, Positions, SegmentSlice, of_row, repeats
from ..store.codecs import coded_provenance
from ..store.format import passage_provenance
from ..store.geometry import Geometry
from .base import Method, count_of, is_count, is_number, require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from typing_extensions import Self

    from ..layers import LayerTensors

_RANKING_LEAD_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Passages(Method):
    """Base of methods that reuse passages: everything is computed except the `reused_tokens` of each passage.

    A stored prefix is restored first, and completely, since it is exact. A method must define `reused_tokens`.

    Args:
        ranking: Ranking of a passage's tokens, for methods that use one: "context" (ours: by how far their KV moves if
            text precedes them, for which each passage is computed with and without such text), "low_frequency" (the
            paper's) or "random". The KV is the same for all rankings, and found by all. Passages without the requested
            ranking use the order in which their tokens were stored.
        lead: Number of tokens that precede a passage while its KV is computed, and are then dropped: the model's first
            token, followed by a text that belongs to no document. In a prompt, a passage follows other text, and KV
            computed at the beginning of all text is far from that. 1 is the first token alone, so that no token of the
            passage becomes the attention sink. 0 is none. A method finds only passages
            that were stored with the same lead.
    """

    geometry: Geometry = Geometry(16, 1)
    ranking: Ranking = "context"
    lead: int = 256

    question = 0
    """Maximum number of tokens of a row's query probe, see `PassagesPlan`; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranking not in RANKINGS:
            raise ConfigError(unknown_name("ranking", self.ranking, RANKINGS))
        require(is_count(self.lead), "lead", "a number of tokens, an int", self.lead)

    @cached_property
    def passages(self) -> str:
        """Provenance of the passages that are searched anywhere in a prompt."""
        return coded_provenance(passage_provenance(self.lead), self.geometry.codec)

    def sink_token(self, config: PreTrainedConfig) -> int | None:
        """Return the first token that precedes a passage while its KV is computed, or None."""
        return sink_token(config) if self.lead else None

    @cached_property
    def ranked_by(self) -> str:
        """Name of the ranking of a passage's tokens that the method uses; "" for none."""
        return ""

    @property
    def ranks_in_context(self) -> bool:
        """True if a passage is computed a second time to rank its tokens."""
        return bool(self.ranked_by) and self.ranking in RANKED_IN_CONTEXT

    @property
    def ranking_lead_tokens(self) -> int:
        """Number of lead tokens in that computation: 1 if passages are stored after a text, else enough for a text."""
        return 1 if self.lead > 1 else _RANKING_LEAD_TOKENS

    def with_calibrated_ratio(self, ratio: Callable[[], float | None]) -> Self:
        """Return this method with its "auto" settings replaced by measured values.

        `ratio` returns the ratio measured on this machine, or None.
        """
        return self

    def with_equal_positions(self) -> Self:
        """Return this method for a model with layers that cannot compute fewer positions than those before.

        Raises:
            UnsupportedModelError: The method computes fewer in later layers.
        """
        if type(self).narrowing is not Passages.narrowing:
            raise UnsupportedModelError(
                f"{type(self).__name__} computes fewer tokens in later layers, but this model's layers take arguments "
                "for each token; use CacheTune or Epic"
            )
        return self

    # --- tokens to compute

    @abstractmethod
    def reused_tokens(self, passages: Sequence[SegmentSlice]) -> list[np.ndarray]:
        """Return the restored tokens of each passage of a row, counted from the piece's first token: int64 each."""

    def narrowing(self, layers: int) -> tuple[int, float] | None:
        """Return the layer at which stored and computed KV are compared, with a share; None to compare nothing.

        The share is that of the passages' tokens that later layers compute.
        """
        return None

    def positions_to_compute(self, context: PlanContext) -> tuple[Positions, ...]:
        narrowing = self.narrowing(context.layers)
        wide_layers = context.layers if narrowing is None else narrowing[0] + 1
        selected = (self._selected_positions(context),) * wide_layers
        return selected + (context.missing,) * (context.layers - wide_layers)

    def _plan_for(self, context: PlanContext, positions: tuple[Positions, ...]) -> Plan:
        """See `Method`. A pass that compares KV completes its plan."""
        narrowing = self.narrowing(context.layers)
        if narrowing is None or np.array_equal(context.inexact, context.missing):
            return super()._plan_for(context, positions)
        common = context.base, context.num_positions, positions, context.groups
        return PassagesPlan(*common, context, *narrowing, _question_tokens(context, self.question))

    def kv_deviation(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """Return the deviation of computed from stored KV, `[batch, heads, n, dim]` each: float32 `[batch, n]`."""
        return kv_deviation(stored, computed)

    def narrow(
        self,
        plan: PassagesPlan,
        positions: Positions,
        deviation: np.ndarray,
        attention: ProbeAttention | None,
    ) -> Positions:
        """Return the positions that are computed after the comparison. The share is selected in each row.

        Args:
            plan: Plan that the pass completes.
            positions: Positions computed so far, n per row.
            deviation: KV deviation of these positions, float `[rows, n]`; undefined where nothing is stored.
            attention: Attention of each row's query probe in the layers so far, or None if it is not available.
        """
        context, selected = plan.context, []
        for group in context.groups:
            row = group.rows[0]
            missing, row_positions = of_row(context.missing, row), of_row(positions, row)
            pieces = [context.positions_of(group, piece) for piece in group.pieces if not piece.exact]
            stored = np.concatenate([np.empty(0, np.int64), *pieces])
            reusable = np.setdiff1d(stored[stored >= 0], missing, assume_unique=True)
            probe_attention = None if attention is None else attention[row]
            is_reusable = np.isin(row_positions, reusable)
            score = deviation[row, repeats(positions, row) :][is_reusable]
            if probe_attention is not None and len(reusable):
                score = score * self.probe_weights(
                    probe_attention[row_positions[is_reusable]], probe_attention[reusable].mean()
                )
            best = np.argsort(-score, kind="stable")[: count_of(plan.share, len(reusable))]
            selected.append(np.union1d(missing, row_positions[is_reusable][best]))
        return context.for_rows(selected)

    def probe_weights(self, attention: np.ndarray, mean: float) -> np.ndarray:
        """Return the factors by which the query probe's attention to tokens raises their importance.

        `mean` is the mean attention to a token of a passage.
        """
        return np.ones_like(attention)

    def _selected_positions(self, context: PlanContext) -> Positions:
        """Return the positions of tokens that rows do not restore."""
        restored_masks = []
        for group in context.groups:
            passages = [piece for piece in group.pieces if not piece.exact]
            all_tokens = self._arrays("reused_tokens", self.reused_tokens(passages), len(passages), "passages")
            is_restored = context.restored_mask(group, exact=True)
            for piece, tokens in zip(passages, all_tokens, strict=True):
                positions = context.positions_of(group, piece)[tokens]
                is_restored[positions[positions >= 0]] = True
            restored_masks.append(is_restored)
        return context.without(restored_masks)


def sink_token(config: PreTrainedConfig) -> int | None:
    """Return the BOS, else EOS token, which precedes a passage while its KV is computed; None if there is none.

    It serves as the attention sink, so that no token of the passage does.
    """
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, list):
            token = next(iter(token), None)
        if token is not None:
            return token
    return None


def _question_tokens(context: PlanContext, max_tokens: int) -> tuple[int, ...]:
    """Return the number of tokens of each row's query probe, at most `max_tokens`; () if no row has one.

    The probe follows the last passage. A row without passages, or one that ends in a passage, has none.
    """
    counts = {row: 0 for group in context.groups for row in group.rows}
    for group in context.groups:
        if any(not piece.exact for piece in group.pieces):
            end = group.pad + group.tokens - context.base
            counts |= dict.fromkeys(group.rows, min(context.num_positions - end, max_tokens))
    return tuple(counts[row] for row in sorted(counts)) if any(counts.values()) else ()


def check_share(recompute: float) -> None:
    """Raise ConfigError if `recompute` is not a number between 0 and 1."""
    expected = "a share of each passage, a float between 0 and 1"
    require(is_number(recompute, 0, 1), "recompute", expected, recompute)
