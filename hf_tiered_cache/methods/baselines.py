"""Baselines of ContiguousKV, IMPRESS and Krul, as their papers define them."""

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
    """Baseline without reuse: every token is computed."""

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        return (np.arange(context.columns),) * context.layers


@dataclass(frozen=True, kw_only=True)
class AttentionStore(Method):
    """AttentionStore baseline: the whole prefix is restored layer by layer (Gao et al. 2024).

    A block holds 64 tokens of one layer. While a layer computes, the KV of the next layer is prefetched.
    """

    geometry: Geometry = field(default=Geometry(64, 1))
    ahead_bytes: int = 1


@dataclass(frozen=True, kw_only=True)
class PartialRecompute(Exact):
    """Partial recomputation baseline (Cake, Pensieve): the first tokens are recomputed while the rest is loaded.

    Unlike in `Exact`, the recomputed prefix is equally long in all layers. Krul's baseline (its Section 8.1): each
    layer waits for the rest of its own KV. See `Exact` for the arguments.
    """

    geometry: Geometry = field(default=Geometry(64, 1))
    recompute: float | Literal["auto"] = field(default="auto", kw_only=False)

    flat_front = True


@dataclass(frozen=True, kw_only=True)
class H2O(BudgetMethod):
    """H2O baseline: each KV head attends to the single tokens of the prefix that its queries attend to most.

    All keys of a layer are read to select the tokens, and only the values of selected tokens (Zhang et al. 2023).

    Args:
        budget: Share of the prefix's tokens that a head attends to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: See `BudgetMethod`.
        policy: Eviction policy that it is compared under, "lru" or "lfu".
        rechoose: Whether each decoded token reselects, for which the keys stay in memory. If not, one selection serves
            a prompt and its answer, as in the comparisons of ContiguousKV and IMPRESS.
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
