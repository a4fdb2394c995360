"""Tokens laid out by importance (IMPRESS, Section 4.4.1): another order on disk, the same KV for whoever reads it."""

from __future__ import annotations

import logging
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from segments import LAYOUT, hashes, open_store, read_back, segment
from test_relayout import geometries, tensors
from test_selective import ask, fill, question, same

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import FormatError
from hf_tiered_cache.forward_pass import RestoringForward
from hf_tiered_cache.geometry import ALIGNMENT, Geometry, KVLayout, LayerKV, SegmentShape, TokenOrder
from hf_tiered_cache.methods import METHODS, Impress
from hf_tiered_cache.restore.fetch import FetchUnit
from hf_tiered_cache.store.relayout import relayout_segment
from hf_tiered_cache.tiers.importance import TokenImportance

LAYERS = len(LAYOUT.layers)
METHOD = Impress(budget=0.25, probe_heads=2, chunk_tokens=16, reorder=False)


def random_order(layers, tokens, seed=0):
    return TokenOrder.by_importance(np.random.default_rng(seed).random((layers, tokens)))


def shuffle(store, seed=0):
    """Lay every segment of `store` out in a random order."""
    for row in store.segments():
        reader = store._storage.disk.reader(row.id)
        order = random_order(len(reader.shape.layout.layers), reader.shape.tokens, seed)
        assert store._storage.rewriter._replace(row.id, reader.shape.geometry, order)
        assert store._storage.disk.reader(row.id) is None
        assert not store._storage.disk.path(row.id).exists()


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


# --- order and back


def test_the_most_important_come_first_and_equals_as_they_were():
    order = TokenOrder.by_importance(np.array([[0.0, 5, 1, 5], [0, 0, 0, 0]]))
    assert order.places.tolist() == [[3, 0, 2, 1], [0, 1, 2, 3]]
    with pytest.raises(FormatError, match="permutation"):
        TokenOrder(np.array([[0, 0, 1]], np.uint32))


@given(geometries.filter(lambda g: g.index is None), geometries, st.integers(1, 7), st.integers(0, 99))
def test_an_order_and_back_is_the_identity(tmp_path_factory, before, after, count, seed):
    store = open_store(tmp_path_factory.mktemp("store"))
    header, chain, block_groups = segment(hashes(count), geometry=before)
    assert store.publish(header, chain, block_groups)
    plain = store.reader(header.id)
    expected = tensors(plain, read_back(store, plain.id))
    last = plain
    scored = replace(random_order(LAYERS, 16 * count, seed + 1), importance=np.arange(16 * count, dtype=np.float32))
    for order in (random_order(LAYERS, 16 * count, seed), scored, None):
        new_header, new_hashes, blocks = relayout_segment(last, after, order)
        assert store.publish(new_header, new_hashes, blocks)
        last = store.reader(new_header.id)
        assert (last.shape.order is None) == (order is None)
        if order is not None:
            assert np.array_equal(last.shape.order.places, order.places)
            assert np.array_equal(last.shape.order.importance, order.importance)
        version = struct.unpack_from("<I", store.path(last.id).read_bytes(), 8)[0]
        assert version == 3 if order is scored else version < 3  # so that older programs read what they can
        found = tensors(last, read_back(store, last.id))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@given(geometries, st.integers(1, 60), st.integers(0, 99), st.data())
