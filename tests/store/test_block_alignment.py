"""Blocks are aligned to 512 bytes, also on disks whose sectors have 4 KiB."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import build, prompt

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV, Exact, Krul, KVDrive
from hf_tiered_cache.store.engines import PosixEngine, ReadOp
from hf_tiered_cache.store.format import SegmentHeader, lay_out
from hf_tiered_cache.store.geometry import ALIGNMENT, HASH_TOKENS, KVLayout, LayerKV
from hf_tiered_cache.store.memory import aligned_bytes
from hf_tiered_cache.store.shape import SegmentShape

METHODS = {
    "exact": Exact(),
    "contiguous_kv": ContiguousKV(0.25, reorder=False, reselect=False),
    "kv_drive": KVDrive(budget=0.2, local=16),
}
TOKENS = 400


@pytest.fixture(scope="module")
def model():
    return build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2).to(torch.bfloat16)


def stored(model, path, ids, method):
    with KVStore(path, engine="posix") as store:
        cache = TieredCache(model, store, method=method)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        cache.store_now()
        store.flush()
        (row,) = store.segments()
        return store._storage.disk.reader(row.id).header, store.path / "segments" / f"{row.id}.kv"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_small_blocks_take_little_more_than_their_kv(model, tmp_path, method, codec):
    header, file = stored(model, tmp_path, prompt(TOKENS), type(method)(codec=codec))
    shape = header.shape
    payload = sum(group.payload_bytes * shape.chunks_in(group) for group in shape.block_groups)
    blocks = sum(group.block_bytes * shape.chunks_in(group) for group in shape.block_groups)
    assert payload <= blocks <= 1.5 * payload and (codec == "int8" or blocks == payload)
    assert file.stat().st_size == header.file_bytes and header.file_bytes % ALIGNMENT == 0


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("method", [Exact(), Krul(codec="raw")], ids=["exact", "krul"])
def test_files_of_conversations_take_little_more_than_their_payload(method, codec, heads):
    """Heads have 64 dimensions in bfloat16; blocks have one or several layers."""
    layout = KVLayout((LayerKV(heads, 64, heads, 64, 0, "key", 64),) * 12, torch.bfloat16)
    for tokens in (256, 4096):
        shape = SegmentShape(layout, replace(method.geometry, codec=codec), tokens)
        payload = sum(group.payload_bytes * shape.chunks_in(group) for group in shape.block_groups)
        header = SegmentHeader("0" * 32, "0" * 32, shape, bytes(16), 0, 0.0)
        assert lay_out(header, tokens // HASH_TOKENS).file_bytes <= 1.1 * payload


@pytest.mark.parametrize("threads", [1, 4])
def test_a_disk_with_large_sectors_is_read_in_whole_pages(tmp_path, monkeypatch, threads):
    """Reads are direct as far as the disk allows."""
    data = np.random.default_rng(0).integers(0, 256, 1024 * ALIGNMENT, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    engine, real, sizes = PosixEngine(threads=threads), os.preadv, []
    file = engine.open(str(path))
    if not file.direct:
        pytest.skip("no direct I/O here")

    def preadv(fd, buffers, offset):
        numbers = [offset, *(len(buffer) for buffer in buffers)]
        numbers += [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
        if any(number % ALIGNMENT for number in numbers):
            time.sleep(0.02)  # the threads fail at the same time
            raise OSError(errno.EINVAL, "planted")
        sizes.append(sum(numbers[1 : 1 + len(buffers)]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    memory = aligned_bytes(8 * ALIGNMENT)
    for _ in range(2):
        memory.zero_()
        places = [(1536, 512), (2048, 1024)]  # one call, and three apart
        places += [(350 * ALIGNMENT - 512, 4096), (700 * ALIGNMENT + 512, 512), (1023 * ALIGNMENT, 512)]
        ops, at = [], 0
        for offset, nbytes in places:
            ops.append(ReadOp(file, offset, memory[at : at + nbytes]))
            at += nbytes
        nbytes_read = engine.submit(ops).result(timeout=10)
        expected = np.concatenate([data[offset : offset + nbytes] for offset, nbytes in places])
        assert np.array_equal(memory[:at].numpy(), expected)
        assert nbytes_read == sum(sizes) and file.direct
        sizes.clear()
    engine.close()
