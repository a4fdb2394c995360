"""Codecs: what comes back is close by a known measure, takes half, and is never taken for what was computed."""

from __future__ import annotations

import importlib
import json
import secrets
from dataclasses import replace

import pytest
import torch
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import KV, Remembering, assert_same, prefilled
from segments import hashes, open_store, read_back, segment, without_catalogue
from test_forged import forge, page_of
from test_geometry import geometries, layouts
from thorough import pairs

from eval.baselines import H2O, AttentionStore
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError, FormatError, OtherFormatError
from hf_tiered_cache.methods import METHODS, CacheTune, ContiguousKV, Epic, Exact, Impress, make_method
from hf_tiered_cache.store.codecs import CODECS, codec_in, coded_provenance, make_codec
from hf_tiered_cache.store.format import HEADER_BYTES, decode_header
from hf_tiered_cache.store.geometry import Geometry, KVLayout, LayerKV, block_groups
from hf_tiered_cache.store.relayout import join_segments
from hf_tiered_cache.store.shape import SegmentShape
from hf_tiered_cache.store.writer import PendingSegment

LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GREEDY = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
every_codec = pytest.mark.parametrize("codec", CODECS)
every_lossy = pytest.mark.parametrize("codec", LOSSY)


# --- the codecs alone


@st.composite
def tensors(draw):
    """Draw `[heads, tokens, dim]`, with rows of any magnitude of the dtype, or zero."""
    dtype = draw(st.sampled_from(DTYPES))
    heads, tokens, dim = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 8, 64]))
    numbers = torch.rand(heads, tokens, dim, generator=torch.Generator().manual_seed(draw(st.integers(0, 999)))) * 2 - 1
    limits = torch.finfo(dtype)
    magnitudes = st.sampled_from([0.0, limits.smallest_normal, 1e-5, 1.0, 300.0, limits.max])
    sizes = torch.tensor([[draw(magnitudes) for _ in range(tokens)] for _ in range(heads)])
    return (numbers * sizes[..., None]).to(dtype)


def bound(codec, tensor):
    """Return the maximum error of each number, including the rounding to the tensor's dtype."""
    wide, limits = tensor.double(), torch.finfo(tensor.dtype)
    most = wide.abs().amax(-1, keepdim=True)
    if codec == "int8":
        off = most / 254
    elif codec == "fp8":
        off = torch.maximum(wide.abs() / 16, most / 448 / 1024)
    else:
        return torch.zeros_like(wide)
    return off * (1 + 1e-6) + most * limits.eps + 127 * torch.finfo(torch.float32).tiny + limits.smallest_normal


@every_codec
@given(tensor=tensors())
def test_no_number_is_off_by_more_than_its_step(codec, tensor):
    kv_codec = make_codec(codec)
    fields = kv_codec.encode(tensor)
    back = kv_codec.decode(fields, tensor.dtype)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.isfinite().all()
    assert ((back.double() - tensor.double()).abs() <= bound(codec, tensor)).all()
    assert (back[(tensor == 0).all(-1)] == 0).all()
    declared_fields = kv_codec.fields(tensor.dtype, tensor.shape[-1])
    assert [(field.dtype, field.shape[-1]) for field in fields] == [tuple(field) for field in declared_fields]


@every_codec
@given(tensor=tensors())
def test_a_token_is_coded_by_itself_and_always_alike(codec, tensor):
    kv_codec = make_codec(codec)
    whole_fields = kv_codec.encode(tensor)
    for token in range(tensor.shape[1]):
        alone = kv_codec.encode(tensor[:, token : token + 1].clone())
        assert all(torch.equal(a, b[:, token : token + 1]) for a, b in zip(alone, whole_fields, strict=True))
    strided = tensor.transpose(0, 1).contiguous().transpose(0, 1)  # as projections hand them out
    assert all(torch.equal(a, b) for a, b in zip(kv_codec.encode(strided), whole_fields, strict=True))


