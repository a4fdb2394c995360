"""Locations of blocks in device memory, host memory and on disk, and transfers to the compute device.

The tiers are exclusive: a block that is copied to the device tier loses its host slot, and a block that is evicted from
the device moves to the host. A block that is read from disk stays in a tier if the policy keeps it. A block without a
slot in the device tier passes through the staging area and stays on the host. A block without any slot uses memory that
is allocated for its request.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np

from ..errors import IntegrityError, StoreClosedError
from ..store.lazy import torch
from ..store.segment import read_batch
from .collector import StatsCollector
from .device import DeviceMemory, DoneEvent
from .handles import BlockHandle, BlockRequest, FetchedBlocks, LateCheck
from .pool import Tier
from .scores import Owner
from .slabs import RESERVED, Blocks, SlotPool
from .tier_set import TierSet


class Residency(TierSet):
    """The tiers of one store, and the transfers of blocks to and between them. See `TierSet` for the arguments."""

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

        Raises StoreClosedError in a process forked after the store was opened.
        """
        if os.getpid() != self._pid:  # it has neither the threads, nor locks that other threads held
            raise StoreClosedError("the store was opened before this process was forked; open it again")
        handle = BlockHandle(requests)
        try:
            with self._lock, self._guard:
                self.prepare(device)
                handle.gpu = self._gpu(device)
                self._tick()  # slots of released pins are free from here on
                self._pins.await_moves_down(None if handle.gpu is None else handle.gpu.stream)
                self._pin_requested(handle, collector, ahead, later)
                needs = self._needs(handle)
                slabs = self._missing_slabs(needs) if needs else []
                pending_read = None if slabs else self._begin(handle, collector)
            if slabs:
                self._make_slabs(slabs)
                with self._lock, self._guard:
                    pending_read = self._begin(handle, collector)
            if pending_read is None:
                handle.event.set()
            else:
                self._read_worker.do(pending_read)
        except BaseException:  # including Ctrl-C: the caller gets no handle to release
            handle.pin.release_event = DoneEvent()
            self.release(handle)
            raise
        return handle

    @contextmanager
    def fetched(self, request: BlockRequest, device: torch.device, collector: StatsCollector) -> Iterator[BlockHandle]:
        """Fetch blocks within the budgets, and hold them while the context lasts. Errors are those of a handle."""
        handle = self.fetch([request], device, collector, ahead=True)
        try:
            handle.wait()
            self.confirm(handle)
            yield handle
        finally:
            self.release(handle)

    def _pin_requested(
        self,
        handle: BlockHandle,
        collector: StatsCollector,
        ahead: bool,
        later: Iterable[BlockRequest],
    ) -> None:
        """Pin the requested blocks that are already in memory. The others are to be read from disk."""
        pin, gpu = handle.pin, handle.gpu
        pin.stream = None if gpu is None else gpu.stream
        self._pins.add(pin)
        for fetched in handle.fetched if ahead else ():
            self._limit_to_budgets(fetched, gpu)
        for fetched in handle.fetched:
            fetched.from_disk = fetched.chunks  # until a tier is found to hold them
        tiers = [self.host] if gpu is None else [gpu.tier, self.host]
        for tier in tiers:
            self._pin_blocks(tier, handle, collector)  # before slots are acquired, which may evict blocks
        if any(len(fetched.from_disk) for fetched in handle.fetched):
            for tier, request in itertools.product(tiers, later):
                owner = request.reader.owners[request.block_group]
                if (found := tier.find(owner, request.chunks)) is not None:
                    pool, slots, _ = found
                    pool.pin(slots)
                    pin.slots.append((tier, pool, slots))

    def _needs(self, handle: BlockHandle) -> Counter[tuple[Tier, int]]:
        """Return how many slots a fetch may take, by tier and block size, after blocks in memory are pinned."""
        gpu, needs = handle.gpu, Counter[tuple[Tier, int]]()
        for fetched in handle.fetched:
            if fetched.request.reader.gone:  # no tier keeps blocks of a deleted segment
                continue
            num_reads, size = len(fetched.from_disk), fetched.block_bytes
            if gpu is not None and (num_uploads := num_reads + sum(map(len, fetched.host_blocks))):
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
        self._reserve_slots(handle)
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
                collector.looked_up("disk", found_count, lost_count, found_count * fetched.block_bytes)
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
            self.release(handle)

    def admit(self, owner: Owner, blocks: torch.Tensor) -> None:
        """Insert computed blocks, uint8 `[chunks, block_bytes]` on the CPU, into the host tier if they fit."""
        count, block_bytes = blocks.shape
        if count * block_bytes > self.host.budget:
            return
        chunks = np.arange(count)
        with self._lock, self._guard:
            slabs = self._missing_slabs({(self.host, block_bytes): count})
        self._make_slabs(slabs)
        handle = BlockHandle(())  # internal handle that pins the slots while they are filled
        try:
            with self._lock, self._guard:
                self._tick()
                missing_chunks = chunks[self.host.lookup(owner, chunks) < 0]
                self._pins.add(handle.pin)
                (targets,) = self._reserve(self.host, block_bytes, [(None, missing_chunks)], handle.pin)
            for first, memory in targets.runs():
                memory.copy_(blocks[first : first + len(memory)])
            with self._lock, self._guard:
                for tier, pool, slots in handle.pin.slots:
                    new_slots = slots[pool.owner[slots] == RESERVED]
                    tier.insert(pool, new_slots, owner, pool.chunk[new_slots], count)
        finally:  # slots that were not filled become free again
            self.release(handle)

    # --- steps of a fetch, under the lock

    def _limit_to_budgets(self, fetched: FetchedBlocks, gpu: DeviceMemory | None) -> None:
        """Drop requested chunks that exceed the budget, uncached chunks first."""
        owner, size, chunks = fetched.owner, fetched.block_bytes, fetched.chunks
        targets = [self.host] if gpu is None else [gpu.tier, gpu.staging]
        in_tier = targets[0].lookup(owner, chunks) >= 0
        missing_chunks = chunks[~in_tier]
        if gpu is not None and not self._direct:  # blocks from disk pass through the host
            disk_indices = np.flatnonzero(self.host.lookup(owner, missing_chunks) < 0)
            host_room = max(0, self.host.room(size) - (len(missing_chunks) - len(disk_indices)))
            missing_chunks = np.delete(missing_chunks, disk_indices[host_room:])
        room = max(0, sum(tier.room(size) for tier in targets) - int(in_tier.sum()))
        fetched.chunks = np.sort(np.concatenate([chunks[in_tier], missing_chunks[:room]]))

    def _pin_blocks(self, tier: Tier, handle: BlockHandle, collector: StatsCollector) -> None:
        """Pin the blocks that `tier` holds of the chunks that no earlier tier holds."""
        num_found = num_missing = nbytes = 0
        locations = [tier.find(fetched.owner, fetched.from_disk) for fetched in handle.fetched]
        for fetched, location in zip(handle.fetched, locations, strict=True):
            chunks = fetched.from_disk
            if location is not None:
                pool, slots, in_tier = location
                pool.pin(slots)
                pool.use(slots, tier.clock)
                handle.pin.slots.append((tier, pool, slots))
                blocks = fetched.host_blocks if tier is self.host else fetched.device_blocks
                blocks.append(pool.blocks(slots, chunks[in_tier]))
                fetched.from_disk = chunks[~in_tier]
                num_found, nbytes = num_found + len(slots), nbytes + len(slots) * fetched.block_bytes
            num_missing += len(fetched.from_disk)
        collector.looked_up(tier.name, num_found, num_missing, nbytes)

    def _reserve_slots(self, handle: BlockHandle) -> None:
        """Reserve slots, or allocate memory, for the blocks that are read from disk."""
        pin, gpu = handle.pin, handle.gpu
        batches: dict[tuple[int, bool], list[tuple[FetchedBlocks, np.ndarray]]] = {}
        for fetched in handle.fetched:
            if len(fetched.from_disk):
                key = fetched.block_bytes, fetched.request.reader.gone
                batches.setdefault(key, []).append((fetched, fetched.from_disk))
        for (size, is_deleted), batch in batches.items():  # a deleted segment is not looked up again
            if gpu is not None and self._direct and not is_deleted:
                tier_blocks = self._reserve(gpu.tier, size, batch, pin)
                rests = [(None, _without(chunks, room)) for (_, chunks), room in zip(batch, tier_blocks, strict=True)]
                staged_blocks = self._reserve(gpu.staging, size, rests, pin)
                for (fetched, _), room, staged in zip(batch, tier_blocks, staged_blocks, strict=True):
                    fetched.staged_blocks = staged
                    fetched.device_blocks.extend((room, staged))
                    fetched.direct_runs = [*room.runs(), *staged.runs()]
                batch = [
                    (fetched, _without(part, staged))
                    for (fetched, _), (_, part), staged in zip(batch, rests, staged_blocks, strict=True)
                ]
            if not is_deleted:
                reserved_blocks = self._reserve(self.host, size, batch, pin)
            for number, (fetched, chunks) in enumerate(batch):
                host_blocks = [] if is_deleted else [reserved_blocks[number]]
                host_blocks.extend(self.host.own_memory(_without(chunks, *host_blocks), size))
                fetched.host_blocks.extend(host_blocks)
                fetched.host_runs.extend(run for blocks in host_blocks for run in blocks.runs())

    def _arrive(self, handle: BlockHandle) -> None:
        """Hand over a fetch whose blocks are all in memory."""
        pin, gpu = handle.pin, handle.gpu
        if gpu is not None:
            self._move_up(handle, gpu)
        for fetched in handle.fetched:
            self._insert(fetched, handle)
        if pin.stream is not None:  # also after copies of earlier handles to the same slots
            pin.copied = pin.stream.copied()
        for fetched in handle.fetched:
            if gpu is not None and len(fetched.staged_blocks):
                keep_staged = partial(self._keep_staged, fetched, gpu, fetched.staged_blocks)
                if pin.check is None:
                    keep_staged()
                else:
                    pin.on_verified.append(keep_staged)
            fetched.locate(fetched.host_blocks if gpu is None else fetched.device_blocks)

    def _insert(self, fetched: FetchedBlocks, handle: BlockHandle) -> None:
        """Insert the blocks of a request that were read, or copied to the device, into the tiers that keep them."""
        for tier, pool, slots in fetched.reserved_slots if not fetched.request.reader.gone else ():
            new_slots = slots[pool.owner[slots] == RESERVED]
            if tier is self.host:  # exclusive tiers: slots of moved blocks stay reserved until the release
                new_slots = new_slots[~np.isin(pool.chunk[new_slots], fetched.moved)]
            elif handle.pin.check is not None:
                host_chunks = Blocks.join(fetched.host_blocks).chunks
                is_direct = np.isin(pool.chunk[new_slots], host_chunks, invert=True)
                handle.pin.on_verified.append(partial(self._enter, tier, pool, new_slots[is_direct], fetched))
                new_slots = new_slots[~is_direct]
            self._enter(tier, pool, new_slots, fetched)

    @staticmethod
    def _enter(tier: Tier, pool: SlotPool, slots: np.ndarray, fetched: FetchedBlocks) -> None:
        """Insert the blocks in these slots into the tier, so that other requests find them."""
        slots = slots[pool.owner[slots] == RESERVED]
        if len(slots) and not fetched.request.reader.gone:
            tier.insert(pool, slots, fetched.owner, pool.chunk[slots], fetched.num_chunks)

    # --- between host and device

    def _move_up(self, handle: BlockHandle, gpu: DeviceMemory) -> None:
        """Copy the blocks that are on the host to the device, those of one size together, on the side stream."""
        batches: dict[int, list[tuple[FetchedBlocks, Blocks]]] = {}
        for fetched in handle.fetched:
            if len(host_blocks := Blocks.join(fetched.host_blocks)):
                batches.setdefault(fetched.block_bytes, []).append((fetched, host_blocks))
        for size, batch in batches.items():
            sources = [host_blocks for _, host_blocks in batch]
            requests = [(fetched, host_blocks.chunks) for fetched, host_blocks in batch]
            places = [[blocks] for blocks in self._reserve(gpu.tier, size, requests, handle.pin)]
            rests = []
            for (fetched, chunks), (kept_blocks,) in zip(requests, places, strict=True):
                fetched.moved = kept_blocks.chunks
                rests.append(_without(chunks, kept_blocks))
            for tier in (gpu.staging, gpu.tier):  # the tier temporarily, if the staging area is full
                reserved_blocks = self._reserve(tier, size, [(None, part) for part in rests], handle.pin)
                for number, blocks in enumerate(reserved_blocks):
                    places[number].append(blocks)
                    rests[number] = rests[number][len(blocks) :]
            targets = [
                Blocks.join([*parts, *gpu.tier.own_memory(part, size)])
                for parts, part in zip(places, rests, strict=True)
            ]
            upload = gpu.copy if self._pins.are_moving_down() else gpu.upload
            upload(Blocks.in_order(sources), Blocks.in_order(targets))
            for (fetched, _), target in zip(batch, targets, strict=True):
                fetched.device_blocks.append(target)
            handle.owns_memory |= any(map(len, rests))

    def _keep_staged(self, fetched: FetchedBlocks, gpu: DeviceMemory, blocks: Blocks) -> None:
        """Keep a host copy of blocks that were read from disk into the staging area."""
        if not fetched.request.reader.gone:
            usage = self._usage(fetched.owner, blocks.chunks)
            self._move_down(gpu.device, fetched.owner, fetched.num_chunks, blocks, usage)

    # --- release and repair

    def confirm(self, handle: BlockHandle) -> None:
        """Wait until direct reads are verified, also after the release, and insert their blocks.

        Raises IntegrityError if one is damaged.
        """
        pin = handle.pin
        if pin.check is None or pin.check.is_confirmed:
            return
        try:
            pin.check.confirm()
        except IntegrityError as error:
            readers = (fetched.request.reader for fetched in handle.fetched)
            handle.failed = next(reader for reader in readers if reader.caused(error))
            raise
        with self._lock, self._guard:
            pin.keep_checked()

    def release(self, handle: BlockHandle) -> None:
        """Release a block handle, also of a failed fetch, after the last use of its blocks.

        Its slots are unpinned after the device work that is queued so far.
        """
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
            self._free_idle(self._pins.reap())


def _without(chunks: np.ndarray, *excluded_blocks: Blocks) -> np.ndarray:
    """Return the ascending `chunks` without those of `excluded_blocks`, which are among them."""
    for blocks in filter(len, excluded_blocks):
        chunks = np.setdiff1d(chunks, blocks.chunks, assume_unique=True) if len(blocks) < len(chunks) else chunks[:0]
    return chunks
