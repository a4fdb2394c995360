"""Calibrated costs follow the times of conversations that return."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from families import build, prompt

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.calibrations import CostFactors, PrefixCosts, cost_factors, keep_prefix_costs, keep_records
from hf_tiered_cache.cache.cost_model import idle_recompute_ratio
from hf_tiered_cache.cache.observed import Work, observed_ratios, renew_costs
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Krul
from hf_tiered_cache.restore.schedule import RATIOS, Load, Streams, recompute_lengths
from hf_tiered_cache.store.geometry import Geometry

CPU = torch.device("cpu")
MODEL = "0" * 32


def costs(compute=1e-3, load=1e-3, tokens=320):
    return PrefixCosts(tokens, compute, {"disk": load, "host": 1e-8}, {"disk": load, "host": 0.0}, 1e-4)


def test_factors_move_by_bounded_steps_to_the_observed_times(root):
    with KVStore(root, engine="posix") as store:
        storage, factors = storage_of(store), []
        for _ in range(12):  # computing takes twice, loading half as long as calibrated
            before = cost_factors(storage, MODEL, CPU)
            renew_costs(storage, MODEL, CPU, {"compute": 2 / before.compute, "load": 0.5 / before.load})
            factors.append(cost_factors(storage, MODEL, CPU))
            for factor, earlier_factor in ((factors[-1].compute, before.compute), (factors[-1].load, before.load)):
                assert 1 / 1.25 - 1e-9 <= factor / earlier_factor <= 1.25 + 1e-9
        assert factors[0] == CostFactors(1.25, 0.8)
        assert factors[-1].compute == pytest.approx(2, rel=0.02) and factors[-1].load == pytest.approx(0.5, rel=0.02)
        renew_costs(storage, MODEL, CPU, {})
        assert cost_factors(storage, MODEL, CPU) == factors[-1]
        for _ in range(40):
            renew_costs(storage, MODEL, CPU, {"compute": 1e9, "load": 0.0})
        assert cost_factors(storage, MODEL, CPU).compute == 8
        keep_prefix_costs(storage, MODEL, CPU, "exact", [costs()])  # measured anew
        assert cost_factors(storage, MODEL, CPU) == CostFactors()


def test_a_disturbed_measurement_of_no_costs_predicts_nothing():
    assert observed_ratios(None, 320, costs(compute=0.0), Work(*[0.0] * 6, 0.5)) == {}


@pytest.mark.parametrize(
    "record",
    [{"compute": 0, "load": 1}, {"compute": "x", "load": 1}, {"compute": 10**400, "load": 1}, {"loads": 1}, {}],
)
def test_damaged_factors_are_none(root, record):
    with KVStore(root, engine="posix") as store:
        storage = storage_of(store)
        renew_costs(storage, MODEL, CPU, {"compute": 2.0, "load": 2.0})
        (name,) = [name for name in storage.calibrations.read() if name.startswith("factors")]
        keep_records(storage, name, [record])
        factors = cost_factors(storage, MODEL, CPU)
        assert factors in (CostFactors(), CostFactors(load=1))


def test_factors_that_are_no_list_are_none(root):
    with KVStore(root, engine="posix") as store:
        storage = storage_of(store)
        renew_costs(storage, MODEL, CPU, {"compute": 2.0, "load": 2.0})
        (root / "calibrations.json").write_text(json.dumps({key: {} for key in storage.calibrations.read()}))
        assert cost_factors(storage, MODEL, CPU) == CostFactors()


def test_costs_are_scaled(root):
    scaled_costs = costs().scaled(CostFactors(2.0, 3.0))
    assert scaled_costs.computing(320) == pytest.approx(2 * costs().computing(320)) and scaled_costs.overhead == 2e-4
    assert scaled_costs.loading("disk") == pytest.approx(3e-3) and scaled_costs.restore["disk"] == pytest.approx(3e-3)
    assert scaled_costs.loading("host") == costs().loading("host")


@pytest.mark.parametrize(("wrong", "grows"), [(0.01, True), (100.0, False)])
def test_a_wrong_calibration_is_corrected_by_returns(root, wrong, grows):
    """Each turn updates the factor of computing, in a new store without KV in memory."""
    model, text = build("qwen2"), prompt(700)
    method = Krul(0.0, recompute=0.5, geometry=Geometry(16, 1), codec="raw")
    identity = Fingerprinter(model)()
    with torch.no_grad(), KVStore(root, engine="posix") as store:
        right = store.calibrate_prefix(model, tokens=[600], suffix=16, repeats=2, progress=False)[0].compute
        wrong_costs = costs(wrong * right, load=right, tokens=600)  # not the measured load, which the machine disturbs
        keep_prefix_costs(storage_of(store), identity, CPU, "exact", [wrong_costs])
    factors = []
    for stop in (600, 620, 640, 660):
        with torch.no_grad(), KVStore(root, engine="posix") as store:
            cache = TieredCache(model, store, conversation="alice", method=method)
            model(input_ids=text[:, :stop], past_key_values=cache, logits_to_keep=1)
            cache.suspend()
            factors.append(cost_factors(storage_of(store), identity, CPU).compute)
    if grows:
        assert factors == pytest.approx([1.25, 1.25**2, 1.25**3, 1.25**4])
    else:
        assert factors[0] == pytest.approx(0.8) and factors == sorted(factors, reverse=True)


def returning(compute, loading, stored, tokens=2048, layers=24, step=64):
    """Return the seconds of the fastest return if at least the tokens of `stored` (a share) are computed."""
    ends = np.arange(step, tokens + step, step)
    loads = tuple(Load((layer,), ends, np.full(len(ends), step * loading / layers)) for layer in range(layers))
    streams = Streams(tokens, 32 * compute / layers, lambda n: n * compute / layers, 0.0, loads)
    lengths = recompute_lengths(tokens, RATIOS[:-1], layers, step=step)
    return streams.seconds(np.maximum(lengths, recompute_lengths(tokens, stored, layers, step=step))).min()


@pytest.mark.parametrize("load", [0.25e-3, 0.5e-3, 1e-3, 2e-3])
@pytest.mark.parametrize("slower", [1.0, 1.3, 1.5])
def test_what_is_not_stored_delays_no_return_if_computing_is_somewhat_slower(load, slower):
    prefix_costs = PrefixCosts(2048, 1e-3, {"disk": load}, {"disk": load}, 32e-3)
    ratio = idle_recompute_ratio(2048, 24, prefix_costs, 1.0, 64)
    assert (ratio > 0) == (load > 0.25e-3)  # which would save less than 15 %
    assert returning(slower * 1e-3, load, ratio) <= 1.02 * returning(slower * 1e-3, load, 0.0)


def test_the_next_prompt_of_a_cache_has_the_factors(root):
    model = build("qwen2")
    with torch.no_grad(), KVStore(root, engine="posix") as store:
        storage, identity = storage_of(store), Fingerprinter(model)()
        keep_prefix_costs(storage, identity, CPU, "exact", [costs()])
        cache = TieredCache(model, store)
        model(input_ids=prompt(40), past_key_values=cache)
        executor = cache._executor
        before = executor.sequence.calibration.at(320)
        renew_costs(storage, identity, CPU, {"compute": 1.44})
        model(input_ids=prompt(44)[:, 40:], past_key_values=cache)
        after = executor.sequence.calibration.at(320)
        assert after.compute == pytest.approx(1.2 * before.compute) and after.load == before.load
