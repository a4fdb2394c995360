"""Benchmarks run, in their smallest form."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import torch
from families import build, prompt
from transformers import AutoModelForCausalLM

from hf_tiered_cache import KVStore, TieredCache, detach
from hf_tiered_cache.methods import ContiguousKV, Exact

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))


def test_bits(tmp_path, monkeypatch):
    import bits

    monkeypatch.setattr(sys, "argv", ["bits.py", "--prompts", "1", "--tokens", "2", "--out", str(tmp_path)])
    bits.main()
    results = json.loads((tmp_path / "bits-cpu.json").read_text())["results"]
    assert len(results) == 4
    assert not any(result["logits_differ"]["tiered_and_same_passes"] for result in results.values())
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
    assert {(row["block_bytes"], row["threads"]) for row in document["raw"]} >= {(4096, 1), (262144, 8)}
    assert document["machine"]["commit"]
    assert "decrypt" in (tmp_path / "encryption-tiny-float32-cpu.md").read_text()


def test_many_segments(tmp_path, monkeypatch):
    import many_segments

    forked = SimpleNamespace(run=processes.run)  # importing takes seconds
    monkeypatch.setattr(many_segments, "subprocess", forked)
    monkeypatch.setattr(many_segments, "COMMANDS", {})
    options = ["--segments", "4,8", "--share", "2", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["many_segments.py", *options])
    many_segments.main()
    small, large = json.loads((tmp_path / "many-segments-cpu.json").read_text())["results"]
    assert (small["segments"], small["conversations"]) == (4, 2)
    assert (large["segments"], large["conversations"]) == (8, 4)
    assert len(large["seconds"]["hit"]) == 20
    assert min(large["seconds"]["open"]) > 0
    assert "8 segments, 4 conversations" in (tmp_path / "many-segments-cpu.md").read_text()
    assert (tmp_path / "many-segments-cpu.png").exists()


def test_conversations_many(tmp_path, monkeypatch):
    import conversations_many

    monkeypatch.setattr(conversations_many, "subprocess", SimpleNamespace(run=processes.run))
    method = conversations_many.METHODS[1]
    options = ["--methods", method, "--conversations", "3,6", "--turns", "4", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["conversations_many.py", *options])
    conversations_many.main()
    document = json.loads((tmp_path / "conversations-many-cpu.json").read_text())
    results = document["results"][method]
    assert [result["conversations"] for result in results] == [3, 6]
    for result in results:
        assert all(min(seconds) > 0 for seconds in result["seconds"].values())
        for name, refusal_times in result["refused"].items():
            assert len(result["seconds"][name]) + len(refusal_times) == 2 * 4
    assert "`store.gc()`" in (tmp_path / "conversations-many-cpu.md").read_text()


def test_find_passages(tmp_path, monkeypatch):
    import find_passages

    options = ["--passages", "3,6", "--tokens", "40", "--prompt", "150", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["find_passages.py", *options])
    find_passages.main()
    document = json.loads((tmp_path / "find-passages-cpu.json").read_text())
    for passages, result in document["results"].items():
        full, no_passages = result["full of passages"], result["without any"]
        assert (full["passages"], full["tokens"]) == (3, 3 * 32)
        assert (no_passages["passages"], no_passages["tokens"]) == (0, 0), passages
        assert all(len(times) == 2 and min(times) > 0 for times in full["seconds"].values())
    assert find_passages.STEPS["found"] in (tmp_path / "find-passages-cpu.md").read_text()


def test_batching(tmp_path, monkeypatch):
    import batching

    options = "--shape tiny --layers 2 --requests 3 --shared 64 --tokens 3 --rate 100 --repeats 1"
    monkeypatch.setattr(batching, "SETTLE_S", 0.1)
    monkeypatch.setattr(sys, "argv", ["batching.py", *options.split(), "--out", str(tmp_path)])
    batching.main()
    document = json.loads((tmp_path / "batching-tiny-2l-float32-cpu.json").read_text())
    assert list(document["runs"]) == [*batching.RUNS, *batching.PRIVATE]
    runs = [run for runs in document["runs"].values() for run in runs]
    assert all(len(run["first_token"]) == 3 and run["seconds"] > 0 for run in runs)
    assert "store, warm disk" in (tmp_path / "batching-tiny-2l-float32-cpu.md").read_text()


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
    assert ways["ours, raw"]["kl_max"] == 0.0 < ways["ours, int8"]["kl_mean"]
    assert ("QuantizedCache, fp8" in ways) == codec.HAS_FP8
    if codec.HAS_FP8:
        assert ways["ours, int8"]["kl_mean"] < ways["QuantizedCache, fp8"]["kl_mean"]
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
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())
    assert result["stats"]["disk"]["tokens_restored"] == 64
    assert document["headline"]["disk / safetensors file at 4k"] == result["disk_over_file"] > 0
    assert "disk / safetensors file at 16k" not in document["headline"]  # there was none
    assert "safetensors, safe_open, warm" in (tmp_path / "prefix-tiny-float32-cpu.md").read_text()


def test_steps(tmp_path, monkeypatch):
    import steps

    monkeypatch.setattr(steps, "subprocess", processes)
    monkeypatch.setattr(sys, "argv", ["steps.py", "--rounds", "1", "--turns", "2", "--out", str(tmp_path)])
    steps.main()
    document = json.loads((tmp_path / "steps-cpu.json").read_text())
    (source,) = document["sources"].values()
    counts = source["counts"]["Exact"]
    assert counts["prompt"]["calls"] > counts["token"]["calls"] > counts["token"]["functions"] > 10
    assert source["counts"]["CacheTune"]["prompt"]["calls"] > counts["prompt"]["calls"]
    assert len(source["times"]["Exact, first token"]) == 1
    operations = source["operations"]  # of a layer, beyond what it asks for with DynamicCache
    # blocks to columns and what is computed behind them: four copies for its two joins; a rotation and its copy: six
    assert operations["prompt"]["kernels"] <= 8 and operations["prompt"]["views"] <= 39
    assert operations["token"]["kernels"] <= 0 and operations["token"]["views"] <= 4
    layer = source["calls_per_layer"]
    assert 0 < layer["token"] <= 16 and layer["token"] < layer["prompt"] <= 110
    page = (tmp_path / "steps-cpu.md").read_text()
    assert "changes of file" in page and "Kernels / views" in page


def test_first_token(tmp_path, monkeypatch):
    import first_token

    monkeypatch.setattr(sys, "argv", ["first_token.py", "--turns", "2", "--layers", "2", "--out", str(tmp_path)])
    first_token.main()
    figures = json.loads((tmp_path / "first-token-cpu.json").read_text())["layers"]["2"]
    parts = {part for part, seconds in figures["prompt"].items() if seconds > 0}
    assert parts >= first_token.PARTS.keys()
    assert figures["token"]["identify the model"] > 0 and not figures["token"]["find what is stored"]
    assert "| rest |" in (tmp_path / "first-token-cpu.md").read_text()


def test_steps_counts_functions_entered_once_however_often_a_generator_goes_on(monkeypatch):
    import steps

    def numbers():
        yield from (number for number in range(3))

    def other():
        return list(numbers())

    monkeypatch.setattr(steps, "PACKAGE", Path(__file__).parent)
    assert steps.counted(other) == {"calls": 2, "functions": 2, "changes_of_file": 0}


def test_rag(tmp_path, monkeypatch, caplog):
    import rag

    prompts = ["--pool", "4", "--passages", "3", "--tokens", "32", "--requests", "1", "--media", "host"]
    load = ["--clients", "1,2", "--batches", "1,2", "--load-requests", "2"]
    options = ["--shape", "tiny", "--layers", "4", *prompts, *load]
    saved_documents = []
    monkeypatch.setattr(rag, "save", lambda *all_of_it: saved_documents.append(all_of_it))
    monkeypatch.setattr(sys, "argv", ["rag.py", *options, "--out", str(tmp_path)])
    rag.main()
    document = saved_documents[-1][2]
    systems = [system.name for system in rag.systems(0.15)]
    assert list(document["media"]["host"]) == systems == list(document["arrivals"]["host"])
    assert len(saved_documents) == 1 + 2 * 2 + 2 * 2  # each medium, and each number of clients and of prompts, at once
    assert document["media"]["host"]["prefix caching"]["tokens_computed"] == 24 + 3 * 32 + 32 - (24 + 32) // 16 * 16
    for rows in document["load"].values():
        assert [(row["clients"], row["requests"]) for row in rows] == [(1, 2), (2, 2)]
        assert all(0 < row["ttft_median_s"] <= row["ttft_p95_s"] < 60 and row["requests_per_s"] > 0 for row in rows)
        assert all(row["ttft_s"] < row["took_s"] for medium in rows for row in medium["rows"])
    tokens, least = 24 + 3 * 32 + 32, (24 + 32) / (24 + 3 * 32 + 32)
    assert {row["computed"] for rows in [document["load"][rag.FULL]] for row in rows} == {1}
    for name, rows in document["batches"].items():
        assert [row["batch"] for row in rows] == [1, 2] and name != rag.FULL
        assert rows[1]["computed"] == pytest.approx(rows[0]["computed"], abs=1 / tokens)
        assert least < rows[0]["computed"] < 1
    (own_system,) = document["load"].keys() - {rag.FULL}
    of_one_client = document["load"][own_system][0]["computed"]
    assert of_one_client == pytest.approx(document["batches"][own_system][0]["computed"], abs=1 / tokens)
    page = saved_documents[-1][3]
    assert page.index("stored as a corpus") < page.index("| system |") < page.index("are stored together")
    assert "## Simultaneous clients" in page and "## Batches" in page
    assert "without the ranking" not in caplog.text


def test_a_queue_of_clients_is_served_one_at_a_time():
    from lib import rag_load

    alone = {"ttft_median_s": 2.0, "rows": [{"took_s": 2.5}, {"took_s": 3.5}]}
    assert rag_load.one_at_a_time(alone, 1) == {"ttft_median_s": 2.0, "requests_per_s": 1 / 3}
    assert rag_load.one_at_a_time(alone, 4) == {"ttft_median_s": 11.0, "requests_per_s": 1 / 3}


def test_conversation(tmp_path, monkeypatch):
    import conversation

    options = ["--shape", "tiny", "--layers", "4", "--rates", "2", "--conversations", "2", "--turns", "2"]
    counts = ["--opening", "64", "--new", "16", "--answer", "2", "--decode-steps", "1", "--calibrate-repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["conversation.py", *options, *counts, "--out", str(tmp_path)])
    conversation.main()
    document = json.loads((tmp_path / "conversation-tiny-4l-float32-cpu.json").read_text())
    (result,) = document["rates"].values()
    systems = conversation.methods(trained=False)
    assert len(result["rows"]) == 4 * len(systems) and result["costs"]
    back = {name: [row for row in result["rows"] if row["system"] == name and row["history"]] for name in systems}
    assert all(len(rows) == 2 and all(row["ttft_s"] > 0 for row in rows) for rows in back.values())
    for full, selected_row in zip(back[conversation.LOAD], back[conversation.SELECTED], strict=True):
        assert full["restored"] == full["history"] // 16 * 16 == selected_row["restored"]
        assert selected_row["payload_bytes"] == full["payload_bytes"] == 2048
    for rows in back.values():
        assert all(row["payload_bytes"] <= row["stored_bytes"] for row in rows if "stored_bytes" in row)
    summary = conversation.summarise(result["rows"])
    assert summary[conversation.LOAD]["load_over_it"] == summary[conversation.PARTIAL]["partial_over_it"] == 1
    assert {len(times) for times in document["decode"].values()} == {conversation.SAMPLED}
    page = (tmp_path / "conversation-tiny-4l-float32-cpu.md").read_text()
    assert (
        "## 2 MB/s" in page
        and "Aims of Krul, auto" in page
        and "Aims of Krul, int8" in page
        and "Observing queries" in page
    )


def test_conversation_leaves_out_systems_that_no_aim_needs(monkeypatch, capsys):
    import conversation

    monkeypatch.setattr(sys, "argv", ["conversation.py", "--leave-out", "MiniCache;Krul, auto"])
    systems = conversation.arguments_of().systems
    assert {*conversation.methods(trained=False)} - {*systems} == {"MiniCache", "Krul, auto"}
    times = {name: {"system": name, "turn": 1, "history": 32, "ttft_s": 1.0, "decode_s": 1.0} for name in systems}
    assert set(conversation.summarise(list(times.values()))) == {*systems}
    del times[conversation.PARTIAL]
    assert conversation.summarise(list(times.values())) == {}
    monkeypatch.setattr(sys, "argv", ["conversation.py", "--leave-out", conversation.PARTIAL])
    with pytest.raises(SystemExit):
        conversation.arguments_of()
    assert "cannot leave out" in capsys.readouterr().err


def test_turns_come_in_the_order_of_their_times_and_go_on_from_one_another():
    from lib.workload import turns_of

    turns = turns_of(5, 6, (100, 20, 8), 60.0, seed=3)
    assert [turn.at for turn in turns] == sorted(turn.at for turn in turns) and turns == turns_of(
        5, 6, (100, 20, 8), 60.0, seed=3
    )
    assert [turn.conversation for turn in turns] != sorted(turn.conversation for turn in turns)  # they take turns
    for number in range(5):
        own_turns, end = [turn for turn in turns if turn.conversation == number], 0
        assert len(own_turns) == 6
        for turn in own_turns:
            assert turn.history == end < turn.stop < turn.end
            assert 75 <= turn.stop <= 125 if not end else 15 <= turn.stop - end <= 25
            end = turn.end


def test_tier_slots(tmp_path, monkeypatch):
    import tier_slots

    options = ["--slots", "4096,8192", "--fetches", "5", "--chunks", "8"]
    monkeypatch.setattr(sys, "argv", ["tier_slots.py", *options, "--out", str(tmp_path)])
    tier_slots.main()
    results = json.loads((tmp_path / "tier-slots-cpu.json").read_text())["results"]
    assert [result["slots"] for result in results] == [4096, 4096, 8192, 8192]
    assert all(len(result[name]) == 5 for result in results for name in ("fetch", "ranking all"))
    assert "| attention | 8,192 |" in (tmp_path / "tier-slots-cpu.md").read_text()
    assert (tmp_path / "tier-slots-cpu.png").exists()


def test_reselection(tmp_path, monkeypatch):
    import reselection

    options = ["--shape", "tiny", "--prefix", "64", "--budgets", "0.5", "--periods", "1,2", "--tokens", "1"]
    monkeypatch.setattr(sys, "argv", ["reselection.py", *options, "--out", str(tmp_path)])
    reselection.main()
    document = json.loads((tmp_path / "reselection-tiny-float32-cpu.json").read_text())
    assert [result["period"] for result in document["results"]] == [1, 2]
    assert all(result[name] > 0 for result in document["results"] for name in (*reselection.WAYS, "each token / once"))
    assert "| 2 | 50% |" in (tmp_path / "reselection-tiny-float32-cpu.md").read_text()


def test_decode_answers(tmp_path, monkeypatch):
    import decode_answers

    options = ["--model", str(BENCH.parent / "eval/reference/xs"), "--tokens", "256", "--contexts", "1"]
    monkeypatch.setattr(sys, "argv", ["decode_answers.py", *options, "--budgets", "0.25", "--out", str(tmp_path)])
    decode_answers.main()
    results = json.loads((tmp_path / "decode-answers-xs.json").read_text())["results"]
    assert results.keys() == {"full", *(f"{way} 0.25" for way in decode_answers.WAYS)}
    assert np.mean(results["full"]["KL"]) == 0 < np.mean(results["random 0.25"]["KL"])
    assert "| random |" in (tmp_path / "decode-answers-xs.md").read_text()


def conversation_answers_of(tmp_path, monkeypatch, *ways):
    import conversation_answers

    options = ["--model", str(BENCH.parent / "eval/reference/xs"), "--tokens", "256", "--count", "1", "--ways", *ways]
    options += ["--dtype", "float32"]  # faster on CPUs without bfloat16
    monkeypatch.setattr(conversation_answers, "KINDS", conversation_answers.KINDS[:1])
    monkeypatch.setattr(sys, "argv", ["conversation_answers.py", *options, "--out", str(tmp_path)])
    conversation_answers.main()
    return json.loads((tmp_path / "conversation-answers-xs-float32.json").read_text())


def test_conversation_answers(tmp_path, monkeypatch):
    ways = ("int8", "front 0.4", "Krul", "Krul, any distance")
    ways += ("Krul 0.5", "Krul 0.75 front 0.4 int8", "MiniCache 0.25", "random pairs 0.5")
    document = conversation_answers_of(tmp_path, monkeypatch, *ways, "fixed pairs 0.5", "H2O 0.5")
    assert document["found"].keys() == {"questions", "books"}
    assert document["skipped"] == {"longbench": "no --data", "chat": "no --data"}
    for losses in document["found"].values():
        mean = {way: {name: np.mean(values) for name, values in of.items()} for way, of in losses.items()}
        assert mean["full"]["storage"] == 100 and mean["full"]["KL"] < 1e-3  # kernels may round otherwise
        assert mean["full, rounded otherwise"]["storage"] == 100 and mean["full, rounded otherwise"]["KL"] < 1e-2
        assert mean["int8"]["storage"] == 100 * (32 + 4) / (4 * 32)  # a factor for each vector of 32 numbers
        for way in ("Krul", "Krul, any distance"):
            assert mean[way]["KL"] <= 0.01 and mean[way]["pairs"] <= mean[way]["proposed pairs"]
            assert mean[way]["storage"] <= mean["int8"]["storage"]
        assert mean["front 0.4"]["KL"] < min(1e-3, mean["H2O 0.5"]["KL"]) and mean["H2O 0.5"]["storage"] == 50
        alone = 13 / 256  # 5 % of a pair's tokens stay unmerged; two merged vectors take 128 bytes and two factors
        assert mean["MiniCache 0.25"]["storage"] == pytest.approx(100 * (6 + 2 * alone + (1 - alone) * 136 / 128) / 8)
        assert mean["random pairs 0.5"]["pairs"] == mean["Krul 0.5"]["pairs"] > 0
        assert mean["Krul 0.75 front 0.4 int8"]["storage"] < 34 < mean["front 0.4"]["storage"]
    page = (tmp_path / "conversation-answers-xs-float32.md").read_text()
    assert "| H2O 0.5 | 0.0 |  | 50.0 % | 2.00 |" in page and "Not measured: no --data" in page


def test_conversations_of_people_come_back(tmp_path, monkeypatch):
    import conversation_answers as answers

    (tmp_path / "sharegpt").mkdir()
    short = [{"from": speaker, "value": f"{speaker} says what is to be said " * 12} for speaker in ("human", "gpt") * 2]
    long = [*short, {"from": "human", "value": "Why?"}, short[1]]
    lines = [json.dumps({"conversations": turns}) for turns in (long, long, short[:2], long)]
    (tmp_path / "sharegpt" / "train.jsonl").write_text("\n".join(lines))
    options = ["--model", str(BENCH.parent / "eval/reference/xs"), "--tokens", "256", "--data", str(tmp_path)]
    arguments = answers.arguments_of([*options, "--count", "9"])
    assert answers.skipped(arguments) == {"longbench": "--data has no gov_report"}
    assert len(list(answers.chat(arguments, 0, 9))) == 1  # the other one is too short
    talks = list(answers.chat(arguments, 1, 9))
    assert len(talks) == 2
    for talk in talks:
        ((prompt, answer),) = talk.questions
        assert talk.ids.shape == (1, 256) and len(answer) == arguments.answer == 48
        tokenizer = answers.AutoTokenizer.from_pretrained(arguments.model)
        assert tokenizer.decode(prompt).split()[-2:] == ["Why?", "Assistant:"]
    (talk, _) = answers.in_turns(20, 5, arguments, 1, 9)
    assert talk.stops == (20, 79, 138, 197)
    model = answers.load(arguments.model, torch.float32, answers.CPU)
    with KVStore(tmp_path / "store") as store:
        returns, figures = answers.suspend(model, store, Exact(recompute=0.0, codec="int8"), talk, "a")
        cache = returns()
        answers.logits_of(model, cache, talk.ids, *talk.questions[0])
    assert cache.stats.tokens_restored == 256 and figures["storage"] == 100 * (32 + 4) / (4 * 32)  # codes and a factor


def test_pair_loss(tmp_path, monkeypatch):
    import pair_loss

    monkeypatch.setattr(sys, "argv", ["pair_loss.py", "--tokens", "256", "--count", "1", "--out", str(tmp_path)])
    pair_loss.main()
    pairs = json.loads((tmp_path / "pair-loss-xs.json").read_text())["pairs"]
    assert len(pairs) == 7 + 6
    near, far = (pairs[name] for name in ("4-5", "0-1"))
    assert near["angle"][0] < 15 < 80 < far["angle"][0] and near["KL"][0] < 0.0025 < far["KL"][0]
    assert "| 4-5 | " in (tmp_path / "pair-loss-xs.md").read_text()


def test_replay_margin(tmp_path):
    import replay_margin as margin

    all_settings = margin.settings()
    assert all(
        setting.stops == sorted(set(setting.stops)) and setting.stops[-1] <= 480 for setting in all_settings.values()
    )
    folder = BENCH.parent / "eval/reference/xs"
    model = margin.load(folder, torch.float32, margin.CPU)
    (talk,) = margin.questions(argparse.Namespace(model=folder, tokens=320), 1, 1)
    figures = [
        margin.figures_of(model, margin.Setting(method, [208]), talk.ids, str(tmp_path / str(number)))
        for number, method in enumerate((margin.Early(0.0, recompute=0.0), margin.Early(recompute=0.0, quality=1.0)))
    ]
    assert [bool(figure["pairs"]) for figure in figures] == [False, True]
    assert figures[1]["bytes"] < figures[0]["bytes"] and figures[0]["KL"] < figures[1]["KL"] < 0.1
    settings = {"a setting": {name: [figure[name] for figure in figures] for name in figures[0]}}
    about = {"model": "xs", "count": 2, "machine": margin.machine(margin.CPU, tmp_path), "settings": settings}
    assert "| a setting | 1 of 2 | " in margin.report(about)


def test_heads_agree(tmp_path, monkeypatch):
    import heads_agree

    options = ["--model", str(BENCH.parent / "eval/reference/xs"), "--tasks", "reference_fact", "--tokens", "256"]
    heads_agree.main([*options, "--limit", "2", "--budgets", "0.25", "--out", str(tmp_path)])
    (run,) = json.loads((tmp_path / "heads-agree.json").read_text())["runs"]
    alike, threshold = np.moveaxis(np.array(run["alike"]), -1, 0)
    assert alike.shape == (2, 8) and run["kv_heads"] == 2
    assert (alike > 0).all() and (alike < 1).any()
    assert threshold == pytest.approx((0.25 / 1.75) ** 0.6, rel=0.05)
    assert "| xs | 2 | reference_fact | 25% |" in (tmp_path / "heads-agree.md").read_text()


def test_overlap_is_of_all_two_conversations():
    import conversation_answers as answers

    assert answers.overlap([[(1, 2), (3, 4)], [(1, 2)], [(1, 2)]]) == pytest.approx(100 * (0.5 + 0.5 + 1) / 3)


def test_what_h2o_keeps_is_what_was_attended_to_most_and_the_last(tmp_path):
    import conversation_answers as answers
    from transformers import DynamicCache

    model = answers.load(BENCH.parent / "eval/reference/xs", torch.float32, torch.device("cpu"))
    model.set_attn_implementation("eager")
    ids, context = torch.arange(3, 203)[None], DynamicCache(config=model.config)
    with torch.no_grad():
        weights = model(input_ids=ids, past_key_values=context, output_attentions=True).attentions
    masses = answers.attended(model, ids)  # in pieces
    for mass, of_layer in zip(masses, weights, strict=True):
        torch.testing.assert_close(mass, of_layer[0].sum(1).unflatten(0, (2, 2)).sum(1), rtol=1e-4, atol=1e-4)
    reduced = answers.forgetful(context, masses, 0.25)
    for layer, full, mass in zip(reduced.layers, context.layers, masses, strict=True):
        assert layer.keys.shape == (1, 2, 50, 32)
        for head in range(2):
            most = mass[head, :175].topk(25).indices.sort().values
            columns = torch.cat([most, torch.arange(175, 200)])
            assert torch.equal(layer.keys[0, head], full.keys[0, head, columns])
            assert torch.equal(layer.values[0, head], full.values[0, head, columns])


def test_h2o_leaves_the_windows_of_sliding_layers_alone():
    import conversation_answers as answers
    from transformers import DynamicCache

    model = build("gemma3", num_hidden_layers=6)
    model.set_attn_implementation("eager")
    ids, context = prompt(120), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=context)
    masses = answers.attended(model, ids)
    resident = answers.forgetful(context, masses, 0.25)
    kinds = {layer.is_sliding for layer in context.layers}
    assert kinds == {True, False}
    for layer, full in zip(resident.layers, context.layers, strict=True):
        assert layer.keys.shape[2] == (full.keys.shape[2] if layer.is_sliding else 30)
        assert not layer.is_sliding or torch.equal(layer.keys, full.keys)
    unchanged = answers.forgetful(context, masses, 1.0)
    question = tuple(prompt(8, seed=1)[0].tolist()), tuple(prompt(4, seed=2)[0].tolist())
    expected = answers.logits_of(model, copy.deepcopy(context), ids, *question)
    torch.testing.assert_close(answers.logits_of(model, unchanged, ids, *question), expected)
    assert answers.logits_of(model, resident, ids, *question).isfinite().all()


def test_the_largest_saving_is_of_the_ways_within_1_percent():
    import conversation_answers as answers

    measured = {"full": (100, 90), "H2O 0.75": (75, 89.2), "H2O 0.5": (50, 89.05), "MiniCache 0.5": (80, 89.2)}
    table = {way: {"storage": [storage], "answers": [score]} for way, (storage, score) in measured.items()}
    assert answers.largest_saving(table, "answers", answers.ways()) == {"H2O": "H2O 0.75", "MiniCache": "MiniCache 0.5"}


def test_long_prompt(tmp_path):
    import long_prompt

    options = ["--model", "tiny", "--tokens", "300", "--piece", "96", "--new-tokens", "4", "--budget", "0.1"]
    options += ["--ways", "chunked", "in pieces", "stored"]
    code = (  # forked in a process without threads: importing takes longer than what is measured here
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "import multiprocessing, long_prompt\n"
        "long_prompt.get_context = lambda _: multiprocessing.get_context('fork')\n"
        "long_prompt.main()"
    )
    processes.run([sys.executable, "-c", code, *options, "--out", str(tmp_path)], check=True, stdout=processes.DEVNULL)
    results = {row["way"]: row for row in json.loads((tmp_path / "long-prompt-tiny.json").read_text())["results"]}
    assert tuple(results) == long_prompt.WAYS[1:]
    assert results["in pieces"]["tokens_computed"] == 303 and results["stored"]["tokens_restored"] == 288
    assert abs(results["in pieces"]["first_kl"]) < 1e-4 and results["chunked"]["top_1"] == 1
    assert "| in pieces | 300 |" in (tmp_path / "long-prompt-tiny.md").read_text()


def test_memory(tmp_path):
    import memory

    options = ["--shape", "tiny", "--layers", "2", "--contexts", "512,1024", "--piece", "256", "--budget", "0.1"]
    options += ["--new-tokens", "2", "--index-memory", "4KiB", "--host-memory", "1MiB"]
    code = (  # forked, as in test_long_prompt
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "import multiprocessing, memory\n"
        "memory.get_context = lambda _: multiprocessing.get_context('fork')\n"
        "memory.main()"
    )
    processes.run([sys.executable, "-c", code, *options, "--out", str(tmp_path)], check=True, stdout=processes.DEVNULL)
    document = json.loads((tmp_path / "memory-tiny-2l-cpu.json").read_text())
    results = {(row["tokens"], row["caches"]): row for row in document["results"]}
    assert results.keys() == {(tokens, caches) for tokens in (512, 1024) for caches in (1, 2)}
    for (tokens, _), row in results.items():
        assert row["kv_bytes"] == tokens * 2 * 2 * 32 * 2 * 4 and row["segments"] == tokens // 256
        assert row["unbudgeted_index_bytes"] == results[tokens, 1]["unbudgeted_index_bytes"] > 0  # caches share it
        assert row["peak_bytes"] > 0
    page = (tmp_path / "memory-tiny-2l-cpu.md").read_text()
    assert "Slope with 2 caches" in page and memory.slopes(document["results"]).keys() == {1, 2}


def test_decode_answers_of_one_way(tmp_path, monkeypatch):
    import decode_answers

    options = ["--model", str(BENCH.parent / "eval/reference/xs"), "--tokens", "256", "--contexts", "1"]
    options += ["--budgets", "0.25", "--ways", "random", "--suffix=-some", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["decode_answers.py", *options])
    decode_answers.main()
    assert json.loads((tmp_path / "decode-answers-xs-some.json").read_text())["results"].keys() == {
        "full",
        "random 0.25",
    }


def test_compare_checkouts(tmp_path, monkeypatch):
    import compare_checkouts

    order = []

    def run(source, script, options):
        order.append(source.name)
        slow = 2.0 if source.name == "before" else 1.0
        return dict(
            compare_checkouts.figures(
                {"results": [{"disk_s": [slow, 3 * slow, slow]}], "machine": {"cores": 2}, "a": slow}
            )
        )

    monkeypatch.setattr(compare_checkouts, "run", run)
    monkeypatch.setattr(compare_checkouts, "commit_of", lambda folder: folder.name)
    options = [
        "compare_checkouts.py",
        "prefix.py",
        "--source",
        str(tmp_path / "before"),
        "--out",
        str(tmp_path),
        "--",
        "--x",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", options)
    compare_checkouts.main()
    checkout = BENCH.parent.resolve().name
    assert order == ["before", checkout, checkout, "before"]
    document = json.loads((tmp_path / "compare-prefix.json").read_text())
    assert document["options"] == ["--x", "1"]
    assert document["results"]["results 0 / disk_s"] == {"before": [2.0, 2.0], checkout: [1.0, 1.0]}
    assert "| results 0 / disk_s | 2 | 1 | 0.500 |" in (tmp_path / "compare-prefix.md").read_text()


def test_rooflines_page_holds_what_the_program_says():
    import roofline

    model, machine = roofline.ModelShape.of("qwen2.5-7b"), roofline.Machine()
    result = roofline.roofline(model, machine, 16384, 64, [1.5e9, 7e9, 14e9])
    assert result["kv_bytes"] == 16384 * 56 * 1024
    assert result["tiers"]["host"]["transfer_s"] == pytest.approx(result["kv_bytes"] / machine.h2d)
    assert result["tiers"]["disk, 7 GB/s"]["first_token_s"] == pytest.approx(result["kv_bytes"] / 7e9)
    assert model.block_parameters == pytest.approx(6.53e9, rel=1e-3)  # what the model's card says, without embeddings
    for row in result["tiers"].values():
        assert row["reachable_s"] >= row["first_token_s"]
    assert result["tiers"]["device"]["reachable_s"] > 28 * roofline.KERNELS * 5e-6 > result["suffix_s"]
    assert roofline.report(result) in (BENCH.parent / "docs/roofline.md").read_text()


def test_a_restore_pays_from_one_length_on():
    import roofline

    model, machine = roofline.ModelShape.of("qwen2.5-7b"), roofline.Machine(disk=1.5e9)
    pays = roofline.break_even(model, machine, "disk", 64)

    def restoring_over_computing(tokens):
        restore_seconds = roofline.restored_seconds(model, machine, "disk", tokens, 64) + machine.overhead
        return restore_seconds / roofline.compute_seconds(model, machine, tokens + 64)

    assert restoring_over_computing(pays - 16) >= 1 > restoring_over_computing(pays)
    assert roofline.break_even(model, roofline.Machine(disk=1e8), "disk", 64) is None


ON_GPU = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "hf_tiered_cache"]:
    del sys.modules[name]  # so that it is imported without the hidden packages
script, hidden, *sys.argv[1:] = sys.argv[1:]
sys.modules.update(dict.fromkeys(filter(None, hidden.split(","))))  # importing them fails
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


def on_gpu(folder, *options, hidden=""):
    """Start the script on the CPU, in a process that lacks the hidden packages; return it and the file it prints to."""
    path = os.pathsep.join([str(BENCH), str(BENCH.parent)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["run", folder / "out", "--folder", folder, "--shape", "tiny", "--turns", "1", *options]
    output = folder / "output.txt"
    with output.open("w") as file:
        command = [sys.executable, "-c", ON_GPU, BENCH / "on_gpu.py", hidden, *arguments]
        return processes.Popen(command, env=environment, stdout=file, stderr=file), output


def test_on_gpu_is_started_by_its_script(tmp_path):
    """A run takes longer than a test of what the script sets."""
    command = ["sh", str(BENCH / "on_gpu.sh"), str(tmp_path), "--stages", "dance"]
    process = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert (process.returncode, "unknown stage dance" in process.stderr) == (2, True), process.stderr


def test_on_gpu_whole_on_the_cpu_without_what_only_prints(tmp_path):
    from lib import gpu_run

    hidden = "pydantic,typer,rich,humanize,kvikio"
    running, printed = on_gpu(tmp_path, "--seconds", "250", hidden=hidden)
    running.wait()
    output = printed.read_text()
    assert "Traceback" not in output, output
    rows = gpu_run.read_rows(tmp_path / "out")
    assert (rows[0]["stage"], rows[0]["what"]) == ("run", "asked")
    log = (tmp_path / "out" / gpu_run.LOG).read_text()
    assert {row["stage"] for row in rows if row["what"] == "done"} == {
        "probe", "tests", "prefix tiny", "decode", "syncs", "trace", "selective", "kvikio", "passages"
    }, output + log  # fmt: skip
    reasons = {row["skipped"] for row in rows if "skipped" in row}
    assert "no GPU" in reasons
    assert any("kvikio" in reason for reason in reasons)
    ways = {row["what"]: row for row in rows if row["stage"] == "prefix tiny" and row.get("prefix") == 128}
    assert {"computed", "DynamicCache", "host", "page cache", "disk"} <= ways.keys()
    assert (ways["host"]["tier"], ways["host"]["bytes_read"]) == ("host", 0)
    assert ways["disk"]["tier"] == "disk"
    assert ways["disk"]["bytes_read"] >= ways["page cache"]["bytes_read"] > 0
    assert next(row for row in rows if row["what"] == "Exact, prompt")["count"] == 0
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {gpu_run.ROWS, gpu_run.LOG, gpu_run.TRACE, gpu_run.REPORT}
    assert sum(files.values()) < 16 << 20
    assert not list(tmp_path.glob("on-gpu-*"))  # stores are gone
    page = (tmp_path / "out" / gpu_run.REPORT).read_text()
    assert "share of roofline" in page and "tiny, 128: host" in page and page.strip() in output


def test_on_gpu_killed_in_the_middle_leaves_what_it_had(tmp_path):
    from lib import gpu_run
    from lib.gpu_report import report

    running, printed = on_gpu(tmp_path, "--stages", "probe,prefix,passages")
    path, until = tmp_path / "out" / gpu_run.ROWS, time.monotonic() + 120
    while not (path.exists() and '"host"' in path.read_text()):
        assert running.poll() is None and time.monotonic() < until, printed.read_text()
        time.sleep(0.02)
    running.kill()
    running.wait()
    (work,) = tmp_path.glob("on-gpu-*")
    time.sleep(0.5)
    before = path.read_text()
    time.sleep(1.0)
    assert path.read_text() == before  # nobody is left who measures
    page = report(gpu_run.read_rows(tmp_path / "out"))
    assert "host" in page and "- prefix tiny: the run ended in this stage" in page
    path.write_text(before[:-10])  # torn in the middle of a line
    assert len(gpu_run.read_rows(tmp_path / "out")) == before.count("\n") - 1
    gpu_run.sweep(tmp_path)
    assert not work.exists()  # the next run removes what this one left


def test_on_gpu_without_a_dependency_probes_the_machine(tmp_path):
    from lib import gpu_run

    running, printed = on_gpu(tmp_path, "--prefixes", "64", "--stages", "probe,prefix,decode", hidden="xxhash")
    assert running.wait() == 0 and "Traceback" not in printed.read_text(), printed.read_text()
    rows = gpu_run.read_rows(tmp_path / "out")
    assert {row["stage"] for row in rows if row["what"] == "done"} == {"probe"}
    skipped = {row["stage"]: row["skipped"] for row in rows if row["what"] == "the rest"}
    assert skipped == dict.fromkeys(("prefix tiny", "decode"), "xxhash is not installed")


def test_tests_of_a_gpu_are_found_on_a_machine_with_few_packages():
    """The machine with the GPU has what torch and transformers bring, and pytest."""
    hidden = "accelerate,bitsandbytes,cryptography,datasets,evaluate,kvikio,pydantic,redis,sklearn"
    collect = """
