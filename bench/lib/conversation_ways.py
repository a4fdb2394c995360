"""Variants of storing a conversation in less space: Krul and the peers in `conversation_answers.py`.

`Krul` has the default settings: int8, and pairs that a replay accepts. `Krul, any distance` replays pairs however much
a merge moves their KV, `Krul, by attention` those with the most similar attention. `Krul SHARE` merges pairs whose KV
moves little without a replay. `Krul, model's pairs` replays the same pairs in every conversation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from eval.baselines import MiniCache
from hf_tiered_cache.conversations.distances import LayerDistances
from hf_tiered_cache.methods import Exact, IdleConversation, Krul, Method
from hf_tiered_cache.methods.krul import mergeable_layers
from hf_tiered_cache.store.codecs import RAW
from hf_tiered_cache.store.pairs import TOWARD

NOISE = "full, rounded otherwise"
"""Full KV, computed in pieces of an odd size: nothing is lost, but kernels round differently."""
_H2O_ROWS = 128
"""Number of queries whose attention is summed at once."""

Pairs = tuple[tuple[int, int], ...]


UNCHECKED: dict[str, Any] = {"quality": None, "codec": RAW}
"""Settings of `Krul` without a replay, in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class RandomPairs(Krul):
    """Krul with as many pairs as usual, at random among all layers."""

    kind: ClassVar[str] = "random pairs"

    def pairs(self, idle: IdleConversation, shared: Pairs) -> Pairs:
        count = len(super().pairs(idle, shared))
        layers = mergeable_layers(idle.readers[0].shape.layout)
        permutation = np.random.default_rng(int(self.conversation, 16)).permutation(layers)[: 2 * count]
        return sorted_pairs(permutation.reshape(-1, 2).tolist())


@dataclass(frozen=True, kw_only=True)
class FixedPairs(Krul):
    """Krul with the same pairs in every conversation."""

    fixed: Pairs = ()

    kind: ClassVar[str] = "fixed pairs"

    def pairs(self, idle: IdleConversation, shared: Pairs) -> Pairs:
        return self.fixed


@dataclass(frozen=True, kw_only=True)
class Watching(Krul):
    """Krul that merges nothing, and records the similarity of layers by attention and by KV.

    Args:
        distances: Distances of attention, and the change of the KV by a merge, float `[layers, layers]`.
    """

    pairs_by: Literal["kv", "attention"] = "attention"
    distances: list[tuple[LayerDistances, np.ndarray]] = field(default_factory=list, compare=False, repr=False)

    kind: ClassVar[str] = "watching"

    def pairs(self, idle: IdleConversation, shared: Pairs) -> Pairs:
        assert idle.attention is not None and not idle.attention.missing and idle.replay is not None
        layout, attention = idle.readers[0].shape.layout, idle.attention
        self.distances.append((attention, self.changes(idle.replay, layout, attention.layers)))
        return ()


@dataclass(frozen=True)
class Way:
    """Variant of storing a conversation.

    Args:
        system: System of which this is a setting.
        method: Method that stores and restores it; None for H2O.
        share: Share of the tokens that H2O keeps.
        piece: Number of tokens computed at once, for full KV in memory; 0 for all.
    """

    system: str
    method: Method | None = None
    share: float = 1.0
    piece: int = 0


def sorted_pairs(pairs: Sequence[Sequence[int]]) -> Pairs:
    """Return pairs of layers in the form of a geometry."""
    return tuple(sorted((min(pair), max(pair)) for pair in pairs))


