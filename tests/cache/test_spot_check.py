"""Spot checks: what changes a model's computation unseen is found, and rounding is never taken for it."""

from __future__ import annotations

import logging
import random
from functools import lru_cache

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from families import build, prompt
from thorough import pairs

from hf_tiered_cache import ConfigError, KVStore, TieredCache, reasons
from hf_tiered_cache.cache.spot_check import SpotChecks
from hf_tiered_cache.identity import settings

IDS = prompt(200)
GREEDY = {"do_sample": False, "max_new_tokens": 3}


@pytest.fixture
def other_operator(monkeypatch):
    """Replace an operator, as an extension does below Python, where nothing shows it. Undone at the end."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu", lambda x: x * torch.sigmoid(x) * 1.5, "CPU")
    monkeypatch.setattr(settings, "_changed_kernel", lru_cache(lambda num_kernels: ""))
    yield
    library._destroy()


def asks(model, store, **options):
    cache = TieredCache(model, store, record=False, **options)
    model.generate(IDS, past_key_values=cache, **GREEDY)
    return cache.stats


def stored(tmp_path, model):
    with KVStore(tmp_path) as store:
        store.precompute(model, IDS, progress=False)


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_kv_that_the_model_does_not_compute_is_found_and_its_name_is_not_used_any_more(tmp_path, request, caplog, call):
    model = build("llama")
    stored(tmp_path, model)
    request.getfixturevalue("other_operator")
    with KVStore(tmp_path, spot_checks=1) as store, caplog.at_level(logging.WARNING):
        if call == "generate":
            assert asks(model, store).tokens_restored == 192
        else:
            with torch.no_grad():
                model(IDS, past_key_values=TieredCache(model, store, record=False), logits_to_keep=1)
        assert (store.stats.spot_checks, store.stats.failed_spot_checks) == (1, 1)
        (segment,) = store.segments()
        assert segment.id in caplog.text and "differs from what this model computes" in caplog.text
        later_stats = asks(model, store)
        assert (later_stats.tokens_restored, later_stats.reason) == (0, reasons.DOUBTED)
        cache = TieredCache(model, store)
        model.generate(prompt(64, seed=9), past_key_values=cache, **GREEDY)
        store.flush()
        assert len(store.segments()) == 1  # nothing is added under a name that is doubted
        assert asks(model, store, tag="the user's word").reason != reasons.DOUBTED


@pytest.mark.parametrize(
    ("family", "dtype"),
    pairs(["llama", "starcoder2", "gemma3", "qwen3_moe", "deepseek_v3", "opt"], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_rounding_is_no_difference(tmp_path, family, dtype):
    model = build(family, dtype)
    with KVStore(tmp_path, spot_checks=1) as store:
        store.precompute(model, IDS, progress=False)
        for _ in range(3):
            assert asks(model, store).tokens_restored == 192
        assert (store.stats.spot_checks, store.stats.failed_spot_checks) == (3, 0)


def test_batches_with_padding_beams_and_turns_are_checked(tmp_path):
    model, ids = build("llama"), torch.cat([prompt(100), prompt(100, seed=2)])
    mask = torch.ones_like(ids)
    ids[0, :20], mask[0, :20] = 0, 0
    with KVStore(tmp_path, spot_checks=1) as store:
        for _ in range(2):
            cache = TieredCache(model, store)
            output = model.generate(ids, attention_mask=mask, past_key_values=cache, num_beams=2, **GREEDY)
            store.flush()
        assert cache.stats.tokens_restored and store.stats.spot_checks == 1
        cache = TieredCache(model, store)
        output = model.generate(prompt(100, seed=2), past_key_values=cache, **GREEDY)
        model.generate(torch.cat([output, prompt(30)], 1), past_key_values=cache, **GREEDY)
        assert (store.stats.spot_checks, store.stats.failed_spot_checks) == (2, 0)


def test_none_are_made_without_a_share(tmp_path, other_operator):
    model = build("llama")
    with KVStore(tmp_path, spot_checks=0) as store:
        store.precompute(model, IDS, progress=False)
        for _ in range(3):
            asks(model, store)
        assert store.stats.spot_checks == 0


@pytest.mark.parametrize("share", [-0.1, 1.5, "often", True, None])
def test_a_share_is_between_0_and_1(tmp_path, share):
    with pytest.raises(ConfigError, match="spot_checks"):
        KVStore(tmp_path / "kv", spot_checks=share)


def test_they_take_their_share_of_the_time_and_no_more():
    """With requests of 0.5 s, checks of 0.1 s and a share of 1 %, one in twenty requests is checked."""
    for share in (0.01, 0.05):
        checks, spent = SpotChecks(share), 0.0
        for _ in range(10_000):
            if checks.is_due(4096, 0.5, 0.1):
                checks.spend(0.1)
                spent += 0.1
        assert 0.9 * share <= spent / (10_000 * 0.5) <= 1.001 * share


def test_short_processes_check_as_often_as_long_ones(monkeypatch):
    checks_done = 0
    monkeypatch.setattr(SpotChecks, "first_credit", staticmethod(random.Random(3).random))
    for _ in range(4000):
        checks = SpotChecks(0.01)
        checks_done += checks.is_due(4096, 0.5, 0.1)
    assert 0.03 <= checks_done / 4000 <= 0.07  # 0.5 s x 1 % / 0.1 s


@pytest.mark.parametrize("way", ["host", "disk"])
def test_offloaded_models_are_checked(tmp_path, way):
    model = build("llama")
    if way == "host":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    with KVStore(tmp_path / "kv", spot_checks=1) as store:
        store.precompute(model, IDS, progress=False)
        assert asks(model, store).tokens_restored == 192
        assert (store.stats.spot_checks, store.stats.failed_spot_checks) == (1, 0)


def test_a_check_that_cannot_be_made_fails_no_request(tmp_path, monkeypatch, caplog):
    model = build("llama")
    expected = model.generate(IDS, **GREEDY)
    with KVStore(tmp_path, spot_checks=1) as store:
        store.precompute(model, IDS, progress=False)
        monkeypatch.setattr("hf_tiered_cache.cache.stored_cache.deviation", lambda *_: 1 / 0)
        cache = TieredCache(model, store, record=False)
        assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), expected)
        assert "ZeroDivisionError" in caplog.text
