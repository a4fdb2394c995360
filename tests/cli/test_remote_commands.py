"""Commands on remotes: list, check, clean up, and copy to and from a folder."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from families import prompt
from segments import hashes, open_store, segment, without_catalogue
from typer.testing import CliRunner

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cli import app, main
from hf_tiered_cache.cli.output import Refused
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Epic
from hf_tiered_cache.store import tree
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.conversations import ConversationRecord
from hf_tiered_cache.store.format import FORMAT_VERSION
from hf_tiered_cache.store.kinds import ENTRY

IDS = prompt(100)


@pytest.fixture
def corpus(model, tmp_path):
    """Return the folder of a store with two prompts and a passage."""
    with KVStore(tmp_path / "corpus") as store:
        store.precompute(model, [IDS[0], IDS[0].flip(0)], progress=False, label="report")
        store.precompute(model, [IDS[0, :48]], passages=True, method=Epic(), progress=False)
    return tmp_path / "corpus"


@pytest.fixture(params=["file", "sqlite", "redis", "s3", "mooncake"])
def address(request, place_of):
    return place_of(request.param)


def run(*arguments):
    return CliRunner().invoke(app, [str(word) for word in arguments])


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.mark.thin(2)
def test_a_corpus_is_copied_to_a_remote_and_to_a_worker(model, corpus, address, tmp_path):
    copied = as_json("copy", corpus, address)
    assert (copied["copied"], copied["present"], copied["failed"]) == (3, 0, {})
    nothing = {"copied": 0, "bytes": 0, "left_out": {}, "records": 0, "failed": {}}
    assert as_json("copy", corpus, address) == nothing | {"present": 3}
    worker = tmp_path / "worker"
    fetched = as_json("copy", address, worker)
    assert (fetched["copied"], fetched["bytes"]) == (3, copied["bytes"])
    assert as_json("copy", address, worker)["present"] == 3
    with KVStore(worker) as store, torch.no_grad():
        assert store.verify().ok
        cache = TieredCache(model, store)
        model(input_ids=IDS, past_key_values=cache, logits_to_keep=1)
        assert cache.stats.tokens_restored == 96
        passages = TieredCache(model, store, method=Epic(), record=False)
        ids = torch.cat([prompt(20, seed=5), IDS[:, :48], prompt(20, seed=6)], dim=1)
        model(input_ids=ids, past_key_values=passages, logits_to_keep=1)
        assert passages.stats.tokens_restored > 0


@pytest.mark.thin(2)
def test_a_remote_is_listed_checked_and_cleaned(corpus, address):
    as_json("copy", corpus, address)
    local_rows, remote_rows = as_json("ls", corpus), as_json("ls", address)
    assert sorted(row["id"] for row in remote_rows) == sorted(row["id"] for row in local_rows)
    assert {row["label"] for row in remote_rows} == {"report", ""}
    assert as_json("stat", address)["segments"] == 3
    segment = next(row for row in remote_rows if row["label"])
    assert as_json("stat", address, segment["id"][:8])["tokens"] == 96
    assert as_json("verify", address)["segments"] == 3
    assert run("rm", address, segment["id"][:8]).exit_code == 0
    remote = open_remote(address)
    names = remote.records.names(ENTRY)
    assert len(names) == 4  # those of the other prompt, at 1, 2, 4 and 6 prefix hashes
    (dropped_id,) = [row["id"] for row in remote_rows if row["label"] and row["id"] != segment["id"]]
    remote.delete(dropped_id)  # the server has dropped it
    assert run("gc", address, "--dry-run").exit_code == 0
    assert remote.records.names(ENTRY) == names
    assert run("gc", address).exit_code == 0
    assert remote.records.names(ENTRY) == []
    remote.close()


def test_settings_of_stores_do_not_count_for_a_remote_that_is_named(corpus, tmp_path, monkeypatch):
    named, other_remote = (f"sqlite://{tmp_path / name}.db" for name in ("named", "other"))
    for remote in (named, other_remote):
        assert as_json("copy", corpus, remote)["copied"] == 3
    monkeypatch.setenv("HF_TIERED_CACHE_REMOTE", other_remote)
    monkeypatch.setenv("HF_TIERED_CACHE_ENGINE", "posix")
    assert as_json("rm", named, "--all", "--yes")["removed"] == 3
    assert len(as_json("ls", other_remote)) == 3


@pytest.mark.parametrize("scheme", ["file", "sqlite"])
def test_commands_make_no_remote(corpus, tmp_path, scheme):
    place, target = tmp_path / "a mistake", tmp_path / "target"
    target.mkdir()
    whole_id = "0" * 32
    for command in (["ls"], ["gc"], ["verify"], ["rm", "--all", "--yes"], ["copy", target], ["copy", target, whole_id]):
        result = run(command[0], f"{scheme}://{place}", *command[1:])
        assert result.exit_code and "there is no store at" in str(result.exception)
    result = run("copy", corpus, f"{scheme}://{place}", "no id")
    assert "no segments have an id" in str(result.exception)
    result = run("copy", f"{scheme}://{place}", target, "no id")
    assert "is no whole id of a segment" in str(result.exception)
    assert not place.exists()
    assert not any(target.iterdir())


def test_an_empty_name_of_a_model_deletes_nothing(corpus):
    assert run("rm", corpus, "--model", "").exit_code
    assert len(as_json("ls", corpus)) == 3


def test_damage_in_a_remote_is_reported(corpus, place_of, tmp_path):
    address = place_of("file")
    as_json("copy", corpus, address)
    path = sorted((Path(address.removeprefix("file://")) / "segments").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run("verify", address)
    assert result.exit_code == 1
    assert path.stem in result.output
    result = run("copy", address, tmp_path / "worker")
    assert result.exit_code == 1
    assert "fails its checksum" in result.stderr
    assert path.exists()  # a copy from the remote only reads it
    assert run("verify", address, "--repair").exit_code == 0
    assert not path.exists()
    assert as_json("copy", corpus, address)["copied"] == 1


@pytest.mark.parametrize("fault", ["damaged head", "damaged block", "unreadable"])
def test_a_segment_that_cannot_be_copied_is_reported(tmp_path, monkeypatch, fault):
    ids = [publish(tmp_path / "kv", seed) for seed in "ab"]
    path = tmp_path / "kv" / "segments" / f"{ids[0]}.kv"
    content = bytearray(path.read_bytes())
    without_catalogue(tmp_path / "kv")
    if fault == "unreadable":
        real_open = tree.open_file

        def open_file(name, *more):
            if name == path.name:
                raise OSError(errno.EIO, "Input/output error", name)
            return real_open(name, *more)

        monkeypatch.setattr(tree, "open_file", open_file)
    else:
        content[100 if fault == "damaged head" else -1] ^= 1
        path.write_bytes(content)
    result = run("copy", tmp_path / "kv", f"file://{tmp_path}/remote", "--json")
    assert result.exit_code == 1
    copied = json.loads(result.stdout)
    assert (copied["copied"], list(copied["failed"])) == (1, [ids[0]])
    assert [path.stem for path in (tmp_path / "remote" / "segments").iterdir()] == [ids[1]]


def test_a_damaged_copy_is_not_taken_for_a_copy(tmp_path):
    segment_id, address = publish(tmp_path / "kv", "a"), f"file://{tmp_path}/remote"
    as_json("copy", tmp_path / "kv", address)
    path = tmp_path / "remote" / "segments" / f"{segment_id}.kv"
    content = path.read_bytes()
    for damaged in (content[:-4096], content[:100] + b"\xff" + content[101:]):
        path.write_bytes(damaged)
        assert as_json("copy", tmp_path / "kv", address)["copied"] == 1
        assert path.read_bytes() == content
    newer = content[:8] + (FORMAT_VERSION + 1).to_bytes(4, "little") + content[12:]
    for existing_copy, status in ((newer, 0), (b"precious", 1)):
        path.write_bytes(existing_copy)
        assert run("copy", tmp_path / "kv", address).exit_code == status
        assert path.read_bytes() == existing_copy


def test_compacted_conversations_that_are_not_copied_are_named(tmp_path):
    prompt_id, *compacted = [publish(tmp_path / "kv", "a"), *(publish(tmp_path / "kv", s, "krul") for s in "bc")]
    facts = {"fingerprint": "model", "provenance": "krul", "method": "krul", "tokens": 64, "turns": 1}
    record = ConversationRecord("alice", segments=(compacted[0],), created=1.0, suspended=1.0, nbytes=1, **facts)
    with KVStore(tmp_path / "kv") as store:
        storage_of(store).conversations.write([record])
    result = run("copy", tmp_path / "kv", f"file://{tmp_path}/remote")
    assert result.exit_code == 0
    assert "only this store can use them: 2 segments of compacted conversations\n  alice\n" in result.stdout
    copied = as_json("copy", tmp_path / "kv", f"file://{tmp_path}/other")
    assert (copied["copied"], copied["left_out"]) == (1, dict(zip(compacted, ("alice", ""), strict=True)))
    assert [path.stem for path in (tmp_path / "other" / "segments").iterdir()] == [prompt_id]


def test_records_that_are_not_copied_are_counted(model, tmp_path):
    target = f"file://{tmp_path}/remote"
    with KVStore(tmp_path / "kv") as store:
        texts, labels = [prompt(48, seed=seed)[0] for seed in (1, 2)], ["a", "b"]
        store.precompute(model, texts, passages=True, method=Epic(lead=1), labels=labels, progress=False)
        (copied,) = store.documents("a")[0].segments
        cache = TieredCache(model, store, conversation="alice", method="exact")
        model.generate(prompt(64), past_key_values=cache, max_new_tokens=1)
        cache.suspend()
    result = run("copy", tmp_path / "kv", target, copied)
    assert "not copied: 1 record of conversations and documents; the target finds their KV" in result.stdout
    assert as_json("copy", tmp_path / "kv", target)["records"] == 3
    assert as_json("copy", target, tmp_path / "new")["copied"] == 3
    with KVStore(tmp_path / "new") as store:
        cache = TieredCache(model, store)
        model.generate(prompt(64), past_key_values=cache, max_new_tokens=1)
        assert cache.stats.tokens_restored == 63 and not store.conversations() and not store.documents()


def publish(root, seed, provenance="exact"):
    """Store a segment without a model, and return its id."""
    header, *data = segment(hashes(4, seed), provenance=provenance)
    store = open_store(root)
    assert store.publish(header, *data)
    store.close()
    return header.id


def test_encrypted_segments_are_copied_with_the_key(model, place_of, tmp_path):
    address, key = place_of("file"), tmp_path / "kv.key"
    key.write_bytes(bytes(32))
    with KVStore(tmp_path / "a", key=bytes(32)) as store:
        store.precompute(model, IDS[0], progress=False)
    assert as_json("copy", tmp_path / "a", address)["copied"] == 1
    result = run("copy", address, tmp_path / "b")
    assert result.exit_code == 1
    assert "opened without a key" in result.stderr
    assert as_json("copy", address, tmp_path / "b", "--key-file", key)["copied"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copy", "a", "b"], "a folder and the address of a remote, such as s3://bucket/prefix or file:///folder"),
        (["copy", "s3://a", "s3://b"], "needs a folder and the address"),
        (["copy", "sqlite://nothing.db", "b"], "sqlite://nothing.db holds no segments"),
        (["copy", "sqlite://nothing.db", "b", "../../passwd"], "'../../passwd' is no whole id of a segment"),
        (["ls", "teleport://x"], "unknown backend"),
        (["ls", "redis://127.0.0.1:1"], "redis://127.0.0.1:1 cannot be reached (ConnectionError)"),
        (["ls", "s3://bucket"], "s3://bucket cannot be reached (no connection; check the endpoint in the environment"),
        (["ls", "redis://127.0.0.1:1/team"], "names no number of a database; write redis://host:port/database/prefix"),
        (["top", "redis://127.0.0.1:1"], "redis://127.0.0.1:1 is an address, and this command takes folders only"),
    ],
)
def test_errors_say_what_is_wrong(arguments, message, monkeypatch, capsys, tmp_path):
    pytest.importorskip("redis", reason="install redis-py: pip install '.[redis]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("sys.argv", ["hf-tiered-cache", *arguments])
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


def test_no_command_shows_the_password_of_an_address(tmp_path):
    local, address = open_store(tmp_path / "store"), f"memory://user:hunter2@{tmp_path.name}"
    local.publish(*segment(hashes(4, "a")))
    local.close()
    assert run("copy", tmp_path / "store", address).exit_code == 0
    for command in ("ls", "stat", "verify", "gc", "rm --all", "top", "conversations", "documents"):
        refuses = command in ("rm --all", "top", "conversations", "documents")
        for options in ([], ["--json"] if command != "top" else []):
            result = run(*command.split(), address, *options)
            assert isinstance(result.exception, Refused) if refuses else result.exit_code == 0, command
            assert "hunter2" not in result.output + str(result.exception), command
