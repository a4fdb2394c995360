"""Segments whose layers are merged in pairs: their block groups, files, and how they are made out of others."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import LAYOUT, hashes, open_store, read_back, read_file
from test_forged import ODD, assert_counted, forge, forge_section, open_forged, page_of, places, put_value

from hf_tiered_cache.errors import ConfigError, FormatError, IntegrityError
from hf_tiered_cache.methods import METHODS, BudgetMethod, ContiguousKV, Exact
from hf_tiered_cache.store import maintain
from hf_tiered_cache.store.cipher import StoreCipher
from hf_tiered_cache.store.codecs import CODECS, coded_provenance, make_codec, merged_codec
from hf_tiered_cache.store.format import HEADER_BYTES, SegmentHeader, decode_header, segment_id
from hf_tiered_cache.store.geometry import (
    BLOCK_ALIGNMENT,
    Geometry,
    KeyIndex,
    KVLayout,
    LayerKV,
    aligned,
    block_groups,
)
from hf_tiered_cache.store.pairs import encode
from hf_tiered_cache.store.relayout import join_segments
from hf_tiered_cache.store.shape import NOT_HELD, SegmentShape, TokenTables

MERGED = "paired"
"""A provenance of its own, as whoever merges layers has one."""
LAYERS = len(LAYOUT.layers)
every_codec = pytest.mark.parametrize("codec", CODECS)
few = settings(max_examples=settings.default.max_examples // 4)  # each writes files, for each codec
pairings = st.permutations(range(LAYERS)).flatmap(
    lambda order: st.integers(0, 2).map(
        lambda count: tuple(sorted(tuple(sorted(order[2 * i : 2 * i + 2])) for i in range(count)))
    )
)


def merging(**changes):
    """Return geometries with or without pairs."""
    return st.builds(
        Geometry,
        chunk_tokens=st.sampled_from([8, 16, 24]),
        layers_per_block=st.just(1),
        heads_per_block=st.sampled_from([None, 1]),
        split_kv=st.booleans(),
        pairs=pairings,
        **changes,
    )


# --- block groups


@every_codec
@given(geometry=merging())
def test_two_parts_share_a_direction_and_nothing_else_overlaps(codec, geometry):
    geometry = replace(geometry, codec=codec)
    groups = block_groups(LAYOUT, geometry)
    assert [group.index for group in groups] == list(range(len(groups)))
    assert [group.layers[0] for group in groups] == sorted(group.layers[0] for group in groups)
    plain = [group for group in groups if not group.merged]
    assert [group.parts for group in plain] == [
        group.parts for group in block_groups(LAYOUT, replace(geometry, pairs=()))
    ]
    for group in groups:
        slots = {slot: None for part in group.parts for slot in part.fields}
        ends = [0, *(slot.offset + slot.nbytes for slot in slots)]
        assert all(end <= slot.offset < end + 8 for end, slot in zip(ends, slots, strict=False))
        assert ends[-1] == group.payload_bytes <= group.block_bytes and group.block_bytes % BLOCK_ALIGNMENT == 0
        if not group.merged:
            assert len(slots) == sum(len(part.fields) for part in group.parts)
            continue
        assert group.layers in geometry.pairs and group.window == 0
        for first, second in zip(group.parts[::2], group.parts[1::2], strict=True):
            assert (first.layer, second.layer) == group.layers
            assert (first.tensor, first.first_head, first.heads) == (second.tensor, second.first_head, second.heads)
            assert first.fields[0] == second.fields[0] and first.fields[1] != second.fields[1]
    for pair in geometry.pairs:
        stored_heads = [
            (p.layer, p.tensor, p.first_head + h)
            for g in groups
            if g.layers == pair
            for p in g.parts
            for h in range(p.heads)
        ]
        assert sorted(stored_heads) == sorted(itertools.product(pair, ("key", "value"), range(2)))


def test_a_merged_block_takes_half_of_two_and_its_magnitudes():
    layout = KVLayout((LayerKV(4, 128, 4, 128),) * 2, torch.bfloat16)
    first_bytes, second_bytes, merged_bytes = (
        group.payload_bytes
        for group in sorted(block_groups(layout, Geometry(16, 1, pairs=((0, 1),))), key=lambda g: g.merged)
    )
    assert first_bytes == second_bytes == 16 * 4 * 128 * 2 * 2
    assert merged_bytes == first_bytes + 16 * 4 * 2 * 2 * 4  # a factor of f32 for each layer, tensor, token and head
    layout = replace(layout, dtype=torch.float32)
    coded = block_groups(layout, Geometry(16, 1, codec="int8", pairs=((0, 1),)))
    assert sorted(group.payload_bytes for group in coded) == [16 * 4 * (128 + 4) * 2] * 2 + [16 * 4 * (128 + 8) * 2]


@pytest.mark.parametrize(
    "wrong",
    [((1, 0),), ((1, 1),), ((0, 1), (1, 2)), ((-1, 0),), ((0, 1, 2),), ((0, 2.0),), ((False, True),), ((0, 1 << 20),)],
)
def test_meaningless_pairs_are_refused(wrong):
    with pytest.raises(ConfigError, match="pairs"):
        Geometry(16, 1, pairs=wrong)
    with pytest.raises(FormatError):
        Geometry.from_json(Geometry(16, 1).to_json() | {"pairs": wrong})


@pytest.mark.parametrize("wrong", [3, None, [3], [[0]], [[0, 1], 2], ["ab"], {"0": 1}, [[0, [1]]], "01"])
def test_pairs_that_are_none_are_no_geometry(wrong):
    with pytest.raises(FormatError):
        Geometry.from_json(Geometry(16, 1).to_json() | {"pairs": wrong})


def test_pairs_go_with_one_layer_a_block_and_no_index():
    for changes in ({"layers_per_block": 2}, {"layers_per_block": 1, "index": KeyIndex()}):
        with pytest.raises(ConfigError, match="pairs require"):
            Geometry(16, pairs=((0, 1),), **changes)


def test_layers_that_are_not_alike_cannot_be_merged():
    kinds = (
        LayerKV(2, 8, 2, 8),
        LayerKV(2, 8, 2, 16),
        LayerKV(2, 8, 2, 8, window=32),
        None,
        LayerKV(2, 8, 2, 8, window=32),
    )
    layout = KVLayout(kinds, torch.float32)
    for pair in ((0, 1), (0, 2), (2, 4), (0, 3), (0, 9)):
        with pytest.raises(FormatError, match="cannot be merged"):
            block_groups(layout, Geometry(16, 1, pairs=(pair,)))


@given(geometry=merging())
def test_pairs_go_through_json(geometry):
    assert Geometry.from_json(json.loads(json.dumps(geometry.to_json()))) == geometry
    assert Geometry(16, 1, pairs=[[2, 4], (0, 1)]) == Geometry(16, 1, pairs=((0, 1), (2, 4)))


def test_a_method_has_no_pairs_and_one_layer_is_not_packed_as_two():
    with pytest.raises(ConfigError, match="pairs"):
        Exact(geometry=Geometry(16, 1, pairs=((0, 1),)))
    shape = SegmentShape(LAYOUT, Geometry(16, 1, pairs=((0, 1),)), 16)
    group = next(group for group in shape.block_groups if group.merged)
    with pytest.raises(ValueError, match="two layers"):
        shape.pack(torch.zeros(1, group.block_bytes, dtype=torch.uint8), group, group.parts[0], torch.zeros(2, 16, 8))


# --- which tokens lie where


@given(geometry=merging(), data=st.data())
def test_each_token_of_a_layer_lies_in_one_place(geometry, data):
    tokens = 16 * data.draw(st.integers(1, 6))
    stored_from = data.draw(st.lists(st.integers(0, tokens), min_size=LAYERS, max_size=LAYERS))
    retained = {
        pair: np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1)))), np.int64) for pair in geometry.pairs
    }
    groups = block_groups(LAYOUT, geometry)
    shape = SegmentShape(LAYOUT, geometry, tokens, TokenTables.by_pairs(stored_from, retained, groups, tokens))
    shape.check_tables()
    positions = np.arange(tokens)
    assert (shape.held == (positions >= np.array(stored_from)[:, None])).all()
    assert shape.held_from == tuple(stored_from)
    assert shape.whole_hashes == (0 if any(stored_from) else tokens // 16)
    assert shape.whole == (not geometry.pairs and not any(stored_from))
    for group in groups:
        slot_tokens = shape.tokens_by_slot(group)
        assert (np.diff(slot_tokens) > 0).all()
        if group.merged:
            expected = np.setdiff1d(
                np.arange(max(stored_from[layer] for layer in group.layers), tokens), retained[group.layers]
            )
        else:
            (layer,) = group.layers
            expected = np.arange(stored_from[layer], tokens)
            for pair in geometry.pairs:
                if layer in pair:
                    front = max(stored_from[member] for member in pair)
                    expected = np.union1d(np.arange(stored_from[layer], front), retained[pair])
                    expected = expected[expected >= stored_from[layer]]
        assert slot_tokens.tolist() == expected.tolist()


def test_a_layer_that_holds_a_token_by_itself_and_in_its_pair_is_no_shape():
    geometry = Geometry(16, 1, pairs=((1, 3),))
    groups = block_groups(LAYOUT, geometry)
    right = TokenTables.by_pairs([0] * LAYERS, {(1, 3): np.array([5])}, groups, 32)
    merged_index = next(group.index for group in groups if group.merged)
    slots = right.slot_of_token.copy()
    row = slots[right.of_group[merged_index]]
    row[row != NOT_HELD], row[5] = np.arange(1, 32), 0  # the retained one, too
    SegmentShape(LAYOUT, geometry, 32, right).check_tables()
    for wrong in (replace(right, slot_of_token=slots), None):
        with pytest.raises(FormatError, match="twice"):
            SegmentShape(LAYOUT, geometry, 32, wrong).check_tables()


# --- making them


def kv_of(tokens, seed, dtype=torch.float32, layers=LAYERS):
    """Return keys and values, `[2, tokens, 8]` each, by layer and tensor; neighbors are similar."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(2, 2, tokens, 8, generator=generator)
    return {
        (layer, name): (base[number] + 0.5 * torch.randn(2, tokens, 8, generator=generator)).to(dtype)
        for layer in range(layers)
        for number, name in enumerate(("key", "value"))
    }


