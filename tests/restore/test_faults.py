"""Faults under a request: the right tokens come out, the failure is counted, and nothing is lost that was whole."""

from __future__ import annotations

import errno
import os
import struct
import sys

import processes
import pytest
import torch
from drawn_faults import path_of
from families import build_deep as build
from families import prompt
from reference import assert_like_reference
from test_forged import forge, page_of
from threads import run_in_threads

from hf_tiered_cache import KVStore, TieredCache, reasons
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Exact
from hf_tiered_cache.store import segment as segment_module
from hf_tiered_cache.store.engines import PosixEngine, posix
from hf_tiered_cache.store.geometry import ALIGNMENT

GREEDY = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
LIB = os.path.dirname(processes.__file__)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def root(tmp_path, model):
    """Create a store with two prompts of 144 and 96 tokens that share 64, in two consecutive segments."""
    with KVStore(tmp_path / "store") as store:
        store.precompute(model, [IDS[0], OTHER[0]], progress=False)
        assert sorted(row.tokens for row in store.segments()) == [32, 144]
    return tmp_path / "store"


IDS = prompt(150)
OTHER = torch.cat([IDS[:, :64], prompt(40, seed=9)], dim=1)


def file_of(root, tokens):
    with KVStore(root) as store:
        (row,) = [row for row in store.segments() if row.tokens == tokens]
        return store._storage.disk.path(row.id), store._storage.disk.reader(row.id)


def ask(model, store, ids=IDS, record=True):
    """Generate, check the logits against a DynamicCache of the same passes, and return the stats."""
    cache = TieredCache(model, store, record=record)
    # recomputed tails come from passes of another shape
    assert_like_reference(model, cache, ids, ids, GREEDY, atol=1e-5)
    return cache.stats


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path, offset):
    with open(path, "rb") as file:
        file.seek(offset)
        (byte,) = file.read(1)
    overwrite(path, offset, bytes([byte ^ 16]))