def ways(fixed: Callable[[float], Pairs] = lambda shared: ()) -> dict[str, Way]:
    """Return the variants by name.

    Args:
        fixed: Function that returns the pairs that are fixed for the model, given the share of merged layers.
    """
    variants = {
        "full": Way("full", Exact(recompute=0.0)),
        NOISE: Way("full", piece=61),
        "int8": Way("int8", Exact(recompute=0.0, codec="int8")),
        "Krul": Way("Krul, default", Krul(recompute=0.0)),
        "Krul, any distance": Way("Krul, any distance", Krul(recompute=0.0, change=1.0)),
        "Krul, by attention": Way("Krul, by attention", Krul(recompute=0.0, pairs_by="attention")),
        "Krul, model's pairs": Way("Krul, model's pairs", FixedPairs(recompute=0.0, fixed=fixed(0.5))),
        "front 0.4": Way("recomputed prefix", Krul(0.0, recompute=0.4, codec=RAW)),
        "front 0.4 int8": Way("recomputed prefix, int8", Krul(0.0, recompute=0.4)),
    }
    for front in (0.0, 0.4):
        for shared in (0.25, 0.5, 0.75):
            system = "Krul, recomputed prefix" if front else "Krul"
            variants[f"Krul {shared}" + f" front {front}" * bool(front)] = Way(
                system, Krul(shared, recompute=front, **UNCHECKED)
            )
    for shared in (0.25, 0.5, 0.75):
        variants[f"published {shared}"] = Way("Krul as published", Krul.paper(shared, recompute=0.0))
    variants["Krul 0.5 toward 0.6"] = Way("Krul, toward 0.6", Krul(0.5, recompute=0.0, toward=TOWARD, **UNCHECKED))
    variants["Krul 0.75 front 0.4 int8"] = Way("Krul, recomputed prefix, int8", Krul(0.75, recompute=0.4, quality=None))
    for shared in (0.25, 0.5):
        variants[f"MiniCache {shared}"] = Way("MiniCache", MiniCache(shared))
    for shared in (0.25, 0.5, 0.75):
        variants[f"random pairs {shared}"] = Way("random pairs", RandomPairs(shared, recompute=0.0, **UNCHECKED))
    for shared in (0.25, 0.5, 0.75):
        variants[f"fixed pairs {shared}"] = Way(
            "fixed pairs", FixedPairs(shared, recompute=0.0, fixed=fixed(shared), **UNCHECKED)
        )
    return variants | {f"H2O {share}": Way("H2O", share=share) for share in (0.75, 0.5, 0.42, 0.25)}


@torch.no_grad()
def attended(eager: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention to each token of a context per layer, float32 `[kv_heads, tokens]`; 0 for windows."""
    config, tokens = eager.config, ids.shape[1]
    masses = [torch.zeros(config.num_key_value_heads, tokens) for _ in range(config.num_hidden_layers)]
    cache = DynamicCache(config=config)
    for piece in ids.split(_H2O_ROWS, dim=1):
        weights = eager(input_ids=piece, past_key_values=cache, output_attentions=True, logits_to_keep=1).attentions
        for layer, mass, of_layer in zip(cache.layers, masses, weights, strict=True):
            if not layer.is_sliding:
                row_mass = of_layer[0].float().sum(1).unflatten(0, (len(mass), -1)).sum(1)  # [kv_heads, columns so far]
                mass[:, : row_mass.shape[1]] += row_mass
    return masses


def forgetful(context: DynamicCache, masses: list[torch.Tensor], share: float) -> DynamicCache:
    """Return a context of which H2O keeps a share: half by attention, half the last tokens.

    Layers with a sliding window keep their window: they were never trained on tokens before it.
    """
    tokens, reduced = context.get_seq_length(), copy.deepcopy(context)
    kept_tokens = round(share * tokens)
    for layer, mass in zip(reduced.layers, masses, strict=True):
        if not layer.is_sliding:
            mass = mass.clone()
            mass[:, tokens - kept_tokens // 2 :] = torch.inf
            columns = (
                mass.topk(kept_tokens, dim=1).indices.sort(dim=1).values[None, :, :, None]
            )  # [1, kv_heads, kept, 1]
            layer.keys = layer.keys.take_along_dim(columns, 2)
            layer.values = layer.values.take_along_dim(columns, 2)
    return reduced


def kv_bytes(cache: DynamicCache) -> int:
    """Return the size of the keys and values that a cache holds, in bytes."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
