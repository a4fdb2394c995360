"""Selector interface, and selectors by the attention that queries pay to each restored token.

A selector chooses the restored tokens that the queries of a layer attend to, for a prompt and while decoding. It
accesses no files. `TopChunks` is ContiguousKV's (Section 4.2): whole chunks, by all heads or by each head.
`ProbeHeads` is IMPRESS's (Section 4.1): single tokens by a few probe heads, and for all heads if these agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch

from ..errors import ConfigError, with_type
from ..plugins import ignored_member
from ..store.memory import to_host
from .decode_index import DecodeIndex, Int8KeysIndex

_LARGEST = 1 << 26  # maximum number of attention weights held at a time: 256 MiB of float32


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """Chunks that hold a row's restored tokens: one set for all KV heads, or one per KV head.

    Args:
        members: Tokens of each chunk in the order of their slots, int64 `[sets, chunks, chunk_tokens]`; -1 for a slot
            without a restored token. A chunk may have none.
        tokens: Number of restored tokens of the row.
    """

    members: np.ndarray
    tokens: int

    @classmethod
    def by_slot(cls, slots: np.ndarray, chunk_tokens: int) -> ChunkMap:
        """Create the map of chunks of `chunk_tokens` consecutive slots, some of which may hold no token.

        Tokens have slots, int64 `[sets, tokens]`, distinct within a set.
        """
        sets, tokens = slots.shape
        chunks = int(slots.max()) // chunk_tokens + 1
        members = np.full((sets, chunks * chunk_tokens), -1)
        members[np.arange(sets)[:, None], slots] = np.arange(tokens)
        return cls(members.reshape(sets, chunks, chunk_tokens), tokens)

    @cached_property
    def chunk(self) -> np.ndarray:
        """Number of the chunk that holds each token, int64 `[sets, tokens]`."""
        numbers = np.empty((len(self.members), self.tokens), np.int64)
        row, chunk, place = np.nonzero(self.members >= 0)
        numbers[row, self.members[row, chunk, place]] = chunk
        return numbers

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of tokens per chunk, int64 `[sets, chunks]`."""
        return np.count_nonzero(self.members >= 0, axis=2)

    def sums(self, mass: np.ndarray) -> np.ndarray:
        """Return the mass of each chunk, float64 `[rows, chunks]`, given that of each token, float `[rows, tokens]`.

        There is one row per set, or several rows if there is a single set.
        """
        padded = np.concatenate([mass, np.zeros((len(mass), 1), mass.dtype)], axis=1)
        # a row of `padded` begins after a zero, or at 0 with a zero at the end: -1 is the mass of no token
        begin = np.arange(len(mass))[:, None, None] * (self.tokens + 1)
        by_slot = padded.ravel().take(self.members + begin)  # [rows, chunks, chunk_tokens]
        sums: np.ndarray = by_slot.astype(np.float64) @ np.ones(by_slot.shape[2])
        return sums


def budgeted_tokens(budget: float, tokens: int, chunk_tokens: int) -> int:
    """Return the number of tokens that a budget buys: max(1, floor(budget · chunks)) whole chunks, or all."""
    if budget >= 1:
        return tokens
    chunks = -(-tokens // chunk_tokens)
    # 1e-9 corrects floating-point error: 0.29 * 100 is slightly less than 29
    return min(tokens, max(1, int(budget * chunks + 1e-9)) * chunk_tokens)


def top_chunks(mass: np.ndarray, chunks: ChunkMap, count: int) -> np.ndarray:
    """Select the `count` tokens of the chunks with the most attention, separately for each row of `mass`.

    Chunks are ranked by the mean mass of their tokens, so a shorter chunk has no disadvantage. The first chunk wins
    ties. The last selected chunk is truncated, so that all heads have the same number of tokens.

    Args:
        mass: float32 `[rows, tokens]`, non-negative, see `ChunkMap.sums`.
        chunks: Chunks that hold the tokens.
        count: Number of tokens to select, at most the number of tokens.

    Returns:
        Selected tokens, int64 `[rows, count]`, ascending.
    """
    sums = chunks.sums(mass)
    counts = np.broadcast_to(chunks.counts, sums.shape)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -1)
    best = np.argsort(-means, axis=1, kind="stable")  # [rows, chunks]
    sizes = np.take_along_axis(counts, best, 1)
    taken_counts = np.clip(count - (sizes.cumsum(axis=1) - sizes), 0, sizes)  # number of tokens taken from each chunk
    num_best = int(np.count_nonzero(taken_counts, axis=1).max())
    sets = np.arange(len(mass))[:, None] % len(chunks.members)
    members = chunks.members[sets, best[:, :num_best]]  # [rows, num_best, chunk_tokens]
    is_token = members >= 0
    is_taken = is_token & (is_token.cumsum(axis=2) <= taken_counts[:, :num_best, None])
    return np.sort(members[is_taken].reshape(len(mass), count), axis=1)


@dataclass(frozen=True)
class SelectionInput:
    """Selection request for one row and one layer.

    Args:
        query: Queries of the last computed tokens, `[heads, queries, dim]`, rotated.
        own_keys: Keys of all computed tokens, `[kv_heads, own, dim]`, rotated; the last ones belong to the queries.
        keys: Function that returns the rotated keys of the restored tokens, `[kv_heads, tokens, dim]`: of the first n
            KV heads, or of all heads for None.
        scaling: Scale of the logits; None for dim ** -0.5.
        chunks: Chunks that hold the restored tokens.
        count: Number of tokens to select.
        indexes: Function that returns the decode indexes of these keys, for selectors that use them.
        layer: Index of the layer: of the first one of those that share the selection.
    """

    query: torch.Tensor
    own_keys: torch.Tensor
    keys: Callable[[int | None], torch.Tensor]
    scaling: float | None
    chunks: ChunkMap
    count: int
    indexes: Callable[[], Sequence[DecodeIndex]] = tuple
    layer: int = 0


