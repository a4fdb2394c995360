"""The command line: what it prints, what it deletes, and how it says no."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
from families import build
from segments import hashes, open_store, segment, without_catalogue

import hf_tiered_cache
from hf_tiered_cache import KVStore, cli
from hf_tiered_cache.cli.contents import unique_length
from hf_tiered_cache.methods import METHODS
from hf_tiered_cache.store import tree
from hf_tiered_cache.store.codecs import CODECS
from hf_tiered_cache.store.conversations import ConversationRecord, Conversations, Ownership
from hf_tiered_cache.store.documents import DocumentRecord, Documents, passage_name
from hf_tiered_cache.store.kinds import record_name
from hf_tiered_cache.store.root import StoreRoot
from hf_tiered_cache.units import format_bytes

COMMAND = [sys.executable, "-m", "hf_tiered_cache.cli"]
QWEN = {"name": "Qwen/Qwen2.5-0.5B-Instruct", "class": "Qwen2ForCausalLM", "dtype": "bfloat16"}


@pytest.fixture
def store(tmp_path):
    """Create three segments: two of one model, one of another; one pinned, one expired."""
    opened = open_store(tmp_path / "store")
    headers = {}
    for seed, changes in {
        "a": {"model": QWEN, "label": "the report"},
        "b": {"model": QWEN, "expires": time.time() - 5},
        "c": {"fingerprint": "ffff"},
    }.items():
        header, chain, blocks = segment(hashes(4, seed), **changes)
        opened.publish(header, chain, blocks)
        headers[seed] = header
    opened.pin([headers["a"].id])
    opened.close()
    return tmp_path / "store", headers


def files(root):
    return {path: path.read_bytes() for path in (root / "segments").iterdir()}


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# --- ls


@pytest.mark.parametrize("way", ["rm", "dry run", "clear"])
def test_all_segments_are_also_damaged_ones(tmp_path, run, caplog, way):
    opened = open_store(tmp_path / "store")
    ids = []
    for seed in "abc":
        header, *data = segment(hashes(4, seed))
        assert opened.publish(header, *data)
        ids.append(header.id)
    opened.close()
    without_catalogue(tmp_path / "store")
    damaged, newer, intact = (tmp_path / "store" / "segments" / f"{segment_id}.kv" for segment_id in ids)
    damaged.write_bytes(damaged.read_bytes().replace(b'"tokens"', b'"tokenz"', 1))
    newer.write_bytes(newer.read_bytes()[:8] + b"\xff" + newer.read_bytes()[9:])
    if way == "clear":
        with KVStore(tmp_path / "store") as store:
            store.clear(disk=True)
    else:
        status, out, _ = run("rm", tmp_path / "store", "--all", "--dry-run" if way == "dry run" else "--yes")
        assert status == 0 and f"{damaged}: damaged" in out and str(newer) in caplog.text
        assert ("would delete 2 segments" if way == "dry run" else "deleted 2 segments") in out
    remaining_items = {newer} if way != "dry run" else {damaged, newer, intact}
    assert set(newer.parent.iterdir()) == remaining_items


def test_ls_lists_segments_model_by_model(run, store):
    root, headers = store
    status, out, _ = run("ls", root)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "Qwen/Qwen2.5-0.5B-Instruct (Qwen2ForCausalLM, bfloat16), fingerprint model"
    assert lines[1].split() == ["segment", "tokens", "from", "size", "last", "used", "uses", "label", "notes"]
    assert lines[2].startswith(headers["a"].id[:8])
    assert lines[2].endswith("the report  pinned")
    assert lines[3].endswith("expired")
    assert "fingerprint ffff" in out
    assert lines[-1].startswith("total: 3 segments, 192 tokens, ")
    assert lines[-1].endswith(", 2 models")


def test_ls_for_scripts(run, store):
    root, headers = store
    rows = {row["id"]: row for row in json.loads(run("ls", root, "--json")[1])}
    assert set(rows) == {header.id for header in headers.values()}
    assert rows[headers["a"].id]["pinned"]
    assert rows[headers["a"].id]["label"] == "the report"
    assert rows[headers["a"].id]["model"] == QWEN
    assert rows[headers["b"].id]["expired"]
    assert rows[headers["c"].id]["fingerprint"] == "ffff"
    assert all(row["tokens"] == row["usable_tokens"] == 64 for row in rows.values())


def test_what_lies_beside_a_segment_is_shown_counted_and_deleted_with_it(run, store):
    root, headers = store
    name = headers["a"].id
    before = json.loads(run("stat", root, "--json")[1])["disk_bytes"]
    assert "sidecar" not in run("stat", root, name)[1]
    opened = open_store(root)
    assert opened.sidecars.keep(opened.reader(name), "importance", {"of": torch.ones(5000)}, {})
    opened.close()
    size = (root / "beside" / f"{name}.importance").stat().st_blocks * 512
    (line,) = [line for line in run("stat", root, name)[1].splitlines() if line.startswith("sidecar")]
    assert f"importance, 24.0 KiB ({size:,} bytes)" in line
    assert json.loads(run("stat", root, name, "--json")[1])["sidecars"] == {"importance": size}
    assert json.loads(run("stat", root, "--json")[1])["disk_bytes"] == before + size
    assert ", 1 sidecar, " in run("verify", root)[1]
    flip(root / "beside" / f"{name}.importance", -1)
    status, out, _ = run("verify", root)
    assert (status, f"{name}.importance: " in out) == (1, True)
    row_bytes = json.loads(run("stat", root, name, "--json")[1])["bytes"]
    assert json.loads(run("rm", root, name, "--json")[1])["bytes"] == row_bytes + size
    assert not list((root / "beside").iterdir())


def test_ls_says_what_is_damaged(run, store):
    root, headers = store
    opened = open_store(root)
    opened.index.catalogue.limit(headers["a"].id, 1)
    opened.close()
    assert "damaged: 16 tokens usable" in run("ls", root)[1]


def in_a_terminal(columns, *arguments):
    """Return the output of a command on a terminal with so many columns, without styles."""
    terminal, child_end = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=child_end, stdin=child_end, env=environment)
    os.close(child_end)
    output = b""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        output += chunk
    assert process.wait(timeout=60) == 0
    os.close(terminal)
    return output.decode().replace("\r\n", "\n")


def test_ids_stay_whole_at_80_columns_and_what_ls_shows_is_what_stat_takes(run, tmp_path):
    opened = open_store(tmp_path)
    label = "A title that is much too long for what is left of a line of eighty columns"
    for number in range(3):
        header, chain, blocks = segment(hashes(4, str(number)), position=123_456, label=label, expires=1.0, model=QWEN)
        opened.publish(header, chain, blocks)
        opened.index.catalogue.touch([header.id], now=time.time() - 400 * 86400)
        opened.pin([header.id])
    opened.close()
    lines = in_a_terminal(80, "ls", tmp_path).splitlines()
    assert max(map(len, lines)) <= 80
    shown_ids = [line.split()[0] for line in lines if "pinned" in line]
    assert len(shown_ids) == 3
    for name in shown_ids:
        status, out, _ = run("stat", tmp_path, name, "--json")
        assert status == 0
        assert json.loads(out)["id"].startswith(name)
    piped = run("ls", tmp_path)[1]
    assert piped.count(label) == 3  # nothing is folded in a pipe


def test_ids_are_shown_as_long_as_it_takes_to_tell_them_apart():
    assert unique_length([]) == unique_length(["0123456789"]) == 8
    assert unique_length(["0123456789a", "0123456789b", "ffffffffff"]) == 11


def test_labels_may_have_letters_that_the_terminal_lacks(tmp_path, monkeypatch):
    opened = open_store(tmp_path / "store")
    header, chain, blocks = segment(hashes(4, "a"), label="日本")
    opened.publish(header, chain, blocks)
    opened.close()
    buffer = io.BytesIO()
    with io.TextIOWrapper(buffer, encoding="latin-1") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "argv", ["hf-tiered-cache", "ls", str(tmp_path / "store")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert rb"\u65e5\u672c" in buffer.getvalue()


def test_labels_cannot_command_the_terminal(run, tmp_path):
    opened = open_store(tmp_path)
    header, chain, blocks = segment(hashes(2), label="a\x1b[31mred\nline [bold]x[/bold]")
    opened.publish(header, chain, blocks)
    opened.close()
    out = run("ls", tmp_path)[1]
    assert "\x1b" not in out
    assert "a�[31mred line [bold]x[/bold]" in out


def test_an_empty_store_is_listed(run, tmp_path):
    open_store(tmp_path).close()
    assert run("ls", tmp_path)[1] == "total: 0 segments, 0 tokens, 0 Bytes\n"
    assert json.loads(run("stat", tmp_path, "--json")[1])["last_used"] is None
    assert run("stat", tmp_path)[0] == 0


# --- what is done without importing torch

WITHOUT_TORCH = """
import json, sys
from hf_tiered_cache import cli
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = ["hf-tiered-cache", name, *arguments]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, (name, ended.code)
    unwanted = {"torch", "transformers", "accelerate"}
    if name not in ("config", "gc", "rm"):  # these use `KVStore`
        unwanted.add("numpy")
    heavy = unwanted & sys.modules.keys()
    assert not heavy, (name, arguments, heavy)
    print("\\0", end="")