def test_tokens_are_where_the_shape_says(geometry, tokens, seed, data):
    layout = KVLayout((LayerKV(2, 4, 2, 4), LayerKV(2, 4, 2, 4, window=8), None, LayerKV(2, 4, 2, 4)), torch.float32)
    shape = SegmentShape(layout, geometry, tokens, random_order(4, tokens, seed))
    wanted = np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))))
    for block_group in shape.block_groups:
        places = shape.places(block_group, np.arange(tokens))
        assert sorted(places.tolist()) == list(range(tokens))
        assert shape.ordered(block_group) == (not block_group.window and not block_group.identifies)
        chunks = shape.chunks_of(block_group, wanted)
        assert set(chunks.tolist()) == {int(places[token]) // geometry.chunk_tokens for token in wanted}
        for chunk in range(shape.chunks):
            inside = [token for token in range(tokens) if places[token] // geometry.chunk_tokens == chunk]
            assert shape.first_token(block_group, chunk) == min(inside)
        some = wanted[np.isin(places[wanted] // geometry.chunk_tokens, chunks[:1])]
        unit = FetchUnit(SimpleNamespace(shape=shape), block_group)
        unit.use(block_group.layers, [wanted])
        assert unit.bytes_used(chunks[:1]) == len(some) * block_group.payload_bytes // geometry.chunk_tokens


# --- whoever reads it


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "opt", "phi3", "deepseek_v3"])
@pytest.mark.parametrize("cut", [Geometry(), METHOD.geometry, Geometry(24, 2, 1)], ids=str)
def test_the_exact_method_reads_any_order(family, cut, tmp_path):
    model, ids = build(family), prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, progress=False)
        store.relayout(cut, progress=False)
        asked = [question(ids[:, :tokens]) for tokens in (200, 100)]  # all of the segment, and a part of it
        before = [ask(model, store, whole, None)[0] for whole in asked]
        shuffle(store)
        for whole, expected, tokens in zip(asked, before, (192, 96), strict=True):
            found, cache = ask(model, store, whole, None)
            same(found, expected)
            assert cache.stats.tokens_restored == tokens
            assert cache.stats.verification_failures == 0


def test_a_batch_and_a_second_turn_over_a_shuffled_store(model, tmp_path):
    ids = prompt(200)
    rows = torch.cat([question(ids), torch.cat([ids[:, :64], prompt(160, seed=3)], dim=1)])
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, ids, progress=False)
        before, _ = ask(model, store, rows, None)
        shuffle(store)
        found, cache = ask(model, store, rows, None)
        same(found, before)
        turn = torch.cat([found.sequences, prompt(20, seed=8).expand(2, -1)], dim=1)
        again = TieredCache(model, store)
        assert torch.equal(
            model.generate(turn, past_key_values=cache, max_new_tokens=4, do_sample=False),
            model.generate(turn, past_key_values=again, max_new_tokens=4, do_sample=False),
        )


@pytest.mark.parametrize("name", ["attention_store", "contiguous_kv", "h2o", "impress"])
def test_every_method_chooses_the_same_from_any_order(name, model, tmp_path):
    kind = METHODS[name]
    method = kind() if name == "attention_store" else kind(budget=0.25)
    method = replace(method, reorder=False) if name == "impress" else method
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        before, _ = ask(model, store, question(ids), method)
        shuffle(store)
        after, cache = ask(model, store, question(ids), method)
        same(after, before)
        assert cache.stats.bytes_read > 0


# --- by importance, in the background


def test_impress_lays_out_by_importance_and_then_reads_less(model, tmp_path):
    ids, method = prompt(400), replace(METHOD, budget=0.1, alpha=9, reorder=True)  # heads agree
    questions = [question(ids, seed=seed % 2) for seed in range(12)]  # two questions, asked again and again
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        (plain,) = store.segments()
        store.pin([plain.id])
        asked = []
        for whole in questions[:8]:
            asked.append(ask(model, store, whole, method))
            store.flush()  # waits for what is done in the background
        (row,) = store.segments()
        assert row.id != plain.id
        assert store._storage.disk.pinned() == {row.id}
        assert not store.verify().bad
        shape = store._storage.disk.reader(row.id).shape
        assert shape.order is not None
        assert shape.geometry == method.geometry
        again = [ask(model, store, whole, method) for whole in questions[8:]]
        for (before, cold), (after, ordered) in zip(asked[:4], again, strict=True):
            same(after, before)
            assert ordered.stats.bytes_used == cold.stats.bytes_used
            assert ordered.stats.bytes_read < 0.8 * cold.stats.bytes_read
            assert ordered.stats.read_amplification < cold.stats.read_amplification


def test_without_reorder_nothing_moves(model, tmp_path):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        before = [row.id for row in store.segments()]
        for _ in range(9):
            ask(model, store, question(ids), METHOD)
        store.flush()
        assert [row.id for row in store.segments()] == before
        assert store.reorder(progress=False) == 0  # nothing is known of its tokens


