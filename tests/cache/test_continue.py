"""A kept cache goes on with any prompt: what the two share is kept, the store may have more, the rest is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build, prompt
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV

GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2_sliding"])
def model(request):
    return build(request.param)


def plain(model, ids, **more):
    return model.generate(ids, **GREEDY | more)


def test_one_token_said_otherwise_costs_that_token(model, store):
    """A chat template may tokenize the last reply differently."""
    cache = TieredCache(model, store)
    said = model.generate(prompt(30), past_key_values=cache, **GREEDY)
    again = torch.cat([said[:, :-2], (said[:, -2:] + 1) % 100 + 3, prompt(9, seed=4)], dim=1)
    assert torch.equal(model.generate(again, past_key_values=cache, **GREEDY), plain(model, again))
    assert cache.stats.requests == 2
    assert cache.stats.details.tokens_dropped == 1
    assert cache.stats.tokens_restored == 0


def test_a_copied_prompt_goes_on_in_several_ways(model, store):
    """This is the documented pattern: prefill, deepcopy, generate. The last token merges with the next text."""
    begun = TieredCache(model, store)
    beginning = prompt(60)
    model(beginning, past_key_values=begun)
    for seed in (5, 6):
        whole = torch.cat([beginning[:, :-1], prompt(12, seed=seed)], dim=1)
        cache = copy.deepcopy(begun)
        assert torch.equal(model.generate(whole, past_key_values=cache, **GREEDY), plain(model, whole))
        assert cache.stats.details.tokens_dropped == 1
    assert begun.get_seq_length() == 60


@pytest.mark.parametrize(("kept", "tokens"), pairs([0, 1, 17, 64, 99], [20, 100, 140]))
def test_whatever_two_prompts_share(model, store, kept, tokens):
    cache = TieredCache(model, store)
    first, second = prompt(100), prompt(tokens, seed=9)
    second[:, :kept] = first[:, : min(kept, tokens)]
    model.generate(first, past_key_values=cache, **GREEDY)
    assert torch.equal(model.generate(second, past_key_values=cache, **GREEDY), plain(model, second))
    assert cache.get_seq_length() == second.shape[1] + GREEDY["max_new_tokens"] - 1
    fresh = TieredCache(model, store)  # and nothing wrong was stored
    assert torch.equal(model.generate(second, past_key_values=fresh, **GREEDY), plain(model, second))


def test_the_very_same_prompt_again(model, store):
    cache = TieredCache(model, store)
    for _ in range(2):
        assert torch.equal(model.generate(prompt(50), past_key_values=cache, **GREEDY), plain(model, prompt(50)))


def test_what_the_store_has_of_another_prompt_is_restored(model, store):
    other = prompt(100, seed=2)
    store.precompute(model, other, progress=False)
    cache = TieredCache(model, store)
    model.generate(prompt(40), past_key_values=cache, **GREEDY)
    assert torch.equal(model.generate(other, past_key_values=cache, **GREEDY), plain(model, other))
    assert cache.stats.tokens_restored == 96
    assert cache.stats.requests == 2


def test_batches_go_on_from_what_all_rows_share(store):
    model = build("llama")
    cache = TieredCache(model, store)
    first = prompt(50, rows=3)
    model.generate(first, past_key_values=cache, **GREEDY)
    second = torch.cat([first, prompt(8, seed=3, rows=3)], dim=1)
    second[1, 30] += 1
    assert torch.equal(model.generate(second, past_key_values=cache, **GREEDY), plain(model, second))
    fewer = second[:2]
    assert torch.equal(model.generate(fewer, past_key_values=cache, **GREEDY), plain(model, fewer))


@pytest.mark.parametrize(
    "modes", [({"num_beams": 3}, {}), ({}, {"num_beams": 3}), ({"num_beams": 3}, {"num_beams": 2})]
)
def test_another_number_of_beams_begins_anew(store, modes):
    model = build("llama")
    cache = TieredCache(model, store)
    for mode in modes:
        assert torch.equal(
            model.generate(prompt(50), past_key_values=cache, **GREEDY | mode), plain(model, prompt(50), **mode)
        )


def test_a_selection_of_another_prompt_is_dropped(store):
    """Tokens of the selected prompt cannot be removed, but the store has them."""
    model, method = build("llama"), ContiguousKV(0.25, period=2)
    ids = prompt(200)
    store.precompute(model, ids, method=method, progress=False)
    cache = TieredCache(model, store, method=method)
    first = torch.cat([ids[:, :192], prompt(8, seed=2)], dim=1)
    model.generate(first, past_key_values=cache, **GREEDY)
    assert 0 < cache.stats.tokens_attended < cache.stats.tokens_restored
    other = prompt(90, seed=5)
    assert torch.equal(model.generate(other, past_key_values=cache, **GREEDY), plain(model, other))
    assert cache.stats.tokens_stored > 0  # exact again


def test_left_padding_is_no_token(model, tmp_path):
    rows = [prompt(40), prompt(29, seed=3)]
    padded = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (11, 0))])
    mask = torch.ones_like(padded)
    mask[1, :11] = 0
    more = torch.cat([prompt(5, seed=4), prompt(5, seed=5)])
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        model.generate(padded, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
        whole, mask = torch.cat([padded, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
        model.generate(whole, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
    assert cache.stats.details.tokens_kept == 40 + 29
    assert cache.stats.details.tokens_dropped == 0
