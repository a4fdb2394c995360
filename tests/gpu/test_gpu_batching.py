"""Continuous batching on a GPU: real CUDA graphs, asynchronous batches, requests moved to host memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from families import build, prompt
from paged import NEW_TOKENS, arriving, batched, running, settled
from transformers import CompileConfig

from hf_tiered_cache import KVStore, TieredCache, detach, reasons, tiered

DEVICE = torch.device("cuda", 0)


@pytest.fixture(params=["float32", "bfloat16"])
def model(request):
    model = build("llama", getattr(torch, request.param)).to(DEVICE)
    yield model
    model.destroy_cached_continuous_batching_manager()
    detach(model)


def asked(count=6):
    """Return prompts of several passes that share nothing."""
    return [prompt(80 + at, seed=50 + at)[0].tolist() for at in range(count)]


def assert_stored(model, root, ids):
    """Assert that the store has the KV of all tokens but the last ones, and that it is what the model computes."""
    ids = torch.tensor([ids], device=DEVICE)
    with KVStore(root) as store, torch.no_grad():
        cache = TieredCache(model, store, record=False)
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        assert cache.stats.tokens_restored == (ids.shape[1] - 1) // 16 * 16
    detach(model)
    with torch.no_grad():
        expected = model(ids, logits_to_keep=1).logits
    atol = 1e-4 if model.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol * float(expected.abs().max()))


ENGINES = {
    "as it is": {},
    "graphs": {"use_cuda_graph": True},
    "graphs, asynchronous": {"use_cuda_graph": True, "use_async_batching": True},
    "moves to host memory": {"pages": 20, "cpu_offload_space": 0.01},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_are_stored_and_restored(root, model, engine):
    """The first session stores, the second restores; answers are those of the engine alone."""
    prompts, options = asked(), ENGINES[engine]
    with running(model, **options) as manager:
        expected = arriving(manager, prompts)
    for restores in (False, True):
        with KVStore(root) as store, tiered(model, store) as session, running(model, **options) as manager:
            answers = arriving(manager, prompts)
            assert settled(manager) == 0
        assert (session.stats.tokens_restored > 0) == restores
        if model.dtype == torch.float32:  # passes of other sizes round other bits
            assert answers == expected
    for ids, answer in zip(prompts, answers, strict=True):
        assert_stored(model, root, ids + answer)


def test_graphs_of_a_manager_that_outlives_sessions(model, tmp_path, caplog):
    """Graphs that are older than the first session leave no KV. Those of a session leave it to the next one, too."""

    def ask(seed, folder=None):
        """Return the number of stored tokens of a request."""
        ids = [prompt(200, seed=seed)[0].tolist()]
        if folder is None:
            batched(model, ids, persistent_manager=True, use_cuda_graph=True)
            return 0
        with KVStore(tmp_path / folder) as store, tiered(model, store):
            answers = batched(model, ids, persistent_manager=True, use_cuda_graph=True)
            assert len(answers[0]) == NEW_TOKENS
            store.flush()
            return store.stats.tokens

    ask(0)
    assert ask(1, "older") == 0
    assert reasons.OLDER_GRAPH in caplog.text
    model.destroy_cached_continuous_batching_manager()
    assert ask(2, "first") == 192
    assert ask(3, "second") == 192
    ask(4)  # graphs go on without a session


def test_compiled_passes_leave_their_kv_in_the_store(root):
    model, prompts = build("llama", num_hidden_layers=2).to(DEVICE), asked(1)
    compiled = CompileConfig(fullgraph=False, dynamic=True, mode="default")
    options = {"varlen_compile_config": compiled, "decode_compile_config": compiled}
    with running(model, **options) as manager:
        expected = arriving(manager, prompts)
    for restores in (False, True):
        with KVStore(root) as store, tiered(model, store) as session, running(model, **options) as manager:
            assert arriving(manager, prompts) == expected
            assert (session.stats.tokens_restored > 0) == restores
    for ids, answer in zip(prompts, expected, strict=True):
        assert_stored(model, root, ids + answer)