def test_a_request_under_way_reads_the_old_segment_to_its_end(model, tmp_path, monkeypatch):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        expected, _ = ask(model, store, question(ids), METHOD)
        swapped = []

        def take(self, index, *arguments, real=RestoringForward.append):
            if index == 2 and not swapped:
                swapped.append(True)
                shuffle(store)
            return real(self, index, *arguments)

        monkeypatch.setattr(RestoringForward, "append", take)
        found, cache = ask(model, store, question(ids), METHOD)
        assert swapped
        same(found, expected)
        assert cache.stats.recomputed == 0


def test_a_store_closed_under_a_request_does_not_fail_it(model, tmp_path):
    ids, method = prompt(200), replace(METHOD, reorder=True)
    store = KVStore(tmp_path, engine="posix")
    fill(store, model, ids, method)
    for _ in range(3):
        ask(model, store, question(ids), method)
    handle = model.model.norm.register_forward_hook(lambda *_: store.close())
    try:
        ask(model, store, question(ids), method)  # the fourth: it would be laid out anew now
    finally:
        handle.remove()
    with KVStore(tmp_path, engine="posix") as again:
        assert not again.verify().bad


def test_what_was_replaced_leaves_the_tiers(model, tmp_path):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        ask(model, store, question(ids), METHOD)
        (row,) = store.segments()
        assert any(owner[0] == row.id for owner in store._storage.residency.host._owners)
        shuffle(store)
        assert not any(owner[0] == row.id for owner in store._storage.residency.host._owners)
        assert not store._storage.residency.scores.of((row.id, 0), np.arange(3)).any()


def test_due_after_4_8_16_prompts():
    importance = TokenImportance()
    assert [n for n in range(1, 70) if importance.prompt_done("a")] == [4, 8, 16, 32, 64]
    assert importance.order("a") is None
    importance.note("a", (1, 4), 0, slice(1, 3), np.array([0.25, 0.5]))
    assert importance.order("a").places.tolist() == [[2, 1, 0, 3]]
    importance.rename("a", "b")
    assert importance.order("a") is None
    assert importance.order("b").places.tolist() == [[2, 1, 0, 3]]


# --- faults


@pytest.mark.parametrize("region", ["order", "block"])
def test_damage_in_an_ordered_segment_is_a_miss(model, tmp_path, region):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        expected, _ = ask(model, store, question(ids), None)
        shuffle(store)
        (row,) = store.segments()
        reader, path = store._storage.disk.reader(row.id), store._storage.disk.path(row.id)
    chunk, block_group = 5, reader.shape.block_groups[0]
    data = bytearray(path.read_bytes())
    blocks = reader.header.blocks.offset + chunk * block_group.block_bytes
    data[reader.header.order.offset + 8 if region == "order" else blocks] ^= 1
    path.write_bytes(data)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        found, cache = ask(model, store, question(ids), None)
        assert torch.equal(found.sequences, expected.sequences)
        assert store.stats.verification_failures + store.stats.damaged_files > 0
        whole = 0 if region == "order" else reader.shape.first_token(block_group, chunk) // 16 * 16
        assert cache.stats.tokens_restored == whole


def test_a_version_that_knows_no_order_would_leave_such_a_file_alone(tmp_path):
    store = open_store(tmp_path)
    header, chain, block_groups = segment(hashes(3))
    store.publish(header, chain, block_groups)
    new, new_hashes, blocks = relayout_segment(store.reader(header.id), Geometry(), random_order(LAYERS, 48))
    store.publish(new, new_hashes, blocks)
    versions = {i: int.from_bytes(store.path(i).read_bytes()[8:12], "little") for i in (header.id, new.id)}
    assert versions == {header.id: 1, new.id: 2}
    assert store.reader(new.id).header.order.offset % ALIGNMENT == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("bug")], ids=["disk", "bug"])
def test_a_reordering_that_fails_leaves_the_segment_as_it_is(model, tmp_path, monkeypatch, caplog, error):
    ids, method = prompt(200), replace(METHOD, reorder=True)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        (row,) = store.segments()

        def fail(*_):
            raise error

        monkeypatch.setattr("hf_tiered_cache.store.folder.write_all", fail)
        with caplog.at_level(logging.WARNING):
            for _ in range(8):
                ask(model, store, question(ids), method)
            store.flush()
        assert caplog.records
        assert store._storage.disk.path(row.id).exists()
        assert list(store._storage.disk.backend.tmp_dir.iterdir()) == []
