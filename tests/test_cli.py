"""The command line: what it prints, what it deletes, and how it says no."""

from __future__ import annotations

import json
import sys
import time

import pytest
from families import build
from segments import links, open_store, segment

from hf_tiered_cache import cli


@pytest.fixture
def store(tmp_path):
    """Three segments: two of one model, one of another; one pinned, one expired."""
    opened = open_store(tmp_path / "store")
    headers = {}
    for seed, changes in {
        "a": {},
        "b": {"expires": time.time() - 5},
        "c": {"fingerprint": "ffff"},
    }.items():
        header, chain, blocks = segment(links(4, seed), **changes)
        opened.publish(header, chain, blocks)
        headers[seed] = header
    opened.pin([headers["a"].id])
    opened.close()
    return tmp_path / "store", headers


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; returns exit status, standard output and error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-tiered-cache", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_ls(run, store):
    root, headers = store
    status, out, _ = run("ls", root)
    assert status == 0
    assert all(header.id in out for header in headers.values())
    assert "pinned" in out
    assert "expired" in out
    status, out, _ = run("ls", root, "--json")
    rows = {row["id"]: row for row in json.loads(out)}
    assert set(rows) == {header.id for header in headers.values()}
    assert rows[headers["a"].id]["pinned"]
    assert rows[headers["b"].id]["expired"]
    assert rows[headers["c"].id]["fingerprint"] == "ffff"
    assert all(row["tokens"] == row["usable_tokens"] == 64 for row in rows.values())


def test_stat_of_a_store_and_of_a_segment(run, store):
    root, headers = store
    status, out, _ = run("stat", root)
    assert status == 0
    assert "segments" in out
    status, out, _ = run("stat", root, "--json")
    assert json.loads(out)["segments"] == 3
    wanted = headers["c"].id
    status, out, _ = run("stat", root, wanted[:8], "--json")
    described = json.loads(out)
    assert described["id"] == wanted
    assert described["geometry"]["chunk_tokens"] == 16
    assert [lane["layers"] for lane in described["lanes"]] == [[0, 1, 2, 3], [4]]
    status, out, _ = run("stat", root, wanted)
    assert wanted in out


def test_verify_tells_whole_from_damaged(run, store):
    root, headers = store
    status, out, _ = run("verify", root)
    assert (status, "all whole" in out) == (0, True)
    path = root / "segments" / f"{headers['a'].id}.kv"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    status, out, _ = run("verify", root)
    assert status == 1
    assert headers["a"].id in out
    assert "checksum" in out
    path.write_bytes(data)
    status, out, _ = run("verify", root, "--json")
    assert status in (0, 1)
    assert json.loads(out)["segments"] >= 2


def test_gc(run, store):
    root, headers = store
    status, out, _ = run("gc", root, "--json")
    assert status == 0
    assert json.loads(out)["expired"] == 1
    left = {row["id"] for row in json.loads(run("ls", root, "--json")[1])}
    assert left == {headers["a"].id, headers["c"].id}
    status, out, _ = run("gc", root, "--quota", "1KiB")
    assert "evicted 1" in out
    assert {row["id"] for row in json.loads(run("ls", root, "--json")[1])} == {headers["a"].id}  # pinned


def test_rm(run, store):
    root, headers = store
    status, out, _ = run("rm", root, headers["a"].id[:10])
    assert (status, "deleted 1" in out) == (0, True)
    status, out, _ = run("rm", root, "--model", "ffff", "--json")
    assert json.loads(out)["removed"] == 1
    status, out, _ = run("rm", root, "--all")
    assert "deleted 1" in out
    assert json.loads(run("ls", root, "--json")[1]) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ls", "nowhere"), "no store at nowhere"),
        (("rm", "{store}"), "name segments"),
        (("rm", "{store}", "zz"), "no segments begin with 'zz'"),
        (("stat", "{store}", "zz"), "`hf-tiered-cache ls` lists them"),
        (("gc", "{store}", "--quota", "banana"), "is no size"),
    ],
)
def test_mistakes_are_one_line_and_status_2(run, store, arguments, says):
    status, out, err = run(*(argument.format(store=store[0]) for argument in arguments))
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


def test_help_says_what_each_command_does(run):
    for command in ("ls", "stat", "verify", "gc", "rm"):
        status, out, _ = run(command, "--help")
        assert status == 0
        assert len(out.splitlines()) > 6
        assert "--json" in out


def test_calibrate(run, tmp_path):
    build("qwen2").save_pretrained(tmp_path / "model")
    asked = ["calibrate", tmp_path / "store", "--passages", 2, "--tokens", 32, "--repeats", 1, "--model"]
    status, out, err = run(*asked, tmp_path / "model", "--json")
    assert status == 0, err
    assert 0.15 <= json.loads(out)["ratio"] <= 1
    status, out, _ = run(*asked, tmp_path / "model")
    assert status == 0
    assert "full reuse" in out
    assert "kept for this model and device, prompts of" in out
    status, _, err = run(*asked, tmp_path / "nowhere")
    assert status == 2
    assert "cannot be loaded" in err
