"""Methods that the papers compare with: recomputation, AttentionStore, partial recomputation, H2O and MiniCache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from hf_tiered_cache.conversations.distances import AttentionDistances
from hf_tiered_cache.errors import ConfigError, unknown_name
from hf_tiered_cache.methods import BudgetMethod, Exact, IdleConversation, Krul, Method
from hf_tiered_cache.methods.krul import mergeable_layers
from hf_tiered_cache.restore.rows import PlanContext
from hf_tiered_cache.selection.selectors import (
    Selection,
    SelectionInput,
    Selector,
    head_mass,
    top_of_each,
)
from hf_tiered_cache.store.codecs import RAW
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.store.memory import to_host
from hf_tiered_cache.store.pairs import TOWARD


@dataclass(frozen=True, kw_only=True)
class Recompute(Method):
    """Baseline without reuse: every token is computed."""

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        return (np.arange(context.num_positions),) * context.layers


@dataclass(frozen=True, kw_only=True)
class AttentionStore(Method):
    """AttentionStore baseline: the whole prefix is restored layer by layer (Gao et al. 2024).

    A block holds 64 tokens of one layer. While a layer computes, the KV of the next layer is prefetched.
    """

    geometry: Geometry = Geometry(64, 1)
    ahead_bytes: int = 1

    def positions_to_compute(self, context: PlanContext) -> tuple[np.ndarray, ...]:
        return context.suffix_positions()


@dataclass(frozen=True, kw_only=True)
class PartialRecompute(Exact):
    """Partial recomputation baseline (Cake, Pensieve): the first tokens are recomputed while the rest is loaded.

    Unlike in `Exact`, the recomputed prefix is equally long in all layers. Krul's baseline (its Section 8.1): each
    layer waits for the rest of its own KV. See `Exact` for the arguments.
    """

    geometry: Geometry = Geometry(64, 1)
    recompute: float | Literal["auto"] = field(default="auto", kw_only=False)

    recompute_steepness = (0,)


@dataclass(frozen=True)
class TopTokens(Selector):
    """Selector of the tokens with the most attention, for each KV head; the query heads of a KV head are summed."""

    def choose(self, request: SelectionInput) -> Selection:
        mass = head_mass(request.query, request.keys(None), request.own_keys, request.scaling)  # [kv_heads, tokens]
        return Selection(*to_host(top_of_each(mass, request.count), mass.mean(0, keepdim=True)))


@dataclass(frozen=True, kw_only=True)
class H2O(BudgetMethod):
    """H2O baseline: each KV head attends to the single tokens of the prefix that its queries attend to most.

    All keys of a layer are read to select the tokens, and only the values of selected tokens (Zhang et al. 2023).

    Args:
        budget: Share of the prefix's tokens that a head attends to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: See `BudgetMethod`.
        policy: Eviction policy that it is compared under, "lru" or "lfu".
        reselect: Whether each decoded token reselects, for which the keys stay in memory. If not, one selection serves
            a prompt and its answer, as in the comparisons of ContiguousKV and IMPRESS.
    """

    geometry: Geometry = Geometry(64, 1, split_kv=True)
    reselect: bool = False
    policy: Literal["lru", "lfu"] = "lfu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in ("lru", "lfu"):
            raise ConfigError(unknown_name("policy", self.policy, ["lru", "lfu"]))

    def selector(self) -> Selector:
        return TopTokens()


@dataclass(frozen=True, kw_only=True)
class MiniCache(Krul):
    """MiniCache baseline: fixed pairs for all conversations, neighboring layers in the deeper half (Liu et al. 2024).

    All tokens are stored. Krul's baseline of fixed pairs (its Section 8.1).
    """

    recompute: float | Literal["auto"] = 0.0
    toward: float = TOWARD
    quality: float | None = None
    codec: str | None = RAW

    kind: ClassVar[str] = "minicache"

    def observer(self) -> AttentionDistances | None:
        return None

    def pairs(self, idle: IdleConversation, shared: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        full = mergeable_layers(idle.readers[0].shape.layout)
        num_pairs = round(self.layers_shared * len(full) / 2)
        deepest = list(zip(full[::-1][1::2], full[::-1][::2], strict=False))
        return tuple(sorted(deepest[:num_pairs]))
