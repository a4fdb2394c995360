"""What a store has of a prompt, and where, without computing."""

from __future__ import annotations

import pytest
import torch
from families import prompt

from hf_tiered_cache import ConfigError, KVStore, TieredCache, reasons
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Passages


@pytest.fixture
def uncomputed(model, monkeypatch):
    """Fail if the model computes."""

    def forward(*args, **kwargs):
        raise AssertionError("the model was run")

    monkeypatch.setattr(type(model), "__call__", forward)


def test_nothing_stored_has_a_reason(store, model, uncomputed):
    lookup = store.lookup(model, prompt(100))
    assert (lookup.tokens, lookup.stored, sum(lookup.bytes.values())) == (100, 0, 0)
    assert lookup.reason == reasons.NOTHING


def test_blocks_are_found_in_the_tier_where_they_are(store, model, monkeypatch):
    store.precompute(model, prompt(100), progress=False)
    fresh = store.lookup(model, prompt(100))
    assert fresh.stored == 96
    assert fresh.bytes["host"] > 0 == fresh.bytes["disk"]
    store.clear()
    cold = store.lookup(model, prompt(100)[0])
    assert cold.bytes == {"device": 0, "host": 0, "disk": fresh.bytes["host"]}
    assert store.warm(model, prompt(100), progress=False) == fresh
    cache = TieredCache(model, store)
    model.generate(prompt(100), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.stats.tier == "host"
    assert cache.stats.tokens_restored == fresh.stored


def test_warming_keeps_to_the_budget(tmp_path, model):
    with KVStore(tmp_path, host_memory="64KiB") as store:
        store.precompute(model, prompt(400), progress=False)
        store.clear()
        lookup = store.warm(model, prompt(400), progress=False)
        assert 0 < lookup.bytes["host"] <= 64 << 10
        assert lookup.bytes["disk"] > 0


def test_a_damaged_block_does_not_stop_warming(tmp_path, model):
    with KVStore(tmp_path) as store:
        store.precompute(model, prompt(100), progress=False)
        store.clear()
        (path,) = (tmp_path / "segments").iterdir()
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
        store.warm(model, prompt(100), progress=False)
        assert store.stats.verification_failures == 1


def test_a_lookup_leaves_no_trace(store, model, uncomputed):
    store.lookup(model, prompt(100))
    store.flush()
    assert store.stats.segments == 0


@pytest.mark.parametrize("method", [ContiguousKV(0.25, period=2), CacheTune.paper(0.15)])
def test_methods_look_up_what_they_would_restore(store, model, method):
    passages = [prompt(48, seed=3)[0], prompt(48, seed=4)[0]]
    if isinstance(method, Passages):
        store.precompute(model, passages, passages=True, method=method, progress=False)
    else:
        store.precompute(model, torch.cat(passages), method=method, progress=False)
    ids = torch.cat([*passages, prompt(5)[0]])
    lookup = store.lookup(model, ids, method=method)
    cache = TieredCache(model, store, method=method)
    model.generate(ids.unsqueeze(0), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert lookup.stored == cache.stats.tokens_restored > 0


def test_clear_empties_memory_and_if_asked_the_disk(store, model):
    store.precompute(model, prompt(100), progress=False, pin=True)
    store.clear()
    assert store.stats.host.bytes == 0
    assert store.stats.segments == 1
    store.clear(disk=True)
    assert store.stats.segments == store.stats.disk.bytes == 0
    assert store.lookup(model, prompt(100)).stored == 0


def test_one_prompt_at_a_time(store, model):
    with pytest.raises(ConfigError, match="pass one prompt at a time"):
        store.lookup(model, prompt(20, rows=2))


def test_it_says_what_it_found(store, model):
    store.precompute(model, prompt(100), progress=False)
    assert str(store.lookup(model, prompt(100))).startswith("96 of 100 tokens stored: host")
    assert str(store.lookup(model, prompt(9))) == f"0 of 9 tokens stored; {reasons.SHORT}"
