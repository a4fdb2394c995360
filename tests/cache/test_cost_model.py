"""The exact method restores what is not known to be slower than computing; what is known is planted here.

Without fronts (`recompute=0.0`), which would often be quicker than either: see test_recompute_schedule.py.
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from families import build, prompt

from eval.baselines import AttentionStore
from hf_tiered_cache import ConfigError, Exact, KVStore, TieredCache, reasons
from hf_tiered_cache.cache.calibrations import PrefixCosts, keep_prefix_costs, keep_records, prefix_calibration
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import make_method
from hf_tiered_cache.operations import calibrate as module

CPU = torch.device("cpu")
DOCUMENT = prompt(160)
ASKED = torch.cat([DOCUMENT, prompt(20, seed=5)], dim=1)
GREEDY = {"do_sample": False, "max_new_tokens": 4}
WHOLE = Exact(recompute=0.0)
SLOW_DISK = PrefixCosts(160, 1e-3, {"disk": 2e-3, "host": 1e-6})


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def path(tmp_path, model):
    """Return the path of a store with the document."""
    with KVStore(tmp_path / "store", engine="posix") as store:
        store.precompute(model, DOCUMENT, progress=False)
    return tmp_path / "store"


def plant(store, model, *prefix_costs, provenance="exact"):
    keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, provenance, list(prefix_costs))


def ask(model, store, method=WHOLE, ids=ASKED):
    cache = TieredCache(model, store, method=method)
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(ids, **GREEDY))
    return cache.stats


def test_what_is_slower_to_restore_is_computed_until_it_lies_in_memory(path, model, caplog):
    with KVStore(path, engine="posix") as store:
        plant(store, model, SLOW_DISK)
        stats = ask(model, store)
        assert (stats.tokens_restored, stats.bytes_read, stats.reason) == (0, 0, reasons.SLOWER)
        assert stats.tokens_stored == 16  # what stands behind the document; that itself is there already
        assert store.lookup(model, ASKED, method=WHOLE).reason == reasons.SLOWER
        result = store.warm(model, ASKED, method=WHOLE, progress=False)  # which is asked for, whatever it takes
        assert (result.stored, result.reason) == (176, "")
        assert result.bytes["disk"] == 0 < result.bytes["host"]
        stats = ask(model, store)
        assert (stats.tokens_restored, stats.reason) == (176, "")
    assert not caplog.records  # nothing to warn of


def test_a_part_in_memory_counts_as_much_as_it_is(path, model):
    """Reading 16 of 176 tokens at 2 ms is faster than computing 176 at 1 ms."""
    with KVStore(path, engine="posix") as store:
        store.precompute(model, ASKED[:, :176], progress=False)
    with KVStore(path, engine="posix") as store:
        store.warm(model, DOCUMENT, progress=False)
        plant(store, model, SLOW_DISK)
        assert store.lookup(model, ASKED).bytes["disk"] > 0
        assert ask(model, store).tokens_restored == 176


@pytest.mark.parametrize("forced", [Exact(decline=False), "exact:recompute=0.0:decline=false", AttentionStore()])
def test_it_can_be_forced_and_baselines_always_restore(path, model, forced):
    with KVStore(path, engine="posix") as store:
        plant(store, model, SLOW_DISK)
        assert ask(model, store, forced).tokens_restored == 160


@pytest.mark.parametrize(
    ("prefix_costs", "tokens_restored"),
    [
        ([], 160),
        ([PrefixCosts(160, 1e-3, {"disk": 0.9e-3})], 160),
        ([PrefixCosts(160, 1e-3, {"host": 9.0})], 160),  # of the disk nothing is known
        ([PrefixCosts(64, 1e-3, {"disk": 9e-3}), PrefixCosts(256, 1e-3, {"disk": 1e-6})], 0),  # 160 is midway: 4.5 ms
        ([PrefixCosts(64, 1e-3, {"disk": 1.8e-3}), PrefixCosts(256, 1e-3, {"disk": 1e-6})], 160),  # 0.9 ms
    ],
    ids=["nothing known", "quicker", "another tier", "between, slower", "between, quicker"],
)
def test_what_was_measured_decides(path, model, prefix_costs, tokens_restored):
    with KVStore(path, engine="posix") as store:
        plant(store, model, *prefix_costs)
        assert ask(model, store).tokens_restored == tokens_restored


def test_another_model_codec_or_engine_is_another_calibration(path, model):
    other_model = build("llama", seed=3)
    with KVStore(path, engine="posix") as store:
        plant(store, other_model, SLOW_DISK)
        plant(store, model, SLOW_DISK, provenance="exact int8")
        assert ask(model, store).tokens_restored == 160
        storage_of(store).disk.backend.reads_with = "another engine"
        plant(store, model, SLOW_DISK)
    with KVStore(path, engine="posix") as store:
        assert ask(model, store).tokens_restored == 176


def test_rows_that_are_alike_are_restored_once(path, model):
    """Two rows compute 320 tokens at 1 ms or restore 160 at 1.5 ms; a single row does not pay."""
    with KVStore(path, engine="posix") as store:
        plant(store, model, PrefixCosts(160, 1e-3, {"disk": 1.5e-3}))
        assert ask(model, store).tokens_restored == 0
    with KVStore(path, engine="posix") as store:
        assert ask(model, store, ids=torch.cat([ASKED, ASKED])).tokens_restored >= 320


def test_precomputing_goes_on_from_what_is_stored(path, model):
    with KVStore(path, engine="posix") as store:
        plant(store, model, SLOW_DISK)
        report = store.precompute(model, ASKED, progress=False)
    assert report.restored == 160


def pretend(monkeypatch, compute_seconds, restore_seconds, alone=1.0):
    """Let passes take these seconds: with a prefix computed, restored (of each tier), and without one."""
    real = module._seconds

    def seconds(action, device):
        cells = dict(zip(action.__code__.co_freevars, (cell.cell_contents for cell in action.__closure__), strict=True))
        real(action, device)
        if not hasattr(cells.get("cache"), "stats"):
            return alone
        stats = cells["cache"].stats
        stats.details.io_seconds = restore_seconds["disk"] - alone if stats.tier == "disk" else 0.0
        return restore_seconds[stats.tier] if stats.tokens_restored else compute_seconds

    monkeypatch.setattr(module, "_seconds", seconds)


def test_calibration_measures_each_tier_and_leaves_nothing(tmp_path, model, monkeypatch):
    pretend(monkeypatch, 1.0 + 0.64, {"disk": 1.0 + 2.56, "host": 1.0 + 0.32})
    with KVStore(tmp_path, engine="posix") as store:
        first, second = store.calibrate_prefix(model, tokens=(64, 128), repeats=1, progress=False)
        assert store.segments() == []
        assert (first.tokens, first.compute) == (64, pytest.approx(0.01))
        assert first.restore == pytest.approx({"disk": 0.04, "host": 0.005})
        assert second.restore == pytest.approx({"disk": 0.02, "host": 0.0025})
        assert second.load == pytest.approx({"disk": 0.02}) and second.overhead == 1.0
        kept_costs = prefix_calibration(storage_of(store), Fingerprinter(model)(), CPU, "exact").at(96)
        assert kept_costs.compute == pytest.approx(0.0075)
        store.precompute(model, DOCUMENT, progress=False)
        store.clear()
        assert ask(model, store).reason == reasons.SLOWER
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        (disk_costs,) = store.calibrate_prefix(model, tokens=(64,), repeats=1, progress=False)
        assert disk_costs.restore.keys() == {"disk"}


def test_a_real_calibration(tmp_path, model):
    with KVStore(tmp_path, engine="posix") as store:
        (costs,) = store.calibrate_prefix(model, tokens=(64,), repeats=1, progress=False)
    assert costs.restore.keys() == {"disk", "host"}
    assert all(cost >= 0 for cost in (costs.compute, *costs.restore.values()))
    assert costs.load.keys() == {"disk"} and costs.load["disk"] > 0 and costs.overhead > 0


def test_both_calibrations_are_kept_beside_one_another_and_damage_is_nothing(path, model):
    with KVStore(path, engine="posix") as store:
        store.calibrate(model, passages=2, tokens=64, suffix=8, repeats=1, progress=False)
        plant(store, model, SLOW_DISK)
        store.calibrate(model, passages=2, tokens=64, suffix=8, repeats=1, progress=False)
        file = path / "calibrations.json"
        records = json.loads(file.read_text())
        assert Counter(name.split()[0] == "prefix" for name in records) == {True: 1, False: 1}
        assert ask(model, store).reason == reasons.SLOWER
    (name,) = [name for name in records if name.startswith("prefix")]
    for damaged in ([{"tokens": 1}], [{"tokens": 160, "compute": "x", "restore": {"disk": 1}}], 3, [7]):
        file.write_text(json.dumps(records | {name: damaged}))
        with KVStore(path, engine="posix") as store:
            assert ask(model, store).tokens_restored > 0


SOUND = {"tokens": 160, "compute": 1e-3, "restore": {"disk": 1e-3}}


@pytest.mark.parametrize(
    "change",
    [
        *({"tokens": value} for value in (0, -1, 10**400, None)),
        *({"compute": value} for value in (-1.0, 10**400, float("nan"), "x")),
        *({"growth": value} for value in (-1e300, "x")),
        *({"overhead": value} for value in (float("inf"), None)),
        *({"restore": value} for value in ([], {"disk": 10**400}, {"disk": -1.0}, {"disk": None})),
        {"load": {"disk": -5}},
    ],
    ids=lambda change: f"{change!s:.40}",
)
def test_costs_that_no_measurement_gives_are_nothing(tmp_path, change):
    fingerprint = "0" * 32
    with KVStore(tmp_path) as store:
        storage = storage_of(store)
        keep_prefix_costs(storage, fingerprint, CPU, "exact", [PrefixCosts(**SOUND)])
        (name,) = storage.calibrations.read()
        assert prefix_calibration(storage, fingerprint, CPU, "exact").at(160).compute == 1e-3
        keep_records(storage, name, [SOUND | change])
        assert prefix_calibration(storage, fingerprint, CPU, "exact").at(160) is None


def test_calibrations_outlive_a_moment_in_which_they_cannot_be_read(tmp_path, monkeypatch):
    fingerprint = "0" * 32
    with KVStore(tmp_path) as store:
        keep_prefix_costs(storage_of(store), fingerprint, CPU, "exact", [PrefixCosts(**SOUND)])
    with KVStore(tmp_path) as store:
        storage = storage_of(store)
        with monkeypatch.context() as patch:
            patch.setattr(type(storage.calibrations.files), "read", Mock(side_effect=OSError(errno.EMFILE, "too many")))
            assert prefix_calibration(storage, fingerprint, CPU, "exact").at(160) is None
            with pytest.raises(OSError, match="too many"):
                storage.calibrations.write("other", [])
        keep_records(storage, f"other {fingerprint}", [])
        assert prefix_calibration(storage, fingerprint, CPU, "exact").at(160).compute == 1e-3


def test_a_file_of_calibrations_that_is_nested_too_deeply_is_none(path, model):
    with KVStore(path, engine="posix") as store:
        plant(store, model, SLOW_DISK)
    (path / "calibrations.json").write_text("[" * 100_000)
    with KVStore(path, engine="posix") as store:
        assert ask(model, store).tokens_restored > 0


def test_lengths_that_cannot_be_measured(tmp_path, model):
    with KVStore(tmp_path) as store:
        with pytest.raises(ConfigError, match="fewer"):
            store.calibrate_prefix(model, tokens=(1 << 20,))
        with pytest.raises(ConfigError, match="16"):
            store.calibrate_prefix(model, tokens=(8,))


def test_by_name():
    assert make_method("exact") == Exact() == Exact(decline=True)
    assert make_method("exact:decline=false") == Exact(decline=False)
