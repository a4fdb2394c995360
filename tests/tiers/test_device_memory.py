"""Memory and streams of a GPU, planted: what is made is counted, shared where it can be, and given back."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import build, prompt

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.store import memory as memory_module
from hf_tiered_cache.store.faults import Notices
from hf_tiered_cache.store.memory import page_locked, to_device
from hf_tiered_cache.store.writer import KeptOnDevice, PendingSegment
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers.device import Staging
from hf_tiered_cache.tiers.residency import Residency
from hf_tiered_cache.tiers.slabs import Blocks

GPU = torch.device("cuda", 0)
HUGE = 2 << 20


@pytest.fixture
def made(monkeypatch):
    """Record the created streams."""
    devices = []

    def stream(device):
        devices.append(device)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device_module._cuda_stream.cache_clear()
    yield devices
    device_module._cuda_stream.cache_clear()


def test_a_process_has_one_copy_stream_for_each_device(made):
    for _ in range(5):  # stores that are opened one after the other
        assert Residency(0)._gpu(GPU).stream is device_module.copy_stream(torch.device("cuda"))
    threads = [threading.Thread(target=device_module.copy_stream, args=(torch.device("cuda", 1),)) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert made == [GPU, torch.device("cuda", 1)]


def is_mapped(address):
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


@pytest.fixture
def locked(monkeypatch):
    """Record locked pages by address, and the queried GPUs; `refuses` lets locking fail."""
    locked = SimpleNamespace(pages={}, refuses=False, gpus=[], last_error=0)
    ones = torch.ones

    def register(pointer, nbytes, flags):
        if locked.refuses or pointer in locked.pages:  # 712: it is registered already
            locked.last_error = 2 if locked.refuses else 712
            return locked.last_error
        locked.pages[pointer] = nbytes
        return 0

    def unregister(pointer):
        assert is_mapped(pointer)
        del locked.pages[pointer]
        return 0

    def launch(*size, device=None):
        if device is not None and (error := locked.last_error):
            locked.last_error = 0
            raise RuntimeError(f"CUDA error {error}")
        return ones(*size)

    monkeypatch.setattr(torch, "ones", launch)
    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(locked.gpus.append(device)))
    return locked


def test_page_locked_slabs_are_of_huge_pages_and_unlocked_before_they_go(locked):
    with torch.inference_mode():
        memory = page_locked(3 * HUGE + 4096, GPU)
    assert memory.data_ptr() % HUGE == 0
    assert locked.pages == {memory.data_ptr(): 3 * HUGE + 4096}
    memory.fill_(7)
    part = memory[4096:8192]
    del memory
    gc.collect()
    assert locked.pages
    assert bool((part == 7).all())
    del part
    gc.collect()
    assert locked.pages == {}


def test_pages_that_are_mapped_again_are_locked_again(locked):
    """Another thread may get an address as soon as it is unmapped."""

    def allocate():
        for _ in range(100):
            page_locked(2 * HUGE, GPU)

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    gc.collect()
    assert (locked.pages, locked.last_error) == ({}, 0)


def test_a_refused_lock_is_no_error_of_the_next_kernel(locked):
    locked.refuses = True
    page_locked(2 * HUGE, GPU)
    torch.ones(1, device=GPU)


def test_a_forked_child_shares_no_locked_page(locked):
    """A write after the fork would give the parent another page than the one that the GPU knows."""
    memory = page_locked(2 * HUGE, GPU).fill_(7)
    child = os.fork()
    if not child:
        wiped = not memory.any()
        del memory
        os._exit(0 if wiped else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((memory == 7).all())


def test_what_cuda_refuses_to_lock_comes_from_pytorch(locked, monkeypatch):
    requests = []
    monkeypatch.setattr(memory_module, "aligned_bytes", lambda nbytes, pin: requests.append((nbytes, pin)))
    locked.refuses = True
    page_locked(4 * HUGE, GPU)
    locked.refuses = False
    page_locked(HUGE // 2, GPU)  # less than a page
    assert requests == [(4 * HUGE, True), (HUGE // 2, True)]
    assert locked.pages == {}


def test_a_gpu_has_one_tier_by_any_name(made):
    residency, current = Residency(0), torch.device("cuda")
    assert residency._gpu(current) is residency._gpu(GPU)
    assert list(residency._gpus) == [GPU]
    chunks = np.arange(3)
    assert residency.find(("s", 0, 0), chunks, current).keys() == residency.find(("s", 0, 0), chunks, GPU).keys()


def test_slabs_that_the_disk_writes_to_are_large(made):
    """The exception is a budget too small for blocks of several sizes."""
    for direct, budget, least in ((False, 1 << 30, 1), (True, 1 << 30, 10), (True, 64 << 20, 1)):
        gpu = Residency(0, budget, direct=direct, staging_budget=budget)._gpu(GPU)
        assert {tier.least_slab for tier in (gpu.tier, gpu.staging)} == {least << 20}


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Emulate a process forked from one that used CUDA: it can neither register memory nor allocate any."""

    def refuse(*args, **kwargs):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nTo use CUDA with multiprocessing, ...")

    allocate = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        return refuse() if pin_memory else allocate(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", refuse)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    monkeypatch.setattr(memory_module, "_notices", Notices())


def test_what_cannot_be_locked_is_ordinary_memory_and_said_once(forked, caplog):
    residency = Residency(64 << 20)
    residency.prepare(GPU)
    for allocate in (residency.host.allocate, residency.host.allocate_own):
        for nbytes in (4096, 3 * HUGE):
            memory = allocate(nbytes)
            assert memory.shape == (nbytes,)
            assert memory.data_ptr() % 4096 == 0
    assert to_device(np.arange(3), torch.device("meta")).shape == (3,)
    assert Staging(8192)._memory.shape == (8192,)
    assert [record.getMessage() for record in caplog.records] == [
        "memory cannot be page-locked (Cannot re-initialize CUDA in forked subprocess.), so copies from and to a GPU "
        "take longer"
    ]


def test_host_memory_is_locked_for_the_first_gpu_and_not_for_models_on_the_cpu(locked, made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    residency, second = Residency(64 << 20), torch.device("cuda", 1)
    residency._gpu(torch.device("cpu"))
    assert residency.host.allocate(2 * HUGE).shape == (2 * HUGE,)
    residency.prepare(torch.device("cpu"))
    assert residency.host.allocate(2 * HUGE).shape == (2 * HUGE,)
    assert (locked.gpus, residency._allocates_ahead) == ([], False)
    for device in (second, GPU):
        residency.prepare(device)
        residency.host.allocate(2 * HUGE)
    assert set(locked.gpus) == {second}


@pytest.mark.parametrize("host_memory", ["64MiB", 0])
def test_a_model_on_the_cpu_asks_no_gpu(forked, tmp_path, host_memory, monkeypatch):
    for name in ("cudart", "current_device", "device", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: pytest.fail(f"torch.cuda.{name}"))
    test_a_forked_child_restores_though_it_can_lock_no_memory(forked, tmp_path, host_memory)


@pytest.mark.parametrize("host_memory", ["64MiB", 0])
def test_a_forked_child_restores_though_it_can_lock_no_memory(forked, tmp_path, host_memory):
    model = build("llama")
    plain = model.generate(prompt(100), do_sample=False, max_new_tokens=6)
    with KVStore(tmp_path, engine="posix", host_memory=host_memory) as store:
        store.precompute(model, prompt(100), progress=False)
        store.clear()
        for tier in ("disk", "host" if host_memory else "disk"):
            cache = TieredCache(model, store, record=False)
            output = model.generate(prompt(100), past_key_values=cache, do_sample=False, max_new_tokens=6)
            assert torch.equal(output, plain)
            assert (cache.stats.tokens_restored, cache.stats.tier) == (96, tier)
        assert store.stats.host.budget == (64 << 20 if host_memory else 0)


def test_a_segment_of_a_model_on_a_gpu_is_kept_in_locked_memory(locked, tmp_path, monkeypatch):
    """The first request stores what the next one restores."""
    with KVStore(tmp_path, engine="posix") as store:
        storage = store._storage
        monkeypatch.setattr(storage.writer, "submit", lambda pending, wait: None)
        storage.submit(PendingSegment(SimpleNamespace(id="a"), [], lambda: iter(()), on_device=KeptOnDevice(1, GPU)))
        storage.residency.host.allocate(2 * HUGE)
    assert locked.gpus[:1] == [GPU]


def test_a_forked_child_unlocks_nothing(locked, monkeypatch):
    memory = page_locked(2 * HUGE, GPU)
    monkeypatch.setattr(memory_module.os, "getpid", lambda: -1)
    del memory
    gc.collect()
    assert locked.pages


def test_memory_that_stays_is_locked_by_us_and_what_goes_by_pytorch(locked, monkeypatch):
    """PyTorch waits for copies before it gives memory to others; of ours it knows nothing."""
    residency, pinned_flags = Residency(64 << 20), []
    residency.prepare(GPU)
    memory = residency.host.allocate(2 * HUGE)
    assert locked.pages[memory.data_ptr()] == 2 * HUGE
    before = dict(locked.pages)
    real = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        pinned_flags.append(pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    residency.host.allocate_own(2 * HUGE)
    assert pinned_flags == [True]
    assert locked.pages == before


def scattered(random, count, slabs, slots, block_bytes):
    """Create blocks in random slots of some slabs, and memory in these slabs that no block uses."""
    memory = tuple(torch.from_numpy(random.integers(0, 256, (slots, block_bytes), np.uint8)) for _ in range(slabs))
    places = random.permutation(slabs * slots)[:count]
    return Blocks(np.arange(count), memory, places // slots, places % slots)


@pytest.mark.parametrize("slabs", [(1, 1), (3, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("count", [3, 40])
def test_scattered_blocks_are_uploaded_with_few_copies(monkeypatch, slabs, count):
    copies, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **kwargs: copies.append(1) or copy(*args, **kwargs))
    random, memory = np.random.default_rng(count), Residency(0)
    gpu = device_module.DeviceMemory(
        torch.device("cpu"), 0, 1 << 20, memory._policy, memory.scores, lambda *evicted: None, None
    )
    sources, targets = (scattered(random, count, n, 60, 512) for n in slabs)
    before = [slab.clone() for slab in targets.slabs]
    gpu.upload(sources, targets)
    used_slots = [set(targets.slot[targets.slab == number].tolist()) for number in range(slabs[1])]
    for number in range(count):
        expected = sources.slabs[sources.slab[number]][sources.slot[number]]
        assert torch.equal(targets.slabs[targets.slab[number]][targets.slot[number]], expected)
    for slab, old, rows in zip(targets.slabs, before, used_slots, strict=True):
        assert all(torch.equal(slab[row], old[row]) for row in range(60) if row not in rows)
    assert len(copies) <= 4
