"""The segment file: what is written is read, and a change of any byte is seen."""

from __future__ import annotations

import hashlib
import json
import stat
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from segments import LAYOUT, hashes, open_store, read_back, read_file, segment

from hf_tiered_cache.errors import FormatError, IntegrityError, OtherFormatError
from hf_tiered_cache.store.container import DIGEST_DTYPE, Guard, block_digests, lin64, xxh3
from hf_tiered_cache.store.format import (
    FORMAT_VERSION,
    MAGIC,
    OLDEST_VERSION,
    SegmentHeader,
    decode_header,
    encode_head,
    lay_out,
    segment_id,
)
from hf_tiered_cache.store.geometry import ALIGNMENT, Geometry, KeyIndex, KVLayout, LayerKV, block_groups
from hf_tiered_cache.store.segment import SegmentReader
from hf_tiered_cache.store.shape import SegmentShape, TokenTables


@given(
    count=st.integers(1, 20),
    chunk=st.sampled_from([8, 16, 64]),
    heads=st.one_of(st.none(), st.just(1)),
    split=st.booleans(),
)
def test_what_is_written_is_read(tmp_path_factory, count, chunk, heads, split):
    store = open_store(tmp_path_factory.mktemp("store"))
    geometry = Geometry(chunk, 2, heads, split)
    header, chain, blocks = segment(hashes(count), geometry=geometry)
    assert store.publish(header, chain, blocks)
    result, table, digests, nbytes, *_ = read_file(store.path(header.id))
    assert result.shape == header.shape
    assert (result.id, result.fingerprint, result.parent, result.position) == (header.id, "model", header.parent, 0)
    assert table == b"".join(chain)
    assert [len(table) for table in digests] == [len(table) for table in blocks]
    assert nbytes >= result.file_bytes
    for written_blocks, read_blocks in zip(blocks, read_back(store, header.id), strict=True):
        assert torch.equal(written_blocks, read_blocks)


FORMAT_10 = {
    Geometry(): ("dc72cacc7d748e29", "5293ecbf1041dabe"),
    Geometry(24, 2, 1): ("bae4c767d6c4fa2b", "93f15b25012a15a7"),
    Geometry(16, 8, split_kv=True, index=KeyIndex(2, 1)): ("a06945a7cd2f62a8", "8291529eecfe6049"),
    Geometry(16, 4, solo_layers=1): ("29e32d57d4dbd89c", "53fcf5abedc0085d"),
}
"""sha256 of files of format 10, with tokens in order and by importance."""


@pytest.mark.parametrize("is_reordered", [False, True], ids=["in order", "by importance"])
@pytest.mark.parametrize("geometry", FORMAT_10, ids=str)
def test_files_of_format_10_stay_what_they_are_byte_for_byte(tmp_path, geometry, is_reordered):
    kind = LayerKV(2, 8, 2, 12, rotated="key", rotary_dims=8)
    layout = KVLayout((kind, kind, kind, LayerKV(1, 8, 3, 8, window=32), None, kind), torch.bfloat16)
    importance = (np.arange(6 * 64) * 7919 % 1009).reshape(6, 1, 64)
    tables = TokenTables.by_importance(importance, block_groups(layout, geometry)) if is_reordered else None
    shape, chain, parent = SegmentShape(layout, geometry, 64, tables), hashes(4), b"\0" * 16
    name = segment_id(parent, chain[-1], shape, "exact")
    header = SegmentHeader(name, "f" * 32, shape, parent, position=0, created=1.0)
    blocks, kv = [], {}
    for block_group in shape.block_groups:
        blocks.append(torch.zeros(shape.chunks_in(block_group), block_group.block_bytes, dtype=torch.uint8))
        for part in block_group.parts:
            kv[part] = torch.arange(part.heads * 64 * part.dim).view(part.heads, 64, part.dim).bfloat16() + part.layer
            shape.pack(blocks[-1], block_group, part, kv[part])
    store = open_store(tmp_path)
    assert store.publish(header, chain, blocks)
    digest = hashlib.sha256(store.path(name).read_bytes()).hexdigest()
    assert digest.startswith(FORMAT_10[geometry][is_reordered])
    read_shape = store.reader(name).shape
    for block_group, memory in zip(read_shape.block_groups, read_back(store, name), strict=True):
        assert all(torch.equal(read_shape.unpack(memory, block_group, part), kv[part]) for part in block_group.parts)


