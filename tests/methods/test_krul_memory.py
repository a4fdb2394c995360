"""Quick returns with Krul: the first tokens, which are not stored, come from memory while they are there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build_deep as build
from families import prompt
from thorough import pairs
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.calibrations import PrefixCosts, keep_prefix_costs
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Krul
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.tiers.residency import Residency

SETTINGS = {"layers_shared": 0.0, "geometry": Geometry(16, 1), "codec": "raw"}
TOKENS = 320


def run_turn(model, store, method, ids, suspend=True):
    """Run one turn. Return its logits, the tokens recomputed, and the bytes read from disk."""
    cache = TieredCache(model, store, conversation="alice", method=method, record=suspend)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=4).logits
    stats = cache.stats
    if suspend:
        assert not cache.suspend().reason
    return logits, stats.tokens_recomputed, stats.bytes_read


def expect(model, ids, logits):
    with torch.no_grad():
        expected = model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=4).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def front_of(store):
    return [storage_of(store).disk.reader(row.id).shape.held_from for row in store.segments()]


@pytest.mark.parametrize(("family", "share"), pairs(["qwen2", "gemma3", "qwen2_sliding"], [0.4, 0.8]))
def test_a_quick_return_recomputes_and_reads_nothing(family, share, root):
    model, method, text = build(family), Krul(recompute=share, **SETTINGS), prompt(TOKENS + 200)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
        for stop in range(TOKENS + 40, TOKENS + 200, 40):
            logits, recomputed, nbytes = run_turn(model, store, method, text[:, :stop])
            assert (recomputed, nbytes) == (0, 0)
            expect(model, text[:, :stop], logits)
            assert any(map(any, front_of(store)))  # decided on disk as before
        assert storage_of(store).residency.host.allocated <= storage_of(store).residency.host.budget


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_an_evicted_front_is_recomputed(codec, root):
    model, method, text = build("qwen2"), Krul(recompute=0.4, **SETTINGS | {"codec": codec}), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
        expected = round(np.mean(front_of(store)[0]))
        _, recomputed, _ = run_turn(model, store, method, text, suspend=False)
        assert recomputed == 0
        store.clear()
        logits, recomputed, _ = run_turn(model, store, method, text, suspend=False)
        assert recomputed == expected > 0
        if codec == "raw":
            expect(model, text, logits)
    with KVStore(root, engine="posix") as store:  # after a restart
        assert run_turn(model, store, method, text, suspend=False)[1] == expected


@pytest.mark.parametrize(("family", "codec"), pairs(["qwen2", "gemma3", "qwen2_sliding"], ["raw", "int8"]))
def test_a_front_is_recomputed_once_after_a_restart(family, codec, root):
    model, method, text = build(family), Krul(recompute=0.4, **SETTINGS | {"codec": codec}), prompt(TOKENS + 200)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
    with KVStore(root, engine="posix") as store:
        assert run_turn(model, store, method, text[:, : TOKENS + 40])[1] > 0
        for stop in range(TOKENS + 80, TOKENS + 200, 40):
            logits, *counts = run_turn(model, store, method, text[:, :stop])
            assert counts == [0, 0]
            if codec == "raw":
                expect(model, text[:, :stop], logits)
        assert storage_of(store).residency.host.allocated <= storage_of(store).residency.host.budget


def front_in_memory(store):
    """Return the recomputed first tokens of the store's only segment, which are in memory."""
    storage = storage_of(store)
    (row,) = store.segments()
    return storage.unstored.of(storage.disk.reader(row.id), None)


def evict(store, owner, chunk):
    """Evict a block from host memory."""
    host = storage_of(store).residency.host
    pool, slots, _ = host.find(owner, np.array([chunk]))
    host.discard(pool, slots)


def test_layers_keep_what_they_recompute_after_losing_it(root):
    """One layer has lost blocks: those are computed again, once."""
    model, method, text = build("qwen2"), Krul(recompute=0.4, **SETTINGS), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
        front = front_in_memory(store)
        evict(store, front.owners[0], front.shape.chunks_in(front.shape.block_groups[0]) - 1)
        assert run_turn(model, store, method, text)[1] > 0
        logits, *counts = run_turn(model, store, method, text, suspend=False)
        assert counts == [0, 0]
        expect(model, text, logits)


