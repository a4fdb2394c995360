"""Locations of blocks in device memory, host memory and on disk, and transfers to the compute device.

The tiers are exclusive: a block that is copied to the device tier loses its host slot, and a block that is evicted from
the device moves to the host. A block that is read from disk stays in a tier if the policy keeps it. A block without a
slot in the device tier passes through the staging area and stays on the host. A block without any slot uses memory that
is allocated for its request.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from ..stats import StatsCollector
from ..store.engines import ReadReport
from ..store.interrupts import Apart, Step
from ..store.memory import aligned_bytes, page_locked
from ..store.segment import read_batch
from . import make_policy
from .device import STAGING_BYTES, DeviceMemory
from .handles import Arrival, BlockRequest, Hold, Holds, LateCheck, Lease, SlabMaker
from .index_cache import ResidentKeys
from .policy import Usage
from .pool import Tier
from .scores import Guesses, Owner, ScoreTable
from .slabs import ORPHANED, RESERVED, Blocks, SlotPool
from .streams import DoneEvent, copy_stream


class Residency:
    """The tiers of one store.

    Args:
        host_budget: bytes of host memory for blocks.
        device_budget: bytes for blocks on each device.
        policy: name of the eviction policy of the tiers.
        pin: whether host memory is page-locked.
        device_types: types of device with their own tier; for others the host tier is the device tier.
        direct: whether the engine reads from disk directly to device memory (GPUDirect Storage).
        index_budget: bytes for indexes of keys that stay in memory for selection.
        staging_budget: bytes of the staging area on each device, in addition to `device_budget`.
        register: called with each new slab of device memory, before the engine reads into it.
    """

    def __init__(
        self,
        host_budget: int,
        device_budget: int = 0,
        policy: str = "lru",
        *,
        pin: bool = False,
        device_types: frozenset[str] = frozenset({"cuda"}),
        direct: bool = False,
        index_budget: int = 256 << 20,
        staging_budget: int = STAGING_BYTES,
        register: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.resident = ResidentKeys(index_budget)
        self.guesses = Guesses()
        self.scores = ScoreTable(make_policy(policy).learn)
        self.host = Tier(
            "host",
            host_budget,
            make_policy(policy),
            page_locked if pin else aligned_bytes,
            scores=self.scores,
            allocate_own=partial(aligned_bytes, pin=pin),  # its allocator waits for copies before reuse
        )
        self.device_budget, self.staging_budget = device_budget, staging_budget
        self._policy, self._direct, self._device_types = policy, direct, device_types
        self._register = register
        self._gpus: dict[torch.device, DeviceMemory] = {}
        self._holds = Holds()
        self._lock = threading.Lock()
        self._step = Step(self._mend)
        self._clock = 0
        self._starting = Apart()  # a read interrupted while starting could not be undone
        self._slabs = SlabMaker(self._lock, self._step, self.host, ahead=pin)

    # --- fetching and inserting

    def fetch(
        self, requests: Sequence[BlockRequest], device: torch.device, collector: StatsCollector, ahead: bool = False
    ) -> Lease:
        """Start to fetch blocks to `device`, with one submission for all disk reads.

        Args:
            requests: the blocks to fetch, from segments of one store.
            device: the device where attention runs.
            collector: counts look-ups, bytes and time.
            ahead: whether this is a prefetch. A prefetch drops blocks that exceed the budgets; otherwise memory is
                allocated for them.

        Returns:
            A block handle. The call does not wait for the blocks.
        """
        lease = Lease(requests, self.confirm, self.retire)
        try:
            with self._lock, self._step:
                arrivals = self._find(lease, device, collector, ahead)
                lacking = self._lacking(arrivals)
                begun = None if lacking else self._begin(lease, arrivals, collector)
            if begun is None:
                self._slabs.make(lacking)
                with self._lock, self._step:
                    begun = self._begin(lease, arrivals, collector)
            read, arrive = begun
            if read is None:
                self._settle(lease, arrive)
            else:
                self._starting.do(read)
        except BaseException:  # including Ctrl-C: the caller gets no handle to release
            lease.hold.over = DoneEvent()
            self.retire(lease)
            raise
        return lease

    def _find(self, lease: Lease, device: torch.device, collector: StatsCollector, ahead: bool) -> list[Arrival]:
        """Pin the requested blocks that are already in memory, and create the pending fetches."""
        hold, gpu = lease.hold, self._gpu(device)
        self._tick(gpu)
        hold.stream = None if gpu is None else gpu.stream
        self._holds.add(hold)
        arrivals = [Arrival(leased, gpu) for leased in lease.leased]
        for each in arrivals if ahead else ():
            self._keep_within_budgets(each)
        self._holds.await_moves_down(hold.stream)
        for each in arrivals:  # before slots are acquired, which may evict blocks
            self._hold_found(each, hold, collector)
        return arrivals

    def _lacking(self, arrivals: Sequence[Arrival]) -> list[tuple[Tier, int]]:
        """Return the slabs to allocate, without the lock, before slots are acquired."""
        if not any(each.gpu is not None or len(each.leased.from_disk) for each in arrivals):
            return []
        return self._slabs.lacking(sum((each.needs(self.host, self._direct) for each in arrivals), Counter()))

    def _begin(
        self, lease: Lease, arrivals: Sequence[Arrival], collector: StatsCollector
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        """Reserve slots for the blocks that are not in memory.

        Returns:
            A function that starts to read these blocks, or None if there are none, and a function to call when all
            blocks are in memory.
        """
        hold = lease.hold
        for each in arrivals:
            self._take_slots(each, hold)
        from_disk = [each for each in arrivals if each.to_read or each.direct]
        through_host = [(*each.leased.request[:2], each.to_read) for each in from_disk]
        direct = [(*each.leased.request[:2], each.direct) for each in from_disk if each.direct]

        def arrive() -> None:
            for each in arrivals:
                self._arrive(each, lease)
            if hold.stream is not None:  # also after copies of earlier handles to the same slots
                hold.copied = hold.stream.copied()
            for each in arrivals:
                if hold.check is None:
                    self._keep_staged(each)
                else:
                    hold.when_whole.append(partial(self._keep_staged, each))

        def read() -> None:
            """Start the reads; runs in the worker thread."""
            with self._lock:
                if hold.over is not None:  # released before the read began
                    lease.latch.open()
                    return
                hold.reading = True
            collector.read_started()
            try:
                if hold.stream is not None and direct:
                    hold.stream.copied().synchronize()  # direct reads ignore streams: let evictions finish
                reading = read_batch(through_host, direct)
            except BaseException as error:  # for instance, the store was closed
                reading = Future()
                reading.set_exception(error.with_traceback(None))  # the traceback would reference this frame
            reading.add_done_callback(done)

        def done(reading: Future[ReadReport]) -> None:
            error = reading.exception()
            collector.read_done(0 if error else reading.result().nbytes)
            for each in from_disk:
                count = len(each.leased.from_disk)
                found, lost = (0, count) if error else (count, 0)
                collector.looked_up("disk", found, lost, each.block_bytes)
            try:
                unseen = [each for each in direct if each[0].verifies]
                if error is None and unseen and hold.stream is not None:
                    hold.check = LateCheck(hold.stream, unseen)
            except Exception as caught:  # no memory on the device
                error = caught
            self._settle(lease, arrive, error)

        return read if from_disk else None, arrive

    def _settle(self, lease: Lease, arrive: Callable[[], None], error: BaseException | None = None) -> None:
        """Finish a fetch, successful or failed, and wake the threads that wait for it."""
        try:
            with self._lock, self._step:
                lease.hold.reading = False
                if error is None:
                    arrive()
        except Exception as caught:
            error = caught.with_traceback(None)
        if error is not None:
            readers = (leased.request.reader for leased in lease.leased)
            lease.failed = next((reader for reader in readers if reader.caused(error)), None)
        lease.latch.open(error)
        if lease.hold.over is not None:  # released in the meantime
            self.retire(lease)

    def admit(self, owner: Owner, blocks: torch.Tensor) -> None:
        """Insert computed blocks, uint8 `[chunks, block_bytes]` on the CPU, into the host tier if they fit."""
        count, block_bytes = blocks.shape
        if count * block_bytes > self.host.budget:
            return
        chunks = np.arange(count)
        with self._lock, self._step:
            lacking = self._slabs.lacking(Counter({(self.host, block_bytes): count}))
        self._slabs.make(lacking)
        lease = Lease((), self.confirm, self.retire)  # internal handle that pins the slots while they are filled
        try:
            with self._lock, self._step:
                self._tick(None)
                wanted = chunks[self.host.lookup(owner, chunks) < 0]
                self._holds.add(lease.hold)
                targets = self._reserve(self.host, block_bytes, wanted, lease.hold)
            for first, memory in targets.runs():
                memory.copy_(blocks[first : first + len(memory)])
            with self._lock, self._step:
                for tier, pool, slots in lease.hold.slots:
                    new = slots[pool.owner[slots] == RESERVED]
                    tier.settle(pool, new, owner, pool.chunk[new], count)
        finally:  # slots that were not filled become free again
            self.retire(lease)

    def note_attention(self, owner: Owner, count: int, chunks: np.ndarray, mass: np.ndarray, share: np.ndarray) -> None:
        """Record that a selector chose chunks of a KV cache group (see `ScoreTable.note`)."""
        self.scores.note(owner, count, chunks, mass, share)
        with self._lock, self._step:
            for tier in self._tiers():
                tier.rescore(owner, chunks)

    def where(self, owner: Owner, chunks: np.ndarray, device: torch.device) -> dict[str, int]:
        """Return the number of `chunks` in each place, see `find`."""
        return {tier: len(found) for tier, found in self.find(owner, chunks, device).items()}

    def find(self, owner: Owner, chunks: np.ndarray, device: torch.device) -> dict[str, np.ndarray]:
        """Return where the chunks of a KV cache group are.

        Args:
            owner: the segment and KV cache group.
            chunks: int64, ascending.
            device: the device where attention runs.

        Returns:
            The chunks in each tier that serves `device`, by the name of the tier, and the others under "disk".
        """
        with self._lock, self._step:
            found = {}
            gpu = self._gpus.get(device)
            for each in [self.host] if gpu is None else [gpu.tier, self.host]:
                there = each.lookup(owner, chunks) >= 0
                found[each.name] = chunks[there]
                chunks = chunks[~there]
            return found | {"disk": chunks}

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments: their blocks, pinned or not, their scores and their indexes."""
        self.scores.forget(segments)
        self.resident.forget(segments)
        with self._lock, self._step:
            for tier in self._tiers():
                tier.forget(segments)
            self._holds.reap(self._unpin)

    def segments(self) -> set[str]:
        """Return the ids of segments with blocks or indexes in memory."""
        with self._lock, self._step:
            return {segment for tier in self._tiers() for segment in tier.segments()} | self.resident.segments()

    # --- steps of a fetch, under the lock

    def _tick(self, gpu: DeviceMemory | None) -> None:
        self._clock += 1
        for tier in [self.host] if gpu is None else [self.host, gpu.tier, gpu.staging]:
            tier.clock = self._clock
        self._holds.reap(self._unpin)

    def _keep_within_budgets(self, each: Arrival) -> None:
        """Drop requested chunks that exceed the budget, uncached chunks first."""
        owner, size, chunks = each.owner, each.block_bytes, each.leased.chunks
        target = self.host if each.gpu is None else each.gpu.tier
        there = target.lookup(owner, chunks) >= 0
        new = chunks[~there]
        if each.gpu is not None and not self._direct:  # blocks from disk pass through the host
            staged = np.flatnonzero(self.host.lookup(owner, new) < 0)
            passing = max(0, self.host.room(size) - (len(new) - len(staged)))
            new = np.delete(new, staged[passing:])
        room = max(0, (target if each.gpu is None else each.gpu).room(size) - int(there.sum()))
        each.leased.chunks = np.sort(np.concatenate([chunks[there], new[:room]]))

    def _hold_found(self, each: Arrival, hold: Hold, collector: StatsCollector) -> None:
        """Pin the requested blocks that are already in memory."""
        missing = each.leased.chunks
        if each.gpu is not None:
            found, missing = self._take(each.gpu.tier, each, missing, hold, collector)
            each.on_device.append(found)
        found, missing = self._take(self.host, each, missing, hold, collector)
        each.on_host.append(found)
        each.leased.from_disk = missing

    def _take_slots(self, each: Arrival, hold: Hold) -> None:
        """Reserve slots, or allocate memory, for the blocks that are read from disk."""
        size, rest = each.block_bytes, each.leased.from_disk
        if not len(rest):
            return
        gone = each.leased.request.reader.gone  # a deleted segment is not looked up again
        if each.gpu is not None and self._direct and not gone:
            reserved = self._reserve(each.gpu.tier, size, rest, hold, each)
            rest = _without(rest, reserved)
            each.staged = self._reserve(each.gpu.staging, size, rest, hold)
            each.on_device.extend((reserved, each.staged))
            each.direct = [*reserved.runs(), *each.staged.runs()]
            rest = _without(rest, each.staged)
        staged = [] if gone else [self._reserve(self.host, size, rest, hold, each)]
        staged.extend(self.host.own_memory(_without(rest, *staged), size))
        each.on_host.extend(staged)
        each.to_read.extend(run for blocks in staged for run in blocks.runs())

    def _take(
        self, tier: Tier, each: Arrival, chunks: np.ndarray, hold: Hold, collector: StatsCollector
    ) -> tuple[Blocks, np.ndarray]:
        """Pin the blocks of `chunks` that `tier` holds. Return them, and the chunks that it does not hold."""
        slots = tier.lookup(each.owner, chunks)
        found = slots >= 0
        size, blocks = each.block_bytes, Blocks.none()
        if found.any():
            pool = tier.pool(size)
            tier.use(pool, slots[found])
            hold.slots.append((tier, pool, slots[found]))
            blocks = pool.blocks(slots[found], chunks[found])
        collector.looked_up(tier.name, int(found.sum()), int((~found).sum()), size)
        return blocks, chunks[~found]

    def _reserve(
        self, tier: Tier, block_bytes: int, chunks: np.ndarray, hold: Hold, each: Arrival | None = None
    ) -> Blocks:
        """Reserve slots for the first of `chunks`, as many as `tier` has room for.

        Args:
            tier: the tier to reserve in.
            block_bytes: bytes per block.
            chunks: int64, ascending.
            hold: the pin that gets the slots.
            each: pending fetch that inserts the chunks into the tier on arrival. Then only chunks that the policy keeps
                get slots. None to reserve without the policy.
        """
        if not len(chunks) or not tier.budget:
            return Blocks.none()
        if each is not None:
            chunks = chunks[tier.keeps(block_bytes, self._usage(each, chunks))]
        pool, slots = tier.acquire(block_bytes, len(chunks))
        taken = chunks[: len(slots)]
        if len(slots):
            pool.chunk[slots] = taken
            hold.slots.append((tier, pool, slots))
            if each is not None:
                each.reserved.append((tier, pool, slots))
        return pool.blocks(slots, taken)

    def _arrive(self, each: Arrival, lease: Lease) -> None:
        """Copy the blocks of a completed read to the device, and insert them into the tiers that keep them."""
        request, moved = each.leased.request, np.empty(0, np.int64)
        on_host = Blocks.join(each.on_host)
        if each.gpu is None:
            each.leased.blocks = on_host
        else:
            if len(on_host):
                moved = self._move_up(each, on_host, lease)
            each.leased.blocks = Blocks.join(each.on_device)
        for holder, pool, slots in each.reserved if not request.reader.gone else ():
            new = slots[pool.owner[slots] == RESERVED]
            if holder is self.host:  # exclusive tiers: slots of moved blocks stay reserved until the release
                new = new[~np.isin(pool.chunk[new], moved)]
            elif lease.hold.check is not None:
                direct = np.isin(pool.chunk[new], on_host.chunks, invert=True)
                lease.hold.when_whole.append(partial(self._enter, holder, pool, new[direct], request))
                new = new[~direct]
            self._enter(holder, pool, new, request)

    @staticmethod
    def _enter(tier: Tier, pool: SlotPool, slots: np.ndarray, request: BlockRequest) -> None:
        """Insert the blocks in these slots into the tier, so that other requests find them."""
        reader, block_group, _ = request
        slots = slots[pool.owner[slots] == RESERVED]
        if len(slots) and not reader.gone:
            chunks = reader.shape.chunks_in(reader.shape.block_groups[block_group])
            tier.settle(pool, slots, reader.owner(block_group), pool.chunk[slots], chunks)

    def confirm(self, hold: Hold) -> None:
        """Wait until the device has verified its direct reads, and insert their blocks into the tiers.

        Raises:
            IntegrityError: a block is damaged.
        """
        if hold.check is not None:
            hold.check.confirm()
            with self._lock, self._step:
                hold.keep_checked()

    # --- between host and device

    def _move_up(self, each: Arrival, on_host: Blocks, lease: Lease) -> np.ndarray:
        """Copy blocks to the device on the side stream. Return the chunks that the device tier keeps."""
        gpu, size = each.gpu, each.block_bytes
        assert gpu is not None
        reserved = self._reserve(gpu.tier, size, on_host.chunks, lease.hold, each)
        rest = _without(on_host.chunks, reserved)
        staged = self._reserve(gpu.staging, size, rest, lease.hold)
        rest = _without(rest, staged)
        pressed = self._reserve(gpu.tier, size, rest, lease.hold)  # temporary: the staging area is full
        rest = _without(rest, pressed)
        targets = Blocks.join([reserved, staged, pressed, *gpu.tier.own_memory(rest, size)])
        gpu.copy(on_host, targets)
        each.on_device.append(targets)
        lease.owns_memory |= len(rest) > 0
        return reserved.chunks

    def _keep_staged(self, each: Arrival) -> None:
        """Keep a host copy of blocks that were read from disk into the staging area."""
        reader, chunks = each.leased.request.reader, each.staged.chunks
        if each.gpu is None or not len(chunks) or reader.gone or not self.host.budget:
            return
        self._move_down(each.gpu.device, each.owner, each.count, each.staged, self._usage(each, chunks))

    def _usage(self, each: Arrival, chunks: np.ndarray) -> Usage:
        """Return the usage of arriving blocks."""
        known = self.scores.of(each.owner, chunks)
        return Usage(np.full(len(chunks), self._clock), np.ones(len(chunks), np.int64), *known)

    def _move_down(self, device: torch.device, owner: Owner, count: int, blocks: Blocks, usage: Usage) -> None:
        """Copy blocks from a device to the host tier, as far as it has room and its policy keeps them."""
        if not self.host.budget:
            return
        size = blocks.block_bytes
        blocks = blocks[self.host.keeps(size, usage)]
        if not len(blocks):
            return
        gpu = self._gpus[device]
        down = Hold(gpu.stream, over=DoneEvent(), moves_down=True)
        self._holds.add(down)
        targets = self._reserve(self.host, size, blocks.chunks, down)
        if not len(targets):
            return
        gpu.copy(blocks, targets)
        down.copied = gpu.stream.copied()
        _, pool, slots = down.slots[0]
        self.host.settle(pool, slots, owner, pool.chunk[slots], count)

    # --- release and repair

    def retire(self, lease: Lease) -> None:
        """Release a block handle. Its slots are unpinned after the device work that is queued so far."""
        with self._lock, self._step:
            if lease.hold.over is None:
                over = lease.hold.end()
                if lease.owns_memory and lease.hold.stream is not None:
                    # the allocator may reuse it on the side stream, which must not write before it was read
                    lease.hold.stream.await_computation(over)
            if lease.latch.is_open or not lease.hold.reading:
                for leased in lease.leased:
                    leased.blocks = None
                lease.latch.error = None  # a raised error keeps the frames of waiting threads alive, and their KV
            self._holds.reap(self._unpin)

    def _mend(self) -> None:
        """Repair the tiers after an interrupted or failed change, from the pins and the slots of complete blocks."""
        for gpu in self._gpus.values():
            gpu.stream.copied().synchronize()
        for tier in self._tiers():
            tier.mend(self._holds.in_tier(tier))
        for pool in self.host.pools():
            self._free_idle(self.host, pool, pool.evictable())  # blocks that moved to a device in that change

    def _unpin(self, tier: Tier, pool: SlotPool, slots: np.ndarray) -> None:
        """Unpin slots. Free reserved and orphaned ones, and host slots with a block that is now on a device."""
        tier.unpin(pool, slots)
        self._free_idle(tier, pool, slots[pool.pins[slots] == 0])

    def _free_idle(self, tier: Tier, pool: SlotPool, idle: np.ndarray) -> None:
        owner = pool.owner[idle]
        gone = (owner == RESERVED) | (owner == ORPHANED)
        if tier is self.host:
            for gpu in self._gpus.values():
                gone |= tier.also_in(gpu.tier, pool, idle)
        if gone.any():
            tier.discard(pool, idle[gone])

    # --- tiers

    def _gpu(self, device: torch.device) -> DeviceMemory | None:
        """Return the memory of `device`, created on first use; None if the host tier is the device tier."""
        if device.type not in self._device_types:
            return None
        if device not in self._gpus:
            self._gpus[device] = DeviceMemory(
                device,
                copy_stream(device),
                self.device_budget,
                self.staging_budget,
                make_policy(self._policy),
                self.scores,
                partial(self._move_down, device),
                self._register,
            )
        return self._gpus[device]

    @property
    def devices(self) -> dict[torch.device, Tier]:
        """Tier of each device used so far."""
        return {device: gpu.tier for device, gpu in self._gpus.items()}

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes allocated on all devices, staging areas included, and their limit."""
        taken = sum(gpu.tier.nbytes + gpu.staging.nbytes for gpu in self._gpus.values())
        return taken, max(1, len(self._gpus)) * self.device_budget + len(self._gpus) * self.staging_budget

    def _tiers(self) -> Iterator[Tier]:
        yield self.host
        for gpu in self._gpus.values():
            yield from (gpu.tier, gpu.staging)

    @property
    def evicted(self) -> int:
        return sum(tier.evicted for tier in self._tiers())

    def clear(self) -> None:
        """Forget all blocks and indexes and free the memory. Slabs with pinned slots are kept."""
        with self._lock, self._step:
            self._holds.reap(self._unpin)
            for tier in self._tiers():
                tier.clear()
        self.resident.clear()


def _without(chunks: np.ndarray, *taken: Blocks) -> np.ndarray:
    """Return the ascending `chunks` without those in `taken`, ascending."""
    for blocks in taken:
        chunks = np.setdiff1d(chunks, blocks.chunks, assume_unique=True)
    return chunks
