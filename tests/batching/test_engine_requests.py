"""Requests of continuous batching: KV of the right model, and each one counted, with a reason if nothing is reused."""

from __future__ import annotations

import threading

import pytest
import torch
from families import build, prompt
from paged import alone, arriving, batched, finished, running, settled

from hf_tiered_cache import KVStore, TieredCache, reasons, tiered
from hf_tiered_cache.batching import lookups, tiers
from hf_tiered_cache.batching.engine import Engine

IDS = prompt(70)[0].tolist()
OPTIONS = {"max_new_tokens": 8, "eos_token_id": -1}


@pytest.fixture
def model():
    return build("llama", initializer_range=0.3)


@pytest.fixture
def stored(root, model):
    """Return the folder of a store with the prompt."""
    with KVStore(root) as store:
        store.precompute(model, prompt(70), progress=False)
    return root


def edit(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)


def held_lookups(monkeypatch):
    """Return events: a lookup has read its KV, and it may end."""
    assemble, has_read, may_end = lookups.Lookups._assemble, threading.Event(), threading.Event()

    def hold(*args):
        kv = assemble(*args)
        has_read.set()
        assert may_end.wait(30)
        return kv

    monkeypatch.setattr(lookups.Lookups, "_assemble", hold)
    return has_read, may_end


# --- the right model


def test_paged_attention_that_ignores_the_softcap_shares_no_kv_with_generate(root):
    model = build("gemma2", attn_implementation="eager")
    for tokens_restored in (0, 64):
        with KVStore(root) as store, tiered(model, store) as session:
            batched(model, [IDS])
            assert session.stats.tokens_restored == tokens_restored
    with KVStore(root) as store:
        cache = TieredCache(model, store, record=False)
        model(prompt(70), past_key_values=cache, logits_to_keep=1)
        assert cache.stats.tokens_restored == 0
        store.precompute(model, prompt(70, seed=2), progress=False)
        with tiered(model, store) as session:
            batched(model, [prompt(70, seed=2)[0].tolist()])
            assert session.stats.tokens_restored == 0


def test_generate_during_paged_attention_neither_restores_nor_stores(root):
    """The model then computes no causal mask, or raises."""
    model, ids = build("llama", attn_implementation="eager"), prompt(70)
    with KVStore(root) as store:
        store.precompute(model, ids, progress=False)
        num_segments, cache = store.stats.segments, TieredCache(model, store)
        with running(model):
            if not model.config._attn_implementation.startswith("paged|"):
                pytest.skip("this version of transformers does not switch")
            try:
                for tokens in (ids, prompt(40, seed=3)):
                    cache.reset()
                    model(tokens, past_key_values=cache, logits_to_keep=1)
                    assert cache.stats.reasons == {reasons.PAGED_ATTENTION: 1}
            except ValueError as error:
                assert "paged attention cache" in str(error)
        assert cache.stats.tokens_restored == 0
        store.flush()
        assert store.stats.segments == num_segments


def test_kv_that_was_read_before_the_weights_changed_is_not_restored(stored, model, monkeypatch):
    has_read, may_end = held_lookups(monkeypatch)
    edited = build("llama", initializer_range=0.3)
    edit(edited)
    expected = alone(edited, [IDS])
    with KVStore(stored) as store, tiered(model, store) as session, running(model) as manager:
        name = manager.add_request(IDS, **OPTIONS)
        assert has_read.wait(10)
        edit(model)
        may_end.set()
        assert finished(manager, [name]) == expected
        settled(manager)
        assert session.stats.tokens_restored == 0
        assert session.stats.reasons == {reasons.ENGINE_CHANGED: 1}


def test_an_engine_of_an_earlier_state_of_the_model_says_so(root, model):
    edited = build("llama", initializer_range=0.3)
    edit(edited)
    with KVStore(root) as store:
        store.precompute(edited, prompt(70), progress=False)
        with tiered(model, store) as session, running(model) as manager:
            edit(model)
            arriving(manager, [IDS])
        assert session.stats.reasons == {reasons.ENGINE_CHANGED: 1}


# --- counted


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_request_of_one_token_is_counted(store, model, is_edited):
    with tiered(model, store, record=is_edited) as session, running(model) as manager:
        if is_edited:
            edit(model)
        finished(manager, [manager.add_request(IDS, max_new_tokens=1, eos_token_id=-1)])
    assert (session.stats.requests, session.stats.tokens_computed) == (1, 70)
    assert session.stats.reasons == {reasons.NOTHING: 1}


@pytest.mark.parametrize("part", ["_look_up", "matched", "step", "between_steps"])
def test_requests_are_counted_after_a_fault_of_this_library(stored, model, monkeypatch, part):
    monkeypatch.setattr(tiers.PagedTiers, part, lambda *args: 1 / 0)
    with KVStore(stored) as store, tiered(model, store) as session:
        with running(model) as manager:
            for count in (1, 2):
                arriving(manager, [IDS])
                assert session.stats.requests == count
        assert session.stats.reasons == {reasons.ENGINE_FAILED: 2 if part != "step" else 1}


@pytest.mark.parametrize(
    ("owner", "part", "reason"),
    [
        (Engine, "write", reasons.NOT_WRITTEN),
        (lookups.Lookups, "_assemble", reasons.LOOKUP_FAILED),
        (tiers.PagedTiers, "_place", reasons.NOT_IN_TIME),
    ],
)
def test_a_prompt_that_is_not_restored_has_a_reason(stored, model, monkeypatch, owner, part, reason):
    expected = alone(model, [IDS])
    monkeypatch.setattr(owner, part, (lambda *args: 1 / 0) if reason != reasons.NOT_IN_TIME else lambda *args: False)
    with KVStore(stored) as store, tiered(model, store) as session:
        assert batched(model, [IDS]) == expected
        assert session.stats.tokens_restored == 0
        assert session.stats.reasons == {reason: 1}


def test_shared_pages_are_counted_before_the_answer(store, model, monkeypatch):
    """A server reads the figures of a request when its answer is there."""
    token_counts, step = [], tiers.PagedTiers.step
    with tiered(model, store) as session, running(model) as manager:
        arriving(manager, [IDS])
        noting = lambda self, *args: (token_counts.append(session.stats.details.tokens_kept), step(self, *args))  # noqa: E731
        monkeypatch.setattr(tiers.PagedTiers, "step", noting)
        arriving(manager, [IDS])
        settled(manager)
        assert token_counts[0] == session.stats.details.tokens_kept == 64


def test_a_request_that_followed_another_one_keeps_its_deadline(stored, model, monkeypatch):
    has_read, may_end = held_lookups(monkeypatch)
    deadlines, look_up = {}, tiers.PagedTiers._look_up

    def noting(self, request, **options):
        look_up(self, request, **options)
        deadlines.setdefault(request.id, []).append(request.deadline)

    monkeypatch.setattr(tiers.PagedTiers, "_look_up", noting)
    with KVStore(stored) as store, tiered(model, store), running(model) as manager:
        first = manager.add_request(IDS, **OPTIONS)
        assert has_read.wait(10)
        second = manager.add_request(IDS, **OPTIONS)
        manager.cancel_request(first)
        may_end.set()
        finished(manager, [second])
    assert len(deadlines[second]) == 2
    assert len(set(deadlines[second])) == 1
