"""The simulation of machines that share a remote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import fleet
from lib import traces


@pytest.fixture
def trace() -> traces.Trace:
    """Four requests: a session of two turns, another one with the same beginning, and the first again."""
    paths = [[0, 1], [0, 1, 2], [0, 3], [0, 1, 2]]
    first = np.cumsum([0, *map(len, paths)])
    sizes = np.array([10, 20, 30, 40])
    return traces.Trace(np.arange(4.0), np.array([0, 0, 1, 0]), first, np.concatenate(paths), sizes)


def test_a_cache_holds_the_beginnings_of_prompts_and_evicts_their_ends_first(trace):
    alone, apart = np.zeros(4, np.int64), np.array([0, 1, 0, 1])
    assert trace.tokens.tolist() == [30, 60, 50, 60]
    assert traces.replay(trace, alone, np.inf).tolist() == [0, 30, 10, 60]
    assert traces.replay(trace, apart, np.inf).tolist() == [0, 0, 10, 60]
    assert traces.replay(trace, alone, 70).tolist() == [0, 30, 10, 30]  # 30 of the second turn are evicted
    assert traces.replay(trace, alone, 70, low=0.5).tolist() == [0, 30, 10, 10]  # then 20 of the first turn, too
    assert traces.replay(trace, alone, np.inf, kept_share=0.0).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", traces.WORKLOADS)
def test_generated_requests_have_the_published_statistics(name):
    workload = traces.WORKLOADS[name]
    statistics = traces.describe(workload, seed=5)
    assert statistics["hit_ratio"] == pytest.approx(workload.published, abs=0.05)
    assert statistics["tokens"] == pytest.approx(workload.tokens, rel=0.1)
    assert statistics["requests"] == pytest.approx(workload.requests, rel=0.05)
    for share, ratio in workload.curve.items():
        assert statistics["curve"][f"{share:g}"] == pytest.approx(ratio, abs=0.07)
    same_seed, other_seed = (traces.generate(workload, 0.01, 500, seed) for seed in (5, 6))
    assert np.array_equal(same_seed.nodes, traces.generate(workload, 0.01, 500, 5).nodes)
    assert not np.array_equal(same_seed.nodes, other_seed.nodes)


def test_a_fleet(tmp_path, monkeypatch):
    options = ["--machines", "1,4", "--disks", "100,1000", "--remotes", "1000", "--seconds", "900", "--warm-up", "300"]
    monkeypatch.setattr(sys, "argv", ["fleet.py", *options, "--load", "0.2", "--out", str(tmp_path)])
    fleet.main()
    document = json.loads((tmp_path / "fleet.json").read_text())
    assert set(document["workloads"]) == set(traces.WORKLOADS)
    for workload in document["workloads"].values():
        alone, four = workload["fleets"]
        assert (alone["machines"], four["machines"]) == (1, 4)
        for run in (alone, four):
            assert len(run["rows"]) == 2 * 2 * 4
            hits = {(row["route"], row["disk_gb"], row["remote"]): sum(row["hits"].values()) for row in run["rows"]}
            times = {(row["route"], row["disk_gb"], row["remote"]): row["ttft_s"] for row in run["rows"]}
            for route in (fleet.RANDOM, fleet.HOME):
                no_pool, pool = (route, 1000, fleet.NONE), (route, 1000, fleet.UNLIMITED)
                assert 0 < hits[route, 100, fleet.NONE] <= hits[no_pool] <= hits[pool] < 1
                assert times[pool]["mean"] <= times[no_pool]["mean"] + 0.001 + 1e-9  # rounding of the sum
                assert times[no_pool]["mean"] < run["computed_s"]["mean"]
                assert times[no_pool]["p50"] < times[no_pool]["p95"]
        rows = {(row["route"], row["remote"]): row for row in four["rows"] if row["disk_gb"] == 1000}
        assert rows[fleet.RANDOM, fleet.UNLIMITED]["hits"]["remote"] > 0.1
        assert rows[fleet.RANDOM, fleet.NONE]["hits"]["remote"] == 0
    page = (tmp_path / "fleet.md").read_text()
    assert "## Tools and agents" in page and "Table 2" in page
    assert (tmp_path / "fleet.png").exists()