REGIONS = {
    "magic": lambda reader: 2,
    "json": lambda reader: 200,
    "header padding": lambda reader: 4000,
    "chain": lambda reader: reader.header.chain.offset + 40,
    "digests": lambda reader: reader.header.digests.offset + 40,
    "first block": lambda reader: reader.header.blocks.offset + 100,
    "a block of the second group": lambda reader: reader.header.blocks.offset + reader.shape.group_offsets[1] + 100,
    "last block": lambda reader: reader.header.file_bytes - 50,
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.thin(2)
def test_a_bit_flipped_in_any_region(model, root, region):
    path, reader = file_of(root, 144)
    flip(path, REGIONS[region](reader))
    with KVStore(root) as store:
        stats = ask(model, store)
        store_stats = store.stats
        assert store_stats.verification_failures >= 1
        if "block" in region:
            assert stats.details.verification_failures == 1
            assert stats.details.recomputed == 1
        assert stats.tokens_restored == (128 if region == "last block" else 0)  # what stands before it is used
        store.flush()
        assert ask(model, store).tokens_restored == 144  # stored anew
        ask(model, store, OTHER)
        assert store.stats.verification_failures == store_stats.verification_failures
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == 144
        assert ask(model, store, OTHER).tokens_restored == 96  # the other segment was never lost


@pytest.mark.parametrize("size", [0, 1000, 4096, 10_000, -ALIGNMENT, -1])
def test_truncation(model, root, size):
    path, _ = file_of(root, 144)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == 0
        assert store.stats.verification_failures + store.stats.read_errors + store.stats.damaged_files >= 1
        store.flush()
        assert ask(model, store).tokens_restored == 144


@pytest.mark.parametrize("part", ["everything", "header", "blocks", "one block"])
def test_zero_fill(model, root, part):
    """A file system may leave such a file if its data was not on disk at a power failure."""
    path, reader = file_of(root, 144)
    size, blocks = path.stat().st_size, reader.header.blocks.offset
    start, stop = {
        "everything": (0, size),
        "header": (0, ALIGNMENT),
        "blocks": (blocks, size),
        "one block": (size - reader.shape.block_groups[-1].block_bytes, size),
    }[part]
    overwrite(path, start, bytes(stop - start))
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == (128 if part == "one block" else 0)
        assert store.stats.verification_failures >= 1
        store.flush()
        assert ask(model, store).tokens_restored == 144


def test_deletion_between_look_up_and_open(model, root, caplog):
    """Another process evicts the segment, which is no fault of the disk."""
    path, _ = file_of(root, 144)
    with KVStore(root) as store:
        path.unlink()
        stats = ask(model, store)
        assert (stats.tokens_restored, stats.reason) == (0, reasons.NOTHING)
        assert store.stats.read_errors == 0 and "cannot be used" not in caplog.text
        store.flush()
        assert ask(model, store).tokens_restored == 144


def test_deletion_while_it_is_read(model, root, monkeypatch):
    """Another process evicts the segment: the open file stays whole."""
    path, _ = file_of(root, 144)
    real = PosixEngine.submit

    def deleting(self, ops):
        path.unlink(missing_ok=True)
        return real(self, ops)

    monkeypatch.setattr(PosixEngine, "submit", deleting)
    with KVStore(root) as store:
        assert ask(model, store, record=False).tokens_restored == 144


@pytest.mark.parametrize("call", [0, 1])
def test_a_read_error(model, root, monkeypatch, call):
    """The error is at the first or second KV cache group; the next process uses the intact segment."""
    real, calls = PosixEngine.submit, []

    def failing(self, ops):
        calls.append(ops)
        future = real(self, ops)
        if len(calls) == call + 1:
            future.result()
            future = segment_module.Future()
            future.set_exception(OSError(errno.EIO, "Input/output error"))
        return future

    monkeypatch.setattr(PosixEngine, "submit", failing)
    with KVStore(root) as store:
        stats = ask(model, store, record=False)
        assert (stats.details.read_errors, stats.details.recomputed) == (1, 1)
        assert stats.tokens_restored == 0
        assert store.stats.read_errors == 1
    with KVStore(root) as store:
        assert ask(model, store, record=False).tokens_restored == 144


def test_a_read_error_deep_in_the_tree_keeps_what_stands_before_it(model, root, monkeypatch):
    path, _ = file_of(root, 32)
    real = posix._read_all

    def failing(call):
        if call.file.path == str(path):
            raise OSError(errno.EIO, "Input/output error")
        return real(call)

    monkeypatch.setattr(posix, "_read_all", failing)
    with KVStore(root) as store:
        assert ask(model, store, OTHER, record=False).tokens_restored == 64


def test_a_disk_that_always_fails_is_given_up(model, root, monkeypatch):
    def failing(self, ops):
        future = segment_module.Future()
        future.set_exception(OSError(errno.EIO, "Input/output error"))
        return future

    monkeypatch.setattr(PosixEngine, "submit", failing)
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == 0


@pytest.mark.parametrize("step", ["posix_fallocate", "pwrite"])
def test_a_full_disk(model, root, monkeypatch, caplog, step):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with KVStore(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            for seed in (20, 21):
                ask(model, store, prompt(100, seed=seed))
            store.flush()
        assert store.stats.dropped_writes >= 2
        assert sum("was not stored" in record.message for record in caplog.records) == 1
        assert ask(model, store).tokens_restored == 144
        ask(model, store, prompt(100, seed=20))
        store.flush()
        assert ask(model, store, prompt(100, seed=20)).tokens_restored == 96


def test_kill_9_while_segments_are_written(model, root):
    """A process is killed in the middle of its first write; what was whole stays, what was torn never shows."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {LIB!r})
from families import *
build = build_deep
from hf_tiered_cache import KVStore, TieredCache
pwrite, count = os.pwrite, 0
def dying(fd, data, offset):
    global count
    count += 1
    if count == 2: pwrite(fd, bytes(data)[:100], offset); os.kill(os.getpid(), signal.SIGKILL)
    return pwrite(fd, data, offset)
os.pwrite = dying
model, store = build("llama"), KVStore({str(root)!r})
model.generate(prompt(100, seed=30), past_key_values=TieredCache(model, store), max_new_tokens=6, do_sample=False)
store.flush()
"""
    assert processes.run([sys.executable, "-c", code], timeout=120).returncode == -9
    with KVStore(root) as store:
        assert store.verify().ok
        assert ask(model, store, prompt(100, seed=30)).tokens_restored == 0
        assert ask(model, store).tokens_restored == 144
        store.flush()
        assert ask(model, store, prompt(100, seed=30)).tokens_restored == 96
        assert not list((root / "tmp").iterdir())


def test_kill_9_while_generating(model, root):
    """Decoding is cut off; the prompt was stored already."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {LIB!r})
from families import *
build = build_deep
from hf_tiered_cache import KVStore, TieredCache
model, store = build("llama"), KVStore({str(root)!r})
class Killer:
    steps = 0
    def put(self, value):
        self.steps += 1
        if self.steps == 8: store._storage.writer.flush(); os.kill(os.getpid(), signal.SIGKILL)
    def end(self): pass
ids = prompt(100, seed=31)
model.generate(ids, past_key_values=TieredCache(model, store), max_new_tokens=60, do_sample=False, streamer=Killer())
"""
    assert processes.run([sys.executable, "-c", code], timeout=120).returncode == -9
    with KVStore(root) as store:
        assert ask(model, store, prompt(100, seed=31)).tokens_restored == 96


def test_two_processes_writing_the_same_prefix(model, root):
    code = f"""
import sys
sys.path.insert(0, {LIB!r})
from families import *
build = build_deep
from hf_tiered_cache import KVStore, TieredCache
model = build("llama")
with KVStore({str(root)!r}) as store:
    for seed in range(40, 46):
        cache = TieredCache(model, store)
        model.generate(prompt(120, seed=seed), past_key_values=cache, max_new_tokens=4, do_sample=False)
"""
    writers = [processes.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [writer.wait(timeout=240) for writer in writers] == [0, 0, 0]
    with KVStore(root) as store:
        assert store.verify().ok
        assert len(store.segments()) == 2 + 6
        for seed in range(40, 46):
            assert ask(model, store, prompt(120, seed=seed)).tokens_restored == 112


@pytest.mark.parametrize("how", ["lost", "garbage", "stale"])
def test_the_catalogue(model, root, how):
    path = root / "catalogue.sqlite"
    if how == "stale":  # of a time when nothing was stored
        empty = root.with_name("empty")
        KVStore(empty).close()
        path.write_bytes((empty / "catalogue.sqlite").read_bytes())
    elif how == "garbage":
        path.write_bytes(b"garbage" * 5000)
    else:
        path.unlink()
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == 144
        assert ask(model, store, OTHER).tokens_restored == 96


def test_a_catalogue_that_fails_under_way(model, root, monkeypatch):
    import sqlite3

    def failing(*_):
        raise sqlite3.OperationalError("database is locked")

    with KVStore(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(type(store._storage.disk.index.catalogue), "beginning_with", failing)
            assert ask(model, store, record=False).tokens_restored == 0
        assert store.stats.catalogue_errors == 1
        assert ask(model, store).tokens_restored == 144


def test_an_unwritable_folder(model, root, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if path_of(path, kwargs).startswith(str(root)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == 144
        ask(model, store, prompt(100, seed=50))
        store.flush()
        assert store.stats.dropped_writes >= 1


def test_a_newer_format_version(model, root):
    path, _ = file_of(root, 144)
    overwrite(path, 8, struct.pack("<I", 99))
    with KVStore(root) as store:
        assert ask(model, store).tokens_restored == 0
        assert path.exists()
        assert store.stats.verification_failures + store.stats.newer_files >= 1
    (root / "catalogue.sqlite").unlink()
    with KVStore(root) as store:
        assert store.stats.newer_files == 1
        store.gc()
        assert path.exists()  # not ours to delete


def test_a_damaged_segment_is_said_once(model, root, caplog):
    path, reader = file_of(root, 144)
    flip(path, reader.header.blocks.offset)
    with KVStore(root) as store:
        for _ in range(3):
            ask(model, store, record=False)
    assert sum("fails its checksum" in record.message for record in caplog.records) == 1


def test_without_verification_a_flipped_bit_is_served(model, root):
    """This shows that the tests above depend on the checksum, and that `verify=False` works."""
    path, reader = file_of(root, 144)
    for chunk in range(9):
        overwrite(path, reader.header.blocks.offset + chunk * reader.shape.block_groups[0].block_bytes, b"\x42" * 2000)
    with KVStore(root, verify=False) as store:
        cache = TieredCache(model, store, record=False)
        output = model.generate(IDS, past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 144
        assert not torch.allclose(output.logits[0], model(IDS).logits[:, -1], atol=1e-3)


def test_an_error_in_the_model_leaves_the_cache_as_it_was(model, root):
    """The same cache serves the pass after the failed one."""
    with KVStore(root) as store:
        cache = TieredCache(model, store, record=False)
        hook = model.model.layers[3].mlp.register_forward_pre_hook(raising)
        with pytest.raises(RuntimeError, match="planted"):
            model.generate(IDS, past_key_values=cache, **GREEDY)
        hook.remove()
        assert cache.get_seq_length() == 0
        output = model.generate(IDS, past_key_values=cache, **GREEDY)
        assert torch.equal(output.sequences, model.generate(IDS, **GREEDY).sequences)
        assert not any(pool.pins.any() for pool in store._storage.residency.host._pools.values())


def raising(*_):
    raise RuntimeError("planted")


def test_requests_in_many_threads_over_a_damaged_store(model, root):
    path, reader = file_of(root, 144)
    flip(path, reader.header.blocks.offset + 5 * reader.shape.block_groups[0].block_bytes)
    expected = model.generate(IDS, **GREEDY).sequences
    with KVStore(root) as store:

        def work(_):
            for _ in range(4):
                cache = TieredCache(model, store)
                assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY).sequences, expected)

        run_in_threads(work, range(4))
        store.flush()
        assert ask(model, store).tokens_restored == 144


def test_a_store_closed_under_a_pass_does_not_fail_it(model, root, monkeypatch):
    ids = prompt(100)
    expected = model.generate(ids, **GREEDY).sequences
    with KVStore(root) as store:
        store.precompute(model, ids, progress=False)
    store = KVStore(root)
    cache = TieredCache(model, store, record=False)
    open_segments = type(store._storage.disk).found

    def close_first(disk, rows):
        readers = open_segments(disk, rows)
        store.close()
        return readers

    monkeypatch.setattr(type(store._storage.disk), "found", close_first)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY).sequences, expected)
    assert cache.stats.details.recomputed == 1


@pytest.mark.parametrize("method", [Exact(recompute=0), Exact(), ContiguousKV(budget=0.5), CacheTune()], ids=str)
def test_a_layout_of_other_heads_is_a_miss_though_every_checksum_is_right(tmp_path, model, method):
    """The other heads have the same number of bytes, so only the model reveals the difference."""
    root, passage = tmp_path / "store", isinstance(method, CacheTune)
    with KVStore(root) as store:
        store.precompute(model, IDS[0, :144], method=method, passages=passage, progress=False)
    for path in (root / "segments").glob("*.kv"):  # after the close, since `ContiguousKV` may still reorder
        page = page_of(path)
        for kind in page["layout"]["kinds"]:
            kind[:4] = [2 * kind[0], kind[1] // 2, 2 * kind[2], kind[3] // 2]
        forge(path, page)
    ids = torch.cat([prompt(20, seed=3), IDS], dim=1) if passage else IDS
    with KVStore(root) as store:
        cache = TieredCache(model, store, method=method, record=False)
        output = model.generate(ids, past_key_values=cache, **GREEDY)
        stats = store.stats
    reference_output = model.generate(ids, **GREEDY)
    assert torch.equal(output.sequences, reference_output.sequences)
    assert cache.stats.tokens_restored == 0 and cache.stats.reason
    assert stats.read_errors + stats.damaged_files + stats.verification_failures > 0
