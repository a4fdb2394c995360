"""What came of stored KV is counted whichever tier it came from, and what for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import build, prompt
from test_selective import METHOD, METHODS, PREFIX, ask, fill, question

from hf_tiered_cache import Exact, KVStore
from hf_tiered_cache.methods import CacheBlend, KVDrive

FAMILY = "qwen2"

RESIDENT = ("contiguous_kv index",)


def purposes(stats):
    return stats.details.bytes_delivered, stats.details.bytes_delivered_identifying


def from_disk(stats):
    return stats.disk.bytes, stats.details.bytes_identifying


def asked(model, store, ids, method, times=1):
    return [ask(model, store, question(ids), method)[1].stats for _ in range(times)]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in RESIDENT])  # which is read once
@pytest.mark.thin(2)
def test_what_memory_has_counts_as_what_the_disk_has(name, model, tmp_path):
    ids, method = prompt(PREFIX), replace(METHODS[name], ahead_bytes=0)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        cold = asked(model, store, ids, method)[0]
    with KVStore(tmp_path, engine="posix", host_memory="64MiB") as store:
        ask(model, store, question(ids), Exact())  # of what it restores all is in memory then
        warm = asked(model, store, ids, method)[0]
    assert purposes(cold) == purposes(warm) == from_disk(cold)
    assert warm.disk.bytes < cold.disk.bytes
    assert cold.details.bytes_delivered > cold.details.bytes_delivered_identifying


@pytest.mark.parametrize("name", METHODS)
def test_an_index_is_read_once_and_told(name, model, tmp_path):
    ids, method = prompt(PREFIX), replace(METHODS[name], ahead_bytes=0)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        first, second = asked(model, store, ids, method, times=2)
        index_bytes = store._storage.residency.index_cache.allocated
    assert first.details.index_bytes == second.details.index_bytes == index_bytes
    assert bool(index_bytes) == (name in RESIDENT)
    if index_bytes:
        assert first.details.bytes_delivered_identifying > 0 == second.details.bytes_delivered_identifying
    else:
        assert purposes(first) == purposes(second)


def test_the_exact_method_is_given_all_of_it(model, tmp_path):
    ids = prompt(PREFIX)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, Exact())
        (stats,) = asked(model, store, ids, Exact())
        lookup = store.lookup(model, question(ids), method=Exact())
    assert purposes(stats) == (sum(lookup.bytes.values()), 0)
    assert stats.details.index_bytes == 0


def test_what_a_comparison_needs_and_no_layer_attends_to_counts_apart(tmp_path):
    model = build("qwen2", num_hidden_layers=4)
    passages = prompt(160, seed=2, rows=2)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, passages, method=CacheBlend(), progress=False, passages=True)
        _, cache = ask(model, store, torch.cat([passages.reshape(1, -1), prompt(24)], dim=1), CacheBlend())
    stats = cache.stats
    assert 0 < stats.details.bytes_superseded <= stats.bytes_read - stats.details.bytes_used


def test_decoded_tokens_count_what_they_ask_for(model, tmp_path):
    """They count nothing, or the newly selected blocks that the layers did not hold."""
    ids, bytes_delivered = prompt(PREFIX), {}
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids)
        for reselect in (False, True):
            stats = asked(model, store, ids, replace(METHOD, reselect=reselect, gain=0))[0]
            assert purposes(stats) == from_disk(stats)
            bytes_delivered[reselect] = stats.details.bytes_delivered
    assert bytes_delivered[1] > bytes_delivered[0]


def test_the_keys_of_an_index_are_brought_once(model, tmp_path):
    ids, method = prompt(400), KVDrive(budget=0.2, local=16, ahead_bytes=0)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        first, stats = asked(model, store, ids, method, times=2)
        lookup_bytes = sum(store.lookup(model, question(ids), method=method).bytes.values())
        index_bytes = store._storage.residency.index_cache.allocated
    # values are stored with the keys
    assert (first.details.bytes_delivered_identifying, stats.details.bytes_delivered_identifying) == (lookup_bytes, 0)
    assert first.details.index_bytes == stats.details.index_bytes == index_bytes > 0
    assert stats.details.bytes_delivered == sum(tier.bytes for tier in stats.tiers.values())