def put(store, kv, chain, first, last, geometry, provenance=MERGED):
    """Publish the tokens of the prefix hashes `[first, last)` of a chain as a segment; return its reader."""
    provenance = coded_provenance(provenance, geometry.codec)
    shape = SegmentShape(LAYOUT, geometry, 16 * (last - first))
    parent = chain[first - 1] if first else bytes(16)
    name = segment_id(parent, chain[last - 1], shape, provenance)
    header = SegmentHeader(name, "model", shape, parent, 16 * first, created=1.0, provenance=provenance)
    blocks = []
    for group in shape.block_groups:
        blocks.append(torch.zeros(shape.chunks_in(group), group.block_bytes, dtype=torch.uint8))
        for part in group.parts:
            heads = slice(part.first_head, part.first_head + part.heads)
            shape.pack(blocks[-1], group, part, kv[part.layer, part.tensor][heads, 16 * first : 16 * last])
    assert store.publish(header, chain[first:last], blocks)
    return store.reader(name)


def joined(store, readers, geometry, stored_from=(0,) * LAYERS, retained=None):
    """Publish one segment made of others; return its reader."""
    groups, tokens = block_groups(LAYOUT, geometry), sum(reader.shape.tokens for reader in readers)
    tables = TokenTables.by_pairs(stored_from, retained or {}, groups, tokens)
    header, chain, blocks = join_segments(readers, geometry, tables)
    assert store.publish(header, chain, blocks)
    return store.reader(header.id)