"""


def test_torch_is_not_imported_without_kv(store):
    root, headers = store
    lists = [
        ["ls", root],
        ["stat", root],
        ["top", root, "--seconds", "0.1"],
        ["conversations", root],
        ["documents", root],
    ]
    commands = [["--help"], ["--version"], ["ls", "--help"], *lists, ["config"], ["gc", root], ["rm", root, "--all"]]
    commands[-1].append("--yes")
    as_json = json.dumps(commands, default=str)
    process = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, as_json], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    *printed, end = process.stdout.split("\0")
    assert (len(printed), end) == (len(commands), "")
    assert all(printed)
    assert headers["a"].id[:8] in printed[commands.index(lists[0])]


def test_a_catalogue_that_is_out_of_line_or_gone_is_not_believed(run, store):
    root, headers = store
    (root / "segments" / f"{headers['a'].id}.kv").unlink()
    assert {row["id"] for row in json.loads(run("ls", root, "--json")[1])} == {headers["b"].id, headers["c"].id}
    for path in root.glob("catalogue.sqlite*"):
        path.unlink()
    rows = json.loads(run("ls", root, "--json")[1])
    assert {row["id"]: row["model"] for row in rows} == {headers["b"].id: QWEN, headers["c"].id: {}}


def test_looking_into_a_store_leaves_its_writers_alone(run, tmp_path):
    writer = open_store(tmp_path)
    for number in range(8):
        header, chain, blocks = segment(hashes(2, str(number)))
        writer.publish(header, chain, blocks)
        process = processes.run([*COMMAND, "ls", tmp_path], capture_output=True, text=True, timeout=60)
        assert process.stdout.splitlines()[-1].startswith(f"total: {number + 1} segment")
        assert json.loads(run("stat", tmp_path, "--json")[1])["segments"] == number + 1
    assert len(writer.index.catalogue.ids()) == 8
    assert writer.index.catalogue._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    writer.close()
    assert len(open_store(tmp_path).index.catalogue.ids()) == 8


# --- stat


def test_stat_of_a_store(run, store):
    root, _ = store
    out = run("stat", root)[1]
    assert "Qwen/Qwen2.5-0.5B-Instruct (Qwen2ForCausalLM, bfloat16): 2 segments, 128 tokens" in out
    stats = json.loads(run("stat", root, "--json")[1])
    assert (stats["segments"], stats["tokens"], stats["pinned"], stats["expired"]) == (3, 192, 1, 1)
    assert stats["models"] == {"model": QWEN, "ffff": {}}


def test_stat_of_a_segment(run, store):
    root, headers = store
    full_id = headers["a"].id
    described = json.loads(run("stat", root, full_id[:8], "--json")[1])
    assert described["id"] == full_id
    assert described["geometry"]["chunk_tokens"] == 16
    assert [block_group["layers"] for block_group in described["block_groups"]] == [[0, 1, 2, 3], [4]]
    out = run("stat", root, full_id)[1]
    assert full_id in out
    assert "the report" in out
    assert "blocks of 16 tokens × 4 layers × all heads, keys and values in the same block" in out
    assert "0-4: keys 2 × 8, values 2 × 8; float32" in out
    assert ["0", "0-3", "keys", "and", "values,", "heads", "0-1", "4", "8.0", "KiB"] in map(str.split, out.splitlines())


@pytest.mark.parametrize("method", METHODS)
def test_stat_knows_every_geometry_and_speaks_no_python(run, tmp_path, method):
    geometry = replace(METHODS[method]().geometry, codec="raw")
    opened = open_store(tmp_path)
    header, chain, blocks = segment(hashes(8), geometry=geometry)
    opened.publish(header, chain, blocks)
    opened.close()
    status, out, _ = run("stat", tmp_path, header.id)
    assert status == 0
    assert not set("[]{}'") & set(out)
    assert ("index of keys" in out) == (geometry.index is not None)
    described = json.loads(run("stat", tmp_path, header.id, "--json")[1])
    assert described["geometry"]["solo_layers"] == geometry.solo_layers


# --- verify, gc, rm


@pytest.mark.parametrize("offset", [100, -5000])
def test_verify_reads_and_repair_removes(run, store, offset):
    root, headers = store
    status, out, _ = run("verify", root)
    assert (status, "3 blocks" not in out, "no damage found" in out) == (0, True, True)
    flip(root / "segments" / f"{headers['a'].id}.kv", offset)
    before = files(root)
    for _ in range(2):
        status, out, _ = run("verify", root)
        assert (status, "1 damaged" in out, headers["a"].id in out, "checksum" in out) == (1, True, True, True)
        assert files(root) == before
    status, out, _ = run("verify", root, "--repair")
    assert (status, "(removed)" in out) == (0, True)
    status, out, _ = run("verify", root, "--json")
    assert (status, json.loads(out)["segments"], json.loads(out)["bad"]) == (0, 2, {})


def test_gc(run, store):
    root, headers = store
    promised = json.loads(run("gc", root, "--dry-run", "--json")[1])
    assert len(files(root)) == 3
    assert "would delete 1 expired" in run("gc", root, "--dry-run")[1]
    status, out, _ = run("gc", root, "--json")
    assert status == 0
    assert json.loads(out) == promised
    assert json.loads(out)["expired"] == 1
    remaining_items = {row["id"] for row in json.loads(run("ls", root, "--json")[1])}
    assert remaining_items == {headers["a"].id, headers["c"].id}
    out = run("gc", root, "--quota", "1KiB")[1]  # not even the catalogue has room
    assert "evicted 0 segments" in out and "raise the quota" in out
    opened = open_store(root)
    nbytes = opened.nbytes_of(headers["c"].id)
    quota = opened.used_bytes() - nbytes // 2
    opened.close()
    assert f"evict 1 segment; {format_bytes(nbytes)} in all" in run("gc", root, "--quota", f"{quota}", "--dry-run")[1]
    assert f"evicted 1 segment; {format_bytes(nbytes)} in all" in run("gc", root, "--quota", f"{quota}")[1]
    assert {row["id"] for row in json.loads(run("ls", root, "--json")[1])} == {headers["a"].id}  # pinned


@pytest.mark.parametrize("has_row", [True, False])
def test_gc_keeps_what_cannot_be_read_and_deletes_the_rest(run, chats, monkeypatch, has_row):
    root, headers, conversations = chats
    opened = open_store(root)
    unreadable, *data = segment(hashes(4, "e"), expires=time.time() - 5)
    assert opened.publish(unreadable, *data)
    quota = opened.used_bytes() - 100_000
    opened.close()
    conversations.write([replace(conversations.read("bob"), segments=(unreadable.id,))])
    if not has_row:
        without_catalogue(root)
    path, open_file = root / "segments" / f"{unreadable.id}.kv", tree.open_file

    def failing(name, *more):
        if name == path.name:
            raise OSError(errno.EIO, "Input/output error", name)
        return open_file(name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(tree, "open_file", failing)
        for dry_run in (["--dry-run"], []):
            status, out, _ = run("gc", root, "--quota", quota, *dry_run)
            assert status == 1
            assert f"{path} cannot be read (Input/output error); it is kept, with the conversations" in out
            assert f"{root}/segments/{headers['b'].id}.kv: expired" in out
    assert files(root).keys() == {path, root / "segments" / f"{headers['a'].id}.kv"}  # the other one is pinned
    assert conversations.read("bob") is not None
    status, out, _ = run("gc", root)
    assert status == 0 and f"{path}: expired" in out


def test_rm_says_what_it_deletes(run, store):
    root, headers = store
    full_id = headers["a"].id
    status, out, _ = run("rm", root, full_id[:10], full_id[:12], "--dry-run")
    assert (status, full_id[:8] in out, "the report" in out, "would delete 1 segment," in out) == (0, True, True, True)
    assert len(files(root)) == 3
    status, out, _ = run("rm", root, full_id[:10])
    assert (status, full_id[:8] in out, "the report" in out, "deleted 1 segment," in out) == (0, True, True, True)
    assert len(files(root)) == 2


def test_rm_takes_models_by_name_or_fingerprint(run, store):
    root, headers = store
    assert json.loads(run("rm", root, "--model", "ffff", "--json")[1])["ids"] == [headers["c"].id]
    assert json.loads(run("rm", root, "--model", QWEN["name"], "--json")[1])["removed"] == 2
    assert files(root) == {}


def test_rm_all_asks_or_is_told(run, store, monkeypatch):
    root, _ = store
    status, out, err = run("rm", root, "--all")
    assert (status, len(out.splitlines()), err.count("\n")) == (2, 4, 1)  # what would go is listed first
    assert "--yes" in err
    assert "would delete 3 segments" in run("rm", root, "--all", "--dry-run")[1]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer, segments_left in ((False, 3), (True, 0)):
        monkeypatch.setattr(cli.output.typer, "confirm", lambda question, err, answer=answer: answer)
        status, *_ = run("rm", root, "--all")
        assert (status, len(files(root))) == (0 if answer else 2, segments_left)


def test_rm_all_with_yes(run, store):
    root, _ = store
    assert "deleted 3 segments" in run("rm", root, "--all", "--yes")[1]
    assert json.loads(run("ls", root, "--json")[1]) == []


# --- conversations


@pytest.fixture
def chats(store):
    """Create two conversations: one in two segments, one in the first of these and in a missing one."""
    root, headers = store
    opened = open_store(root)
    headers["d"], chain, blocks = segment(hashes(4, "d"), position=64, model=QWEN)
    opened.publish(headers["d"], chain, blocks)
    opened.close()
    conversations = Conversations(StoreRoot(root))
    for name, segments in {"alice\x1b[31m 42": ["a", "d"], "bob": ["a", "gone"]}.items():
        record = ConversationRecord(
            id=name,
            fingerprint="model",
            provenance="exact",
            method="exact",
            segments=tuple(headers[letter].id if letter in headers else "0" * 32 for letter in segments),
            tokens=64 * len(segments),
            turns=3,
            created=1e9,
            suspended=1e9 + len(name),
            nbytes=7,
            model=QWEN,
        )
        conversations.write([record])
    return root, headers, conversations


def test_conversations_are_listed(run, chats):
    root, _, conversations = chats
    status, out, _ = run("conversations", root)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["conversation", "model", "method", "turns", "tokens", "size", "last", "used", "notes"]
    assert lines[1].startswith("bob") and lines[1].endswith("evicted: 64 of 128 tokens left")
    assert lines[2].startswith("alice�[31m 42  Qwen/Qwen2.5-0.5B-Instruct  exact       3     128  104.0 KiB")
    assert lines[-1] == "total: 2 conversations, 192 tokens"
    owned = Ownership("bob", conversations.files)
    owned.take(over=False)
    status, out, _ = run("conversations", root)
    assert f"in use by process {os.getpid()}, evicted: " in out.splitlines()[2]  # used last
    assert json.loads(run("conversations", root, "--json")[1])[1]["in_use_by"] == os.getpid()
    status, _, err = run("conversations", root, "rm", "bob")
    assert status == 2 and "the conversation 'bob' is in use" in err
    owned.release()
    assert json.loads(run("conversations", root, "--json")[1])[0]["evicted"] == ["0" * 32]


def test_one_conversation_is_shown(run, chats):
    root, headers, _ = chats
    status, out, _ = run("conversations", root, "show", "bob")
    assert status == 0
    assert "Qwen2ForCausalLM" in out and "evicted: 64 of 128 tokens left" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == [headers["a"].id[:8], "00000000"]
    assert json.loads(run("conversations", root, "show", "bob", "--json")[1])["segments"][0] == headers["a"].id


def check_deletion(run, root, entries, names, segment):
    """Delete the first of two conversations or documents, which has one segment of its own, and then the other one."""
    first, second = names
    entry, key = entries[:-1], "id" if entries == "conversations" else "label"
    before, command = files(root), (entries, root, "rm", first, "--dry-run")
    assert json.loads(run(*command, "--json")[1])["segments"] == [segment]
    assert f"would delete 1 {entry}, 1 segment, " in run(*command)[1]
    assert f"would delete 2 {entries}, 2 segments, " in run(*command, second)[1]
    assert files(root) == before and len(json.loads(run(entries, root, "--json")[1])) == 2
    assert f"deleted 1 {entry}, 1 segment, " in run(entries, root, "rm", first)[1]
    assert files(root).keys() == before.keys() - {root / "segments" / f"{segment}.kv"}
    assert [row[key] for row in json.loads(run(entries, root, "--json")[1])] == [second]
    assert json.loads(run(entries, root, "rm", second, "--json")[1])["removed"] == [second]


def test_conversations_are_deleted_with_what_is_their_own(run, chats):
    root, headers, _ = chats
    opened = open_store(root)
    opened.pin([headers["a"].id], False)
    opened.close()
    check_deletion(run, root, "conversations", ["alice\x1b[31m 42", "bob"], headers["d"].id)
    assert run("conversations", root)[1] == "total: 0 conversations, 0 tokens\n"


def test_verify_names_damaged_records_and_repair_removes_what_is_recognized(run, chats):
    root, _, conversations = chats
    names = {record.id: record_name(record.id) for record in conversations.all()}
    damaged, torn = (root / "conversations" / name for name in (names["bob"], record_name("carol")))
    carol = replace(conversations.read("bob"), id="carol")
    conversations.write([carol, replace(carol, id="dave")])
    assert ", 4 records, " in run("verify", root)[1]
    damaged.write_bytes(damaged.read_bytes().replace(b'"turns": 3', b'"turns": 4'))
    torn.write_bytes(torn.read_bytes()[:-50])
    (root / "calibrations.json").write_bytes(b'{\n "quality": [')
    bad = {f"conversations/{names['bob']}", f"conversations/{torn.name}", "calibrations.json"}
    status, out, _ = run("verify", root, "--json")
    assert (status, json.loads(out)["bad"].keys(), json.loads(out)["unknown"]) == (1, bad, [])
    status, out, _ = run("verify", root, "--repair")
    assert status == 1 and "does not match its checksum (removed)" in out and out.count("move it elsewhere") == 2
    assert not damaged.exists() and torn.exists() and (root / "calibrations.json").exists()
    assert {record.id for record in conversations.all()} == names.keys() - {"bob"} | {"dave"}
    for path in (torn, root / "calibrations.json"):
        path.write_bytes(b"not ours")
    status, out, _ = run("verify", root)
    assert status == 0 and "2 files not written by this library" in out
    torn.write_bytes(carol.encode().replace(b'"format": 1', b'"format": 2'))
    status, _, err = run("verify", root)
    assert status == 2 and "1 file could not be checked: another version" in err


def test_gc_says_which_conversations_are_over(run, chats):
    root, headers, _ = chats
    run("rm", root, headers["a"].id, headers["d"].id)
    assert "no segments are left of 2 conversations" in run("gc", root, "--dry-run")[1]
    assert "no segments are left of 2 conversations" in run("gc", root)[1]
    assert run("conversations", root)[1] == "total: 0 conversations, 0 tokens\n"


# --- documents


@pytest.fixture
def corpus(store):
    """Create two documents: one of two passages, one of the second of these and of a missing one."""
    root, _ = store
    segment_store, headers, names = open_store(root), [], []
    for seed in "de":
        new_segment = segment(hashes(4, seed), provenance="passage", model=QWEN, scan_hashes=b"scan" * 4)
        segment_store.publish(*new_segment)
        headers.append(new_segment[0])
        names.append(passage_name(b"".join(new_segment[1])))
    segment_store.close()
    for label, passages in {"report\x1b[31m 1": names, "minutes": [names[1], "0" * 32]}.items():
        record = DocumentRecord(label, "model", "passage 1", tuple(passages), 128, 1.0, 2.0, model=QWEN)
        Documents(StoreRoot(root)).write([record])
    return root, headers


def test_documents_are_listed(run, corpus):
    root, _ = corpus
    status, out, _ = run("documents", root)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["document", "model", "passages", "tokens", "size", "changed", "notes"]
    assert lines[1].startswith("minutes") and lines[1].endswith("evicted: 1 of 2 passages, 1 shared with another label")
    assert lines[2].startswith("report�[31m 1  Qwen/Qwen2.5-0.5B-Instruct         2     128")
    assert lines[-1] == "total: 2 documents, 4 passages, 192 tokens"
    listed = json.loads(run("documents", root, "--json")[1])
    assert [(row["label"], row["evicted"]) for row in listed] == [("minutes", 1), ("report\x1b[31m 1", 0)]


def test_one_document_is_shown(run, corpus):
    root, headers = corpus
    status, out, _ = run("documents", root, "show", "minutes")
    assert status == 0
    assert "Qwen2ForCausalLM" in out and "evicted: 1 of 2 passages" in out
    assert out.splitlines()[-1].split()[:2] == [headers[1].id[:8], "64"]
    assert json.loads(run("documents", root, "show", "minutes", "--json")[1])[0]["segments"] == [headers[1].id]


def test_documents_are_deleted_with_what_is_their_own(run, corpus):
    root, headers = corpus
    check_deletion(run, root, "documents", ["report\x1b[31m 1", "minutes"], headers[0].id)
    assert run("documents", root)[1] == "total: 0 documents, 0 passages, 0 tokens\n"


def test_sidecars_count_in_the_bytes_of_a_deleted_document(run, corpus):
    root, headers = corpus
    opened = open_store(root)
    assert opened.sidecars.keep(opened.reader(headers[0].id), "rankings", {"of": torch.ones(5000)}, {})
    opened.close()
    size = (root / "beside" / f"{headers[0].id}.rankings").stat().st_blocks * 512
    row_bytes = json.loads(run("stat", root, headers[0].id, "--json")[1])["bytes"]
    assert json.loads(run("documents", root, "rm", "report\x1b[31m 1", "--json")[1])["bytes"] == row_bytes + size


def test_what_cannot_be_done_with_documents(run, corpus):
    root, _ = corpus
    for arguments, message in {
        ("drop", "report"): "unknown action 'drop' for documents",
        ("show",): "missing document label",
        ("show", "nobody"): "document 'nobody' does not exist",
        ("rm", "nobody"): "document 'nobody' does not exist; `hf-tiered-cache documents",
        ("show", "minutes", "--dry-run"): "--dry-run can only be used with rm",
    }.items():
        status, _, err = run("documents", root, *arguments)
        assert status == 2 and message in err
    for path in (root / "segments").iterdir():
        path.unlink()
    assert "no passages are left of 2 documents" in run("gc", root)[1]


# --- saying no


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ls", "nowhere"), "no store at nowhere"),
        (("verify", "nowhere"), "no store at nowhere"),
        (("rm", "{store}"), "specify one of: ids of segments"),
        (("rm", "{store}", "zz", "--all"), "specify one of: ids of segments, --model, or --all"),
        (("rm", "{store}", "zz"), "no segments have an id that begins with 'zz'"),
        (("rm", "{store}", ""), "no segments have an id that begins with ''"),
        (("rm", "{store}", "--model", ""), "the name of the model is empty"),
        (("rm", "{store}", "--model", "zz"), "no model has the name 'zz'"),
        (("stat", "{store}", "zz"), "`hf-tiered-cache ls` lists all segments"),
        (("conversations", "nowhere"), "no store at nowhere"),
        (("conversations", "{store}", "sell"), "use show ID, or rm ID"),
        (("conversations", "{store}", "rm"), "missing conversation id"),
        (("conversations", "{store}", "show", "a", "b"), "show takes one conversation"),
        (("conversations", "{store}", "show", "zz"), "conversation 'zz' does not exist"),
        (("conversations", "{store}", "rm", "zz"), "conversation 'zz' does not exist; `hf-tiered-cache conversations"),
        (("conversations", "{store}", "--dry-run"), "--dry-run can only be used with rm"),
        (("gc", "{store}", "--quota", "banana"), "--quota='banana' is not a valid size"),
        (("gc", "{store}", "--quota", "10%"), "--quota='10%' is not a valid size"),
        (("calibrate", "{store}", "--model", "nowhere", "--memory", "10%"), "--memory='10%' is not a valid size"),
        (("calibrate", "{store}", "--model", "nowhere", "--dtype", "float12"), "use auto, float32"),
        (("calibrate", "{store}", "--model", "nowhere", "--dtype", "nn"), "use auto, float32"),
        (("calibrate", "{store}", "--model", "{store}"), "cannot be loaded: the folder has no config.json; pass"),
        (("calibrate", "{store}", "--model", "nowhere", "--prefix", "4k"), "such as 512,4096"),
        (("calibrate", "{store}", "--model", "nowhere", "--prefix", ","), "such as 512,4096"),
        (("calibrate", "new", "--model", "nowhere", "--quality", "0.1", "--text", "no.txt"), "no.txt: No such file"),
    ],
)
def test_mistakes_are_one_line_and_status_2(run, store, arguments, says):
    status, out, err = run(*(argument.format(store=store[0]) for argument in arguments))
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert out == ""
    assert len(files(store[0])) == 3


def test_a_fault_of_the_system_is_one_line_too(run, store, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "kv-store/segments/x.kv")

    monkeypatch.setattr("hf_tiered_cache.store.disk.SegmentStore.remove", refuse)
    status, _, err = run("rm", store[0], "--all", "--yes")
    assert status == 2 and err.count("\n") == 1
    assert err.startswith(f"hf-tiered-cache: a file of {store[0]} cannot be read or changed")
    assert "(kv-store/segments/x.kv: Permission denied)" in err and "Errno" not in err


def test_a_reader_that_has_seen_enough_is_no_error(store):
    root, _ = store
    read_end, write_end = os.pipe()
    os.close(read_end)  # before anything is written
    process = subprocess.run([*COMMAND, "ls", root], stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert process.stderr == b""


INTERRUPTED = """
import sys, time
from hf_tiered_cache import cli
from hf_tiered_cache.cli import listing
def waiting(path):
    print("ready", flush=True)
    time.sleep(60)
