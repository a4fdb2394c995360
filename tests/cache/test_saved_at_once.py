"""Results that two processes save at the same time are all kept."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from families import build

from hf_tiered_cache import KVStore
from hf_tiered_cache.cache.calibrations import (
    Calibration,
    CostFactors,
    QualityFinding,
    cost_factors,
    keep,
    keep_quality,
)
from hf_tiered_cache.cache.observed import renew_costs
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.operations import passage_cache
from hf_tiered_cache.passages.recompute import Costs
from hf_tiered_cache.patches.attach import attach

CPU, MODEL = torch.device("cpu"), "0" * 32


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Return a function that saves in one process, and in another one right before the first takes the store's lock."""
    with KVStore(tmp_path, engine="posix") as store, KVStore(tmp_path, engine="posix") as other_store:
        storage, other_storage = storage_of(store), storage_of(other_store)
        locked = storage.disk.backend.locked

        def save(first_save, another):
            @contextmanager
            def late():
                monkeypatch.setattr(storage.disk.backend, "locked", locked)
                another(other_storage)
                with locked():
                    yield

            monkeypatch.setattr(storage.disk.backend, "locked", late)
            first_save(storage)
            return storage

        yield save


def calibrated(tokens):
    costs = Costs(**dict.fromkeys(Costs.__dataclass_fields__, 1.0))
    return lambda storage: keep(storage, MODEL, CPU, Calibration(0.3, {0.3: 1.0}, costs, 0.3, tokens, True))


def found(method):
    return lambda storage: keep_quality(storage, MODEL, [QualityFinding(method, 0.5, [0.1], 1.0, 0.5, 0.1, 1.0)])


@pytest.mark.parametrize(
    ("save", "key", "values"),
    [(calibrated, "tokens", [4000, 1000]), (found, "method", ["snapkv", "h2o"])],
    ids=["ratios", "losses"],
)
def test_results_are_merged(both, save, key, values):
    (records,) = both(save(values[1]), save(values[0])).calibrations.read().values()
    assert [record[key] for record in records] == values


def test_cost_factors_move_by_both_steps(both):
    storage = both(
        lambda storage: renew_costs(storage, MODEL, CPU, {"compute": 4.0}),
        lambda storage: renew_costs(storage, MODEL, CPU, {"compute": 4.0, "load": 0.25}),
    )
    assert cost_factors(storage, MODEL, CPU) == CostFactors(1.25**2, 0.8)


def test_the_lead_that_was_written_first_stays(both, monkeypatch):
    attachment, texts = attach(build("llama")), iter([[1] * 20, [2] * 20])
    monkeypatch.setattr(passage_cache, "_tokenized", lambda attachment: next(texts))
    leads = []

    def write(storage):
        leads.append(passage_cache.kept_lead(storage, attachment, MODEL, 1, 16).tolist())

    storage = both(write, write)
    write(storage)
    assert leads == [[2] * 16] * 3
