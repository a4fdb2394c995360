"""`method="auto"`: the first cache measures the model and the disk, and prompts follow what was measured."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache, reasons, tiered
from hf_tiered_cache.cache.calibrations import PrefixCosts, cost_factors, keep_prefix_costs, prefix_costs
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Auto, make_method
from hf_tiered_cache.operations import calibrate as module

CPU = torch.device("cpu")


def measured(model, store, tokens=256):
    return prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, "exact", tokens)


def run(model, store, ids, **options):
    cache = TieredCache(model, store, method="auto", progress=False, **options)
    with torch.no_grad():
        found = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        expected = model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    return cache.stats


def test_the_first_cache_measures_and_later_ones_do_not(root, monkeypatch):
    model, calls = build("qwen2"), []
    calibrate = module.calibrate_prefix
    monkeypatch.setattr(
        module, "calibrate_prefix", lambda *given, **more: calls.append(more["tokens"]) or calibrate(*given, **more)
    )
    with KVStore(root, engine="posix") as store:
        run(model, store, prompt(64))
        assert len(calls) == 1 and measured(model, store) is not None
        assert [row.tokens for row in store.segments()] == [64]  # nothing is left of what was measured
        run(model, store, prompt(80))
    with KVStore(root, engine="posix") as store:
        run(build("qwen2"), store, prompt(96))
    assert len(calls) == 1


def test_a_session_measures_too(root):
    model = build("qwen2")
    with KVStore(root, engine="posix") as store, tiered(model, store, method="auto"):
        assert measured(model, store) is not None


def test_other_methods_measure_nothing(root):
    model = build("qwen2")
    with KVStore(root, engine="posix") as store:
        TieredCache(model, store)
        TieredCache(model, store, method="krul")
        assert measured(model, store) is None


def test_a_store_that_cannot_be_written_restores_all(root):
    model = build("qwen2")
    with KVStore(root, engine="posix") as store, torch.no_grad():
        model(input_ids=prompt(64), past_key_values=TieredCache(model, store))
    with KVStore(root, engine="posix") as store:
        storage_of(store).disk.backend.writable = False
        assert run(model, store, prompt(72)).tokens_restored == 64


@pytest.mark.parametrize(
    ("load", "restored", "recomputed"), [(1e-6, 320, False), (1e-3, 320, True), (1.0, 0, False)], ids=str
)
def test_prompts_follow_what_was_measured(root, load, restored, recomputed):
    """A fast disk restores everything, a medium one recomputes a part, a slow one restores nothing."""
    model = build("qwen2")
    with KVStore(root, engine="posix") as store:
        costs = PrefixCosts(320, 1e-3, {"disk": load}, {"disk": load}, 1e-4)
        keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, "exact", [costs])
        run(model, store, prompt(320))
    with KVStore(root, engine="posix") as store:
        stats = run(model, store, prompt(340))
    assert stats.tokens_restored == restored
    assert (stats.tokens_recomputed > 0) == recomputed
    assert stats.reason == (reasons.SLOWER if not restored else "")


def test_prompts_correct_what_was_measured(root):
    model, identity = build("qwen2"), Fingerprinter(build("qwen2"))()
    with KVStore(root, engine="posix") as store:
        wrong = PrefixCosts(320, 1e-9, {"disk": 1e-9}, {"disk": 1e-9}, 1e-9)
        keep_prefix_costs(storage_of(store), identity, CPU, "exact", [wrong])
        run(model, store, prompt(320))
        store.flush()
        assert cost_factors(storage_of(store), identity, CPU).compute == pytest.approx(1.25)


def test_the_method_is_found_by_name():
    assert make_method("auto") == Auto() and make_method("auto:codec=int8").geometry.codec == "int8"
