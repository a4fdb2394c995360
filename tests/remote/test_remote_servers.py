"""Faults of real servers: killed, stopped, full, and evicting."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import processes
import pytest
from families import prompt
from servers import make_bucket, mooncake_server, redis_server, s3_environment, s3_server
from shared_prompts import PROMPTS, check, share

from hf_tiered_cache import KVStore
from hf_tiered_cache.remote import link
from hf_tiered_cache.store.backends import open_remote


def cut_objects(monkeypatch, nbytes):
    """Let objects of a server of values have parts of so many bytes."""
    for name in ("first_bytes", "part_bytes"):
        monkeypatch.setattr(f"hf_tiered_cache.store.backends.values.ValueBackend.{name}", nbytes)


def test_a_redis_server_that_is_killed_stopped_and_full(model, tmp_path, pace, monkeypatch):
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        address = f"redis://127.0.0.1:{server.port}"
        with KVStore(tmp_path / "a", remote=address) as writer:
            share(model, writer, *[prompt(390, seed=seed) for seed in range(8)])  # 8 x 600 KB
            assert writer.stats.remote.dropped_writes > 0
            assert writer.stats.remote.segments_written > 0
            reader = KVStore(tmp_path / "b", remote=address)
            check(model, reader, prompt(390, seed=0), tokens_restored=384)
            # stopped: it takes connections and does not answer
            server.stop()
            pace[0] = 0.001
            for seed in range(20, 26):
                check(model, reader, prompt(390, seed=seed), tokens_restored=0)
            stats = reader.stats.remote
            assert stats.misses[link.LATE] == 3
            assert stats.misses[link.UNAVAILABLE] == 3
            assert stats.waiting_seconds < 3
            server.go_on()
            reader.close()
            server.kill()
            share(model, writer, prompt(390, seed=30))  # nothing is lost
            check(model, writer, prompt(390, seed=30), tokens_restored=384)


@pytest.mark.parametrize("call", ["get_object", "put_object"])
def test_a_redis_server_that_is_killed_in_the_middle(model, tmp_path, call, monkeypatch):
    cut_objects(monkeypatch, 64 << 10)
    with redis_server(tmp_path) as server:
        address = f"redis://127.0.0.1:{server.port}"
        with KVStore(tmp_path / "a", remote=address) as writer:
            if call == "get_object":
                share(model, writer)
            remote = open_remote(address)
            calls = iter(range(1000))
            if call == "get_object":
                get = remote.get_object
                monkeypatch.setattr(remote, "get_object", lambda *a: (next(calls) == 1 and server.kill(), get(*a))[1])
                with KVStore(tmp_path / "b", remote=remote) as reader:
                    check(model, reader, tokens_restored=0)
                    assert reader.stats.remote.errors > 0
            else:
                real_set = remote.client.set
                monkeypatch.setattr(
                    remote.client, "set", lambda *a, **k: (next(calls) == 2 and server.kill(), real_set(*a, **k))[1]
                )
                with KVStore(tmp_path / "b", remote=remote) as other_store:
                    share(model, other_store)
                    assert other_store.stats.remote.dropped_writes == 1
                    check(model, other_store, tokens_restored=192)
                server.start()  # empty again
                check(model, writer, tokens_restored=0)


def test_a_redis_server_that_evicts_objects(model, tmp_path):
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as server:
        address = f"redis://127.0.0.1:{server.port}"
        prompts = [prompt(390, seed=seed) for seed in range(8)]
        with KVStore(tmp_path / "a", remote=address) as writer:
            share(model, writer, *prompts)
        with KVStore(tmp_path / "b", remote=address) as reader:
            restored_counts = [check(model, reader, ids) for ids in prompts]
            assert set(restored_counts) == {0, 384}
            assert reader.stats.remote.damaged == 0


def test_parts_of_an_unfinished_object_expire(tmp_path, monkeypatch):
    cut_objects(monkeypatch, 1000)
    with redis_server(tmp_path) as server:
        remote = open_remote(f"redis://127.0.0.1:{server.port}/0/here")
        remote.put_object("segments/a.kv", bytes(3500), replace=False)
        keys = remote.client.keys()
        assert len(keys) == 4
        assert {remote.client.ttl(key) for key in keys} == {-1}
        remote.put_object("segments/a.kv", b"1" * 2500, replace=True)
        assert len(remote.client.keys()) == 3
        with monkeypatch.context() as patch:  # it dies before it is complete
            patch.setattr(remote, "_discard", lambda parts: None)
            call_numbers = iter(range(10))

            def dying(key, *args, **options):
                if next(call_numbers) == 2:
                    raise KeyboardInterrupt
                return type(remote.client).set(remote.client, key, *args, **options)

            patch.setattr(remote.client, "set", dying)
            with pytest.raises(KeyboardInterrupt):
                remote.put_object("segments/b.kv", bytes(3500), replace=False)
        assert remote.find_object("segments/b.kv") is None
        lifetimes = [remote.client.ttl(key) for key in list(remote.client.scan_iter()) if b"b.kv" in key]
        assert len(lifetimes) == 2
        assert all(0 < lifetime <= 3600 for lifetime in lifetimes)
        remote.close()


def test_a_full_redis_server_keeps_no_parts_of_what_did_not_fit(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction") as server:
        remote = open_remote(f"redis://127.0.0.1:{server.port}")
        with pytest.raises(OSError) as error:
            remote.put_object("segments/a.kv", bytes(24 << 20), replace=False)
        assert error.value.errno == errno.ENOSPC
        assert remote.client.keys() == []
        remote.close()


def test_a_redis_server_that_does_not_answer_is_given_up_after_one_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_tiered_cache.store.backends.redis._SECONDS", 0.3)
    with redis_server(tmp_path) as server:
        remote = open_remote(f"redis://127.0.0.1:{server.port}")
        assert remote.find_object("segments/a.kv") is None
        server.stop()
        began = time.monotonic()
        with pytest.raises(OSError):
            remote.find_object("segments/a.kv")
        assert time.monotonic() - began < 1.0
        server.go_on()
        assert remote.find_object("segments/a.kv") is None
        server.kill()
        server.start()
        assert remote.find_object("segments/a.kv") is None  # it connects again
        remote.close()


@pytest.mark.parametrize("kind", ["redis", "s3", "mooncake"])
def test_a_process_ends_although_a_server_does_not_answer(tmp_path, kind):
    """With prompts, writes and deletions on the way."""
    code = """
