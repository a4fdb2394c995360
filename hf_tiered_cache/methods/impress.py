"""IMPRESS: importance told by a few heads, single tokens restored from large chunks (its paper, Section 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..geometry import Geometry
from ..restore.selective import Prefetched
from ..select.chunks import budgeted_tokens
from ..select.probe_heads import ProbeHeads
from ..select.selector import Selector
from .budget import BudgetMethod


@dataclass(frozen=True, kw_only=True)
class Impress(BudgetMethod):
    """Each layer attends to the tokens that a few probe heads pay most attention to, if these heads agree.

    Args:
        budget: share of the prefix's tokens that a head attends to, in (0, 1]. At 1 the output is the exact method's.
        quality: see `BudgetMethod`.
        chunk_tokens: consecutive tokens of a block of keys or of values; all of it is read for one token.
        probe_heads: kv heads that are asked, whose keys lie apart from those of other heads (Section 4.1), so that no
            key is read twice: the others' are read as they are chosen, or all where the probes disagree. With grouped
            queries each speaks for its group; of four kv heads or fewer, two are enough.
        alpha: how alike the probes' choices must be: see `ProbeHeads`.
        reorder: whether the tokens of a segment are laid out by importance, layer by layer, once prompts have shown it
            (Section 4.4.1), so that what is chosen lies in few blocks. The exact method reads such segments as well.
    """

    geometry: Geometry = field(init=False, default=Geometry())
    chunk_tokens: int = 64
    probe_heads: int = 3
    alpha: float = 0.6
    reorder: bool = True

    policy = "importance"

    def __post_init__(self) -> None:
        cut = Geometry(self.chunk_tokens, 1, self.probe_heads, split_kv=True)
        object.__setattr__(self, "geometry", cut)
        super().__post_init__()

    def token_budget(self, prefix_tokens: int) -> int:
        return budgeted_tokens(self.budget, prefix_tokens, 1)

    @property
    def prefetches(self) -> tuple[Prefetched, ...]:
        return ("keys",)

    def selector(self) -> Selector:
        return ProbeHeads(heads=self.probe_heads, alpha=self.alpha)
