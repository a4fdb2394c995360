"""Tokens laid out by importance (IMPRESS, Section 4.4.1): another order on disk, the same KV for whoever reads it."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import torch
from families import build, build_deep, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_same, kv_of
from segments import LAYOUT, hashes, open_store, read_back, segment
from test_relayout import geometries, tensors
from test_selective import ask, fill, question
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.forward_pass import RestoringForward
from hf_tiered_cache.errors import FormatError
from hf_tiered_cache.methods import METHODS, ContiguousKV, Impress
from hf_tiered_cache.restore.fetch import FetchUnit
from hf_tiered_cache.selection.selectors import Selection, TopChunks
from hf_tiered_cache.store.format import segment_id
from hf_tiered_cache.store.geometry import Geometry, KVLayout, LayerKV, block_groups
from hf_tiered_cache.store.relayout import join_segments
from hf_tiered_cache.store.shape import NOT_HELD, SegmentShape, TokenTables
from hf_tiered_cache.tiers.scores import TokenImportance

FAMILY = "qwen2"

LAYERS = len(LAYOUT.layers)
METHOD = Impress(budget=0.25, probe_heads=2, chunk_tokens=16, reorder=False)


def random_tables(groups, tokens, seed=0, apart=False):
    """Draw random orders of all tokens: by layer, or another one in every KV cache group."""
    random = np.random.default_rng(seed)
    if not apart:
        return TokenTables.by_importance(
            random.random((1 + max(map(max, (g.layers for g in groups))), 1, tokens)), groups
        )
    slots = random.permuted(np.tile(np.arange(tokens, dtype=np.uint32), (len(groups), 1)), axis=1)
    return TokenTables(slots, np.arange(len(groups), dtype=np.uint32))


def shuffle(store, seed=0, apart=False):
    """Lay every segment of `store` out in a random order."""
    for row in store.segments():
        reader = store._storage.disk.reader(row.id)
        tables = random_tables(reader.shape.block_groups, reader.shape.tokens, seed, apart)
        assert store._storage.rewriter._replace(row.id, reader.shape.geometry, tables)
        assert store._storage.disk.reader(row.id) is None
        assert not store._storage.disk.path(row.id).exists()


# --- order and back


def test_the_most_important_come_first_and_equals_as_they_were():
    groups = block_groups(KVLayout((LayerKV(1, 4, 1, 4),) * 2, torch.float32), Geometry(16, 1))
    tables = TokenTables.by_importance(np.array([[[0.0, 5, 1, 5]], [[0, 0, 0, 0]]]), groups)
    assert tables.slot_of_token[tables.of_group].tolist() == [[3, 0, 2, 1], [0, 1, 2, 3]]
    alike = TokenTables.by_importance(np.array([[[1.0, 3, 3, 0]]]), groups)
    assert alike.slot_of_token.tolist() == [[2, 0, 1, 3]] and alike.of_group.tolist() == [0, 0]
    for wrong in ([0, 0, 1], [1, 2, 3], [NOT_HELD, 0, 2]):
        with pytest.raises(FormatError, match="block offsets"):
            TokenTables(np.array([wrong], np.uint32), np.zeros(2, np.uint32))
    apart = block_groups(KVLayout((LayerKV(2, 4, 2, 4),), torch.float32), Geometry(16, 1, 1))
    tables = TokenTables.by_importance(np.array([[[0.0, 5, 1, 5], [4, 3, 2, 1]]]), apart)
    assert tables.slot_of_token[tables.of_group].tolist() == [[3, 0, 2, 1], [0, 1, 2, 3]]
    together = block_groups(KVLayout((LayerKV(2, 4, 2, 4),), torch.float32), Geometry(16, 1))
    tables = TokenTables.by_importance(np.array([[[0.0, 5, 1, 5], [4, 3, 2, 1]]]), together)
    assert tables.slot_of_token.tolist() == [[2, 0, 3, 1]]  # 4, 8, 3, 6
    with pytest.raises(FormatError, match="does not exist"):
        TokenTables(np.array([[0, 1]], np.uint32), np.array([0, 1], np.uint32))


@given(geometries.filter(lambda g: g.index is None), geometries, st.integers(1, 7), st.integers(0, 99))
def test_an_order_and_back_is_the_identity(tmp_path_factory, before, after, count, seed):
    groups = block_groups(LAYOUT, after)
    store = open_store(tmp_path_factory.mktemp("store"))
    header, chain, blocks = segment(hashes(count), geometry=before)
    assert store.publish(header, chain, blocks)
    plain = store.reader(header.id)
    expected = tensors(plain, read_back(store, plain.id))
    last = plain
    by_layer, apart = (random_tables(groups, 16 * count, seed, is_apart) for is_apart in (False, True))
    for order in (by_layer, apart, None):
        new_header, new_hashes, blocks = join_segments([last], after, order)
        assert store.publish(new_header, new_hashes, blocks)
        last = store.reader(new_header.id)
        assert (last.shape.tables is None) == (order is None)
        if order is not None:
            assert last.shape.tables.same(order)
            assert last.id == segment_id(header.parent, chain[-1], last.shape, header.provenance)
        content = tensors(last, read_back(store, last.id))
        assert all(torch.equal(content[name], expected[name]) for name in expected)


@given(geometries, st.integers(1, 60), st.integers(0, 99), st.booleans(), st.data())
def test_tokens_are_where_the_shape_says(geometry, tokens, seed, apart, data):
    layout = KVLayout((LayerKV(2, 4, 2, 4), LayerKV(2, 4, 2, 4, window=8), None, LayerKV(2, 4, 2, 4)), torch.float32)
    shape = SegmentShape(layout, geometry, tokens, random_tables(block_groups(layout, geometry), tokens, seed, apart))
    requested_tokens = np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))))
    for block_group in shape.block_groups:
        places = shape.slot_of_token(block_group, np.arange(tokens))
        assert sorted(places.tolist()) == list(range(tokens))
        assert shape.in_order(block_group) == (not apart and bool(block_group.window or block_group.identifies))
        chunks = shape.chunks_of(block_group, requested_tokens)
        assert set(chunks.tolist()) == {int(places[token]) // geometry.chunk_tokens for token in requested_tokens}
        for chunk in range(shape.chunks_in(block_group)):
            inside = [token for token in range(tokens) if places[token] // geometry.chunk_tokens == chunk]
            assert shape.first_token(block_group, chunk) == min(inside)
        first_tokens = requested_tokens[np.isin(places[requested_tokens] // geometry.chunk_tokens, chunks[:1])]
        unit = FetchUnit(SimpleNamespace(shape=shape), block_group)
        unit.use(block_group.layers, [requested_tokens])
        assert unit.bytes_used(chunks[:1]) == len(first_tokens) * block_group.payload_bytes // geometry.chunk_tokens


# --- whoever reads it


@pytest.mark.parametrize(
    ("family", "geometry"),
    pairs(["qwen2", "gemma3", "opt", "phi3", "deepseek_v3"], [Geometry(), METHOD.geometry, Geometry(24, 2, 1)]),
    ids=str,
)
@pytest.mark.parametrize("apart", [False, True], ids=["by layer", "by group"])
@pytest.mark.thin(2)
def test_the_exact_method_reads_any_order(family, geometry, apart, tmp_path):
    model, ids = build(family), prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, progress=False)
        store.relayout(geometry, progress=False)
        questions = [question(ids[:, :tokens]) for tokens in (200, 100)]  # all of the segment, and a part of it
        before = [ask(model, store, request_ids, None)[0] for request_ids in questions]
        shuffle(store, apart=apart)
        for request_ids, expected, tokens in zip(questions, before, (192, 96), strict=True):
            output, cache = ask(model, store, request_ids, None)
            assert_same(output, expected)
            assert cache.stats.tokens_restored == tokens
            assert cache.stats.details.verification_failures == 0


def test_a_batch_and_a_second_turn_over_a_shuffled_store(model, tmp_path):
    ids = prompt(200)
    rows = torch.cat([question(ids), torch.cat([ids[:, :64], prompt(160, seed=3)], dim=1)])
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, ids, progress=False)
        before, _ = ask(model, store, rows, None)
        shuffle(store)
        output, cache = ask(model, store, rows, None)
        assert_same(output, before)
        turn = torch.cat([output.sequences, prompt(20, seed=8).expand(2, -1)], dim=1)
        second_cache = TieredCache(model, store)
        assert torch.equal(
            model.generate(turn, past_key_values=cache, max_new_tokens=4, do_sample=False),
            model.generate(turn, past_key_values=second_cache, max_new_tokens=4, do_sample=False),
        )


@pytest.mark.parametrize("apart", [False, True], ids=["by layer", "by group"])
@pytest.mark.parametrize("name", ["attention_store", "h2o", "impress"])
@pytest.mark.thin(2)
def test_every_method_chooses_the_same_from_any_order(name, apart, model, tmp_path):
    kind = METHODS[name]
    method = kind() if name == "attention_store" else kind(budget=0.25)
    method = replace(method, reorder=False) if name == "impress" else method
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        before, _ = ask(model, store, question(ids), method)
        shuffle(store, apart=apart)
        after, cache = ask(model, store, question(ids), method)
        assert_same(after, before)
        assert cache.stats.bytes_read > 0


# --- by importance, in the background


def test_impress_lays_out_by_importance_and_then_reads_less(tmp_path):
    model = build_deep("qwen2")
    ids, method = prompt(400), replace(METHOD, budget=0.1, alpha=9, reorder=True)  # heads agree
    questions = [question(ids, seed=seed % 2) for seed in range(12)]  # two questions, asked again and again
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        (plain,) = store.segments()
        store.pin([plain.id])
        results = []
        for request_ids in questions[:8]:
            results.append(ask(model, store, request_ids, method))
            store.flush()  # waits for what is done in the background
        (row,) = store.segments()
        assert row.id != plain.id
        assert store._storage.disk.backend.pinned() == {row.id}
        assert not store.verify().bad
        shape = store._storage.disk.reader(row.id).shape
        assert shape.tables is not None
        assert shape.geometry == method.geometry
        later_answers = [ask(model, store, request_ids, method) for request_ids in questions[8:]]
        for (before, cold), (after, ordered) in zip(results[:4], later_answers, strict=True):
            assert_same(after, before)
            assert ordered.stats.details.bytes_used == cold.stats.details.bytes_used
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


def test_a_request_under_way_reads_the_old_segment_to_its_end(tmp_path, monkeypatch):
    model = build_deep("qwen2")
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
        output, cache = ask(model, store, question(ids), METHOD)
        assert swapped
        assert_same(output, expected)
        assert cache.stats.details.recomputed == 0


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
    with KVStore(tmp_path, engine="posix") as second_store:
        assert not second_store.verify().bad


def test_what_was_replaced_leaves_the_tiers(model, tmp_path):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        ask(model, store, question(ids), METHOD)
        (row,) = store.segments()
        assert row.id in store._storage.residency.host.segments()
        shuffle(store)
        assert row.id not in store._storage.residency.host.segments()
        assert not store._storage.residency.scores.of((row.id, 0), np.arange(3)).any()


def test_what_memory_has_of_a_segment_goes_on_when_its_tokens_are_reordered(model, tmp_path):
    ids, method = prompt(400), replace(METHOD, budget=0.1, alpha=9, reorder=True)
    with KVStore(tmp_path, engine="posix", policy=method.policy, host_memory=0) as store:
        fill(store, model, ids, method)
        (old,) = store.segments()
        residency = store._storage.residency
        residency.host._budget = 64 << 20
        for number in range(3):
            ask(model, store, question(ids, seed=number % 2), method)
        groups = store._storage.disk.reader(old.id).shape.block_groups
        was = _known_of(store, groups)
        ask(model, store, question(ids, seed=1), method)  # the fourth
        store.flush()
        (new,) = store.segments()
        assert new.id != old.id
        new_state = _known_of(store, groups)
        for group in groups:
            (chunks, scores), (before, _) = new_state[group.index], was[group.index]
            assert chunks == list(range(len(before)))  # as many, the first ones
            assert (scores[1] > 0).any()
        _, cache = ask(model, store, question(ids, seed=1), method)
        assert cache.stats.bytes_read <= cache.stats.host.bytes / 4
        assert cache.stats.host.hits > 0


def _known_of(store, groups):
    """Return the chunks in memory of each KV cache group of the only segment, and what is known of all."""
    (row,) = store.segments()
    reader, residency = store._storage.disk.reader(row.id), store._storage.residency
    state = {}
    for group in groups:
        owner, chunks = reader.owners[group.index], np.arange(reader.shape.chunks_in(group))
        host_chunks = residency.find(owner, chunks, torch.device("cpu"))["host"].tolist()
        state[group.index] = host_chunks, residency.scores.of(owner, chunks)
    return state


def test_due_after_4_8_16_prompts():
    importance = TokenImportance()
    assert [n for n in range(1, 70) if importance.prompt_done("a", 4)] == [4, 8, 16, 32, 64]
    assert [n for n in range(1, 70) if importance.prompt_done("b", 1)] == [1, 2, 4, 8, 16, 32, 64]
    assert importance.of("a") is None
    shape = SegmentShape(KVLayout((LayerKV(2, 4, 2, 4),), torch.float32), Geometry(), 4)
    importance.note("a", shape, 0, slice(1, 3), np.array([[0.25, 0.5]]))
    assert importance.of("a").tolist() == [[[0, 0.25, 0.5, 0]] * 2]
    importance.note("c", shape, 0, slice(0, 2), np.array([[0.25, 0.5], [1, 2]]))
    assert importance.of("c").tolist() == [[[0.25, 0.5, 0, 0], [1, 2, 0, 0]]]
    importance.rename("a", "b")
    assert importance.of("a") is None
    assert importance.of("b").tolist() == [[[0, 0.25, 0.5, 0]] * 2]


def test_what_was_learnt_of_tokens_outlives_the_process(model, tmp_path):
    """Four prompts in two processes lay a segment out as four in one do, and the next four go on from there."""
    ids, method = prompt(400), replace(METHOD, budget=0.1, alpha=9, reorder=True)
    history = {}
    for name, closed_after in (("one", ()), ("several", (1, 3, 5))):
        store, history[name] = KVStore(tmp_path / name, engine="posix", host_memory=0), []
        fill(store, model, ids, method)
        for number in range(8):
            ask(model, store, question(ids, seed=number % 2), method)
            if number not in (1, 5):  # then closing keeps what is known; a segment is laid out at 3 and 7
                store.flush()
            (row,) = store.segments()
            importance = store._storage.rewriter.importance
            history[name].append((row.id, importance.of(row.id).tolist(), importance._prompts[row.id]))
            if number in closed_after:
                store.close()
                store = KVStore(tmp_path / name, engine="posix", host_memory=0)
        assert list(store._storage.disk.sidecars.sizes()) == [row.id]
        store.close()
    assert history["several"] == history["one"]
    assert len({name for name, *_ in history["one"]}) >= 2  # it was laid out anew
    with KVStore(tmp_path / "several", engine="posix", host_memory=0) as store:
        assert store._storage.rewriter.importance.of(row.id) is None
        store.reorder(progress=False)  # asks for what was kept
        assert store._storage.rewriter.importance.of(store.segments()[0].id) is not None


@pytest.mark.parametrize("way", ["damaged", "another shape", "another name", "another dtype"])
def test_importance_that_cannot_be_used_is_learnt_anew(model, tmp_path, way):
    ids, method = prompt(200), replace(METHOD, reorder=True)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        ask(model, store, question(ids), method)
        store.flush()
        (row,) = store.segments()
        disk, expected = store._storage.disk, store._storage.rewriter.importance.of(row.id)
        reader, path = disk.reader(row.id), disk.path(f"{row.id}.importance")
        assert expected.any()
    forged = {
        "damaged": None,
        "another shape": {"mass": torch.ones(2, 3), "prompts": torch.tensor([1])},
        "another name": {"weights": torch.ones(expected.shape), "prompts": torch.tensor([1])},
        "another dtype": {"mass": torch.ones(expected.shape), "prompts": torch.tensor([float("nan")])},
    }[way]
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        if forged is None:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        else:
            assert store._storage.disk.sidecars.keep(store._storage.disk.reader(row.id), "importance", forged, {})
        ask(model, store, question(ids), method)
        importance = store._storage.rewriter.importance
        assert np.array_equal(importance.of(row.id), expected)  # as if it were the first prompt
        assert importance._prompts[row.id] == 1
        assert store.stats.verification_failures == (forged is None)
    assert not reader.gone


def test_only_what_reorders_reads_and_keeps_importance(model, tmp_path):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        ask(model, store, question(ids), METHOD)
        store.flush()
        assert store._storage.disk.sidecars.sizes() == {}
        bytes_written = store.stats.bytes_written
        ask(model, store, question(ids), replace(METHOD, reorder=True))
        store.flush()
        sidecar_bytes = store._storage.disk.sidecars.by_segment()
        assert store.stats.bytes_written == bytes_written + sum(sidecar_bytes.values()) > bytes_written
        store.flush()  # nothing has changed since
        assert store.stats.bytes_written == bytes_written + sum(sidecar_bytes.values())
        assert store.stats.disk.bytes == store.segments()[0].nbytes + sum(sidecar_bytes.values())
        store.remove(sidecar_bytes)
        store.flush()
        assert store._storage.disk.sidecars.sizes() == {}
        assert store.stats.read_errors == 0


# --- faults


@pytest.mark.parametrize("region", ["tables", "block"])
def test_damage_in_an_ordered_segment_is_a_miss(model, tmp_path, region):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        expected, _ = ask(model, store, question(ids), None)
        shuffle(store, apart=region == "tables")
        (row,) = store.segments()
        reader, path = store._storage.disk.reader(row.id), store._storage.disk.path(row.id)
    chunk, block_group = 5, reader.shape.block_groups[0]
    data = bytearray(path.read_bytes())
    blocks = reader.header.blocks.offset + chunk * block_group.block_bytes
    data[blocks if region == "block" else getattr(reader.header, region).offset + 8] ^= 1
    path.write_bytes(data)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        output, cache = ask(model, store, question(ids), None)
        assert torch.equal(output.sequences, expected.sequences)
        assert store.stats.verification_failures + store.stats.damaged_files > 0
        expected_tokens = 0 if region != "block" else reader.shape.first_token(block_group, chunk) // 16 * 16
        assert cache.stats.tokens_restored == expected_tokens


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("bug")], ids=["disk", "bug"])
def test_a_reordering_that_fails_leaves_the_segment_as_it_is(model, tmp_path, monkeypatch, caplog, error):
    ids, method = prompt(200), replace(METHOD, reorder=True)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        (row,) = store.segments()

        def fail(*_):
            raise error

        monkeypatch.setattr("hf_tiered_cache.store.root.write_all", fail)
        with caplog.at_level(logging.WARNING):
            for _ in range(8):
                ask(model, store, question(ids), method)
            store.flush()
        assert caplog.records
        assert store._storage.disk.path(row.id).exists()
        assert list((store.path / "tmp").iterdir()) == []


def test_an_old_segment_that_cannot_be_deleted_is_told_in_one_sentence(model, tmp_path, monkeypatch, caplog):
    ids, method, remove = prompt(200), replace(METHOD, reorder=True), os.unlink
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        (row,) = store.segments()

        def fail(path, **folder):
            if row.id in str(path):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)
            remove(path, **folder)

        monkeypatch.setattr("hf_tiered_cache.store.root.os.unlink", fail)
        with caplog.at_level(logging.WARNING, "hf_tiered_cache"):
            for _ in range(8):
                assert ask(model, store, question(ids), method)[1].stats.tokens_restored
                store.flush()
        (record,) = [log_record for log_record in caplog.records if row.id in log_record.getMessage()]
        assert "could not be rewritten" in record.getMessage() and record.exc_info is None
        assert len(store.segments()) == 2  # the same tokens twice, until the quota wants the room


def test_a_store_that_cannot_be_written_is_read_as_it_lies(model, tmp_path, monkeypatch, caplog):
    ids = prompt(200)
    with KVStore(tmp_path) as store:
        fill(store, model, ids, PER_HEAD)
    with KVStore(tmp_path) as store, caplog.at_level(logging.WARNING, "hf_tiered_cache"):
        monkeypatch.setattr(store._storage.disk.backend, "writable", False)
        for _ in range(4):
            assert ask(model, store, question(ids), PER_HEAD)[1].stats.tokens_restored
            store.flush()
        assert store.stats.dropped_writes == 1  # of a request, its own tokens
        assert "anew" not in caplog.text


def has_importance(model, folder, ids):
    """Create a store with one ordered segment with known importance. Return it, and an answer."""
    method = replace(METHOD, reorder=True)
    with KVStore(folder, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        answer, _ = ask(model, store, question(ids), method)
        (row,) = store.segments()
    return row.id, answer


@pytest.mark.parametrize("step", ["first write", "half", "linked", "index", "removed"])
def test_kill_9_while_it_is_laid_out_leaves_one_whole_segment(step, model, tmp_path):
    ids = prompt(400)
    before, expected = has_importance(model, tmp_path, ids)
    code = f"""
