"""Memory of the tiers: slabs, buffer slots of one block size in them, and locations of blocks as arrays.

Slabs are allocated in advance: page-locking them takes as long as reading them from a disk of 2 GB/s. Locations are
arrays of slabs and slots, so that many blocks are indexed at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from ..store.lazy import torch
from .scores import EvictionPolicy, Usage

BlockRun: TypeAlias = "tuple[int, torch.Tensor]"
"""A run of consecutive chunks: the number of the first chunk, and the blocks, uint8 `[n, block_bytes]`."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one KV cache group of a segment, and their locations in memory.

    Args:
        chunks: Chunk numbers, int64 `[n]`, ascending.
        slabs: The slabs that hold the blocks, uint8 `[slots, block_bytes]` each.
        slab: Index into `slabs` for each block, int64 `[n]`.
        slot: Row of each block in its slab, int64 `[n]`.
    """

    chunks: np.ndarray
    slabs: tuple[torch.Tensor, ...]
    slab: np.ndarray
    slot: np.ndarray

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, selection: np.ndarray | slice) -> Blocks:
        """Select blocks by a mask, indices or a slice."""
        return Blocks(self.chunks[selection], self.slabs, self.slab[selection], self.slot[selection])

    def runs(self) -> list[BlockRun]:
        """Return the blocks as the fewest runs that are contiguous in both the segment and memory."""
        if not len(self):
            return []
        in_memory = self.slot if len(self.slabs) == 1 else self.slot + (self.slab << 32)  # slabs are not adjacent
        breaks = np.flatnonzero((self.chunks[1:] - self.chunks[:-1] != 1) | (in_memory[1:] - in_memory[:-1] != 1)) + 1
        bounds = [0, *breaks.tolist(), len(self)]
        return [
            (int(self.chunks[first]), self.slabs[self.slab[first]][self.slot[first] : self.slot[first] + stop - first])
            for first, stop in itertools.pairwise(bounds)
        ]

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """Join disjoint parts of the same KV cache group, sorted by chunk."""
        joined = cls.in_order(parts)
        if sum(len(part) > 0 for part in parts) > 1:
            joined = joined[np.argsort(joined.chunks, kind="stable")]
        return joined

    @classmethod
    def in_order(cls, parts: Sequence[Blocks]) -> Blocks:
        """Join parts, also of several KV cache groups, in the given order: to copy them all at once."""
        parts = [part for part in parts if len(part)] or [NO_BLOCKS]
        if len(parts) == 1:
            return parts[0]
        numbers: dict[int, int] = {}  # id of a slab -> its index: parts may share slabs
        slabs: list[torch.Tensor] = []
        for slab in (slab for part in parts for slab in part.slabs):
            if numbers.setdefault(id(slab), len(slabs)) == len(slabs):
                slabs.append(slab)
        chunks = np.concatenate([part.chunks for part in parts])
        slot = np.concatenate([part.slot for part in parts])
        slab_of = np.concatenate([np.array([numbers[id(slab)] for slab in part.slabs])[part.slab] for part in parts])
        return cls(chunks, tuple(slabs), slab_of, slot)

    def rows_by_slab(self) -> Iterator[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
        """Yield each slab with its rows that hold blocks, and the indices of these blocks, int64 `[n]` each."""
        for number, slab in enumerate(self.slabs):
            if len(indices := np.flatnonzero(self.slab == number)):
                yield slab, self.slot[indices], indices

    @property
    def block_bytes(self) -> int:
        """Bytes per block. There must be at least one slab."""
        return self.slabs[0].shape[1]

    @classmethod
    def alone(cls, chunks: np.ndarray, memory: torch.Tensor) -> Blocks:
        """Create blocks that fill a slab of their own, uint8 `[n, block_bytes]`."""
        return cls(chunks, (memory,), np.zeros(len(chunks), np.int64), np.arange(len(chunks)))


_EMPTY = np.empty(0, np.int64)
NO_BLOCKS = Blocks(_EMPTY, (), _EMPTY, _EMPTY)


def overlaps(sources: Sequence[BlockRun], targets: Sequence[BlockRun]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of source and target tensors of equal length.

    Both lists of runs cover the same chunks in ascending order.
    """
    at_source = at_target = used_source = used_target = 0
    while at_source < len(sources) and at_target < len(targets):
        source, target = sources[at_source][1], targets[at_target][1]
        count = min(len(source) - used_source, len(target) - used_target)
        yield source[used_source : used_source + count], target[used_target : used_target + count]
        used_source, used_target = used_source + count, used_target + count
        if used_source == len(source):
            at_source, used_source = at_source + 1, 0
        if used_target == len(target):
            at_target, used_target = at_target + 1, 0


NO_MEMORY = (RuntimeError, MemoryError, OSError)
"""Errors that CUDA, page-locking and mmap raise if an allocation fails."""


