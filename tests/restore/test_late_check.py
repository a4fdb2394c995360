"""Checks on the device of blocks that the disk writes there directly.

No thread waits for a check during a pass, and nothing computed from a damaged block outlives the pass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build, prompt
from segments import hashes, open_store, runs_of, segment
from side_stream import SideStream, with_device
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import IntegrityError
from hf_tiered_cache.layers import dense as dense_module
from hf_tiered_cache.methods import ContiguousKV, Exact, Impress
from hf_tiered_cache.restore.fetch import Fetcher
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers.collector import StatsCollector
from hf_tiered_cache.tiers.handles import BlockRequest
from hf_tiered_cache.tiers.residency import Residency
from hf_tiered_cache.tiers.slabs import RESERVED

GREEDY = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
IDS = torch.cat([prompt(200), prompt(20, seed=9)], dim=1)
CPU, CHUNKS = torch.device("cpu"), 10


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=8)


def stored(model, path, method=None):
    """Create a store of the prompt's first 200 tokens."""
    with KVStore(path, engine="posix") as store:
        store.precompute(model, prompt(200), method=method, progress=False)


def damage(store, block_group, *chunks, first=0):
    """Fill blocks of the one segment, or all from `first` on, with large numbers. Returns their layers."""
    (row,) = store.segments()
    reader = store._storage.disk.reader(row.id)
    block_group = range(len(reader.shape.block_groups))[block_group]
    size = reader.shape.block_groups[block_group].block_bytes
    with open(store._storage.disk.path(row.id), "r+b") as data:
        for chunk in chunks or range(first, reader.shape.chunks_in(reader.shape.block_groups[block_group])):
            data.seek(reader.header.blocks.offset + reader.shape.group_offsets[block_group] + chunk * size)
            data.write(bytes([0x42]) * size)  # 48.6 each
    return reader.shape.block_groups[block_group].layers


def ask(model, store, method=None, record=True, new=6):
    cache = TieredCache(model, store, method=method, record=record)
    return model.generate(IDS, past_key_values=cache, **GREEDY | {"max_new_tokens": new}), cache


def same(output, expected):
    assert torch.equal(output.sequences, expected.sequences)
    for a, b in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# --- whole blocks


@pytest.mark.parametrize("layers_per_block", [1, 4])
def test_nobody_waits_for_checks_before_the_end_of_a_pass(model, tmp_path, monkeypatch, layers_per_block):
    """The pass waits there once per batch that was read; warm passes and decoded tokens do not wait."""
    stored(model, tmp_path, Exact(geometry=Geometry(16, layers_per_block)))
    store, stream = with_device(monkeypatch, tmp_path)
    ended = []

    def confirm(fetcher, real=Fetcher.confirm):
        ended.append((len(fetcher._unconfirmed), stream.waits["MainThread"]))
        real(fetcher)

    monkeypatch.setattr(Fetcher, "confirm", confirm)
    with store:
        _, cache = ask(model, store, record=False)
        assert cache.stats.tokens_restored == 192
        assert cache.stats.bytes_read > 0
        batches = 8 // layers_per_block
        ((unknown, waits),) = ended
        assert waits == 0
        assert 1 <= unknown <= batches
        assert 1 <= stream.waits["MainThread"] <= unknown
        stream.waits.clear()
        _, warm = ask(model, store, record=False)
        assert (warm.stats.device.hits, warm.stats.bytes_read) == (warm.stats.device.blocks, 0)
        assert stream.waits["MainThread"] == 0
    assert not stream.depth


# --- damaged ones


@pytest.mark.parametrize("block_group", [0, 1])
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_pass_over_a_damaged_block_is_undone_and_planned_again(model, tmp_path, monkeypatch, block_group, chunk):
    stored(model, tmp_path)
    submitted = []
    store, _ = with_device(monkeypatch, tmp_path)
    with store:
        damage(store, block_group, chunk)
        monkeypatch.setattr(
            store._storage.writer, "submit", lambda pending, wait=True: submitted.append(kv_in(pending))
        )
        output, cache = ask(model, store)
        same(output, model.generate(IDS, **GREEDY))
        details = cache.stats.details
        assert (details.verification_failures, details.recomputed) == (1, 1)
        assert cache.stats.tokens_restored == 16 * chunk
        assert store.stats.verification_failures == 1
        cache.reset()
    assert submitted  # computed around the damage: what came of the damaged block is in none of it
    assert all(numbers.abs().max() < 20 for kv in submitted for numbers in kv)


