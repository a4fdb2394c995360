"""Recording of KV on a GPU: packing and checksums there, copies after the request, and bounded GPU memory.

A stream on the CPU emulates the GPU.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from families import build, prompt
from segments import hashes, open_store, read_back, segment
from side_stream import Computed, SideStream

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache import captured as captured_module
from hf_tiered_cache.cache import recorder as record_module
from hf_tiered_cache.store import disk as disk_module
from hf_tiered_cache.store.container import PackedBlocks, lin64
from hf_tiered_cache.store.writer import KeptOnDevice, PendingSegment, Writer
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers.device import CopyStream

WRITER = "hf-tiered-writer"
SIZE = 1 << 20


class Sidecars(SideStream):
    """Side stream during a computation that continues."""

    def computed(self):
        return Computed(self)


@pytest.fixture(scope="module")
def model():
    return build("gemma3")  # with sliding layers, whose block groups are others


def record(model, path, stream, monkeypatch, **options):
    """Store a batch whose rows share a beginning, one of them padded, and some generated tokens."""
    monkeypatch.setattr(captured_module, "copy_stream", lambda device: stream)
    monkeypatch.setattr(record_module, "time", SimpleNamespace(time=lambda: 1.0, monotonic=time.monotonic))
    ids = torch.cat([prompt(50), prompt(50)])
    ids[1, 20:] = prompt(30, seed=7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with KVStore(path, engine="posix", **options) as store:
        cache = TieredCache(model, store)
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, do_sample=False)
        del cache
    with KVStore(path, engine="posix", **options) as store:
        names = sorted(row.id for row in store.segments())
        return {name: hashlib.sha256(store._storage.disk.path(name).read_bytes()).hexdigest() for name in names}


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_files_are_those_of_the_cpu_byte_for_byte(model, tmp_path, monkeypatch, codec):
    stream, sums = Sidecars(), []
    monkeypatch.setattr(device_module, "lin64", lambda blocks: sums.append(stream.depth) or lin64(blocks))
    device_files = record(model, tmp_path / "there", stream, monkeypatch, codec=codec)
    cpu_files = record(model, tmp_path / "here", CopyStream(), monkeypatch, codec=codec)
    assert len(cpu_files) >= 2
    assert device_files == cpu_files
    assert sums and all(sums)  # each on the side stream


def test_only_the_writer_waits_once_for_each_block_group(model, tmp_path, monkeypatch):
    stream, groups = Sidecars(), []
    real = device_module.Staging.bring_down
    monkeypatch.setattr(device_module.Staging, "bring_down", lambda *a: groups.append(1) or real(*a))
    stored_kv = record(model, tmp_path, stream, monkeypatch)
    assert set(stream.waits) == set(stream.computations) == {WRITER}
    assert stream.waits[WRITER] == len(groups) >= 2 * len(stored_kv)
    assert stream.depth == 0


# --- the queue


class Beds:
    """Segments in the memory of a GPU, with a count of the live ones."""

    def __init__(self):
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    @property
    def nbytes(self):
        return sum(memory.numel() for memory in list(self.alive))

    def pending(self, seed, nbytes=SIZE, on_device=None, refused=lambda _: None):
        header, chain, blocks = segment(hashes(8, seed))
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.alive.add(memory)

        def block_groups(memory=memory):
            staging = torch.empty(max(group.numel() for group in blocks), dtype=torch.uint8)
            for group in blocks:  # each is good until the next
                down = staging[: group.numel()].view(group.shape)
                down.copy_(group)
                yield PackedBlocks(down, lin64(group).numpy())
                down.zero_()

        pending_segment = PendingSegment(
            header, chain, block_groups, (), refused, on_device=on_device or KeptOnDevice(nbytes, torch.device("cpu"))
        )
        return pending_segment, blocks


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def slow(monkeypatch):
    """Emulate a disk that writes only as many KV cache groups as it is allowed to."""
    gate = SimpleNamespace(let=threading.Semaphore(0), note=lambda: None)

    def write(*args, real=disk_module.write_blocks):
        assert gate.let.acquire(timeout=60)
        gate.note()
        return real(*args)

    monkeypatch.setattr(disk_module, "write_blocks", write)
    return gate


def test_what_waits_behind_a_slow_disk_keeps_within_its_memory_and_is_whole(tmp_path, slow):
    """A producer waits for one KV cache group to be written, not for the whole queue."""
    beds, store = Beds(), open_store(tmp_path)
    writing = Writer(store, device_bytes=3 * SIZE)
    expected, most = {}, []

    def submit(seed):
        pending, blocks = beds.pending(seed)
        expected[pending.header.id] = blocks
        writing.submit(pending)
        most.append((writing.queued_device_bytes, beds.nbytes))

    for seed in "abc":
        submit(seed)
    until(lambda: writing._queue.qsize() == 2)  # the first is being written
    waiting = threading.Thread(target=submit, args=["d"], daemon=True)
    waiting.start()
    until(lambda: writing._short)
    assert (writing.queued_device_bytes, len(most)) == (3 * SIZE, 3)
    slow.let.release()
    waiting.join(60)
    assert len(most) == 4  # it goes on as soon as there is room for it, whether or not more is still to come down
    until(lambda: max(writing.queued_device_bytes, beds.nbytes) <= SIZE)  # all others are brought down meanwhile
    for seed in "ef":
        submit(seed)
    assert max(device for device, _ in most) <= 3 * SIZE
    assert writing.queued_bytes > 0
    slow.let.release(1000)
    writing.flush()
    assert (writing.queued_bytes, writing.queued_device_bytes, beds.nbytes) == (0, 0, 0)
    assert store.counters.snapshot().dropped_writes == 0
    for name, blocks in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(read_back(store, name), blocks, strict=True))
    writing.close()


def test_a_segment_larger_than_the_bound_leaves_the_gpu_before_the_disk_is_done(tmp_path, slow):
    beds, store, nbytes = Beds(), open_store(tmp_path), []
    writing = Writer(store, device_bytes=SIZE)
    pending, blocks = beds.pending("large", 2 * SIZE)
    name = pending.header.id
    writing.submit(pending)
    del pending
    assert (writing.queued_device_bytes, beds.nbytes) == (2 * SIZE, 2 * SIZE)
    slow.note = lambda: nbytes.append(beds.nbytes)
    slow.let.release(1000)
    writing.flush()
    assert nbytes == [2 * SIZE, 0]  # while each of its two block groups was written
    assert all(torch.equal(a, b) for a, b in zip(read_back(store, name), blocks, strict=True))
    writing.close()


def test_rows_that_lie_in_the_same_tensors_count_once(tmp_path, slow):
    beds, store = Beds(), open_store(tmp_path)
    writing = Writer(store, device_bytes=SIZE)
    on_device = KeptOnDevice(SIZE, torch.device("cpu"))
    for seed in "abc":
        writing.submit(beds.pending(seed, on_device=on_device)[0], wait=False)
    assert writing.queued_device_bytes == SIZE
    slow.let.release(1000)
    writing.flush()
    assert writing.queued_device_bytes == 0
    assert store.counters.snapshot().segments_written == 3
    writing.close()


def test_what_a_finalizer_leaves_makes_room_for_itself(tmp_path):
    """It cannot wait, so the writer's own thread queues it and makes room."""
    beds, store, begin, refused_segments = Beds(), open_store(tmp_path), threading.Event(), []
    writing = Writer(store, device_bytes=SIZE)
    last, _ = beds.pending("last", refused=lambda _: refused_segments.append(1))
    writing.later(lambda: begin.wait(60))
    writing.soon(lambda: writing.submit(last, wait=False))
    writing.submit(beds.pending("first")[0])
    begin.set()
    writing.flush()
    writing.flush()  # what was queued by then
    assert not refused_segments
    assert store.counters.snapshot().segments_written == 2
    writing.close()


