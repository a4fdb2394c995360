"""Block groups that hold a part of a segment's tokens, in slots of their own: in files, lookups and restores."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from families import build_deep, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same
from segments import LAYOUT, hashes, open_store, read_back, read_file, segment
from test_forged import ODD, assert_counted, forge_section, open_forged, places, put_value
from test_passages import BOS, PASSAGES, QUESTION, join
from test_passages import ask as ask_passages
from test_passages import fill as fill_passages
from test_relayout import geometries, tensors
from test_selective import GREEDY, ask, fill, question
from transformers import DynamicCache

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import FormatError
from hf_tiered_cache.methods import CacheTune, Exact, Impress, Method
from hf_tiered_cache.reasons import IN_PART
from hf_tiered_cache.store import maintain
from hf_tiered_cache.store.cipher import StoreCipher
from hf_tiered_cache.store.format import HEADER_BYTES, decode_header
from hf_tiered_cache.store.geometry import Geometry, aligned, block_groups
from hf_tiered_cache.store.relayout import join_segments
from hf_tiered_cache.store.shape import IN_ORDER, NOT_HELD, SegmentShape, TokenTables

FAMILY = "qwen2"


def tables_of(token_sets, tokens):
    """Create tables from the tokens of each KV cache group: int64 `[n]`, by slot; None for all in order."""
    rows, of_group = [], []
    for token_set in token_sets:
        if token_set is None:
            of_group.append(IN_ORDER)
            continue
        row = np.full(tokens, NOT_HELD, np.uint32)
        row[token_set] = np.arange(len(token_set))
        of_group.append(len(rows))
        rows.append(row)
    slots = np.stack(rows) if rows else np.empty((0, tokens), np.uint32)
    return TokenTables(slots, np.array(of_group, np.uint32))


def drawn(groups, tokens, seed):
    """Draw some tokens in any order, all tokens, or none for each KV cache group."""
    random = np.random.default_rng(seed)
    counts = [int(random.choice([0, tokens, random.integers(0, tokens + 1)])) for _ in groups]
    return [random.permutation(tokens)[:count] if random.random() < 0.8 else None for count in counts]


def hold_part(store, row, held_of):
    """Replace a segment by one whose block groups hold what `held_of` says of them: int64 `[n]` tokens, by slot."""
    reader = store._storage.disk.reader(row.id)
    token_sets = [held_of(group) for group in reader.shape.block_groups]
    assert store._storage.rewriter._replace(row.id, reader.shape.geometry, tables_of(token_sets, reader.shape.tokens))


# --- files


@given(geometries.filter(lambda g: g.index is None), geometries, st.integers(1, 7), st.integers(0, 999), st.booleans())
def test_what_is_held_is_read_and_nothing_else_is_stored(tmp_path_factory, before, after, count, seed, sealed):
    store = open_store(tmp_path_factory.mktemp("store"), cipher=StoreCipher(bytes(32)) if sealed else None)
    header, chain, blocks = segment(hashes(count), geometry=before)
    assert store.publish(header, chain, blocks)
    full_reader = store.reader(header.id)
    expected = tensors(full_reader, read_back(store, header.id))
    groups = block_groups(LAYOUT, after)
    token_sets = drawn(groups, 16 * count, seed)
    new_header, new_chain, new_blocks = join_segments([full_reader], after, tables_of(token_sets, 16 * count))
    assert store.publish(new_header, new_chain, new_blocks)
    reader = store.reader(new_header.id)
    shape = reader.shape
    assert maintain.verify(store).ok
    sizes = [16 * count if token_set is None else len(token_set) for token_set in token_sets]
    chunks = [-(-size // after.chunk_tokens) for size in sizes]
    assert [len(blocks) for blocks in read_back(store, reader.id)] == chunks == [len(table) for table in reader.digests]
    assert shape.blocks_bytes == sum(n * group.block_bytes for n, group in zip(chunks, groups, strict=True))
    token_sets = [np.arange(16 * count) if token_set is None else token_set for token_set in token_sets]
    common = set(range(16 * count)).intersection(*(token_set.tolist() for token_set in token_sets))
    first_gap = next((token for token in range(16 * count) if token not in common), 16 * count)
    assert shape.whole_hashes == first_gap // 16 and shape.whole == (first_gap == 16 * count)
    for group, token_set, memory in zip(groups, token_sets, read_back(store, reader.id), strict=True):
        assert shape.tokens_in(group) == len(token_set) and shape.tokens_by_slot(group).tolist() == token_set.tolist()
        missing_tokens = np.setdiff1d(np.arange(16 * count), token_set)
        if len(missing_tokens):
            with pytest.raises(ValueError, match="part of its tokens"):
                shape.chunks_of(group, missing_tokens[-1:])
        for part in group.parts:
            content = shape.unpack(memory, group, part).view(torch.int32)  # NaN among them
            right = expected[part.layer, part.tensor][part.first_head : part.first_head + part.heads]
            assert torch.equal(content[:, token_set], right[:, token_set]) and not content[:, missing_tokens].any()
    if not shape.held.all():  # an index can be made again
        with pytest.raises(ValueError, match="part of its tokens"):
            join_segments([reader], before)


@pytest.fixture(scope="module")
def in_part(tmp_path_factory):
    """Create a store with one segment whose groups hold a part of its tokens."""
    store = open_store(tmp_path_factory.mktemp("part"))
    header, chain, blocks = segment(hashes(4), geometry=Geometry(16, 1))
    assert store.publish(header, chain, blocks)
    token_sets = [np.arange(64), np.arange(63, -1, -1), np.arange(16, 64), None, np.arange(0)]
    part_segment = join_segments([store.reader(header.id)], Geometry(16, 1), tables_of(token_sets, 64))
    assert store.publish(*part_segment)
    store.remove([header.id])
    content = store.path(part_segment[0].id).read_bytes()
    store.close()
    return store.backend.root, part_segment[0].id, content


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_any_value_anywhere_in_the_header_is_a_counted_miss(in_part, data):
    def put(page):
        way = data.draw(st.sampled_from(list(places(page))))
        put_value(page, way, data.draw(st.sampled_from(ODD) | st.sampled_from([4096, 8192, 1 << 20])))

    root, name, content = in_part
    store = open_forged(root, name, content, put)
    if store.find(hashes(4)):
        reader = store.reader(name)
        assert [len(table) for table in reader.digests] == [4, 4, 3, 4, 0]
        read_back(store, name)
    else:
        assert_counted(store, name)
    store.close()


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 5 + 4 * 64), st.sampled_from([0, 1, 3, 5, 63, 64, 2**31, 2**32 - 1]))
def test_tables_that_say_something_else_are_refused_or_are_tables(in_part, number, value):
    """Checksums are right: only permutations that fit the file are read."""
    root, name, content = in_part
    path = root / "segments" / f"{name}.kv"
    header, _ = decode_header(content[:HEADER_BYTES])
    data = bytearray(content)
    struct.pack_into("<I", data, header.tables.offset + 4 * number, value)
    forge_section(path, "tables", data)
    if bytes(data) == content:
        return
    try:
        head = read_file(path)
    except FormatError:
        return
    shape = head.header.shape
    assert aligned(shape.blocks_bytes) == header.blocks.nbytes
    assert [len(digests) for digests in head.digests] == [shape.chunks_in(group) for group in shape.block_groups]
    for group in shape.block_groups:
        assert len(set(shape.tokens_by_slot(group).tolist())) == shape.tokens_in(group)


# --- lookups


@pytest.mark.parametrize("method", [None, Impress(budget=0.25, reorder=False)], ids=["exact", "within a budget"])
def test_a_prefix_is_restored_up_to_the_first_token_that_a_group_lacks(tmp_path, method):
    model = build_deep("qwen2")
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids[:, :96], method or Exact())
        expected, _ = ask(model, store, question(ids), method)
        (row,) = store.segments()
        hold_part(store, row, lambda group: np.arange(64) if group.index % 2 else np.random.permutation(96))
        (row,) = store.segments()
        output, cache = ask(model, store, question(ids), method)
        assert cache.stats.tokens_restored == 64
        if method is None:
            assert torch.equal(output.sequences, expected.sequences)
        assert store.lookup(model, ids, method=method).stored == 64
        assert store.relayout(Geometry(32, 1), progress=False) == 0
        assert [segment_row.id for segment_row in store.segments()] == [row.id]


def test_of_two_the_whole_one_is_restored(model, tmp_path):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, progress=False)
        expected, _ = ask(model, store, question(ids), None)
        (row,) = store.segments()
        disk = store._storage.disk
        reader = disk.reader(row.id)
        lacking = tables_of([np.arange(16, 192) for _ in reader.shape.block_groups], 192)
        assert disk.publish(*join_segments([reader], reader.shape.geometry, lacking))
        assert len(store.segments()) == 2
        output, cache = ask(model, store, question(ids), None)
        assert_same(output, expected)
        assert cache.stats.tokens_restored == 192


def test_why_nothing_is_restored_of_what_has_no_front(model, tmp_path):
    ids = prompt(200)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, progress=False)
        (row,) = store.segments()
        hold_part(store, row, lambda group: np.arange(16, row.tokens))
        expected = model.generate(question(ids), past_key_values=DynamicCache(), max_new_tokens=4, do_sample=False)
        output, cache = ask(model, store, question(ids), None)
        assert torch.equal(output.sequences[:, : expected.shape[1]], expected)
        assert (cache.stats.tokens_restored, cache.stats.reason) == (0, IN_PART)
        assert store.lookup(model, ids).reason == IN_PART


def test_a_passage_is_restored_up_to_the_first_token_that_a_group_lacks(model, tmp_path):
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill_passages(store, model, PASSAGES[:1])
        (row,) = store.segments()
        ids = join(BOS, prompt(7, seed=50)[0], PASSAGES[0], QUESTION)
        method = CacheTune(recompute=0.0, lead=1)
        _, cache = ask_passages(model, store, ids, method)
        assert cache.stats.tokens_restored == 96
        hold_part(store, row, lambda group: np.concatenate([np.arange(48), np.arange(70, 96)]))
        _, cache = ask_passages(model, store, ids, method)
        assert cache.stats.tokens_restored == 48


# --- a method for it


@dataclass(frozen=True, kw_only=True)
class ComputesUnstored(Method):
    """Method that computes a prefix of the stored tokens, shorter with depth, and restores the rest."""

    unstored: tuple[int, ...]

    def usable_hashes(self, shape: SegmentShape) -> int:
        return shape.tokens // 16

    def positions_to_compute(self, context):
        suffix = context.suffix_positions()
        return tuple(np.union1d(np.arange(front), tokens) for front, tokens in zip(self.unstored, suffix, strict=True))


def test_a_front_that_is_not_stored_is_computed_and_the_rest_is_restored(model, tmp_path):
    ids = prompt(200)
    fronts = (96, 80, 33, 32, 5, 0)[: model.config.num_hidden_layers]
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, method=Exact(geometry=Geometry(16, 1)), progress=False)
        (row,) = store.segments()
        hold_part(store, row, lambda group: np.arange(fronts[group.layers[0]], row.tokens))
        full = model.generate(question(ids), past_key_values=DynamicCache(), **GREEDY)
        output, cache = ask(model, store, question(ids), ComputesUnstored(unstored=fronts))
        assert torch.equal(output.sequences, full.sequences)
        for a, b in zip(output.logits, full.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max()))
        (row,) = store.segments()
        shape = store._storage.disk.reader(row.id).shape
        assert cache.stats.bytes_read == shape.blocks_bytes  # all that is stored, once
        assert cache.stats.read_amplification < 1.2 and cache.stats.details.verification_failures == 0