def kv_in(pending):
    return [blocks.view(torch.float32) for blocks in pending.block_groups()]


def test_an_error_that_damage_has_led_to_is_not_the_users(model, tmp_path, monkeypatch):
    def restore(prefetch, plan, layer, kind, dtype, keys, values, *args, real=dense_module.restore_layer):
        real(prefetch, plan, layer, kind, dtype, keys, values, *args)
        if max(tensor[:, :, : plan.suffix].abs().max() for tensor in (keys, values)) > 20:
            raise ValueError("the model cannot stand this")

    monkeypatch.setattr(dense_module, "restore_layer", restore)
    stored(model, tmp_path)
    store, _ = with_device(monkeypatch, tmp_path)
    with store:
        damage(store, 1, 4)
        output, cache = ask(model, store, record=False)
        assert (cache.stats.details.verification_failures, cache.stats.tokens_restored) == (1, 64)
    same(output, model.generate(IDS, **GREEDY))


def test_without_checks_the_same_damage_is_seen_by_nobody_and_spoils_the_answer(model, tmp_path, monkeypatch):
    """This shows that the tests here would notice a pass that is not undone."""
    stored(model, tmp_path)
    store, stream = with_device(monkeypatch, tmp_path, verify=False)
    with store:
        damage(store, 0, 7)
        output, cache = ask(model, store, record=False)
        assert (cache.stats.details.verification_failures, stream.waits["MainThread"]) == (0, 0)
        assert (output.logits[0] - model.generate(IDS, **GREEDY).logits[0]).abs().max() > 1e-3


CHOOSING = {
    "contiguous_kv index": ContiguousKV(0.25, chunk_tokens=16, reselect=False),
    "contiguous_kv keys": ContiguousKV(0.25, chunk_tokens=16, identify="keys", reselect=False),
    "contiguous_kv again": ContiguousKV(0.25, chunk_tokens=16, gain=0),
    "impress": Impress(0.25, probe_heads=2),
}


@pytest.mark.parametrize(("name", "block_group"), pairs(CHOOSING, [0, -1]))
def test_a_choice_is_never_made_from_damaged_keys(model, tmp_path, monkeypatch, name, block_group):
    """Answers and reports are the same whether the host or the device checks."""
    results, method = [], CHOOSING[name]
    for direct in (False, True):
        path = tmp_path / str(direct)
        stored(model, path, method)
        with monkeypatch.context() as patched:
            store = with_device(patched, path)[0] if direct else KVStore(path, engine="posix")
            with store:
                damage(store, block_group, first=1)
                store._storage.disk.sidecars.remove([row.id for row in store.segments()])  # a kept index is whole
                for _ in range(2):
                    output, cache = ask(model, store, method, record=False)
                    results.append((output, cache.stats.tokens_restored, cache.stats.details.verification_failures))
                    for keys in store._storage.residency.index_cache._keys.values():
                        assert keys.scales.max() < 20 / 127
    half = len(results) // 2
    for (output, *counts), (expected, *expected_counts) in zip(results[half:], results[:half], strict=True):
        same(output, expected)
        assert counts == expected_counts
    assert results[0][2] > 0


def test_a_token_that_would_bring_a_damaged_block_keeps_what_was_chosen(model, tmp_path, monkeypatch):
    method = ContiguousKV(0.25, period=2, identify="index", reselect=True, gain=0)
    stored(model, tmp_path, method)
    store, _ = with_device(monkeypatch, tmp_path)
    with store:
        cache = TieredCache(model, store, method=method, record=False)
        with torch.no_grad():
            model(IDS, past_key_values=cache, logits_to_keep=1)
            store._storage.residency.clear()
            layers = damage(store, 1)
            before = [chosen_keys(cache, layer).clone() for layer in layers]
            for token in range(4):
                model(IDS[:, token : token + 1], past_key_values=cache)
        assert cache.stats.details.verification_failures > 0
        assert all(torch.equal(keys, chosen_keys(cache, layer)) for keys, layer in zip(before, layers, strict=True))


def chosen_keys(cache, layer):
    source = cache.layers[layer]
    return source.keys[:, :, : source._num_selected]


