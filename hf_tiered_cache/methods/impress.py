"""IMPRESS: importance from a few probe heads; single tokens restored from large chunks (its paper, Section 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..selection.selector import Selector, budgeted_tokens
from ..selection.selectors import ProbeHeads
from ..store.geometry import Geometry
from .base import BudgetMethod


@dataclass(frozen=True, kw_only=True)
class Impress(BudgetMethod):
    """IMPRESS: each layer attends to the tokens that a few probe heads pay most attention to, if these heads agree.

    If they do not agree, each KV head selects its own tokens.

    Args:
        budget: Share of the prefix's tokens that a head attends to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: See `BudgetMethod`.
        chunk_tokens: Consecutive tokens in a block of keys or of values. The whole block is read for one token.
        probe_heads: Number of probe KV heads. Their keys are stored separately (Section 4.1), so that no key is read
            twice: keys of other heads are read when they are selected, or all of them if the probes disagree. With
            grouped-query attention, a probe represents its group. For models with four KV heads or fewer, two probes
            are enough.
        alpha: Exponent of the similarity at which probes agree: see `ProbeHeads`.
        reorder: Whether the tokens of a segment are ordered by importance, layer by layer, once prompts have shown it
            (Section 4.4.1), so that selected tokens are in few blocks. `Exact` reads such segments, too.
    """

    geometry: Geometry = field(init=False, default=Geometry())
    chunk_tokens: int = 64
    probe_heads: int = 3
    alpha: float = 0.6
    reorder: bool = True

    policy = "importance"

    def __post_init__(self) -> None:
        geometry = Geometry(self.chunk_tokens, 1, self.probe_heads, split_kv=True)
        object.__setattr__(self, "geometry", geometry)
        super().__post_init__()

    def token_budget(self, prefix_tokens: int) -> int:
        return budgeted_tokens(self.budget, prefix_tokens, 1)

    def selector(self) -> Selector:
        return ProbeHeads(heads=self.probe_heads, alpha=self.alpha)
