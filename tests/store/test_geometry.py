"""Geometry: every head of every layer has its place in exactly one block group, and no two places overlap."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.errors import ConfigError, FormatError
from hf_tiered_cache.store.geometry import BLOCK_ALIGNMENT, Geometry, KVLayout, LayerKV, block_groups
from hf_tiered_cache.store.shape import SegmentShape

layers = st.builds(
    LayerKV,
    key_heads=st.integers(1, 5),
    key_dim=st.sampled_from([4, 8, 24, 64]),
    value_heads=st.integers(1, 5),
    value_dim=st.sampled_from([4, 8, 32]),
    window=st.sampled_from([0, 0, 32, 64]),
    rotated=st.sampled_from(["", "key", "value"]),
    rotary_dims=st.integers(0, 8),
    position_independent=st.booleans(),
)
layouts = st.builds(
    KVLayout,
    layers=st.lists(st.one_of(layers, layers, st.none()), min_size=1, max_size=12).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
).filter(lambda layout: any(layout.layers))
geometries = st.builds(
    Geometry,
    chunk_tokens=st.sampled_from([4, 8, 16, 64]),
    layers_per_block=st.integers(1, 5),
    heads_per_block=st.one_of(st.none(), st.integers(1, 3)),
    split_kv=st.booleans(),
    solo_layers=st.integers(0, 3),
)


@given(layouts, geometries)
def test_every_head_lies_in_exactly_one_block_group(layout, geometry):
    group_heads = [
        (part.layer, part.tensor, part.first_head + head)
        for block_group in block_groups(layout, geometry)
        for part in block_group.parts
        for head in range(part.heads)
    ]
    expected = [
        (index, tensor, head)
        for index, layer in enumerate(layout.layers)
        if layer is not None
        for tensor in ("key", "value")
        for head in range(layer.heads(tensor))
    ]
    assert sorted(group_heads) == sorted(expected)


@given(layouts, geometries)
def test_block_groups_are_aligned_separate_windows_and_come_in_the_order_of_layers(layout, geometry):
    groups = block_groups(layout, geometry)
    assert [block_group.index for block_group in groups] == list(range(len(groups)))
    assert [block_group.layers[0] for block_group in groups] == sorted(block_group.layers[0] for block_group in groups)
    for block_group in groups:
        assert block_group.block_bytes % BLOCK_ALIGNMENT == 0
        assert 0 <= block_group.block_bytes - block_group.payload_bytes < BLOCK_ALIGNMENT
        assert {layout.layers[i].window for i in block_group.layers} == {block_group.window}
        assert len(block_group.layers) <= geometry.layers_per_block
        offsets = [(part.fields[0].offset, part.end) for part in block_group.parts]
        assert offsets[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(offsets))
        assert offsets[-1][1] == block_group.payload_bytes


@given(layouts, geometries, st.integers(1, 200))
def test_part_views_write_their_own_bytes_and_no_others(layout, geometry, tokens):
    shape = SegmentShape(layout, geometry, tokens)
    block_group = shape.block_groups[-1]
    blocks = torch.zeros(shape.chunks_in(block_group), block_group.block_bytes, dtype=torch.uint8)
    for number, part in enumerate(block_group.parts, start=1):
        view = shape.field_views(blocks, part)[0]
        assert view.shape == (shape.chunks_in(block_group), part.heads, geometry.chunk_tokens, part.dim)
        view.fill_(number)
    for number, part in enumerate(block_group.parts, start=1):
        assert (shape.field_views(blocks, part)[0] == number).all()
    assert (blocks[:, block_group.payload_bytes :] == 0).all()


@given(layouts, geometries, st.integers(1, 500))
def test_segment_offsets_tile_the_file(layout, geometry, tokens):
    shape = SegmentShape(layout, geometry, tokens)
    chunks = {shape.chunks_in(block_group) for block_group in shape.block_groups}
    assert all((count - 1) * geometry.chunk_tokens < tokens <= count * geometry.chunk_tokens for count in chunks)
    sizes = [block_group.block_bytes * shape.chunks_in(block_group) for block_group in shape.block_groups]
    assert [b - a for a, b in zip(shape.group_offsets, shape.group_offsets[1:], strict=False)] == sizes
    assert shape.blocks_bytes == sum(sizes)


@given(layouts, geometries)
def test_json_round_trip(layout, geometry):
    assert KVLayout.from_json(layout.to_json()) == layout
    assert Geometry.from_json(geometry.to_json()) == geometry


def test_bytes_per_token_of_a_known_model():
    """Qwen2.5-7B in bf16: 28 layers, 4 KV heads of 128: 56 KiB."""
    layout = KVLayout((LayerKV(4, 128, 4, 128),) * 28, torch.bfloat16)
    assert layout.bytes_per_token == 56 * 1024
    blocks = block_groups(layout, Geometry(chunk_tokens=16, layers_per_block=1))
    assert {block_group.block_bytes for block_group in blocks} == {32 * 1024}


@pytest.mark.parametrize(
    "wrong", [{"chunk_tokens": 0}, {"layers_per_block": -1}, {"heads_per_block": 1.5}, {"solo_layers": -1}]
)
def test_meaningless_geometries_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Geometry(**wrong)


@pytest.mark.parametrize(
    "wrong", [{}, {"dtype": "float99", "kinds": [], "layers": []}, {"dtype": "float32", "kinds": [], "layers": [3]}]
)
def test_broken_layouts_are_format_errors(wrong):
    with pytest.raises(FormatError):
        KVLayout.from_json(wrong)


def test_broken_geometries_are_format_errors():
    with pytest.raises(FormatError):
        Geometry.from_json({"chunk_tokens": 16})
