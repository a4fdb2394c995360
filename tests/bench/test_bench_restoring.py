"""Benchmarks of what methods choose and read run, in their smallest form, and no bench is without such a test."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
BENCH = TESTS.parent / "bench"
XS = TESTS.parent / "eval" / "reference" / "xs"
sys.path.append(str(BENCH))


def run(monkeypatch, program, *options):
    """Run a bench's `main`, as from the command line."""
    monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, options)])
    program.main()


def read(folder, name):
    """Read the results: JSON and page, which name the commit."""
    document, page = json.loads((folder / f"{name}.json").read_text()), (folder / f"{name}.md").read_text()
    assert document["machine"]["commit"] in page
    return document, page


def test_every_bench_has_a_test_that_runs_it():
    """A test may also run another benchmark that imports it."""
    modules = {".".join(path.relative_to(BENCH).with_suffix("").parts): path for path in BENCH.rglob("*.py")}
    imports = {name: _imported(path) for name, path in modules.items() if path.name != "__init__.py"}
    run = set().union(*(_imported(path) for path in TESTS.rglob("test_*.py"))) & imports.keys()
    text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    run |= {name for name in imports if re.search(rf'"(bench/)?{name}\.(py|sh)"', text)}
    while more := set().union(*(imports[name] for name in run)) & imports.keys() - run:
        run |= more
    assert not imports.keys() - run


