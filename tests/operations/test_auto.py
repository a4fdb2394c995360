"""`method="auto"`: the first cache measures the model and the disk, and prompts follow what was measured."""

from __future__ import annotations

import errno
import inspect

import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache, reasons, tiered
from hf_tiered_cache.cache.calibrations import (
    PrefixCosts,
    calibrated_ratio,
    cost_factors,
    keep_prefix_costs,
    prefix_calibration,
    quality_budget,
)
from hf_tiered_cache.errors import StoreError
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Auto, ContiguousKV, make_method
from hf_tiered_cache.operations import calibrate as module
from hf_tiered_cache.store.kinds import CALIBRATIONS
from hf_tiered_cache.store.root import StoreRoot

CPU = torch.device("cpu")


def measured(model, store, tokens=256, tag=""):
    return prefix_calibration(storage_of(store), Fingerprinter(model).look(tag).fingerprint, CPU, "exact").at(tokens)


TOKEN, PAIR, FIXED = 2e-3, 4e-7, 0.1
"""Seconds of a pass per computed token, per pair of a token and one before it, and in any case."""


def pretend(monkeypatch, slow=1.0, restore=1e-4):
    """Let passes take as long as `TOKEN`, `PAIR` and `FIXED` say, and short ones longer, as those of real models.

    Args:
        monkeypatch: pytest's fixture.
        slow: factor of the time of all passes.
        restore: seconds to restore a token from disk.
    """
    real = module._seconds

    def seconds(action, device):
        variables = inspect.getclosurevars(action).nonlocals
        cache = variables.get("cache")
        before = 0 if cache is None else cache.get_seq_length()
        real(action, device)
        if cache is None:  # the suffix
            return slow * (FIXED + 32 * TOKEN)
        first, stop = before, cache.get_seq_length()
        if hasattr(cache, "stats") and (tokens_restored := cache.stats.tokens_restored):
            cache.stats.details.io_seconds = restore * tokens_restored
            first, before = tokens_restored, tokens_restored
        tokens_computed = stop - first
        pairs = tokens_computed * before + tokens_computed**2 / 2
        took = FIXED + tokens_computed * TOKEN * (1.05 if tokens_computed < 512 else 1) + pairs * PAIR
        return slow * took + (restore * before if cache is not None and hasattr(cache, "stats") else 0)

    monkeypatch.setattr(module, "_seconds", seconds)


def test_costs_of_long_prompts_follow_from_short_ones(root, monkeypatch):
    """The cost per token falls from 256 to 1,024 tokens, and has doubled at 10,000."""
    model = build("qwen2")
    pretend(monkeypatch)
    with KVStore(root, engine="posix") as store:
        TieredCache(model, store, method="auto", progress=False)
        for tokens in (512, 4096, 16384):
            expected = tokens * TOKEN + tokens**2 / 2 * PAIR
            assert measured(model, store, tokens).computing(tokens) == pytest.approx(expected, rel=0.1)
        assert measured(model, store, 16384).loading("disk") == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize(("slow", "lengths"), [(0.01, [256, 992]), (10.0, [256])])
def test_a_slow_model_is_measured_with_short_prefixes_only(root, monkeypatch, slow, lengths):
    """The model has 1,024 positions."""
    model, calls = build("qwen2"), []
    pretend(monkeypatch, slow)
    real = module.keep_prefix_costs
    monkeypatch.setattr(module, "keep_prefix_costs", lambda *args: calls.append(args[-1]) or real(*args))
    with KVStore(root, engine="posix") as store:
        TieredCache(model, store, method="auto", progress=False)
    assert [costs.tokens for costs in calls[0]] == lengths
    assert all(costs.growth == pytest.approx(slow * PAIR / 2, rel=0.1) for costs in calls[0])


def run(model, store, ids, **options):
    cache = TieredCache(model, store, method="auto", progress=False, **options)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        expected = model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=1).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    return cache.stats


@pytest.mark.parametrize("settings", [{}, {"passages": 2, "tokens": 64, "repeats": 1, "progress": False}])
def test_measurements_leave_the_remote_out(root, tmp_path, settings):
    model, address = build("qwen2"), f"sqlite://{tmp_path}/shared.db"
    with KVStore(root, remote=address) as store:
        if settings:
            store.calibrate(model, **settings)
        else:
            TieredCache(model, store, method="auto", progress=False)
        store.flush()
        assert (store.stats.remote.lookups, store.stats.remote.segments_written) == (0, 0)
        store.precompute(model, prompt(64), progress=False)
        store.flush()
        assert (store.stats.remote.lookups, store.stats.remote.segments_written) == (1, 1)


def test_a_measurement_deletes_only_what_it_has_stored(root):
    model = build("qwen2")
    with KVStore(root, engine="posix") as store:
        cache = TieredCache(model, store)
        model.generate(prompt(100), past_key_values=cache, max_new_tokens=80, do_sample=False)
        assert sum(row.tokens for row in store.segments()) < 176  # the measurement flushes the rest of this cache
        TieredCache(model, store, method="auto", progress=False)
        store.flush()
        assert sum(row.tokens for row in store.segments()) == 176


