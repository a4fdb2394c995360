"""Selectors by the attention that queries pay to each restored token, for a prompt and while decoding.

`TopChunks` is ContiguousKV's (Section 4.2): whole chunks, by all heads or by each head. `ProbeHeads` is IMPRESS's
(Section 4.1): single tokens by a few probe heads, and for all heads if the probe heads agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import cast

import numpy as np
import torch

from ..store.memory import to_host
from .decode import Choice, DecodeSelector
from .decode_index import DecodeIndex, Int8KeysIndex
from .held import HeldChunks, Window
from .indexes import RowIndexes
from .selector import Selection, SelectionInput, Selector, check_selection, top_chunks

_LARGEST = 1 << 26
"""Maximum number of attention weights held at a time: 256 MiB of float32."""


def head_mass(
    query: torch.Tensor, keys: torch.Tensor, own_keys: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Return the share of attention that each restored token gets from the queries of each KV head.

    The softmax runs over the restored tokens and, causally, over the computed ones (ContiguousKV, Section 4.2: sum over
    all query tokens and query heads). The sum is divided by the number of queries and query heads, so that long prompts
    weigh no more than short ones in stored statistics.

    Args:
        query: `[heads, queries, dim]`, rotated: queries of the last tokens, in order.
        keys: `[kv_heads, tokens, dim]`, rotated: keys of the restored tokens.
        own_keys: `[kv_heads, own, dim]`, rotated: keys of the computed tokens; the last ones belong to the queries.
        scaling: Scale of the logits; None for dim ** -0.5.

    Returns:
        float32 `[kv_heads, tokens]`, non-negative; the sum of a row is at most 1.
    """
    heads, queries, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    scaling = dim**-0.5 if scaling is None else scaling
    grouped = query.unflatten(0, (kv_heads, heads // kv_heads))  # [kv_heads, group, queries, dim]
    own_logits = _logits(grouped, own_keys, scaling).unflatten(1, grouped.shape[1:3])  # [kv_heads, group, queries, own]
    if queries > 1:  # a single query sees all keys
        future = torch.ones(queries, own_logits.shape[-1], dtype=torch.bool, device=query.device)
        own_logits = own_logits.masked_fill_(future.triu(1 + own_logits.shape[-1] - queries), -torch.inf)
    own_total = own_logits.logsumexp(-1, keepdim=True)  # [kv_heads, group, queries, 1]
    mass = torch.zeros(kv_heads, tokens, dtype=torch.float32, device=query.device)
    rows = max(1, _LARGEST // max(1, heads * tokens))
    for begin in range(0, queries, rows):
        block = slice(begin, begin + rows)
        logits = _logits(grouped[:, :, block], keys, scaling)  # [kv_heads, group * rows, tokens]
        block_total = own_total[:, :, block].flatten(1, 2)  # [kv_heads, group * rows, 1]
        max_logits = torch.maximum(logits.amax(-1, keepdim=True), block_total)
        weights = logits.sub_(max_logits).exp_()
        total = weights.sum(-1, keepdim=True) + (block_total - max_logits).exp_()
        mass += (total.reciprocal_().transpose(1, 2) @ weights).squeeze(1)  # each row's share, summed over rows
    return mass * (kv_heads / (heads * queries))


def _logits(grouped: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return float32 `[kv_heads, group * n, tokens]`: one product per KV head, without copying keys for its group."""
    return (grouped.flatten(1, 2) @ keys.transpose(-1, -2)).float().mul_(scaling)


def top_of_each(mass: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest columns of each row of `[rows, tokens]`, first on ties: int64 ascending."""
    return mass.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


@dataclass(frozen=True)
class ProbeHeads(Selector):
    """Selector of single tokens: by the first KV heads if their selections are similar enough, else by each head.

    Args:
        heads: Number of probe KV heads, each with the query heads it serves.
        alpha: Exponent of the required similarity: the mean Jaccard index of two probes' selections must be at least
            that of two random sets of their size, raised to this exponent.
    """

    heads: int = 3
    alpha: float = 0.6

    @property
    def probe_heads(self) -> int:
        return self.heads

    def choose(self, request: SelectionInput) -> Selection:
        probes = request.keys(self.heads)
        group_size = request.query.shape[0] // request.own_keys.shape[0]
        own_keys = request.own_keys[: len(probes)]
        query = request.query[: len(probes) * group_size]
        mass = head_mass(query, probes, own_keys, request.scaling)  # [probes, tokens]
        sets, total_mass = to_host(top_of_each(mass, request.count), mass.sum(0))
        if self.agree(sets, request.chunks.tokens):
            votes = np.zeros(request.chunks.tokens, np.int64)
            np.add.at(votes, sets.ravel(), 1)
            best = np.lexsort((-total_mass, -votes))[: request.count]  # by votes, ties by total mass
            return Selection(np.sort(best)[None], total_mass[None] / len(probes))
        mass = head_mass(request.query, request.keys(None), request.own_keys, request.scaling)
        return Selection(*to_host(top_of_each(mass, request.count), mass.mean(0, keepdim=True)))

    def agree(self, sets: np.ndarray, tokens: int) -> bool:
        """Return whether the probes' selections among `tokens`, int64 `[probes, count]`, are similar enough."""
        return mean_jaccard(sets) >= jaccard_threshold(sets.shape[1], tokens, self.alpha)


def mean_jaccard(sets: np.ndarray) -> float:
    """Return the mean Jaccard index of all pairs of rows of `[rows, count]`, sets of numbers; 1 for a single row."""
    similarities = []
    for a, b in combinations(sets, 2):
        num_common = len(np.intersect1d(a, b, assume_unique=True))
        similarities.append(num_common / (len(a) + len(b) - num_common))
    return float(np.mean(similarities)) if similarities else 1.0


def jaccard_threshold(count: int, tokens: int, alpha: float) -> float:
    """Return (r / (2 - r)) ** alpha, r = count / tokens: the Jaccard index of two random sets, raised to alpha."""
    ratio = count / tokens
    return (ratio / (2 - ratio)) ** alpha


@dataclass(frozen=True)
class TopChunks(Selector):
    """Selector of the chunks with the most attention.

    Args:
        resident: Whether to use an index of the int8 keys of all heads, which stays in memory.
        queries: Number of trailing queries that select; 0 for all.
        gain: Share of a decoded token's attention by which a new selection must exceed the last one to replace it.
        per_head: Whether each KV head selects for itself; if not, one selection serves all.
    """

    resident: bool = False
    queries: int = 0
    gain: float = 0.0
    per_head: bool = False

    @property
    def index(self) -> tuple[type[DecodeIndex], int] | None:
        return (Int8KeysIndex, 1) if self.resident else None

    def choose(self, request: SelectionInput) -> Selection:
        keys = _all_keys(request.indexes(), request.query.dtype) if self.resident else request.keys(None)
        query = request.query[:, -self.queries :]
        mass = head_mass(query, keys, request.own_keys, request.scaling)  # [kv_heads, tokens]
        (token_mass,) = to_host(mass if self.per_head else mass.mean(0, keepdim=True))
        return Selection(top_chunks(token_mass, request.chunks, request.count), token_mass)

    def reselect(self, request: SelectionInput, last_tokens: np.ndarray) -> np.ndarray:
        choice = self.choose(request)
        if not self.gain:
            return choice.tokens
        new_mass, last_mass = (
            np.take_along_axis(choice.mass, tokens, 1).sum(1) for tokens in (choice.tokens, last_tokens)
        )
        is_kept = new_mass - last_mass < self.gain  # bool [sets]
        return np.where(is_kept[:, None], np.sort(last_tokens, axis=1), choice.tokens)


@dataclass(frozen=True, eq=False)
class TokenDecodeSelector(DecodeSelector):
    """Decode selector of single tokens by their attention, for all layers of a period.

    Args:
        selector: Selects one set of tokens for all heads, or one for each.
        keys: For each period and prefix, the rotated keys of the restored tokens at the period's first layer,
            `[kv_heads, tokens, dim]`, for as many heads as the selector needs. They stay in memory. Empty if it uses
            an index.
        indexes: Indexes of these keys, for a selector that uses them.
    """

    selector: Selector
    keys: Mapping[tuple[int, int], torch.Tensor]
    indexes: RowIndexes | None

    may_stay = True

    def row(self, layer: int, prefix: int, tokens: np.ndarray, first: int) -> HeldChunks | None:
        if tokens.shape[1] == self.prefixes[prefix].tokens:
            return None
        return HeldChunks(prefix, Window.filled(tokens, self.prefixes[prefix].tokens), first, 1)

    def select(
        self, layer: int, rows: Mapping[int, HeldChunks], query: torch.Tensor, keys: torch.Tensor, scaling: float | None
    ) -> dict[int, Choice]:
        choices: dict[int, Choice] = {}
        for row, state in rows.items():
            request = SelectionInput(
                query[row],
                keys[row, :, state.first + state.window.num_columns :],
                partial(self._keys_of, layer, state.prefix),
                scaling,
                self.prefixes[state.prefix].chunks(layer, self.selector.per_head),
                state.window.num_columns,
                tuple if self.indexes is None else partial(self.indexes.held, layer, state.prefix),
            )
            tokens = self.selector.reselect(request, state.window.columns)  # a chunk is a token
            check_selection(self.selector, tokens, request)
            choices[row] = tokens, None
        return choices

    def _keys_of(self, layer: int, prefix: int, heads: int | None) -> torch.Tensor:
        return self.keys[self.number_of[layer], prefix]


def _all_keys(indexes: Sequence[DecodeIndex], dtype: torch.dtype) -> torch.Tensor:
    """Return the keys of all indexes, `[kv_heads, tokens, dim]`."""
    index_keys = [cast(Int8KeysIndex, index).keys_as(dtype) for index in indexes]
    return index_keys[0] if len(index_keys) == 1 else torch.cat(index_keys, 1)
