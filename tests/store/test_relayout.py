"""Laying segments out anew: the same tokens in another geometry, and nothing lost on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from segments import LAYOUT, hashes, open_store, read_back, segment

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import METHODS
from hf_tiered_cache.store.codecs import RAW
from hf_tiered_cache.store.geometry import Geometry, KeyIndex
from hf_tiered_cache.store.relayout import join_segments

geometries = st.builds(
    Geometry,
    chunk_tokens=st.sampled_from([8, 16, 24, 64]),
    layers_per_block=st.integers(1, 6),
    heads_per_block=st.sampled_from([None, 1]),
    split_kv=st.booleans(),
    solo_layers=st.integers(0, 3),
    index=st.none() | st.builds(KeyIndex, every=st.integers(1, 3), heads=st.sampled_from([None, 1])),
)


def tensors(reader, blocks):
    """Return every layer's keys and values, `[heads, tokens, dim]`, from `read_back`; check an index against them."""
    content = {}
    for block_group, memory in zip(reader.shape.block_groups, blocks, strict=True):
        for part in block_group.parts:
            kv = reader.shape.unpack(memory, block_group, part).view(torch.int32)  # random bytes: not all are numbers
            if block_group.identifies:
                assert torch.equal(kv, content[part.layer, part.tensor][part.first_head : part.first_head + part.heads])
            else:
                all_heads = content.setdefault(
                    (part.layer, part.tensor), torch.zeros(2, reader.shape.tokens, 8, dtype=torch.int32)
                )
                all_heads[part.first_head : part.first_head + part.heads] = kv
    return content


@given(geometries.filter(lambda geometry: geometry.index is None), geometries, st.integers(1, 7))
def test_any_geometry_becomes_any_other(tmp_path_factory, before, after, count):
    store = open_store(tmp_path_factory.mktemp("store"))
    header, chain, block_groups = segment(hashes(count), geometry=before, model={"name": "small"}, label="a text")
    assert store.publish(header, chain, block_groups)
    old = store.reader(header.id)
    new_header, new_hashes, blocks = join_segments([old], after)
    assert store.publish(new_header, new_hashes, blocks)
    new = store.reader(new_header.id)
    assert new.shape.geometry == after
    assert new_hashes == chain
    assert (new.header.parent, new.header.fingerprint) == (header.parent, header.fingerprint)
    assert (new.header.model, new.header.label) == ({"name": "small"}, "a text")
    source, result = tensors(old, read_back(store, old.id)), tensors(new, read_back(store, new.id))
    assert source.keys() == result.keys() == {(i, name) for i in range(len(LAYOUT.layers)) for name in ("key", "value")}
    assert all(torch.equal(source[name], result[name]) for name in source)


def test_a_store_is_laid_out_anew_and_serves_as_before(tmp_path):
    model, prompts = build("qwen2"), [prompt(200, seed=seed) for seed in (1, 2)]
    settings = {"do_sample": False, "max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, [ids[0] for ids in prompts], progress=False)
        (pinned, _) = (row.id for row in store.segments())
        store.pin([pinned])
        request_ids = torch.cat([prompts[0], prompt(20, seed=9)], dim=1)
        before = model.generate(request_ids, past_key_values=TieredCache(model, store, record=False), **settings)
        for name, method in METHODS.items():
            geometry = replace(method().geometry, codec=RAW)  # relayout does not change the codec
            assert store.relayout(geometry, progress=False) in (0, 2), name
            readers = [store._storage.disk.reader(row.id) for row in store.segments()]
            assert [reader.shape.geometry for reader in readers] == [geometry] * 2
            assert not store.verify().bad
            assert len(store._storage.disk.backend.pinned()) == 1
            cache = TieredCache(model, store, record=False)
            after = model.generate(request_ids, past_key_values=cache, **settings)
            assert cache.stats.tokens_restored == 192
            for a, b in zip(before.logits, after.logits, strict=True):
                assert torch.equal(a, b)


def test_what_cannot_be_read_is_left_and_counted(tmp_path):
    model = build("qwen2")
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, [prompt(200)[0]], progress=False)
        (row,) = store.segments()
        reader = store._storage.disk.reader(row.id)
        path = store._storage.disk.path(row.id)
        data = bytearray(path.read_bytes())
        data[reader.header.blocks.offset + 5 * reader.shape.block_groups[0].block_bytes] ^= 1
        path.write_bytes(data)
        assert store.relayout(Geometry(32, 1), progress=False) == 0
        assert store.stats.verification_failures == 1
        (row,) = store.segments()
        assert row.valid_hashes == 5  # what stands before the fault still serves
        assert list((store.path / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.thin(2)
def test_precompute_cuts_as_the_method_wants(tmp_path, name):
    method = METHODS[name]()
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(build("qwen2"), [prompt(100)[0]], progress=False, method=method)
        (row,) = store.segments()
        assert store._storage.disk.reader(row.id).shape.geometry == method.geometry