import sys, pytest, torch
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(["--collect-only", "-qq", "--disable-warnings", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
    command = [sys.executable, "-c", collect, hidden, BENCH.parent / "tests/gpu"]
    process = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    files = dict(line.split(": ") for line in process.stdout.strip().splitlines())
    assert sum(map(int, files.values())) > 100


def test_a_stage_that_fails_costs_itself_alone(tmp_path, monkeypatch):
    from lib import gpu_run

    def fails(run):
        run.row("before")
        raise ValueError("no good")

    def dies(run):
        os._exit(7)

    def hangs(run):
        time.sleep(60)

    def lacks(run):
        import no_such_package  # noqa: F401

    def late(run):
        while True:
            run.check()
            time.sleep(0.01)

    def works(run):
        assert not list(run.folder.iterdir())  # what others left is gone
        (run.folder / "file").write_bytes(b"x")
        run.row("worked")

    monkeypatch.setattr(gpu_run, "_GRACE_S", 1.5)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    out, now = tmp_path / "out", time.monotonic()
    out.mkdir()
    run = gpu_run.Run(out, tmp_path / "on-gpu-1", now, now, ("tiny",), "float32", "cpu", (64,), 1, 1 << 30)
    actions = {works: 1, fails: 1, dies: 1, lacks: 1, late: 1, hangs: 1}
    stages = [gpu_run.Stage(action.__name__, share, action) for action, share in [*actions.items(), (works, 6)]]
    gpu_run.run_all(run, stages, seconds=6)
    rows = gpu_run.read_rows(out)
    skipped = {row["stage"]: row["skipped"] for row in rows if "skipped" in row}
    assert skipped == {
        "fails": "ValueError: no good",
        "dies": "the process died (exit status 7)",
        "lacks": "no_such_package is not installed",
        "late": "its time was over",
        "hangs": "killed: it did not stop when its time was over",
    }
    assert [row["what"] for row in rows if row["stage"] == "works"].count("worked") == 2
    assert not (tmp_path / "on-gpu-1").exists()


def test_syncs_are_told_by_the_line_of_ours_that_asked(monkeypatch):
    from lib import gpu_stages

    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *mode: 0)

    def warner(file):
        scope = {"warnings": warnings}
        text = "def wait():\n    warnings.warn('called a synchronizing CUDA operation')"
        exec(compile(text, str(file), "exec"), scope)
        return scope["wait"]

    library_wait, other_wait = warner(gpu_stages._PACKAGE / "restore/some.py"), warner("/x/transformers/models/some.py")
    with gpu_stages._sync_sites() as sites:
        library_wait()
        library_wait()
        other_wait()
        warnings.warn("something else", stacklevel=1)
    assert sites == {"restore/some.py:2 wait": 2, "models/some.py:2 wait": 1}


def test_what_does_not_fit_on_the_disk_is_skipped(tmp_path):
    from lib import gpu_run

    now = time.monotonic()
    run = gpu_run.Run(tmp_path, tmp_path, now, now + 9, ("tiny",), "float32", "cpu", (64,), 1, 1 << 20, "prefix")
    assert run.fits("this", 1 << 10)
    assert not run.fits("that", 1 << 30)
    (row,) = gpu_run.read_rows(tmp_path)
    assert row["what"] == "that" and re.search(r"1\.0 GiB of disk", row["skipped"])


def test_pipeline(tmp_path, monkeypatch):
    import pipeline

    options = ["--shape", "tiny", "--layers", "2", "--contexts", "512", "--batch", "2", "--budget", "0.1"]
    counts = ["--tokens", "1", "--turns", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *options, *counts])
    pipeline.main()
    (result,) = json.loads((tmp_path / "pipeline-tiny-2l-cpu.json").read_text())["results"]
    assert result["seconds"].keys() == {pipeline.WHOLE, pipeline.IN_TURN, pipeline.AT_ONCE}
    assert all(len(times) == 2 and min(times) > 0 for times in result["seconds"].values())
    assert "| 512 |" in (tmp_path / "pipeline-tiny-2l-cpu.md").read_text()