def _imported(path):
    """Return the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module, *(f"{node.module}.{name.name}" for name in node.names)))
    return names


SMALL = ["--dtype", "float32", "--device", "cpu", "--bandwidth", 1e9, "--requests", 3, "--warm-up", 2]


def test_bandwidths(tmp_path, monkeypatch):
    import bandwidths

    disk_counts, real = [], bandwidths.save
    monkeypatch.setattr(bandwidths, "save", lambda *args: disk_counts.append(len(args[2]["disks"])) or real(*args))
    sizes = ["--shape", "tiny", "--layers", 4, "--tokens", 256, "--prefixes", 2, "--memory-share", 0.5, "--learn", 1]
    counts = ["--bandwidths", "1000,0", "--requests", 3, "--warm-up", 2]
    run(monkeypatch, bandwidths, *sizes, *counts, "--device", "cpu", "--out", tmp_path)
    document, page = read(tmp_path, "bandwidths-tiny-4l-float32-cpu")
    assert disk_counts == [1, 2]  # behind each disk
    assert [disk["bytes_per_second"] for disk in document["disks"]] == [1e9, "real"]
    memory = sum(document["memory_bytes"].values())
    for disk in document["disks"]:
        assert tuple(disk["systems"]) == bandwidths.SYSTEM_NAMES
        assert all(row["requests"] == 3 and row["first"]["requests"] == 2 for row in disk["systems"].values())
        assert all(sum(row["memory_bytes"].values()) == memory for row in disk["systems"].values())
        assert disk["systems"][bandwidths.OURS]["first"]["bytes_read"] > 0
    assert document["recompute_ttft_s"] > 0
    assert "| real disk |" in page and "| bulk prefill |" in page and "for its index; the others" in page


def test_between_measured_disks_times_lie_on_a_straight_line_of_logarithms():
    from bandwidths import OURS, ttft_at

    def disk(speed, seconds):
        return {"bytes_per_second": speed, "systems": {OURS: {"ttft_mean_s": seconds}}}

    document = {"disks": [disk(4e8, 0.25), disk("real", 0.1), disk(1e8, 1.0)]}
    assert [ttft_at(document, OURS, speed) for speed in (1e8, 4e8)] == [1.0, 0.25]
    assert abs(ttft_at(document, OURS, 2e8) - 0.5) < 1e-12
    assert ttft_at(document, OURS, 5e8) is ttft_at(document, OURS, 9e7) is None


def small_bench(folder, *options):
    """Return a bench of selective re-prefill: three prefixes of 256 tokens, and memory for half of them."""
    from lib import serving
    from lib.common import build
    from lib.workload import RandomTokens

    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    arguments = parser.parse_args(["--device", "cpu", "--memory-share", "0.5", *options])
    model = build("tiny", torch.float32, torch.device("cpu"))
    return serving.Bench(arguments, model, RandomTokens(model.config.vocab_size, 3, 256, arguments.suffix), folder)


def test_a_disk_is_calibrated_by_bulk_prefill_and_all_systems_have_the_same_memory(tmp_path):
    """The memory of an index is taken from the blocks."""
    from lib import serving
    from lib.workload import requests
    from reprefill import KEYS, OURS, systems

    bench = small_bench(tmp_path)
    calibrations = bench.calibration
    assert bench.bandwidth == calibrations["bulk"]["bytes_per_second"]
    assert bench.described()["calibration"] == calibrations
    for calibration in calibrations.values():
        load = bench.token_bytes / calibration["bytes_per_second"]
        assert abs(load / calibration["token_s"] / (serving.PAPER_LOAD_S / serving.PAPER_COMPUTE_S) - 1) < 1e-9
    bench.bandwidth = 0
    own_system, keys = ({system.name: system for system in systems(0.25, 4, None)}[name] for name in (OURS, KEYS))
    assert bench.memory(keys) == {"device": 0, "host": bench.host_memory, "index": 0}
    memory = bench.memory(own_system)
    assert memory["index"] > 0 and sum(memory.values()) == bench.host_memory
    with bench.store_for(own_system) as store:
        first, second = (
            [bench.ask(own_system, store, ids) for ids in requests(bench.prompts, 3)]  # each prefix once
            for _ in range(2)
        )
        assert store.stats.index.bytes == store.stats.index.budget == memory["index"]
        assert store.stats.host.bytes <= store.stats.host.budget == memory["host"]
    assert sum(row["bytes_read"] for row in first) > sum(row["bytes_read"] for row in second)
    assert not any(row["bytes_identifying"] for row in second)


def test_a_store_that_is_opened_again_knows_of_no_request(tmp_path):
    """This also holds for other systems with the same geometry."""
    import reprefill
    from lib.workload import requests

    bench = small_bench(tmp_path, "--bandwidth", "0")
    systems = {system.name: system for system in reprefill.systems(0.25, 4, 1.0)}
    reordering, not_reordering = systems[reprefill.IMPRESS], systems[f"{reprefill.IMPRESS}, without reordering"]
    ids = next(requests(bench.prompts, 1))

    def segments(system, times=0):
        with bench.store_for(system) as store:
            for _ in range(times):
                bench.ask(system, store, ids)
            return {row.id for row in store.segments()}

    plain = segments(reordering)
    assert segments(reordering, 8) != plain  # who lays out anew, writes another segment
    assert segments(not_reordering, 8) == segments(reordering) == plain
    bench.learn(reordering, 8)
    assert bench.bandwidth == 0 and not segments(reordering) & plain
    assert segments(not_reordering) == plain


def test_reprefill(tmp_path, monkeypatch):
    import reprefill

    sizes = ["--shape", "llama-3.2-1b", "--layers", 1, "--tokens", 512, "--prefixes", 2]
    monkeypatch.setitem(sys.modules["lib.common"].SHAPES, "llama-3.2-1b", _narrow())
    run(monkeypatch, reprefill, *sizes, *SMALL, "--agreeing", 1, "--out", tmp_path)
    document, page = read(tmp_path, "reprefill-llama-3.2-1b-1l-float32-cpu")
    rows, probes = document["systems"], document["probes"]
    assert document["chosen_tokens"] == {"chunks": 24, "tokens": 25}
    assert (probes["kv_heads"], probes["asked"], probes["emulated"]) == (8, 3, 1)
    assert probes["agreed"]["IMPRESS"] == 1
    agreeing, differing = rows["IMPRESS"], rows["IMPRESS, probes as they are"]
    assert probes["agreed"]["IMPRESS, probes as they are"] == 0
    kv = 512 * document["token_bytes"]
    assert 0 < agreeing["bytes_read"] <= kv
    assert 0 < differing["bytes_read"] <= kv  # no key is read twice
    assert differing["read_amplification"] > 10  # scattered tokens out of blocks of 64
    assert all(row["ttft_mean_s"] > 0 for row in rows.values())
    assert len(document["aims"]) == 6
    assert {sum(row["memory_bytes"].values()) for row in rows.values()} == {sum(document["memory_bytes"].values())}
    assert rows[reprefill.OURS]["memory_bytes"]["index"] > 0
    assert all(row["first"]["requests"] == 2 for name, row in rows.items() if name != "recompute")
    assert document["calibration"]["bulk"]["token_s"] > 0 < document["calibration"]["suffix"]["token_s"]
    assert "IMPRESS probes 3 of 8 KV heads, which agree in 100% of the selections. This is emulated" in page
    assert "24 in whole chunks" in page
    assert "first tokens of the reference model at this budget, %: contiguous_kv 100 / 100, impress" in page
    assert reprefill.accuracy(0.07) == ""


def test_reprefill_on_a_trained_model(tmp_path, monkeypatch):
    import reprefill

    sizes = ["--model", XS, "--period", 1, "--prefixes", 2, "--tokens", 128]
    run(monkeypatch, reprefill, *sizes, *SMALL, "--out", tmp_path)
    document, page = read(tmp_path, "reprefill-xs-float32-cpu")
    assert document["probes"]["emulated"] is None
    assert set(document["probes"]["agreed"]) == {"IMPRESS", "IMPRESS, without reordering"}
    assert "measured on this trained model" in page


def test_ablation(tmp_path, monkeypatch):
    import reprefill

    sizes = ["--shape", "tiny", "--layers", 2, "--tokens", 128, "--prefixes", 2, "--period", 2, "--ablation"]
    run(monkeypatch, reprefill, *sizes, *SMALL, "--budget", 0.25, "--out", tmp_path)
    document, page = read(tmp_path, "ablation-25-tiny-2l-float32-cpu")
    rows = document["systems"]
    assert len(rows) == 2 * (len(reprefill.WITHOUT) + 2)
    assert "aims" not in document
    for name in (reprefill.OURS, reprefill.KEYS):
        assert {f"{name}, LFU", f"{name}, LRU"} <= rows.keys()
    assert "IMPRESS probes" not in page


def _narrow():
    """Build a small model with Llama's heads."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    heads["head_dim"] = 64  # blocks of whole pages
    return {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 16, "tie_word_embeddings": True, **heads}


