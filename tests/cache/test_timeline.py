"""Traces: what a request did and when, in a file that is readable at any time; and the command that draws it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from families import build, prompt
from typer.testing import CliRunner

from hf_tiered_cache import ConfigError, KVStore, TieredCache, tiered
from hf_tiered_cache.cache.timeline import _MARK, MODEL, Timeline
from hf_tiered_cache.cli import app
from hf_tiered_cache.cli.timeline import Pass, read_trace, typical
from hf_tiered_cache.methods import ContiguousKV


@pytest.fixture
def model():
    return build("llama")


def generate(model, ids, cache, tokens=3):
    return model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)


def test_a_trace_holds_each_pass_and_layer_and_changes_no_token(model, tmp_path):
    ids = prompt(100)
    with KVStore(tmp_path / "kv", host_memory=0) as store:
        store.precompute(model, ids[:, :80], progress=False)
        expected = generate(model, ids, TieredCache(model, store, record=False))
        traced = generate(model, ids, TieredCache(model, store, record=False, trace=tmp_path / "trace.json"))
    assert torch.equal(traced, expected)
    passes = read_trace(tmp_path / "trace.json")
    assert [(record.restored, record.computed) for record in passes] == [(80, 20), (0, 1), (0, 1)]
    layers = model.config.num_hidden_layers
    for record in passes:
        names = [name for track, name, _, _ in record.events if track == "model"]
        assert names == [
            "before layer 0",
            *(f"layer {i - 1} to {i}" for i in range(1, layers)),
            f"after layer {layers - 1}",
        ]
        assert sum(name == "update" for _, name, _, _ in record.events) == layers
        assert all(record.began <= began and began + took <= record.ended + 1 for _, _, began, took in record.events)
        spans = sorted((began, began + took) for track, _, began, took in record.events if track == "model")
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(spans))
    sums = passes[0].sums()
    assert sums["read"] > 0 and sums["look up"] > 0 and "select" not in sums
    assert 0 < sums["compute"] + sums["update"] + sums["look up"] < passes[0].milliseconds


def test_selections_are_traced(model, tmp_path):
    ids, method = prompt(100), ContiguousKV(budget=0.5)
    with KVStore(tmp_path / "kv", policy=method.policy) as store:
        store.precompute(model, ids[:, :80], method=method, progress=False)
        generate(model, ids, TieredCache(model, store, method=method, trace=tmp_path / "trace.json"))
    assert read_trace(tmp_path / "trace.json")[0].sums()["select"] > 0


def test_a_session_traces_all_its_requests(model, tmp_path):
    with KVStore(tmp_path / "kv") as store, tiered(model, store, trace=tmp_path / "trace.json"):
        for seed in (1, 2):
            generate(model, prompt(40, seed=seed), None, tokens=2)
    assert [record.computed for record in read_trace(tmp_path / "trace.json")] == [40, 1, 40, 1]


def test_a_reset_cache_is_still_traced_and_a_traced_cache_is_collected(model, tmp_path, uncollected):
    with KVStore(tmp_path / "kv") as store:
        cache = TieredCache(model, store, trace=tmp_path / "trace.json")
        generate(model, prompt(40), cache, tokens=1)
        cache.reset()
        generate(model, prompt(40), cache, tokens=1)
        assert "look up" in read_trace(tmp_path / "trace.json")[1].sums()
        collected = weakref.ref(cache)
        del cache
        assert collected() is None


def test_a_trace_of_many_passes_is_read_with_few_comparisons_per_event(tmp_path, monkeypatch):
    class Counted(Pass):
        compared = 0

        def __getattribute__(self, name):
            Counted.compared += name == "ended"
            return super().__getattribute__(name)

    number, events = 200, [{"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "model"}}]
    for begin in range(0, 100 * number, 100):
        events += [{"ph": "X", "name": f"{i}", "tid": 1, "ts": begin + 9.0 * i, "dur": 5.0} for i in range(10)]
        counts = {"restored": 0, "computed": 1}
        events.append({"ph": "X", "name": "pass", "tid": 1, "ts": float(begin), "dur": 99.0, "args": counts})
    (tmp_path / "trace.json").write_text(json.dumps(events))
    monkeypatch.setattr("hf_tiered_cache.cli.timeline.Pass", Counted)
    passes = read_trace(tmp_path / "trace.json")
    assert number <= Counted.compared <= 2 * len(events)  # comparing each event with each pass: 200 times as often
    assert {tuple(name for _, name, _, _ in record.events) for record in passes} == {tuple(map(str, range(10)))}
    assert [record.began for record in passes] == list(range(0, 100 * number, 100))


def test_an_earlier_trace_is_replaced_and_another_file_is_not(model, tmp_path):
    notes = tmp_path / "notes.json"
    notes.write_text("[1, 2]")
    with KVStore(tmp_path / "kv") as store:
        with pytest.raises(ConfigError, match="is a file of something else; name a new file"):
            TieredCache(model, store, trace=notes)
        with pytest.raises(ConfigError, match="cannot be written"):
            TieredCache(model, store, trace=tmp_path / "nowhere" / "trace.json")
        for _ in range(2):
            generate(model, prompt(40), TieredCache(model, store, trace=tmp_path / "trace.json"), tokens=1)
    assert notes.read_text() == "[1, 2]"
    assert len(read_trace(tmp_path / "trace.json")) == 1


def test_a_second_link_to_an_earlier_trace_keeps_it(model, tmp_path):
    trace, backup = tmp_path / "trace.json", tmp_path / "backup.json"
    with KVStore(tmp_path / "kv") as store:
        for content in (b"", b'[{"name": "proc'):  # of a disk that was full
            trace.write_bytes(content)
            TieredCache(model, store, trace=trace)
        before = trace.read_bytes()
        backup.hardlink_to(trace)
        generate(model, prompt(40), TieredCache(model, store, trace=trace), tokens=1)
        with pytest.raises(ConfigError, match="is a file of something else"):
            TieredCache(model, store, trace="/dev/null")
    assert backup.read_bytes() == before
    assert len(read_trace(trace)) == 1


def test_a_trace_stays_in_its_folder_when_the_process_changes_to_another(model, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with KVStore(tmp_path / "kv") as store:
        cache = TieredCache(model, store, trace="trace.json")
        monkeypatch.chdir("other")
        generate(model, prompt(40), cache, tokens=1)
    assert len(read_trace(tmp_path / "trace.json")) == 1
    assert not any((tmp_path / "other").iterdir())


def test_a_trace_that_cannot_be_written_ends_and_the_request_goes_on(model, tmp_path, caplog):
    folder = tmp_path / "traces"
    folder.mkdir()
    with KVStore(tmp_path / "kv") as store:
        expected = generate(model, prompt(40), None)
        cache = TieredCache(model, store, trace=folder / "trace.json")
        shutil.rmtree(folder)
        assert torch.equal(generate(model, prompt(40), cache), expected)
    assert caplog.text.count("ends here, because it cannot be written: No such file or directory") == 1


OTHER_FILES = {
    "nothing": lambda path: None,
    "notes": lambda path: path.write_text("my notes\n"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to the trace": lambda path: path.symlink_to(path.with_name("moved.json")),
    "another trace": lambda path: path.write_bytes(_MARK + b"}]"),
    "notes in the same file": lambda path: path.write_text("my notes\n"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_what_takes_the_name_of_a_trace_stays_as_it_is(name, tmp_path, caplog):
    def files():
        paths = sorted(tmp_path.iterdir())
        return [(path.name, path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in paths]

    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    timeline.flush()
    shutil.copy(path, tmp_path / "moved.json")
    if "same file" not in name:
        path.unlink()  # its inode is free, and the next file may get it
    OTHER_FILES[name](path)
    before = files()
    for _ in range(2):
        timeline.add("pass", MODEL, 0, 1)
        timeline.flush()
    assert files() == before
    assert caplog.text.count("ends here, because it cannot be written") == 1


def test_a_full_disk_leaves_whole_events(tmp_path):
    path, limits = tmp_path / "trace.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    timeline = Timeline(path)
    timeline.add("pass", MODEL, 0, 1, restored=1, computed=1)
    timeline.flush()
    timeline.add("pass", MODEL, 2, 3, restored=1, computed=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        timeline.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(read_trace(path)) == 1


def test_the_command_draws_a_trace_and_sums_it(model, tmp_path):
    trace = tmp_path / "trace.json"
    with KVStore(tmp_path / "kv") as store:
        store.precompute(model, prompt(80), progress=False)
        generate(model, prompt(100), TieredCache(model, store, trace=trace), tokens=4)
    assert list(typical(read_trace(trace))) == ["prompt: 80 tokens restored, 20 computed", "one token (median of 3)"]
    result = CliRunner().invoke(app, ["timeline", str(trace)])
    assert result.exit_code == 0, result.output
    heading, row = result.output.splitlines()[:2]
    assert heading.split()[:2] == ["pass", "ms"] and "compute" in heading
    assert row.startswith("prompt: 80 tokens restored, 20 computed")
    picture = tmp_path / "trace.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    backup, drawn = tmp_path / "backup.png", picture.read_bytes()
    backup.hardlink_to(picture)
    assert CliRunner().invoke(app, ["timeline", str(trace)]).exit_code == 0  # its own picture is replaced
    assert backup.read_bytes() == drawn and not picture.samefile(backup)
    picture.write_bytes(b"\x89PNG of somebody else")
    result = CliRunner().invoke(app, ["timeline", str(trace)])
    assert "this command did not draw it; name another file with --plot" in str(result.exception)
    assert picture.read_bytes() == b"\x89PNG of somebody else"
    result = CliRunner().invoke(app, ["timeline", str(trace), "--plot", str(tmp_path / "trace")])
    assert f"{picture} exists; replace it with --plot {picture}" in str(result.exception)
    assert picture.read_bytes() == b"\x89PNG of somebody else"
    event = {"ph": "X", "name": "pass", "ts": 1, "dur": 1, "args": {"restored": 1, "computed": 1}}
    misfits = [event | {"ts": "soon"}, event | {"args": {"restored": "all", "computed": 1}}]
    documents = [[last_event] for last_event in (*misfits, event | {"args": {"restored": float("inf"), "computed": 1}})]
    track = {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "model"}}
    part = {"ph": "X", "name": "layer", "tid": 1, "ts": 1, "dur": 1}
    documents += [[event, track | {"args": {"name": "main"}}, part], [event, track, part | {"dur": "long"}]]
    for text in (json.dumps({"some": "thing"}), "[" * 100_000, *map(json.dumps, documents)):
        trace.write_text(text)
        result = CliRunner().invoke(app, ["timeline", str(trace)])
        assert "is not a trace; make one with TieredCache(..., trace='trace.json')" in str(result.exception)