listing.contents_of = waiting
sys.argv[1:] = ["ls", "kv-store"]
cli.main()
"""


def test_ctrl_c_ends_it_with_130_and_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


# --- help


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "rm", "conversations", "calibrate"])
def test_help_teaches_by_example(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "--json" in out
    assert f"Examples:\n    hf-tiered-cache {command} kv-store" in out


def test_help_of_the_whole_names_every_command_and_typical_use(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "..." not in out.split("Commands:")[1]  # what each does fits its line
    commands = ("ls", "stat", "verify", "gc", "rm", "conversations", "calibrate", "serve", "lm-eval")
    assert all(f"\n  {command} " in out for command in commands)
    assert "hf-tiered-cache gc kv-store --quota 100GiB  delete unused files and make room\n" in out


def test_help_of_the_server_names_every_method_and_codec(run):
    text = " ".join(run("serve", "--help")[1].split())
    names = [name for name in METHODS if METHODS[name].__module__.startswith("hf_tiered_cache.")]
    assert len(names) > 5 and f"KV: {', '.join(sorted(names))}, or" in text
    assert all(name in text for name in CODECS._built_in)


def test_version(run):
    assert run("--version")[1] == f"hf-tiered-cache {hf_tiered_cache.__version__}\n"


# --- calibrate


def test_calibrate_says_within_ten_seconds_that_a_model_cannot_be_had(run, silent_hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    began = time.monotonic()
    status, _, err = run("calibrate", tmp_path / "store", "--model", "nowhere/at-all")
    assert time.monotonic() - began < 10
    assert status == 2
    assert "'nowhere/at-all' cannot be loaded: there is no such folder, the local cache" in the_end_of(err)


def the_end_of(err):
    """Return the only line after the progress of loading weights."""
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("hf-tiered-cache: ")
    return line


def test_calibrate(run, tmp_path):
    build("qwen2").save_pretrained(tmp_path / "model")
    command = ["calibrate", tmp_path / "store", "--passages", 2, "--tokens", 32, "--repeats", 1, "--model"]
    status, out, err = run(*command, tmp_path / "model", "--json")
    assert status == 0, err
    assert 0.15 <= json.loads(out)["ratio"] <= 1
    status, out, _ = run(*command, tmp_path / "model")
    assert status == 0
    assert "full reuse" in out
    assert "saved for this model and device, with prompts of" in out
    status, _, err = run(*command, tmp_path / "nowhere")
    assert (status, err.count("\n")) == (2, 1)
    assert "cannot be loaded: there is no such folder; check the path" in err
    status, _, err = run("calibrate", tmp_path / "store", "--model", tmp_path / "model")  # of 1024 positions
    assert status == 2
    assert "use fewer" in the_end_of(err)


def test_calibrate_prefixes(run, tmp_path):
    build("qwen2").save_pretrained(tmp_path / "model")
    command = ["calibrate", tmp_path / "store", "--prefix", "64,32", "--repeats", 1, "--model", tmp_path / "model"]
    status, out, err = run(*command, "--json")
    assert status == 0, err
    assert [row["tokens"] for row in json.loads(out)] == [32, 64]
    status, out, _ = run(*command)
    assert status == 0
    assert "from disk" in out and "from host" in out and "Exact(recompute=0, decline=False)" in out


def test_calibrate_says_when_memory_is_too_small(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB.")

    build("qwen2").save_pretrained(tmp_path / "model")
    monkeypatch.setattr("hf_tiered_cache.operations.calibrate.calibrate", full)
    status, _, err = run("calibrate", tmp_path / "store", "--model", tmp_path / "model")
    assert status == 2
    assert "use fewer --passages, fewer --tokens" in the_end_of(err)


# --- the package's names


def test_public_names_are_the_same_for_people_and_type_checkers():
    tree = ast.parse(Path(hf_tiered_cache.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    checked_names = {alias.name: node.module for node in checked.body for alias in node.names}
    assert {name: hf_tiered_cache._ELSEWHERE.get(name, "errors") for name in hf_tiered_cache.__all__} == checked_names
    assert set(checked_names) <= set(dir(hf_tiered_cache))
    assert all(getattr(hf_tiered_cache, name) is not None for name in checked_names)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hf_tiered_cache.Nothing


# --- what goes is listed first


def test_rm_names_what_goes_and_what_continues_it(run, tmp_path):
    opened = open_store(tmp_path)
    chains = hashes(4, "one"), hashes(2, "two"), hashes(2, "three"), hashes(2, "other")
    headers, parent = [], b""
    for number, chain in enumerate(chains):
        header, _, blocks = segment(chain, position=64 + 32 * number - 64 * (number == 0) if number < 3 else 0)
        header = replace(header, parent=parent or header.parent)
        assert opened.publish(header, chain, blocks)
        headers.append(header)
        parent = chain[-1] if number < 2 else b""
    opened.close()
    before = files(tmp_path)
    for dry_run in (["--dry-run"], []):
        status, out, _ = run("rm", tmp_path, headers[0].id, *dry_run)
        assert status == 0
        going, continuing = out.split("cannot be restored without it:")
        assert headers[0].id[:8] in going and headers[0].id[:8] not in continuing
        assert all(header.id[:8] in continuing for header in headers[1:3])
        assert headers[3].id[:8] not in out
        assert len(files(tmp_path)) == len(before) - (not dry_run)
    report = json.loads(run("rm", tmp_path, headers[1].id, "--dry-run", "--json")[1])
    assert (report["ids"], report["continuing"]) == ([headers[1].id], [headers[2].id])


def test_gc_lists_what_goes_first(run, tmp_path):
    opened = open_store(tmp_path)
    expired, permanent = segment(hashes(2, "old"), expires=time.time() - 1), segment(hashes(2, "new"))
    assert opened.publish(*expired) and opened.publish(*permanent)
    opened.close()
    (tmp_path / "tmp" / "1-2-3").write_bytes(bytes(5000))
    (tmp_path / "tmp" / "1-2-3.lock").touch()
    (tmp_path / "tmp" / "notes.txt").write_text("precious")
    for dry_run in (["--dry-run"], []):
        lines = run("gc", tmp_path, *dry_run)[1].splitlines()
        assert f"{tmp_path}/segments/{expired[0].id}.kv: expired" in lines
        assert f"{tmp_path / 'tmp' / '1-2-3'}: unfinished" in lines
        assert "1 file not written by this library, left unchanged:" in lines and "  tmp/notes.txt" in lines
        assert lines[-1].startswith("would delete 1 expired" if dry_run else "deleted 1 expired")
        assert permanent[0].id not in "".join(lines)
    assert (tmp_path / "tmp" / "notes.txt").exists() and not (tmp_path / "tmp" / "1-2-3").exists()
    assert json.loads(run("verify", tmp_path, "--json")[1])["unknown"] == ["tmp/notes.txt"]
