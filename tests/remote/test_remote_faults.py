"""Faults of a remote: tokens are right, every fault is a counted miss, and after a few nobody waits any more."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
import pytest
import torch
from families import build, prompt
from faulty_remote import FaultyRemote
from servers import make_bucket, mooncake_server, redis_server, s3_environment, s3_server

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.pace import Pace
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.remote import link, look_up, tier, write_back
from hf_tiered_cache.remote.entries import sweep_entries
from hf_tiered_cache.store.backends import open_remote

IDS = prompt(200)
PROMPTS = [prompt(100, seed=seed) for seed in range(10, 18)]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(autouse=True)
def pace(monkeypatch):
    """Seconds to compute a token, by which the remote is waited for. A test sets it."""
    seconds = [10.0]
    monkeypatch.setattr(Pace, "per_token", lambda self, fingerprint: seconds[0])
    return seconds


@pytest.fixture
def machine(tmp_path):
    places, stores = {}, []

    def open_store(name, place="shared", capacity=None, **options):
        remote = FaultyRemote(places.setdefault(place, {}), capacity)
        store = KVStore(tmp_path / name, remote=remote, **options)
        stores.append((store, remote))
        return store, remote

    yield open_store
    for store, remote in stores:
        remote.errors, remote.delay = {}, 0.0
        store.close()


@torch.no_grad()
def check(model, store, ids=IDS, restored=None):
    """Restore a prompt, compare its answer, and return the number of restored tokens."""
    cache = TieredCache(model, store, record=False)
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    torch.testing.assert_close(logits, model(input_ids=ids, logits_to_keep=1).logits)
    assert restored in (None, cache.stats.tokens_restored)
    return cache.stats.tokens_restored


def share(model, store, *prompts):
    for ids in prompts or (IDS,):
        model(input_ids=ids, past_key_values=TieredCache(model, store), logits_to_keep=1)
    store.flush()


# --- failing calls


@pytest.mark.parametrize("error", [OSError(5, "the network is down"), RuntimeError("a bug of the client")], ids=repr)
@pytest.mark.parametrize("call", ["look_up", "find", "get"])
def test_after_a_few_failures_a_remote_is_left_alone(model, machine, call, error):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    remote.errors[call] = error
    for ids in PROMPTS[:3]:
        check(model, store, ids, restored=0)
    before = remote.calls.total()
    for ids in PROMPTS[3:6]:
        check(model, store, ids, restored=0)
    assert remote.calls.total() - before <= 3  # look-ups alone, if they answer
    stats = store.stats.remote
    assert (stats.hits, stats.lookups, stats.errors) == (0, 6, 3)
    assert stats.misses[look_up.UNAVAILABLE] == 3
    # and it is used again when a probe succeeds, which no request waits for
    remote.errors.clear()
    storage = storage_of(store).remote
    for breaker in (storage.look_ups.breaker, storage.fetch_breaker):
        breaker._until = 0.0
    check(model, store, PROMPTS[6])
    deadline = time.monotonic() + 30
    while storage.look_ups.breaker.is_open or storage.fetch_breaker.is_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        check(model, store, PROMPTS[6])
    check(model, store, PROMPTS[7], restored=96)


def test_writes_that_fail_are_counted_and_lose_nothing(model, machine):
    store, remote = machine("a")
    remote.errors["put"] = OSError(5, "the network is down")
    share(model, store, *PROMPTS[:5])
    stats = store.stats.remote
    assert (stats.segments_written, stats.dropped_writes) == (0, 5)
    assert remote.calls["put"] == link._FAILURES
    for ids in PROMPTS[:5]:
        check(model, store, ids, restored=96)
    assert store.stats.segments == 5


def test_a_full_remote_serves_what_it_has(model, machine):
    store, _ = machine("a", capacity=400_000)
    share(model, store, *PROMPTS[:5])
    stats = store.stats.remote
    assert stats.segments_written >= 1
    assert stats.segments_written + stats.dropped_writes == 5
    other, _ = machine("b")
    assert sum(check(model, other, ids) == 96 for ids in PROMPTS[:5]) == stats.segments_written


def test_a_queue_that_is_full_drops_and_counts(model, machine, monkeypatch):
    monkeypatch.setattr(write_back, "_MOST_QUEUED", 2)
    store, remote = machine("a")
    gate = threading.Event()
    put = remote.put_object
    monkeypatch.setattr(remote, "put_object", lambda *a: (gate.wait(60), put(*a))[1])
    for ids in PROMPTS[:6]:
        model(input_ids=ids, past_key_values=TieredCache(model, store), logits_to_keep=1)
        storage_of(store).seal()
        storage_of(store).writer.flush()
    assert store.stats.remote.queued_writes <= 2
    gate.set()
    store.flush()
    stats = store.stats.remote
    assert stats.dropped_writes >= 3
    assert stats.segments_written + stats.dropped_writes == 6


def test_deletions_in_a_remote_that_fails_are_counted_and_end(model, machine):
    store, remote = machine("a")
    share(model, store, *PROMPTS)
    remote.errors["look_up"] = remote.errors["find"] = OSError(5, "the network is down")
    before = remote.calls.total()
    store.clear(disk=True)
    store.flush()
    stats = store.stats.remote
    assert (stats.failed_deletions, stats.errors) == (len(PROMPTS), link._FAILURES)
    assert remote.calls.total() - before == link._FAILURES  # with a timeout each, closing would take minutes


def test_writes_are_tried_again_after_a_probe_that_sent_nothing(model, machine):
    store, remote = machine("a")
    remote.errors["put"] = OSError(5, "the network is down")
    share(model, store, *PROMPTS[:3])
    writes = storage_of(store).remote._writes
    assert writes._breaker.is_open
    remote.errors.clear()
    writes._breaker._until = 0.0
    removed = [row.id for row in store.segments()][:1]
    storage_of(store).disk.remove(removed)
    writes.offer(removed)  # evicted before it is sent
    store.flush()
    writes._breaker._until = 0.0
    share(model, store, PROMPTS[3])
    assert store.stats.remote.segments_written == 1


def test_a_missing_bucket_is_a_failure_not_an_eviction(model, machine, caplog):
    store, remote = machine("a")
    remote.errors["put"] = FileNotFoundError(2, "NoSuchBucket")
    share(model, store)
    assert store.stats.remote.errors == 1
    assert "NoSuchBucket" in caplog.text
    assert "evicted" not in caplog.text


def test_a_missing_or_damaged_segment_is_an_answer(model, machine):
    """A probe that finds nothing, or damage, shows that the remote is there."""
    first, remote = machine("a")
    share(model, first, *PROMPTS)
    for name in remote.segments():
        del remote.objects[name]
    store, _ = machine("b")
    breaker = storage_of(store).remote.fetch_breaker
    for _ in range(link._FAILURES):
        breaker.failed()
    breaker._until = 0.0
    check(model, store, PROMPTS[0], restored=0)
    deadline = time.monotonic() + 30
    while breaker.is_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_store_that_only_reads_deletes_nothing_in_the_remote(model, machine):
    first, remote = machine("a")
    share(model, first, *PROMPTS[:2])
    before = set(remote.objects)
    damaged = remote.segments()[0]
    remote.change(damaged, flipped(-1))
    store, _ = machine("b", remote_write="never")
    assert sorted(check(model, store, ids) for ids in PROMPTS[:2]) == [0, 96]
    assert store.stats.remote.damaged == 1
    store.clear(disk=True)
    store.flush()
    assert set(remote.objects) == before


def test_newer_segments_and_entries_are_left_alone(model, machine, monkeypatch):
    first, remote = machine("a")
    share(model, first)
    before = dict(remote.objects)
    monkeypatch.setattr("hf_tiered_cache.store.format.FORMAT_VERSION", 0)
    store, _ = machine("b")
    cache = TieredCache(model, store, record=False)
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored == 0
    assert sweep_entries(remote) == []
    assert remote.objects == before


# --- damaged and missing objects


def flipped(at):
    def change(content):
        damaged = bytearray(content)
        damaged[at] ^= 1
        return bytes(damaged)

    return change


CHANGES = {
    "header": flipped(100),
    "chain": flipped(4096),
    "last page": flipped(-1),
    "truncated": lambda content: content[: len(content) // 2],
    "cut in the header": lambda content: content[:1000],
    "empty": lambda content: b"",
    "longer": lambda content: content + content,
}


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["plain", "key"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["segments/", "prefixes/"])
def test_damaged_objects_are_never_served(model, machine, kind, change, key):
    first, remote = machine("a", key=key)
    share(model, first)
    for name in [name for name in remote.objects if name.startswith(kind)]:
        remote.change(name, CHANGES[change])
    store, _ = machine("b", key=key)
    restored = check(model, store)
    assert restored in (0, 192)
    assert store.verify().ok
    if not restored:
        assert store.stats.remote.hits == 0
        assert sum(store.stats.remote.misses.values()) == 1
    if kind == "segments/" and not restored and change != "empty":
        assert store.stats.remote.damaged == 1
        assert remote.segments() == []  # so that it can be stored again
        share(model, store)
        assert check(model, machine("c", key=key)[0]) == 192


@pytest.mark.parametrize("kind", ["segments/", "prefixes/"])
def test_expired_objects_are_misses(model, machine, kind):
    first, remote = machine("a")
    share(model, first)
    for name in [name for name in remote.objects if name.startswith(kind)]:
        del remote.objects[name]
    store, _ = machine("b")
    check(model, store, restored=0)
    assert store.stats.remote.damaged == 0
    share(model, store)
    check(model, machine("c")[0], restored=192)


def test_segments_past_their_lifetime_are_not_brought(model, machine, monkeypatch):
    first, _ = machine("a", ttl=1000.0)
    share(model, first)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2000)
    check(model, machine("b")[0], restored=0)


def test_what_does_not_fit_here_is_not_brought_again_and_again(model, machine):
    share(model, machine("a")[0])
    store, remote = machine("b", disk_quota=400_000)
    check(model, store, restored=0)
    before = remote.calls["get"]
    check(model, store, restored=0)
    assert remote.calls["get"] == before
    assert store.stats.remote.misses[tier.UNUSABLE] == 1


# --- slow remotes


def test_a_slow_look_up_is_waited_for_once(model, machine, pace):
    """500 ms for each call, and prompts that take 96 ms to compute."""
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    pace[0], remote.delay = 0.001, 0.5
    check(model, store, PROMPTS[0], restored=0)
    while storage_of(store).remote.look_ups.seconds.value is None:  # it ends, though nobody waits for it
        time.sleep(0.01)
    calls = remote.calls.total()
    for ids in PROMPTS[1:]:
        check(model, store, ids, restored=0)
    assert remote.calls.total() == calls
    stats = store.stats.remote
    assert stats.misses == {look_up.LATE: 1, look_up.SLOW: len(PROMPTS) - 1}
    assert stats.waiting_seconds < 0.4


def test_what_was_slow_is_measured_again_in_the_background(model, machine, pace, monkeypatch):
    """A minute later nobody waits for what was slow the last time."""
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    tier_of_store = storage_of(store).remote
    pace[0], remote.delay = 0.01, 0.3
    tier_of_store.look_ups.seconds.add(0.3)
    tier_of_store.look_ups.seconds._measured -= 1000
    check(model, store, PROMPTS[0], restored=0)
    check(model, store, PROMPTS[1], restored=0)
    stats = store.stats.remote
    assert (stats.misses, stats.errors) == ({look_up.SLOW: 2}, 0)
    assert stats.waiting_seconds < 0.2
    while tier_of_store.look_ups.seconds.is_old:
        time.sleep(0.01)
    assert remote.calls["look_up"] == 1
    remote.delay, pace[0] = 0.0, 0.1
    tier_of_store.look_ups.seconds.value = 0.0
    tier_of_store.link.bandwidth.add(1e3)
    tier_of_store.link.bandwidth._measured -= 1000
    check(model, store, PROMPTS[1], restored=0)
    assert store.stats.remote.misses[tier.SLOW_FETCH] == 1
    while tier_of_store.link.bandwidth.is_old:
        time.sleep(0.01)
    check(model, store, PROMPTS[2], restored=96)


def test_a_slow_link_is_not_used_for_what_is_computed_faster(model, machine, pace):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    check(model, store, PROMPTS[0], restored=96)
    tier_of_store = storage_of(store).remote
    tier_of_store.link = link.Link()
    tier_of_store.link.bandwidth.add(1e4)  # bytes per second
    pace[0] = 0.1
    gets = remote.calls["get"]
    check(model, store, PROMPTS[1], restored=0)
    assert remote.calls["get"] == gets
    assert store.stats.remote.misses == {tier.SLOW_FETCH: 1}
    pace[0] = 10.0
    check(model, store, PROMPTS[1], restored=96)  # a long prompt of a slow model is worth it


def test_a_fetch_that_hangs_is_left_after_the_time_that_computing_takes(model, machine, pace, monkeypatch):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    gate = threading.Event()
    get = remote.get_object
    monkeypatch.setattr(remote, "get_object", lambda *a: (gate.wait(60), get(*a))[1])
    pace[0] = 0.01
    began = time.monotonic()
    for ids in PROMPTS:
        check(model, store, ids, restored=0)
    assert time.monotonic() - began < 30
    stats = store.stats.remote
    assert stats.misses == {look_up.LATE: link._FAILURES, look_up.UNAVAILABLE: len(PROMPTS) - link._FAILURES}
    gate.set()  # what was late is brought for the next prompt
    deadline = time.monotonic() + 30
    while store.stats.segments < link._FAILURES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check(model, store, PROMPTS[0], restored=96)


def test_a_later_segment_that_fails_keeps_those_before_it(model, machine, monkeypatch):
    first, remote = machine("a")
    share(model, first, IDS[:, :96], IDS)
    assert len(remote.segments()) == 2
    rows = sorted(first.segments(), key=lambda row: row.position)
    del remote.objects[f"segments/{rows[1].id}.kv"]
    store, _ = machine("b")
    check(model, store, restored=96)
    assert store.stats.remote.hits == 1


# --- real servers


def cut_objects(monkeypatch, nbytes):
    """Let objects of a server of values have parts of so many bytes."""
    for name in ("first_bytes", "part_bytes"):
        monkeypatch.setattr(f"hf_tiered_cache.store.remotes.values.ValueBackend.{name}", nbytes)


def test_a_redis_server_that_is_killed_stopped_and_full(model, tmp_path, pace, monkeypatch):
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        address = f"redis://127.0.0.1:{server.port}"
        with KVStore(tmp_path / "a", remote=address) as writer:
            share(model, writer, *[prompt(390, seed=seed) for seed in range(8)])  # 8 x 600 KB
            assert writer.stats.remote.dropped_writes > 0
            assert writer.stats.remote.segments_written > 0
            reader = KVStore(tmp_path / "b", remote=address)
            check(model, reader, prompt(390, seed=0), restored=384)
            # stopped: it takes connections and does not answer
            server.stop()
            pace[0] = 0.001
            for seed in range(20, 26):
                check(model, reader, prompt(390, seed=seed), restored=0)
            stats = reader.stats.remote
            assert stats.misses[look_up.LATE] == 3
            assert stats.misses[look_up.UNAVAILABLE] == 3
            assert stats.waiting_seconds < 3
            server.go_on()
            reader.close()
            server.kill()
            share(model, writer, prompt(390, seed=30))  # nothing is lost
            check(model, writer, prompt(390, seed=30), restored=384)


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
                monkeypatch.setattr(remote, "get_object", lambda *a: (next(calls) == 3 and server.kill(), get(*a))[1])
                with KVStore(tmp_path / "b", remote=remote) as reader:
                    check(model, reader, restored=0)
                    assert reader.stats.remote.errors > 0
            else:
                put = remote.client.set
                monkeypatch.setattr(
                    remote.client, "set", lambda *a, **k: (next(calls) == 2 and server.kill(), put(*a, **k))[1]
                )
                with KVStore(tmp_path / "b", remote=remote) as other:
                    share(model, other)
                    assert other.stats.remote.dropped_writes == 1
                    check(model, other, restored=192)
                server.start()  # empty again
                check(model, writer, restored=0)


def test_a_redis_server_that_evicts_objects(model, tmp_path):
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as server:
        address = f"redis://127.0.0.1:{server.port}"
        prompts = [prompt(390, seed=seed) for seed in range(8)]
        with KVStore(tmp_path / "a", remote=address) as writer:
            share(model, writer, *prompts)
        with KVStore(tmp_path / "b", remote=address) as reader:
            restored = [check(model, reader, ids) for ids in prompts]
            assert set(restored) == {0, 384}
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
            done = iter(range(10))

            def dying(key, *args, **options):
                if next(done) == 2:
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
    monkeypatch.setattr("hf_tiered_cache.store.remotes.redis._SECONDS", 0.3)
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
        here = str(Path(processes.__file__).parent)
        arguments = [sys.executable, "-c", code, str(tmp_path / "a"), address, here]
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


def test_a_mooncake_pool_whose_machine_dies(model, tmp_path, pace, monkeypatch):
    with mooncake_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with KVStore(tmp_path / "a", remote=server.address("x")) as writer:
            share(model, writer, *PROMPTS)
            assert writer.stats.remote.segments_written == len(PROMPTS)
        with KVStore(tmp_path / "b", remote=server.address("x")) as reader:
            check(model, reader, PROMPTS[0], restored=96)
            pace[0] = 0.5
            server.node.kill()
            for ids in PROMPTS[1:]:
                check(model, reader, ids, restored=0)
            stats = reader.stats.remote
            assert stats.damaged == 0
            assert sum(stats.misses.values()) == len(PROMPTS) - 1
            server.master.kill()
            check(model, reader, prompt(100, seed=99), restored=0)


def test_an_s3_server_that_is_killed(model, tmp_path, pace, monkeypatch):
    with s3_server(tmp_path) as server:
        for name, value in s3_environment(server).items():
            monkeypatch.setenv(name, value)
        make_bucket(server, "bucket")
        with KVStore(tmp_path / "a", remote="s3://bucket/x") as writer:
            share(model, writer, *PROMPTS)
            assert writer.stats.remote.segments_written == len(PROMPTS)
        with KVStore(tmp_path / "b", remote="s3://bucket/x") as reader:
            check(model, reader, PROMPTS[0], restored=96)
            server.kill()
            pace[0] = 0.5  # 9.6 s are worth it for a look-up: each ends with an error
            for ids in PROMPTS[1:]:
                check(model, reader, ids, restored=0)
            stats = reader.stats.remote
            refused = len(PROMPTS) - 1 - link._FAILURES
            assert stats.misses == {look_up.FAILED: link._FAILURES, look_up.UNAVAILABLE: refused}
