"""Continuous batching with CUDA graphs and compiled passes: they run no Python code, and their KV is stored anyway."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from families import build, prompt, with_key_biases
from graphs import use_graphs
from paged import NEW_TOKENS, alone, arriving, batched, running, settled
from reference import kv_of
from thorough import amount
from torch._dynamo.utils import counters
from transformers import CompileConfig

from hf_tiered_cache import KVStore, TieredCache, detach, reasons, tiered
from hf_tiered_cache.methods import Exact


@pytest.fixture
def model():
    model = build("llama")
    yield model
    detach(model)


def asked(count=6):
    """Return prompts of several passes, which begin alike in pairs."""
    return [prompt(60, seed=at // 2)[0].tolist() + prompt(20 + at, seed=50 + at)[0].tolist() for at in range(count)]


def assert_stored(model, root, ids):
    """Assert that the store has the KV of all tokens but the last ones, which are no whole unit of 16."""
    with KVStore(root) as store:
        cache = TieredCache(model, store, record=False)
        with torch.no_grad():
            model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        assert cache.stats.tokens_restored == (len(ids) - 1) // 16 * 16
    detach(model)
    for layer, expected in zip(cache.layers, kv_of(model, torch.tensor([ids])), strict=True):
        for stored_tensor, expected_tensor in zip((layer.keys, layer.values), expected, strict=True):
            torch.testing.assert_close(stored_tensor, expected_tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "glm4"])
@pytest.mark.parametrize("varlen", [True, False])
@pytest.mark.thin(2)
def test_graphs_leave_their_kv_in_the_store(root, monkeypatch, family, varlen):
    """Also of a model that rotates a part of each head (glm4)."""
    model, prompts = build(family), asked()
    expected = alone(model, prompts)
    graph = use_graphs(monkeypatch, varlen)
    for restores in (False, True):
        with KVStore(root) as store, tiered(model, store) as session, running(model) as manager:
            assert arriving(manager, prompts) == expected
            assert settled(manager) == 0
        assert (session.stats.tokens_restored > 0) == restores
    assert graph.replays
    for ids, answer in zip(prompts, expected, strict=True):
        assert_stored(model, root, ids + answer)


def test_graphs_of_a_manager_that_outlives_sessions(model, tmp_path, monkeypatch, caplog):
    """Graphs that are older than the first session leave no KV. Those of a session leave it to the next one, too."""
    graph = use_graphs(monkeypatch)

    def ask(seed, tokens, folder=None):
        """Return how many passes of a request replayed a graph, and how many tokens were stored."""
        ids = [prompt(tokens, seed=seed)[0].tolist()]
        expected, replays = alone(model, ids), graph.replays
        with ExitStack() as stack:
            store = None
            if folder is not None:
                store = stack.enter_context(KVStore(tmp_path / folder))
                stack.enter_context(tiered(model, store))
            assert batched(model, ids, persistent_manager=True) == expected
            if store is None:
                return graph.replays - replays, 0
            store.flush()
            return graph.replays - replays, store.stats.tokens

    try:
        ask(0, 70)
        assert ask(1, 70, "older") == (NEW_TOKENS, 0)
        assert reasons.OLDER_GRAPH in caplog.text
        assert ask(2, 200, "first") == (NEW_TOKENS - 1, 192)  # a longer pass gets a graph of its own
        assert ask(3, 200, "second") == (NEW_TOKENS, 192)
        assert ask(4, 200) == (NEW_TOKENS, 0)  # graphs go on without a session
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_graphs_leave_keys_without_the_biases_of_the_moment(tmp_path, monkeypatch):
    """A graph goes on when the biases change, and in sessions with another codec."""
    graph, model, ids = use_graphs(monkeypatch), with_key_biases(build("qwen2"), 60.0), prompt(100, seed=1)
    try:
        for at, codec in enumerate(["raw", "int8", "int8", "raw"]):
            replays, method = graph.replays, Exact(codec=codec)
            with KVStore(tmp_path / str(at)) as store:
                with tiered(model, store, method=method):
                    batched(model, ids.tolist(), persistent_manager=True)
                store.flush()
                cache = TieredCache(model, store, method=method, record=False)
                with torch.no_grad():
                    model(ids, past_key_values=cache, logits_to_keep=1)
                assert cache.stats.tokens_restored == 96 and (at == 0 or graph.replays > replays)
                for layer, (keys, _) in zip(cache.layers, kv_of(model, ids), strict=True):
                    assert (layer.keys - keys).abs().max() < (0.06 if codec == "int8" else 1e-3)
            with torch.no_grad():
                for block in model.model.layers:
                    block.self_attn.k_proj.bias.add_(10.0)
            ids = prompt(100, seed=at + 2)
    finally:
        model.destroy_cached_continuous_batching_manager()
        detach(model)


def test_compiled_passes_leave_their_kv_in_the_store(root):
    model, prompts = build("llama", num_hidden_layers=1), asked(1)  # compiling takes seconds
    expected, graphs = alone(model, prompts), counters["stats"]["unique_graphs"]
    compiled = CompileConfig(backend="eager", fullgraph=False, dynamic=True, mode=None)
    options = {"varlen_compile_config": compiled, "decode_compile_config": compiled}
    for restores in amount((False,), (False, True)):
        with KVStore(root) as store, tiered(model, store) as session, running(model, **options) as manager:
            assert arriving(manager, prompts) == expected
            assert (session.stats.tokens_restored > 0) == restores
    assert counters["stats"]["unique_graphs"] > graphs
    for ids, answer in zip(prompts, expected, strict=True):
        assert_stored(model, root, ids + answer)
