"""Faults of a remote: tokens are right, every fault is a counted miss, and after a few nobody waits any more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from shared_prompts import IDS, PROMPTS, check, share

from hf_tiered_cache import Exact, Geometry, TieredCache, reasons
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.remote import link, tier, write_back
from hf_tiered_cache.remote.entries import sweep_entries

# --- failing calls


@pytest.mark.parametrize("error", [OSError(5, "the network is down"), RuntimeError("a bug of the client")], ids=repr)
@pytest.mark.parametrize("call", ["look_up", "find", "get"])
def test_after_a_few_failures_a_remote_is_left_alone(model, machine, call, error):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    remote.errors[call] = error
    for ids in PROMPTS[:3]:
        check(model, store, ids, tokens_restored=0)
    before = remote.calls.total()
    for ids in PROMPTS[3:6]:
        check(model, store, ids, tokens_restored=0)
    assert remote.calls.total() - before <= 3  # lookups alone, if they answer
    stats = store.stats.remote
    assert (stats.hits, stats.lookups, stats.errors) == (0, 6, 3)
    assert stats.misses[link.UNAVAILABLE] == 3
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
    check(model, store, PROMPTS[7], tokens_restored=96)


def test_writes_that_fail_are_counted_and_lose_nothing(model, machine):
    store, remote = machine("a")
    remote.errors["put"] = OSError(5, "the network is down")
    share(model, store, *PROMPTS[:5])
    stats = store.stats.remote
    assert (stats.segments_written, stats.dropped_writes) == (0, 5)
    assert remote.calls["put"] == link._FAILURES
    for ids in PROMPTS[:5]:
        check(model, store, ids, tokens_restored=96)
    assert store.stats.segments == 5


def test_a_full_remote_serves_what_it_has(model, machine):
    store, _ = machine("a", capacity=400_000)
    share(model, store, *PROMPTS[:5])
    stats = store.stats.remote
    assert stats.segments_written >= 1
    assert stats.segments_written + stats.dropped_writes == 5
    other_store, _ = machine("b")
    assert sum(check(model, other_store, ids) == 96 for ids in PROMPTS[:5]) == stats.segments_written


def test_a_queue_that_is_full_drops_and_counts(model, machine, monkeypatch):
    monkeypatch.setattr(write_back, "_MOST_QUEUED", 2)
    store, remote = machine("a")
    gate = threading.Event()
    put_object = remote.put_object
    monkeypatch.setattr(remote, "put_object", lambda *a, **k: (gate.wait(60), put_object(*a, **k))[1])
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
    writes = storage_of(store).remote.writes
    assert writes._breaker.is_open
    remote.errors.clear()
    writes._breaker._until = 0.0
    removed_ids = [row.id for row in store.segments()][:1]
    storage_of(store).disk.remove(removed_ids)
    writes.offer(removed_ids)  # evicted before it is sent
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
    check(model, store, PROMPTS[0], tokens_restored=0)
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
    tokens_restored = check(model, store)
    assert tokens_restored in (0, 192)
    assert store.verify().ok
    if not tokens_restored:
        assert store.stats.remote.hits == 0
        assert sum(store.stats.remote.misses.values()) == 1
    if kind == "segments/" and not tokens_restored and change != "empty":
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
    check(model, store, tokens_restored=0)
    assert store.stats.remote.damaged == 0
    share(model, store)
    check(model, machine("c")[0], tokens_restored=192)


def test_segments_past_their_lifetime_are_not_brought(model, machine, monkeypatch):
    first, _ = machine("a", ttl=1000.0)
    share(model, first)
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + 2000)
    check(model, machine("b")[0], tokens_restored=0)


def test_what_does_not_fit_here_is_not_brought_again_and_again(model, machine):
    share(model, machine("a")[0])
    store, remote = machine("b", disk_quota=400_000)
    check(model, store, tokens_restored=0)
    before = remote.calls["get"]
    check(model, store, tokens_restored=0)
    assert remote.calls["get"] == before
    assert store.stats.remote.misses[tier.UNUSABLE] == 2


# --- reasons


def reason_of(model, store, ids, **options):
    cache = TieredCache(model, store, record=False, **options)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache.stats.reason


def test_a_prompt_is_told_why_its_remote_served_nothing(model, machine, pace, caplog):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    assert reason_of(model, store, PROMPTS[3]) == ""
    unknown = IDS.flip(1)
    assert reason_of(model, store, unknown) == reasons.NOT_FETCHED + tier.ABSENT
    assert reason_of(model, store, unknown, conversation="alice") == reasons.NOT_FETCHED + tier.ABSENT
    assert not caplog.records
    remote.errors["look_up"] = OSError(5, "the network is down")
    assert reason_of(model, store, PROMPTS[0]) == reasons.NOT_FETCHED + link.FAILED
    remote.errors.clear()
    pace[0], remote.delay = 0.001, 0.3
    assert reason_of(model, store, torch.cat([PROMPTS[1], PROMPTS[2]])) == reasons.NOT_FETCHED + link.LATE
    assert not [record for record in caplog.records if reasons.NOT_FETCHED in record.getMessage()]


def test_why_nothing_was_fetched_is_kept_for_recent_prompts(model, machine, monkeypatch):
    monkeypatch.setattr(tier, "_MOST_MISSED", 2)
    store, _ = machine("a")
    for ids in PROMPTS[:4]:
        assert reason_of(model, store, ids) == reasons.NOT_FETCHED + tier.ABSENT
    assert len(storage_of(store).remote._missed) == 2


# --- slow remotes


def test_a_slow_look_up_is_waited_for_once(model, machine, pace):
    """500 ms for each call, and prompts that take 96 ms to compute."""
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    pace[0], remote.delay = 0.001, 0.5
    check(model, store, PROMPTS[0], tokens_restored=0)
    while storage_of(store).remote.look_ups.seconds.value is None:  # it ends, though nobody waits for it
        time.sleep(0.01)
    calls = remote.calls.total()
    for ids in PROMPTS[1:]:
        check(model, store, ids, tokens_restored=0)
    assert remote.calls.total() == calls
    stats = store.stats.remote
    assert stats.misses == {link.LATE: 1, link.SLOW: len(PROMPTS) - 1}
    assert stats.waiting_seconds < 0.4


def test_what_was_slow_is_measured_again_in_the_background(model, machine, pace, monkeypatch):
    """A minute later nobody waits for what was slow the last time."""
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    tier_of_store = storage_of(store).remote
    pace[0], remote.delay = 0.01, 0.3
    tier_of_store.look_ups.seconds.add(0.3)
    tier_of_store.look_ups.seconds._measured -= 1000
    check(model, store, PROMPTS[0], tokens_restored=0)
    check(model, store, PROMPTS[1], tokens_restored=0)
    stats = store.stats.remote
    assert (stats.misses, stats.errors) == ({link.SLOW: 2}, 0)
    assert stats.waiting_seconds < 0.2
    while tier_of_store.look_ups.seconds.is_old:
        time.sleep(0.01)
    assert remote.calls["look_up"] == 1
    remote.delay, pace[0] = 0.0, 0.1
    tier_of_store.look_ups.seconds.value = 0.0
    tier_of_store.link.bandwidth.add(1e3)
    tier_of_store.link.bandwidth._measured -= 1000
    check(model, store, PROMPTS[1], tokens_restored=0)
    assert store.stats.remote.misses[tier.SLOW_FETCH] == 1
    while tier_of_store.link.bandwidth.is_old:
        time.sleep(0.01)
    check(model, store, PROMPTS[2], tokens_restored=96)


def test_a_slow_link_is_not_used_for_what_is_computed_faster(model, machine, pace):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    check(model, store, PROMPTS[0], tokens_restored=96)
    tier_of_store = storage_of(store).remote
    tier_of_store.link = link.Link()
    tier_of_store.link.bandwidth.add(5e3)  # bytes per second
    pace[0] = 0.1
    gets = remote.calls["get"]
    check(model, store, PROMPTS[1], tokens_restored=0)
    assert remote.calls["get"] == gets
    assert store.stats.remote.misses == {tier.SLOW_FETCH: 1}
    pace[0] = 10.0
    check(model, store, PROMPTS[1], tokens_restored=96)  # a long prompt of a slow model is worth it


def test_segments_that_are_computed_faster_than_fetched_are_computed_after_the_others(model, machine, monkeypatch):
    writer, store = machine("a")[0], machine("b")[0]
    share(model, writer, IDS[:, :64], IDS)
    first = max(row.nbytes for row in writer.segments() if not row.position)
    monkeypatch.setattr(link.Link, "fetch_seconds", lambda self, nbytes: float("inf") if nbytes > first else 0.0)
    check(model, store, IDS, tokens_restored=64)
    assert (store.stats.remote.hits, store.stats.remote.segments_read) == (1, 1)


def test_a_fetch_that_hangs_is_left_after_half_of_the_time_that_computing_takes(model, machine, pace, monkeypatch):
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    gate = threading.Event()
    get = remote.get_object
    monkeypatch.setattr(remote, "get_object", lambda *a: (gate.wait(60), get(*a))[1])
    pace[0] = 0.01
    began = time.monotonic()
    for ids in PROMPTS:
        check(model, store, ids, tokens_restored=0)
    assert time.monotonic() - began < 30
    stats = store.stats.remote
    assert stats.misses == {link.LATE: link._FAILURES, link.UNAVAILABLE: len(PROMPTS) - link._FAILURES}
    gate.set()  # what was late is brought for the next prompt
    deadline = time.monotonic() + 30
    while store.stats.segments < link._FAILURES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check(model, store, PROMPTS[0], tokens_restored=96)


@pytest.mark.parametrize(
    ("bandwidth", "share_of_computing", "tokens"), [(None, 0.6, 96), (None, 2.0, 0), (1e9, 0.35, 96), (1e9, 2.0, 0)]
)
@pytest.mark.thin(2)
def test_a_fetch_is_judged_by_its_pace(model, machine, pace, monkeypatch, bandwidth, share_of_computing, tokens):
    """After half of the time that computing takes, or after the time that it should take, if that is known."""
    store, _ = machine("a")
    cache = TieredCache(model, store, method=Exact(geometry=Geometry(layers_per_block=1)))
    model(input_ids=PROMPTS[0], past_key_values=cache, logits_to_keep=1)
    cache.store_now()
    store.flush()
    (nbytes,) = (row.nbytes for row in store.segments())
    store, remote = machine("b")
    if bandwidth is not None:
        storage_of(store).remote.link.bandwidth.add(bandwidth)
        monkeypatch.setattr(tier, "_LEAST_WAIT", 0.5)
    pace[0] = 0.03
    computing, get = 96 * pace[0], remote.get_object
    lock = threading.Lock()

    def get_slowly(name, version, offset, count):
        with lock:
            time.sleep(share_of_computing * computing * count / nbytes if offset else 0.0)  # the head is read at once
        return get(name, version, offset, count)

    monkeypatch.setattr(remote, "get_object", get_slowly)
    check(model, store, PROMPTS[0], tokens_restored=tokens)
    assert store.stats.remote.misses == ({} if tokens else {link.LATE: 1})
    least = 0.5 * computing if bandwidth is None else 0.5
    assert tokens or least <= store.stats.remote.waiting_seconds < 0.75 * computing


def test_a_fetch_that_hangs_is_left_soon_if_the_bandwidth_is_known(model, machine, pace, monkeypatch):
    """Computing takes 9.6 seconds, and fetching took milliseconds: nobody waits for 9.6 seconds."""
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    check(model, store, PROMPTS[0], tokens_restored=96)
    pace[0] = 0.1
    gate = threading.Event()
    get = remote.get_object
    monkeypatch.setattr(remote, "get_object", lambda *a: (gate.wait(120), get(*a))[1])
    try:
        for ids in PROMPTS[1 : 1 + link._FAILURES]:
            check(model, store, ids, tokens_restored=0)
    finally:
        gate.set()
    stats = store.stats.remote
    assert stats.misses == {link.LATE: link._FAILURES}
    assert stats.waiting_seconds < 9.6


def test_prompts_wait_for_what_is_fetched_before_them(model, machine, pace, monkeypatch):
    """All segments of a slow link arrive in time, although each alone takes a seventh of the time."""
    share(model, machine("a")[0], *PROMPTS)
    store, remote = machine("b")
    lock, get = threading.Lock(), remote.get_object

    def get_slowly(*arguments):
        with lock:
            time.sleep(0.15)  # much longer than what a busy machine adds
            return get(*arguments)

    monkeypatch.setattr(remote, "get_object", get_slowly)
    monkeypatch.setattr(tier, "_LEAST_WAIT", 0.0)
    check(model, store, PROMPTS[0], tokens_restored=96)
    with ThreadPoolExecutor(len(PROMPTS) - 1) as pool:
        list(pool.map(lambda ids: check(model, store, ids, tokens_restored=96), PROMPTS[1:]))
    assert store.stats.remote.hits == len(PROMPTS)


def test_a_later_segment_that_fails_keeps_those_before_it(model, machine, monkeypatch):
    first, remote = machine("a")
    share(model, first, IDS[:, :96], IDS)
    assert len(remote.segments()) == 2
    rows = sorted(first.segments(), key=lambda row: row.position)
    del remote.objects[f"segments/{rows[1].id}.kv"]
    store, _ = machine("b")
    check(model, store, tokens_restored=96)
    assert store.stats.remote.hits == 1