def read(store, reader):
    """Return the content of each layer, `[2, tokens, 8]`, from all of its KV cache groups; zeros where it has none."""
    content = {
        (layer, name): torch.zeros(2, reader.shape.tokens, 8) for layer in range(LAYERS) for name in ("key", "value")
    }
    for group, blocks in zip(reader.shape.block_groups, read_back(store, reader.id), strict=True):
        for part in group.parts:
            if not group.identifies:
                heads = slice(part.first_head, part.first_head + part.heads)
                content[part.layer, part.tensor][heads] += reader.shape.unpack(blocks, group, part)
    return content


def arithmetic(kv, geometry, stored_from, retained, coded=True):
    """Compute the same directly: merged pairs, retained tokens of each layer, and no recomputed prefix.

    Args:
        coded: whether these numbers went through the codec before they were merged.
    """
    plain, content = make_codec(geometry.codec), {}
    tokens = np.arange(kv[0, "key"].shape[1])
    for (layer, name), tensor in kv.items():
        content[layer, name] = plain.decode(plain.encode(tensor), tensor.dtype)
        content[layer, name][:, : stored_from[layer]] = 0
    for pair in geometry.pairs:
        merged_tokens = np.setdiff1d(tokens[max(stored_from[layer] for layer in pair) :], retained.get(pair, []))
        for name in ("key", "value"):
            tensors = [kv[layer, name] for layer in pair]
            if coded:
                tensors = [plain.decode(plain.encode(tensor), tensor.dtype) for tensor in tensors]
            tensors = [tensor[:, merged_tokens] for tensor in tensors]
            for layer, fields in zip(pair, encode(*tensors, merged_codec(geometry.codec)), strict=True):
                content[layer, name][:, merged_tokens] = merged_codec(geometry.codec).decode(fields, torch.float32)
    return content


