"""One memory tier: slot pools for blocks of all sizes, with a shared byte budget and an eviction policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..store.geometry import ALIGNMENT
from ..store.lazy import torch
from .scores import EvictionPolicy, Owner, ScoreTable, Usage
from .slabs import FREE, GONE, NO_MEMORY, ORPHANED, Blocks, SlotPool

logger = logging.getLogger("hf_tiered_cache")

SLAB_BYTES, LEAST_SLAB_BYTES = 64 << 20, 1 << 20
"""Maximum and minimum slab size in bytes.

Memory is allocated in slabs, so that a budget is not allocated at start and pools can exchange memory. In a tier with a
small budget a slab takes an eighth of it, so that blocks of several sizes fit. If that is below the minimum, the
maximum applies. The limits are powers of two, alignment included, because PyTorch page-locks whole powers of two."""

DIRECT_SLAB_BYTES = 10 << 20
"""Minimum slab size in bytes for GPUDirect Storage.

PyTorch cuts smaller memory out of larger allocations, and cuFile then does not find the registered memory by its
address."""

Allocate: TypeAlias = "Callable[[int], torch.Tensor]"
"""Function that allocates uint8 `[nbytes]` on the device of the tier, aligned to 4 KiB."""


RETRY_SECONDS = 60.0
"""Seconds for which a tier does not grow after a failed allocation; on a GPU each attempt waits for the device."""


def slab_slots(block_bytes: int, budget: int = 8 * SLAB_BYTES, least: int = LEAST_SLAB_BYTES) -> int:
    """Return how many blocks fit in a slab of a tier with the given budget and minimum slab size in bytes."""
    nbytes = min(SLAB_BYTES, 1 << max(0, (budget // 8).bit_length() - 1))
    return max(1, ((nbytes if nbytes >= least else SLAB_BYTES) - ALIGNMENT) // block_bytes)


class _Table(NamedTuple):
    """Slots of the blocks of one owner."""

    owner: Owner
    number: int
    """Value of `SlotPool.owner` in these slots."""
    pool: SlotPool
    slots: np.ndarray
    """Slot of each chunk, or -1, int64 `[chunks]`."""


class Tier:
    """Blocks held in one kind of memory, within a budget of bytes that is never exceeded.

    Not thread-safe: `Residency` holds the lock.

    Args:
        name: Name of the tier in the stats: "host", "device" or "staging".
        budget: Bytes of memory the tier may allocate, slab alignment included.
        on_evict: Called before blocks are evicted, with their owner, the number of chunks of the KV cache group, the
            blocks and their usage.
        scores: Scores of chunks that selectors reported.
        allocate_own: Allocates memory outside the tier for a single request; `allocate` by default.
        added: Called with each new slab, uint8 `[slots, block_bytes]`.
        least_slab: Minimum slab size in bytes, where the budget allows it.
    """

    def __init__(
        self,
        name: str,
        budget: int,
        policy: EvictionPolicy,
        allocate: Allocate,
        on_evict: Callable[[Owner, int, Blocks, Usage], None] | None = None,
        scores: ScoreTable | None = None,
        allocate_own: Allocate | None = None,
        added: Callable[[torch.Tensor], None] | None = None,
        least_slab: int = LEAST_SLAB_BYTES,
    ) -> None:
        self.name = name
        self.least_slab = least_slab
        self._budget, self._size_limit, self._limited_until = budget, budget, 0.0
        self.policy = policy
        self.allocated = 0
        self.evicted = 0
        self.clock = 0
        self.allocate, self.allocate_own = allocate, allocate_own or allocate
        self._on_evict, self._added = on_evict, added
        self._scores = scores or ScoreTable(policy.learn)
        self._pools: dict[int, SlotPool] = {}
        self._tables: dict[int, _Table] = {}
        self._latest: dict[tuple[str, int], _Table] = {}  # by segment and KV cache group
        self._next_number = 0

    # --- lookup

    def lookup(self, owner: Owner, chunks: np.ndarray) -> np.ndarray:
        """Return the slot that holds each chunk's block, or -1, int64 `[len(chunks)]`."""
        table = self._table(owner)
        return np.full(len(chunks), -1, np.int64) if table is None else table.slots[chunks]

    def _table(self, owner: Owner) -> _Table | None:
        table = self._latest.get(owner[:2])
        return table if table is not None and table.owner == owner else None

    def pool(self, block_bytes: int) -> SlotPool:
        if block_bytes not in self._pools:
            self._pools[block_bytes] = SlotPool(block_bytes)
        return self._pools[block_bytes]

    def pools(self) -> Iterable[SlotPool]:
        return self._pools.values()

    def segments(self) -> set[str]:
        """Return the ids of segments with blocks in the tier."""
        return {segment for segment, _ in self._latest}

    def find(self, owner: Owner, chunks: np.ndarray) -> tuple[SlotPool, np.ndarray, np.ndarray] | None:
        """Return the pool and the slots that hold blocks of these chunks, or None if there is no block of the owner.

        The third array tells whether the tier holds each chunk, bool `[len(chunks)]`.
        """
        if (table := self._table(owner)) is None:
            return None
        slots = table.slots[chunks]
        return table.pool, slots[slots >= 0], slots >= 0

    def own_memory(self, chunks: np.ndarray, block_bytes: int) -> Iterator[Blocks]:
        """Allocate memory of the same kind outside the tier, for blocks of one request that get no slot.

        The memory comes in pieces of slab size, because PyTorch caches page-locked memory by powers of two.
        """
        for at in range(0, len(chunks), slab_slots(block_bytes)):
            piece = chunks[at : at + slab_slots(block_bytes)]
            yield Blocks.alone(piece, self.allocate_own(len(piece) * block_bytes).view(len(piece), block_bytes))

    @property
    def budget(self) -> int:
        """Bytes that the tier may allocate now: less than its budget for a while after a failed allocation."""
        return self._size_limit if time.monotonic() < self._limited_until else self._budget

    # --- acquiring and freeing slots

    def room(self, block_bytes: int) -> int:
        """Return how many blocks of that size could be inserted now, within the budget and without pinned slots."""
        return self.vacant(block_bytes) + int(np.count_nonzero(self.pool(block_bytes).is_evictable))

    def vacant(self, block_bytes: int) -> int:
        """Return how many blocks of that size could be inserted now without eviction."""
        growth = max(0, (self.budget - self.allocated - ALIGNMENT) // block_bytes)
        return growth + len(self.pool(block_bytes).free)

    def acquire(
        self, block_bytes: int, count: int, arriving: Usage | None = None
    ) -> tuple[SlotPool, np.ndarray, np.ndarray]:
        """Reserve and pin slots for up to `count` blocks, evicting others as the policy decides.

        Given the usage of the `arriving` blocks, the policy also decides which of them to keep. If the budget is too
        small or everything is pinned, the first ones get slots.

        Returns:
            Pool, slots, and the index of the block that each slot is for, int64 ascending.
        """
        pool, indices = self.pool(block_bytes), np.arange(count)
        self._grow(pool, count)
        if (missing := count - len(pool.free)) > 0:
            victims = pool.first_victims(self.policy, missing)
            if arriving is not None:
                indices = np.flatnonzero(self.policy.keeps(arriving, pool.usage(victims), len(pool.free)))
            self._evict(pool, victims[: max(0, len(indices) - len(pool.free))])
        slots = pool.take_free(len(indices))
        return pool, slots, indices[: len(slots)]

    def insert(self, pool: SlotPool, slots: np.ndarray, owner: Owner, chunks: np.ndarray, chunk_count: int) -> None:
        """Assign reserved slots, now filled, to the blocks `(owner, chunks)`; they stay pinned.

        A slot whose block another request has inserted in the meantime stays reserved. It is freed when unpinned.
        """
        table = self._table(owner) or self._add_table(owner, pool, chunk_count)
        is_new = table.slots[chunks] < 0
        new_slots = slots[is_new]
        pool.chunk[new_slots] = chunks[is_new]
        pool.rate(new_slots, self._scores.of(owner, chunks[is_new]))
        pool.use(new_slots, self.clock)
        pool.owner[new_slots] = table.number  # after all else of the slots, since `mend` relies on it
        table.slots[chunks[is_new]] = new_slots

    def rescore(self, changes: Sequence[tuple[Owner, np.ndarray, np.ndarray]]) -> None:
        """Set importance and accesses in the slots of chunks: owner, chunks, and float64 `[2, len(chunks)]`."""
        locations = [self.find(owner, chunks) for owner, chunks, _ in changes]
        for location, (_, _, scores) in zip(locations, changes, strict=True):
            if location is not None:
                pool, slots, is_held = location
                pool.rate(slots, scores[:, is_held])

    def discard(self, pool: SlotPool, slots: np.ndarray) -> None:
        """Free slots in any state, and unpin them."""
        self._part(pool, slots)
        pool.set_free(slots)

    def forget(self, segments: Collection[str]) -> None:
        """Forget all blocks of these segments. Pinned slots keep their bytes until they are unpinned."""
        for table in [table for table in self._latest.values() if table.owner[0] in segments]:
            self._forget_all(table)

    def also_in(self, other_tier: Tier, pool: SlotPool, slots: np.ndarray) -> np.ndarray:
        """Return whether `other_tier` holds the same block as each slot, bool `[len(slots)]`."""
        result = np.zeros(len(slots), bool)
        for table, of_owner in self._tables_of(pool, slots) if other_tier._latest else ():
            result[of_owner] = other_tier.lookup(table.owner, pool.chunk[slots[of_owner]]) >= 0
        return result

    def clear(self) -> None:
        """Forget every block and free the memory, except for slabs with pinned slots."""
        for table in list(self._latest.values()):
            self._forget_all(table)
        for pool in self._pools.values():
            for index, memory in enumerate(pool.slabs):
                if memory is not None and not pool.pins[pool.slots_of(index)].any():
                    self._give_back(pool, index)

    def mend(self, pinned_slots: Sequence[tuple[SlotPool, np.ndarray]]) -> None:
        """Rebuild all tables after an interrupted change, from the slots of complete blocks and the pinned slots."""
        self.allocated = 0
        for pool in self._pools.values():
            pool.owner[~np.isin(pool.owner, list(self._tables))] = FREE
            for index, memory in enumerate(pool.slabs):
                if memory is None:
                    pool.owner[pool.slots_of(index)] = GONE
                else:
                    self.allocated += memory.numel() + ALIGNMENT
            pool.mend(slots for pinned_pool, slots in pinned_slots if pinned_pool is pool)
        for _, number, pool, slots in list(self._tables.values()):
            owner_slots = np.flatnonzero(pool.owner == number)
            slots[:] = -1
            slots[pool.chunk[owner_slots]] = owner_slots
            if not len(owner_slots):
                del self._tables[number]
        self._latest = {table.owner[:2]: table for table in self._tables.values()}

    # --- slabs and owners

    def wants(self, block_bytes: int, count: int) -> list[int]:
        """Return the sizes in bytes of the slabs to allocate to get `count` free slots."""
        missing, room = count - len(self.pool(block_bytes).free), self.budget - self.allocated
        sizes: list[int] = []
        while missing > 0 and (nbytes := self._slab_bytes(block_bytes, room)):
            sizes.append(nbytes)
            missing, room = missing - nbytes // block_bytes, room - nbytes - ALIGNMENT
        return sizes

    def _slab_bytes(self, block_bytes: int, room: int) -> int:
        """Return the bytes of the next slab, at most `room` with alignment; 0 if no block fits."""
        slots = slab_slots(block_bytes, self.budget, self.least_slab)
        return max(0, min((room - ALIGNMENT) // block_bytes, slots)) * block_bytes

    def add_slab(self, block_bytes: int, memory: torch.Tensor) -> None:
        """Add memory, uint8 `[nbytes]`, as free slots for blocks of a size, if it fits in the budget."""
        if self.allocated + memory.numel() + ALIGNMENT <= self.budget:
            slab = memory.view(-1, block_bytes)
            self.pool(block_bytes).add_slab(slab)
            self.allocated += memory.numel() + ALIGNMENT
            if self._added is not None:
                self._added(slab)

    def stay(self, error: Exception) -> None:
        """Stop the growth of the tier for `RETRY_SECONDS` after a failed allocation."""
        level = logging.DEBUG if self._limited_until else logging.WARNING  # the first failure is a warning
        logger.log(level, "no memory for more blocks (%s), so the %s tier keeps its size for now", error, self.name)
        self._size_limit, self._limited_until = self.allocated, time.monotonic() + RETRY_SECONDS

    def _grow(self, pool: SlotPool, count: int) -> None:
        """Add slabs until `count` slots are free. Beyond the budget, take memory from less recently used pools."""
        while len(pool.free) < count:
            if nbytes := self._slab_bytes(pool.block_bytes, self.budget - self.allocated):
                try:
                    memory = self.allocate(nbytes)
                except NO_MEMORY as error:
                    self.stay(error)
                else:
                    self.add_slab(pool.block_bytes, memory)
            elif not self._take_from_others(pool):
                return

    def _take_from_others(self, pool: SlotPool) -> bool:
        """Free the least recently used slab of another pool and return True.

        Return False if this pool has an evictable block that was used less recently, if all slabs have pins, or if the
        current fetch uses all of them.
        """
        other_pools = [
            (newest, size, index)
            for size, candidate in self._pools.items()
            for index, newest in enumerate(candidate.newest)
            if candidate is not pool and candidate.slabs[index] is not None
        ]
        unpinned = (
            (newest, self._pools[size], index)
            for newest, size, index in sorted(other_pools)
            if not self._pools[size].pins[self._pools[size].slots_of(index)].any()
        )
        if (victim_slab := next(unpinned, None)) is None:
            return False
        newest, victim, index = victim_slab
        own_slabs = [pool.slots_of(own) for own, memory in enumerate(pool.slabs) if memory is not None]
        if own_slabs and newest >= self.clock:
            return False
        if any((pool.is_evictable[own] & (pool.last_used[own] <= newest)).any() for own in own_slabs):
            return False
        slots = victim.slots_of(index)
        self._evict(victim, slots[victim.owner[slots] >= 0])
        self._give_back(victim, index)
        return True

    def _give_back(self, pool: SlotPool, index: int) -> None:
        self.allocated -= (pool.starts[index + 1] - pool.starts[index]) * pool.block_bytes + ALIGNMENT
        pool.drop_slab(index)

    def _evict(self, pool: SlotPool, slots: np.ndarray) -> None:
        slots = np.sort(slots)
        if self._on_evict is not None:
            for table, of_owner in self._tables_of(pool, slots):
                owner_slots = slots[of_owner]
                owner_slots = owner_slots[np.argsort(pool.chunk[owner_slots])]
                blocks = pool.blocks(owner_slots, pool.chunk[owner_slots])
                self._on_evict(table.owner, len(table.slots), blocks, pool.usage(owner_slots))
        self.evicted += len(slots)
        self.discard(pool, slots)

    def _add_table(self, owner: Owner, pool: SlotPool, chunk_count: int) -> _Table:
        if (old_table := self._latest.get(owner[:2])) is not None:
            self._forget_all(old_table)  # the segment was rewritten
        table = _Table(owner, self._next_number, pool, np.full(chunk_count, -1, np.int64))
        self._next_number += 1
        self._tables[table.number] = self._latest[owner[:2]] = table
        return table

    def _forget_all(self, table: _Table) -> None:
        pool, slots = table.pool, table.slots[table.slots >= 0]
        in_use = pool.pins[slots] > 0
        self._part(pool, slots[in_use])
        pool.owner[slots[in_use]] = ORPHANED
        self.discard(pool, slots[~in_use])

    def _part(self, pool: SlotPool, slots: np.ndarray) -> None:
        """Remove the blocks of slots from the lookup tables."""
        for table, of_owner in self._tables_of(pool, slots):
            table.slots[pool.chunk[slots[of_owner]]] = -1
            if not (table.slots >= 0).any():
                del self._tables[table.number], self._latest[table.owner[:2]]

    def _tables_of(self, pool: SlotPool, slots: np.ndarray) -> Iterator[tuple[_Table, np.ndarray]]:
        """Yield each table with blocks in these slots, and a mask of its blocks, bool `[len(slots)]`."""
        owners = pool.owner[slots]
        for number in np.unique(owners[owners >= 0]).tolist():
            yield self._tables[number], owners == number
