"""RoPE whose frequencies depend on the length of the prompt: longrope and dynamic scaling, around their switch."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt

from hf_tiered_cache import KVStore, TieredCache

SWITCH = 96
"""The length from which on the frequencies are others."""
ROPES = {
    "longrope": {
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": SWITCH,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
        },
    },
    "dynamic": {
        "max_position_embeddings": SWITCH,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_around_the_length_at_which_rope_switches_logits_are_plain_ones(rope, tmp_path):
    model = build("llama", **ROPES[rope])

    def logits(ids, cache=None, model=model):
        with torch.no_grad():
            return model(ids, past_key_values=cache, logits_to_keep=1).logits

    for stored_tokens in (80, SWITCH, SWITCH + 32):
        with KVStore(tmp_path / f"{stored_tokens}", engine="posix") as store:
            logits(prompt(stored_tokens), TieredCache(model, store))
            for tokens in (SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 48):
                logits(prompt(8))  # frequencies that have grown with a longer prompt stay until a short one
                ids, cache = prompt(SWITCH + 48)[:, :tokens], TieredCache(model, store, record=False)
                fresh = build("llama", **ROPES[rope])
                assert torch.allclose(logits(ids, cache), logits(ids, model=fresh), atol=1e-5)
                same_side = (stored_tokens <= SWITCH) == (tokens <= SWITCH)
                assert cache.stats.tokens_restored == 0 if rope == "longrope" and not same_side else True


@pytest.mark.parametrize("rope", ROPES)
def test_a_prompt_stored_short_is_continued_past_the_length_at_which_rope_switches(rope, tmp_path):
    model = build("llama", initializer_range=0.2, **ROPES[rope])
    greedy = {"do_sample": False, "max_new_tokens": 32}
    plain = model.generate(prompt(80), **greedy)
    longer = torch.cat([plain, prompt(16, seed=5)], dim=1)
    with KVStore(tmp_path, engine="posix") as store:
        for tokens_restored in (0, 79):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(prompt(80), past_key_values=cache, **greedy), plain)
            assert cache.stats.tokens_restored == tokens_restored
        cache = TieredCache(model, store)
        output = model.generate(longer, past_key_values=cache, **greedy)
        assert cache.stats.tokens_restored == 0  # of these frequencies nothing is stored
    assert torch.equal(output, build("llama", initializer_range=0.2, **ROPES[rope]).generate(longer, **greedy))