def test_decode(tmp_path, monkeypatch):
    import decode

    options = ["--shape", "tiny", "--contexts", "512", "--batches", "1,2", "--budget", "0.1"]
    counts = ["--layers", "2", "--tokens", "2", "--turns", "1", "--host-share", "0", "--disk-bandwidth", "1e9"]
    monkeypatch.setattr(sys, "argv", ["decode.py", *options, *counts, "--out", str(tmp_path)])
    decode.main()
    document = json.loads((tmp_path / "decode-tiny-2l-cpu-1000MBps.json").read_text())
    cases = {(result["batch"], result["place"]): result["systems"] for result in document["results"]}
    assert len(cases) == 4
    for (batch, place), systems in cases.items():
        assert set(systems) == set(decode.SYSTEMS)
        lacking = {name for name, lists in systems.items() if lists is None}
        further_systems = {decode.FULL, decode.UNFOLDED, decode.OURS} if place == decode.DISK else {decode.OFFLOAD}
        assert lacking == {decode.OFFLOADED} | further_systems
        assert all(len(lists["seconds"]) == 2 for lists in systems.values() if lists is not None)
        quest, peer = systems["Quest"], systems[decode.PEER]
        assert quest["hits"] == [0] * 2  # it keeps nothing
        assert sum(quest["moved"]) > sum(peer["moved"]) > 0 and sum(peer["hits"]) > 0
        if place == decode.DISK:  # all of every row, at every token
            assert systems[decode.OFFLOAD]["moved"] == [batch * 2 * 512 * 2 * 32 * 2 * 4] * 2
    page = (tmp_path / "decode-tiny-2l-cpu-1000MBps.md").read_text()
    assert "n/a" in page and len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


