"""Blocks come from the fastest tier that has them, each tier within its budget, no block in two tiers.

The device tier runs here on the CPU, through the same code; tests/gpu repeats the essentials on CUDA.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from segments import hashes, open_store, runs_of, segment
from side_stream import Pending
from threads import run_in_threads

from hf_tiered_cache.errors import IntegrityError, StoreClosedError
from hf_tiered_cache.store.memory import aligned_bytes
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers import pool as pool_module
from hf_tiered_cache.tiers import residency as residency_module
from hf_tiered_cache.tiers.collector import StatsCollector
from hf_tiered_cache.tiers.device import CopyStream, DoneEvent
from hf_tiered_cache.tiers.handles import BlockRequest
from hf_tiered_cache.tiers.residency import Residency
from hf_tiered_cache.tiers.slabs import overlaps

CPU = torch.device("cpu")
CHUNKS = 10


@pytest.fixture
def stored(tmp_path):
    """Create a store with two segments of ten chunks, and their blocks by segment and KV cache group."""
    store = open_store(tmp_path)
    blocks = {}
    for seed in "ab":
        header, chain, block_groups = segment(hashes(CHUNKS, seed))
        store.publish(header, chain, block_groups)
        for block_group, data in enumerate(block_groups):
            blocks[header.id, block_group] = data
    readers = [store.reader(i) for i in sorted({key[0] for key in blocks})]
    return store, readers, blocks


def fetch(residency, reader, block_group, chunks, collector=None, release=True):
    lease = residency.fetch([BlockRequest(reader, block_group, np.asarray(chunks))], CPU, collector or StatsCollector())
    lease.wait()
    blocks_by_chunk = {first + i: block.clone() for first, run in runs_of(lease) for i, block in enumerate(run)}
    if release:
        residency.release(lease)
    return blocks_by_chunk if release else (blocks_by_chunk, lease)


def fetch_fails(residency, reader, error):
    """Assert that a fetch fails immediately, or when it is waited for."""
    with pytest.raises(error):
        lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, StatsCollector())
        try:
            lease.wait()
        finally:
            residency.release(lease)


def nothing_is_pinned(residency):
    return not any(pool.pins.any() for tier in residency.tiers for pool in tier._pools.values())


def check(blocks_by_chunk, blocks, reader, block_group, chunks):
    assert sorted(blocks_by_chunk) == sorted(chunks)
    for chunk, block in blocks_by_chunk.items():
        assert torch.equal(block, blocks[reader.id, block_group][chunk])


def tiers_of(residency, reader, block_group):
    """Return the tiers of each chunk."""
    owner, chunks = reader.owners[block_group], np.arange(CHUNKS)
    result = [set() for _ in chunks]
    for name, tier in [("host", residency.host), *(("device", t) for t in residency.tiers[1::2])]:
        for chunk in np.flatnonzero(tier.lookup(owner, chunks) >= 0):
            result[chunk].add(name)
    return result


requests = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.sets(st.integers(0, CHUNKS - 1), min_size=1)),
    min_size=1,
    max_size=12,
)


def of_blocks(host, device, staging, direct, policy="lru"):
    """Open tiers with room for so many blocks each, and the CPU as the device."""
    return Residency(
        host * 4096,
        device * 4096,
        policy,
        device_types=frozenset({"cpu"}) if device or staging else frozenset(),
        direct=direct,
        staging_budget=staging * 4096,
    )


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(fetches=requests, host=st.integers(0, 40), device=st.integers(0, 40), staging=st.integers(0, 20))
@pytest.mark.thin(2)
def test_any_budgets_give_the_right_blocks_and_are_kept(stored, fetches, host, device, staging, policy, direct):
    _, readers, blocks = stored
    residency = of_blocks(host, device, staging, direct, policy)
    for index, block_group, chunks in fetches:
        chunks = sorted(chunks)
        check(fetch(residency, readers[index], block_group, chunks), blocks, readers[index], block_group, chunks)
        assert all(tier.allocated <= tier.budget for tier in residency.tiers)
        for reader in readers:
            for number in (0, 1):
                assert all(len(tiers) <= 1 for tiers in tiers_of(residency, reader, number))


@pytest.mark.parametrize("direct", [False, True])
@given(fetches=requests, host=st.integers(0, 40), device=st.integers(0, 40), staging=st.integers(0, 20))
def test_what_is_fetched_ahead_lies_within_the_budgets(stored, fetches, host, device, staging, direct):
    _, readers, blocks = stored
    on_device = device + staging > 0
    residency = of_blocks(host, device, staging, direct)
    for index, block_group, chunks in fetches:
        chunks = np.array(sorted(chunks))
        with patch.object(pool_module.Tier, "own_memory", lambda self, part, size: iter([1 / 0] if len(part) else [])):
            lease = residency.fetch(
                [BlockRequest(readers[index], block_group, chunks)], CPU, StatsCollector(), ahead=True
            )
            lease.wait()
        blocks_by_chunk = {first + i: block for first, run in runs_of(lease) for i, block in enumerate(run)}
        check(blocks_by_chunk, blocks, readers[index], block_group, lease.fetched[0].chunks.tolist())
        assert np.isin(lease.fetched[0].chunks, chunks).all()
        assert not on_device or not slabs_of(residency.host) & {
            run.untyped_storage().data_ptr() for run in blocks_by_chunk.values()
        }
        residency.release(lease)
        check(
            fetch(residency, readers[index], block_group, chunks), blocks, readers[index], block_group, chunks
        )  # now they are needed
    assert nothing_is_pinned(residency)


def slabs_of(*tiers):
    """Return the places of the memory of these tiers."""
    slabs = [slab for tier in tiers for pool in tier.pools() for slab in pool.slabs if slab is not None]
    return {slab.untyped_storage().data_ptr() for slab in slabs}


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_fetched_ahead_reaches_a_device_that_keeps_nothing_and_stays_on_the_host(stored, direct, monkeypatch):
    _, (reader, _), blocks = stored
    registered, read_into, real = [], [], residency_module.read_batch

    def read(*batches):
        all_runs = [run for batch in batches for _, _, runs in batch for _, run in runs]
        read_into.extend(run.untyped_storage().data_ptr() for run in all_runs)
        return real(*batches)

    monkeypatch.setattr(residency_module, "read_batch", read)
    residency = Residency(
        1 << 20, device_types=frozenset({"cpu"}), direct=direct, staging_budget=1 << 20, register=registered.append
    )
    for turn in range(2):
        collector = StatsCollector()
        lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, collector, ahead=True)
        lease.wait()
        (gpu,) = residency._gpus.values()
        blocks_by_chunk = {first + i: block for first, run in runs_of(lease) for i, block in enumerate(run)}
        check(blocks_by_chunk, blocks, reader, 0, range(CHUNKS))
        assert {block.untyped_storage().data_ptr() for block in blocks_by_chunk.values()} <= slabs_of(gpu.staging)
        assert 0 < residency.device_bytes[0] <= residency.device_bytes[1] == 1 << 20
        residency.release(lease)
        assert collector.stats.host.hits == turn * CHUNKS
    assert set(read_into) <= slabs_of(gpu.staging if direct else residency.host)
    assert {slab.untyped_storage().data_ptr() for slab in registered} == slabs_of(gpu.staging)
    assert tiers_of(residency, reader, 0) == [{"host"}] * CHUNKS
    assert nothing_is_pinned(residency)


def test_what_finds_no_room_on_the_device_is_left_until_it_is_needed(stored):
    """Otherwise, it would be gathered from the host by copies that the device waits for."""
    _, (reader, _), blocks = stored
    size = reader.shape.block_groups[0].block_bytes
    residency = Residency(1 << 20, device_types=frozenset({"cpu"}), staging_budget=4 * size + 4096)
    lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, StatsCollector(), ahead=True)
    lease.wait()
    assert lease.fetched[0].chunks.tolist() == [0, 1, 2, 3]
    blocks_by_chunk, own_lease = fetch(residency, reader, 0, range(4, CHUNKS), release=False)  # in memory of its own
    check(blocks_by_chunk, blocks, reader, 0, range(4, CHUNKS))
    assert own_lease.owns_memory
    residency.release(lease)
    residency.release(own_lease)
    assert nothing_is_pinned(residency)


class Allocations:
    """Record of allocations: tier, whether in the main thread, and whether with the lock, while slots are taken."""

    def __init__(self, *tiers):
        self.made = []
        for tier in tiers:
            tier.allocate = partial(self.allocate, tier, tier.allocate)

    def allocate(self, tier, real, nbytes):
        frame, names = sys._getframe(1), set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        main = threading.current_thread() is threading.main_thread()
        self.made.append((tier.name, main, "_grow" in names))
        return real(nbytes)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("device", [0, 14])
def test_slabs_are_made_outside_of_the_lock(stored, monkeypatch, device, direct):
    """This includes those for blocks that leave the device or pass through it."""
    _, readers, blocks = stored
    size = readers[0].shape.block_groups[0].block_bytes
    monkeypatch.setattr(pool_module, "SLAB_BYTES", 4 * size + 4096)
    residency = Residency(
        100 * size, device * size, device_types=frozenset({"cpu"}), staging_budget=30 * size, direct=direct
    )
    gpu = residency._gpu(CPU)
    noted = Allocations(residency.host, gpu.tier, gpu.staging)
    for reader in readers:
        check(fetch(residency, reader, 0, range(CHUNKS)), blocks, reader, 0, range(CHUNKS))
        residency.admit(("other", 0, len(noted.made)), blocks[reader.id, 0])
    assert {name for name, _, _ in noted.made} == {"host", "device" if device else "staging"}
    assert [slab for slab in noted.made if slab[2]] == []
    assert all(tier.allocated <= tier.budget for tier in residency.tiers)


def test_a_page_locked_slab_is_made_before_it_is_needed(stored, monkeypatch):
    _, (a, b), blocks = stored
    size = a.shape.block_groups[0].block_bytes
    monkeypatch.setattr(pool_module, "SLAB_BYTES", CHUNKS * size + 4096)  # a slab for each block group
    residency = Residency(4 * (CHUNKS * size + 4096))
    residency._allocates_ahead = True
    noted = Allocations(residency.host)
    check(fetch(residency, a, 0, range(CHUNKS)), blocks, a, 0, range(CHUNKS))
    deadline = time.monotonic() + 10
    while residency.host.allocated <= CHUNKS * size + 4096 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(main for _, main, _ in noted.made) == [False, True]
    check(fetch(residency, b, 0, range(CHUNKS)), blocks, b, 0, range(CHUNKS))
    assert [main for _, main, _ in noted.made].count(True) == 1
    assert not any(locked for _, _, locked in noted.made)
    assert residency.host.allocated <= residency.host.budget
    residency.clear()


def test_what_there_is_room_for_comes_ahead_whole(stored):
    _, (reader, _), _ = stored
    residency = Residency(1 << 20)
    for expected in (0, CHUNKS):  # the second time from memory
        collector = StatsCollector()
        lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, collector, ahead=True)
        lease.wait()
        assert lease.fetched[0].chunks.tolist() == list(range(CHUNKS))
        assert collector.stats.host.hits == expected
        residency.release(lease)


def test_a_second_fetch_reads_nothing(stored):
    _, (reader, _), blocks = stored
    residency = Residency(1 << 20)
    first, second = StatsCollector(), StatsCollector()
    check(fetch(residency, reader, 0, range(CHUNKS), first), blocks, reader, 0, range(CHUNKS))
    check(fetch(residency, reader, 0, range(CHUNKS), second), blocks, reader, 0, range(CHUNKS))
    assert (first.stats.disk.hits, first.stats.host.misses) == (CHUNKS, CHUNKS)
    assert first.stats.bytes_read == CHUNKS * reader.shape.block_groups[0].block_bytes
    assert (second.stats.host.hits, second.stats.disk.blocks, second.stats.bytes_read) == (CHUNKS, 0, 0)


def test_only_what_is_missing_is_read(stored):
    _, (reader, _), _ = stored
    residency = Residency(1 << 20)
    fetch(residency, reader, 0, [2, 3, 7])
    collector = StatsCollector()
    blocks_by_chunk, lease = fetch(residency, reader, 0, range(CHUNKS), collector, release=False)
    assert lease.fetched[0].from_disk.tolist() == [0, 1, 4, 5, 6, 8, 9]
    assert (
        collector.stats.bytes_read == CHUNKS * reader.shape.block_groups[0].block_bytes
    )  # small gaps are read through, and counted
    assert len(blocks_by_chunk) == CHUNKS
    residency.release(lease)


def test_a_block_moves_up_to_the_device_and_down_when_it_is_evicted(stored):
    _, (a, b), blocks = stored
    size = a.shape.block_groups[0].block_bytes
    residency = Residency(1 << 20, CHUNKS * size + 4096, device_types=frozenset({"cpu"}))
    fetch(residency, a, 0, range(CHUNKS))
    assert tiers_of(residency, a, 0) == [{"device"}] * CHUNKS
    fetch(residency, b, 0, range(CHUNKS))
    assert tiers_of(residency, b, 0) == [{"device"}] * CHUNKS
    assert tiers_of(residency, a, 0) == [{"host"}] * CHUNKS
    collector = StatsCollector()
    check(fetch(residency, a, 0, range(CHUNKS), collector), blocks, a, 0, range(CHUNKS))
    assert (collector.stats.host.hits, collector.stats.disk.blocks) == (CHUNKS, 0)
    collector = StatsCollector()
    fetch(residency, a, 0, range(CHUNKS), collector)
    assert (collector.stats.device.hits, collector.stats.host.hits, collector.stats.bytes_read) == (CHUNKS, 0, 0)


def test_with_gds_blocks_come_from_disk_to_the_device_without_the_host(stored):
    _, (reader, _), blocks = stored
    residency = Residency(1 << 20, 1 << 20, device_types=frozenset({"cpu"}), direct=True)
    check(fetch(residency, reader, 1, range(CHUNKS)), blocks, reader, 1, range(CHUNKS))
    assert tiers_of(residency, reader, 1) == [{"device"}] * CHUNKS
    assert residency.host.allocated == 0


def test_a_batch_is_one_submission_and_brings_each_its_own(stored, monkeypatch):
    _, (a, b), blocks = stored
    submitted, real = [], a.backend.read

    def submit(ops):
        submitted.append(ops)
        return real(ops)

    monkeypatch.setattr(a.backend, "read", submit)
    residency, collector = Residency(1 << 20), StatsCollector()
    fetch(residency, b, 0, [3])
    submitted.clear()
    batch = [(a, 0, [0, 1, 7]), (b, 0, [2, 3, 4]), (a, 1, [9])]
    lease = residency.fetch(
        [BlockRequest(r, block_group, np.array(chunks)) for r, block_group, chunks in batch], CPU, collector
    )
    lease.wait()
    for (reader, block_group, chunks), leased in zip(batch, lease.fetched, strict=True):
        blocks_by_chunk = {first + i: block for first, run in leased.arrived.runs() for i, block in enumerate(run)}
        check(blocks_by_chunk, blocks, reader, block_group, chunks)
    residency.release(lease)
    assert len(submitted) == 1
    assert [leased.from_disk.tolist() for leased in lease.fetched] == [[0, 1, 7], [2, 4], [9]]
    assert (collector.stats.host.hits, collector.stats.disk.blocks) == (1, 6)
    assert nothing_is_pinned(residency)


def test_what_one_request_of_a_batch_needs_is_not_evicted_for_another(stored):
    _, (a, b), _ = stored
    size = a.shape.block_groups[0].block_bytes
    residency, collector = Residency(CHUNKS * size + 4096), StatsCollector()
    fetch(residency, b, 0, range(CHUNKS))
    chunks = np.arange(CHUNKS)
    lease = residency.fetch([BlockRequest(a, 0, chunks), BlockRequest(b, 0, chunks)], CPU, collector)
    lease.wait()
    residency.release(lease)
    assert (collector.stats.host.hits, collector.stats.disk.blocks) == (CHUNKS, CHUNKS)


@pytest.mark.parametrize("bad", [0, 1])
def test_of_a_batch_the_segment_at_fault_is_named(stored, bad):
    store, readers, blocks = stored
    path = store.path(readers[bad].id)
    with open(path, "r+b") as file:
        file.seek(readers[bad].header.blocks.offset)
        file.write(b"damage")
    residency = Residency(1 << 20)
    lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS)) for reader in readers], CPU, StatsCollector())
    with pytest.raises(IntegrityError):
        lease.wait()
    assert lease.failed is readers[bad]
    residency.release(lease)
    assert nothing_is_pinned(residency)
    other_reader = readers[1 - bad]
    check(fetch(residency, other_reader, 0, range(CHUNKS)), blocks, other_reader, 0, range(CHUNKS))


def test_blocks_in_use_are_not_evicted(stored):
    _, (a, b), blocks = stored
    size = a.shape.block_groups[0].block_bytes
    residency = Residency(CHUNKS * size + 4096)
    lease = residency.fetch([BlockRequest(a, 0, np.arange(CHUNKS))], CPU, StatsCollector())
    lease.wait()
    check(fetch(residency, b, 0, range(CHUNKS)), blocks, b, 0, range(CHUNKS))  # in memory of its own
    for first, run in runs_of(lease):
        for i, block in enumerate(run):
            assert torch.equal(block, blocks[a.id, 0][first + i])
    assert tiers_of(residency, a, 0) == [{"host"}] * CHUNKS
    residency.release(lease)


def test_a_damaged_block_fails_the_lease_and_frees_its_slots(stored):
    store, (reader, other_reader), blocks = stored
    path = store.path(reader.id)
    data = bytearray(path.read_bytes())
    data[reader.header.blocks.offset + 4 * reader.shape.block_groups[0].block_bytes] ^= 4
    with open(path, "r+b") as file:
        file.write(data)
    residency = Residency(1 << 20)
    collector = StatsCollector()
    lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, collector)
    with pytest.raises(IntegrityError) as caught:
        lease.wait()
    assert caught.value.valid_hashes == 4
    residency.release(lease)
    assert (collector.stats.disk.hits, collector.stats.disk.misses) == (0, CHUNKS)
    assert tiers_of(residency, reader, 0) == [set()] * CHUNKS
    assert all((pool.owner < 0).all() and not pool.pins.any() for pool in residency.host._pools.values())
    check(fetch(residency, other_reader, 0, range(CHUNKS)), blocks, other_reader, 0, range(CHUNKS))


def test_a_tier_that_gets_no_memory_stays_as_it_is(stored):
    """The blocks arrive in the request's own memory, and nothing remains held."""
    _, (reader, other_reader), blocks = stored
    residency, sizes = Residency(1 << 20), []

    def refuse_a_slab(nbytes):
        sizes.append(nbytes)
        if len(sizes) == 1:
            raise MemoryError("planted")
        return aligned_bytes(nbytes)

    residency.host.allocate = refuse_a_slab
    check(fetch(residency, reader, 0, range(CHUNKS)), blocks, reader, 0, range(CHUNKS))
    assert residency.host.budget == residency.host.allocated == 0
    check(fetch(residency, other_reader, 0, range(CHUNKS)), blocks, other_reader, 0, range(CHUNKS))


