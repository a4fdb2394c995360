"""Chunks that a layer holds of a row while decoding: in place, set aside in device memory, and offloaded.

The *window* (KVDRIVE, Section 5.1) has the chunks kept in device memory between decoding steps. An entry is one chunk
of one KV head. Each head attends to B chunks per step. These occupy its B columns. The rest of its capacity of w·B
entries are aside slots for chunks of earlier steps. A step moves entries between columns and aside slots, and fetches
chunks that are in neither. The window handles no tensors: it plans moves, and the owner of the memory executes them.
The paper defines lookahead eviction: entries with the lowest scores of the current step are evicted first. Ours are an
order for entries without a score, columns that keep their place, and a plan without effect until `commit`.

A layer also holds the KV that it computes. When it holds `INDEXED_TOKENS` tokens more than the recent ones that are
always attended to, the oldest are *offloaded*: they move to host memory, are indexed, and are selected like restored
ones (KVDRIVE: the index grows while decoding). They are not stored, because KV computed after a selection is not exact.
Their memory belongs to the cache and is not part of the store's budgets.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ..errors import ConfigError, unknown_name
from ..store.memory import to_device
from .decode_index import DecodeIndex

INDEXED_TOKENS = 1024
"""Number of tokens that are offloaded together and share one index."""

WINDOW_POLICIES = ("lookahead", "lru")
EMPTY = -1  # content of a column or aside slot without a chunk

# An entry is stored as one number that sorts by head, then standing (the lowest is evicted first), then chunk.
_CHUNK_BITS, _STANDING_BITS, _HEAD_BITS = 24, 28, 11
_CHUNK = (1 << _CHUNK_BITS) - 1
_HEAD_SHIFT = _CHUNK_BITS + _STANDING_BITS
_BEST = (1 << _STANDING_BITS) - 1  # standing of the best candidate; step numbers, from 1, are far below


class Transfers(NamedTuple):
    """Entries that move between a column and an aside slot; int64 arrays of one length, ordered by head."""

    heads: np.ndarray
    chunks: np.ndarray
    columns: np.ndarray
    """Column numbers within the head, below B."""
    slots: np.ndarray
    """Aside slots, numbered head by head: see `Window.num_slots`."""


class Fetches(NamedTuple):
    """Entries that are fetched into columns; int64 arrays of one length, ordered by head."""

    heads: np.ndarray
    chunks: np.ndarray
    columns: np.ndarray


class Evictions(NamedTuple):
    """Entries that are evicted; int64 arrays of one length, ordered by head."""

    heads: np.ndarray
    chunks: np.ndarray


class Moves(NamedTuple):
    """Moves of one step. They are simultaneous: read the source of a move before it is overwritten.

    With memory `columns[head, column]` and `aside[slot]`: read `out = columns[set_aside]`, write `columns[brought] =
    aside[brought]`, then `aside[set_aside] = out`, then `columns[fetched]`. Fetches that may fail must precede these.
    """

    step: int
    """Step of the window that the moves are planned for."""
    brought: Transfers
    """Chosen entries that move from an aside slot to a column."""
    set_aside: Transfers
    """Kept entries, no longer chosen, that move from a column to an aside slot.

    The slot may be the source of an entry in `brought`."""
    fetched: Fetches
    evicted: Evictions
    """Entries without a move: their places are overwritten or left unused."""


class Window:
    """Entries of one layer and row in device memory, for each KV head.

    Args:
        num_columns: B, the number of chunks that each head attends to per step.
        num_heads: Number of KV heads.
        capacity: Entries of each head, columns included: at least B, or 0. With 0 a head has its columns but keeps
            no entry between steps, and fetches all chunks at each step (×0 in the paper's Figure 3).
        num_chunks: Upper bound of chunk numbers, exclusive.
        policy: Eviction policy for a full head; chosen entries are never evicted. "lookahead": evict entries outside
            the pool first, least recently chosen first, then those with the lowest rank in the pool. "lru": evict the
            least recently chosen entry. Ties: the lowest chunk first.

    Raises:
        ConfigError: The policy is unknown, or the sizes do not fit.
    """

    def __init__(
        self, num_columns: int, num_heads: int, capacity: int, num_chunks: int, policy: str = "lookahead"
    ) -> None:
        if policy not in WINDOW_POLICIES:
            raise ConfigError(unknown_name("window policy", policy, WINDOW_POLICIES))
        if num_columns < 1 or 0 < capacity < num_columns or capacity < 0:
            raise ConfigError(f"a window of {num_columns} positions requires a capacity of at least as many, or of 0")
        if num_heads >> _HEAD_BITS:
            raise ConfigError(f"a window has at most {(1 << _HEAD_BITS) - 1} heads, not {num_heads}")
        self.policy = policy
        self.num_columns, self.num_heads, self.num_chunks = num_columns, num_heads, 0
        self._keeps = capacity > 0
        self._room = max(capacity - num_columns, 0)  # aside slots of each head
        self.num_slots = num_heads * self._room
        """Number of aside slots of all heads together, which are numbered head by head."""
        self._heads = np.arange(num_heads)[:, None]  # int64 [heads, 1]
        self._first_entries = np.arange(num_heads + 1) << _HEAD_SHIFT  # int64 [heads + 1], lower bounds by head
        self._step = 1
        self._filled = False
        # Entries by place: the columns of all heads, then all aside slots, then one place for chunks not in the window.
        # The standing is the step that chose an entry last; in columns it is left out.
        self._all_columns = num_heads * num_columns
        self._absent_place = self._all_columns + self.num_slots
        self._entries = np.full(self._absent_place + 1, EMPTY, np.int64)
        self._place = np.empty(0, np.int32)  # place of each chunk, flattened [heads, stride]
        self._stride = 0
        self.grow(num_chunks)

    @classmethod
    def filled(cls, chunks: np.ndarray, num_chunks: int) -> Window:
        """Return a window without aside slots whose columns hold `chunks`, int64 `[heads, B]`."""
        window = cls(chunks.shape[1], len(chunks), chunks.shape[1], num_chunks)
        window.commit(window.plan(chunks))
        return window

    @property
    def columns(self) -> np.ndarray:
        """Chunk in each column, int64 `[heads, B]`; EMPTY before the first step."""
        return self._chunks()[: self._all_columns].reshape(self.num_heads, self.num_columns)

    @property
    def aside(self) -> np.ndarray:
        """Chunk in each aside slot, or EMPTY, int64 `[num_slots]`."""
        return self._chunks()[self._all_columns : self._absent_place]

    def copy(self) -> Window:
        """Return an independent copy of the window, for a fork."""
        twin = copy.copy(self)
        twin._entries, twin._place = self._entries.copy(), self._place.copy()
        return twin

    def grow(self, num_chunks: int) -> None:
        """Raise the exclusive bound of chunk numbers. Raises ValueError if it falls, ConfigError if it is too large."""
        if num_chunks < self.num_chunks:
            raise ValueError(f"a window of {self.num_chunks} chunks cannot shrink to {num_chunks}")
        if num_chunks > _CHUNK:
            raise ConfigError(f"a window supports at most {_CHUNK} chunks, not {num_chunks}")
        self.num_chunks = num_chunks
        if num_chunks <= self._stride:
            return
        stride = max(num_chunks, self._stride * 5 // 4)  # extra room, since decoding keeps adding chunks
        place = np.full((self.num_heads, stride), self._absent_place, np.int32)
        place[:, : self._stride] = self._place.reshape(self.num_heads, self._stride)
        self._place, self._stride = place.ravel(), stride
        self._rows = self._heads * stride  # int64 [heads, 1], where each row of `_place` begins

    def plan(self, selected_chunks: np.ndarray, pool: np.ndarray | None = None) -> Moves:
        """Plan the moves of one step. The window does not change before `commit`.

        Args:
            selected_chunks: int64 `[heads, B]`, distinct within a head.
            pool: Candidate chunks, int64 `[heads, M]` with M ≥ B, best first. The first B are the chosen chunks in any
                order. Only the policy "lookahead" uses it.

        Raises:
            ValueError: A shape or dtype is wrong, a chunk does not exist, or a head chose a chunk twice.
        """
        lower_ranked = self._check(selected_chunks, pool)
        names = (selected_chunks + self._rows).ravel()  # indices into `_place`, across all heads
        place = self._place.take(names) if self._keeps else np.full(len(names), self._absent_place, np.int32)
        occupied = np.zeros(self._absent_place + 1, bool)  # places of chosen entries, below also of evicted ones
        occupied[place] = True
        occupied[-1] = True
        # In each head as many columns become free as chunks need one, so they are matched in order.
        missing_indices = np.flatnonzero(place >= self._all_columns)
        free = np.flatnonzero(~occupied)
        targets = free[: free.searchsorted(self._all_columns)]
        missing_names = np.sort(names[missing_indices])
        if len(targets) != len(missing_indices) or (missing_names[1:] == missing_names[:-1]).any():
            raise ValueError("a head selected a chunk twice")
        if not len(missing_indices):
            return Moves(self._step, *_NO_MOVES)
        source, chunks = place[missing_indices].astype(np.int64), selected_chunks.ravel()[missing_indices]
        heads = targets // self.num_columns
        columns = targets - heads * self.num_columns
        fetch_indices = np.flatnonzero(source == self._absent_place)
        aside_indices = np.flatnonzero(source != self._absent_place)
        fetched = Fetches(heads[fetch_indices], chunks[fetch_indices], columns[fetch_indices])
        slots = source[aside_indices] - self._all_columns
        loaded_chunks = Transfers(heads[aside_indices], chunks[aside_indices], columns[aside_indices], slots)

        # columns that lose an entry; before the first step all are empty
        vacated = targets if self._filled else targets[:0]
        evicted_places = self._evict(free, vacated, lower_ranked)
        occupied[evicted_places] = True
        survivors = np.flatnonzero(~occupied[vacated])
        entries = self._entries[evicted_places]
        evicted = Evictions(entries >> _HEAD_SHIFT, entries & _CHUNK)
        chunks = self._entries[vacated[survivors]] & _CHUNK
        set_aside = Transfers(heads[survivors], chunks, columns[survivors], self._slots(occupied, heads[survivors]))
        return Moves(self._step, loaded_chunks, set_aside, fetched, evicted)

    def commit(self, moves: Moves) -> None:
        """Apply the moves of `plan` after memory was updated. Raises ValueError if they belong to another step."""
        if moves.step != self._step:
            raise ValueError(f"the moves belong to step {moves.step}, but the window is at step {self._step}")
        _, loaded_chunks, set_aside, fetched, evicted = moves
        # Evictions first: a head that keeps nothing may fetch the same chunk again in this step. Every place that an
        # entry leaves is overwritten: at least as many entries enter the aside slots as leave, or all slots are full.
        self._place[evicted.heads * self._stride + evicted.chunks] = self._absent_place
        slots = set_aside.slots + self._all_columns
        self._entries[slots] = _pack(set_aside.heads, self._step - 1, set_aside.chunks)
        self._place[set_aside.heads * self._stride + set_aside.chunks] = slots
        for transfers in (loaded_chunks, fetched):
            targets = transfers.heads * self.num_columns + transfers.columns
            self._entries[targets] = _pack(transfers.heads, 0, transfers.chunks)
            self._place[transfers.heads * self._stride + transfers.chunks] = targets
        self._filled = True
        self._step += 1

    def _chunks(self) -> np.ndarray:
        """Return the chunk in each place, or EMPTY."""
        return np.where(self._entries == EMPTY, EMPTY, self._entries & _CHUNK)

    def _check(self, selected_chunks: np.ndarray, pool: np.ndarray | None) -> np.ndarray | None:
        """Validate the arguments of `plan`. Return the pool after its first B candidates, or None if it is not used."""
        shape = self.num_heads, self.num_columns
        if selected_chunks.shape != shape or selected_chunks.dtype != np.int64:
            dtype = selected_chunks.dtype
            raise ValueError(f"selected_chunks must be int64 of shape {shape}, not {dtype} of {selected_chunks.shape}")
        lower_ranked = None
        if self.policy == "lookahead" and pool is not None:
            if pool.ndim != 2 or len(pool) != shape[0] or pool.shape[1] < shape[1] or pool.dtype != np.int64:
                raise ValueError(f"a pool must be int64 of shape {shape} or wider, not {pool.dtype} of {pool.shape}")
            lower_ranked = pool[:, shape[1] :]
        for chunks in (selected_chunks, lower_ranked):
            # As unsigned integers, negative numbers are above all chunks.
            if chunks is not None and chunks.size and chunks.view(np.uint64).max() >= self.num_chunks:
                raise ValueError(f"chunk numbers must be from 0 to {self.num_chunks - 1}")
        return lower_ranked

    def _evict(self, free: np.ndarray, vacated: np.ndarray, lower_ranked: np.ndarray | None) -> np.ndarray:
        """Return the places of the entries to evict for lack of room, ordered by head.

        Places in `free` have no chosen entry, or are empty; `vacated` are the columns among them that hold an entry.
        """
        entries = self._entries.copy()
        entries[vacated] += (self._step - 1) << _CHUNK_BITS
        if lower_ranked is not None and lower_ranked.shape[1]:
            ranked = _pack(self._heads, _BEST - np.arange(lower_ranked.shape[1]), lower_ranked)
            entries[self._place.take((lower_ranked + self._rows).ravel())] = ranked.ravel()
        entries = np.sort(entries[free])  # empty places sort before all heads
        bounds = entries.searchsorted(self._first_entries)
        excess = np.maximum(bounds[1:] - bounds[:-1] - self._room, 0)
        entries = entries[_runs(bounds[:-1], excess)]
        return self._place[(entries >> _HEAD_SHIFT) * self._stride + (entries & _CHUNK)]

    def _slots(self, occupied: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Return an aside slot for each entry of `heads`, in order, from slots that are empty or become empty."""
        unused = occupied[self._all_columns : -1] | (self._entries[self._all_columns : -1] == EMPTY)
        slots = np.flatnonzero(unused)
        if len(slots) > len(heads):  # otherwise every slot is used
            first_slots = np.arange(self.num_heads) * self._room
            slots = slots[_runs(slots.searchsorted(first_slots), np.bincount(heads, minlength=self.num_heads))]
        return slots


_NOTHING = np.empty(0, np.int64)
_NO_MOVES = (
    Transfers(*[_NOTHING] * 4),
    Transfers(*[_NOTHING] * 4),
    Fetches(*[_NOTHING] * 3),
    Evictions(*[_NOTHING] * 2),
)


def _pack(heads: np.ndarray, standing: np.ndarray | int, chunks: np.ndarray) -> np.ndarray:
    """Return entries as numbers that sort by head, then standing, then chunk."""
    return (((heads << _STANDING_BITS) + standing) << _CHUNK_BITS) + chunks


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges from each start, with the given lengths."""
    ends = counts.cumsum()
    return (starts - ends + counts).repeat(counts) + np.arange(ends[-1] if len(ends) else 0)


@dataclass(frozen=True, eq=False)
class OffloadedChunks:
    """Offloaded generated KV of one layer and row. Immutable: offloading more tokens creates a new object.

    Args:
        first: Number of the first chunk; restored chunks come before it.
        keys: Rotated keys, `[kv_heads, chunks, chunk_tokens, dim]`, in host memory.
        values: Like `keys`.
        indexes: Indexes of these chunks, in order, on the layer's device.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    indexes: tuple[DecodeIndex, ...]

    @property
    def numbers(self) -> range:
        """Range of chunk numbers."""
        return range(self.first, self.first + self.keys.shape[1])

    def get(self, heads: np.ndarray, chunks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of `chunks` of `heads`, int64 `[n]`: `[n, chunk_tokens, dim]` each, on `device`."""
        at = to_device(heads, torch.device("cpu")), to_device(chunks - self.first, torch.device("cpu"))
        keys, values = (tensor[at].to(device, non_blocking=True) for tensor in (self.keys, self.values))
        return keys, values


@dataclass(eq=False)
class HeldChunks:
    """Chunks that one layer holds of one row.

    Args:
        prefix: Number of the row's prefix.
        window: Tells which chunks are at its positions, and which are set aside: for each kv head, or for all together.
        first: Position of the first chunk that may be replaced.
        size: Tokens per chunk.
        aside: Keys and values of the chunks set aside, `[slots, chunk_tokens, dim]` each; None before there are any.
    """

    prefix: int
    window: Window
    first: int
    size: int
    aside: tuple[torch.Tensor, torch.Tensor] | None = None
    offloaded: OffloadedChunks | None = None

    def fork(self) -> HeldChunks:
        """Return an independent copy, because rows may be copied."""
        aside = None if self.aside is None else (self.aside[0].clone(), self.aside[1].clone())
        return replace(self, window=self.window.copy(), aside=aside)
