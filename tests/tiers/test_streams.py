"""Copies, reads from disk and computation touch no memory at once: every order that matters is said by somebody.

Random requests run through the tiers under a happens-before checker (`happens_before.py`). It finds nothing; and as
soon as any one synchronisation is taken away, it does.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from happens_before import (
    COMPUTATION,
    COPIES,
    HOST,
    CopiesEvent,
    Memory,
    Race,
    Watch,
    WatchedStream,
    WorkEvent,
    World,
    join,
)
from segments import LAYOUT
from thorough import pairs

from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.store.shape import SegmentShape
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers import residency as residency_module
from hf_tiered_cache.tiers.collector import StatsCollector
from hf_tiered_cache.tiers.device import DoneEvent
from hf_tiered_cache.tiers.handles import BlockRequest, LateCheck, Pin, Pins
from hf_tiered_cache.tiers.residency import Residency

GPU, OTHER = torch.device("cpu"), torch.device("meta")
"""Where attention runs: a device with a tier of its own, which is memory of the CPU here, and one without."""
SHAPE = SegmentShape(LAYOUT, Geometry(), 160)
BLOCK_BYTES = SHAPE.block_groups[0].block_bytes
CHUNKS = SHAPE.chunks_in(SHAPE.block_groups[0])
"""Of any block group."""
STEPS = 120
SEEDS = range(60)
FEW_SEEDS, MORE_SEEDS = SEEDS[:5], SEEDS[5:]


class Reader:
    """Reader with the attributes that the tiers need."""

    def __init__(self, number: int) -> None:
        self.id, self.shape, self.gone = f"segment {number}", SHAPE, False
        self.verifies = True
        self.owners = [(self.id, block_group.index, 0) for block_group in SHAPE.block_groups]

    def caused(self, error: BaseException) -> bool:
        return False


class WholeBlocks(LateCheck):
    """Check on the device that reads its blocks, and finds no error. Its own memory does not belong to the tiers."""

    def __init__(self, stream, batches) -> None:
        blocks = [run for *_, runs in batches for _, run in runs]
        stream.world.act(COPIES, blocks, [], "check")
        self._mismatches, self._done_event = torch.zeros(len(blocks), dtype=torch.bool), stream.copied()
        self._intact = None


class Inline:
    """Engine that starts reads in this thread, so that each run is the same."""

    def do(self, action) -> None:
        action()


class Disk:
    """Engine whose reads write to memory at any time between their submission and their end."""

    def __init__(self, world: World) -> None:
        self.world, self.pending = world, []

    def read_batch(self, requests, unseen=()):
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        runs = [run for *_, runs in (*requests, *unseen) for _, run in runs]
        self.pending.append((future, self.world.new_actor(), runs))
        return future

    def finish(self, count: int) -> None:
        for _ in range(min(count, len(self.pending))):
            future, actor, runs = self.pending.pop(self.world.random.randrange(len(self.pending)))
            self.world.act(actor, [], runs, "read from disk", launched=False)
            join(self.world.clocks[HOST], self.world.clocks[actor])
            future.set_result(sum(run.numel() for run in runs))


class Run:
    """Random sequence of operations of caches on the tiers."""

    def __init__(self, seed: int, direct: bool, monkeypatch) -> None:
        self.random = random.Random(seed)
        self.world = World(self.random)
        self.disk, memory, stream = Disk(self.world), Memory(self.world), WatchedStream(self.world)
        monkeypatch.setattr(device_module, "aligned_bytes", memory.allocate)
        monkeypatch.setattr(residency_module, "LateCheck", WholeBlocks)
        monkeypatch.setattr(device_module, "copy_stream", lambda device: stream)
        monkeypatch.setattr(residency_module, "read_batch", self.disk.read_batch)
        self.direct = direct
        self.residency = self.open()
        self.readers = [Reader(number) for number in range(3)]
        self.leases, self.kept = [], []

    def open(self) -> Residency:
        """Open the tiers of a store."""
        blocks = (0, 6, 14, 40), (0, 6, 14, 25), (0, 6, 25)
        host, device, staging = (self.random.choice(counts) * BLOCK_BYTES for counts in blocks)
        residency = Residency(
            host and host + 4096,
            device and device + 4096,
            self.random.choice(["lru", "lfu"]),
            device_types=frozenset({GPU.type}),
            direct=self.direct,
            staging_budget=staging and staging + 4096,
        )
        residency._read_worker = Inline()
        return residency

    def reopen(self) -> None:
        """Close the store while the device has work to do, and open another one."""
        while self.leases:
            self.end(self.leases.pop())
        self.disk.finish(len(self.disk.pending))
        self.residency.clear()
        self.residency = self.open()
        gc.collect()

    def go(self, later_access: str | None = None) -> None:
        """Run until there is a race, or one whose later access has this name."""
        with Watch(self.world):
            for self.world.now in range(STEPS):
                if self.found(later_access):
                    break
                random = self.random.random()
                if random < 0.42:
                    self.fetch()
                elif random < 0.58:
                    self.disk.finish(self.random.randint(1, 3))
                elif random < 0.68:
                    self.record()
                elif random < 0.70:
                    self.residency.forget([self.random.choice(self.readers).id])
                elif random < 0.71:
                    self.reopen()
                elif self.leases:
                    self.end(self.leases.pop(self.random.randrange(len(self.leases))))

    def found(self, later_access: str | None) -> bool:
        return any(later_access in (None, race.later_access) for race in self.world.races)

    def fetch(self) -> None:
        """Fetch blocks of one or two segments for the device, now or ahead, or all for a model on the host."""
        device, requests = GPU if self.random.random() < 0.75 else OTHER, []
        for reader in self.readers if device is OTHER else self.random.sample(self.readers, self.random.choice((1, 2))):
            count = CHUNKS if device is OTHER else self.random.randint(1, CHUNKS)
            chunks = np.array(sorted(self.random.sample(range(CHUNKS), count)))
            requests.append(BlockRequest(reader, self.random.randint(0, 1), chunks))
        ahead, sample = self.random.random() < 0.3, self.random.sample(self.readers, self.random.choice((0, 0, 1, 3)))
        later_requests = [BlockRequest(reader, self.random.randint(0, 1), np.arange(CHUNKS)) for reader in sample]
        lease = self.residency.fetch(requests, device, StatsCollector(), ahead, later_requests)
        if device is OTHER or self.random.random() < 0.3:
            self.end(lease)
        else:
            self.leases.append(lease)

    def record(self) -> None:
        """Admit computed blocks to the host tier."""
        block_group = self.random.randint(0, 1)
        blocks = torch.empty(CHUNKS, SHAPE.block_groups[block_group].block_bytes, dtype=torch.uint8)
        self.kept.append(blocks)
        self.residency.admit(self.random.choice(self.readers).owners[block_group], blocks)

    def end(self, lease) -> None:
        """Let a layer use the fetched blocks, or release them unused."""
        if self.random.random() < 0.85:
            while not lease.has_arrived:
                self.disk.finish(1)
            lease.wait()
            for leased in lease.fetched:
                blocks = [run for _, run in leased.arrived.runs()]
                actor = HOST if lease.pin.stream is None else COMPUTATION
                self.world.act(actor, blocks, [], "attention")
            if self.random.random() < 0.7:
                self.residency.confirm(lease)
        self.residency.release(lease)


def races(monkeypatch, direct: bool, seeds: Iterable[int] = SEEDS, later_access: str | None = None) -> set[Race]:
    """Return the races of the first run that has any, or one whose later access has this name."""
    for seed in seeds:
        with monkeypatch.context() as patch:
            run = Run(seed, direct, patch)
            try:
                run.go(later_access)
            except Exception:
                if not run.world.races:  # else the books broke behind it
                    raise
        if run.found(later_access):
            return set(run.world.races)
    return set()


@pytest.mark.parametrize("seeds", [FEW_SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.thorough)], ids=repr)
@pytest.mark.parametrize("direct", [False, True])
def test_no_two_accesses_are_left_to_chance(monkeypatch, direct, seeds):
    assert races(monkeypatch, direct, seeds) == set()


def no_wait_for_copies(patch):
    patch.setattr(WatchedStream, "await_copies", lambda stream, event: None)


def no_wait_for_computation(patch):
    patch.setattr(WatchedStream, "await_computation", lambda stream, event: None)


def no_event_of_computation(patch):
    patch.setattr(WatchedStream, "computed", lambda stream: DoneEvent())


def no_event_of_copies(patch):
    patch.setattr(WatchedStream, "copied", lambda stream: DoneEvent())


def slots_go_with_the_lease(patch):
    """Release slots with the handle, not when the device is done with them."""

    def end(pin):
        pin.release_event = DoneEvent()
        return pin.release_event

    patch.setattr(Pin, "end", end)


def slots_go_before_their_copies_are_done(patch):
    patch.setattr(CopiesEvent, "query", lambda event: True)


def slots_go_while_the_disk_fills_them(patch):
    patch.setattr(Pin, "reading", property(lambda pin: False, lambda pin, value: None))


def the_host_reads_what_is_still_moving_down(patch):
    patch.setattr(Pins, "await_moves_down", lambda pins, stream: None)


def blocks_are_collected_while_they_move_down(patch):
    patch.setattr(Pins, "are_moving_down", lambda pins: False)


def a_store_closes_with_work_queued(patch):
    patch.setattr(Pins, "order_work", lambda pins: None)


def nobody_waits_for_events(patch):
    patch.setattr(WorkEvent, "synchronize", lambda event: None)


ALWAYS = [
    no_wait_for_copies,
    no_wait_for_computation,
    no_event_of_computation,
    no_event_of_copies,
    slots_go_with_the_lease,
    slots_go_before_their_copies_are_done,
    slots_go_while_the_disk_fills_them,
    the_host_reads_what_is_still_moving_down,
    blocks_are_collected_while_they_move_down,
    a_store_closes_with_work_queued,
]


@pytest.mark.parametrize(("removed", "direct"), pairs(ALWAYS, [False, True]))
def test_each_synchronisation_that_is_taken_away_is_missed(monkeypatch, removed, direct):
    removed(monkeypatch)
    assert races(monkeypatch, direct)


def test_a_direct_read_waits_for_what_is_moving_down(monkeypatch):
    nobody_waits_for_events(monkeypatch)
    assert races(monkeypatch, direct=True, later_access="read from disk")