def test_files_are_their_owners_alone(tmp_path):
    store = open_store(tmp_path / "store")
    header, chain, blocks = segment(hashes(3))
    store.publish(header, chain, blocks)
    for path in (tmp_path / "store").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


def test_the_file_is_aligned_and_its_header_can_be_read_by_people(tmp_path):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(5))
    store.publish(header, chain, blocks)
    data = store.path(header.id).read_bytes()
    assert len(data) % ALIGNMENT == 0
    assert data[:8] == MAGIC
    version, length = struct.unpack_from("<II", data, 8)
    assert version == OLDEST_VERSION
    described = json.loads(data[24 : 24 + length])
    assert described["tokens"] == 80
    assert all(offset % ALIGNMENT == 0 for offset, _, _ in described["sections"].values())


REGIONS = [
    "magic",
    "version",
    "json",
    "header padding",
    "chain",
    "digests",
    "first block",
    "block padding",
    "last block",
]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_seen_wherever_it_is(tmp_path, region, bit):
    store = open_store(tmp_path)
    layout = KVLayout((LayerKV(1, 8, 1, 8),) * 3, torch.bfloat16)  # blocks with padding behind them
    shape = SegmentShape(layout, Geometry(), 48)
    header = SegmentHeader("ab" * 16, "model", shape, b"\1" * 16, 0, created=1.0)
    blocks = [
        torch.randint(0, 256, (shape.chunks_in(block_group), block_group.block_bytes), dtype=torch.uint8)
        for block_group in shape.block_groups
    ]
    store.publish(header, hashes(3), blocks)
    path = store.path(header.id)
    laid = lay_out(header, 3)
    offset = {
        "magic": 3,
        "version": 8,
        "json": 60,
        "header padding": 4095,
        "chain": laid.chain.offset + 5,
        "digests": laid.digests.offset + 3,
        "first block": laid.blocks.offset,
        "block padding": laid.blocks.offset + shape.block_groups[0].payload_bytes + 1,
        "last block": laid.file_bytes - ALIGNMENT,
    }[region]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises((FormatError, IntegrityError)):
        reader = SegmentReader(store.backend, header.id, verify=True)
        store.readers.keep(reader.id, reader)
        read_back(store, header.id)


@pytest.mark.parametrize("end", [0, 100, 4096, 8000, -1, -4096])
def test_a_file_cut_short_is_seen(tmp_path, end):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(4))
    store.publish(header, chain, blocks)
    path = store.path(header.id)
    data = path.read_bytes()
    path.write_bytes(data[:end])
    with pytest.raises(FormatError):
        read_file(path)


@pytest.mark.parametrize(("version", "advice"), [(FORMAT_VERSION + 1, "upgrade"), (9, "never released")])
def test_another_format_says_what_to_do(version, advice):
    header, chain, blocks = segment(hashes(2))
    page = bytearray(
        encode_head(lay_out(header, 2), chain, np.concatenate([block_digests(b) for b in blocks]), Guard())[:4096]
    )
    struct.pack_into("<I", page, 8, version)
    with pytest.raises(OtherFormatError, match=advice):
        decode_header(bytes(page))


def test_a_header_whose_offsets_do_not_fit_is_refused():
    header, chain, blocks = segment(hashes(2))
    from dataclasses import replace

    laid = lay_out(header, 2)
    wrong = replace(laid, blocks=replace(laid.blocks, offset=laid.blocks.offset + ALIGNMENT))
    page = encode_head(wrong, chain, np.concatenate([block_digests(b) for b in blocks]), Guard())[:4096]
    with pytest.raises(FormatError, match="offsets"):
        decode_header(page)


