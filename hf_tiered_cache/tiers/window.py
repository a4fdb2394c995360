"""The window of one layer and row: which chunks lie in device memory between decoding steps (KVDRIVE, Section 5.1).

Each KV head attends to B chunks a step. Those stand in its columns; what it attended to before, and may again, lies
aside in the rest of its capacity of w·B entries. A step moves entries between the two and fetches what is in neither.
The window knows no tensor and no file: it says what moves, and whoever holds the memory moves it.

The paper gives lookahead eviction its rule: the lowest scores of the current step go first. Ours are the order of what
has no score, the columns that stay where they are, and a plan that changes nothing until it is committed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError

WINDOW_POLICIES = ("lookahead", "lru", "none")
EMPTY = -1  # in a column or slot, instead of a chunk

# An entry is kept as one number that sorts by head, then standing (what goes first), then chunk.
_CHUNK_BITS, _STANDING_BITS, _HEAD_BITS = 24, 28, 11
_CHUNK = (1 << _CHUNK_BITS) - 1
_HEAD_SHIFT = _CHUNK_BITS + _STANDING_BITS
_BEST = (1 << _STANDING_BITS) - 1  # the standing of the best of a pool; those of steps, from 1 on, lie far below


class Transfers(NamedTuple):
    """Entries that move between a column and a slot aside, int64 arrays of one length, head by head."""

    heads: np.ndarray
    chunks: np.ndarray
    columns: np.ndarray
    """Of their head, below B."""
    slots: np.ndarray
    """Numbered through all heads: see `Window.first_slots`."""


class Fetches(NamedTuple):
    """Entries that come from outside, int64 arrays of one length, head by head."""

    heads: np.ndarray
    chunks: np.ndarray
    columns: np.ndarray


class Evictions(NamedTuple):
    """Entries that are given up, int64 arrays of one length, head by head."""

    heads: np.ndarray
    chunks: np.ndarray


class Moves(NamedTuple):
    """What one step moves, all at once: everything that moves is read before any of it is written.

    With memory `columns[head, column]` and `aside[slot]`: read `out = columns[set_aside]`, write `columns[brought] =
    aside[brought]`, then `aside[set_aside] = out`, then `columns[fetched]`. A fetch that may fail belongs before these.
    """

    step: int
    """The step of the window that this is planned for."""
    brought: Transfers
    """Chosen, and aside so far: slot to column."""
    set_aside: Transfers
    """Chosen no more, and kept: column to slot. The slot may be one that something is brought from."""
    fetched: Fetches
    evicted: Evictions
    """Takes no move: its place is written over, or left unused."""


class HitCounts(NamedTuple):
    """Chosen entries by where they were, int64 `[heads]`, summed over the steps that were committed."""

    in_columns: np.ndarray
    from_aside: np.ndarray
    fetched: np.ndarray

    def hit_rate(self) -> float:
        """The share of chosen entries that did not have to be fetched; 0 before the first step."""
        fetched = int(self.fetched.sum())
        total = int(self.in_columns.sum() + self.from_aside.sum()) + fetched
        return 1 - fetched / total if total else 0.0


class Window:
    """The entries of one layer and row in device memory, for each KV head.

    To warm up, plan and commit the choices of earlier queries, then fetch `columns` and `aside` as they stand.

    Args:
        num_columns: B, chunks that each head attends to at a step.
        capacities: entries of each head, columns included, at least B. With 0 a head keeps nothing from step to step:
            it has its columns, and all is fetched anew at each step (×0 in the paper's Figure 3).
        num_chunks: chunks are numbered below it.
        policy: what goes first when a head is full, never what the step has chosen. "lookahead": what ranks lowest in
            the pool; all that is not in the pool goes before it, the least recently chosen first. "lru": the least
            recently chosen. Of equals the lowest chunk goes first. "none": nothing lies aside.

    Raises:
        ConfigError: an unknown policy, or sizes that do not fit.
    """

    def __init__(
        self, num_columns: int, capacities: Sequence[int] | np.ndarray, num_chunks: int, policy: str = "lookahead"
    ) -> None:
        capacity = np.asarray(capacities, np.int64)  # [heads]
        if policy not in WINDOW_POLICIES:
            raise ConfigError(f"unknown window policy {policy!r}; there are: {', '.join(WINDOW_POLICIES)}")
        if num_columns < 1 or capacity.ndim != 1 or ((capacity < num_columns) & (capacity != 0)).any():
            raise ConfigError(f"a window of {num_columns} columns needs capacities of at least as many, or of 0")
        if policy == "none" and (capacity > num_columns).any():
            raise ConfigError(f"a window that keeps nothing aside has capacities of {num_columns}, or of 0")
        if len(capacity) >> _HEAD_BITS:
            raise ConfigError(f"a window has at most {(1 << _HEAD_BITS) - 1} heads, not {len(capacity)}")
        self.policy = policy
        self.num_columns = num_columns
        self.num_heads = heads = len(capacity)
        self.num_chunks = 0
        self._room = np.maximum(capacity - num_columns, 0)  # int64 [heads], slots of each
        self.first_slots = np.cumsum(self._room) - self._room
        """int64 `[heads]`: slots aside are numbered through all heads, each head's from here on."""
        self.num_slots = int(self._room.sum())
        """Slots aside of all heads together."""
        self._forgets = np.flatnonzero(capacity == 0)
        self._heads = np.arange(heads)[:, None]  # int64 [heads, 1]
        self._first_entries = np.arange(heads + 1) << _HEAD_SHIFT  # int64 [heads + 1], below those of each head
        self._step = 1
        self._hits = HitCounts(*(np.zeros(heads, np.int64) for _ in HitCounts._fields))
        self._filled = False
        # Entries by place: all heads' columns, then all slots, then one place for chunks that lie nowhere. The standing
        # is the step that chose an entry last; in columns it is left out.
        self._all_columns = heads * num_columns
        self._nowhere = self._all_columns + self.num_slots
        self._entries = np.full(self._nowhere + 1, EMPTY, np.int64)
        self._place = np.empty(0, np.int32)  # of each chunk, flat [heads, stride]
        self._stride = 0
        self.grow(num_chunks)

    @property
    def columns(self) -> np.ndarray:
        """The chunk in each column, int64 `[heads, B]`; EMPTY before the first step."""
        return self._chunks()[: self._all_columns].reshape(self.num_heads, self.num_columns)

    @property
    def aside(self) -> np.ndarray:
        """The chunk in each slot, or EMPTY, int64 `[num_slots]`."""
        return self._chunks()[self._all_columns : self._nowhere]

    @property
    def hits(self) -> HitCounts:
        """Where chosen entries were, since the window was made."""
        return HitCounts(*(count.copy() for count in self._hits))

    def drop(self) -> None:
        """Forget all entries. What was planned before cannot be committed; what was counted stays."""
        self._entries.fill(EMPTY)
        self._place.fill(self._nowhere)
        self._filled = False
        self._step += 1

    def copy(self) -> Window:
        """A window that holds the same and goes its own way, for a fork."""
        twin = copy.copy(self)
        twin._entries, twin._place, twin._hits = self._entries.copy(), self._place.copy(), self.hits
        return twin

    def grow(self, num_chunks: int) -> None:
        """Let chunks be numbered below `num_chunks`. Raises ValueError if that is less than before."""
        if num_chunks < self.num_chunks:
            raise ValueError(f"a window of {self.num_chunks} chunks cannot shrink to {num_chunks}")
        if num_chunks > _CHUNK:
            raise ConfigError(f"a window knows at most {_CHUNK} chunks, not {num_chunks}")
        self.num_chunks = num_chunks
        if num_chunks <= self._stride:
            return
        stride = max(num_chunks, self._stride * 5 // 4)  # decoding adds chunk after chunk
        place = np.full((self.num_heads, stride), self._nowhere, np.int32)
        place[:, : self._stride] = self._place.reshape(self.num_heads, self._stride)
        self._place, self._stride = place.ravel(), stride
        self._rows = self._heads * stride  # int64 [heads, 1], where the rows of the table begin

    def plan(self, chosen: np.ndarray, pool: np.ndarray | None = None) -> Moves:
        """Say what a step moves. Nothing changes before `commit`.

        Args:
            chosen: int64 `[heads, B]`, distinct inside a head.
            pool: int64 `[heads, M]`, M ≥ B: more candidates, best first, the first B of which are the chosen ones in
                any order. Only "lookahead" looks at it.

        Raises:
            ValueError: shapes that do not fit, a chunk that does not exist, or one chosen twice.
        """
        rest = self._check(chosen, pool)
        names = (chosen + self._rows).ravel()  # chunks as the table of places numbers them, through all heads
        place = self._place.take(names)
        if len(self._forgets):
            place.reshape(chosen.shape)[self._forgets] = self._nowhere
        taken = np.zeros(self._nowhere + 1, bool)  # places of what is chosen, and further on of what is given up too
        taken[place] = True
        taken[-1] = True
        # Each head has as many columns that become free as chunks that need one, so these pair up in order.
        new = np.flatnonzero(place >= self._all_columns)
        free = np.flatnonzero(~taken)
        into = free[: free.searchsorted(self._all_columns)]
        new_names = np.sort(names[new])
        if len(into) != len(new) or (new_names[1:] == new_names[:-1]).any():
            raise ValueError("a head chose a chunk twice")
        source, chunks, heads = place[new].astype(np.int64), chosen.ravel()[new], into // self.num_columns
        columns = into - heads * self.num_columns
        away, here = np.flatnonzero(source == self._nowhere), np.flatnonzero(source != self._nowhere)
        fetched = Fetches(heads[away], chunks[away], columns[away])
        brought = Transfers(heads[here], chunks[here], columns[here], source[here] - self._all_columns)

        leaving = into if self._filled else into[:0]  # columns whose entries leave them: none leaves an empty one
        gone = self._evict(free, leaving, rest)
        taken[gone] = True
        kept = np.flatnonzero(~taken[leaving])
        entries = self._entries[gone]
        evicted = Evictions(entries >> _HEAD_SHIFT, entries & _CHUNK)
        chunks = self._entries[leaving[kept]] & _CHUNK
        set_aside = Transfers(heads[kept], chunks, columns[kept], self._slots(taken, heads[kept]))
        return Moves(self._step, brought, set_aside, fetched, evicted)

    def commit(self, moves: Moves) -> None:
        """The moves are done: the window is now what they make of it.

        Raises:
            ValueError: they were planned for another step.
        """
        if moves.step != self._step:
            raise ValueError(f"these moves are of step {moves.step}, and the window is at step {self._step}")
        _, brought, set_aside, fetched, evicted = moves
        # What is given up goes first: a head that keeps nothing may fetch it again in the same step. All places that
        # something leaves are written over: as many entries come aside as leave it, or more, or all slots are full.
        self._place[evicted.heads * self._stride + evicted.chunks] = self._nowhere
        slots = set_aside.slots + self._all_columns
        self._entries[slots] = _pack(set_aside.heads, self._step - 1, set_aside.chunks)
        self._place[set_aside.heads * self._stride + set_aside.chunks] = slots
        for came in (brought, fetched):
            into = came.heads * self.num_columns + came.columns
            self._entries[into] = _pack(came.heads, 0, came.chunks)
            self._place[came.heads * self._stride + came.chunks] = into
        num_brought = np.bincount(brought.heads, minlength=self.num_heads)
        num_fetched = np.bincount(fetched.heads, minlength=self.num_heads)
        self._hits.in_columns[:] += self.num_columns - num_brought - num_fetched
        self._hits.from_aside[:] += num_brought
        self._hits.fetched[:] += num_fetched
        self._filled = True
        self._step += 1

    def _chunks(self) -> np.ndarray:
        """The chunk in each place, or EMPTY."""
        return np.where(self._entries == EMPTY, EMPTY, self._entries & _CHUNK)

    def _check(self, chosen: np.ndarray, pool: np.ndarray | None) -> np.ndarray | None:
        """Refuse what does not fit. Returns the pool behind the chosen, where the policy looks at it."""
        shape = self.num_heads, self.num_columns
        if chosen.shape != shape or chosen.dtype != np.int64:
            raise ValueError(f"chosen must be int64 of shape {shape}, not {chosen.dtype} of {chosen.shape}")
        rest = None
        if self.policy == "lookahead" and pool is not None:
            if pool.ndim != 2 or len(pool) != shape[0] or pool.shape[1] < shape[1] or pool.dtype != np.int64:
                raise ValueError(f"a pool must be int64 of {shape} or wider, not {pool.dtype} of {pool.shape}")
            rest = pool[:, shape[1] :]
        for chunks in (chosen, rest):
            # Seen without a sign, what is below 0 lies above all chunks.
            if chunks is not None and chunks.size and chunks.view(np.uint64).max() >= self.num_chunks:
                raise ValueError(f"chunks are numbered from 0 to {self.num_chunks - 1}")
        return rest

    def _evict(self, free: np.ndarray, leaving: np.ndarray, rest: np.ndarray | None) -> np.ndarray:
        """Places of the entries that must go for want of room, head by head.

        Args:
            free: places of what is not chosen, empty ones among them.
            leaving: columns among them that hold something.
            rest: see `_check`.
        """
        entries = self._entries.copy()
        entries[leaving] += (self._step - 1) << _CHUNK_BITS
        if rest is not None and rest.shape[1]:
            ranked = _pack(self._heads, _BEST - np.arange(rest.shape[1]), rest)
            entries[self._place.take((rest + self._rows).ravel())] = ranked.ravel()
        entries = np.sort(entries[free])  # empty ones come before all heads
        bounds = entries.searchsorted(self._first_entries)
        excess = np.maximum(bounds[1:] - bounds[:-1] - self._room, 0)
        entries = entries[_runs(bounds[:-1], excess)]
        return self._place[(entries >> _HEAD_SHIFT) * self._stride + (entries & _CHUNK)]

    def _slots(self, taken: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Slots for entries of these heads, in order, out of those that are empty or become so."""
        unused = taken[self._all_columns : -1] | (self._entries[self._all_columns : -1] == EMPTY)
        slots = np.flatnonzero(unused)
        if len(slots) > len(heads):  # else all heads are full, and every slot is used
            slots = slots[_runs(slots.searchsorted(self.first_slots), np.bincount(heads, minlength=self.num_heads))]
        return slots


def _pack(heads: np.ndarray, standing: np.ndarray | int, chunks: np.ndarray) -> np.ndarray:
    """Entries as numbers that sort by head, then standing, then chunk."""
    return (((heads << _STANDING_BITS) + standing) << _CHUNK_BITS) + chunks


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers from each start on, as many as its count says, one run after another."""
    ends = counts.cumsum()
    return (starts - ends + counts).repeat(counts) + np.arange(ends[-1] if len(ends) else 0)
