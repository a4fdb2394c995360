"""Continuous batching with a store behind its pages: the same tokens as `generate()`, and KV that serves both."""

from __future__ import annotations

import json
import random
import sys
import textwrap
from pathlib import Path

import processes
import pytest
import torch
from families import build, prompt
from paged import (
    alone,
    arriving,
    batched,
    finished,
    greedy,
    leaked,
    moved_to_host_memory,
    paging,
    running,
    settled,
    writes,
)
from reference import kv_of
from thorough import amount, pairs

from hf_tiered_cache import KVStore, TieredCache, detach, reasons, tiered
from hf_tiered_cache.batching import engine as engine_module
from hf_tiered_cache.batching import tiers
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.patches.attach import attachment_of

ROOT = Path(__file__).parents[2]


def mixed(count, seed=0, shared=(96, 50)):
    """Return prompts of which some begin alike, and some are private."""
    chance = random.Random(seed)
    prefixes = [prompt(tokens, seed=900 + at)[0].tolist() for at, tokens in enumerate(shared)]
    prompts = []
    for at in range(count):
        prefix = chance.choice([*prefixes, []])
        prompts.append(prefix + prompt(chance.randint(5, 60), seed=seed * 1000 + at)[0].tolist())
    return prompts


# --- tokens


def test_generate_beside_a_running_engine_computes_and_stores_what_is_right(tmp_path):
    """During each of its passes, the engine sets `config.is_causal` of the model that both share."""
    model, alike = (build("llama", seed=3, initializer_range=0.3).double() for _ in range(2))
    prompts = [prompt(100, seed=number) for number in range(12)]
    with KVStore(tmp_path, spot_checks=0.0) as store, tiered(model, store), running(model) as manager:
        if model.config._attn_implementation.startswith("paged|"):
            pytest.skip("with this version of transformers, generate() raises while an engine runs")
        for number, ids in enumerate(prompts):
            busy = prompt(60, seed=1000 + number)[0].tolist()
            manager.add_request(busy, max_new_tokens=8, eos_token_id=-1)
            options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
            logits = model.generate(ids, attention_mask=torch.ones_like(ids), **options).logits[0]
            torch.testing.assert_close(logits.double(), alike(ids).logits[:, -1], rtol=0, atol=1e-3)
    detach(model)
    tokens_restored = 0
    with KVStore(tmp_path, spot_checks=0.0) as store, torch.no_grad():
        for ids in prompts:
            cache = TieredCache(alike, store, record=False)
            logits = alike(ids, past_key_values=cache, logits_to_keep=1).logits
            torch.testing.assert_close(logits, alike(ids, logits_to_keep=1).logits, rtol=0, atol=1e-3)
            tokens_restored += cache.stats.tokens_restored
    assert tokens_restored == 96 * len(prompts)


@pytest.fixture(scope="module")
def crowd(model):
    """Return 64 prompts, and the answers of `generate()`."""
    prompts = mixed(64)
    return prompts, alone(model, prompts)


def test_the_engine_alone_gives_the_tokens_of_generate(model, crowd):
    prompts, expected = crowd
    with running(model) as manager:
        assert arriving(manager, prompts) == expected
        assert settled(manager) == 0


def test_64_requests_get_the_tokens_of_generate_cold_shared_and_after_a_restart(model, root, crowd):
    prompts, expected = crowd
    with KVStore(root) as store, tiered(model, store) as session:
        with running(model) as manager:
            assert arriving(manager, prompts) == expected
            assert settled(manager) == 0
        assert session.stats.requests == 64
        assert session.stats.tokens_restored < sum(map(len, prompts)) / 2
    with KVStore(root) as store, tiered(model, store) as session:
        with running(model) as manager:
            assert arriving(manager, prompts) == expected
            assert settled(manager) == 0
        stats = session.stats
        assert stats.requests == 64
        assert stats.tokens_restored + stats.details.tokens_kept > 0.7 * sum(map(len, prompts))
        assert stats.tokens_attended == stats.tokens_restored > 0