@dataclass(frozen=True)
class Selection:
    """Result of a selector.

    Args:
        tokens: Selected tokens, int64 `[sets, count]`, distinct and ascending in each set: one set for all KV heads, or
            one per KV head.
        mass: Attention of the queries to each restored token, as far as known, float `[sets, tokens]`: one row for all
            KV heads, or one per KV head. Both are numpy arrays.
    """

    tokens: np.ndarray
    mass: np.ndarray


def check_selector(selector: object, method: str) -> None:
    """Raise ConfigError if what a method returned as its selector is none, or one of its members is wrong."""
    if not isinstance(selector, Selector):
        raise ConfigError(f"{method}.selector returned {with_type(selector)}; it must return an instance of Selector")
    name = type(selector).__name__
    if fault := ignored_member(type(selector)):
        raise ConfigError(f"{name} cannot be used as a selector: {fault}")
    if not isinstance(selector.per_head, bool):  # "no" would count as True
        raise ConfigError(f"{name}.per_head must be True or False, not {with_type(selector.per_head)}")
    for member, least in (("period", 1), ("solo_layers", 0), ("probe_heads", 0)):
        number = getattr(selector, member)
        is_all = number is None and member == "probe_heads"
        if not is_all and not (isinstance(number, Integral) and int(number) >= least):
            raise ConfigError(f"{name}.{member} must be an int of at least {least}, not {with_type(number)}")


def check_mass(selector: object, choice: Selection, request: SelectionInput, method: str) -> None:
    """Check the attention that a selector returned for a prompt: one finite number for each token.

    Raises ConfigError if the result is not a `Selection`, or its mass has another form, NaN or infinity.
    """
    name = type(selector).__name__
    if not isinstance(choice, Selection):
        raise ConfigError(f"{name}.choose returned {type(choice).__name__}; it must be a Selection")
    _check_array(f"{name} returned mass", choice.mass, np.floating, request, request.chunks.tokens)
    if not np.isfinite(choice.mass).all():
        numbers = "NaN" if np.isnan(choice.mass).any() else "infinity"
        raise ConfigError(
            f"{name} of the method {method} returned mass with {numbers}, so it cannot select by it; check whether "
            "the queries and the keys that it gets are finite"
        )


def check_selection(selector: object, tokens: np.ndarray, request: SelectionInput) -> None:
    """Check the tokens that a selector returned, so that a faulty selector cannot change what attention sees silently.

    Raises ConfigError if they are too many, too few, not ascending, duplicate, or not restored tokens.
    """
    name = type(selector).__name__
    _check_array(f"{name} selected", tokens, np.int64, request, request.count)
    if tokens[:, 0].min() < 0 or tokens[:, -1].max() >= request.chunks.tokens or (np.diff(tokens, axis=1) <= 0).any():
        step = np.diff(tokens, axis=1).min(initial=1)
        form = "ascending" if step < 0 else f"from 0 to {request.chunks.tokens - 1}" if step else "distinct"
        raise ConfigError(f"{name} selected tokens that are not {form}")


def _check_array(returned: str, array: Any, dtype: type[np.generic], request: SelectionInput, count: int) -> None:
    """Raise ConfigError if a result is not a numpy array of a dtype, `[sets, count]`."""
    is_array, shapes = isinstance(array, np.ndarray), [(1, count), (request.own_keys.shape[0], count)]
    if not is_array or array.shape not in shapes or not np.issubdtype(array.dtype, dtype):
        is_tensor = hasattr(array, "dtype") and hasattr(array, "shape")  # of numpy or PyTorch
        form = f"{array.dtype} of shape {list(array.shape)}" if is_tensor else with_type(array)
        kind = f"{'int64' if dtype is np.int64 else 'float'} [sets, {count}]"
        raise ConfigError(f"{returned} {form}; a numpy array, {kind} with 1 or {shapes[1][0]} sets, is expected")


@dataclass(frozen=True)
class Selector(ABC):
    """Base class of selectors. A selection is made once per period of layers.

    Args:
        period: Number of consecutive full-attention layers that share a selection, made at the first of them.
        solo_layers: Number of leading full-attention layers that each select for themselves, before the periods begin.
    """

    period: int = 1
    solo_layers: int = 0

    @property
    def per_head(self) -> bool:
        """True if each KV head selects among the chunks of its own blocks. If not, all use the first head's chunks."""
        return False

    @property
    def index(self) -> tuple[type[DecodeIndex], int] | None:
        """Type of the decode index that the selector uses, and tokens per chunk; None to use the stored keys."""
        return None

    @property
    def probe_heads(self) -> int | None:
        """Number of KV heads whose keys are read first, and prefetched; None for all. A model may have fewer."""
        return None

    @abstractmethod
    def choose(self, request: SelectionInput) -> Selection:
        """Select `request.count` tokens to attend to."""

    def reselect(self, request: SelectionInput, last_tokens: np.ndarray) -> np.ndarray:
        """Reselect for a decoded token, as many tokens as in the last selection.

        `last_tokens` is that selection, int64 `[sets, tokens]`, in any order. Return the tokens of the new one, int64
        `[sets, tokens]`, ascending in each set.
        """
        return self.choose(request).tokens


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
        if self.resident:
            indexes = (cast(Int8KeysIndex, index) for index in request.indexes())
            parts = [index.keys_as(request.query.dtype) for index in indexes]
            keys = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        else:
            keys = request.keys(None)
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