def test_what_a_full_cache_and_files_of_layers_hold_is_what_a_store_restores(tmp_path):
    """All systems that attend to everything give the same logits."""
    import decode
    from lib.common import build

    arguments = decode.arguments_of(["--budget", "1"])
    model = build("tiny", torch.float32, torch.device("cpu"), layers=2)
    contexts = decode.Contexts(model, 256, 2, 3)
    names = (decode.FULL, decode.UNFOLDED, decode.OFFLOAD, decode.OURS, "KVDrive")
    logits = []
    with decode.KVStore(tmp_path / "store") as store, contexts.asking(), torch.inference_mode():
        contexts.store(store, decode.KVDrive())
        for name in names:
            place = decode.DISK if name == decode.OFFLOAD else decode.MEMORY
            system = decode.system(name, place, contexts, arguments, lambda: store, tmp_path)
            for tokens in (decode.SUFFIX, 1, 1):
                system.pass_over(tokens)
            logits.append(system.logits)
    for other_logits in logits[1:]:
        torch.testing.assert_close(other_logits, logits[0], rtol=0, atol=1e-4)


def test_sharing(tmp_path):
    import sharing

    options = ["--shape", "tiny", "--layers", "2", "--prompts", "2", "--tokens", "64", "--processes", "2"]
    options += ["--repeats", "1", "--folder", str(tmp_path), "--out", str(tmp_path)]
    code = (  # forked, as in test_long_prompt
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "import multiprocessing, sharing\n"
        "fork = multiprocessing.get_context('fork')\n"
        "multiprocessing.get_context = lambda _: fork\n"
        "sharing.main()"
    )
    processes.run([sys.executable, "-c", code, *options], check=True, stdout=processes.DEVNULL)
    ways = json.loads((tmp_path / "sharing-tiny-float32-cpu.json").read_text())["ways"]
    assert ways[sharing.SHARED][0]["page_cache_bytes"] > 0 < ways[sharing.OWN][0]["first_token_s"]
    assert "One copy for 2 processes" in (tmp_path / "sharing-tiny-float32-cpu.md").read_text()


