"""Continuous batching of models with sliding windows: their requests share no pages, and restore from the store."""

from __future__ import annotations

import random

import pytest
import torch
from families import build, prompt
from paged import alone, arriving, batched, finished, greedy, moved_to_host_memory, running, settled, writes
from reference import kv_of
from thorough import amount, pairs

from hf_tiered_cache import KVStore, TieredCache, tiered
from hf_tiered_cache.batching import tiers

WINDOW = 40
CROWD = amount(12, 24)
"""Number of prompts, for which there may be too few pages."""
TWO_SEQUENCES = greedy(do_sample=True, top_k=1, num_return_sequences=2)
FAMILIES = ["qwen2_sliding", "mistral", "gemma2", "gemma3", "gpt_oss"]
SHARING = pytest.mark.parametrize("model", [name for name in FAMILIES if name != "gemma2"], indirect=True)
"""Families with KV that serves both generate() and the engine. Paged attention ignores the softcap of Gemma 2."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return build(request.param)


def crowd_of(model):
    """Return prompts with shared beginnings shorter and longer than the window, and the answers of `generate()`."""
    chance = random.Random(4)
    prefixes = [prompt(tokens, seed=800 + tokens)[0].tolist() for tokens in (0, 20, 50, 130)]
    prompts = [prefixes[at % 4] + prompt(chance.randint(17, 60), seed=700 + at)[0].tolist() for at in range(CROWD)]
    return prompts, alone(model, prompts)


@pytest.fixture(scope="module")
def crowd(model):
    return crowd_of(model)


def stored_share(prompts):
    """Count the tokens that a store with all prompts restores: multiples of 16, and never the last token."""
    return sum((len(ids) - 1) // 16 * 16 for ids in prompts)


@pytest.mark.thin(2)
def test_requests_get_the_tokens_of_generate_cold_warm_and_after_a_restart(model, root, crowd):
    prompts, expected = crowd
    for _ in range(2):
        with KVStore(root) as store, tiered(model, store) as session:
            with running(model, pages=256) as manager:
                for _ in range(2):
                    assert arriving(manager, prompts) == expected
                    assert settled(manager) == 0
            stats = session.stats
            assert stats.requests == 2 * CROWD
            assert stats.tokens_attended == stats.tokens_restored >= stored_share(prompts)
    assert stats.reasons == {}
    assert stats.tokens_restored >= 2 * stored_share(prompts)


@pytest.mark.parametrize(("tokens", "scheduler"), pairs([4, 16], ["fifo", "prefill_first"]))
@pytest.mark.thin(4)
def test_few_pages_give_the_same_tokens(model, root, crowd, tokens, scheduler):
    prompts, expected = crowd
    options = {"pages": 320 // tokens, "tokens": tokens, "scheduler_type": scheduler}
    for _ in range(2):
        with KVStore(root) as store, tiered(model, store) as session, running(model, **options) as manager:
            assert arriving(manager, prompts, pause=0.0) == expected
            assert settled(manager) == 0
    assert session.stats.tokens_restored > 0


@pytest.mark.thin(2)
def test_prompts_in_chunks_shorter_than_the_window(model, root, crowd):
    prompts, expected = crowd
    for _ in range(2):
        with KVStore(root) as store, tiered(model, store), running(model, max_batch_tokens=24) as manager:
            assert arriving(manager, prompts, pause=0.0) == expected
            assert settled(manager) == 0


@pytest.mark.thin(4)
def test_requests_that_are_moved_to_host_memory_get_the_same_tokens(model, root, crowd, monkeypatch):
    prompts, expected = crowd
    assert moved_to_host_memory(model, root, prompts, monkeypatch) == [expected] * 2


def test_several_sequences_of_a_request(model, root, crowd):
    prompts, expected = crowd
    for _ in range(2):
        with KVStore(root) as store, tiered(model, store), running(model, TWO_SEQUENCES) as manager:
            names = [manager.add_request(ids, max_new_tokens=8, eos_token_id=-1) for ids in prompts[:4]]
            assert finished(manager, [*names, *(f"{name}__child#0" for name in names)]) == expected[:4] * 2
            assert settled(manager) == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_request_with_two_sequences_computes_two_tokens(family, root):
    """The engine forks it before its last token, and needs a token to compute before that."""
    model, ids = build(family), prompt(49, seed=49)[0].tolist()
    expected = alone(model, [ids])
    for tokens_restored in (0, 47):
        with KVStore(root) as store, tiered(model, store) as session, running(model, TWO_SEQUENCES) as manager:
            name = manager.add_request(ids, max_new_tokens=8, eos_token_id=-1)
            assert finished(manager, [name, f"{name}__child#0"]) == expected * 2
        assert session.stats.tokens_restored == tokens_restored


@pytest.mark.thin(2)
def test_a_shared_prefix_is_stored_once(model, store):
    shared_ids = prompt(160, seed=7)[0].tolist()
    with tiered(model, store):
        batched(model, [shared_ids + prompt(32, seed=seed)[0].tolist() for seed in range(6)])
        store.flush()
    assert sum(segment.tokens for segment in store.segments()) == 160 + 6 * 32


@SHARING
@pytest.mark.thin(2)
def test_generate_and_the_engine_serve_each_other(model, root):
    first, second = (prompt(tokens, seed=tokens)[0].tolist() for tokens in (144, 80))
    expected = alone(model, [first, second])
    with KVStore(root) as store, tiered(model, store) as session:
        assert batched(model, [first]) == expected[:1]
        assert alone(model, [first]) == expected[:1]
        assert session.stats.tokens_restored == 143
        assert alone(model, [second]) == expected[1:]
        assert batched(model, [second]) == expected[1:]
        assert session.stats.tokens_restored == 143 + 79


@SHARING
@pytest.mark.parametrize("tokens", [30, 130])
@pytest.mark.thin(2)
def test_pages_get_the_bits_that_generate_has_stored(model, store, monkeypatch, tokens):
    """Layers with full attention get the whole prefix, the others what the next token sees of it."""
    ids, stored_kv = prompt(tokens, seed=tokens), writes(monkeypatch)
    model.generate(ids, past_key_values=TieredCache(model, store), do_sample=False, max_new_tokens=2)
    store.flush()
    with tiered(model, store):
        batched(model, ids.tolist())
    ((stop, kv),) = stored_kv.items()
    assert stop >= (tokens - 1) // 16 * 16
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(kv)
    plain = kv_of(model, ids)
    for layer, kind in enumerate(kinds):
        start = max(0, stop - (WINDOW - 1)) if kind == "sliding_attention" else 0
        for tensor, expected in zip(kv[layer], plain[layer], strict=True):
            assert torch.equal(tensor, expected[:, :, start:stop])


@SHARING
def test_generate_gets_the_bits_that_the_engine_has_computed(model, root, monkeypatch):
    """This includes tokens that have left the window, from chunks that share their passes."""
    ids, other_prompt, computed_kv = prompt(140, seed=9), prompt(50, seed=8)[0].tolist(), {}
    note = tiers.PagedTiers._note

    def keep(self, rows, packed):
        row = 0
        for state, _, count in rows:
            if len(state.initial_tokens) == ids.shape[1]:
                for layer, tensors in passes.items():
                    computed_kv.setdefault(layer, []).append([tensor[:, :, row : row + count] for tensor in tensors])
            row += count
        note(self, rows, packed)

    passes, capture = {}, tiers.PagedTiers.computed
    monkeypatch.setattr(tiers.PagedTiers, "_note", keep)
    monkeypatch.setattr(
        tiers.PagedTiers,
        "computed",
        lambda self, layer, *tensors: (
            passes.update({layer: [tensor.clone() for tensor in tensors]}),
            capture(self, layer, *tensors),
        ),
    )
    with KVStore(root) as store, tiered(model, store), running(model, max_batch_tokens=64) as manager:
        arriving(manager, [other_prompt, ids[0].tolist()], pause=0.0)
    with KVStore(root) as store:
        cache = TieredCache(model, store, record=False)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    stop = cache.stats.tokens_restored
    assert stop == 128
    for layer, chunks in computed_kv.items():
        for part, restored_tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            restored_window = restored_tensor[:, :, : restored_tensor.shape[2] - (ids.shape[1] - stop)]
            computed_tensor = torch.cat([chunk[part] for chunk in chunks], dim=2)
            assert torch.equal(restored_window, computed_tensor[:, :, stop - restored_window.shape[2] : stop])


def test_full_attention_without_shared_pages_is_restored_too(root):
    """`allow_block_sharing=False` is another engine whose requests share no pages."""
    llama = build("llama")
    prompts, expected = crowd_of(llama)
    for _ in range(2):
        with KVStore(root) as store, tiered(llama, store) as session:
            assert batched(llama, prompts, pages=256, allow_block_sharing=False) == expected
    assert session.stats.tokens_restored >= stored_share(prompts)


@pytest.mark.parametrize("family", ["qwen2_sliding", "mistral"])
def test_kv_of_other_weights_is_neither_restored_nor_stored(family, root):
    """An engine may exchange pages for older ones with the same tokens, even if no request begins with shared pages."""
    shared_ids, other_model = prompt(64, seed=7)[0].tolist(), build(family)
    longer = shared_ids + prompt(40, seed=8)[0].tolist()
    with KVStore(root) as store, tiered(other_model, store), running(other_model, max_batch_tokens=48) as manager:
        arriving(manager, [[*shared_ids, 5]])
        with torch.no_grad():
            for parameter in other_model.parameters():
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        arriving(manager, [longer[70:]])  # shows the change
        arriving(manager, [longer])
    with KVStore(root) as store:
        cache = TieredCache(other_model, store, record=False)
        with torch.no_grad():
            other_model(torch.tensor([longer]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    for layer, tensors in zip(cache.layers, kv_of(other_model, torch.tensor([longer])), strict=True):
        for window, expected in zip((layer.keys, layer.values), tensors, strict=True):
            assert torch.allclose(window, expected[:, :, -window.shape[2] :], atol=1e-5)
