"""Where blocks are, and how they come to the device that computes: device memory, host memory, disk.

The tiers are exclusive: a block that moves up to the device leaves its host slot, one that is evicted from the
device moves down to the host. What finds no slot within the budgets travels in memory of the request's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..stats import StatsCollector
from ..store.engines import ReadReport
from ..store.memory import aligned_bytes
from ..store.segment import read_batch
from . import make_policy
from .blocks import BlockRun, Blocks, overlaps
from .guesses import Guesses
from .interrupts import Apart, Step
from .late_check import LateCheck
from .lease import BlockRequest, Hold, Lease, LeasedBlocks
from .policy import Usage
from .pool import ORPHANED, RESERVED, SlotPool, Tier
from .resident import ResidentKeys
from .scores import Owner, ScoreTable
from .streams import CopyStream, DoneEvent, Event, copy_stream


@dataclass(eq=False)
class _Arrival:
    """What is under way for one request of a lease."""

    leased: LeasedBlocks
    tier: Tier | None
    """Of the device where attention runs; None where that is the host's."""
    on_device: list[Blocks] = field(default_factory=list)
    on_host: list[Blocks] = field(default_factory=list)
    to_read: list[BlockRun] = field(default_factory=list)
    direct: list[BlockRun] = field(default_factory=list)
    """What is read to the device without passing through the host."""
    reserved: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    owner: Owner = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        reader, block_group, _ = self.leased.request
        group = reader.shape.block_groups[block_group]
        self.owner, self.block_bytes = reader.owner(block_group), group.block_bytes


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
    ) -> None:
        self.resident = ResidentKeys(index_budget)
        self.guesses = Guesses()
        self.scores = ScoreTable(make_policy(policy).learn)
        self.host = Tier(
            "host", host_budget, make_policy(policy), lambda n: aligned_bytes(n, pin=pin), scores=self.scores
        )
        self.devices: dict[torch.device, Tier] = {}
        self.device_budget = device_budget
        self._policy, self._direct, self._device_types = policy, direct, device_types
        self._streams: dict[torch.device, CopyStream] = {}
        self._holds: set[Hold] = set()
        self._lock = threading.Lock()
        self._step = Step(self._mend)
        self._clock = 0
        self._starting = Apart()  # a read that is half begun could not be taken back

    # --- the two verbs

    def fetch(
        self, requests: Sequence[BlockRequest], device: torch.device, collector: StatsCollector, ahead: bool = False
    ) -> Lease:
        """Start bringing blocks to `device`, all that are read in one submission.

        Args:
            requests: which blocks, of segments of one store.
            device: where attention runs.
            collector: counts look-ups, bytes and time.
            ahead: whether this is before they are needed: then what the budgets have no room for is left out, and where
                the device has none, blocks come as far as the host. Otherwise it comes in memory of the request's own.

        Returns:
            At once, a lease whose blocks arrive later.
        """
        lease = Lease(self, requests)
        try:
            with self._lock, self._step:
                read, arrive = self._begin(lease, device, collector, ahead)
            if read is None:
                self._settle(lease, arrive)
            else:
                self._starting.do(read)
        except BaseException:  # also Ctrl-C: nobody is going to release it
            lease.hold.over = DoneEvent()
            self.retire(lease)
            raise
        return lease

    def _begin(
        self, lease: Lease, device: torch.device, collector: StatsCollector, ahead: bool
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        """Hold what memory has and slots for the rest.

        Returns:
            What starts to read the rest, if there is any, and what is to be done when all is in memory.
        """
        hold, tier = lease.hold, self._device_tier(device)
        self._tick(tier)
        hold.stream = self._streams.get(device)
        self._holds.add(hold)
        arrivals = [_Arrival(leased, tier) for leased in lease.leased]
        for each in arrivals if ahead else ():
            self._keep_within_budgets(each)
        self._await_moves_down(None if any(each.tier is None for each in arrivals) else hold.stream)
        for each in arrivals:  # before slots are taken for others, which would evict
            self._hold_found(each, hold, collector)
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
                reading.set_exception(error)
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
            error = caught
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
        with self._lock, self._step:
            counts = {}
            tier = self.devices.get(device)
            for each in [self.host] if tier is None else [tier, self.host]:
                there = each.lookup(owner, chunks) >= 0
                counts[each.name] = int(there.sum())
                chunks = chunks[~there]
            return counts | {"disk": len(chunks)}

    def forget(self, segments: Collection[str]) -> None:
        """These segments are gone: so are their blocks, in use or not, and what was known of them."""
        self.scores.forget(segments)
        self.resident.forget(segments)
        with self._lock, self._step:
            for tier in self._tiers():
                tier.forget(segments)
            self._reap()

    def segments(self) -> set[str]:
        """Those of which blocks are in memory."""
        with self._lock, self._step:
            return {segment for tier in self._tiers() for segment in tier.segments()} | self.resident.segments()

    # --- steps of a fetch, under the lock

    def _tick(self, tier: Tier | None) -> None:
        self._clock += 1
        self.host.clock = self._clock
        if tier is not None:
            tier.clock = self._clock
        self._reap()

    def _keep_within_budgets(self, each: _Arrival) -> None:
        """Leave out what finds no room now, first of all of what is not there; without any, go as far as the host."""
        owner, size, chunks = each.owner, each.block_bytes, each.leased.chunks
        if each.tier is not None and not each.tier.room(size):
            each.tier = None
        target = each.tier or self.host
        there = target.lookup(owner, chunks) >= 0
        new = chunks[~there]
        if each.tier is not None and not self._direct:  # what is read passes through the host
            staged = np.flatnonzero(self.host.lookup(owner, new) < 0)
            passing = max(0, self.host.room(size) - (len(new) - len(staged)))
            new = np.delete(new, staged[passing:])
        room = max(0, target.room(size) - int(there.sum()))
        each.leased.chunks = np.sort(np.concatenate([chunks[there], new[:room]]))

    def _hold_found(self, each: _Arrival, hold: Hold, collector: StatsCollector) -> None:
        """Hold what the tiers have."""
        missing = each.leased.chunks
        if each.tier is not None:
            found, missing = self._take(each.tier, each, missing, hold, collector)
            each.on_device.append(found)
        found, missing = self._take(self.host, each, missing, hold, collector)
        each.on_host.append(found)
        each.leased.from_disk = missing

    def _take_slots(self, each: _Arrival, hold: Hold) -> None:
        """Find slots for the rest, or memory of the lease's own, for the disk to fill."""
        size, rest = each.block_bytes, each.leased.from_disk
        if not len(rest):
            return
        gone = each.leased.request.reader.gone  # nobody will look for it again
        if each.tier is not None and self._direct and not gone:
            reserved = self._reserve(each.tier, size, rest, hold, each)
            each.on_device.append(reserved)
            each.direct, rest = reserved.runs(), rest[len(reserved) :]
        staged = [] if gone else [self._reserve(self.host, size, rest, hold, each)]
        staged.extend(self.host.own_memory(rest[sum(map(len, staged)) :], size))
        each.on_host.extend(staged)
        each.to_read.extend(run for blocks in staged for run in blocks.runs())

    def _take(
        self, tier: Tier, each: _Arrival, chunks: np.ndarray, hold: Hold, collector: StatsCollector
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
        self, tier: Tier, block_bytes: int, chunks: np.ndarray, hold: Hold, each: _Arrival | None = None
    ) -> Blocks:
        """Reserve slots for the first of `chunks`, as many as `tier` has room for."""
        if not len(chunks) or not tier.budget:
            return Blocks.none()
        pool, slots = tier.acquire(block_bytes, len(chunks))
        taken = chunks[: len(slots)]
        if len(slots):
            pool.chunk[slots] = taken
            hold.slots.append((tier, pool, slots))
            if each is not None:
                each.reserved.append((tier, pool, slots))
        return pool.blocks(slots, taken)

    def _arrive(self, each: _Arrival, lease: Lease) -> None:
        """The bytes are in memory: move them up to the device, and enter them in the tier that keeps them."""
        request, moved = each.leased.request, np.empty(0, np.int64)
        on_host = Blocks.join(each.on_host)
        if each.tier is None:
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

    def _move_up(self, each: _Arrival, on_host: Blocks, lease: Lease) -> np.ndarray:
        """Copy blocks to the device on the side stream. Returns the chunks that got a slot there."""
        tier, stream, size = each.tier, lease.hold.stream, each.block_bytes
        assert tier is not None and stream is not None
        reserved = self._reserve(tier, size, on_host.chunks, lease.hold, each)
        rest = on_host.chunks[len(reserved) :]
        with stream.copying():
            targets = Blocks.join([reserved, *tier.own_memory(rest, size)])
            for source, target in overlaps(on_host.runs(), targets.runs()):
                target.copy_(source, non_blocking=True)
        each.on_device.append(targets)
        lease.owns_memory |= len(rest) > 0
        return reserved.chunks

    def _move_down(self, device: torch.device, owner: Owner, count: int, blocks: Blocks, usage: Usage) -> None:
        """Blocks are evicted from a device: keep them on the host, as far as it has room and they are worth it."""
        if not self.host.budget:
            return
        size = blocks.block_bytes
        blocks = blocks[self.host.keeps(size, usage)]
        if not len(blocks):
            return
        stream = self._streams[device]
        down = Hold(stream, over=DoneEvent(), moves_down=True)
        self._holds.add(down)
        targets = self._reserve(self.host, size, blocks.chunks, down)
        if not len(targets):
            return
        with stream.copying():
            for source, target in overlaps(blocks.runs(), targets.runs()):
                target.copy_(source, non_blocking=True)
            down.copied = stream.copied()
        _, pool, slots = down.slots[0]
        self.host.settle(pool, slots, owner, pool.chunk[slots], count)

    def _await_moves_down(self, stream: CopyStream | None) -> None:
        """Blocks on their way down are found on the host at once; only their own stream keeps the order by itself."""
        for hold in self._holds:
            if hold.moves_down and hold.stream is not stream:
                hold.copied.synchronize()

    # --- the end of a lease

    def retire(self, lease: Lease) -> None:
        """The lease is over; its slots go when the device has done what it was given before now."""
        with self._lock, self._step:
            if lease.hold.over is None:
                lease.hold.over = self._now(lease.hold)
                if lease.owns_memory and lease.hold.stream is not None:
                    # the allocator may give it to the side stream, which must not write to it before it was read
                    lease.hold.stream.await_computation(lease.hold.over)
            if lease.latch.is_open or not lease.hold.reading:
                for leased in lease.leased:
                    leased.blocks = None
            self._reap()

    @staticmethod
    def _now(hold: Hold) -> Event:
        return hold.stream.computed() if hold.stream else DoneEvent()

    def _reap(self) -> None:
        for hold in list(self._holds):
            if hold.over is None and hold.lease is not None and hold.lease() is None:  # interrupted, and lost
                hold.over = self._now(hold)
            over = hold.over is not None and not hold.reading and hold.over.query() and hold.copied.query()
            if over or (hold.check is not None and hold.check.is_done()):  # checks come before the end of copies
                hold.keep_checked()
            if over:
                for tier, pool, slots in hold.slots:
                    self._unpin(tier, pool, slots)
                self._holds.discard(hold)

    def _mend(self) -> None:
        """A step was interrupted halfway, or failed: what holds say is true, and what is known of whole blocks."""
        for stream in self._streams.values():
            stream.copied().synchronize()
        for tier in self._tiers():
            held = [(pool, slots) for hold in self._holds for holder, pool, slots in hold.slots if holder is tier]
            tier.mend(held)
        for pool in self.host.pools():
            self._free_idle(self.host, pool, pool.evictable())  # what has moved up in that step

    def _unpin(self, tier: Tier, pool: SlotPool, slots: np.ndarray) -> None:
        """Unpin, and free what nobody needs: reserved slots, and host slots whose block has moved up."""
        tier.unpin(pool, slots)
        self._free_idle(tier, pool, slots[pool.pins[slots] == 0])

    def _free_idle(self, tier: Tier, pool: SlotPool, idle: np.ndarray) -> None:
        gone = np.isin(pool.owner[idle], (RESERVED, ORPHANED))
        if tier is self.host:
            for device_tier in self.devices.values():
                gone |= tier.also_in(device_tier, pool, idle)
        if gone.any():
            tier.discard(pool, idle[gone])

    # --- tiers

    def _device_tier(self, device: torch.device) -> Tier | None:
        if device.type not in self._device_types:
            return None
        if device not in self.devices:
            stream = self._streams[device] = copy_stream(device)

            def allocate(nbytes: int) -> torch.Tensor:
                # on the side stream, which fills it: what the allocator has for the computing stream may still be in
                # use by kernels that are queued there
                with stream.copying():
                    return aligned_bytes(nbytes, device=device)

            self.devices[device] = Tier(
                "device",
                self.device_budget,
                make_policy(self._policy),
                allocate,
                partial(self._move_down, device),
                self.scores,
            )
        return self.devices[device]

    def _tiers(self) -> Iterator[Tier]:
        yield self.host
        yield from self.devices.values()

    @property
    def evicted(self) -> int:
        return sum(tier.evicted for tier in self._tiers())

    def clear(self) -> None:
        """Forget every block and give the memory back; what leases hold stays until they go."""
        with self._lock, self._step:
            self._reap()
            for tier in self._tiers():
                tier.clear()
        self.resident.clear()