def test_without_room_on_the_gpu_a_segment_that_cannot_wait_is_dropped_and_counted(tmp_path, slow):
    beds, store, refused_segments = Beds(), open_store(tmp_path), []
    writing = Writer(store, device_bytes=SIZE)
    writing.submit(beds.pending("first")[0])
    writing.submit(beds.pending("second", refused=lambda _: refused_segments.append(1))[0], wait=False)
    assert refused_segments == [1]
    assert store.counters.snapshot().dropped_writes == 1
    slow.let.release(1000)
    writing.close()


def test_a_store_says_what_waits(model, tmp_path, monkeypatch, slow):
    stream = Sidecars()
    monkeypatch.setattr(captured_module, "copy_stream", lambda device: stream)
    with KVStore(tmp_path, engine="posix", queue_device_memory="1MiB") as store:
        cache = TieredCache(model, store)
        model.generate(prompt(64), past_key_values=cache, max_new_tokens=1, do_sample=False)
        store._storage.seal()
        stats = store.stats
        config = model.config
        width = config.num_key_value_heads * config.head_dim
        assert stats.queued_device_bytes >= config.num_hidden_layers * 2 * width * 64 * 4  # keys and values, float32
        assert stats.queued_bytes > 0
        slow.let.release(1000)
        store.flush()
        assert (store.stats.queued_bytes, store.stats.queued_device_bytes) == (0, 0)
        assert "queued device bytes" in str(store.stats)