@pytest.mark.parametrize("changed", [False, True])
def test_a_front_of_changed_weights_is_not_kept(root, monkeypatch, changed):
    """The weights change after the pass, and before the first tokens that it has computed are put into memory."""
    model, method, text = build("qwen2"), Krul(recompute=0.4, **SETTINGS), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
    with KVStore(root, engine="posix") as store:
        fronts = storage_of(store).unstored
        real_put = fronts.put

        def put_after_change(front, confirmed):
            if changed:
                model.model.layers[-1].mlp.down_proj.weight.data.view(-1)[1500:] *= 3
            real_put(front, confirmed)

        monkeypatch.setattr(fronts, "put", put_after_change)
        cache = TieredCache(model, store, conversation="alice", method=method)
        with torch.no_grad():
            model(input_ids=text, past_key_values=cache, logits_to_keep=4)
        assert cache.stats.tokens_recomputed > 0
        store.flush()
        assert bool(fronts.segments) is not changed


def test_each_layer_recomputes_what_it_has_lost(root):
    """Blocks of one layer are evicted: this layer and those before it compute up to there, and no layer after it."""
    model, method, text = build("qwen2"), Krul(recompute=0.4, **SETTINGS), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
        front = front_in_memory(store)
        evict(store, front.owners[front.shape.restoring_groups[2][0].index], 1)
        logits, recomputed, nbytes = run_turn(model, store, method, text, suspend=False)
        assert (recomputed, nbytes) == (3 * 32 / 6, 0)
        expect(model, text, logits)


def test_blocks_that_are_evicted_during_a_pass_are_recomputed(root, monkeypatch):
    model, method, text = build("qwen2"), Krul(recompute=0.4, **SETTINGS), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
        fetch, cleared = Residency.fetch, []

        def clearing(self, *args, **more):
            if not cleared:
                cleared.append(True)
                self.clear()
            return fetch(self, *args, **more)

        monkeypatch.setattr(Residency, "fetch", clearing)
        logits, recomputed, nbytes = run_turn(model, store, method, text)
        monkeypatch.undo()
        assert cleared and recomputed > 0 and nbytes > 0
        expect(model, text, logits)
        assert store.stats.read_errors == 0 and len(store.segments()) >= 1
        logits, _, _ = run_turn(model, store, method, text, suspend=False)
        expect(model, text, logits)


def test_a_front_that_does_not_fit_is_not_kept(root):
    model, method, text = build("qwen2"), Krul(recompute=0.4, **SETTINGS), prompt(TOKENS + 40)
    with KVStore(root, engine="posix", host_memory=300_000) as store:
        run_turn(model, store, method, text[:, :TOKENS])
        logits, recomputed, _ = run_turn(model, store, method, text)
        assert recomputed > 0 and store.stats.host.bytes <= 300_000
        expect(model, text, logits)


@pytest.mark.parametrize("compute", [1e-5, 1e-3])
def test_the_cost_model_knows_what_is_in_memory(root, compute):
    model, method, text = build("qwen2"), Krul(**SETTINGS), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        restore = {"host": 1e-7, "disk": 1e-3}
        costs = [PrefixCosts(TOKENS, compute, restore, restore, 1e-3)]
        keep_prefix_costs(storage_of(store), Fingerprinter(model)(), torch.device("cpu"), "exact", costs)
        run_turn(model, store, method, text[:, :TOKENS])
        assert any(front_of(store)[0])
        assert run_turn(model, store, method, text, suspend=False)[1:] == (0, 0)


def test_pairs_of_layers_keep_their_merged_kv(root):
    """The KV from memory is that of the first turn, and the shared KV of pairs is the merged one."""
    settings = SETTINGS | {"layers_shared": 0.7, "change": 1.0, "quality": None}
    model, method, text = build("qwen2"), Krul(recompute=0.4, **settings), prompt(TOKENS + 40)
    with KVStore(root, engine="posix") as store:
        run_turn(model, store, method, text[:, :TOKENS])
        quick, recomputed, _ = run_turn(model, store, method, text, suspend=False)
        assert recomputed == 0
        store.clear()
        slow, recomputed, _ = run_turn(model, store, method, text, suspend=False)
        assert recomputed > 0
        torch.testing.assert_close(quick, slow, atol=1e-3, rtol=1e-3)
