"""Continuous batching when the store fails: the right tokens, no page lost, and no request that waits for ever."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from families import build_deep as build
from families import prompt
from paged import alone, arriving, batched, finished, running, settled

from hf_tiered_cache import KVStore, reasons, tiered
from hf_tiered_cache.batching import lookups, requests, tiers
from hf_tiered_cache.batching.lookups import LayerRotations
from hf_tiered_cache.errors import EvictedError, RestoreError
from hf_tiered_cache.patches.attach import attachment_of
from hf_tiered_cache.store.engines import PosixEngine

OPTIONS = {"max_new_tokens": 8, "eos_token_id": -1}


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def prompts():
    shared_ids = prompt(64, seed=1)[0].tolist()
    return [shared_ids + prompt(20 + at, seed=10 + at)[0].tolist() for at in range(6)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return alone(model, prompts)


@pytest.fixture
def stored(root, model, prompts, expected):
    """Return the folder of a store with all prompts."""
    with KVStore(root) as store, tiered(model, store):
        assert batched(model, prompts) == expected
    return root


def _failing(*args):
    future = Future()
    future.set_exception(OSError(errno.EIO, "Input/output error"))
    return future


def test_a_failing_disk_gives_the_same_tokens(stored, model, prompts, expected, monkeypatch):
    with KVStore(stored, host_memory=0, engine="posix") as store, tiered(model, store) as session:
        monkeypatch.setattr(PosixEngine, "submit", _failing)
        with running(model) as manager:
            assert arriving(manager, prompts) == expected
            assert settled(manager) == 0
        assert session.stats.tokens_restored == 0
        assert session.stats.details.read_errors > 0


def test_tokens_that_have_left_memory_are_looked_up_again_and_are_no_damage(
    stored, model, prompts, expected, monkeypatch
):
    """Memory may evict tokens that no file contains, between a plan and its fetch."""
    assemble, evicted = lookups.Lookups._assemble, []

    def evict(self, request, plan, *args):
        if not evicted:
            evicted.append(plan.readers[0].id)
            raise RestoreError(evicted[0], "evicted") from EvictedError(evicted[0])
        return assemble(self, request, plan, *args)

    monkeypatch.setattr(lookups.Lookups, "_assemble", evict)
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        assert arriving(manager, prompts) == expected
        assert session.stats.tokens_restored > 0
        assert session.stats.details.recomputed == 0
        assert reasons.DAMAGED not in session.stats.reasons
        assert evicted[0] in {segment.id for segment in store.segments()}


def test_damaged_blocks_are_computed(stored, model, prompts, expected):
    chance = random.Random(0)
    for path in stored.rglob("*"):
        if path.is_file() and path.stat().st_size > 20_000 and ".sqlite" not in path.name:
            data = bytearray(path.read_bytes())
            for _ in range(20):
                data[chance.randrange(len(data) // 2, len(data))] ^= 0xFF
            path.chmod(0o600)
            path.write_bytes(data)
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        assert arriving(manager, prompts) == expected
        assert settled(manager) == 0
        assert session.stats.details.verification_failures > 0
        assert session.stats.reasons.get(reasons.DAMAGED, 0) > 0


def test_a_full_store_gives_the_same_tokens(root, model, prompts, expected):
    with KVStore(root, disk_quota=100_000) as store, tiered(model, store), running(model) as manager:
        for _ in range(2):
            assert arriving(manager, prompts) == expected
        assert settled(manager) == 0
        store.flush()
        assert store.stats.dropped_writes > 0


def test_a_closed_store_gives_the_same_tokens(stored, model, prompts, expected):
    store = KVStore(stored)
    with tiered(model, store), running(model) as manager:
        assert arriving(manager, prompts[:2]) == expected[:2]
        store.close()
        assert arriving(manager, prompts) == expected
        assert settled(manager) == 0


class Held:
    """Restores that wait until they are released."""

    def __init__(self, monkeypatch):
        self.began, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        assemble = lookups.Lookups._assemble

        def wait(*args):
            self.began.set()
            assert self.go_on.wait(30)
            try:
                return assemble(*args)
            finally:
                self.ended.set()

        monkeypatch.setattr(lookups.Lookups, "_assemble", wait)


def test_a_request_that_is_cancelled_during_its_restore_leaves_nothing(stored, model, prompts, expected, monkeypatch):
    gate, other_prompt = Held(monkeypatch), prompt(30, seed=99)[0].tolist()
    answer = alone(model, [other_prompt])
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        first = manager.add_request(prompts[0], **OPTIONS)
        assert gate.began.wait(10)
        second = manager.add_request(prompts[1], **OPTIONS)  # waits for the first one's restore
        manager.cancel_request(first)
        third = manager.add_request(other_prompt, **OPTIONS)
        assert finished(manager, [third]) == answer  # others do not wait
        gate.go_on.set()
        assert finished(manager, [second]) == expected[1:2]
        assert settled(manager) == 0
        assert session.stats.tokens_restored == len(prompts[1]) // 16 * 16
    assert session.stats.requests == 3 and reasons.NOT_IN_TIME not in session.stats.reasons


def test_a_request_whose_lookup_ends_just_after_it_is_stored(store, model, prompts, expected, monkeypatch):
    gate, look_up = threading.Event(), lookups.Lookups._look_up
    monkeypatch.setattr(requests, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(lookups.Lookups, "_look_up", lambda *args: gate.wait(30) and look_up(*args))

    def is_looked_up(request):
        is_done = request.lookup.done()
        if request.gone and not is_done:  # its lookup ends before the caller has seen the result
            gate.set()
            request.lookup.result(30)
        return is_done

    monkeypatch.setattr(requests.BatchedRequest, "is_looked_up", property(is_looked_up))
    with tiered(model, store), running(model) as manager:
        assert arriving(manager, prompts[:1]) == expected[:1]
        assert settled(manager) == 0
    store.flush()
    assert sum(row.tokens for row in store.segments()) >= len(prompts[0]) // 16 * 16


def test_a_lookup_that_hangs_keeps_no_process_alive(stored, model, prompts, expected, monkeypatch):
    gate = Held(monkeypatch)
    with KVStore(stored) as store, tiered(model, store), running(model) as manager:
        name = manager.add_request(prompts[0], **OPTIONS)
        assert gate.began.wait(10)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("hf-tiered-batching")]
        assert threads and all(thread.daemon for thread in threads)
        gate.go_on.set()
        assert finished(manager, [name]) == expected[:1]


def test_lookup_threads_end_with_their_manager(stored, model, prompts, expected):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("hf-tiered-batching")]

    with KVStore(stored) as store, tiered(model, store):
        assert batched(model, prompts) == expected
        until = time.monotonic() + 10
        while threads() and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert not threads()


def test_other_requests_go_on_while_one_is_restored(stored, model, prompts, expected, monkeypatch):
    gate, other_prompts = Held(monkeypatch), [prompt(30, seed=90 + at)[0].tolist() for at in range(3)]
    answers = alone(model, other_prompts)
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        name = manager.add_request(prompts[0], **OPTIONS)
        assert gate.began.wait(10)
        assert arriving(manager, other_prompts) == answers
        assert session.stats.tokens_restored == 0
        gate.go_on.set()
        assert finished(manager, [name]) == expected[:1]
        assert session.stats.tokens_restored > 0


def test_no_request_waits_longer_than_its_patience(stored, model, prompts, expected, monkeypatch):
    gate = Held(monkeypatch)
    for module in (requests, lookups):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.3)
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        began = time.monotonic()
        assert arriving(manager, prompts) == expected
        took = time.monotonic() - began
        assert took < 5
        gate.go_on.set()
        assert settled(manager) == 0
        assert session.stats.tokens_restored == 0
        assert set(session.stats.reasons) == {reasons.SLOW_LOOKUP}


@pytest.mark.parametrize("part", ["_has_room", "_look_up", "_note", "_place", "computed", "between_steps", "step"])
def test_a_fault_of_this_library_does_not_stop_the_engine(stored, model, prompts, expected, monkeypatch, caplog, part):
    monkeypatch.setattr(tiers.PagedTiers, part, lambda *args: 1 / 0)
    with KVStore(stored) as store, tiered(model, store), running(model) as manager:
        assert arriving(manager, prompts) == expected
        assert settled(manager) == 0
    assert "goes on without the store" in caplog.text


def test_a_fault_in_a_lookup_is_logged_and_its_prompt_is_computed(
    stored, model, prompts, expected, monkeypatch, caplog
):
    monkeypatch.setattr(lookups.Lookups, "_assemble", lambda *args: 1 / 0)
    with KVStore(stored) as store, tiered(model, store), running(model) as manager:
        assert arriving(manager, prompts) == expected
        assert settled(manager) == 0
    assert "ZeroDivisionError" in caplog.text


def test_threads_that_rotate_prompts_of_different_lengths_get_tables_that_are_long_enough(model, store):
    """Another thread may exchange the tables at any moment for shorter ones."""

    class Exchanged(dict):
        def __setitem__(self, key, tables):
            super().__setitem__(key, tuple(table[:, :16] for table in tables))

    with tiered(model, store):
        rotations = LayerRotations(attachment_of(model), "", lossless=True)
    _, like = rotations.layers[0]
    keys = torch.rand(1, like.keys.shape[1], 64, like.keys.shape[3])
    rotated, raced = keys.clone(), keys.clone()
    rotations.tap.rotate_(like, rotated, 0)
    rotations.tap._at = Exchanged()
    rotations.tap.rotate_(like, raced, 0)
    assert torch.equal(raced, rotated)


def test_kv_that_cannot_be_written_into_pages_is_computed(stored, model, prompts, expected, monkeypatch):
    from hf_tiered_cache.batching.engine import Engine

    monkeypatch.setattr(Engine, "write", lambda *args: 1 / 0)
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        assert arriving(manager, prompts) == expected
        assert settled(manager) == 0
        assert session.stats.tokens_restored == 0
