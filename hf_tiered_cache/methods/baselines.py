"""The baselines of ContiguousKV, IMPRESS and Krul, as their papers define them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..errors import ConfigError
from ..geometry import Geometry
from ..restore.plan import PlanContext
from ..restore.selective import Prefetched
from ..select.chunks import budgeted_tokens
from ..select.selector import Selector
from ..select.top_tokens import TopTokens
from .base import Method
from .budget import BudgetMethod
from .exact import Exact


@dataclass(frozen=True, kw_only=True)
class Recompute(Method):
    """No reuse: everything is computed."""

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        return (np.arange(context.columns),) * context.layers


@dataclass(frozen=True, kw_only=True)
class AttentionStore(Method):
    """All KV of the prefix, a layer at a time, the next layer's while this one computes (Gao et al. 2024)."""

    geometry: Geometry = field(default=Geometry(64, 1))
    ahead_bytes: int = 1


@dataclass(frozen=True, kw_only=True)
class PartialRecompute(Exact):
    """All KV of the prefix, its front computed while the rest is loaded: the same front in all layers (Cake, Pensieve).

    Krul's baseline of partial recomputation (its Section 8.1): each layer waits for the rest of its own KV.
    """

    geometry: Geometry = field(default=Geometry(64, 1))
    recompute: float | Literal["auto"] = field(default="auto", kw_only=False)

    flat_front = True


@dataclass(frozen=True, kw_only=True)
class H2O(BudgetMethod):
    """All keys of a layer are read, and the values of the tokens that its heads pay most attention to.

    Args:
        budget: share of the prefix's tokens that a head attends to, in (0, 1].
        quality: see `BudgetMethod`.
        policy: the eviction policy it is compared under, "lru" or "lfu".
        rechoose: whether each decoded token chooses again; the keys stay in memory for that. If not, as in the
            comparisons of ContiguousKV and IMPRESS, there is one choice for a prompt and its answer.
    """

    geometry: Geometry = field(default=Geometry(64, 1, split_kv=True))
    rechoose: bool = False
    policy: Literal["lru", "lfu"] = "lfu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in ("lru", "lfu"):
            raise ConfigError(f'policy is "lru" or "lfu", not {self.policy!r}')

    def token_budget(self, prefix_tokens: int) -> int:
        return budgeted_tokens(self.budget, prefix_tokens, 1)

    @property
    def prefetches(self) -> tuple[Prefetched, ...]:
        return ("keys",)

    def selector(self) -> Selector:
        return TopTokens()
