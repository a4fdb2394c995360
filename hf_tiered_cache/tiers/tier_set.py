"""All tiers of a store: where blocks are, slots for new ones, eviction to the host, and repair."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from ..store.lazy import torch
from ..store.threads import RepairGuard, Worker
from .device import STAGING_BYTES, DeviceMemory, DoneEvent, HostMemory, numbered
from .handles import FetchedBlocks, Pin, Pins
from .index_cache import IndexCache
from .pool import Tier, slab_slots
from .scores import Attention, Owner, ScoreTable, Usage, make_policy
from .slabs import NO_BLOCKS, NO_MEMORY, ORPHANED, RESERVED, Blocks, SlotPool


class TierSet:
    """Tiers of one store, the pins on their slots, and the lock that guards both.

    Args:
        host_budget: Bytes of host memory for blocks.
        device_budget: Bytes for blocks on each device.
        policy: Name of the eviction policy of the tiers.
        device_types: Types of device with their own tier; for others the host tier is the device tier.
        direct: Whether the engine reads from disk directly to device memory (GPUDirect Storage).
        index_budget: Bytes for indexes of keys that stay in memory for selection.
        staging_budget: Bytes of the staging area on each device, in addition to `device_budget`.
        register: Called with each new slab of device memory, before the engine reads into it.
    """

    def __init__(
        self,
        host_budget: int,
        device_budget: int = 0,
        policy: str = "lru",
        *,
        device_types: frozenset[str] = frozenset({"cuda"}),
        direct: bool = False,
        index_budget: int = 256 << 20,
        staging_budget: int = STAGING_BYTES,
        register: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.index_cache = IndexCache(index_budget)
        self._policy = make_policy(policy)
        self.scores = ScoreTable(self._policy.learn)
        self._host_memory = HostMemory()
        self.host = Tier(
            "host",
            host_budget,
            self._policy,
            self._host_memory.allocate,
            scores=self.scores,
            allocate_own=self._host_memory.allocate_own,
        )
        self.tiers = [self.host]
        """The host tier, and tier and staging area of each device used so far."""
        self.device_budget, self.staging_budget = device_budget, staging_budget
        self._direct, self._device_types = direct, device_types
        self._register = register
        self._gpus: dict[torch.device, DeviceMemory] = {}
        self._pins = Pins()
        self._lock = threading.Lock()
        self._guard = RepairGuard(self._repair)
        self._clock = 0
        self._pid = os.getpid()
        self._read_worker = Worker()  # a read interrupted while starting could not be undone
        self._slab_worker: Worker | None = None
        self._allocates_ahead = self._is_allocating = False
        """True if a worker thread allocates one slab of the host tier in advance; and while it does."""

    def prepare(self, device: torch.device) -> None:
        """Page-lock the host memory that is allocated from now on, if a model on `device` needs this."""
        if device.type == "cuda" and self._host_memory.gpu is None:
            self._allocates_ahead = True  # page-locking takes milliseconds
            self._host_memory.gpu = numbered(device)

    def note_attention(self, noted: Iterable[Attention]) -> None:
        """Record that a selector chose chunks."""
        with self._lock, self._guard:
            changes = self.scores.note(noted)
            for tier in self.tiers:
                tier.rescore(changes)

    def num_cached(self, owner: Owner, chunks: np.ndarray) -> int:
        """Return how many of these chunks of a KV cache group are in memory, in the tiers of all devices."""
        with self._lock, self._guard:
            return sum(int((tier.lookup(owner, chunks) >= 0).sum()) for tier in self.tiers)

    def find(self, owner: Owner, chunks: np.ndarray, device: torch.device) -> dict[str, np.ndarray]:
        """Return chunks of a KV cache group, int64 ascending, by the tier for `device` that holds them, or "disk"."""
        with self._lock, self._guard:
            chunks_by_tier = {}
            gpu = self._gpus.get(numbered(device))
            for tier in [self.host] if gpu is None else [gpu.tier, self.host]:
                in_tier = tier.lookup(owner, chunks) >= 0
                chunks_by_tier[tier.name] = chunks[in_tier]
                chunks = chunks[~in_tier]
            return chunks_by_tier | {"disk": chunks}

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments: their blocks, pinned or not, their scores and their indexes."""
        self.scores.forget(segments)
        self.index_cache.forget(segments)
        with self._lock, self._guard:
            for tier in self.tiers:
                tier.forget(segments)
            self._free_idle(self._pins.reap())

    def segments(self) -> set[str]:
        """Return the ids of segments with blocks or indexes in memory."""
        with self._lock, self._guard:
            return {segment for tier in self.tiers for segment in tier.segments()} | self.index_cache.segments()

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes allocated on all devices, staging areas included, and their limit."""
        allocated_bytes = sum(gpu.tier.allocated + gpu.staging.allocated for gpu in self._gpus.values())
        return allocated_bytes, max(1, len(self._gpus)) * self.device_budget + len(self._gpus) * self.staging_budget

    @property
    def evicted(self) -> int:
        return sum(tier.evicted for tier in self.tiers)

    def clear(self) -> None:
        """Forget all blocks and indexes and free the memory. Slabs with pinned slots are kept while the store is."""
        with self._lock, self._guard:
            self._pins.order_work()
            self._free_idle(self._pins.reap())
            for tier in self.tiers:
                tier.clear()
        self.index_cache.forget()

    # --- slabs, allocated outside the lock that all requests share, since page-locking takes milliseconds

    def _missing_slabs(self, needs: Mapping[tuple[Tier, int], int]) -> list[tuple[Tier, int, int]]:
        """Return tier, block size and bytes of each slab that is needed and not allocated yet, within the budgets.

        `needs` is the number of slots that will be acquired, by tier and block size in bytes. This may also order a
        slab in advance. The caller holds the lock.
        """
        slabs: list[tuple[Tier, int, int]] = []
        for (tier, size), count in needs.items():
            sizes = tier.wants(size, count)
            slabs.extend((tier, size, nbytes) for nbytes in sizes)
            if tier is self.host and self._allocates_ahead and not self._is_allocating:
                next_sizes = tier.wants(size, count + slab_slots(size, tier.budget) // 2)[len(sizes) :]
                if next_sizes:
                    self._slab_worker = self._slab_worker or Worker()
                    self._is_allocating = True
                    self._slab_worker.do(partial(self._make_ahead, (tier, size, next_sizes[0])))
        return slabs

    def _make_slabs(self, slabs: Iterable[tuple[Tier, int, int]]) -> None:
        """Allocate slabs. The caller does not hold the lock.

        If an allocation fails, its tier stops growing for a while.
        """
        for tier, size, nbytes in slabs:
            try:
                memory = tier.allocate(nbytes)
            except NO_MEMORY as error:
                with self._lock, self._guard:
                    tier.stay(error)
            else:
                with self._lock, self._guard:
                    tier.add_slab(size, memory)

    def _make_ahead(self, slab: tuple[Tier, int, int]) -> None:
        try:
            self._make_slabs([slab])
        finally:
            self._is_allocating = False

    # --- under the lock

    def _gpu(self, device: torch.device) -> DeviceMemory | None:
        """Return the memory of `device`, created on first use; None if the host tier is the device tier."""
        if device.type not in self._device_types:
            return None
        device = numbered(device)
        if device not in self._gpus:
            gpu = DeviceMemory(
                device,
                self.device_budget,
                self.staging_budget,
                self._policy,
                self.scores,
                partial(self._move_down, device),
                self._register,
                self._direct,
            )
            self.tiers += [gpu.tier, gpu.staging]
            self._gpus[device] = gpu
        return self._gpus[device]

    def _tick(self) -> None:
        self._clock += 1
        for tier in self.tiers:
            tier.clock = self._clock
        if unpinned := self._pins.reap():
            self._free_idle(unpinned)

    def _reserve(
        self,
        tier: Tier,
        block_bytes: int,
        requests: Sequence[tuple[FetchedBlocks | None, np.ndarray]],
        pin: Pin,
        arriving: Usage | None = None,
    ) -> list[Blocks]:
        """Reserve slots for chunks of several requests, int64 ascending, for a pin, as many as `tier` has room for.

        The first chunks of the first requests get them. With `FetchedBlocks`, whose chunks enter the tier on arrival,
        or the usage of `arriving` chunks, only chunks that the policy keeps get slots.
        """
        chunk_sets = [chunks for _, chunks in requests]
        if not tier.budget or not any(map(len, chunk_sets)):
            return [NO_BLOCKS] * len(requests)
        usages = [self._usage(fetched.owner, chunks) for fetched, chunks in requests if fetched is not None]
        all_chunks = np.concatenate(chunk_sets)
        pool, slots, indices = tier.acquire(block_bytes, len(all_chunks), Usage.join(usages) if usages else arriving)
        if len(slots):
            pool.chunk[slots] = all_chunks[indices]
            pin.slots.append((tier, pool, slots))
        reserved = []
        bounds = indices.searchsorted(np.cumsum([0, *map(len, chunk_sets)])).tolist()
        for (fetched, _), (start, stop) in zip(requests, pairwise(bounds), strict=True):
            if fetched is not None and start < stop:
                fetched.reserved_slots.append((tier, pool, slots[start:stop]))
            chunks = all_chunks[indices[start:stop]]
            reserved.append(pool.blocks(slots[start:stop], chunks) if start < stop else NO_BLOCKS)
        return reserved

    def _usage(self, owner: Owner, chunks: np.ndarray) -> Usage:
        count, scores = len(chunks), self.scores.of(owner, chunks)
        return Usage(np.full(count, self._clock), np.ones(count, np.int64), *scores)

    def _move_down(self, device: torch.device, owner: Owner, count: int, blocks: Blocks, usage: Usage) -> None:
        """Copy blocks from a device to the host tier, as far as it has room and its policy keeps them."""
        if not self.host.budget:
            return
        gpu = self._gpus[device]
        pin = Pin(gpu.stream, release_event=DoneEvent(), moves_down=True)
        self._pins.add(pin)
        (targets,) = self._reserve(self.host, blocks.block_bytes, [(None, blocks.chunks)], pin, usage)
        if not len(targets):
            return
        gpu.copy(blocks[blocks.chunks.searchsorted(targets.chunks)], targets)
        pin.copied = gpu.stream.copied()
        _, pool, slots = pin.slots[0]
        self.host.insert(pool, slots, owner, pool.chunk[slots], count)

    def _repair(self) -> None:
        """Repair the tiers after an interrupted or failed change, from the pins and the slots of complete blocks."""
        for gpu in self._gpus.values():
            gpu.stream.copied().synchronize()
        for tier in self.tiers:
            tier.mend([(pool, slots) for pin in self._pins for holder, pool, slots in pin.slots if holder is tier])
        # blocks that moved to a device in that change
        self._free_idle((self.host, pool, np.flatnonzero(pool.is_evictable)) for pool in self.host.pools())

    def _free_idle(self, unpinned: Iterable[tuple[Tier, SlotPool, np.ndarray]]) -> None:
        """Free those of unpinned slots that are reserved or orphaned, or whose block is now on a device."""
        for tier, pool, slots in unpinned:
            owners = pool.owner[slots]
            is_unused = (owners == RESERVED) | (owners == ORPHANED)
            if tier is self.host:
                for gpu in self._gpus.values():
                    is_unused |= tier.also_in(gpu.tier, pool, slots)
            if is_unused.any():
                tier.discard(pool, slots[is_unused])
