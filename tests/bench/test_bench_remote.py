"""Benchmarks of remotes run, in their smallest form."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
from memory_backend import MemoryBackend

from hf_tiered_cache import KVStore

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))


def test_remote(tmp_path, monkeypatch):
    pytest.importorskip("redis")
    import remote
    from lib import machines

    forked = SimpleNamespace(Popen=processes.Popen, PIPE=processes.PIPE, TimeoutExpired=processes.TimeoutExpired)
    monkeypatch.setattr(machines, "subprocess", forked)  # importing takes seconds
    monkeypatch.setattr(remote, "WARM_TOKENS", 64)
    options = ["--layers", "1", "--prefixes", "1024", "--repeats", "2", "--machines", "3"]  # long enough to fetch
    monkeypatch.setattr(
        sys, "argv", ["remote.py", *options, "--engines", "redis", "--rates", "1", "--out", str(tmp_path)]
    )
    try:
        remote.main()
    except SystemExit as exit_error:
        pytest.skip(str(exit_error))
    document = json.loads((tmp_path / "remote-qwen2.5-0.5b-1l-float32-cpu.json").read_text())
    (result,) = document["results"]
    rows = result["requests"]
    assert set(rows) == {
        *("recompute", "disk", "host", "redis", "1 GB/s"),
        *(f"{way}, at once" for way in ("disk", "host", "redis")),
    }
    assert [len(rows[way]) for way in ("recompute", "redis", "redis, at once")] == [2, 2, 4]
    for way in ("disk", "host"):
        assert all(row["tokens_restored"] == 1024 for row in rows[way] + rows[f"{way}, at once"])
    for row in rows["redis"] + rows["redis, at once"]:  # a busy machine may be late
        assert row["tokens_restored"] == (1024 if row["hits"] else 0)
    assert any(row["bytes"] == result["bytes"] for row in rows["redis"])
    page = (tmp_path / "remote-qwen2.5-0.5b-1l-float32-cpu.md").read_text()
    assert "| redis | 1,024 | 3 |" in page
    assert "| 1 GB/s | 1,024 |" in page
    assert document["machine"]["commit"]


def test_what_the_cost_model_chose_is_compared_with_the_best_of_both():
    import remote

    def rows(seconds, **figures):
        return [{"ttft_s": seconds, "hits": 0, "misses": []} | figures] * 3

    requests = {"recompute": rows(2.0), "disk": rows(0.5)}
    fast, slow = rows(1.0, hits=1), rows(2.2, misses=[remote.SLOW_FETCH])
    result = {"bytes": 10_000_000, "requests": requests | {"fast": fast, "slow": slow}}
    figures = remote.link_figures(result, "fast", 1e8)
    assert (figures["choices"], figures["over_best"]) == ({"fetch": 3}, 1.0)
    figures = remote.link_figures(result, "slow", 1e6)
    assert (figures["choices"], figures["fetching"]) == ({"compute": 3}, 10.5)
    assert figures["over_best"] == pytest.approx(1.1)
    assert remote.link_figures(result, "slow", 1e8)["over_best"] == pytest.approx(2.2 / 0.6)  # the wrong choice
    assert remote.choice_of(rows(1.0, misses=["the remote failed"])[0]) == "late"


def test_a_link_delays_what_is_read_and_changes_no_byte():
    from lib.machines import limit

    remote = MemoryBackend()
    content = torch.arange(100_000, dtype=torch.int32).numpy().tobytes()
    remote.put_object("segments/a", content, replace=False)
    limit(remote, 1e6)
    began = time.monotonic()
    assert remote.get_object("segments/a", remote.find_object("segments/a").version, 0, len(content)) == content
    assert remote.get_beginnings(["segments/a", "b"], 100_000) == {"segments/a": content[:100_000]}
    assert time.monotonic() - began >= 0.5


def test_remote_segments(tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    import remote_segments

    monkeypatch.setattr(remote_segments, "subprocess", processes)
    options = ["--segments", "70", "--listed", "9", "--engines", "file", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["remote_segments.py", *options])
    remote_segments.main()
    document = json.loads((tmp_path / "remote-segments-cpu.json").read_text())
    document["results"].append(document["results"][0] | {"engine": "of another run"})
    (tmp_path / "remote-segments-cpu.json").write_text(json.dumps(document))
    sys.argv.append("--keep")
    remote_segments.main()
    kept_result, result = json.loads((tmp_path / "remote-segments-cpu.json").read_text())["results"]
    assert kept_result == document["results"][1]
    assert (result["engine"], result["segments"], result["listed"]) == ("file", 70, 9)
    assert result["gc_memory"] >= 0
    assert len(result["hit"]) == len(result["miss"]) == 50
    assert all(min(result[name]) > 0 for name in remote_segments.MEASURES)
    with closing(MemoryBackend()) as remote:
        remote_segments.fill(remote, range(9))
        with KVStore(backend=remote) as store:
            assert store.verify().ok and len(store.segments()) == 9
    assert "file, 70 segments" in (tmp_path / "remote-segments-cpu.md").read_text()
    assert (tmp_path / "remote-segments-cpu.png").exists()


def test_hedged_reads(tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    import hedged_reads

    monkeypatch.setattr(hedged_reads, "USUAL_SECONDS", 0.0)
    monkeypatch.setattr(hedged_reads, "LONG_SECONDS", 0.03)
    monkeypatch.setattr(sys, "argv", ["hedged_reads.py", "--repeats", "3", "--out", str(tmp_path)])
    hedged_reads.main()
    results = json.loads((tmp_path / "hedged-reads-cpu.json").read_text())["results"]
    assert sum(results["with"]["second requests"]) > 0 == sum(results["without"]["second requests"])
    assert "look-up, without second requests" in (tmp_path / "hedged-reads-cpu.md").read_text()