def test_a_fetch_that_cannot_begin_holds_nothing(stored, monkeypatch):
    _, (reader, _), blocks = stored
    residency = Residency(1 << 20)
    fetch(residency, reader, 0, range(4))

    def refuse(*args):
        raise MemoryError("planted")

    for target in ((pool_module.Tier, "own_memory"), (residency_module, "read_batch")):
        with monkeypatch.context() as patch:
            patch.setattr(*target, refuse)
            fetch_fails(residency, reader, MemoryError)
        assert nothing_is_pinned(residency)
    check(fetch(residency, reader, 0, range(CHUNKS)), blocks, reader, 0, range(CHUNKS))


def test_a_fetch_after_the_engine_was_closed_holds_nothing(stored):
    store, (reader, _), _ = stored
    residency = Residency(1 << 20)
    fetch(residency, reader, 0, range(4))
    store.backend.engine.close()
    fetch_fails(residency, reader, StoreClosedError)
    assert nothing_is_pinned(residency)


def test_a_device_without_memory_fails_the_fetch_and_frees_its_slots(stored):
    _, (reader, _), blocks = stored
    residency = Residency(1 << 20, device_types=frozenset({"cpu"}), staging_budget=0)
    fetch(residency, reader, 0, range(CHUNKS))
    _, tier, _ = residency.tiers
    allocate = tier.allocate_own

    def refuse(nbytes):
        raise torch.OutOfMemoryError("planted")

    tier.allocate_own = refuse
    with pytest.raises(torch.OutOfMemoryError):
        residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, StatsCollector())
    assert nothing_is_pinned(residency)
    tier.allocate_own = allocate
    check(fetch(residency, reader, 0, range(CHUNKS)), blocks, reader, 0, range(CHUNKS))