@pytest.mark.parametrize(
    ("option", "model", "layers"), [("--shape", "tiny", 4), ("--model", XS, 8)], ids=["shape", "model"]
)
def test_auto(tmp_path, monkeypatch, option, model, layers):
    import auto

    sizes = [
        option,
        model,
        "--layers",
        4,
        "--prefixes",
        "64,128",
        "--rates",
        "50,0",
        "--repeats",
        1,
        "--device",
        "cpu",
    ]
    share, *other_shares = auto.SHARES
    monkeypatch.setattr(auto, "SHARES", {share: auto.SHARES[share]})
    monkeypatch.setattr(auto, "METHODS", {name: way for name, way in auto.METHODS.items() if name not in other_shares})
    monkeypatch.setattr("hf_tiered_cache.operations.calibrate._AUTO_TOKENS", (64, 128))
    monkeypatch.setattr("hf_tiered_cache.operations.calibrate._CONTEXT", 512)
    monkeypatch.setattr(auto, "LONG", 100)  # the longer prefix counts as long
    run(monkeypatch, auto, *sizes, "--long-repeats", 1, "--out", tmp_path)
    name = f"auto-{Path(model).name}-{layers}l-float32-cpu"
    document, page = read(tmp_path, name)
    assert document["disks"].keys() == {"50 MB/s", "real disk"}
    for disk in document["disks"].values():
        assert disk["calibration_s"] > 0
        for length, turns in (("64", 3), ("128", 1)):  # a short one has three times as many
            cell = disk["prefixes"][length]
            assert cell["ttft_s"].keys() == auto.METHODS.keys()
            assert all(len(times) == turns and min(times) > 0 for times in cell["ttft_s"].values())
            assert all(0 <= share <= 1 for share in cell["chosen"])
            assert cell["best"] != auto.AUTO and cell["predicted_recompute_s"] > 0
    assert (tmp_path / f"{name}.png").exists()
    assert "## real disk" in page and "of 4 cells" in page


def test_auto_reports_what_was_computed():
    from auto import choice

    row = {"tokens_restored": 96, "tokens_recomputed": 24}
    assert choice(96, row) == 0.25
    assert choice(96, {"tokens_restored": 0, "tokens_recomputed": 0}) == 1