@pytest.mark.parametrize(("tokens", "scheduler"), pairs([4, 16, 64], ["fifo", "prefill_first"]))
@pytest.mark.thin(2)
def test_few_pages_give_the_same_tokens(model, root, crowd, tokens, scheduler):
    (prompts, expected), count = crowd, amount(12, 24)
    options = {"pages": 512 // tokens, "tokens": tokens, "scheduler_type": scheduler}
    for _ in range(2):
        with KVStore(root) as store, tiered(model, store), running(model, **options) as manager:
            assert arriving(manager, prompts[:count], pause=0.0) == expected[:count]
            assert settled(manager) == 0


def test_requests_that_are_moved_to_host_memory_get_the_same_tokens(model, root, crowd, monkeypatch):
    prompts, expected = crowd
    assert moved_to_host_memory(model, root, prompts[:24], monkeypatch) == [expected[:24]] * 2


def test_two_processes_share_one_store(model, root, crowd):
    prompts, expected = crowd
    code = """
        import sys, json
        sys.path.insert(0, "tests/lib")
        import torch
        torch.set_num_threads(1)
        from paged import arriving, running
        from families import build
        from hf_tiered_cache import KVStore, tiered
        prompts, model = json.load(sys.stdin), build("llama")
        with KVStore(sys.argv[1]) as store, tiered(model, store), running(model) as manager:
            json.dump(arriving(manager, prompts), sys.stdout)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(root)]
    halves = prompts[:40], prompts[24:]
    workers = [
        processes.Popen(command, stdin=processes.PIPE, stdout=processes.PIPE, cwd=ROOT, text=True) for _ in halves
    ]
    for process, half in zip(workers, halves, strict=True):
        process.stdin.write(json.dumps(half))
        process.stdin.close()
    answers = [json.loads(process.stdout.read().splitlines()[-1]) for process in workers]
    assert [process.wait() for process in workers] == [0, 0]
    assert answers == [expected[:40], expected[24:]]
    with KVStore(root) as store, tiered(model, store) as session:
        assert batched(model, prompts[:8]) == expected[:8]
        assert session.stats.tokens_restored > 0


@pytest.mark.parametrize("family", ["qwen3", "phi3", "smollm3", "glm4", "qwen3_moe"])
@pytest.mark.thin(2)
def test_families_restore_what_was_computed(family, root):
    model = build(family)
    prompts = mixed(6, seed=3)
    expected = alone(model, prompts)
    for restores in (False, True):
        with KVStore(root) as store, tiered(model, store) as session:
            assert batched(model, prompts) == expected
            assert (session.stats.tokens_restored > 0) == restores


def test_eager_attention_is_paged_and_shares_kv_with_generate(root):
    model = build("llama")
    model.set_attn_implementation("eager")
    ids = prompt(70)[0].tolist()
    expected = alone(model, [ids])
    with KVStore(root) as store, tiered(model, store) as session:
        assert batched(model, [ids]) == expected
        assert alone(model, [ids]) == expected
        assert session.stats.tokens_restored == 64


def test_a_model_that_has_paged_attention_from_the_beginning_is_served(root):
    model, ids = build("llama", attn_implementation="paged|eager"), prompt(70)[0].tolist()
    expected = alone(build("llama", attn_implementation="eager"), [ids])
    for tokens_restored in (0, 64):
        with KVStore(root) as store, tiered(model, store) as session:
            assert batched(model, [ids]) == expected
            assert session.stats.tokens_restored == tokens_restored
    assert model.config._attn_implementation == "paged|eager"


def test_several_sequences_streams_and_stop_tokens(model, root, crowd):
    prompts, expected = crowd
    for _ in range(2):
        with KVStore(root) as store, tiered(model, store) as session:
            with running(model, greedy(do_sample=True, top_k=1, num_return_sequences=2)) as manager:
                names = [manager.add_request(ids, max_new_tokens=8, eos_token_id=-1) for ids in prompts[:3]]
                answers = finished(manager, [*names, *(f"{name}__child#0" for name in names)])
                assert answers == expected[:3] * 2
                assert settled(manager) == 0
            assert session.stats.requests == 6
            with running(model) as manager:
                stop = expected[3][4]
                name = manager.add_request(prompts[3], max_new_tokens=8, streaming=True, eos_token_id=stop)
                lengths = [len(output.generated_tokens) for output in manager.request_id_iter(name)]
                assert lengths == list(range(1, expected[3].index(stop) + 2))


@pytest.mark.parametrize(("limit", "value"), [("STORE_GENERATED_AT", 32), ("_MOST_CAPTURED_BYTES", 1 << 16)])
@pytest.mark.thin(2)
def test_long_answers_are_stored_while_they_grow(model, store, monkeypatch, limit, value):
    monkeypatch.setattr(tiers, limit, value)
    prompts = [prompt(40, seed=seed)[0].tolist() for seed in range(3)]
    expected = alone(model, prompts, 200)
    with tiered(model, store) as session:
        assert batched(model, prompts, generation=greedy(max_new_tokens=200)) == expected
        store.flush()
        assert store.stats.segments > 15
        longer = [[*ids, *answer] for ids, answer in zip(prompts, expected, strict=True)]
        batched(model, longer)
        assert session.stats.tokens_restored == 3 * 224  # all but the rest of 239 computed tokens


# --- KV


@pytest.mark.thin(2)
def test_pages_get_the_bits_that_generate_has_stored(model, store, monkeypatch):
    ids = prompt(70)
    model.generate(ids, past_key_values=TieredCache(model, store), do_sample=False, max_new_tokens=2)
    store.flush()
    stored_kv = writes(monkeypatch)
    with tiered(model, store):
        batched(model, ids.tolist())
    assert list(stored_kv) == [64]
    for layer, (keys, values) in enumerate(kv_of(model, ids)):
        assert torch.equal(stored_kv[64][layer][0], keys[:, :, :64])
        assert torch.equal(stored_kv[64][layer][1], values[:, :, :64])


def test_generate_gets_the_bits_that_the_engine_has_computed(model, store):
    ids = prompt(64 + 5)
    with tiered(model, store), running(model) as manager:
        arriving(manager, [prompt(30, seed=5)[0].tolist(), ids[0].tolist()], pause=0.0)
        cache = manager.batch_processor.cache
        page_kv = [_page_kv(cache, layer, ids[0].tolist()[:64]) for layer in range(model.config.num_hidden_layers)]
    store.flush()
    restoring_cache = TieredCache(model, store)
    with torch.no_grad():
        model(ids, past_key_values=restoring_cache, use_cache=True, logits_to_keep=1)
    assert restoring_cache.stats.tokens_restored == 64
    for layer, (keys, values) in enumerate(page_kv):
        assert torch.equal(restoring_cache.layers[layer].keys[0, :, :64], keys)
        assert torch.equal(restoring_cache.layers[layer].values[0, :, :64], values)


def _page_kv(cache, layer, tokens):
    """Return the KV of tokens in shared pages of 16: `[heads, tokens, dim]` each."""
    if hasattr(cache, "cache_allocators"):
        (allocator,) = cache.cache_allocators.values()
        pages = allocator.match_prefix_blocks([*tokens, 0])
        keys, values = allocator._kv_token_views[layer]
        stride = allocator.block_physical_stride
    else:
        manager, pages, parent = cache._block_manager, [], None
        for start in range(0, len(tokens), 16):
            parent = manager.compute_hash(parent, tokens[start : start + 16], 0)
            pages.append(manager._hash_to_id[parent])
        keys, values, stride = cache.key_cache[layer], cache.value_cache[layer], 16
    rows = torch.tensor([page * stride + at for page in pages for at in range(16)])
    assert len(rows) == len(tokens)
    return keys[rows].transpose(0, 1), values[rows].transpose(0, 1)


@pytest.mark.thin(4)
def test_generate_and_the_engine_serve_each_other(model, store):
    first, second = prompt(80, seed=1)[0].tolist(), prompt(80, seed=2)[0].tolist()
    expected = alone(model, [first, second])
    with tiered(model, store) as session:
        assert batched(model, [first]) == expected[:1]
        assert alone(model, [first]) == expected[:1]
        assert session.stats.tokens_restored == 79
        assert alone(model, [second]) == expected[1:]
        assert batched(model, [second]) == expected[1:]
        assert session.stats.tokens_restored == 2 * 79


def test_positions_that_the_models_code_changes_give_the_same_tokens(store):
    model = build("llama", initializer_range=0.3)
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"] * 3}), with_kwargs=True
    )
    prompts = prompt(80, seed=1).tolist()
    expected = alone(model, prompts)
    with tiered(model, store, tag="three") as session:
        for answers in (batched, alone, batched):
            assert answers(model, prompts) == expected
        assert session.stats.tokens_restored == 2 * 79


def test_a_shared_prefix_is_stored_once(model, store):
    shared_ids = prompt(160, seed=7)[0].tolist()
    prompts = [shared_ids + prompt(32, seed=seed)[0].tolist() for seed in range(6)]
    with tiered(model, store):
        batched(model, prompts)
        store.flush()
    tokens = sum(segment.tokens for segment in store.segments())
    assert tokens == 160 + 6 * 32


def test_a_prefix_is_restored_once_for_requests_that_arrive_together(model, root, monkeypatch):
    shared_ids = prompt(160, seed=7)[0].tolist()
    prompts = [shared_ids + prompt(10, seed=seed)[0].tolist() for seed in range(6)]
    expected = alone(model, prompts)
    with KVStore(root) as store, tiered(model, store):
        batched(model, prompts[:1])
    with KVStore(root) as store, tiered(model, store) as session:
        assert batched(model, prompts) == expected
        assert session.stats.tokens_restored == 160
        assert session.stats.details.tokens_kept == 5 * 160


def test_kv_of_other_weights_is_neither_restored_nor_stored(root):
    """Pages outlive a change of the weights; what is computed after them belongs to no model."""
    model, shared_ids = build("llama"), prompt(64, seed=7)[0].tolist()
    longer = shared_ids + prompt(40, seed=8)[0].tolist()
    with KVStore(root) as store, tiered(model, store):
        with running(model) as manager:
            arriving(manager, [[*shared_ids, 5]])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            arriving(manager, [longer])  # attends to the pages of the old weights
        store.flush()
        expected = alone(model, [longer])
        assert alone(model, [longer]) == expected
    plain = build("llama")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.01)
    for segment_kv, true_kv in zip(_restored(model, root, longer), kv_of(plain, torch.tensor([longer])), strict=True):
        for stored_tensor, computed_tensor in zip(segment_kv, true_kv, strict=True):
            assert torch.allclose(stored_tensor, computed_tensor[:, :, : stored_tensor.shape[2]], atol=1e-5)


def _restored(model, root, ids):
    with KVStore(root) as store:
        cache = TieredCache(model, store, record=False)
        with torch.no_grad():
            model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys, layer.values) for layer in cache.layers]


# --- attachment


@pytest.mark.parametrize("method", ["contiguous_kv:budget=0.5", "cache_tune", "krul"])
def test_other_methods_are_refused_with_advice(model, store, method):
    with tiered(model, store, method=method), pytest.raises(ConfigError, match=r"exact method, or call generate"):
        batched(model, [[5, 6, 7]])


def test_frequencies_that_depend_on_a_batch_run_without_the_store(store):
    from families import longrope

    model = build("llama", rope_parameters=longrope(64))
    with tiered(model, store) as session:
        batched(model, [prompt(40)[0].tolist()])
        assert session.stats.reasons == {reasons.VARYING_ROPE: 1}
    assert store.stats.segments == 0


def test_every_member_of_the_engine_is_there(model):
    with running(model) as manager:
        arriving(manager, [[5, 6, 7]])
        assert engine_module.missing_members(manager, manager.batch_processor) == []


@pytest.mark.parametrize(
    ("path", "member"), [("scheduler", "_get_waiting_candidates"), ("cache", "search_prefix_match"), ("", "x")]
)
def test_a_member_that_has_moved_is_named_and_the_engine_runs_without_the_store(
    model, store, monkeypatch, caplog, path, member
):
    members = {**engine_module._MEMBERS, path or "processor": ("gone_" + member,)}
    monkeypatch.setattr(engine_module, "_MEMBERS", members)
    ids = prompt(60)[0].tolist()
    with tiered(model, store):
        assert batched(model, [ids]) == alone(model, [ids])
    assert f"{path or 'processor'}.gone_{member}" in caplog.text


def test_detaching_restores_all_objects_and_stores_what_was_computed(model, store):
    ids = prompt(60)[0].tolist()
    detach(model)
    expected = alone(model, [ids])
    with running(model) as manager:
        arriving(manager, [ids])
        before = [dict(part.__dict__) for part in _parts(manager)]
        own = dict(model.__dict__)
    session = tiered(model, store)
    with running(model) as manager:
        arriving(manager, [ids])
        assert "update" in manager.batch_processor.cache.__dict__
        detach(model)
        for part, attributes in zip(_parts(manager), before, strict=True):
            assert part.__dict__.keys() == attributes.keys()
        assert arriving(manager, [ids]) == expected
    assert model.__dict__.keys() == own.keys()
    assert attachment_of(model) is None
    session.close()
    store.flush()
    assert store.stats.tokens == 64


def _parts(manager):
    processor = manager.batch_processor
    return (
        *(manager, processor, processor.scheduler, processor.cache),
        *(processor.inputs_and_outputs, processor.model_runner),
    )


def test_a_session_that_ends_while_the_engine_runs_leaves_it_running(model, store):
    ids = prompt(60)[0].tolist()
    expected = alone(model, [ids])
    session = tiered(model, store)
    with running(model) as manager:
        names = [manager.add_request(ids, max_new_tokens=8, eos_token_id=-1) for _ in range(4)]
        session.close()
        assert finished(manager, names) == expected * 4
        assert settled(manager) == 0


def test_a_persistent_manager_is_served_by_one_session_at_a_time(model, root):
    ids = prompt(60)[0].tolist()
    expected = alone(model, [ids])

    def ask():
        outputs = model.generate_batch(
            inputs=[ids],
            generation_config=greedy(),
            continuous_batching_config=paging(),
            progress_bar=False,
            persistent_manager=True,
        )
        return [output.generated_tokens for output in outputs.values()]

    try:
        for _ in range(2):
            with KVStore(root) as store, tiered(model, store) as session:
                assert ask() == ask() == expected
                assert session.stats.requests == 2
        assert leaked(model._cached_continuous_batching_manager) == 0
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_without_recording_or_restoring(model, store):
    ids = prompt(60)[0].tolist()
    with tiered(model, store, record=False):
        batched(model, [ids])
        store.flush()
        assert store.stats.segments == 0
    with tiered(model, store):
        batched(model, [ids])
    with tiered(model, store, restore=False) as session:
        batched(model, [ids])
        assert session.stats.tokens_restored == 0
        assert session.stats.reasons == {reasons.SWITCHED_OFF: 1}