def write_sst2(folder):
    """Write sentences as the data set has them."""
    (folder / "sst2").mkdir()
    for split in ("train", "validation"):
        rows = [{"sentence": f"number {number} is a long sentence", "label": number % 2} for number in range(60)]
        (folder / "sst2" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_quality(tmp_path, monkeypatch):
    import quality

    write_sst2(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"The sentence of number {number} is long. " for number in range(30)))
    options = ["--model", str(BENCH.parent / "eval" / "reference" / "xs"), "--tasks", "sst2", "--methods", "h2o"]
    options += ["--data", str(tmp_path), "--tokens", "300", "--limit", "2", "--text", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["quality.py", *options, "--out", str(tmp_path)])
    quality.main()
    document = json.loads((tmp_path / "quality-xs.json").read_text())
    assert [row["target"] for row in document["rows"]] == list(quality.TARGETS)
    budgets = {calibration["budget"] for calibration in document["calibrated"]} | {1.0}
    for row in document["rows"]:
        assert row["budget"] in budgets and row["prompts"] == 2
        assert row["brought"] > 0 and 0 <= row["within_twice"] <= 1
        keeping = [
            calibration["budget"]
            for calibration in document["calibrated"]
            if 4 * np.mean(calibration["losses"]) <= row["target"]
            and 4 * np.quantile(calibration["losses"], 0.95) <= 2 * row["target"]
        ]
        assert row["budget"] == min(keeping, default=1.0)
    assert "within twice the target" in (tmp_path / "quality-xs.md").read_text()