def test_a_model_of_126_different_layers_fits_the_header_page():
    kinds = tuple(
        LayerKV(8, 128, 8, 128, window=4096 if i % 6 else 0, rotated="key", rotary_dims=128) for i in range(126)
    )
    header = SegmentHeader(
        "0" * 32, "f" * 32, SegmentShape(KVLayout(kinds, torch.bfloat16), Geometry(), 16), b"0" * 16, 0, 1.0
    )
    laid = lay_out(header, 1)
    head = encode_head(laid, hashes(1), np.zeros(laid.shape.first_blocks[-1], DIGEST_DTYPE), Guard())
    assert decode_header(head[:4096])[0].shape.layout.layers == kinds


MODEL = {"name": "Qwen/Qwen2.5-0.5B", "class": "Qwen2ForCausalLM", "dtype": "bfloat16"}


def test_the_header_names_the_model_and_the_text(tmp_path):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(2), model=MODEL, label="Jahresbericht 二〇二五")
    store.publish(header, chain, blocks)
    decoded_header, *_ = read_file(store.path(header.id))
    assert (decoded_header.model, decoded_header.label) == (MODEL, "Jahresbericht 二〇二五")


def test_a_header_without_names_is_read_and_says_nothing_of_them(tmp_path):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(2))
    store.publish(header, chain, blocks)
    page = store.path(header.id).read_bytes()[:4096]
    assert b'"model":' not in page
    assert b'"label":' not in page
    decoded_header, _ = decode_header(page)
    assert (decoded_header.model, decoded_header.label) == ({}, "")


@given(st.text(max_size=9000), st.dictionaries(st.text(min_size=1, max_size=300), st.text(max_size=3000), max_size=20))
def test_names_too_long_for_the_page_are_cut(label, model):
    header, chain, blocks = segment(hashes(2), model=model, label=label)
    laid = lay_out(header, 2)
    head = encode_head(laid, chain, np.concatenate([block_digests(b) for b in blocks]), Guard())
    decoded_header, _ = decode_header(head[:4096])
    readable = label.encode(errors="replace").decode()
    assert readable.startswith(decoded_header.label)
    assert decoded_header.label == readable or len(head[24:4096].rstrip(b"\0")) > 1500  # cut for want of room only
    assert (decoded_header.id, decoded_header.shape) == (header.id, header.shape)


@given(st.integers(0, 511), st.integers(0, 63), st.integers(1, 4))
def test_lin64_sees_any_change_of_one_word(word, bit, count):
    blocks = torch.randint(0, 256, (count, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(word))
    before = lin64(blocks).clone()
    words = blocks.view(torch.int64)
    words[-1, word] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    after = lin64(blocks)
    assert after[-1] != before[-1]
    assert torch.equal(after[:-1], before[:-1])


def test_lin64_is_the_sum_it_says_it_is():
    """The reference uses Python integers, modulo 2^64."""
    mask = (1 << 64) - 1

    def weight(index: int) -> int:
        z = (index * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) | 1

    block = torch.randint(0, 256, (1, 256), dtype=torch.uint8)
    words = struct.unpack("<32Q", bytes(block[0].tolist()))
    expected = sum(w * weight(i + 1) for i, w in enumerate(words)) & mask
    assert int(lin64(block).numpy().view(np.uint64)[0]) == expected


def test_digests_of_blocks_are_those_of_their_bytes():
    blocks = torch.randint(0, 256, (3, 4096), dtype=torch.uint8)
    table = block_digests(blocks)
    assert [int(d) for d in table["xxh3"]] == [xxh3(bytes(row.tolist())) for row in blocks]


def test_layout_used_here_has_two_kinds_of_block_groups():
    """This shows that the tests above cover KV cache groups of different sizes."""
    assert len({block_group.block_bytes for block_group in SegmentShape(LAYOUT, Geometry(), 16).block_groups}) == 2