def test_warming_reports_a_damaged_block(model, tmp_path, monkeypatch):
    stored(model, tmp_path)
    store, _ = with_device(monkeypatch, tmp_path)
    with store:
        damage(store, 1, 4)
        store.warm(model, IDS, progress=False)
        assert store.stats.verification_failures == 1
        assert store.lookup(model, IDS).stored == 64


# --- who finds what meanwhile


@pytest.fixture
def open_segment(tmp_path, monkeypatch):
    """Open a residency with direct reads, a segment, and its blocks by KV cache group."""
    disk = open_store(tmp_path)
    header, chain, blocks = segment(hashes(CHUNKS))
    disk.publish(header, chain, blocks)
    stream = SideStream()
    monkeypatch.setattr(device_module, "copy_stream", lambda device: stream)
    residency = Residency(0, 1 << 20, device_types=frozenset({"cpu"}), direct=True)
    return residency, disk, header.id, blocks


def fetch(residency, reader, block_group=0):
    collector = StatsCollector()
    lease = residency.fetch([BlockRequest(reader, block_group, np.arange(CHUNKS))], CPU, collector)
    lease.wait()
    return lease, collector.stats


def test_blocks_are_found_by_others_when_they_are_known_to_be_whole(open_segment):
    residency, disk, name, blocks = open_segment
    reader = disk.reader(name)
    first, _ = fetch(residency, reader)
    assert torch.equal(torch.cat([run for _, run in runs_of(first)]), blocks[0])  # and used meanwhile
    chunks = np.arange(CHUNKS)
    assert len(residency.find(reader.owners[0], chunks, CPU)["device"]) == 0
    second, stats = fetch(residency, reader)
    assert stats.device.hits == 0
    residency.release(first)
    residency.confirm(first)  # also when it was let go
    assert len(residency.find(reader.owners[0], chunks, CPU)["device"]) == CHUNKS
    third, stats = fetch(residency, reader)
    assert (stats.device.hits, stats.bytes_read) == (CHUNKS, 0)
    for lease in (second, third):
        residency.release(lease)
    residency.release(fetch(residency, reader, 1)[0])
    _, tier, _ = residency.tiers
    assert tier.allocated <= tier.budget


def test_slots_are_never_free_before_their_blocks_are_kept_or_not(open_segment):
    """Otherwise, another handle could take its slots. The check may end between two queries."""
    residency, disk, name, _ = open_segment
    reader = disk.reader(name)
    lease, _ = fetch(residency, reader)
    check, stream = lease.pin.check, residency._gpu(CPU).stream
    check.is_done = lambda: False
    stream.done = stream.recorded
    residency.release(lease)
    assert lease.pin.on_verified == []
    assert not residency._pins
    assert len(residency.find(reader.owners[0], np.arange(CHUNKS), CPU)["device"]) == CHUNKS


def test_a_damaged_block_gets_into_no_tier_and_its_slots_are_free_again(open_segment):
    residency, disk, name, _ = open_segment
    reader = disk.reader(name)
    offset = reader.header.blocks.offset + 4 * reader.shape.block_groups[0].block_bytes + 9
    with open(disk.path(name), "r+b") as data:
        data.seek(offset)
        byte = data.read(1)
        data.seek(offset)
        data.write(bytes([byte[0] ^ 1]))
    lease, _ = fetch(residency, reader)
    with pytest.raises(IntegrityError, match="KV cache group 0, chunk 4") as caught:
        residency.confirm(lease)
    assert (lease.failed, caught.value.valid_hashes) == (reader, 4)
    assert not lease.is_confirmed
    residency.release(lease)
    residency.release(fetch(residency, reader, 1)[0])
    assert len(residency.find(reader.owners[0], np.arange(CHUNKS), CPU)["device"]) == 0
    _, tier, _ = residency.tiers
    assert not any((pool.owner[pool.pins == 0] == RESERVED).any() for pool in tier.pools())


def test_blocks_of_a_segment_that_is_removed_meanwhile_are_not_kept(open_segment):
    residency, disk, name, _ = open_segment
    disk.on_gone.append(residency.forget)
    reader = disk.reader(name)
    lease, _ = fetch(residency, reader)
    disk.remove([name])
    residency.release(lease)
    residency.confirm(lease)
    assert residency.segments() == set()