@every_lossy
@given(tensor=tensors())
def test_what_was_decoded_loses_nothing_more_when_it_is_coded_again(codec, tensor):
    kv_codec = make_codec(codec)
    once = kv_codec.decode(kv_codec.encode(tensor), tensor.dtype)
    twice = kv_codec.decode(kv_codec.encode(once), tensor.dtype)
    off = (twice.double() - once.double()).abs()
    # a scale of float32 may differ in its last bit
    assert (off <= once.double().abs() * (2**-22 if tensor.dtype == torch.float32 else 0)).all()


@every_lossy
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_not_finite_comes_back_as_nan_and_spoils_no_other(codec, odd, dtype):
    tensor = torch.randn(2, 4, 8).to(dtype)
    tensor[1, 2, 3] = odd
    kv_codec = make_codec(codec)
    back = kv_codec.decode(kv_codec.encode(tensor), dtype)
    spoiled = torch.zeros(2, 4, dtype=torch.bool)
    spoiled[1, 2] = True
    assert back[spoiled].isnan().all() and back[~spoiled].isfinite().all()


def test_raw_keeps_every_bit():
    tensor = torch.randint(-(2**15), 2**15, (2, 8, 16), dtype=torch.int16).view(torch.bfloat16)
    codec = make_codec("raw")
    assert torch.equal(codec.decode(codec.encode(tensor), torch.bfloat16).view(torch.int16), tensor.view(torch.int16))


@pytest.mark.parametrize("wrong", ["int7", "", None, 8])
def test_what_is_no_codec_is_refused_with_those_there_are(wrong, tmp_path):
    for make in (make_codec, lambda name: Geometry(codec=name), lambda name: KVStore(tmp_path / "s", codec=name)):
        with pytest.raises(ConfigError, match="raw, int8, fp8"):
            make(wrong)
    assert not (tmp_path / "s").exists()
    if wrong is not None:
        with pytest.raises(ConfigError, match="raw, int8, fp8"):
            Exact(codec=wrong)


# --- in blocks


@every_codec
@given(layouts, geometries)
def test_fields_lie_apart_and_aligned(codec, layout, geometry):
    for block_group in block_groups(layout, replace(geometry, codec=codec)):
        end = 0
        for part in block_group.parts:
            assert part.fields[0].offset >= end
            for slot, field in zip(part.fields, CODECS[codec].fields(layout.dtype, part.dim), strict=True):
                assert end <= slot.offset < end + slot.dtype.itemsize and slot.offset % slot.dtype.itemsize == 0
                assert slot.nbytes == part.heads * geometry.chunk_tokens * field.dim * field.dtype.itemsize
                end = slot.offset + slot.nbytes
        assert end == block_group.payload_bytes <= block_group.block_bytes


@every_codec
@given(layouts, geometries, st.integers(1, 200))
def test_blocks_hold_what_the_codec_makes_of_each_part(codec, layout, geometry, tokens):
    shape = SegmentShape(layout, replace(geometry, codec=codec), tokens)
    block_group = shape.block_groups[-1]
    blocks = torch.zeros(shape.chunks_in(block_group), block_group.block_bytes, dtype=torch.uint8)
    part_tensors = {part: torch.randn(part.heads, tokens, part.dim).to(layout.dtype) for part in block_group.parts}
    for part, tensor in part_tensors.items():
        shape.pack(blocks, block_group, part, tensor)
    kv_codec = CODECS[codec]
    for part, tensor in part_tensors.items():
        expected = kv_codec.decode(kv_codec.encode(tensor), layout.dtype)
        assert torch.equal(shape.unpack(blocks, block_group, part), expected)
        decoded = kv_codec.decode(shape.field_views(blocks, part), layout.dtype).transpose(0, 1).flatten(1, 2)
        assert torch.equal(decoded[:, :tokens], expected)
        assert (decoded[:, tokens:] == 0).all()


