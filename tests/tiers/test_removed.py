"""What is removed is gone: from memory too, whoever removed it and whatever is stored under its name afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import hashes, open_store, runs_of, segment

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.tiers.collector import StatsCollector
from hf_tiered_cache.tiers.handles import BlockRequest
from hf_tiered_cache.tiers.residency import Residency

CPU = torch.device("cpu")
IDS = prompt(60)


@pytest.fixture(scope="module")
def expected(model):
    """Compute the logits after IDS in a plain pass."""
    with torch.no_grad():
        return model(input_ids=IDS, logits_to_keep=1).logits


def ask(model, store, shift=0.0):
    """Return the logits through the store. With a shift, the model is another one with the same identity."""
    hook = model.model.layers[0].register_forward_hook(lambda module, args, out: out + shift) if shift else None
    try:
        cache = TieredCache(model, store)
        with torch.no_grad():
            return model(input_ids=IDS, past_key_values=cache, logits_to_keep=1).logits, cache.stats
    finally:
        if hook is not None:
            hook.remove()


def in_memory(store):
    store._storage.writer.flush()  # what follows a lookup is done then
    return store._storage.residency.segments() | set(store._storage.rewriter.importance._mass)


actions = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["remove", "ask", "ask", "store wrong", "gc", "relayout"])),
    min_size=3,
    max_size=9,
)


@settings(max_examples=settings.default.max_examples // 2)
@given(actions=actions)
def test_two_stores_on_one_folder_never_serve_what_was_removed(model, expected, tmp_path_factory, actions):
    """Wrong KV lies in the store, and memory, until it is removed; from then on every answer is right."""
    root = tmp_path_factory.mktemp("store")
    with KVStore(root) as first_store, KVStore(root) as second_store:
        stores, wrong = (first_store, second_store), False
        for index, action in actions:
            store = stores[index]
            if action == "remove":
                first_store.flush()
                second_store.flush()
                store.remove([row.id for row in store.segments()])
                wrong = False
            elif action == "store wrong":
                wrong = wrong or not store.segments()
                ask(model, store, shift=0.1)
                store.flush()
            elif action == "gc":
                store.gc()
            elif action == "relayout":
                store.relayout(ContiguousKV(0.5), progress=False)
            elif not wrong:
                logits, _ = ask(model, store)
                store.flush()
                assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("how", ["remove", "clear", "another process", "quota", "relayout", "gc"])
def test_memory_forgets_what_the_disk_forgets(model, tmp_path, how):
    with KVStore(tmp_path, ttl=None if how != "gc" else 0.2, free_space_floor=0) as store:
        ask(model, store)
        store.flush()
        ask(model, store)
        (segment_id,) = [row.id for row in store.segments()]
        assert in_memory(store) == {segment_id}
        if how == "remove":
            store.remove([segment_id])
        elif how == "clear":
            store.clear(disk=True)
        elif how == "another process":
            with KVStore(tmp_path) as other_store:
                other_store.remove([segment_id])
            ask(model, store)
            store.flush()
            store.remove([row.id for row in store.segments()])  # what was stored anew
        elif how == "quota":
            store._storage.disk.remove([segment_id], "evicted_segments")
        elif how == "relayout":
            store.relayout(ContiguousKV(0.5), progress=False)
        else:
            import time

            time.sleep(0.3)
            store.gc()
        assert segment_id not in in_memory(store)
        assert not any(pool.pins.any() for pool in store._storage.residency.host.pools())


def test_what_another_process_removed_is_forgotten_at_the_next_look_up(model, tmp_path):
    with KVStore(tmp_path) as store:
        store.precompute(model, IDS, progress=False)  # in memory as it was computed, and never opened
        with KVStore(tmp_path) as other_store:
            other_store.remove([row.id for row in other_store.segments()])
        assert store.lookup(model, IDS).stored == 0
        assert in_memory(store) == set()


def test_a_dropped_write_leaves_nothing_in_memory(model, tmp_path):
    with KVStore(tmp_path, disk_quota=1, free_space_floor=0) as store:
        ask(model, store)
        store.flush()
        assert store.stats.dropped_writes == 1
        assert in_memory(store) == set()


def test_the_loser_of_a_race_serves_what_is_on_the_disk(tmp_path):
    """Its own blocks, admitted before it lost, are of other content."""
    store, residency = open_store(tmp_path), Residency(1 << 20)
    header, chain, block_groups = segment(hashes(6))
    own_blocks = torch.zeros_like(block_groups[0])
    residency.admit((header.id, 0, 123), own_blocks)
    store.publish(header, chain, block_groups)
    reader = store.reader(header.id)
    lease = residency.fetch([BlockRequest(reader, 0, np.arange(6))], CPU, StatsCollector())
    lease.wait()
    assert torch.equal(torch.cat([blocks for _, blocks in runs_of(lease)]), block_groups[0])
    residency.release(lease)
    assert (residency.host.lookup((header.id, 0, 123), np.arange(6)) < 0).all()


def test_a_request_under_way_reads_on_and_leaves_nothing(tmp_path):
    store, residency = open_store(tmp_path), Residency(1 << 20)
    store.on_gone.append(residency.forget)
    header, chain, block_groups = segment(hashes(6))
    store.publish(header, chain, block_groups)
    reader = store.reader(header.id)
    before = residency.fetch([BlockRequest(reader, 0, np.arange(6))], CPU, StatsCollector())
    before.wait()
    store.remove([header.id])
    after = residency.fetch([BlockRequest(reader, 1, np.arange(6))], CPU, StatsCollector())
    after.wait()
    for block_group, lease in enumerate((before, after)):
        assert torch.equal(torch.cat([blocks for _, blocks in runs_of(lease)]), block_groups[block_group])
        residency.release(lease)
    assert residency.segments() == set()
    (pool,) = residency.host.pools()
    assert (pool.owner < 0).all()
    assert not pool.pins.any()


def test_a_file_that_was_replaced_is_opened_anew(tmp_path):
    store, other_store = open_store(tmp_path), open_store(tmp_path)
    header, chain, block_groups = segment(hashes(6), fill=1)
    store.publish(header, chain, block_groups)
    before = store.reader(header.id)
    other_store.remove([header.id])
    other_store.publish(header, chain, [torch.full_like(blocks, 2) for blocks in block_groups])
    after = store.reader(header.id)
    assert before.gone
    assert after is store.reader(header.id)
    assert before.owners[0] != after.owners[0]
