"""Every causal LM of the installed transformers: restored with the answers of a `DynamicCache`, or refused clearly."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from architectures import ARCHITECTURES, TooSpecialError, build_architecture
from families import prompt
from thorough import some
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache, reasons
from hf_tiered_cache.errors import UnsupportedModelError

TOKENS = 200
IDS = prompt(TOKENS)
GREEDY = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
LOSSLESS = ("exact:recompute=0.4", "contiguous_kv:budget=1", "kv_drive:budget=1")
LOSSY = (
    "contiguous_kv:budget=0.3",
    "contiguous_kv.paper:budget=0.3",
    "impress:budget=0.3",
    "kv_drive:budget=0.3:local=16:prefill_tokens=64",
)
PECULIAR = (
    "Gemma2ForCausalLM",  # bounds its logits
    "GptOssForCausalLM",  # has sinks
    "DogeForCausalLM",  # adds to its mask what it computes from values
    "MllamaForCausalLM",  # has layers without KV
    "MistralForCausalLM",  # has sliding windows in all layers
)
"""Models that showed faults, or with eager attention of their own: by default, every method runs on these alone."""
NOT_RESTORED = (reasons.NO_LOGITS_TO_KEEP, reasons.OTHER_TOKENS)
"""Reasons why a model that is not refused restores nothing."""


def answer(model, cache):
    return torch.stack(model.generate(IDS, past_key_values=cache, **GREEDY).logits)


def continued(model, restored):
    """Return the logits of an answer whose prompt is computed in the passes of a restore."""
    cache = DynamicCache(config=model.config)
    if restored:
        model.generate(IDS[:, :restored], past_key_values=cache, **GREEDY | {"max_new_tokens": 1})
    return answer(model, cache)


def built(name):
    """Return a model; skip those that transformers cannot run at these sizes, or with other answers in two passes."""
    try:
        model = build_architecture(name)
        whole, in_two_passes = continued(model, 0), continued(model, 96)
    except TooSpecialError as error:
        pytest.skip(str(error))
    except Exception as error:
        pytest.skip(f"transformers cannot run {name} at these sizes: {error}")
    if not torch.allclose(whole, in_two_passes, atol=1e-4):  # Moshi's masks have no sliding window, but its cache has
        pytest.skip(f"{name} answers otherwise if transformers computes its prompt in two passes")
    return model


def cache_for(model, store, method="exact"):
    try:
        return TieredCache(model, store, method=method)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


def close(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", some(ARCHITECTURES, 4))
def test_is_restored_as_computed_or_refused(name, tmp_path):
    model = built(name)
    with KVStore(tmp_path) as store:
        answer(model, cache_for(model, store))
        store.flush()
        cache = cache_for(model, store)
        logits = answer(model, cache)
    if cache.stats.reason in NOT_RESTORED:
        pytest.skip(cache.stats.reason)
    assert cache.stats.tokens_restored == 192
    close(logits, continued(model, 192))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PECULIAR else pytest.mark.thorough) for name in ARCHITECTURES]
)
@pytest.mark.parametrize("method", LOSSLESS + LOSSY)
def test_what_a_method_stores_is_what_the_model_computes(name, method, tmp_path):
    model = built(name)
    with suppress(UnsupportedModelError):  # which some models show in a pass
        for _ in range(2):
            with KVStore(tmp_path) as store:  # from disk, since a prefix in memory is not recomputed
                cache = cache_for(model, store, method)
                logits = answer(model, cache)
        if method in LOSSLESS:
            close(logits, continued(model, cache.stats.tokens_restored))
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        close(answer(model, cache), continued(model, cache.stats.tokens_restored))