@every_codec
@given(layouts, geometries)
def test_geometries_with_codecs_go_through_json(codec, layout, geometry):
    coded = replace(geometry, codec=codec)
    assert Geometry.from_json(json.loads(json.dumps(coded.to_json()))) == coded


@every_lossy
@pytest.mark.parametrize(("dtype", "of"), [(torch.bfloat16, 1 / 2), (torch.float32, 1 / 4)])
def test_a_large_model_takes_half_of_bfloat16(codec, dtype, of):
    """Qwen2.5-7B's 28 layers, 4 KV heads of 128: a scale is 1/32 of the codes, and a block ends on 512 bytes."""
    layout = KVLayout((LayerKV(4, 128, 4, 128),) * 28, dtype)
    raw_bytes, half = (SegmentShape(layout, Geometry(codec=name), 4096).blocks_bytes for name in ("raw", codec))
    assert of < half / raw_bytes < of * 1.07


# --- in a store


def opened(root, codec="raw", **options):
    return KVStore(root, engine="posix", codec=codec, **options)


def ask(model, store, ids, method=None, **options):
    cache = TieredCache(model, store, method=method, record=False, **options)
    return model.generate(ids, past_key_values=cache, **GREEDY), cache.stats


@torch.no_grad()
def coded_kv(model, ids, codec, monkeypatch) -> KV:
    """Return the KV of a prompt after a codec before rotation, without our cache, store or patches."""
    modeling, kv_codec, rotated = importlib.import_module(type(model).__module__), make_codec(codec), []
    rotate = getattr(modeling, "apply_rotary_pos_emb", None)

    def through(tensor):
        return kv_codec.decode(kv_codec.encode(tensor), tensor.dtype)

    def noting(query, key, cos, sin, *more, **named):
        rotated.append(rotate(query, through(key), cos, sin, *more, **named)[1])
        return rotate(query, key, cos, sin, *more, **named)

    cache = Remembering(model)
    with monkeypatch.context() as patch:
        if rotate is not None:
            patch.setattr(modeling, "apply_rotary_pos_emb", noting)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    kv = cache.all()
    keys = rotated or [through(key) for key, _ in kv]
    return [(key, through(value)) for key, (_, value) in zip(keys, kv, strict=True)]


