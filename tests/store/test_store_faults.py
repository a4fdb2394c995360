"""Faults drawn at random, in every call that the store makes: the right tokens, nothing lost, the quota kept."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest
import torch
from drawn_faults import Faults, du
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import StoreError

QUOTA = 1_400_000  # for four of the prompts below
PROMPTS = [prompt(100, seed=seed) for seed in range(8)]
STORED = 3  # of the prompts, before anything fails
GREEDY = {"do_sample": False, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def expected(model):
    return [model.generate(ids, **GREEDY) for ids in PROMPTS]


@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.02, 0.1, 0.4, 1.0]), quota=st.sampled_from([None, QUOTA]))
def test_whatever_fails_tokens_are_right_and_what_was_whole_stays(
    model, expected, tmp_path_factory, seed, share, quota
):
    root = tmp_path_factory.mktemp("faults") / "store"
    limits = {"disk_quota": quota, "free_space_floor": 0}
    with KVStore(root, **limits) as store:
        store.precompute(model, [ids[0] for ids in PROMPTS[:STORED]], progress=False)
        segment_ids = {row.id for row in store.segments()}
    faults = Faults(root, seed, share)
    with faults.under_way():
        store = KVStore(root, host_memory=0, **limits)
        for number in faults.random.choices(range(len(PROMPTS)), k=6):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(PROMPTS[number], past_key_values=cache, **GREEDY), expected[number])
            with faults.rest():
                assert quota is None or du(root) <= quota
                faults.lose_catalogue()
        with suppress(StoreError):  # what could not be made durable is said
            store.flush()
        evicted = store.stats.evicted_segments
        store.close()
    with KVStore(root, **limits) as store:
        assert store.verify().ok
        remaining_ids = {row.id for row in store.segments()}
        assert remaining_ids == {path.stem for path in (root / "segments").iterdir()}
        assert len(segment_ids - remaining_ids) <= evicted
        for number in range(STORED if segment_ids <= remaining_ids else 0):
            cache = TieredCache(model, store, record=False)
            assert torch.equal(model.generate(PROMPTS[number], past_key_values=cache, **GREEDY), expected[number])
            assert cache.stats.tokens_restored == 96
        store.precompute(model, prompt(100, seed=99), progress=False)  # and goes on
        assert quota is None or du(root) <= quota
        assert not list((root / "tmp").iterdir())


def test_a_file_system_without_locks_is_named_as_the_reason(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with KVStore(tmp_path) as store:
        store.precompute(build("llama"), prompt(40)[0], progress=False)
        assert store.stats.segments == 0 and store.stats.dropped_writes == 1
    assert "its file system cannot lock files (Operation not supported); choose a folder of another one" in caplog.text
