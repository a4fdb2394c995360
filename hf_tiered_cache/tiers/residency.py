"""Where blocks are, and how they come to the device that computes: device memory, host memory, disk.

The tiers are exclusive: a block that moves up to the device leaves its host slot, one that is evicted from the
device moves down to the host. What finds no slot within the budgets travels in memory of the request's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..stats import Account
from ..store.memory import aligned_bytes
from ..store.segment import SegmentReader
from . import make_policy
from .guesses import Guesses
from .policy import Usage
from .pool import RESERVED, SlotPool, Tier
from .resident import ResidentKeys
from .runs import BlockRun, overlaps, some_of
from .scores import Owner, ScoreTable
from .streams import CopyStream, DoneEvent, Event, copy_stream


@dataclass(eq=False)
class Lease:
    """Blocks of one lane on their way to a device, and a hold on the slots they lie in until `release`."""

    residency: Residency
    block_bytes: int
    stream: CopyStream | None
    """The side stream of the device, or None where the host tier is the device tier."""
    runs: list[BlockRun] = field(default_factory=list)
    """The blocks by ascending chunk, on the device that asked, once `wait` has returned."""
    chunks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """What it brings."""
    from_disk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Chunks that are read from disk for this lease."""
    arrived: Future[None] = field(default_factory=Future)
    copied: Event = field(default_factory=DoneEvent)
    held: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    owns_memory: bool = False
    """Whether `runs` lie in device memory of the lease's own, allocated on the side stream."""
    moves_down: bool = False
    """Whether this is no request's lease, but holds host slots that evicted blocks are being copied to."""
    _released: bool = False

    def wait(self) -> None:
        """Wait until the blocks are there, or raise what kept them: IntegrityError, OSError, or what CUDA raises."""
        self.arrived.result()
        if self.stream is not None:
            self.stream.await_copies(self.copied)

    def release(self) -> None:
        """Let the slots go. Call once after the last use of `runs`, and also for a lease that failed."""
        if not self._released:
            self._released = True
            self.arrived.add_done_callback(lambda _: self.residency.retire(self))


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
        self._retiring: list[tuple[Event, Lease]] = []
        self._lock = threading.RLock()
        self._clock = 0

    # --- the two verbs

    def fetch(
        self,
        reader: SegmentReader,
        lane: int,
        chunks: np.ndarray,
        device: torch.device,
        account: Account,
        ahead: bool = False,
    ) -> Lease:
        """Start bringing blocks to `device`.

        Args:
            reader: the segment.
            lane: which of its lanes.
            chunks: int64, ascending.
            device: where attention runs.
            account: counts look-ups, bytes and time.
            ahead: whether this is before they are needed: then what the budgets have no room for is left out, and where
                the device has none, blocks come as far as the host. Otherwise it comes in memory of the request's own.

        Returns:
            At once, a lease whose blocks arrive later.
        """
        owner: Owner = (reader.id, lane)
        on_host: list[BlockRun] = []
        direct: list[BlockRun] = []
        staged: list[BlockRun] = []
        with self._lock:
            tier = self._device_tier(device)
            self._tick(tier)
            block_bytes = reader.shape.lanes[lane].block_bytes
            if ahead:
                if tier is not None and not tier.room(block_bytes):
                    tier, device = None, torch.device("cpu")
                chunks = self._within_budgets(tier, owner, chunks, block_bytes)
            lease = Lease(self, block_bytes, self._streams.get(device), chunks=chunks)
            try:
                self._await_moves_down(lease.stream)
                missing = chunks if tier is None else self._take(tier, owner, chunks, lease, lease.runs, account)
                missing = self._take(self.host, owner, missing, lease, on_host, account)
                rest = self._reserve(tier, missing, lease, direct) if tier is not None and self._direct else missing
                rest = self._reserve(self.host, rest, lease, staged)
                staged.extend(self.host.own_memory(rest, lease.block_bytes))
            except BaseException:  # no memory: leave nothing held
                self._let_go(lease)
                raise
            if direct:
                lease.stream.copied().synchronize()  # the disk writes past all streams: let evictions finish
        lease.from_disk = missing

        def arrive() -> None:
            lease.runs.extend(direct)
            self._arrive(reader, lane, on_host + staged, lease, tier)
            lease.runs.sort(key=lambda run: run[0])

        if not len(missing):
            _settle_future(lease.arrived, arrive)
            return lease

        def read(done: Future) -> None:
            def finish() -> None:
                failed = done.exception() is not None
                account.read_done(0 if failed else done.result().nbytes)
                found, lost = (0, len(missing)) if failed else (len(missing), 0)
                account.looked_up("disk", found, lost, lease.block_bytes)
                done.result()
                arrive()

            _settle_future(lease.arrived, finish)

        account.read_started()
        try:
            reading = reader.read(lane, direct + staged)
        except BaseException:  # the store was closed meanwhile
            account.read_done(0)
            with self._lock:
                self._let_go(lease)
            raise
        reading.add_done_callback(read)
        return lease

    def admit(self, owner: Owner, blocks: torch.Tensor) -> None:
        """Put freshly computed blocks, uint8 `[chunks, block_bytes]` on the CPU, into the host tier if they fit."""
        count, block_bytes = blocks.shape
        if count * block_bytes > self.host.budget:
            return
        chunks = np.arange(count)
        with self._lock:
            self._tick(None)
            wanted = chunks[self.host.lookup(owner, chunks) < 0]
            if not len(wanted):
                return
            pool, slots = self.host.acquire(block_bytes, len(wanted))
            if not len(slots):
                return
            wanted = wanted[: len(slots)]
        try:
            for first, memory in pool.runs(slots, wanted):
                memory.copy_(blocks[first : first + len(memory)])
            with self._lock:
                self.host.settle(pool, slots, owner, wanted, count)
        finally:  # slots that were not filled belong to nobody, and are free again
            with self._lock:
                self._unpin(self.host, pool, slots)

    def note_attention(self, owner: Owner, count: int, chunks: np.ndarray, mass: np.ndarray, share: np.ndarray) -> None:
        """A selector has chosen a share of `chunks` of a lane with `count`, to which queries pay so much attention."""
        self.scores.note(owner, count, chunks, mass, share)
        with self._lock:
            for tier in (self.host, *self.devices.values()):
                tier.rescore(owner, chunks)

    def where(self, owner: Owner, chunks: np.ndarray, device: torch.device) -> dict[str, int]:
        """How many of a lane's `chunks`, int64 ascending, each tier holds for `device`, by its name."""
        with self._lock:
            counts = {}
            tier = self.devices.get(device)
            for each in [self.host] if tier is None else [tier, self.host]:
                there = each.lookup(owner, chunks) >= 0
                counts[each.name] = int(there.sum())
                chunks = chunks[~there]
            return counts | {"disk": len(chunks)}

    def forget(self, segment_id: str) -> None:
        """A segment is gone: so are its blocks, but for those in use, and what was known of them."""
        self.scores.forget(segment_id)
        self.resident.forget(segment_id)
        with self._lock:
            for tier in (self.host, *self.devices.values()):
                tier.forget(segment_id)

    # --- steps of a fetch, under the lock

    def _tick(self, tier: Tier | None) -> None:
        self._clock += 1
        self.host.clock = self._clock
        if tier is not None:
            tier.clock = self._clock
        self._reap()

    def _within_budgets(self, tier: Tier | None, owner: Owner, chunks: np.ndarray, block_bytes: int) -> np.ndarray:
        """As many of `chunks` as find room now, ascending, and first of all those that need none."""
        target = tier or self.host
        there = target.lookup(owner, chunks) >= 0
        new = chunks[~there]
        if tier is not None and not self._direct:  # what is read passes through the host
            staged = np.flatnonzero(self.host.lookup(owner, new) < 0)
            passing = max(0, self.host.room(block_bytes) - (len(new) - len(staged)))
            new = np.delete(new, staged[passing:])
        room = max(0, target.room(block_bytes) - int(there.sum()))
        return np.sort(np.concatenate([chunks[there], new[:room]]))

    def _take(
        self, tier: Tier, owner: Owner, chunks: np.ndarray, lease: Lease, runs: list[BlockRun], account: Account
    ) -> np.ndarray:
        """Hold what `tier` has of `chunks`. Returns the chunks it has not."""
        slots = tier.lookup(owner, chunks)
        found = slots >= 0
        if found.any():
            pool = tier.pool(lease.block_bytes)
            tier.use(pool, slots[found])
            lease.held.append((tier, pool, slots[found]))
            runs.extend(pool.runs(slots[found], chunks[found]))
        account.looked_up(tier.name, int(found.sum()), int((~found).sum()), lease.block_bytes)
        return chunks[~found]

    def _reserve(self, tier: Tier, chunks: np.ndarray, lease: Lease, runs: list[BlockRun]) -> np.ndarray:
        """Reserve slots for as many `chunks` as `tier` has room for. Returns the others."""
        if not len(chunks) or not tier.budget:
            return chunks
        pool, slots = tier.acquire(lease.block_bytes, len(chunks))
        if len(slots):
            taken = chunks[: len(slots)]
            pool.chunk[slots] = taken
            lease.held.append((tier, pool, slots))
            runs.extend(pool.runs(slots, taken))
        return chunks[len(slots) :]

    def _arrive(
        self, reader: SegmentReader, lane: int, in_host: list[BlockRun], lease: Lease, tier: Tier | None
    ) -> None:
        """The bytes are in memory: move them up to the device, and enter them in the tier that keeps them."""
        with self._lock:
            moved = np.empty(0, np.int64)
            if tier is None:
                lease.runs.extend(in_host)
            elif in_host:
                moved = self._move_up(tier, sorted(in_host, key=lambda run: run[0]), lease)
            for holder, pool, slots in lease.held:
                new = slots[pool.owner[slots] == RESERVED]
                if holder is self.host:  # exclusive: what has moved up stays reserved, and is freed with the lease
                    new = new[~np.isin(pool.chunk[new], moved)]
                if len(new):
                    holder.settle(pool, new, (reader.id, lane), pool.chunk[new], reader.shape.chunks)
            if lease.stream is not None:  # also after what earlier leases are still copying to slots that this one uses
                lease.copied = lease.stream.copied()

    # --- between host and device

    def _move_up(self, tier: Tier, in_host: list[BlockRun], lease: Lease) -> np.ndarray:
        """Copy blocks to the device on the side stream. Returns the chunks that got a slot there."""
        chunks = np.concatenate([np.arange(first, first + len(blocks)) for first, blocks in in_host])
        targets: list[BlockRun] = []
        rest = self._reserve(tier, chunks, lease, targets)
        with lease.stream.copying():
            targets.extend(tier.own_memory(rest, lease.block_bytes))
            for source, target in overlaps(in_host, targets):
                target.copy_(source, non_blocking=True)
        lease.runs.extend(targets)
        lease.owns_memory = len(rest) > 0
        return chunks[: len(chunks) - len(rest)]

    def _move_down(
        self, device: torch.device, owner: Owner, count: int, chunks: np.ndarray, runs: list[BlockRun], usage: Usage
    ) -> None:
        """Blocks are evicted from a device: keep them on the host, as far as it has room and they are worth it."""
        block_bytes = runs[0][1].shape[1]
        if not self.host.budget:
            return
        kept = self.host.keeps(block_bytes, usage)
        chunks, runs = chunks[kept], list(some_of(runs, chunks[kept]))
        if not len(chunks):
            return
        stream = self._streams[device]
        down = Lease(self, block_bytes, stream, moves_down=True)
        targets: list[BlockRun] = []
        self._reserve(self.host, chunks, down, targets)
        if not targets:
            return
        with stream.copying():
            for source, target in overlaps(runs, targets):
                target.copy_(source, non_blocking=True)
            down.copied = stream.copied()
        _, pool, slots = down.held[0]
        self.host.settle(pool, slots, owner, pool.chunk[slots], count)
        self._retiring.append((down.copied, down))

    def _await_moves_down(self, stream: CopyStream | None) -> None:
        """Blocks on their way down are found on the host at once; only their own stream keeps the order by itself."""
        for _, lease in self._retiring:
            if lease.moves_down and lease.stream is not stream:
                lease.copied.synchronize()

    # --- the end of a lease

    def retire(self, lease: Lease) -> None:
        """The lease is over; its slots go when the device has done what it was given before now."""
        with self._lock:
            done = lease.stream.computed() if lease.stream else DoneEvent()
            if lease.owns_memory:
                # the allocator may give it to the side stream at once, which must not write to it before it was read
                lease.stream.await_computation(done)
                lease.runs.clear()
            self._retiring.append((done, lease))
            self._reap()

    def _reap(self) -> None:
        waiting = []
        for event, lease in self._retiring:
            if event.query() and lease.copied.query():
                self._let_go(lease)
            else:
                waiting.append((event, lease))
        self._retiring = waiting

    def _let_go(self, lease: Lease) -> None:
        """Nothing reads or writes the lease's blocks any more: unpin its slots, and free memory of its own."""
        for tier, pool, slots in lease.held:
            self._unpin(tier, pool, slots)
        lease.held.clear()
        lease.runs.clear()

    def _unpin(self, tier: Tier, pool: SlotPool, slots: np.ndarray) -> None:
        """Unpin, and free what nobody needs: reserved slots, and host slots whose block has moved up."""
        tier.unpin(pool, slots)
        idle = slots[pool.pins[slots] == 0]
        gone = pool.owner[idle] == RESERVED
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

    @property
    def evicted(self) -> int:
        return self.host.evicted + sum(tier.evicted for tier in self.devices.values())

    def clear(self) -> None:
        """Forget every block and give the memory back."""
        with self._lock:
            self.host.clear()
            self.devices.clear()
            self.resident.clear()


def _settle_future(future: Future[None], action: Callable[[], None]) -> None:
    """Resolve `future` with what `action` does."""
    try:
        action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