@every_lossy
@pytest.mark.parametrize(
    ("family", "dtype"),
    pairs(["llama", "qwen2", "qwen3", "gemma2", "glm4", "opt"], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_logits_are_those_of_a_dynamic_cache_whose_kv_went_through_the_codec(family, dtype, codec, root, monkeypatch):
    model, ids = build(family, dtype), prompt(100)
    kv = coded_kv(model, ids, codec, monkeypatch)
    question = torch.cat([ids[:, :90], prompt(12, seed=5)], dim=1)
    reference_output = model.generate(question, past_key_values=prefilled(model, [kv], 80), **GREEDY)
    with opened(root, codec) as store:
        store.precompute(model, ids, progress=False)
    with opened(root, codec) as store:
        for tier in ("disk", "host"):
            output, stats = ask(model, store, question)
            assert (stats.tokens_restored, stats.tier) == (80, tier)
            assert_same(output, reference_output)


def test_bytes_on_disk(root):
    """Heads of 64 dims: the scales are 1/16 of the codes, and the end of a block costs nothing."""
    changes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
    ids, sizes = prompt(128), {}
    for dtype in (torch.bfloat16, torch.float32):
        model = build("qwen2", dtype, **changes)
        for codec in CODECS:
            for layers in (4, 8):
                with opened(root / f"{codec}{dtype}{layers}", codec) as store:
                    method = Exact(geometry=Geometry(16, layers))
                    store.precompute(model, ids, method=method, progress=False)
                    (row,) = store.segments()
                    header = store._storage.disk.reader(row.id).header
                    assert header.file_bytes <= row.nbytes <= header.file_bytes + 4096
                    sizes[codec, dtype, layers] = header.blocks.nbytes
    for codec in LOSSY:
        for layers, share in ((4, 34 / 64), (8, 68 / 128)):
            for dtype, of in ((torch.bfloat16, 1), (torch.float32, 2)):
                assert sizes[codec, dtype, layers] / sizes["raw", dtype, layers] == share / of


@pytest.mark.parametrize(("stored", "method_codec"), [(a, b) for a in CODECS for b in CODECS if a != b])
@pytest.mark.thin(2)
def test_what_is_stored_with_one_codec_is_found_with_no_other(stored, method_codec, root):
    model, ids = build("qwen2"), prompt(100)
    with opened(root, stored) as store:
        store.precompute(model, ids, progress=False)
        plain, stats = ask(model, store, ids, Exact(codec=method_codec))
        assert stats.tokens_restored == 0 and f"codec={stored!r}" in stats.reason
        assert (
            ask(model, store, ids)[1].tokens_restored
            == 96
            == ask(model, store, ids, Exact(codec=stored))[1].tokens_restored
        )
        assert store.lookup(model, ids, method=Exact(codec=method_codec)).stored == 0 < store.lookup(model, ids).stored
    with opened(root, method_codec) as store:
        second_output, stats = ask(model, store, ids)
        assert stats.tokens_restored == 0
        assert_same(second_output, plain)
        assert_same(plain, model.generate(ids, **GREEDY))
        store.precompute(model, ids, progress=False)
        assert {codec_in(row.provenance) for row in store.segments()} == {stored, method_codec}
        assert (
            ask(model, store, ids)[1].tokens_restored
            == 96
            == ask(model, store, ids, Exact(codec=stored))[1].tokens_restored
        )


def test_no_method_finds_lossy_kv_unless_it_names_the_codec(root):
    model, ids, passage = build("qwen2"), prompt(200), prompt(96, seed=9)
    with opened(root, "int8") as store:
        store.precompute(model, ids, progress=False)
        store.precompute(model, [passage[0]], passages=True, progress=False, method="epic")
    with opened(root) as store:
        together = torch.cat([prompt(16, seed=3), passage, prompt(8, seed=4)], dim=1)
        for name in METHODS:
            cache = TieredCache(model, store, method=name, record=False)
            for request_ids in (ids, together):
                cache.reset()
                model.generate(request_ids, past_key_values=cache, **GREEDY)
                assert cache.stats.tokens_restored == 0, name
        assert all(codec_in(row.provenance) == "int8" for row in store.segments())


def test_what_follows_a_lossy_prefix_stays_lossy(root):
    """Tokens that are computed behind decoded KV are stored under the codec's provenance, too."""
    model, ids = build("qwen2"), prompt(100)
    with opened(root, "int8") as store:
        store.precompute(model, ids, progress=False)
        longer = torch.cat([ids, prompt(60, seed=2)], dim=1)
        model.generate(longer, past_key_values=TieredCache(model, store), **GREEDY)
        store.flush()
        assert len(store.segments()) == 2
        assert {row.provenance for row in store.segments()} == {"exact int8"}
        assert ask(model, store, longer)[1].tokens_restored == 159
        assert ask(model, store, longer, Exact(codec="raw"))[1].tokens_restored == 0


def test_a_methods_codec_goes_before_the_stores(root):
    assert all(METHODS[name](codec="int8").geometry.codec == "int8" for name in METHODS)
    assert make_method("contiguous_kv:budget=0.5:codec=fp8") == ContiguousKV(0.5, codec="fp8")
    assert make_method("epic:recompute=0.5:codec=int8") == Epic(0.5, codec="int8")
    assert Exact(geometry=Geometry(8, 2, codec="fp8")).coded("int8").geometry.codec == "fp8"
    assert AttentionStore().coded("int8").geometry == Geometry(64, 1, codec="int8")
    assert H2O(codec="raw").coded("int8").geometry.codec == "raw"
    model, ids = build("qwen2"), prompt(100)
    with opened(root, "int8") as store:
        store.precompute(model, ids, method=Exact(codec="raw"), progress=False)
        (row,) = store.segments()
        assert row.provenance == "exact"
    with opened(root) as store:  # what a store with another default wrote for this method
        assert_same(
            ask(model, store, ids)[0], model.generate(ids, past_key_values=prefilled_exactly(model, ids), **GREEDY)
        )


def prefilled_exactly(model, ids):
    cache = Remembering(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return prefilled(model, [cache.all()], 96)


@every_lossy
@pytest.mark.parametrize(
    "geometry",
    [Geometry(24, 2, 1), Geometry(16, 8, split_kv=True), Geometry(7, 3, solo_layers=1), ContiguousKV().geometry],
    ids=str,
)
@pytest.mark.thin(2)
def test_any_geometry_gives_the_same_bits(codec, geometry, root):
    model, ids = build("gemma2"), prompt(150)
    with opened(root / "a", codec) as store:
        store.precompute(model, ids, progress=False)
        reference_output, _ = ask(model, store, ids)
        with opened(root / "b", codec) as second:
            second.precompute(model, ids, method=Exact(geometry=geometry), progress=False)
            assert second._storage.disk.reader(second.segments()[0].id).shape.geometry == replace(geometry, codec=codec)
            assert_same(ask(model, second, ids)[0], reference_output)
        fields = fields_in(store)
        assert store.relayout(geometry, progress=False) == 1
        assert store.relayout(geometry, progress=False) == 0
        assert store._storage.disk.reader(store.segments()[0].id).shape.geometry == replace(geometry, codec=codec)
        output, stats = ask(model, store, ids)
        assert stats.tokens_restored == 144
        assert_same(output, reference_output)
        new_fields = fields_in(store)
        assert all(torch.equal(a, b) for name in fields for a, b in zip(fields[name], new_fields[name], strict=True))


def fields_in(store):
    """Return the fields of all heads of the only segment, by layer and tensor."""
    (row,) = store.segments()
    shape, fields = store._storage.disk.reader(row.id).shape, {}
    for block_group, blocks in zip(shape.block_groups, read_back(store._storage.disk, row.id), strict=True):
        for part in block_group.parts if not block_group.identifies else ():
            fields.setdefault((part.layer, part.tensor), []).append(shape.unpack_fields(blocks, block_group, part))
    return {name: [torch.cat(field) for field in zip(*parts, strict=True)] for name, parts in fields.items()}


def test_relayout_does_not_change_the_codec(root):
    model, ids = build("qwen2"), prompt(100)
    with opened(root) as store:
        store.precompute(model, ids, progress=False)
        before = [row.id for row in store.segments()]
        for geometry in (ContiguousKV(codec="int8"), Geometry(8, 2, codec="fp8")):
            with pytest.raises(ConfigError, match=r"codec raw.*precompute"):
                store.relayout(geometry, progress=False)
        assert [row.id for row in store.segments()] == before
        assert store.relayout(ContiguousKV(codec="int8"), [], progress=False) == 0
        old = store._storage.disk.reader(before[0])
        assert join_segments([old], Geometry(8, 2, codec="fp8"))[0].shape.geometry == Geometry(8, 2)
        store.precompute(model, ids, method=Exact(codec="int8"), progress=False)
        assert store.relayout(Geometry(8, 2), progress=False) == 2  # each in its own codec
        assert {store._storage.disk.reader(row.id).shape.geometry.codec for row in store.segments()} == {"raw", "int8"}
        int8 = (row.id for row in store.segments() if "int8" in row.provenance)
        assert store.relayout(ContiguousKV(codec="int8"), int8, progress=False) == 1


@every_lossy
@pytest.mark.parametrize("key", [None, secrets.token_bytes(32)], ids=["plain", "encrypted"])
def test_a_store_may_hold_segments_with_and_without_a_codec(codec, key, root):
    model, ids = build("qwen2"), prompt(100)
    question = torch.cat([ids, prompt(8, seed=3)], dim=1)
    with opened(root, codec) as store:
        store.precompute(model, ids, progress=False)
        reference_output, _ = ask(model, store, question)
    with opened(root.parent / "other", codec, key=key) as store:
        store.precompute(model, ids, progress=False)
        store.precompute(model, ids, method=Exact(codec="raw"), progress=False)
        assert {row.provenance for row in store.segments()} == {f"exact {codec}", "exact"}
        store._storage.residency.clear()
        output, stats = ask(model, store, question)
        assert (stats.tokens_restored, stats.tier) == (96, "disk")
        assert_same(output, reference_output)
        assert store.verify().ok


@every_lossy
def test_passages(codec, root):
    model = build("llama")
    passages = [prompt(96, seed=1)[0], prompt(64, seed=2)[0]]
    ids = torch.cat([torch.tensor([1]), prompt(7, seed=3)[0], passages[1], passages[0], prompt(9, seed=4)[0]])[None]
    method = CacheTune.paper(0.2)
    with opened(root, codec) as store, opened(root.parent / "raw") as raw:
        for kv_store in (store, raw):
            kv_store.precompute(model, passages, passages=True, method=method, progress=False)
        logits = {}
        for name, kv_store in {codec: store, "raw": raw}.items():
            cache = TieredCache(model, kv_store, method=method, record=False)
            with torch.no_grad():
                logits[name] = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            assert cache.stats.tokens_restored == 96 - 19 + 64 - 12
        off = (logits[codec] - logits["raw"]).abs().max() / logits["raw"].abs().max()
        assert 0 < off < 0.05
        assert {row.provenance for row in store.segments()} == {f"passage {codec}"}
        # another codec's passages are not seen, and the reason says which codec they have
        _, stats = ask(model, store, ids, replace(method, codec="raw"))
        assert stats.tokens_restored == 0 and f"codec={codec!r}" in stats.reason
        # nor is one stored once more with the codec it has
        assert store.precompute(model, passages, passages=True, method=method, progress=False).stored == 0
        # laid out anew it keeps ranking and codec
        assert store.relayout(Geometry(16, 2), progress=False) == 2
        cache = TieredCache(model, store, method=method, record=False)
        with torch.no_grad():
            second_logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        assert torch.equal(second_logits, logits[codec])


@every_lossy
@pytest.mark.parametrize(
    "method",
    [
        ContiguousKV(0.3, chunk_tokens=16, reorder=False),
        ContiguousKV(0.3, chunk_tokens=16, identify="keys", reselect=False, reorder=False),
        Impress(0.3, probe_heads=2),
        H2O(0.3),
    ],
    ids=lambda method: f"{type(method).__name__} {getattr(method, 'identify', '')}",
)
@pytest.mark.thin(2)
def test_methods_with_a_budget_choose_among_what_was_decoded(method, codec, root, monkeypatch):
    """Cold from its own cut or another, and within a whole budget: the bits of the exact method under this codec."""
    model, ids = build("qwen2"), prompt(200)
    question = torch.cat([ids, prompt(24, seed=5)], dim=1)
    with opened(root, codec) as store:
        store.precompute(model, ids, method=method, progress=False)
        output, stats = ask(model, store, question, method)
        assert 0 < stats.tokens_attended < stats.tokens_restored == 192
        exact, _ = ask(model, store, question)
        assert_same(ask(model, store, question, replace(method, budget=1.0))[0], exact)
        kv = coded_kv(model, ids, codec, monkeypatch)
        assert_same(exact, model.generate(question, past_key_values=prefilled(model, [kv], 192), **GREEDY))
    with opened(root.parent / "other", codec) as second:
        second.precompute(model, ids, progress=False)
        assert_same(ask(model, second, question, method)[0], output)


@every_lossy
def test_reordered_tokens_stay_what_they_were(codec, root):
    model, ids, method = build("qwen2"), prompt(200), Impress(0.3, probe_heads=2)
    question = torch.cat([ids, prompt(24, seed=5)], dim=1)
    with opened(root, codec) as store:
        store.precompute(model, ids, method=method, progress=False)
        exact, _ = ask(model, store, question)
        before = fields_in(store)
        ask(model, store, question, method)
        assert store.reorder(progress=False) == 1
        (row,) = store.segments()
        assert store._storage.disk.reader(row.id).shape.tables is not None and row.provenance == f"exact {codec}"
        after = fields_in(store)
        assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))
        assert_same(ask(model, store, question)[0], exact)


# --- files that say odd things


def coded_segment(codec="int8", **changes):
    return segment(hashes(4), geometry=Geometry(codec=codec), provenance=coded_provenance("exact", codec), **changes)


def coded_file(root):
    """Return the file of a segment with a codec, and its chain, in a closed store."""
    store = open_store(root)
    header, chain, blocks = coded_segment()
    assert store.publish(header, chain, blocks)
    store.close()
    return store.path(header.id), chain


def test_a_codec_of_a_later_version_is_left_alone_and_counted(tmp_path):
    path, chain = coded_file(tmp_path)
    page = page_of(path)
    page["geometry"]["codec"] = "int4"
    page["provenance"] = "exact int4"
    forge(path, page)
    with pytest.raises(OtherFormatError, match="int4"):
        decode_header(path.read_bytes()[:HEADER_BYTES])
    without_catalogue(tmp_path)
    store = open_store(tmp_path)
    assert not store.find(chain)
    stats = store.counters.snapshot()
    assert (stats.newer_files, stats.damaged_files) == (1, 0)
    store.close()
    assert path.exists()


@pytest.mark.parametrize(
    ("codec", "provenance"),
    [("raw", "exact int8"), ("fp8", "exact int8"), ("int8", "exact"), ("int8", "passage random"), (None, "exact")]
    + [(odd, "exact int8") for odd in (3, ["int8"], {"int8": 1}, True, "", "INT8", "int8 ")],
)
def test_a_header_whose_codec_and_provenance_disagree_is_a_counted_miss(codec, provenance, tmp_path):
    path, chain = coded_file(tmp_path)
    page = page_of(path)
    page["geometry"]["codec"], page["provenance"] = codec, provenance
    forge(path, page)
    with pytest.raises(FormatError):
        decode_header(path.read_bytes()[:HEADER_BYTES])
    without_catalogue(tmp_path)
    store = open_store(tmp_path)
    assert not store.find(chain)
    stats = store.counters.snapshot()
    assert stats.newer_files + stats.damaged_files == 1
    store.close()


def test_a_lossy_segment_under_an_exact_name_is_not_written(tmp_path):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(4), geometry=Geometry(codec="int8"))
    with pytest.raises(FormatError, match="int8"):
        store.publish(header, chain, blocks)
    assert not store.find(chain) and not list((tmp_path / "segments").iterdir()) + list((tmp_path / "tmp").iterdir())
    store.close()


def test_the_command_line_names_the_codec(root, run):
    model, ids = build("qwen2"), prompt(100)
    with opened(root, "int8") as store:
        store.precompute(model, ids, progress=False)
        (row,) = store.segments()
    assert "exact int8" in run("ls", root)[1]
    _, out, _ = run("stat", root, row.id[:8])
    assert "exact int8" in out and "codec int8" in out
    assert json.loads(run("stat", root, row.id, "--json")[1])["geometry"]["codec"] == "int8"
    assert "int8" in run("serve", "--help")[1]


@every_codec
def test_what_waits_to_be_written_counts_as_it_was_computed(codec):
    header, chain, blocks = segment(hashes(64), geometry=Geometry(64, codec=codec))
    waiting = PendingSegment(header, chain, lambda: iter(blocks))
    assert waiting.nbytes >= header.shape.tokens * header.shape.layout.bytes_per_token