def same(content, expected):
    assert content.keys() == expected.keys()
    for name in content:
        assert torch.equal(content[name], expected[name]), name


geometries = st.builds(
    Geometry,
    chunk_tokens=st.sampled_from([8, 16, 24]),
    layers_per_block=st.integers(1, 6),
    heads_per_block=st.sampled_from([None, 1]),
    split_kv=st.booleans(),
    index=st.none() | st.just(KeyIndex(2)),
)


@every_codec
@few
@given(before=st.lists(geometries, min_size=1, max_size=3), after=merging(), data=st.data())
def test_segments_of_any_geometry_become_one_with_pairs(tmp_path_factory, codec, before, after, data):
    """The reference is the same arithmetic on the tensors, bit for bit."""
    store = open_store(tmp_path_factory.mktemp("store"))
    counts = [data.draw(st.integers(1, 4)) for _ in before]
    ends = [0, *itertools.accumulate(counts)]
    tokens, chain = 16 * ends[-1], hashes(ends[-1])
    kv = kv_of(tokens, data.draw(st.integers(0, 99)))
    after = replace(after, codec=codec)
    readers = [
        put(store, kv, chain, first, last, replace(geometry, codec=codec))
        for geometry, first, last in zip(before, ends, ends[1:], strict=False)
    ]
    stored_from = data.draw(st.lists(st.integers(0, tokens), min_size=LAYERS, max_size=LAYERS))
    retained = {
        pair: np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1)))), np.int64) for pair in after.pairs
    }
    result = joined(store, readers, after, stored_from, retained)
    same(read(store, result), arithmetic(kv, after, stored_from, retained))
    assert (result.header.position, result.header.parent) == (0, bytes(16)) and result.chain == b"".join(chain)
    assert result.header.provenance == coded_provenance(MERGED, codec) and result.shape.held_from == tuple(stored_from)
    assert maintain.verify(store).ok
    assert result.shape.blocks_bytes == sum(
        -(-len(result.shape.tokens_by_slot(group)) // after.chunk_tokens) * group.block_bytes
        for group in result.shape.block_groups
    )


@every_codec
@few
@given(before=geometries, count=st.integers(2, 5), data=st.data())
def test_without_pairs_and_with_all_tokens_bytes_are_those_that_were_there(
    tmp_path_factory, codec, before, count, data
):
    """This includes exact segments of random bits with NaN."""
    store = open_store(tmp_path_factory.mktemp("store"))
    before = replace(before, codec=codec)
    kv = {name: torch.randn_like(tensor).mul_(1e3) for name, tensor in kv_of(16 * count, 1).items()}
    chain, split = hashes(count), data.draw(st.integers(1, count - 1))
    full_reader = put(store, kv, chain, 0, count, before, "exact")
    blocks = read_back(store, full_reader.id)
    store.remove([full_reader.id])
    readers = [put(store, kv, chain, 0, split, before, "exact"), put(store, kv, chain, split, count, before, "exact")]
    header, joined_chain, joined_blocks = join_segments(readers, before)
    assert (header.id, joined_chain) == (full_reader.id, chain)
    assert all(torch.equal(a, b) for a, b in zip(joined_blocks, blocks, strict=True))


@every_codec
@few
@given(data=st.data())
def test_a_merged_segment_and_what_follows_it_become_one(tmp_path_factory, codec, data):
    """Again and again: what is merged already is moved, so its bits stay; what is new is merged with the same bits."""
    store = open_store(tmp_path_factory.mktemp("store"))
    counts = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    ends = [0, *itertools.accumulate(counts)]
    tokens, chain = 16 * ends[-1], hashes(ends[-1])
    kv, geometry = kv_of(tokens, 3), replace(data.draw(merging()), codec=codec)
    stored_from = sorted(data.draw(st.lists(st.integers(0, 16 * counts[0]), min_size=LAYERS, max_size=LAYERS)))[::-1]
    retained = {
        pair: np.array(sorted(data.draw(st.sets(st.integers(0, tokens - 1)))), np.int64) for pair in geometry.pairs
    }
    result = None
    for first, last in itertools.pairwise(ends):
        reader = put(store, kv, chain, first, last, Geometry(16, data.draw(st.integers(1, 5)), codec=codec))
        retained_so_far = {pair: pair_tokens[pair_tokens < 16 * last] for pair, pair_tokens in retained.items()}
        result = joined(store, [reader] if result is None else [result, reader], geometry, stored_from, retained_so_far)
    same(read(store, result), arithmetic(kv, geometry, stored_from, retained))


@every_codec
def test_what_is_merged_already_is_moved(codec, tmp_path, monkeypatch):
    store, kv, chain = open_store(tmp_path), kv_of(96, 11), hashes(6)
    geometry = Geometry(16, 1, codec=codec, pairs=((0, 3), (1, 2)))
    once = joined(
        store,
        [put(store, kv, chain, 0, 6, Geometry(codec=codec))],
        geometry,
        [16, 16, 0, 0, 0],
        {(0, 3): np.arange(20, 30)},
    )
    expected = read(store, once)
    monkeypatch.setattr("hf_tiered_cache.store.relayout.encode", None)
    finer = replace(geometry, chunk_tokens=8, heads_per_block=1, split_kv=True)
    second_join = joined(store, [once], finer, [32, 16, 16, 0, 0], {(0, 3): np.arange(20, 30)})
    for (layer, name), tensor in read(store, second_join).items():
        first = [32, 16, 16, 0, 0][layer]
        assert torch.equal(tensor[:, 32:], expected[layer, name][:, 32:]) and not tensor[:, :first].any()
        # what layer 3 holds by itself now has a scale of its own again
        torch.testing.assert_close(tensor[:, first:], expected[layer, name][:, first:], rtol=1e-5, atol=1e-6)


@every_codec
def test_other_pairs_are_made_of_what_the_old_ones_decode_to(codec, tmp_path):
    store, kv, chain = open_store(tmp_path), kv_of(80, 4), hashes(5)
    old, new = (Geometry(16, 1, codec=codec, pairs=pairs) for pairs in (((0, 1), (2, 4)), ((0, 2), (1, 3))))
    first = joined(
        store, [put(store, kv, chain, 0, 5, Geometry(16, 2, codec=codec))], old, retained={(0, 1): np.arange(9)}
    )
    decoded = read(store, first)
    second_join = joined(store, [first], new, retained={(0, 2): np.arange(20, 30)})
    expected = arithmetic(decoded, new, [0] * LAYERS, {(0, 2): np.arange(20, 30)}, coded=False)
    parted = joined(store, [second_join], replace(new, pairs=()))
    assert parted.shape.whole
    for content, reference in ((read(store, second_join), expected), (read(store, parted), expected)):
        if codec == "raw":
            same(content, reference)
        for name in reference:  # a scale that is made anew may differ in its last bits
            torch.testing.assert_close(content[name], reference[name], rtol=1e-5, atol=1e-6)


def test_a_token_that_no_segment_holds_is_not_made_up(tmp_path):
    store, kv, chain = open_store(tmp_path), kv_of(64, 5), hashes(4)
    geometry = Geometry(16, 1, pairs=((1, 3),))
    first = joined(store, [put(store, kv, chain, 0, 3, Geometry())], geometry, [40, 32, 16, 16, 0])
    second = put(store, kv, chain, 3, 4, Geometry())
    groups = block_groups(LAYOUT, geometry)
    for layer, stored_from in enumerate(
        ([39, 32, 16, 16, 0], [40, 31, 16, 16, 0], [40, 32, 15, 16, 0], [40, 32, 16, 15, 0])
    ):
        for readers in ([first], [first, second]):
            tokens = sum(reader.shape.tokens for reader in readers)
            with pytest.raises(
                ValueError, match=f"layer {layer} of segment {first.id} holds only a part of its tokens"
            ):
                join_segments(readers, geometry, TokenTables.by_pairs(stored_from, {}, groups, tokens))
    with pytest.raises(ValueError, match="holds only a part of its tokens"):
        join_segments([first], Geometry())
    same(
        read(store, joined(store, [first, second], geometry, [40, 32, 16, 16, 0])),
        arithmetic(kv, geometry, [40, 32, 16, 16, 0], {}),
    )


def test_only_what_follows_is_joined(tmp_path):
    store, kv, chain = open_store(tmp_path), kv_of(96, 6), hashes(6)
    first, second, third = (put(store, kv, chain, *ends, Geometry()) for ends in ((0, 2), (2, 4), (4, 6)))
    wrong = [[second, first], [first, third], [first, first]]
    other_chain = hashes(2, seed="b") + chain[2:]
    wrong.append([put(store, kv, other_chain, 0, 2, Geometry()), second])
    wrong.append([first, put(store, kv, chain, 2, 4, Geometry(), "exact")])
    for readers in wrong:
        with pytest.raises(ValueError, match=r"does not continue|differ in"):
            join_segments(readers, Geometry())
    with pytest.raises(FormatError, match="cannot be merged"):
        join_segments([first], Geometry(16, 1, pairs=((3, 5),)))
    with pytest.raises(FormatError, match="twice"):
        join_segments([first], Geometry(16, 1, pairs=((0, 1),)))


def test_a_segment_that_is_left_in_the_middle_is_cut_there(tmp_path):
    """After an edit of the history, the new part continues inside a segment."""
    store, kv, chain = open_store(tmp_path), kv_of(80, 7), hashes(5)
    first = put(store, kv, chain, 0, 4, Geometry())
    edited = chain[:2] + hashes(3, seed="b", parent=chain[1])
    changed_kv = kv_of(80, 8)
    for name, tensor in changed_kv.items():
        tensor[:, :32] = kv[name][:, :32]
    second = put(store, changed_kv, edited, 2, 5, Geometry())
    header, joined_chain, blocks = join_segments([first, second], Geometry())
    assert joined_chain == edited and store.publish(header, joined_chain, blocks)
    same(read(store, store.reader(header.id)), changed_kv)


def test_a_join_holds_a_few_block_groups_in_memory(tmp_path, monkeypatch):
    """The number is the same for 24 layers as for 12, with pairs far apart."""
    import hf_tiered_cache.store.relayout as relayout

    most = {}
    for layers in (12, 24):
        layout = KVLayout((LayerKV(2, 8, 2, 8),) * layers, torch.float32)
        monkeypatch.setattr("test_pairs.LAYOUT", layout)
        store, chain, kv = open_store(tmp_path / str(layers)), hashes(8), kv_of(128, 9, layers=layers)
        first = put(store, kv, chain, 0, 8, Geometry(16, 1))
        pairs = tuple((i, i + layers // 2) for i in range(layers // 2))
        groups = block_groups(layout, Geometry(16, 1, pairs=pairs))
        tables = TokenTables.by_pairs([0] * layers, {pair: np.arange(3) for pair in pairs}, groups, 128)
        read_counts = []
        blocks_of = relayout._Join._blocks

        def noting(self, *args, blocks_of=blocks_of, read_counts=read_counts):
            blocks = blocks_of(self, *args)
            read_counts.append(len(self._read))
            return blocks

        monkeypatch.setattr(relayout._Join, "_blocks", noting)
        list(join_segments([first], Geometry(16, 1, pairs=pairs), tables)[2])
        monkeypatch.setattr(relayout._Join, "_blocks", blocks_of)
        most[layers] = max(read_counts)
    assert most[24] == most[12] <= 8


def test_long_segments_are_merged_in_runs_of_tokens(tmp_path, monkeypatch):
    store, kv, chain = open_store(tmp_path), kv_of(96, 10), hashes(6)
    geometry, retained = Geometry(16, 1, pairs=((0, 3), (1, 2))), {(0, 3): np.array([2, 19, 20, 90])}
    reader = put(store, kv, chain, 0, 6, Geometry())
    monkeypatch.setattr("hf_tiered_cache.store.relayout._RUN", 20)
    same(
        read(store, joined(store, [reader], geometry, [33, 1, 0, 0, 0], retained)),
        arithmetic(kv, geometry, [33, 1, 0, 0, 0], retained),
    )


def test_with_a_key(tmp_path):
    store, kv, chain = open_store(tmp_path, cipher=StoreCipher(bytes(32))), kv_of(64, 12), hashes(4)
    readers = [put(store, kv, chain, *ends, Geometry()) for ends in ((0, 3), (3, 4))]
    geometry, retained = Geometry(16, 1, pairs=((0, 3),)), {(0, 3): np.array([7])}
    result = joined(store, readers, geometry, [16, 0, 0, 0, 0], retained)
    assert result.header.seal is not None and result.header.seal.salt not in {
        reader.header.seal.salt for reader in readers
    }
    same(read(store, result), arithmetic(kv, geometry, [16, 0, 0, 0, 0], retained))


# --- the file


FORMAT_10 = {"raw": "192495f2bb452e84", "int8": "5f57ec4383fa474f"}
"""sha256 of files of format 10 with pairs."""


@pytest.mark.parametrize("codec", FORMAT_10)
def test_files_of_format_10_with_pairs_stay_what_they_are(tmp_path, codec):
    """Numbers whose merging leaves nothing to rounding: what is not parallel is on axes, and opposite at that."""
    store, chain, geometry = open_store(tmp_path), hashes(4), Geometry(16, 1, codec=codec, pairs=((0, 3), (1, 2)))
    axes = torch.eye(8)[torch.arange(64) % 8].expand(2, 64, 8)
    kv = {(layer, name): axes * (2.0 + layer) for layer in range(LAYERS) for name in ("key", "value")}
    result = joined(
        store,
        [put(store, kv, chain, 0, 4, Geometry(codec=codec))],
        geometry,
        [32, 20, 16, 0, 0],
        {(0, 3): np.array([40, 50])},
    )
    page = page_of(store.path(result.id))
    forge(store.path(result.id), page | {"created": 1.0})
    data = store.path(result.id).read_bytes()
    assert page["geometry"]["pairs"] == [[0, 3], [1, 2]]
    same(
        read(store, result),
        {name: tensor * (torch.arange(64) >= [32, 20, 16, 0, 0][name[0]])[:, None] for name, tensor in kv.items()},
    )
    assert hashlib.sha256(data).hexdigest()[:16] == FORMAT_10[codec]


def test_what_is_merged_is_not_written_as_exact(tmp_path):
    store, kv, chain = open_store(tmp_path), kv_of(64, 1), hashes(4)
    for codec in CODECS:
        reader = put(store, kv, chain, 0, 4, Geometry(codec=codec), "exact")
        with pytest.raises(FormatError, match="merged"):
            joined(store, [reader], Geometry(16, 1, codec=codec, pairs=((0, 3),)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the file of a segment with pairs, in a closed store."""
    store = open_store(tmp_path_factory.mktemp("forged"))
    kv, chain = kv_of(64, 2), hashes(4)
    plain = put(store, kv, chain, 0, 4, Geometry())
    reader = joined(
        store, [plain], Geometry(16, 1, pairs=((0, 2), (1, 4))), [20, 16, 8, 0, 0], {(0, 2): np.arange(40, 44)}
    )
    store.remove([plain.id])
    expected, file_content = read(store, reader), store.path(reader.id).read_bytes()
    store.close()
    return store.backend.root, reader.id, file_content, expected


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_any_value_anywhere_in_the_header_is_a_counted_miss(made, data):
    def put(page):
        ways = list(places(page))
        # half of them in the geometry
        value_path = data.draw(st.sampled_from(ways) | st.sampled_from([way for way in ways if way[0] == "geometry"]))
        put_value(page, value_path, data.draw(st.sampled_from(ODD) | st.integers(0, 9) | st.just([[0, 2]])))

    root, name, file_content, expected = made
    store = open_forged(root, name, file_content, put)
    if store.find(hashes(4)):
        reader = store.reader(name)
        if reader.shape.layout == LAYOUT:  # heads that fit into the ends of blocks: `check_fit` refuses them
            with suppress(IntegrityError):  # other pairs cut other blocks out of it
                same(read(store, reader), expected)
    else:
        assert_counted(store, name)
    store.close()


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 7 + 7 * 64), st.sampled_from([0, 1, 3, 5, 43, 63, 64, 2**31, 2**32 - 1]))
def test_tables_that_say_something_else_are_refused_or_are_tables(made, number, value):
    """Checksums are right: no table holds a token twice, or reads beyond the file."""
    root, name, file_content, _ = made
    path = root / "segments" / f"{name}.kv"
    header, _ = decode_header(file_content[:HEADER_BYTES])
    data = bytearray(file_content)
    struct.pack_into("<I", data, header.tables.offset + 4 * number, value)
    forge_section(path, "tables", data)
    try:
        shape = read_file(path).header.shape
    except FormatError:
        return
    assert aligned(shape.blocks_bytes) == header.blocks.nbytes
    for layer in range(LAYERS):
        group_tokens = [shape.tokens_by_slot(group) for group in shape.block_groups if layer in group.layers]
        assert len(np.unique(np.concatenate(group_tokens))) == sum(map(len, group_tokens))


def test_a_file_that_holds_a_token_twice_is_refused(tmp_path):
    """Everything else is right in it."""
    store, kv, chain = open_store(tmp_path), kv_of(64, 2), hashes(4)
    geometry, retained = Geometry(16, 1, pairs=((1, 3),)), np.arange(30, 34)
    reader = joined(store, [put(store, kv, chain, 0, 4, Geometry())], geometry, retained={(1, 3): retained})
    path, header = store.path(reader.id), reader.header
    row = header.shape.tables.of_group[next(g.index for g in header.shape.block_groups if g.layers == (1,))]
    at = header.tables.offset + 4 * (1 + len(header.shape.block_groups) + int(row) * 64)
    data = bytearray(path.read_bytes())
    data[at + 4 * 30 : at + 4 * 34] = struct.pack("<4I", *[NOT_HELD] * 4)
    data[at : at + 16] = struct.pack("<4I", 0, 1, 2, 3)  # which lie in the pair
    forge_section(path, "tables", data)
    with pytest.raises(FormatError, match="twice"):
        read_file(path)


def test_a_page_holds_the_pairs_of_126_layers(tmp_path):
    kind = LayerKV(8, 128, 8, 128, rotated="key", rotary_dims=128)
    geometry = Geometry(16, 1, pairs=tuple((i, i + 63) for i in range(63)))
    shape = SegmentShape(KVLayout((kind,) * 126, torch.bfloat16), geometry, 16)
    tables = TokenTables.by_pairs([0] * 126, {}, shape.block_groups, 16)
    header = SegmentHeader("0" * 32, "f" * 32, replace(shape, tables=tables), bytes(16), 0, 1.0, MERGED)
    from hf_tiered_cache.store.container import DIGEST_DTYPE, Guard
    from hf_tiered_cache.store.format import encode_head, lay_out

    laid = lay_out(header, 1)
    head = encode_head(laid, hashes(1), np.zeros(laid.shape.first_blocks[-1], DIGEST_DTYPE), Guard())
    assert decode_header(head[:HEADER_BYTES])[0].shape.geometry == geometry


def test_methods_that_choose_use_no_segment_with_pairs():
    shape = SegmentShape(LAYOUT, Geometry(16, 1, pairs=((0, 3),)), 64)
    shape = replace(shape, tables=TokenTables.by_pairs([0] * LAYERS, {}, shape.block_groups, 64))
    for name, kind in METHODS.items():
        assert kind().usable_hashes(shape) == (0 if issubclass(kind, BudgetMethod) else 4), name
    assert ContiguousKV(budget=1.0).usable_hashes(shape) == 4