_FEW_SLOTS, _RANKED_SHARE = 1024, 64
"""A pool ranks at least so many slots in advance, and at least one in so many."""
FREE, RESERVED, GONE, ORPHANED = -1, -2, -3, -4
"""States of a slot without a block: free, being filled, memory freed, or block forgotten while the slot is pinned."""
_OF_SLOTS = ("owner", "chunk", "pins", "is_evictable", "_is_changed", *(figure.name for figure in fields(Usage)))
"""Arrays of a pool with one entry for each slot."""


@dataclass(eq=False)
class SlotPool:
    """Pool of buffer slots for blocks of `block_bytes`, with metadata in arrays to avoid a loop over blocks.

    A slot is free, holds a block, or is reserved while a block is loaded. While `pins` > 0 it may not be evicted. Slot
    numbers never change, even when a slab is freed, so that pins on other slabs stay valid.

    A pool may have a million slots, so a fetch does not look through all of them: free slots and changed slots are
    listed, and the slots that are evicted first are ranked once for many fetches (see `first_victims`).
    """

    block_bytes: int
    slabs: list[torch.Tensor | None] = field(default_factory=list)  # uint8 [slots, block_bytes] each
    starts: list[int] = field(default_factory=lambda: [0])  # first slot of each slab, and the total
    newest: np.ndarray = field(default_factory=lambda: _EMPTY)  # int64 [slabs], clock at the last use of any slot
    owner: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # number of an owner, or a state above
    chunk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    last_used: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    uses: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    importance: np.ndarray = field(default_factory=lambda: np.empty(0, np.float64))
    accesses: np.ndarray = field(default_factory=lambda: np.empty(0, np.float64))
    pins: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    is_evictable: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    """Mask of the slots with a block that may be evicted, bool `[slots]`."""
    free: np.ndarray = field(default_factory=lambda: _EMPTY)
    """Free slots, int64, ascending."""
    _is_changed: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # since the slots were ranked
    _changed: list[np.ndarray] = field(default_factory=list)  # these slots
    _ranked: np.ndarray = field(default_factory=lambda: _EMPTY)  # slots that are evicted first, in order
    _low: np.ndarray = field(default_factory=lambda: _EMPTY)  # slots that have changed, and rank below `_bound`
    _bound: tuple[np.ndarray, ...] | None = None  # key of the last ranked slot; None if all slots are candidates

    # --- slabs

    def add_slab(self, memory: torch.Tensor) -> None:
        """Add `memory`, uint8 `[slots, block_bytes]`, as free slots.

        The numbers of a freed slab of the same size are reused.
        """
        count = memory.shape[0]
        for index, slab in enumerate(self.slabs):
            if slab is None and self.starts[index + 1] - self.starts[index] == count:
                self.slabs[index] = memory
                self.set_free(self.slots_of(index))
                return
        first, stop = self.starts[-1], self.starts[-1] + count
        arrays: dict[str, Any] = {
            "slabs": [*self.slabs, memory],
            "starts": [*self.starts, stop],
            "newest": np.append(self.newest, 0),
            "free": np.concatenate([self.free, np.arange(first, stop)]),
        }
        for name in _OF_SLOTS:
            values = getattr(self, name)
            arrays[name] = np.concatenate([values, np.full(count, FREE if name == "owner" else 0, values.dtype)])
        self.__dict__.update(arrays)  # atomic: after an interrupt all arrays have the same length

    def drop_slab(self, index: int) -> None:
        """Free the memory of a slab, where all slots must be free."""
        self.slabs[index] = None
        self.owner[self.slots_of(index)] = GONE
        self.free = np.setdiff1d(self.free, self.slots_of(index), assume_unique=True)

    def slots_of(self, index: int) -> np.ndarray:
        """Return the slots of a slab, int64, ascending."""
        return np.arange(self.starts[index], self.starts[index + 1])

    def slab_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the index of the slab of each slot, int64."""
        return np.searchsorted(self.starts, slots, side="right") - 1

    # --- changes of slots, which are distinct in each call

    def take_free(self, count: int) -> np.ndarray:
        """Reserve and pin up to `count` free slots, ascending, so that runs of blocks stay contiguous in memory."""
        slots, self.free = self.free[:count], self.free[count:]
        self.owner[slots] = RESERVED
        self.pins[slots] = 1
        return slots

    def set_free(self, slots: np.ndarray) -> None:
        """Free slots in any state, and unpin them."""
        self.owner[slots] = FREE
        self.pins[slots], self.uses[slots] = 0, 0
        self.is_evictable[slots] = False
        self.free = np.sort(np.concatenate([self.free, slots]), kind="stable")

    def pin(self, slots: np.ndarray) -> None:
        """Pin slots once more."""
        self.pins[slots] += 1
        self.is_evictable[slots] = False

    def unpin(self, slots: np.ndarray) -> np.ndarray:
        """Unpin slots once, and return those that have no pin left."""
        self.pins[slots] -= 1
        idle_slots = slots[self.pins[slots] == 0]
        self.is_evictable[idle_slots] = self.owner[idle_slots] >= 0
        self._note_change(idle_slots)  # they may have been pinned when the slots were ranked
        return idle_slots

    def use(self, slots: np.ndarray, clock: int) -> None:
        """Record that blocks in slots are used at this time of the tier."""
        self.last_used[slots] = clock
        self.uses[slots] += 1
        self._note_change(slots)
        self.newest[self.slab_of(slots)] = clock

    def rate(self, slots: np.ndarray, scores: np.ndarray) -> None:
        """Set the importance and the accesses of slots, float64 `[2, len(slots)]`."""
        self.importance[slots], self.accesses[slots] = scores
        self._note_change(slots)

    def _note_change(self, slots: np.ndarray) -> None:
        """Record that the ranking of the slots does not apply to these slots any more."""
        if len(new_slots := slots[~self._is_changed[slots]]):  # each slot is listed once
            self._is_changed[new_slots] = True
            self._changed.append(new_slots)

    def mend(self, pinned_slots: Iterable[np.ndarray]) -> None:
        """Set all pins, and derive the rest from them and the owners, after an interrupted change."""
        self.pins[:] = 0
        for slots in pinned_slots:
            self.pins[slots] += 1
        self.owner[(self.owner == FREE) & (self.pins > 0)] = ORPHANED
        self.free, self.is_evictable = np.flatnonzero(self.owner == FREE), (self.owner >= 0) & (self.pins == 0)
        self.newest = np.array(
            [self.last_used[self.slots_of(index)].max() for index in range(len(self.slabs))], np.int64
        )
        self._ranked, self._low, self._bound = _EMPTY, _EMPTY, None
        self._is_changed[:], self._changed = True, [np.arange(len(self.owner))]

    # --- eviction

    def first_victims(self, policy: EvictionPolicy, count: int) -> np.ndarray:
        """Return up to `count` slots whose blocks may be evicted, int64: those that `policy` gives up first, in order.

        A ranking of the lowest slots serves many calls. The result is exact, because changed slots are compared with
        the bound of the ranking: those below it are candidates, too. `policy` is the same in all calls.
        """
        changed_slots = np.concatenate([_EMPTY, *self._changed])
        self._ranked, self._low = (slots[~self._is_changed[slots]] for slots in (self._ranked, self._low))
        self._is_changed[changed_slots], self._changed = False, []
        changed_slots = changed_slots[self.is_evictable[changed_slots]]
        self._low = np.concatenate([self._low, changed_slots[self._is_low(policy, changed_slots)]])
        victims = self._ranked[self.is_evictable[self._ranked]][:count]
        candidates = np.concatenate([victims, self._low[self.is_evictable[self._low]]])
        most = max(_FEW_SLOTS, len(self.owner) // _RANKED_SHARE)
        if len(self._low) > most or (len(candidates) < count and self._bound is not None):
            slots = np.flatnonzero(self.is_evictable)
            self._ranked, self._low = slots[policy.victims(self.usage(slots), count + most)], _EMPTY
            self._bound = self._key(policy, self._ranked[-1:]) if len(self._ranked) < len(slots) else None
            return self._ranked[:count]
        candidates.sort()  # slots of one score are evicted in their order
        return candidates[policy.victims(self.usage(candidates), count)]

    def _is_low(self, policy: EvictionPolicy, slots: np.ndarray) -> np.ndarray:
        """Return whether slots are evicted before all slots that are not ranked, bool `[len(slots)]`."""
        is_low = np.full(len(slots), self._bound is None)
        for values, bounds in reversed([*zip(self._key(policy, slots), self._bound or (), strict=False)]):
            is_low = (values < bounds) | ((values == bounds) & is_low)
        return is_low

    def _key(self, policy: EvictionPolicy, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sort keys of slots, most significant first: score, last use and slot number."""
        usage = self.usage(slots)
        return policy.score(usage), usage.last_used, slots

    def usage(self, slots: np.ndarray | slice) -> Usage:
        return Usage(self.last_used[slots], self.uses[slots], self.importance[slots], self.accesses[slots])

    def blocks(self, slots: np.ndarray, chunks: np.ndarray) -> Blocks:
        """Return the blocks of ascending `chunks`, stored in `slots`."""
        slab_of_slot = self.slab_of(slots)
        if len(slots) and slab_of_slot.min() == slab_of_slot.max():  # often, and several times as fast
            number = int(slab_of_slot[0])
            return Blocks(chunks, (self._slab(number),), np.zeros_like(slots), slots - self.starts[number])
        slab_numbers, slab = np.unique(slab_of_slot, return_inverse=True)
        starts = np.asarray(self.starts)[slab_of_slot]
        return Blocks(chunks, tuple(self._slab(index) for index in slab_numbers.tolist()), slab, slots - starts)

    def _slab(self, index: int) -> torch.Tensor:
        memory = self.slabs[index]
        assert memory is not None  # a slab that holds blocks is not freed
        return memory
