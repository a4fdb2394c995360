"""Where blocks are, and how they come to the device that computes: device memory, host memory, disk.

The tiers are exclusive: a block that moves up to the device leaves its host slot, one that is evicted from the
device moves down to the host. What comes from disk stays in a tier if its policy would not rather keep what is there.
What finds no slot on the device passes through its staging area, and stays on the host; what finds no room at all
travels in memory of the request's own.
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
from ..store.memory import aligned_bytes, page_locked
from ..store.segment import read_batch
from . import make_policy
from .arrival import Arrival
from .blocks import Blocks
from .device import STAGING_BYTES, DeviceMemory
from .guesses import Guesses
from .interrupts import Apart, Step
from .late_check import LateCheck
from .lease import BlockRequest, Hold, Holds, Lease
from .policy import Usage
from .pool import Tier
from .resident import ResidentKeys
from .scores import Owner, ScoreTable
from .slab_maker import SlabMaker
from .slots import ORPHANED, RESERVED, SlotPool
from .streams import DoneEvent, copy_stream


class Residency:
    """The tiers of one store.

    Args:
        host_budget: bytes of host memory for blocks.
        device_budget: bytes for blocks on each device.
        policy: name of the eviction policy of the tiers.
        pin: whether host memory is page-locked.
        device_types: kinds of device with a tier of their own; for the others the host tier is the device tier.
        direct: whether the engine fills device memory from disk (GPUDirect Storage).
        index_budget: bytes for keys that stay in memory for identification.
        staging_budget: bytes on each device, beside those for blocks that stay, for blocks on their way to requests.
        register: told of each slab of device memory, which the engine is going to read into.
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
            allocate_own=partial(aligned_bytes, pin=pin),  # an allocator that waits for copies keeps it
        )
        self.device_budget, self.staging_budget = device_budget, staging_budget
        self._policy, self._direct, self._device_types = policy, direct, device_types
        self._register = register
        self._gpus: dict[torch.device, DeviceMemory] = {}
        self._holds = Holds()
        self._lock = threading.Lock()
        self._step = Step(self._mend)
        self._clock = 0
        self._starting = Apart()  # a read that is half begun could not be taken back
        self._slabs = SlabMaker(self._lock, self._step, self.host, ahead=pin)

    # --- the two verbs

    def fetch(
        self, requests: Sequence[BlockRequest], device: torch.device, collector: StatsCollector, ahead: bool = False
    ) -> Lease:
        """Start bringing blocks to `device`, all that are read in one submission.

        Args:
            requests: which blocks, of segments of one store.
            device: where attention runs.
            collector: counts look-ups, bytes and time.
            ahead: whether this is before they are needed: then what the budgets have no room for is left out. Otherwise
                it comes in memory of the request's own.

        Returns:
            At once, a lease whose blocks arrive later.
        """
        lease = Lease(self, requests)
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
        except BaseException:  # also Ctrl-C: nobody is going to release it
            lease.hold.over = DoneEvent()
            self.retire(lease)
            raise
        return lease

    def _find(self, lease: Lease, device: torch.device, collector: StatsCollector, ahead: bool) -> list[Arrival]:
        """Hold what memory has."""
        hold, gpu = lease.hold, self._gpu(device)
        self._tick(gpu)
        hold.stream = None if gpu is None else gpu.stream
        self._holds.add(hold)
        arrivals = [Arrival(leased, gpu) for leased in lease.leased]
        for each in arrivals if ahead else ():
            self._keep_within_budgets(each)
        self._holds.await_moves_down(hold.stream)
        for each in arrivals:  # before slots are taken for others, which would evict
            self._hold_found(each, hold, collector)
        return arrivals

    def _lacking(self, arrivals: Sequence[Arrival]) -> list[tuple[Tier, int]]:
        """Slabs that are to be made, without the lock, before slots are taken."""
        if not any(each.gpu is not None or len(each.leased.from_disk) for each in arrivals):
            return []
        return self._slabs.lacking(sum((each.needs(self.host, self._direct) for each in arrivals), Counter()))

    def _begin(
        self, lease: Lease, arrivals: Sequence[Arrival], collector: StatsCollector
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        """Hold slots for the rest.

        Returns:
            What starts to read the rest, if there is any, and what is to be done when all is in memory.
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
            if hold.stream is not None:  # also after what earlier leases are still copying to slots that this uses
                hold.copied = hold.stream.copied()
            for each in arrivals:
                if hold.check is None:
                    self._keep_staged(each)
                else:
                    hold.when_whole.append(partial(self._keep_staged, each))

        def read() -> None:
            """In the thread that starts reads."""
            with self._lock:
                if hold.over is not None:  # given up before it began
                    lease.latch.open()
                    return
                hold.reading = True
            collector.read_started()
            try:
                if hold.stream is not None and direct:
                    hold.stream.copied().synchronize()  # the disk writes past all streams: let evictions finish
                reading = read_batch(through_host, direct)
            except BaseException as error:  # the store was closed meanwhile
                reading = Future()
                reading.set_exception(error.with_traceback(None))  # of which this frame would be a part
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
        """All blocks of a lease are in memory, or cannot be had: say so to who waits for it."""
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
        if lease.hold.over is not None:  # released meanwhile
            self.retire(lease)

    def admit(self, owner: Owner, blocks: torch.Tensor) -> None:
        """Put freshly computed blocks, uint8 `[chunks, block_bytes]` on the CPU, into the host tier if they fit."""
        count, block_bytes = blocks.shape
        if count * block_bytes > self.host.budget:
            return
        chunks = np.arange(count)
        with self._lock, self._step:
            lacking = self._slabs.lacking(Counter({(self.host, block_bytes): count}))
        self._slabs.make(lacking)
        lease = Lease(self, ())  # of nobody but this method, while it fills them
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
        finally:  # slots that were not filled belong to nobody, and are free again
            self.retire(lease)

    def note_attention(self, owner: Owner, count: int, chunks: np.ndarray, mass: np.ndarray, share: np.ndarray) -> None:
        """A selector has chosen a share of `chunks` of a block group with `count`; so much attention do they get."""
        self.scores.note(owner, count, chunks, mass, share)
        with self._lock, self._step:
            for tier in self._tiers():
                tier.rescore(owner, chunks)

    def where(self, owner: Owner, chunks: np.ndarray, device: torch.device) -> dict[str, int]:
        """How many of a block group's `chunks`, int64 ascending, each tier holds for `device`, by its name."""
        return {tier: len(found) for tier, found in self.find(owner, chunks, device).items()}

    def find(self, owner: Owner, chunks: np.ndarray, device: torch.device) -> dict[str, np.ndarray]:
        """Which ones these are."""
        with self._lock, self._step:
            found = {}
            gpu = self._gpus.get(device)
            for each in [self.host] if gpu is None else [gpu.tier, self.host]:
                there = each.lookup(owner, chunks) >= 0
                found[each.name] = chunks[there]
                chunks = chunks[~there]
            return found | {"disk": chunks}

    def forget(self, segments: Collection[str]) -> None:
        """These segments are gone: so are their blocks, in use or not, and what was known of them."""
        self.scores.forget(segments)
        self.resident.forget(segments)
        with self._lock, self._step:
            for tier in self._tiers():
                tier.forget(segments)
            self._holds.reap(self._unpin)

    def segments(self) -> set[str]:
        """Those of which blocks are in memory."""
        with self._lock, self._step:
            return {segment for tier in self._tiers() for segment in tier.segments()} | self.resident.segments()

    # --- steps of a fetch, under the lock

    def _tick(self, gpu: DeviceMemory | None) -> None:
        self._clock += 1
        for tier in [self.host] if gpu is None else [self.host, gpu.tier, gpu.staging]:
            tier.clock = self._clock
        self._holds.reap(self._unpin)

    def _keep_within_budgets(self, each: Arrival) -> None:
        """Leave out what finds no room now, first of all of what is not there."""
        owner, size, chunks = each.owner, each.block_bytes, each.leased.chunks
        target = self.host if each.gpu is None else each.gpu.tier
        there = target.lookup(owner, chunks) >= 0
        new = chunks[~there]
        if each.gpu is not None and not self._direct:  # what is read passes through the host
            staged = np.flatnonzero(self.host.lookup(owner, new) < 0)
            passing = max(0, self.host.room(size) - (len(new) - len(staged)))
            new = np.delete(new, staged[passing:])
        room = max(0, (target if each.gpu is None else each.gpu).room(size) - int(there.sum()))
        each.leased.chunks = np.sort(np.concatenate([chunks[there], new[:room]]))

    def _hold_found(self, each: Arrival, hold: Hold, collector: StatsCollector) -> None:
        """Hold what the tiers have."""
        missing = each.leased.chunks
        if each.gpu is not None:
            found, missing = self._take(each.gpu.tier, each, missing, hold, collector)
            each.on_device.append(found)
        found, missing = self._take(self.host, each, missing, hold, collector)
        each.on_host.append(found)
        each.leased.from_disk = missing

    def _take_slots(self, each: Arrival, hold: Hold) -> None:
        """Find slots for the rest, or memory of the lease's own, for the disk to fill."""
        size, rest = each.block_bytes, each.leased.from_disk
        if not len(rest):
            return
        gone = each.leased.request.reader.gone  # nobody will look for it again
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
        """Hold what `tier` has of `chunks`. Returns it, and the chunks it has not."""
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
            each: of which they are, if they are to stay: then those alone that the tier's policy keeps.
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
        """The bytes are in memory: move them up to the device, and enter them in the tier that keeps them."""
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
            if holder is self.host:  # exclusive: what has moved up stays reserved, and is freed with the lease
                new = new[~np.isin(pool.chunk[new], moved)]
            elif lease.hold.check is not None:
                direct = np.isin(pool.chunk[new], on_host.chunks, invert=True)
                lease.hold.when_whole.append(partial(self._enter, holder, pool, new[direct], request))
                new = new[~direct]
            self._enter(holder, pool, new, request)

    @staticmethod
    def _enter(tier: Tier, pool: SlotPool, slots: np.ndarray, request: BlockRequest) -> None:
        """The tier keeps the blocks that were read into these slots, for others to find."""
        reader, block_group, _ = request
        slots = slots[pool.owner[slots] == RESERVED]
        if len(slots) and not reader.gone:
            chunks = reader.shape.chunks_in(reader.shape.block_groups[block_group])
            tier.settle(pool, slots, reader.owner(block_group), pool.chunk[slots], chunks)

    def confirm(self, hold: Hold) -> None:
        """Wait until the device has checked what was read past the host, and enter it in the tier.

        Raises:
            IntegrityError: a block is not what was written.
        """
        if hold.check is not None:
            hold.check.confirm()
            with self._lock, self._step:
                hold.keep_checked()

    # --- between host and device

    def _move_up(self, each: Arrival, on_host: Blocks, lease: Lease) -> np.ndarray:
        """Copy blocks to the device on the side stream. Returns the chunks that got a slot there."""
        gpu, size = each.gpu, each.block_bytes
        assert gpu is not None
        reserved = self._reserve(gpu.tier, size, on_host.chunks, lease.hold, each)
        rest = _without(on_host.chunks, reserved)
        staged = self._reserve(gpu.staging, size, rest, lease.hold)
        rest = _without(rest, staged)
        pressed = self._reserve(gpu.tier, size, rest, lease.hold)  # nothing that stays: the staging area is full
        rest = _without(rest, pressed)
        targets = Blocks.join([reserved, staged, pressed, *gpu.tier.own_memory(rest, size)])
        gpu.copy(on_host, targets)
        each.on_device.append(targets)
        lease.owns_memory |= len(rest) > 0
        return reserved.chunks

    def _keep_staged(self, each: Arrival) -> None:
        """Keep a copy on the host of what came to the staging area from disk."""
        reader, chunks = each.leased.request.reader, each.staged.chunks
        if each.gpu is None or not len(chunks) or reader.gone or not self.host.budget:
            return
        self._move_down(each.gpu.device, each.owner, each.count, each.staged, self._usage(each, chunks))

    def _usage(self, each: Arrival, chunks: np.ndarray) -> Usage:
        """What is known of blocks that arrive."""
        known = self.scores.of(each.owner, chunks)
        return Usage(np.full(len(chunks), self._clock), np.ones(len(chunks), np.int64), *known)

    def _move_down(self, device: torch.device, owner: Owner, count: int, blocks: Blocks, usage: Usage) -> None:
        """Blocks are evicted from a device: keep them on the host, as far as it has room and they are worth it."""
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

    # --- the end of a lease

    def retire(self, lease: Lease) -> None:
        """The lease is over; its slots go when the device has done what it was given before now."""
        with self._lock, self._step:
            if lease.hold.over is None:
                over = lease.hold.end()
                if lease.owns_memory and lease.hold.stream is not None:
                    # the allocator may give it to the side stream, which must not write to it before it was read
                    lease.hold.stream.await_computation(over)
            if lease.latch.is_open or not lease.hold.reading:
                for leased in lease.leased:
                    leased.blocks = None
                lease.latch.error = None  # raised, it holds the frames of who waited, and so their KV
            self._holds.reap(self._unpin)

    def _mend(self) -> None:
        """A step was interrupted halfway, or failed: what holds say is true, and what is known of whole blocks."""
        for gpu in self._gpus.values():
            gpu.stream.copied().synchronize()
        for tier in self._tiers():
            tier.mend(self._holds.in_tier(tier))
        for pool in self.host.pools():
            self._free_idle(self.host, pool, pool.evictable())  # what has moved up in that step

    def _unpin(self, tier: Tier, pool: SlotPool, slots: np.ndarray) -> None:
        """Unpin, and free what nobody needs: reserved slots, and host slots whose block has moved up."""
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
        """What there is on `device`; None where the host tier is the device tier."""
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
        """The tier of each device that was used."""
        return {device: gpu.tier for device, gpu in self._gpus.items()}

    @property
    def device_bytes(self) -> tuple[int, int]:
        """What is taken on all devices, staging areas included, and what may be."""
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
        """Forget every block and give the memory back; what leases hold stays until they go."""
        with self._lock, self._step:
            self._holds.reap(self._unpin)
            for tier in self._tiers():
                tier.clear()
        self.resident.clear()


def _without(chunks: np.ndarray, *taken: Blocks) -> np.ndarray:
    """Those of ascending `chunks` that are none of `taken`, ascending."""
    for blocks in taken:
        chunks = np.setdiff1d(chunks, blocks.chunks, assume_unique=True)
    return chunks