def test_blocks_that_cannot_be_admitted_leave_their_slots_free(stored):
    _, (reader, _), blocks = stored
    residency, owner, segment_blocks = Residency(1 << 20), reader.owners[0], blocks[reader.id, 0]
    with pytest.raises(RuntimeError):
        residency.admit(owner, segment_blocks.to("meta"))  # such a copy fails midway
    assert all((pool.owner < 0).all() and not pool.pins.any() for pool in residency.host._pools.values())
    residency.admit(owner, segment_blocks)
    assert tiers_of(residency, reader, 0) == [{"host"}] * CHUNKS


def test_blocks_that_find_no_slot_are_not_admitted(stored):
    _, (a, b), blocks = stored
    residency = Residency(CHUNKS * a.shape.block_groups[0].block_bytes + 4096)
    _, lease = fetch(residency, a, 0, range(CHUNKS), release=False)  # all of the tier
    residency.admit(b.owners[0], blocks[b.id, 0])
    assert residency.host.segments() == {a.id}
    residency.release(lease)


@pytest.mark.parametrize("first_in", ["fetch", "admit"])
def test_blocks_come_and_go_in_and_out_of_inference_mode(stored, first_in):
    """Requests of users run in it, the writer's thread does not."""
    _, (a, b), blocks = stored
    residency = Residency(1 << 20)

    def admit():
        residency.admit(b.owners[0], blocks[b.id, 0])

    def serve(reader):
        check(fetch(residency, reader, 0, range(CHUNKS)), blocks, reader, 0, range(CHUNKS))

    with torch.inference_mode():
        serve(a) if first_in == "fetch" else admit()
    admit() if first_in == "fetch" else serve(a)
    collector = StatsCollector()
    check(fetch(residency, b, 0, range(CHUNKS), collector), blocks, b, 0, range(CHUNKS))
    assert collector.stats.host.hits == CHUNKS
    with torch.inference_mode():
        serve(b)
    assert nothing_is_pinned(residency)


