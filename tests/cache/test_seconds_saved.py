"""`stats.seconds_saved` estimates the time that restoring saved, from the known time to compute a token."""

from __future__ import annotations

import time

import pytest
import torch
from families import build, prompt

from hf_tiered_cache import Exact, KVStore, RequestStats, TieredCache, tiered
from hf_tiered_cache.cache.calibrations import CostFactors, PrefixCosts, change_cost_factors, keep_prefix_costs
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.store import EXACT
from hf_tiered_cache.store.codecs import coded_provenance

CPU = torch.device("cpu")
RESTORE = Exact(recompute=0.0, decline=False)


def ask(model, store, ids, method=RESTORE):
    cache = TieredCache(model, store, method=method)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache.stats


def fill(root, tokens=320, codec="raw"):
    """Store a prompt, and return a model that has computed nothing yet."""
    with KVStore(root, engine="posix", codec=codec) as store:
        ask(build("qwen2"), store, prompt(tokens))
    return build("qwen2")


def restoring(stats):
    return stats.details.assemble_seconds + stats.details.match_seconds


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_with_a_calibration_it_is_computing_minus_restoring(root, factor, codec):
    model = fill(root, codec=codec)
    with KVStore(root, engine="posix", codec=codec) as store:
        identity, provenance = Fingerprinter(model)(), coded_provenance(EXACT, codec)
        keep_prefix_costs(storage_of(store), identity, CPU, provenance, [PrefixCosts(320, 0.5, {"disk": 1e-6})])
        change_cost_factors(storage_of(store), identity, CPU, lambda factors: CostFactors(compute=factor))
        stats = ask(model, store, prompt(340))
    assert stats.tokens_restored == 320
    assert stats.seconds_saved == pytest.approx(factor * 0.5 * 320 - restoring(stats))
    assert stats.as_dict()["seconds_saved"] == stats.seconds_saved
    assert "saved, estimated" in str(stats)


def test_a_row_saves_time_although_another_one_restores_nothing(root):
    model = fill(root)
    with KVStore(root, engine="posix") as store:
        identity = Fingerprinter(model)()
        keep_prefix_costs(storage_of(store), identity, CPU, "exact", [PrefixCosts(320, 0.5, {"disk": 1e-6})])
        stats = ask(model, store, torch.cat([prompt(340), prompt(340, seed=3)]), ContiguousKV(0.5))
    assert stats.tokens_restored == 320
    assert stats.seconds_saved == pytest.approx(0.5 * 320 - restoring(stats))


def test_recomputed_tokens_save_nothing(root):
    model = fill(root)
    with KVStore(root, engine="posix") as store:
        keep_prefix_costs(
            storage_of(store), Fingerprinter(model)(), CPU, "exact", [PrefixCosts(320, 0.5, {"disk": 1e-6})]
        )
        stats = ask(model, store, prompt(340), Exact(recompute=0.5, decline=False))
    assert stats.tokens_recomputed > 0
    assert stats.seconds_saved == pytest.approx(
        0.5 * (stats.tokens_restored - stats.tokens_recomputed) - restoring(stats)
    )


def test_a_slow_restore_saves_less_than_nothing(root):
    model = fill(root)
    with KVStore(root, engine="posix") as store:
        keep_prefix_costs(
            storage_of(store), Fingerprinter(model)(), CPU, "exact", [PrefixCosts(320, 1e-12, {"disk": 1e-6})]
        )
        stats = ask(model, store, prompt(340))
    assert stats.seconds_saved == pytest.approx(-restoring(stats), rel=1e-3)
    assert stats.seconds_saved < 0


@pytest.mark.parametrize(("method", "calibrated"), [(Exact(), False), (Exact(), True), (RESTORE, False)])
def test_much_lost_time_is_told_once_where_a_calibration_prevents_it(root, caplog, monkeypatch, method, calibrated):
    monkeypatch.setattr("hf_tiered_cache.cache.cost_model._MUCH_SECONDS", 0.0)
    model = fill(root)
    with KVStore(root, engine="posix") as store:
        if calibrated:
            costs = PrefixCosts(320, 1e-6, {"disk": 1e-9})
            keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, "exact", [costs])
        monkeypatch.setattr("hf_tiered_cache.cache.sequence.SequenceState.seconds_to_compute", lambda *_: 1e-9)
        for tokens in (340, 350):
            stats = ask(model, store, prompt(tokens), method)
            assert stats.tokens_restored >= 320 and stats.seconds_saved < 0
    assert caplog.text.count("restoring a prompt took longer") == (method == Exact() and not calibrated)


def test_without_a_calibration_earlier_prompts_of_the_process_tell(root):
    model = build("qwen2")
    with KVStore(root, engine="posix") as store:
        assert ask(model, store, prompt(320)).seconds_saved == 0
        store.flush()
        pace = TieredCache(model, store)._executor._pace.per_token(Fingerprinter(model)())
        stats = ask(model, store, prompt(340))
    assert stats.seconds_saved == pytest.approx(pace * 320 - restoring(stats))


@pytest.mark.parametrize(("tokens", "is_known"), [(340, False), (320 + 256, True)])
def test_else_the_tokens_that_the_prompt_computed(root, tokens, is_known):
    """20 computed tokens would show the fixed costs of a pass."""
    model, began = fill(root), time.perf_counter()
    with KVStore(root, engine="posix") as store:
        stats = ask(model, store, prompt(tokens))
    took = time.perf_counter() - began
    assert stats.tokens_restored == 320
    assert (stats.seconds_saved != 0) == is_known
    assert stats.seconds_saved + restoring(stats) * is_known <= took * 320 / 256


def test_sums_add_it_up(root):
    model = fill(root)
    with KVStore(root, engine="posix") as store:
        keep_prefix_costs(
            storage_of(store), Fingerprinter(model)(), CPU, "exact", [PrefixCosts(320, 0.5, {"disk": 1e-6})]
        )
        with tiered(model, store, method=RESTORE) as session, torch.no_grad():
            for _ in range(2):
                model.generate(prompt(340), max_new_tokens=1, do_sample=False)
    assert session.stats.requests == 2
    assert 2 * 0.5 * 320 - 5 < session.stats.seconds_saved < 2 * 0.5 * 336


def test_a_request_without_it_does_not_print_it():
    assert "saved" not in str(RequestStats())
