"""Locations of blocks in device memory, host memory and on disk, and transfers to the compute device.

The tiers are exclusive: a block that is copied to the device tier loses its host slot, and a block that is evicted from
the device moves to the host. A block that is read from disk stays in a tier if the policy keeps it. A block without a
slot in the device tier passes through the staging area and stays on the host. A block without any slot uses memory that
is allocated for its request.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from ..stats import StatsCollector
from ..store.lazy import torch
from ..store.segment import read_batch
from ..store.threads import RepairGuard, Worker
from .device import STAGING_BYTES, DeviceMemory, DoneEvent, HostMemory, numbered
from .handles import BlockHandle, BlockRequest, FetchedBlocks, LateCheck, Pin, Pins
from .index_cache import IndexCache
from .pool import Tier, slab_slots
from .scores import Attention, Owner, ScoreTable, Usage, make_policy
from .slabs import NO_BLOCKS, NO_MEMORY, ORPHANED, RESERVED, Blocks, SlotPool


class Residency:
    """The tiers of one store, the pins on their slots, the lock that guards both, and the transfers of blocks.

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
        self._read_worker = Worker()  # a read interrupted while starting could not be undone
        self._slab_worker: Worker | None = None
        self._allocates_ahead = False
        """True if a worker thread allocates one slab of the host tier in advance."""

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
                for owner, chunks, scores in changes:
                    tier.rescore(owner, chunks, scores)

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
            self._pins.reap(self._unpin)

    def segments(self) -> set[str]:
        """Return the ids of segments with blocks or indexes in memory."""
        with self._lock, self._guard:
            return {segment for tier in self.tiers for segment in tier.segments()} | self.index_cache.segments()

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes allocated on all devices, staging areas included, and their limit."""
        allocated_bytes = sum(gpu.tier.nbytes + gpu.staging.nbytes for gpu in self._gpus.values())
        return allocated_bytes, max(1, len(self._gpus)) * self.device_budget + len(self._gpus) * self.staging_budget

    @property
    def evicted(self) -> int:
        return sum(tier.evicted for tier in self.tiers)

    def clear(self) -> None:
        """Forget all blocks and indexes and free the memory. Slabs with pinned slots are kept while the store is."""
        with self._lock, self._guard:
            self._pins.order_work()
            self._pins.reap(self._unpin)
            for tier in self.tiers:
                tier.clear()
        self.index_cache.clear()

    # --- fetching

    def fetch(
        self,
        requests: Sequence[BlockRequest],
        device: torch.device,
        collector: StatsCollector,
        ahead: bool = False,
        later: Iterable[BlockRequest] = (),
    ) -> BlockHandle:
        """Start to fetch blocks to `device`, with one submission for all disk reads. Does not wait for the blocks.

        A prefetch (`ahead`) drops blocks that exceed the budgets; otherwise memory is allocated for them. Blocks that
        the same pass requests `later` stay in memory until the release: without this, a prefix that does not fit evicts
        its own blocks before their turn, and reads them again.
        """
        self.prepare(device)
        handle = BlockHandle(requests, self.confirm, self.retire)
        try:
            with self._lock, self._guard:
                self._pin_requested(handle, device, collector, ahead, later)
                slabs = self._missing_slabs(self._needs(handle))
                read = None if slabs else self._begin(handle, collector)
            if slabs:
                self._make_slabs(slabs)
                with self._lock, self._guard:
                    read = self._begin(handle, collector)
            if read is None:
                handle.event.set()
            else:
                self._read_worker.do(read)
        except BaseException:  # including Ctrl-C: the caller gets no handle to release
            handle.pin.release_event = DoneEvent()
            self.retire(handle)
            raise
        return handle

    def _pin_requested(
        self,
        handle: BlockHandle,
        device: torch.device,
        collector: StatsCollector,
        ahead: bool,
        later: Iterable[BlockRequest],
    ) -> None:
        """Pin the requested blocks that are already in memory. The others are to be read from disk."""
        pin, gpu = handle.pin, self._gpu(device)
        handle.gpu = gpu
        self._tick(gpu)
        pin.stream = None if gpu is None else gpu.stream
        self._pins.add(pin)
        for fetched in handle.fetched if ahead else ():
            self._limit_to_budgets(fetched, gpu)
        self._pins.await_moves_down(pin.stream)
        for fetched in handle.fetched:
            fetched.from_disk = fetched.chunks  # until a tier is found to hold them
        tiers = [self.host] if gpu is None else [gpu.tier, self.host]
        for tier in tiers:
            self._pin_blocks(tier, handle, collector)  # before slots are acquired, which may evict blocks
        if any(len(fetched.from_disk) for fetched in handle.fetched):
            for tier, request in itertools.product(tiers, later):
                if (pinned := tier.pin(request.owner, request.chunks, is_use=False)) is not None:
                    pin.slots.append((tier, *pinned[:2]))

    def _needs(self, handle: BlockHandle) -> Counter[tuple[Tier, int]]:
        """Return how many slots a fetch may take, by tier and block size, after blocks in memory are pinned."""
        gpu, needs = handle.gpu, Counter[tuple[Tier, int]]()
        for fetched in handle.fetched:
            if fetched.request.reader.gone:  # no tier keeps blocks of a deleted segment
                continue
            num_reads, size = len(fetched.from_disk), fetched.request.block_bytes
            num_uploads = num_reads + sum(map(len, fetched.host_blocks))
            if gpu is not None and num_uploads:
                room, vacant = gpu.tier.room(size), gpu.tier.vacant(size)
                needs[gpu.tier, size] += num_uploads
                needs[gpu.staging, size] += max(0, num_uploads - room)
                needs[self.host, size] += max(0, min(num_uploads, room) - vacant)  # for blocks that the device evicts
                num_reads = max(0, num_reads - room) if self._direct else num_reads
            needs[self.host, size] += num_reads
        return +needs  # without zeros

    def _begin(self, handle: BlockHandle, collector: StatsCollector) -> Callable[[], None] | None:
        """Reserve slots for the blocks that are not in memory, and return a function that starts to read these blocks.

        Return None if all blocks are in memory and have arrived.
        """
        pin = handle.pin
        for fetched in handle.fetched:
            self._reserve_slots(fetched, handle)
        disk_fetches = [fetched for fetched in handle.fetched if fetched.host_runs or fetched.direct_runs]
        host_runs = [(*fetched.request[:2], fetched.host_runs) for fetched in disk_fetches]
        direct_runs = [(*fetched.request[:2], fetched.direct_runs) for fetched in disk_fetches if fetched.direct_runs]

        if not disk_fetches:
            self._arrive(handle)
            return None

        def read() -> None:
            """Start the reads; runs in the worker thread."""
            with self._lock:
                if pin.release_event is not None:  # released before the read began
                    handle.event.set()
                    return
                pin.reading = True
            collector.read_started()
            try:
                if pin.stream is not None and direct_runs:
                    pin.stream.copied().synchronize()  # direct reads ignore streams: let evictions finish
                read_future = read_batch(host_runs, direct_runs)
            except BaseException as error:  # for instance, the store was closed
                read_future = Future()
                read_future.set_exception(error.with_traceback(None))  # the traceback would reference this frame
            read_future.add_done_callback(on_read)

        def on_read(read_future: Future[int]) -> None:
            error = read_future.exception()
            collector.read_done(0 if error else read_future.result())
            for fetched in disk_fetches:
                count = len(fetched.from_disk)
                found_count, lost_count = (0, count) if error else (count, 0)
                collector.looked_up("disk", found_count, lost_count, found_count * fetched.request.block_bytes)
            try:
                unverified_runs = [run for run in direct_runs if run[0].verifies]
                if error is None and unverified_runs and pin.stream is not None:
                    pin.check = LateCheck(pin.stream, unverified_runs)
            except Exception as failure:  # no memory on the device
                error = failure
            self._finish(handle, error)

        return read

    def _finish(self, handle: BlockHandle, error: BaseException | None) -> None:
        """Finish a fetch that has read blocks, successful or failed, and wake the threads that wait for it."""
        try:
            with self._lock, self._guard:
                handle.pin.reading = False
                if error is None:
                    self._arrive(handle)
        except Exception as failure:
            error = failure.with_traceback(None)
        if error is not None:
            readers = (fetched.request.reader for fetched in handle.fetched)
            handle.failed = next((reader for reader in readers if reader.caused(error)), None)
        handle.event.set(error)
        if handle.pin.release_event is not None:  # released in the meantime
            self.retire(handle)

    def admit(self, owner: Owner, blocks: torch.Tensor) -> None:
        """Insert computed blocks, uint8 `[chunks, block_bytes]` on the CPU, into the host tier if they fit."""
        count, block_bytes = blocks.shape
        if count * block_bytes > self.host.budget:
            return
        chunks = np.arange(count)
        with self._lock, self._guard:
            slabs = self._missing_slabs({(self.host, block_bytes): count})
        self._make_slabs(slabs)
        handle = BlockHandle((), self.confirm, self.retire)  # internal handle that pins the slots while they are filled
        try:
            with self._lock, self._guard:
                self._tick(None)
                missing_chunks = chunks[self.host.lookup(owner, chunks) < 0]
                self._pins.add(handle.pin)
                targets = self._reserve(self.host, block_bytes, missing_chunks, handle.pin)
            for first, memory in targets.runs():
                memory.copy_(blocks[first : first + len(memory)])
            with self._lock, self._guard:
                for tier, pool, slots in handle.pin.slots:
                    new_slots = slots[pool.owner[slots] == RESERVED]
                    tier.insert(pool, new_slots, owner, pool.chunk[new_slots], count)
        finally:  # slots that were not filled become free again
            self.retire(handle)

    # --- slabs, allocated outside the lock that all requests share, since page-locking takes milliseconds

    def _missing_slabs(self, needs: Mapping[tuple[Tier, int], int]) -> list[tuple[Tier, int]]:
        """Return the tier and size in bytes of each slab that is needed and not allocated yet, within the budgets.

        `needs` is the number of slots that will be acquired, by tier and block size in bytes. This may also order a
        slab in advance. The caller holds the lock.
        """
        slabs: list[tuple[Tier, int]] = []
        for (tier, size), count in needs.items():
            sizes = tier.wants(size, count)
            slabs.extend((tier, nbytes) for nbytes in sizes)
            if tier is self.host and self._allocates_ahead and not tier.stock.is_ordered:
                next_sizes = tier.wants(size, count + slab_slots(size, tier.budget) // 2)[len(sizes) :]
                if next_sizes:
                    self._slab_worker = self._slab_worker or Worker()
                    tier.stock.is_ordered = True
                    self._slab_worker.do(partial(self._make_ahead, next_sizes[0]))
        return slabs

    def _make_slabs(self, slabs: Iterable[tuple[Tier, int]]) -> None:
        """Allocate slabs and put them in stock. The caller does not hold the lock.

        If an allocation fails, its tier stops growing for a while.
        """
        for tier, nbytes in slabs:
            try:
                memory = tier.allocate(nbytes)
            except NO_MEMORY as error:
                with self._lock, self._guard:
                    tier.stay(error)
            else:
                with self._lock, self._guard:
                    tier.put_in_stock(memory)

    def _make_ahead(self, nbytes: int) -> None:
        try:
            self._make_slabs([(self.host, nbytes)])
        finally:
            self.host.stock.is_ordered = False

    # --- steps of a fetch, under the lock

    def _limit_to_budgets(self, fetched: FetchedBlocks, gpu: DeviceMemory | None) -> None:
        """Drop requested chunks that exceed the budget, uncached chunks first."""
        owner, size, chunks = fetched.request.owner, fetched.request.block_bytes, fetched.chunks
        target = self.host if gpu is None else gpu.tier
        in_tier = target.lookup(owner, chunks) >= 0
        missing_chunks = chunks[~in_tier]
        if gpu is not None and not self._direct:  # blocks from disk pass through the host
            disk_indices = np.flatnonzero(self.host.lookup(owner, missing_chunks) < 0)
            host_room = max(0, self.host.room(size) - (len(missing_chunks) - len(disk_indices)))
            missing_chunks = np.delete(missing_chunks, disk_indices[host_room:])
        room = max(0, (target if gpu is None else gpu).room(size) - int(in_tier.sum()))
        fetched.chunks = np.sort(np.concatenate([chunks[in_tier], missing_chunks[:room]]))

    def _pin_blocks(self, tier: Tier, handle: BlockHandle, collector: StatsCollector) -> None:
        """Pin the blocks that `tier` holds of the chunks that no earlier tier holds."""
        num_found = num_missing = nbytes = 0
        pinned_slots = [tier.pin(fetched.request.owner, fetched.from_disk) for fetched in handle.fetched]
        for fetched, pinned in zip(handle.fetched, pinned_slots, strict=True):
            chunks = fetched.from_disk
            if pinned is not None:
                pool, slots, in_tier = pinned
                handle.pin.slots.append((tier, pool, slots))
                blocks = fetched.host_blocks if tier is self.host else fetched.device_blocks
                blocks.append(pool.blocks(slots, chunks[in_tier]))
                fetched.from_disk = chunks[~in_tier]
                num_found, nbytes = num_found + len(slots), nbytes + len(slots) * fetched.request.block_bytes
            num_missing += len(fetched.from_disk)
        collector.looked_up(tier.name, num_found, num_missing, nbytes)

    def _reserve_slots(self, fetched: FetchedBlocks, handle: BlockHandle) -> None:
        """Reserve slots, or allocate memory, for the blocks that are read from disk."""
        pin, gpu, size, chunks = handle.pin, handle.gpu, fetched.request.block_bytes, fetched.from_disk
        if not len(chunks):
            return
        is_deleted = fetched.request.reader.gone  # a deleted segment is not looked up again
        if gpu is not None and self._direct and not is_deleted:
            tier_blocks = self._reserve(gpu.tier, size, chunks, pin, fetched)
            chunks = _without(chunks, tier_blocks)
            fetched.staged_blocks = self._reserve(gpu.staging, size, chunks, pin)
            fetched.device_blocks.extend((tier_blocks, fetched.staged_blocks))
            fetched.direct_runs = [*tier_blocks.runs(), *fetched.staged_blocks.runs()]
            chunks = _without(chunks, fetched.staged_blocks)
        host_blocks = [] if is_deleted else [self._reserve(self.host, size, chunks, pin, fetched)]
        host_blocks.extend(self.host.own_memory(_without(chunks, *host_blocks), size))
        fetched.host_blocks.extend(host_blocks)
        fetched.host_runs.extend(run for blocks in host_blocks for run in blocks.runs())

    def _arrive(self, handle: BlockHandle) -> None:
        """Hand over a fetch whose blocks are all in memory."""
        pin, gpu = handle.pin, handle.gpu
        for fetched in handle.fetched:
            self._move_and_insert(fetched, handle)
        if pin.stream is not None:  # also after copies of earlier handles to the same slots
            pin.copied = pin.stream.copied()
        for fetched in handle.fetched:
            if gpu is not None and len(fetched.staged_blocks):
                keep_staged = partial(self._keep_staged, fetched.request, gpu, fetched.staged_blocks)
                if pin.check is None:
                    keep_staged()
                else:
                    pin.on_verified.append(keep_staged)
            fetched.locate(fetched.host_blocks if gpu is None else fetched.device_blocks)

    def _move_and_insert(self, fetched: FetchedBlocks, handle: BlockHandle) -> None:
        """Copy the blocks of a request to the device, and insert those that were read into the tiers that keep them."""
        request, host_chunks, uploaded_chunks = fetched.request, np.empty(0, np.int64), np.empty(0, np.int64)
        if handle.gpu is not None and len(host_blocks := Blocks.join(fetched.host_blocks)):
            host_chunks = host_blocks.chunks
            uploaded_chunks = self._move_up(fetched, host_blocks, handle.gpu, handle)
        for tier, pool, slots in fetched.reserved_slots if not request.reader.gone else ():
            new_slots = slots[pool.owner[slots] == RESERVED]
            if tier is self.host:  # exclusive tiers: slots of moved blocks stay reserved until the release
                new_slots = new_slots[~np.isin(pool.chunk[new_slots], uploaded_chunks)]
            elif handle.pin.check is not None:
                is_direct = np.isin(pool.chunk[new_slots], host_chunks, invert=True)
                handle.pin.on_verified.append(partial(self._enter, tier, pool, new_slots[is_direct], request))
                new_slots = new_slots[~is_direct]
            self._enter(tier, pool, new_slots, request)

    @staticmethod
    def _enter(tier: Tier, pool: SlotPool, slots: np.ndarray, request: BlockRequest) -> None:
        """Insert the blocks in these slots into the tier, so that other requests find them."""
        slots = slots[pool.owner[slots] == RESERVED]
        if len(slots) and not request.reader.gone:
            tier.insert(pool, slots, request.owner, pool.chunk[slots], request.num_chunks)

    def confirm(self, pin: Pin) -> None:
        """Wait until direct reads are verified, and insert their blocks. Raises IntegrityError if one is damaged."""
        if pin.check is not None:
            pin.check.confirm()
            with self._lock, self._guard:
                pin.keep_checked()

    def _tick(self, gpu: DeviceMemory | None) -> None:
        self._clock += 1
        for tier in [self.host] if gpu is None else [self.host, gpu.tier, gpu.staging]:
            tier.clock = self._clock
        self._pins.reap(self._unpin)

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

    def _reserve(
        self, tier: Tier, block_bytes: int, chunks: np.ndarray, pin: Pin, fetched: FetchedBlocks | None = None
    ) -> Blocks:
        """Reserve slots for the first of `chunks`, int64 ascending, as many as `tier` has room for, for a pin.

        With `fetched`, whose chunks enter the tier on arrival, only chunks that the policy keeps get slots.
        """
        if not len(chunks) or not tier.budget:
            return NO_BLOCKS
        if fetched is not None:
            chunks = chunks[tier.keeps(block_bytes, self._usage(fetched.request.owner, chunks))]
        pool, slots = tier.acquire(block_bytes, len(chunks))
        reserved_chunks = chunks[: len(slots)]
        if len(slots):
            pool.chunk[slots] = reserved_chunks
            pin.slots.append((tier, pool, slots))
            if fetched is not None:
                fetched.reserved_slots.append((tier, pool, slots))
        return pool.blocks(slots, reserved_chunks)

    def _usage(self, owner: Owner, chunks: np.ndarray) -> Usage:
        """Return the usage of arriving blocks."""
        scores = self.scores.of(owner, chunks)
        return Usage(np.full(len(chunks), self._clock), np.ones(len(chunks), np.int64), *scores)

    # --- between host and device

    def _move_up(
        self, fetched: FetchedBlocks, host_blocks: Blocks, gpu: DeviceMemory, handle: BlockHandle
    ) -> np.ndarray:
        """Copy blocks to the device on the side stream. Return the chunks that the device tier keeps."""
        size = fetched.request.block_bytes
        tier_blocks = self._reserve(gpu.tier, size, host_blocks.chunks, handle.pin, fetched)
        chunks = _without(host_blocks.chunks, tier_blocks)
        staging_blocks = self._reserve(gpu.staging, size, chunks, handle.pin)
        chunks = _without(chunks, staging_blocks)
        overflow_blocks = self._reserve(gpu.tier, size, chunks, handle.pin)  # temporary: the staging area is full
        chunks = _without(chunks, overflow_blocks)
        targets = Blocks.join([tier_blocks, staging_blocks, overflow_blocks, *gpu.tier.own_memory(chunks, size)])
        gpu.copy(host_blocks, targets)
        fetched.device_blocks.append(targets)
        handle.owns_memory |= len(chunks) > 0
        return tier_blocks.chunks

    def _keep_staged(self, request: BlockRequest, gpu: DeviceMemory, blocks: Blocks) -> None:
        """Keep a host copy of blocks that were read from disk into the staging area."""
        if not request.reader.gone:
            usage = self._usage(request.owner, blocks.chunks)
            self._move_down(gpu.device, request.owner, request.num_chunks, blocks, usage)

    def _move_down(self, device: torch.device, owner: Owner, count: int, blocks: Blocks, usage: Usage) -> None:
        """Copy blocks from a device to the host tier, as far as it has room and its policy keeps them."""
        if not self.host.budget:
            return
        size = blocks.block_bytes
        blocks = blocks[self.host.keeps(size, usage)]
        if not len(blocks):
            return
        gpu = self._gpus[device]
        pin = Pin(gpu.stream, release_event=DoneEvent(), moves_down=True)
        self._pins.add(pin)
        targets = self._reserve(self.host, size, blocks.chunks, pin)
        if not len(targets):
            return
        gpu.copy(blocks, targets)
        pin.copied = gpu.stream.copied()
        _, pool, slots = pin.slots[0]
        self.host.insert(pool, slots, owner, pool.chunk[slots], count)

    # --- release and repair

    def retire(self, handle: BlockHandle) -> None:
        """Release a block handle. Its slots are unpinned after the device work that is queued so far."""
        with self._lock, self._guard:
            if handle.pin.release_event is None:
                release_event = handle.pin.end()
                if handle.owns_memory and handle.pin.stream is not None:
                    # the allocator may reuse it on the side stream, which must not write before it was read
                    handle.pin.stream.await_computation(release_event)
            if handle.event.is_set or not handle.pin.reading:
                for fetched in handle.fetched:
                    fetched.locate(())
                handle.event.error = None  # a raised error keeps the frames of waiting threads alive, and their KV
            self._pins.reap(self._unpin)

    def _repair(self) -> None:
        """Repair the tiers after an interrupted or failed change, from the pins and the slots of complete blocks."""
        for gpu in self._gpus.values():
            gpu.stream.copied().synchronize()
        for tier in self.tiers:
            tier.mend(self._pins.in_tier(tier))
        for pool in self.host.pools():
            self._free_idle(self.host, pool, pool.evictable())  # blocks that moved to a device in that change

    def _unpin(self, tier: Tier, pool: SlotPool, slots: np.ndarray) -> None:
        """Unpin slots. Free reserved and orphaned ones, and host slots with a block that is now on a device."""
        pool.pins[slots] -= 1
        self._free_idle(tier, pool, slots[pool.pins[slots] == 0])

    def _free_idle(self, tier: Tier, pool: SlotPool, slots: np.ndarray) -> None:
        owners = pool.owner[slots]
        is_unused = (owners == RESERVED) | (owners == ORPHANED)
        if tier is self.host:
            for gpu in self._gpus.values():
                is_unused |= tier.also_in(gpu.tier, pool, slots)
        if is_unused.any():
            tier.discard(pool, slots[is_unused])


def _without(chunks: np.ndarray, *excluded_blocks: Blocks) -> np.ndarray:
    """Return the ascending `chunks` without those in `excluded_blocks`, ascending."""
    for blocks in excluded_blocks:
        chunks = np.setdiff1d(chunks, blocks.chunks, assume_unique=True)
    return chunks
