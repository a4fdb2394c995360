"""Benchmarks run, in their smallest form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"
sys.path.append(str(BENCH))


def test_bits(tmp_path, monkeypatch):
    import bits

    monkeypatch.setattr(sys, "argv", ["bits.py", "--prompts", "1", "--tokens", "2", "--out", str(tmp_path)])
    bits.main()
    results = json.loads((tmp_path / "bits-cpu.json").read_text())["results"]
    assert len(results) == 4
    assert not any(found["logits_differ"]["tiered_and_same_passes"] for found in results.values())
    assert "same passes" in (tmp_path / "bits-cpu.md").read_text()


def test_fingerprint(tmp_path, monkeypatch):
    import fingerprint

    options = ["--shape", "tiny", "--repeats", "1", "--tokens", "8", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fingerprint.py", *options])
    fingerprint.main()
    document = json.loads((tmp_path / "fingerprint-tiny-bfloat16-cpu.json").read_text())
    results = document["results"]
    assert results["modules"] > 50 and results["first fingerprint / loading from disk"] > 0
    assert document["machine"]["commit"]
    assert "each request" in (tmp_path / "fingerprint-tiny-bfloat16-cpu.md").read_text()


def test_encryption(tmp_path, monkeypatch):
    import encryption

    options = [
        "--shape",
        "tiny",
        "--prefixes",
        "32",
        "--repeats",
        "1",
        "--record-repeats",
        "1",
        "--raw-bytes",
        "524288",
    ]
    monkeypatch.setattr(sys, "argv", ["encryption.py", *options, "--out", str(tmp_path)])
    encryption.main()
    document = json.loads((tmp_path / "encryption-tiny-float32-cpu.json").read_text())
    (result,) = document["results"]
    assert [stats["tokens_restored"] for stats in result["stats"].values()] == [32, 32]
    assert all(result[name] > 0 for name in ("disk_ratio", "read_ratio", "record_ratio", "flush_ratio"))
    assert {(one["block_bytes"], one["threads"]) for one in document["raw"]} >= {(4096, 1), (262144, 8)}
    assert document["machine"]["commit"]
    assert "decrypt" in (tmp_path / "encryption-tiny-float32-cpu.md").read_text()


def test_codec(tmp_path, monkeypatch):
    import codec

    options = ["--shape", "tiny", "--prefixes", "64", "--repeats", "1", "--dtypes", "bfloat16", "--bandwidth", "1e9"]
    models = ["--models", f"{BENCH.parent / 'eval/reference/xs'},nowhere", "--tokens", "128,128", "--questions", "2,2"]
    monkeypatch.setattr(sys, "argv", ["codec.py", *options, *models, "--out", str(tmp_path)])
    codec.main()
    document = json.loads((tmp_path / "codec-cpu.json").read_text())
    (times,) = document["times"]
    assert times["bytes_on_disk"]["int8"] < times["bytes_on_disk"]["raw"]
    assert all(len(times["ttft_s"][place][name]) == 1 for place in codec.PLACES for name in ("raw", "int8", "fp8"))
    ways = document["agreement"]["xs bfloat16"]["ways"]
    assert ways["ours, raw"]["kl_max"] == 0.0 < ways["ours, int8"]["kl_mean"] < ways["QuantizedCache, fp8"]["kl_mean"]
    assert document["agreement"]["nowhere"] == {"skipped": "the model is not here"}
    page = (tmp_path / "codec-cpu.md").read_text()
    assert "hqq" in page and "not measured, the model is not here" in page


def test_prefix(tmp_path, monkeypatch):
    import prefix

    options = ["--shape", "tiny", "--prefixes", "64", "--repeats", "1", "--recompute-repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["prefix.py", *options, "--decode-steps", "2", "--out", str(tmp_path)])
    prefix.main()
    document = json.loads((tmp_path / "prefix-tiny-float32-cpu.json").read_text())
    (result,) = document["results"]
    times = result["peers_s"]
    assert {"tiered, cold", "deepcopy in memory", "torch.load, mmap, cold", "safetensors, load_file, cold"} <= set(
        times
    )
    assert all(len(taken) == 1 and taken[0] > 0 for taken in times.values())
    assert result["stats"]["disk"]["tokens_restored"] == 64
    assert document["headline"]["disk / safetensors file at 4k"] == result["disk_over_file"] > 0
    assert "disk / safetensors file at 16k" not in document["headline"]  # there was none
    assert "safetensors, safe_open, warm" in (tmp_path / "prefix-tiny-float32-cpu.md").read_text()


def test_steps(tmp_path, monkeypatch):
    import steps

    monkeypatch.setattr(sys, "argv", ["steps.py", "--rounds", "2", "--turns", "2", "--out", str(tmp_path)])
    steps.main()  # sees to it that two processes count the same
    document = json.loads((tmp_path / "steps-cpu.json").read_text())
    (found,) = document["sources"].values()
    counts = found["counts"]["Exact"]
    assert counts["prompt"]["calls"] > counts["token"]["calls"] > counts["token"]["functions"] > 10
    assert found["counts"]["CacheTune"]["prompt"]["calls"] > counts["prompt"]["calls"]
    assert len(found["times"]["Exact, first token"]) == 2
    asked = found["operations"]  # of a layer, beyond what it asks for with DynamicCache
    # blocks to columns and what is computed behind them: four copies for its two joins; a rotation and its copy: six
    assert asked["prompt"]["kernels"] <= 8 and asked["prompt"]["views"] <= 39
    assert asked["token"]["kernels"] <= 0 and asked["token"]["views"] <= 4
    page = (tmp_path / "steps-cpu.md").read_text()
    assert "changes of file" in page and "Kernels / views" in page


def test_steps_counts_functions_entered_once_however_often_a_generator_goes_on(monkeypatch):
    import steps

    def numbers():
        yield from (number for number in range(3))

    def other():
        return list(numbers())

    monkeypatch.setattr(steps, "PACKAGE", Path(__file__).parent)
    assert steps.counted(other) == {"calls": 2, "functions": 2, "changes_of_file": 0}


def test_rechoose(tmp_path, monkeypatch):
    import rechoose

    options = ["--shape", "tiny", "--prefix", "64", "--budgets", "0.5", "--periods", "1", "2", "--tokens", "1"]
    monkeypatch.setattr(sys, "argv", ["rechoose.py", *options, "--out", str(tmp_path)])
    rechoose.main()
    document = json.loads((tmp_path / "rechoose-tiny-float32-cpu.json").read_text())
    assert [found["period"] for found in document["results"]] == [1, 2]
    assert all(found[name] > 0 for found in document["results"] for name in (*rechoose.EVERY, "each token / once"))
    assert "| 2 | 50% |" in (tmp_path / "rechoose-tiny-float32-cpu.md").read_text()


def test_beside(tmp_path, monkeypatch):
    import beside

    order = []

    def run(source, script, options):
        order.append(source.name)
        slow = 2.0 if source.name == "before" else 1.0
        return dict(
            beside.figures({"results": [{"disk_s": [slow, 3 * slow, slow]}], "machine": {"cores": 2}, "a": slow})
        )

    monkeypatch.setattr(beside, "run", run)
    monkeypatch.setattr(beside, "commit_of", lambda folder: folder.name)
    options = ["beside.py", "prefix.py", "--source", str(tmp_path / "before"), "--out", str(tmp_path), "--", "--x", "1"]
    monkeypatch.setattr(sys, "argv", options)
    beside.main()
    now = BENCH.parent.resolve().name
    assert order == ["before", now, now, "before"]
    document = json.loads((tmp_path / "beside-prefix.json").read_text())
    assert document["options"] == ["--x", "1"]
    assert document["results"]["results 0 / disk_s"] == {"before": [2.0, 2.0], now: [1.0, 1.0]}
    assert "| results 0 / disk_s | 2 | 1 | 0.500 |" in (tmp_path / "beside-prefix.md").read_text()
