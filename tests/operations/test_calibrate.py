"""Calibration: what it measures is kept with the store, and taken by CacheTune(recompute="auto")."""

from __future__ import annotations

import inspect
import json
import logging

import pytest
import torch
from families import build
from test_passages import PROMPT, ask, fill

from hf_tiered_cache import KVStore
from hf_tiered_cache.cache.calibrations import calibrated_ratio
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import CacheTune, make_method
from hf_tiered_cache.operations import calibrate as module
from hf_tiered_cache.passages.recompute import LOWEST

SMALL = {"passages": 2, "tokens": 64, "suffix": 8, "repeats": 1, "progress": False}


def pretend(monkeypatch, seconds):
    """Let a prompt take as long as `seconds` says of the tokens that are computed in it, of 136."""
    real = module._seconds

    def measured(action, device):
        real(action, device)
        variables = inspect.getclosurevars(action).nonlocals
        return seconds(variables["cache"].stats.tokens_computed) if "cache" in variables else 1e-3

    monkeypatch.setattr(module, "_seconds", measured)


def test_the_fastest_ratio_is_kept_and_taken(store, monkeypatch):
    model = build("qwen2")
    # of 128 tokens of passages and 8 behind them, 64 computed ones are best
    pretend(monkeypatch, lambda computed_tokens: 1 + abs(computed_tokens - 8 - 64))
    calibration = store.calibrate(model, **SMALL)
    assert calibration.ratio == pytest.approx(0.5, abs=0.02)
    assert calibration.seconds[1.0] == 65
    assert store.segments() == []  # nothing is left of it
    fill(store, model)
    _, cache = ask(model, store, PROMPT, CacheTune(recompute="auto"))
    assert cache.method.recompute == calibration.ratio
    _, fixed = ask(model, store, PROMPT, CacheTune(recompute=calibration.ratio))
    assert cache.stats.tokens_computed == fixed.stats.tokens_computed
    assert calibrated_ratio(storage_of(store), "another", torch.device("cpu"), 136) is None


def test_where_loading_is_too_slow_all_is_computed(store, monkeypatch):
    pretend(monkeypatch, lambda computed_tokens: 200 - computed_tokens)
    assert store.calibrate(build("qwen2"), **SMALL).ratio == 1.0


def test_where_loading_costs_nothing_the_lowest_ratio_is_taken(store, monkeypatch):
    pretend(monkeypatch, lambda computed_tokens: 1 + computed_tokens)
    assert store.calibrate(build("qwen2"), **SMALL).ratio == pytest.approx(LOWEST, abs=0.01)


def test_prompts_between_two_lengths_take_what_lies_between(store, monkeypatch):
    model = build("qwen2")
    pretend(monkeypatch, lambda computed_tokens: 1 + abs(computed_tokens - 8 - 64))
    for _ in range(2):  # the second time in place of the first
        short = store.calibrate(model, **SMALL).ratio
    pretend(monkeypatch, lambda computed_tokens: 1 + computed_tokens)
    long = store.calibrate(model, **SMALL | {"passages": 4}).ratio
    (records,) = json.loads((store.path / "calibrations.json").read_text()).values()
    assert [record["tokens"] for record in records] == [136, 264]
    assert long == LOWEST < short
    fill(store, model)
    _, cache = ask(model, store, PROMPT[:, -200:], CacheTune(recompute="auto"))
    assert cache.method.recompute == pytest.approx((short + long) / 2)  # 200 is midway between 136 and 264
    for tokens, expected in ((20, short), (2000, long)):
        _, cache = ask(model, store, torch.cat([PROMPT] * 7, 1)[:, -tokens:], CacheTune(recompute="auto"))
        assert cache.method.recompute == expected


def test_what_was_measured_from_memory_is_not_mixed_with_the_disk(store, monkeypatch):
    model = build("qwen2")
    pretend(monkeypatch, lambda computed_tokens: 1 + abs(computed_tokens - 72))
    store.calibrate(model, **SMALL)
    store.calibrate(model, **SMALL | {"passages": 4}, cold=False)
    (records,) = json.loads((store.path / "calibrations.json").read_text()).values()
    assert [record["cold"] for record in records] == [False]


def test_the_lowest_ratio_wins_unless_another_is_faster_side_by_side(store, monkeypatch):
    """A single fast measurement does not decide."""
    token_counts = []

    def lucky(computed_tokens):
        token_counts.append(computed_tokens)
        return 1e-3 if 66 < computed_tokens < 70 and token_counts.count(computed_tokens) == 1 else 1 + computed_tokens

    pretend(monkeypatch, lucky)
    assert store.calibrate(build("qwen2"), **SMALL).ratio == LOWEST
    assert token_counts.count(68) >= 4  # it was met in the search, and three times more against the lowest


def test_without_calibration_it_says_so(store, caplog):
    model = build("qwen2")
    fill(store, model)
    with caplog.at_level(logging.WARNING):
        _, cache = ask(model, store, PROMPT, CacheTune(recompute="auto"))
    assert "hf-tiered-cache calibrate" in caplog.text
    assert cache.method.recompute == LOWEST


def test_what_is_kept_outlives_the_store_and_damage(store, monkeypatch, tmp_path):
    model = build("qwen2")
    pretend(monkeypatch, lambda computed_tokens: 1 + abs(computed_tokens - 72))
    ratio = store.calibrate(model, **SMALL).ratio
    store.close()
    path = tmp_path / "store" / "calibrations.json"
    assert path.stat().st_mode & 0o777 == 0o600
    with KVStore(tmp_path / "store", engine="posix") as second_store:
        (name,) = json.loads(path.read_text())
        fingerprint = name.split()[0]
        assert calibrated_ratio(storage_of(second_store), fingerprint, torch.device("cpu"), 136) == ratio
        records = ({"ratio": 0.5}, *({"tokens": 136, "ratio": ratio, "cold": True} for ratio in ("x", None, -3, 2)))
        for damaged in ("{", "[]", "7", *(json.dumps({name: value}) for value in (3, *([row] for row in records)))):
            path.write_text(damaged)
            assert calibrated_ratio(storage_of(second_store), fingerprint, torch.device("cpu"), 136) is None


def test_a_real_measurement(store):
    calibration = store.calibrate(build("qwen2"), **SMALL)
    assert LOWEST <= calibration.ratio <= 1
    assert all(seconds > 0 for seconds in calibration.seconds.values())
    assert {calibration.ratio, 1.0} <= calibration.seconds.keys()  # it was measured, and full recompute too


def test_more_than_the_model_has_positions_for(store):
    with pytest.raises(ConfigError, match="fewer"):
        store.calibrate(build("qwen2"), passages=100, tokens=512)


def test_by_name():
    assert make_method("cache_tune:recompute=auto").recompute == "auto"
    assert make_method("cache_tune:recompute=0.3:ranking=random") == CacheTune(recompute=0.3, ranking="random")
    with pytest.raises(ConfigError, match="recompute"):
        make_method("cache_tune:recompute=most")