import os, signal
from hf_tiered_cache import KVStore
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
step, writes = {step!r}, 0
store = KVStore({str(tmp_path)!r}, engine="posix", host_memory=0)
pwrite, link, rename = os.pwrite, os.link, os.rename
def writing(fd, data, offset):
    global writes
    writes += 1
    if (step, writes) in (("first write", 1), ("half", 5)): pwrite(fd, bytes(data)[:4096], offset); die()
    return pwrite(fd, data, offset)
def after(name, real):
    def call(*paths, **more):
        real(*paths, **more)
        if step == name: die()
    return call
os.pwrite, os.link, os.rename = writing, after("linked", link), after("index", rename)
disk = store._storage.disk
disk.remove = after("removed", disk.remove)
store.reorder(progress=False)
"""
    process = processes.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == -9, process.stderr
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        names = {path.stem for path in (tmp_path / "segments").iterdir()}
        assert (before in names) == (step != "removed") and len(names) == (2 if step in ("linked", "index") else 1)
        assert not store.verify().bad
        output, cache = ask(model, store, question(ids), METHOD)
        assert_same(output, expected)
        assert cache.stats.tokens_restored == 400 and cache.stats.details.recomputed == 0
        store.gc()
        assert not store.verify().bad
        assert_same(ask(model, store, question(ids), METHOD)[0], expected)


def test_an_old_segment_stays_while_the_new_one_cannot_be_read(model, tmp_path, monkeypatch):
    ids = prompt(400)
    before, expected = has_importance(model, tmp_path, ids)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        disk, real = store._storage.disk, store._storage.disk.reader
        monkeypatch.setattr(disk, "reader", lambda name: real(name) if name == before else None)
        assert store.reorder(progress=False) == 0
        monkeypatch.undo()
        assert before in {row.id for row in store.segments()}
        assert_same(ask(model, store, question(ids), METHOD)[0], expected)


@pytest.mark.parametrize("room", [False, True])
def test_the_quota_holds_and_without_room_all_stays(model, tmp_path, room):
    ids = prompt(400)
    before, expected = has_importance(model, tmp_path, ids)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "segments").iterdir())
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.pin([before])
        used_bytes = store._storage.disk.used_bytes()
    quota = used_bytes + (3 * nbytes if room else nbytes // 2)
    with KVStore(tmp_path, engine="posix", host_memory=0, disk_quota=quota) as store:
        assert store.reorder(progress=False) == room
        assert (store.segments()[0].id != before) == room and len(store.segments()) == 1
        assert store.stats.dropped_writes == (not room)
        assert store._storage.disk.used_bytes() <= quota
        assert not store.verify().bad
        assert_same(ask(model, store, question(ids), METHOD)[0], expected)


def test_a_request_keeps_the_indexes_that_it_began_with(model, tmp_path, monkeypatch):
    """Its segment is laid out anew between two of its layers: no keys are read to make an index again."""
    ids, method = prompt(400), ContiguousKV(0.25, reselect=False)
    with KVStore(tmp_path, engine="posix", policy=method.policy) as store:
        fill(store, model, ids, method)
        for seed in (1, 2):
            ask(model, store, question(ids, seed=seed), method)
            store.flush()
        (before,) = store.segments()
        rewriter, reorder_counts = store._storage.rewriter, []
        mass = rewriter.importance.of(before.id)
        rewriter.importance.forget([before.id])
        rewriter.importance.load(before.id, np.random.default_rng(0).random(mass.shape).astype(mass.dtype), 2)

        def choose(self, request, real=TopChunks.choose):
            if not reorder_counts:
                reorder_counts.append(store.reorder(progress=False))
            return real(self, request)

        monkeypatch.setattr(TopChunks, "choose", choose)
        _, cache = ask(model, store, question(ids, seed=3), method)
        assert reorder_counts == [1] and before.id not in {row.id for row in store.segments()}
        assert cache.stats.tokens_restored == 400
        assert cache.stats.details.bytes_delivered_identifying == 0


# --- for each head its own order


PER_HEAD = ContiguousKV(0.25, reselect=False)


def chosen_of(monkeypatch):
    """Return the selections of `PER_HEAD`, in order."""
    noted: list[Selection] = []

    def choose(self, request, real=TopChunks.choose):
        noted.append(real(self, request))
        return noted[-1]

    monkeypatch.setattr(TopChunks, "choose", choose)
    return noted


@pytest.mark.parametrize("apart", [False, True], ids=["by layer", "by group"])
def test_each_head_chooses_among_the_chunks_of_its_own_blocks(model, tmp_path, monkeypatch, apart):
    """It selects the chunks with the most mass, reads each once, and attends to it as stored."""
    ids, method = prompt(200), replace(PER_HEAD, reorder=False)
    noted = chosen_of(monkeypatch)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        shuffle(store, apart=apart)
        (row,) = store.segments()
        shape = store._storage.disk.reader(row.id).shape
        _, cache = ask(model, store, question(ids), method)
        positions = np.arange(shape.tokens)
        heads = shape.layout.layer(0).key_heads
        blocks = 0
        for layer, choice in enumerate(noted):
            assert len(choice.tokens) == heads
            for head, (tokens, mass) in enumerate(zip(choice.tokens, choice.mass, strict=True)):
                (group,) = (g for g in shape.restoring_groups[layer] if g.parts[0].first_head == head)
                chunk = shape.slot_of_token(group, positions) // 8
                picks = np.unique(chunk[tokens])
                assert sorted(tokens.tolist()) == np.flatnonzero(np.isin(chunk, picks)).tolist()
                sums = np.bincount(chunk, mass)
                assert set(picks.tolist()) == set(np.argsort(-sums, kind="stable")[: len(picks)].tolist())
                blocks += len(picks)
        bytes_delivered = cache.stats.details.bytes_delivered - cache.stats.details.bytes_delivered_identifying
        assert bytes_delivered == blocks * shape.block_groups[0].block_bytes
        stored_kv = kv_of(model, ids)
        for layer, choice in enumerate(noted):
            tokens = torch.from_numpy(choice.tokens)
            expected = stored_kv[layer][0][0].gather(1, tokens[..., None].expand(-1, -1, stored_kv[layer][0].shape[-1]))
            assert torch.equal(cache.layers[layer].keys[0, :, : tokens.shape[1]], expected)


def test_what_earlier_prompts_attended_to_lies_together(tmp_path, monkeypatch):
    """A later prompt's chunks hold more of its attention, also in another process."""
    model, ids = build_deep("qwen2", initializer_range=0.2), prompt(200)
    noted, shares = chosen_of(monkeypatch), []
    for seeds in ((1, 2, 3), (4,)):
        with KVStore(tmp_path, engine="posix") as store:
            if not store.segments():
                fill(store, model, ids, PER_HEAD)
            for seed in seeds:
                noted.clear()
                _, cache = ask(model, store, question(ids, seed=seed), PER_HEAD)
                store.flush()
                # an index stays in memory
                assert bool(cache.stats.details.bytes_delivered_identifying) == (len(shares) in (0, 3))
                shares.append(
                    np.mean([np.take_along_axis(pick.mass, pick.tokens, 1).sum() / pick.mass.sum() for pick in noted])
                )
            (row,) = store.segments()
            assert len(store._storage.disk.reader(row.id).shape.tables.slot_of_token) == len(noted) * 2
    assert min(shares[1:]) > 1.1 * shares[0]


