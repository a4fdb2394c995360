"""What only a GPU can show: bits on CUDA, the device tier, pinned memory, side streams, kvikio. Skipped without one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import assert_like_reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from conversing import Conversing
from families import FAMILIES, build, prompt
from segments import read_back

from hf_tiered_cache import EngineUnavailableError, KVStore, TieredCache
from hf_tiered_cache.cache.executor import Executor
from hf_tiered_cache.conversations.distances import AttentionDistances
from hf_tiered_cache.methods import Exact, make_method
from hf_tiered_cache.selection.streamed import attention
from hf_tiered_cache.store.codecs import CODECS
from hf_tiered_cache.store.container import block_digests, lin64
from hf_tiered_cache.store.engines import open_engine

GREEDY = {"do_sample": False, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
DEVICE = torch.device("cuda", 0)


@pytest.fixture(params=["posix", "kvikio"])
def engine(request):
    try:  # not at collection: a driver that is half there answers late
        open_engine(request.param).close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return getattr(torch, request.param)


def question(ids, seed):
    return torch.cat([ids[:, : ids.shape[1] - 20], prompt(20, seed=seed).to(DEVICE)], dim=1)


def ask(model, store, ids, reference_ids):
    """Generate and compare bit for bit with a DynamicCache of the same passes."""
    cache = TieredCache(model, store, record=False)
    assert_like_reference(model, cache, ids, reference_ids, GREEDY)
    return cache.stats


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(tmp_path, family, dtype):
    model, ids = build(family, dtype).to(DEVICE), prompt(200).to(DEVICE)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, progress=False)
    with KVStore(tmp_path) as store:
        assert ask(model, store, question(ids, 3), ids).tokens_restored == 176


@pytest.mark.parametrize("budgets", [("0", "0"), ("0", "1GiB"), ("1GiB", "1GiB"), ("300KiB", "300KiB"), ("1GiB", "0")])
def test_any_tiers_and_engines_are_exact_and_keep_their_budgets(tmp_path, engine, budgets, dtype):
    model = build("qwen2", dtype).to(DEVICE)
    prompts = [prompt(300, seed=seed).to(DEVICE) for seed in (1, 2, 3)]
    with KVStore(tmp_path, engine=engine) as store:
        store.precompute(model, [p[0] for p in prompts], progress=False)
    device_memory, host_memory = budgets
    with KVStore(tmp_path, engine=engine, device_memory=device_memory, host_memory=host_memory) as store:
        for turn in range(3):
            for ids in prompts:
                stats = ask(model, store, question(ids, turn), ids)
                assert stats.tokens_restored > 0
                assert store.stats.host.bytes <= store.stats.host.budget
                assert store.stats.device.bytes <= store.stats.device.budget
        if budgets == ("1GiB", "1GiB"):
            assert (stats.device.hits, stats.bytes_read) == (stats.device.blocks, 0)
            assert stats.device.blocks > 0


def test_the_device_tier_takes_hits_from_the_host(tmp_path):
    model, ids = build("llama").to(DEVICE), prompt(300).to(DEVICE)
    with KVStore(tmp_path, device_memory="64MiB", host_memory="64MiB") as store:
        store.precompute(model, ids, progress=False)
        first, second = (ask(model, store, question(ids, seed), ids) for seed in (3, 4))
    assert first.host.hits > 0  # written through the host tier
    assert (second.device.hits, second.host.hits, second.bytes_read) == (second.device.blocks, 0, 0)


@pytest.mark.parametrize("method", ["exact", "contiguous_kv:reorder=false", "h2o"])
def test_blocks_reach_a_gpu_that_keeps_none(tmp_path, engine, method):
    model, ids, method = build("llama").to(DEVICE), prompt(300).to(DEVICE), make_method(method)
    with KVStore(tmp_path, engine=engine) as store:
        store.precompute(model, ids, method=method, progress=False)
    with KVStore(tmp_path, engine=engine, policy=method.policy) as store:
        for _ in range(2):
            cache = TieredCache(model, store, method=method, record=False)
            model.generate(question(ids, seed=3), past_key_values=cache, **GREEDY)
            assert cache.stats.tokens_restored > 0
            assert 0 < store.stats.device.bytes <= store.stats.device.budget
        assert (cache.stats.bytes_read, cache.stats.host.hits > 0) == (0, True)  # kept on the host


def test_host_memory_is_pinned(tmp_path):
    model, ids = build("llama").to(DEVICE), prompt(100).to(DEVICE)
    with KVStore(tmp_path, host_memory="64MiB") as store:
        store.precompute(model, ids, progress=False)
        ask(model, store, ids, ids)
        slabs = [slab for pool in store._storage.residency.host.pools() for slab in pool.slabs if slab is not None]
        assert slabs
        # `is_pinned` asks about the begin of a storage, which may lie before the locked pages
        assert all(torch.from_numpy(slab.numpy()).is_pinned() for slab in slabs)


def test_a_flipped_bit_is_seen_on_the_way_to_the_device(tmp_path):
    model, ids = build("llama").to(DEVICE), prompt(300).to(DEVICE)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, progress=False)
        (row,) = store.segments()
        path, reader = store._storage.disk.path(row.id), store._storage.disk.reader(row.id)
    data = bytearray(path.read_bytes())
    data[reader.header.blocks.offset + 9 * reader.shape.block_groups[0].block_bytes] ^= 1
    path.write_bytes(data)
    with KVStore(tmp_path, device_memory="64MiB") as store:
        cache = TieredCache(model, store)
        output = model.generate(ids, past_key_values=cache, **GREEDY)
        assert torch.equal(output.sequences, model.generate(ids, **GREEDY).sequences)
        assert cache.stats.details.verification_failures == 1
        assert cache.stats.tokens_restored == 144


def test_lin64_is_the_same_on_both_sides():
    blocks = torch.randint(0, 256, (7, 65536), dtype=torch.uint8)
    assert torch.equal(lin64(blocks), lin64(blocks.to(DEVICE)).cpu())


@pytest.mark.parametrize("codec", CODECS)
def test_what_the_gpu_packs_has_the_digests_that_the_cpu_computes(tmp_path, codec, dtype):
    model, ids = build("gemma3", dtype).to(DEVICE), prompt(300).to(DEVICE)
    with KVStore(tmp_path, engine="posix", codec=codec) as store:
        store.precompute(model, ids, progress=False)
        (row,) = store.segments()
        disk = store._storage.disk
        digests = disk.reader(row.id).digests
        for table, blocks in zip(digests, read_back(disk, row.id), strict=True):
            assert np.array_equal(table, block_digests(blocks))


def test_kv_of_the_cpu_does_not_serve_the_gpu(tmp_path):
    """It is rounded in another way, so the device is part of the fingerprint."""
    ids = prompt(200)
    with KVStore(tmp_path) as store:
        store.precompute(build("llama"), ids, progress=False)
        model = build("llama").to(DEVICE)
        cache = TieredCache(model, store, record=False)
        output = model.generate(ids.to(DEVICE), past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 0
        assert "device" in cache.stats.reason
        assert torch.equal(output.sequences, model.generate(ids.to(DEVICE), **GREEDY).sequences)


def test_beams_and_batches_on_the_gpu(tmp_path):
    model, ids = build("gemma3").to(DEVICE), prompt(200).to(DEVICE)
    with KVStore(tmp_path, device_memory="64MiB") as store:
        store.precompute(model, ids, progress=False)
        arguments = {"do_sample": False, "max_new_tokens": 8}
        for more in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
            cache = TieredCache(model, store, record=False)
            output = model.generate(ids, past_key_values=cache, **arguments, **more)
            assert cache.stats.tokens_restored > 0
            assert torch.equal(output, model.generate(ids, **arguments, **more))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_over_two_gpus(tmp_path):
    from accelerate import dispatch_model, infer_auto_device_map

    model, ids = build("llama"), prompt(200)
    device_map = infer_auto_device_map(
        model, max_memory={0: "400KB", 1: "4GB"}, no_split_module_classes=["LlamaDecoderLayer"]
    )
    model = dispatch_model(model, device_map)
    with KVStore(tmp_path, device_memory="64MiB") as store:
        store.precompute(model, ids, progress=False)
        for _ in range(2):
            cache = TieredCache(model, store, record=False)
            output = model.generate(ids.to(model.device), past_key_values=cache, do_sample=False, max_new_tokens=8)
            assert cache.stats.tokens_restored == 192
            assert len({layer.keys.device for layer in cache.layers}) == 2
    assert torch.equal(output, model.generate(ids.to(model.device), do_sample=False, max_new_tokens=8))


@pytest.mark.parametrize(
    "method", ["contiguous_kv:period=2", "contiguous_kv:period=2:identify=keys:reorder=false", "impress", "h2o"]
)
def test_a_budget_is_kept_and_a_whole_one_is_exact(tmp_path, method, engine, dtype):
    """Tokens are equal cold, from a small device tier, and warm; a budget of 1 equals the exact method."""
    model, ids = build("qwen2", dtype).to(DEVICE), prompt(200).to(DEVICE)
    longer_ids = question(ids, seed=8)
    partly, wholly = (make_method(f"{method}:budget={budget}") for budget in (0.25, 1.0))
    sizes = {"device_memory": "2MiB", "host_memory": "1MiB", "policy": partly.policy}
    results = []
    with KVStore(tmp_path, engine=engine, **sizes) as store:
        store.precompute(model, ids, method=partly, progress=False)
    for _ in range(2):
        with KVStore(tmp_path, engine=engine, **sizes) as store:
            for _ in range(2):
                cache = TieredCache(model, store, method=partly, record=False)
                results.append(model.generate(longer_ids, past_key_values=cache, **GREEDY))
                assert 0 < cache.stats.tokens_attended < cache.stats.tokens_restored
            exact, with_all = (
                model.generate(longer_ids, past_key_values=TieredCache(model, store, method=m, record=False), **GREEDY)
                for m in (None, wholly)
            )
            assert all(torch.equal(a, b) for a, b in zip(exact.logits, with_all.logits, strict=True))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result.logits, results[0].logits, strict=True))


@pytest.mark.parametrize("method", ["cache_tune", "cache_blend", "epic"])
def test_passages_are_restored_anywhere(tmp_path, method, engine, dtype):
    """Logits are equal cold and warm, from a partial device tier; full recomputation equals the plain model."""
    model = build("qwen2", dtype, num_hidden_layers=4).to(DEVICE)  # CacheBlend computes the first two in full
    passages = [prompt(tokens, seed=seed)[0] for seed, tokens in enumerate((96, 160), start=1)]
    ids = torch.cat([prompt(20, seed=8)[0], *reversed(passages), prompt(20, seed=9)[0]]).unsqueeze(0).to(DEVICE)
    partly, wholly = (make_method(f"{method}:recompute={share}") for share in (0.25, 1.0))
    sizes = {"device_memory": "1MiB", "host_memory": "1MiB", "engine": engine}
    with KVStore(tmp_path, **sizes) as store:
        store.precompute(model, passages, passages=True, method=partly, progress=False)
    results = []
    for _ in range(2):
        with KVStore(tmp_path, **sizes) as store:
            for _ in range(2):
                cache = TieredCache(model, store, method=partly, record=False)
                results.append(model.generate(ids, past_key_values=cache, **GREEDY))
                assert cache.stats.bytes_read or cache.stats.host.hits or cache.stats.device.hits
            exact = model.generate(
                ids, past_key_values=TieredCache(model, store, method=wholly, record=False), **GREEDY
            )
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result.logits, results[0].logits, strict=True))
    full = model.generate(ids, **GREEDY)
    atol = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(exact.logits[0], full.logits[0], rtol=0, atol=atol * float(full.logits[0].abs().max()))


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_give_the_same_bits_as_on_the_cpu(codec, dtype):
    tensor = torch.randn(4, 300, 64).mul_(torch.logspace(-20, 20, 300)[:, None]).to(dtype)
    fields = CODECS[codec].encode(tensor)
    device_fields = CODECS[codec].encode(tensor.to(DEVICE))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(fields, device_fields, strict=True))
    assert torch.equal(CODECS[codec].decode(device_fields, dtype).cpu(), CODECS[codec].decode(fields, dtype))


@pytest.mark.parametrize("record", [False, True])
def test_layers_make_nobody_wait_for_anybody(tmp_path, record, monkeypatch):
    """This is `test_waits.py` on a GPU, for warm passes and decoded tokens."""
    model, ids, warm, run = build("qwen2", torch.bfloat16).to(DEVICE), prompt(300).to(DEVICE), [], Executor._run

    def refusing_to_wait(*args):
        _set_waits("error" if warm else "default")
        try:
            return run(*args)
        finally:
            _set_waits("default")

    monkeypatch.setattr(Executor, "_run", refusing_to_wait)  # the model's forward passes, and all that layers do
    with KVStore(tmp_path, device_memory="1GiB", host_memory="1GiB") as store:
        store.precompute(model, ids, progress=False)
        for _ in range(2):
            cache, tokens = TieredCache(model, store, record=record), question(ids, 3)
            with torch.no_grad():
                for _ in range(5):
                    logits = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits
                    tokens = logits[:, -1:].argmax(-1)
            assert cache.stats.tokens_restored > 0
            warm.append(True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dim", [64, 20])
def test_attention_of_runs_is_what_the_cpu_computes(dtype, causal, heads, dim):
    """Flash, memory-efficient and plain kernels, with lengths that no kernel pads to."""
    query = torch.randn(1, heads, 37, dim).to(dtype)
    keys, values = (torch.randn(1, 2, 37 if causal else 301, dim).to(dtype) for _ in range(2))
    expected = attention(query.float(), keys.float(), values.float(), None, causal=causal)
    result = attention(query.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), None, causal=causal)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.output.cpu(), expected.output, rtol=0, atol=atol)
    torch.testing.assert_close(result.log_total.cpu(), expected.log_total, rtol=0, atol=atol)


class _Watched(Exact, Conversing):
    """Exact reuse, watched."""

    def observer(self):
        return AttentionDistances(interval=2, prompt_interval=1, prompt_rows=1 << 30)


def test_attention_is_compared_as_on_the_cpu(tmp_path):
    model, ids = build("qwen2"), prompt(400)
    results = []
    for device in (torch.device("cpu"), DEVICE):
        on_device, tokens = model.to(device), ids.to(device)
        with KVStore(tmp_path / device.type) as store:
            cache = TieredCache(on_device, store, method=_Watched(), record=False)
            with torch.no_grad():
                on_device(input_ids=tokens[:, :380], past_key_values=cache)
                for at in range(380, 400):
                    on_device(input_ids=tokens[:, at : at + 1], past_key_values=cache)
            store.flush()
            results.append(cache._executor.observer.result())
    assert results[0].rows == results[1].rows == 390 and results[1].missing == ""
    np.testing.assert_allclose(results[1].euclidean, results[0].euclidean, atol=1e-2)
    np.testing.assert_allclose(results[1].initial_recent, results[0].initial_recent, atol=1e-3)


def _set_waits(mode):
    torch.cuda.set_sync_debug_mode(mode)