def test_choices(tmp_path, monkeypatch):
    import choices

    write_sst2(tmp_path)
    options = ["--model", str(BENCH.parent / "eval" / "reference" / "xs"), "--tasks", "sst2"]
    options += ["--data", str(tmp_path), "--tokens", "128", "--limit", "10", "--shares", "0.1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["choices.py", *options])
    choices.main()
    rows = json.loads((tmp_path / "choices-xs-128.json").read_text())["tasks"]["sst2"]
    assert {row["way"] for row in rows if row["later"]} == set(choices.WAYS)
    assert all(row["kl"] > -1e-4 for row in rows)
    assert "later questions" in (tmp_path / "choices-xs-128.md").read_text()


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        ("chunks of 8, per kv head", {}),
        ("chunks of 4, per kv head", {"chunk_tokens": 4}),
        ("chunks of 8, all heads, 2 layers", {"per_head": False, "period": 2, "solo_layers": 1}),
    ],
)
def test_a_simulated_choice_is_the_methods(tmp_path, way, settings):
    """The simulation of ContiguousKV gives the logits of ContiguousKV."""
    import choices

    model = AutoModelForCausalLM.from_pretrained(BENCH.parent / "eval" / "reference" / "xs", dtype=torch.float32).eval()
    ids = torch.randint(3, model.config.vocab_size, (1, 180), generator=torch.Generator().manual_seed(3))
    with KVStore(tmp_path) as store:
        method = ContiguousKV(0.25, identify="keys", reorder=False, **settings)
        store.precompute(model, ids[:, :160], method=method, progress=False)
        cache = TieredCache(model, store, method=method, record=False)
        with torch.inference_mode():
            log_probs = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].log_softmax(-1)
        assert cache.stats.tokens_restored == 160
        detach(model)
    simulation = choices.Simulation(model)
    prefix = simulation.prefix(ids[0, :160].tolist())
    simulated = simulation.first_token(ids[0, 160:].tolist(), choices.Choice(choices.WAYS[way], 0.25, prefix))
    torch.testing.assert_close(log_probs, simulated, rtol=0, atol=1e-3)
    full = simulation.first_token(ids[0, 160:].tolist(), choices.Choice(None, 1.0, prefix))
    assert (full - simulated).abs().max() > 1e-2  # so that the choice matters


def test_an_interval_holds_the_ratio_of_means_and_narrows_with_more_turns():
    from lib.common import ratio_interval

    below = [1.0, 2.0, 3.0, 4.0]
    assert ratio_interval([1.5 * seconds for seconds in below], below) == pytest.approx((1.5, 1.5))
    above = [1.0, 3.0, 2.0, 5.0]
    low, high = ratio_interval(above, below)
    narrow_low, narrow_high = ratio_interval(20 * above, 20 * below)
    assert low < narrow_low < 1.1 < narrow_high < high