def test_a_segment_that_is_laid_out_while_it_is_looked_up_is_restored(model, tmp_path, monkeypatch, caplog):
    """Its old file is gone when it is to be opened: the new one is found, and nobody is warned."""
    ids, method = prompt(200), replace(PER_HEAD, reorder=False)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        find, swapped = store._storage.disk.find, []

        def found(prefix_hashes):
            rows = find(prefix_hashes)
            if not swapped:
                swapped.append(True)
                shuffle(store)
            return rows

        monkeypatch.setattr(store._storage.disk, "find", found)
        caplog.clear()
        _, cache = ask(model, store, question(ids), method)
        assert swapped and cache.stats.tokens_restored == 192
        assert store.stats.read_errors == 0
        assert "cannot be used" not in caplog.text


def test_nothing_is_laid_out_under_a_cache_that_chooses(model, tmp_path):
    """The cache may return to its segment; a segment in constant use is laid out when it is due again."""
    ids, method = prompt(200), replace(PER_HEAD, reselect=True)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        (plain,) = store.segments()
        _, cache = ask(model, store, question(ids), method)
        store.flush()
        assert [row.id for row in store.segments()] == [plain.id]
        del cache, _
        gc.collect()
        store.flush()
        (row,) = store.segments()
        assert row.id != plain.id
        first, *other_caches = (ask(model, store, question(ids, seed=seed), method)[1] for seed in (1, 2, 3, 4))
        store.flush()
        (second_row,) = store.segments()
        assert second_row.id != row.id  # after the fourth
        decode_from(model, first, kv_of(model, ids))
        assert len(other_caches) == 3


def decode_from(model, cache, stored):
    """Continue with a cache whose segment was replaced, and assert that it holds the KV of the stated tokens."""
    for token in prompt(6, seed=9).split(1, dim=1):
        model(input_ids=token, past_key_values=cache)
    for layer, (keys, values) in zip(cache.layers, stored, strict=True):
        (row,) = layer._rows
        tokens = torch.from_numpy(row.window.columns)[..., None]
        for selected_states, all_states in ((layer.keys, keys), (layer.values, values)):
            expected = all_states[0].gather(1, tokens.expand(-1, -1, all_states.shape[-1]))
            assert torch.equal(selected_states[0, :, : tokens.shape[1]], expected)