def test_the_first_cache_measures_and_later_ones_do_not(root, monkeypatch):
    model, calls = build("qwen2"), []
    calibrate = module.calibrate_prefix
    monkeypatch.setattr(
        module, "calibrate_prefix", lambda *args, **more: calls.append(more["tokens"]) or calibrate(*args, **more)
    )
    with KVStore(root, engine="posix") as store:
        run(model, store, prompt(64))
        assert len(calls) == 1 and measured(model, store) is not None
        store.flush()
        assert [row.tokens for row in store.segments()] == [64]  # nothing is left of what was measured
        run(model, store, prompt(80))
    with KVStore(root, engine="posix") as store:
        run(build("qwen2"), store, prompt(96))
    assert len(calls) == 1


@torch.no_grad()
def test_a_model_that_only_a_tag_names_is_measured_under_its_tag(root, caplog):
    model, text = build("qwen2"), prompt(200)[0]
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    with KVStore(root, engine="posix") as store:
        TieredCache(model, store, method="auto", tag="steered", progress=False)
        assert measured(model, store, tag="steered").restore["disk"] > 0 and measured(model, store) is None
        quick, name = {"progress": False, "tag": "steered"}, Fingerprinter(model).look("steered").fingerprint
        store.calibrate(model, passages=2, tokens=64, repeats=1, **quick)
        store.calibrate_quality(model, text, budgets=[0.5], questions=1, methods=["contiguous_kv"], **quick)
        storage = storage_of(store)
        assert calibrated_ratio(storage, name, CPU, 160) is not None
        assert quality_budget(storage, name, ContiguousKV(quality=100.0)) == 0.5
    assert "cannot be identified" not in caplog.text


def fail_to_write_calibrations(monkeypatch, root):
    write = StoreRoot.write

    def fail(files, kind, name, content):
        if kind is CALIBRATIONS:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        write(files, kind, name, content)

    monkeypatch.setattr(StoreRoot, "write", fail)


def fail_to_read_calibrations(monkeypatch, root):
    real_read = StoreRoot.read

    def fail(files, kind, name):
        if kind is CALIBRATIONS:
            raise OSError(errno.EIO, "Input/output error", name)
        return real_read(files, kind, name)

    (root / "calibrations.json").write_bytes(b"{}")
    monkeypatch.setattr(StoreRoot, "read", fail)


def damage_calibrations(monkeypatch, root):
    (root / "calibrations.json").write_bytes(b'{\n "prefix 0123')


@pytest.mark.parametrize("fault", [fail_to_write_calibrations, fail_to_read_calibrations, damage_calibrations])
def test_costs_that_cannot_be_saved_fail_no_request(root, monkeypatch, caplog, fault):
    model = build("qwen2")
    monkeypatch.setattr(module, "_auto_lengths", lambda model: [16])
    with KVStore(root, engine="posix") as store:
        run_without = model.generate(prompt(64), do_sample=False, max_new_tokens=2)
        fault(monkeypatch, root)
        for _ in range(2):
            cache = TieredCache(model, store, method="auto", progress=False)
            output = model.generate(prompt(64), past_key_values=cache, do_sample=False, max_new_tokens=2)
            assert torch.equal(output, run_without)
    assert caplog.text.count("costs were not measured") == 1
    assert "calibrations.json" in caplog.text


@pytest.mark.parametrize("measure", ["calibrate", "calibrate_prefix", "calibrate_quality"])
def test_nothing_is_measured_that_could_not_be_saved(root, monkeypatch, caplog, measure):
    model = build("qwen2")
    settings = {"input_ids": prompt(300)} if measure == "calibrate_quality" else {}
    with KVStore(root, engine="posix") as store:
        damage_calibrations(monkeypatch, root)
        monkeypatch.setattr(type(model), "forward", None)
        with pytest.raises(StoreError, match=r"calibrations.json is damaged.*move it elsewhere"):
            getattr(store, measure)(model, progress=False, **settings)
        assert not storage_of(store).calibrations.read()
    assert "calibrations.json is damaged" in caplog.text


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
    ("load", "tokens_restored", "recomputed"), [(1e-6, 320, False), (1e-3, 320, True), (1.0, 0, False)], ids=str
)
def test_prompts_follow_what_was_measured(root, load, tokens_restored, recomputed):
    """A fast disk restores everything, a medium one recomputes a part, a slow one restores nothing."""
    model = build("qwen2")
    with KVStore(root, engine="posix") as store:
        costs = PrefixCosts(320, 1e-3, {"disk": load}, {"disk": load}, 1e-4)
        keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, "exact", [costs])
        run(model, store, prompt(320))
    with KVStore(root, engine="posix") as store:
        stats = run(model, store, prompt(340))
    assert stats.tokens_restored == tokens_restored
    assert (stats.tokens_recomputed > 0) == recomputed
    assert stats.reason == (reasons.SLOWER if not tokens_restored else "")


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