@pytest.mark.parametrize("device_types", [frozenset(), frozenset({"cpu"})])
def test_a_released_lease_keeps_no_memory_alive(stored, device_types):
    _, (reader, _), _ = stored
    residency = Residency(0, device_types=device_types)
    lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, StatsCollector())
    lease.wait()
    assert runs_of(lease)
    residency.release(lease)
    assert lease.fetched[0].parts == ()


def test_memory_of_a_lease_comes_in_pieces_no_larger_than_a_slab(stored, monkeypatch):
    _, (reader, _), blocks = stored
    size = reader.shape.block_groups[0].block_bytes
    monkeypatch.setattr(pool_module, "SLAB_BYTES", 4 * size + 4096)
    residency = Residency(0)
    blocks_by_chunk, lease = fetch(residency, reader, 0, [0, 1, 2, 3, 4, 5, 8, 9], release=False)
    check(blocks_by_chunk, blocks, reader, 0, [0, 1, 2, 3, 4, 5, 8, 9])
    assert [(first, len(run)) for first, run in runs_of(lease)] == [(0, 4), (4, 2), (8, 2)]
    residency.release(lease)


def test_a_lease_released_before_it_arrives_lets_go_when_it_does(stored):
    _, (reader, _), blocks = stored
    residency = Residency(1 << 20)
    for _ in range(20):
        residency.release(residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, StatsCollector()))
    check(fetch(residency, reader, 0, range(CHUNKS)), blocks, reader, 0, range(CHUNKS))
    deadline = time.monotonic() + 10
    while any(pool.pins.any() for pool in residency.host._pools.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_many_threads_at_once(stored):
    _, readers, blocks = stored
    size = readers[0].shape.block_groups[0].block_bytes
    residency = Residency(14 * size, 7 * size, device_types=frozenset({"cpu"}))

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(40):
            reader, block_group = readers[random.integers(2)], int(random.integers(2))
            chunks = sorted(random.choice(CHUNKS, random.integers(1, CHUNKS), replace=False).tolist())
            check(fetch(residency, reader, block_group, chunks), blocks, reader, block_group, chunks)

    run_in_threads(work, range(6))
    assert residency.host.allocated <= residency.host.budget


def test_fresh_blocks_are_admitted_and_served_without_a_read(stored):
    _, (reader, _), blocks = stored
    residency = Residency(1 << 20)
    residency.admit(reader.owners[0], blocks[reader.id, 0])
    collector = StatsCollector()
    check(fetch(residency, reader, 0, range(CHUNKS), collector), blocks, reader, 0, range(CHUNKS))
    assert collector.stats.bytes_read == 0
    residency.admit(reader.owners[0], blocks[reader.id, 0])  # again: nothing happens
    assert not any(pool.pins.any() for pool in residency.host._pools.values())


class SlowStream(CopyStream):
    """A side stream during a computation that is not finished. It notes what it is told."""

    def __init__(self):
        self.pending, self.within, self.log = Pending(), False, []

    @contextmanager
    def copying(self):
        before, self.within = self.within, True
        yield
        self.within = before

    def copied(self):
        self.log.append("copied")
        return DoneEvent()

    def computed(self):
        return self.pending

    def await_computation(self, event):
        self.log.append(event)


@pytest.fixture
def stream(monkeypatch):
    """Return the side stream of the only device."""
    slow_stream = SlowStream()
    monkeypatch.setattr(device_module, "copy_stream", lambda device: slow_stream)
    return slow_stream


def test_slots_wait_for_the_device_to_be_done_with_them(stored, stream):
    """A stream whose work is not finished holds the slots that it reads."""
    _, (reader, _), _ = stored
    residency = Residency(1 << 20, 1 << 20, device_types=frozenset({"cpu"}))
    fetch(residency, reader, 0, range(CHUNKS))
    _, tier, _ = residency.tiers
    assert any(pool.pins.any() for pool in tier._pools.values())
    assert stream.pending not in stream.log  # copies to other slots need not wait
    stream.pending.done = True
    fetch(residency, reader, 1, [0])
    assert not any(pool.pins[pool.owner >= 0][:CHUNKS].any() for pool in tier._pools.values())


@pytest.mark.parametrize("device_budget", [0, 1 << 20])
def test_device_memory_is_allocated_on_the_stream_that_fills_it(stored, stream, monkeypatch, device_budget):
    _, (reader, _), _ = stored
    within = []

    def allocate(nbytes, *, pin=False, device=None):
        if device is not None:
            within.append(stream.within)
        return aligned_bytes(nbytes, pin=pin)

    monkeypatch.setattr(device_module, "aligned_bytes", allocate)
    fetch(Residency(1 << 20, device_budget, device_types=frozenset({"cpu"})), reader, 0, range(CHUNKS))
    assert within
    assert all(within)


def test_memory_of_a_lease_is_free_at_once_and_written_to_after_it_was_read(stored, stream):
    """Otherwise, restored blocks stay in memory until the device has caught up with the thread."""
    _, (reader, _), _ = stored
    residency = Residency(1 << 20, device_types=frozenset({"cpu"}), staging_budget=0)
    _, lease = fetch(residency, reader, 0, range(CHUNKS), release=False)
    assert [(first, len(run)) for first, run in runs_of(lease)] == [(0, CHUNKS)]
    residency.release(lease)
    assert lease.fetched[0].parts == ()
    assert stream.log == ["copied", stream.pending]


def test_a_direct_read_waits_for_what_is_copied_from_its_slots(stored, stream, monkeypatch):
    _, (reader, _), _ = stored
    real = residency_module.read_batch

    def read(*batches):
        stream.log.append("read")
        return real(*batches)

    monkeypatch.setattr(residency_module, "read_batch", read)
    monkeypatch.setattr(DoneEvent, "synchronize", lambda event: stream.log.append("waited"))
    residency = Residency(1 << 20, 1 << 20, device_types=frozenset({"cpu"}), direct=True)
    fetch(residency, reader, 0, range(CHUNKS))
    assert stream.log == ["copied", "waited", "read", "copied", "copied"]  # after the check, and after all of it


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_overlaps_pairs_every_block_with_its_own(first, second):
    total = min(sum(first), sum(second))

    def cover(sizes):
        numbers, runs, at = torch.arange(total).unsqueeze(1), [], 0
        for size in sizes:
            if at < total:
                runs.append((at, numbers[at : min(total, at + size)]))
                at += size
        return runs

    pairs = list(overlaps(cover(first), cover(second)))
    assert torch.equal(torch.cat([a for a, _ in pairs]), torch.arange(total).unsqueeze(1))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_io_time_counts_overlapping_reads_once():
    collector = StatsCollector()
    collector.read_started()
    collector.read_started()
    collector.read_done(10)
    assert collector.stats.details.io_seconds == 0
    collector.read_done(5)
    assert collector.stats.details.io_seconds > 0
    assert collector.stats.bytes_read == 15


def test_futures_are_what_the_reader_gives(stored):
    """The engine's future is not resolved before the check has been made."""
    _, (reader, _), _ = stored
    future = reader.read(0, [])
    assert isinstance(future, Future)
    assert future.result(timeout=10) == 0


# --- who stays


def told(residency, reader, block_group, chunks, mass):
    """Report that a selector has chosen whole chunks, with so much attention each."""
    count = len(chunks)
    noted = reader.owners[block_group], CHUNKS, np.asarray(chunks), np.full(count, mass), np.ones(count)
    residency.note_attention([noted])


@pytest.mark.parametrize("policy", ["attention", "importance"])
def test_what_comes_from_disk_stays_only_where_it_stands_higher(stored, policy):
    _, (a, b), blocks = stored
    size = a.shape.block_groups[0].block_bytes
    residency = Residency(4 * size + 4096, policy=policy)
    for _ in range(3):
        told(residency, a, 0, range(4), 0.5)
    fetch(residency, a, 0, range(4))
    told(residency, b, 0, range(2), 0.25)  # chosen once: less than those that are there
    check(fetch(residency, b, 0, range(6)), blocks, b, 0, range(6))  # all come, whoever stays
    assert tiers_of(residency, a, 0)[:4] == [{"host"}] * 4
    assert tiers_of(residency, b, 0) == [set()] * CHUNKS
    for _ in range(5):
        told(residency, b, 0, range(2), 0.5)
    fetch(residency, b, 0, range(6))
    assert tiers_of(residency, b, 0) == [{"host"}] * 2 + [set()] * (CHUNKS - 2)
    assert sum(map(len, tiers_of(residency, a, 0))) == 2


def test_of_blocks_that_nobody_has_spoken_of_the_last_stay(stored):
    """A policy by scores is LRU for methods that report none."""
    _, (a, b), _ = stored
    residency = Residency(CHUNKS * a.shape.block_groups[0].block_bytes + 4096, policy="attention")
    fetch(residency, a, 0, range(CHUNKS))
    fetch(residency, b, 0, range(CHUNKS))
    assert tiers_of(residency, b, 0) == [{"host"}] * CHUNKS
    assert tiers_of(residency, a, 0) == [set()] * CHUNKS


def test_the_host_keeps_what_stands_higher_than_what_the_device_gives_up(stored):
    _, (a, b), _ = stored
    size = a.shape.block_groups[0].block_bytes
    budget = 2 * size + 4096
    residency = Residency(budget, budget, "attention", device_types=frozenset({"cpu"}), direct=True)
    for chunks, mass in (([0, 1], 0.1), ([2, 3], 0.5), ([4, 5], 0.9)):
        told(residency, a, 0, chunks, mass)
    fetch(residency, a, 0, [2, 3])
    fetch(residency, a, 0, [4, 5])  # these move up, those down
    assert tiers_of(residency, a, 0)[2:6] == [{"host"}, {"host"}, {"device"}, {"device"}]
    told(residency, b, 0, [0, 1], 2.0)
    told(residency, a, 0, [2, 3], 2.0)  # now the host has more than what the device is going to give up
    fetch(residency, b, 0, [0, 1])
    assert tiers_of(residency, b, 0)[:2] == [{"device"}] * 2
    assert tiers_of(residency, a, 0)[2:6] == [{"host"}, {"host"}, set(), set()]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("policy", ["attention", "importance"])
@given(
    fetches=requests,
    host=st.integers(0, 40),
    device=st.integers(0, 40),
    staging=st.integers(0, 20),
    ahead=st.booleans(),
)
@pytest.mark.thin(2)
def test_any_budgets_give_the_right_blocks_by_scores_too(stored, fetches, host, device, staging, ahead, policy, direct):
    _, readers, blocks = stored
    residency = of_blocks(host, device, staging, direct, policy)
    for number, (index, block_group, chunks) in enumerate(fetches):
        reader, chunk_array = readers[index], np.array(sorted(chunks))
        told(residency, reader, block_group, chunk_array[::2], 1 / (1 + number))
        lease = residency.fetch([BlockRequest(reader, block_group, chunk_array)], CPU, StatsCollector(), ahead=ahead)
        lease.wait()
        blocks_by_chunk = {first + i: block.clone() for first, run in runs_of(lease) for i, block in enumerate(run)}
        check(blocks_by_chunk, blocks, reader, block_group, lease.fetched[0].chunks.tolist())
        residency.release(lease)
        assert all(tier.allocated <= tier.budget for tier in residency.tiers)
        for reader in readers:
            for group in (0, 1):
                assert all(len(tiers) <= 1 for tiers in tiers_of(residency, reader, group))
    assert nothing_is_pinned(residency)