import sys, torch
sys.path.insert(0, sys.argv[3])
from families import build, prompt
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.remote import write_back
write_back._PATIENCE_SECONDS = 2.0
model = build("llama")
store = KVStore(sys.argv[1], remote=sys.argv[2])
with torch.no_grad():
    model(input_ids=prompt(100, seed=1), past_key_values=TieredCache(model, store), logits_to_keep=1)
    store.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    for seed in (1, 2, 3):
        cache = TieredCache(model, store)
        model(input_ids=prompt(100, seed=seed), past_key_values=cache, logits_to_keep=1)
        print(cache.stats.tokens_restored)
    store.remove([row.id for row in store.segments()][:1])
"""
    run = {"redis": redis_server, "s3": s3_server, "mooncake": mooncake_server}[kind]
    folder = tmp_path / "server"
    folder.mkdir()
    with run(folder) as server:
        environment = {"s3": s3_environment, "mooncake": lambda server: server.environment}.get(kind, lambda _: {})
        address = {"redis": lambda: f"redis://127.0.0.1:{server.port}", "s3": lambda: "s3://bucket/x"}
        if kind == "s3":
            make_bucket(server, "bucket")
        address = server.address("x") if kind == "mooncake" else address[kind]()
        lib_path = str(Path(processes.__file__).parent)
        arguments = [sys.executable, "-c", code, str(tmp_path / "a"), address, lib_path]
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment(server) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            stopped = [server.master, server.node] if kind == "mooncake" else [server]
            for part in stopped:
                part.stop()
            began = time.monotonic()
            output, errors = process.communicate("go on\n", timeout=60)
            assert process.returncode == 0, errors
            assert output.split() == ["96", "0", "0"]
            assert time.monotonic() - began < 30
        finally:
            process.kill()
            for part in stopped:
                part.go_on()


def test_many_objects_of_a_mooncake_pool_are_listed(tmp_path, monkeypatch):
    """In calls that its transport has room for: it refuses a part of some thousand values."""
    with mooncake_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with closing(open_remote(server.address("x"))) as remote:
            names = [f"segments/{number:032x}.kv" for number in range(600)]
            for name in names:
                remote.put_object(name, b"content", False)
            remote.client = Mock(wraps=remote.client)
            assert len(remote.names()) == 600
            assert all(len(call.args[0]) <= 256 for call in remote.client.get_batch.call_args_list)


def test_a_mooncake_pool_whose_machine_dies(model, tmp_path, pace, monkeypatch):
    with mooncake_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with KVStore(tmp_path / "a", remote=server.address("x")) as writer:
            share(model, writer, *PROMPTS)
            assert writer.stats.remote.segments_written == len(PROMPTS)
        with KVStore(tmp_path / "b", remote=server.address("x")) as reader:
            check(model, reader, PROMPTS[0], tokens_restored=96)
            pace[0] = 0.5
            server.node.kill()
            for ids in PROMPTS[1:]:
                check(model, reader, ids, tokens_restored=0)
            stats = reader.stats.remote
            assert stats.damaged == 0
            assert sum(stats.misses.values()) == len(PROMPTS) - 1
            server.master.kill()
            check(model, reader, prompt(100, seed=99), tokens_restored=0)


def test_an_s3_server_that_is_killed(model, tmp_path, pace, monkeypatch):
    with s3_server(tmp_path) as server:
        for name, value in s3_environment(server).items():
            monkeypatch.setenv(name, value)
        make_bucket(server, "bucket")
        with KVStore(tmp_path / "a", remote="s3://bucket/x") as writer:
            share(model, writer, *PROMPTS)
            assert writer.stats.remote.segments_written == len(PROMPTS)
        with KVStore(tmp_path / "b", remote="s3://bucket/x") as reader:
            check(model, reader, PROMPTS[0], tokens_restored=96)
            server.kill()
            pace[0] = 0.5  # 9.6 s are worth it for a lookup: each ends with an error
            for ids in PROMPTS[1:]:
                check(model, reader, ids, tokens_restored=0)
            stats = reader.stats.remote
            num_refused = len(PROMPTS) - 1 - link._FAILURES
            assert stats.misses == {link.FAILED: link._FAILURES, link.UNAVAILABLE: num_refused}


def test_a_redis_value_of_another_type_is_not_read_replaced_or_deleted(tmp_path):
    with redis_server(tmp_path) as server, closing(open_remote(f"redis://127.0.0.1:{server.port}/0/kv")) as remote:
        remote.put_object("segments/a", b"content", replace=False)
        for name in ("segments/notes", "pins/notes", "calibrations.json"):
            remote.client.rpush(f"kv:{name}", "precious")
        assert list(remote.list_objects("segments")) == ["a"]
        assert remote.find_object("segments/notes") is None
        assert remote.get_beginnings(["segments/a", "segments/notes"], 7) == {"segments/a": b"content"}
        for replace in (False, True):
            with pytest.raises(FileExistsError):
                remote.put_object("segments/notes", b"content", replace)
        assert not remote.delete_object("segments/notes")
        assert remote.client.lrange("kv:segments/notes", 0, -1) == [b"precious"]
