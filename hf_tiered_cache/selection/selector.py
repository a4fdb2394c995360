"""Selector interface: chooses the restored tokens that the queries of a layer attend to. Selectors access no files.

`ChunkMap` and `top_chunks` select whole chunks within a token budget, by the attention that their tokens get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..errors import ConfigError
from .decode_index import DecodeIndex


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """Chunks that hold a row's restored tokens: one set for all KV heads, or one per KV head.

    Args:
        chunk: Chunk number of each token, int64 `[sets, tokens]`.
        place: Index of each token among the row's tokens in its chunk, in the order of slots, int64 `[sets, tokens]`.
    """

    chunk: np.ndarray
    place: np.ndarray

    @classmethod
    def by_slot(cls, slots: np.ndarray, chunk_tokens: int) -> ChunkMap:
        """Create the map of chunks that consist of `chunk_tokens` consecutive slots, some of which may hold no token.

        Args:
            slots: Slot of each token, int64 `[sets, tokens]`, distinct within a set.
            chunk_tokens: Slots per chunk.
        """
        order = np.argsort(slots, axis=1, kind="stable")  # [sets, tokens]: tokens by slot
        number = np.take_along_axis(slots, order, 1) // chunk_tokens
        begins = np.diff(number, axis=1, prepend=-1) > 0
        first = np.maximum.accumulate(np.where(begins, np.arange(slots.shape[1]), 0), axis=1)
        chunk, place = np.empty_like(slots), np.empty_like(slots)
        np.put_along_axis(chunk, order, np.cumsum(begins, axis=1) - 1, 1)
        np.put_along_axis(place, order, np.arange(slots.shape[1]) - first, 1)
        return cls(chunk, place)

    @property
    def tokens(self) -> int:
        """Number of restored tokens of the row."""
        return self.chunk.shape[1]

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of tokens per chunk, int64 `[sets, chunks]`; 0 for trailing chunks of sets with fewer chunks."""
        return self.sums(np.ones(self.chunk.shape)).astype(np.int64)

    def sums(self, mass: np.ndarray) -> np.ndarray:
        """Return the mass of each chunk, float64 `[rows, chunks]`, given that of each token, float `[rows, tokens]`.

        There is one row per set, or several rows if there is a single set.
        """
        rows, chunks = len(mass), self._chunks
        bins = self.chunk + chunks * np.arange(rows)[:, None]  # [rows, tokens]
        return np.bincount(bins.ravel(), mass.ravel(), rows * chunks).reshape(rows, chunks)

    @cached_property
    def _chunks(self) -> int:
        return int(self.chunk.max()) + 1


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
    order = np.argsort(-means, axis=1, kind="stable")  # [rows, chunks], best first
    sizes = np.take_along_axis(counts, order, 1)
    offsets = sizes.cumsum(axis=1) - sizes
    taken_counts = np.empty_like(sizes)  # number of tokens taken from each chunk
    np.put_along_axis(taken_counts, order, np.clip(count - offsets, 0, sizes), 1)
    chunk, place = (np.broadcast_to(indices, mass.shape) for indices in (chunks.chunk, chunks.place))
    return np.nonzero(place < np.take_along_axis(taken_counts, chunk, 1))[1].reshape(len(mass), count)


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
    """

    query: torch.Tensor
    own_keys: torch.Tensor
    keys: Callable[[int | None], torch.Tensor]
    scaling: float | None
    chunks: ChunkMap
    count: int
    indexes: Callable[[], Sequence[DecodeIndex]] = tuple


@dataclass(frozen=True)
class Selection:
    """Result of a selector.

    Args:
        tokens: Selected tokens, int64 `[sets, count]`, ascending in each set: one set for all KV heads, or one per KV
            head.
        mass: Attention of the queries to each restored token, as far as known, float `[rows, tokens]`: one row for all
            KV heads, or one per KV head.
    """

    tokens: np.ndarray
    mass: np.ndarray


def check_mass(selector: object, choice: Selection, request: SelectionInput, method: str) -> None:
    """Check the attention that a selector returned for a prompt: one finite number for each token.

    The result is on the host, so that the check never waits for a GPU.

    Raises:
        ConfigError: The result is not a `Selection`, or its mass has another shape, NaN or infinity.
    """
    name = type(selector).__name__
    if not isinstance(choice, Selection):
        raise ConfigError(f"{name}.choose returned {type(choice).__name__}; it must be a Selection")
    shape, tokens = np.shape(choice.mass), request.chunks.tokens
    if len(shape) != 2 or shape[1] != tokens:
        raise ConfigError(f"{name} returned mass of shape {list(shape)}; [rows, {tokens}] is expected")
    if not np.isfinite(choice.mass).all():  # 7 µs for 32,768 tokens
        numbers = "NaN" if np.isnan(choice.mass).any() else "infinity"
        raise ConfigError(
            f"{name} of the method {method} returned mass with {numbers}, so it cannot select by it; check whether "
            "the queries and the keys that it gets are finite"
        )


def check_selection(selector: object, tokens: np.ndarray, request: SelectionInput) -> None:
    """Check the tokens that a selector returned, so that a faulty selector cannot change what attention sees silently.

    Raises:
        ConfigError: The tokens are too many, too few, not ascending, duplicate, or not restored tokens.
    """
    name, sets = type(selector).__name__, (1, request.own_keys.shape[0])
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or tokens.dtype != np.int64 or len(tokens) not in sets:
        is_array = isinstance(tokens, np.ndarray)
        form = f"{tokens.dtype} of shape {list(tokens.shape)}" if is_array else f"a {type(tokens).__name__}"
        raise ConfigError(
            f"{name} selected {form}, but a numpy array, int64 [sets, tokens], is expected, "
            f"with {sets[0]} or {sets[1]} sets"
        )
    if tokens.shape[1] != request.count:
        raise ConfigError(f"{name} selected {tokens.shape[1]} tokens, but {request.count} were requested")
    if tokens[:, 0].min() < 0 or tokens[:, -1].max() >= request.chunks.tokens or (np.diff(tokens, axis=1) <= 0).any():
        raise ConfigError(
            f"{name} selected tokens that are not distinct, ascending and from 0 to {request.chunks.tokens - 1}"
        )


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
        """Number of KV heads whose keys are read first, and prefetched; None for all."""
        return None

    @abstractmethod
    def choose(self, request: SelectionInput) -> Selection:
        """Select `request.count` tokens to attend to."""

    def reselect(self, request: SelectionInput, last_tokens: np.ndarray) -> np.ndarray:
        """Reselect for a decoded token, as many tokens as in the last selection.

        Args:
            request: Selection request.
            last_tokens: Tokens of the last selection, int64 `[sets, tokens]`, in any order.

        Returns:
            Tokens of the new selection, int64 `[sets, tokens]`, ascending in each set.
        """
        return self.choose(request).tokens
