"""A kept cache goes on with any prompt: what the two share is kept, the store may have more, the rest is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build, longrope, prompt
from reference import GREEDY, plain
from thorough import pairs

from hf_tiered_cache import CacheMismatchError, KVStore, TieredCache, reasons
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.patches.layers import PREFILL_CONTINUES_CACHE


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2_sliding"])
def model(request):
    return build(request.param)


def test_one_token_said_otherwise_costs_that_token(model, store):
    """A chat template may tokenize the last reply differently."""
    cache = TieredCache(model, store)
    output = model.generate(prompt(30), past_key_values=cache, **GREEDY)
    next_ids = torch.cat([output[:, :-2], (output[:, -2:] + 1) % 100 + 3, prompt(9, seed=4)], dim=1)
    assert torch.equal(model.generate(next_ids, past_key_values=cache, **GREEDY), plain(model, next_ids))
    assert cache.stats.requests == 2
    assert cache.stats.details.tokens_dropped == 1
    assert cache.stats.tokens_restored == 0


def test_a_copied_prompt_goes_on_in_several_ways(model, store):
    """This is the documented pattern: prefill, deepcopy, generate. The last token merges with the next text."""
    parent = TieredCache(model, store)
    beginning = prompt(60)
    model(beginning, past_key_values=parent)
    for seed in (5, 6):
        full_prompt = torch.cat([beginning[:, :-1], prompt(12, seed=seed)], dim=1)
        cache = copy.deepcopy(parent)
        assert torch.equal(model.generate(full_prompt, past_key_values=cache, **GREEDY), plain(model, full_prompt))
        assert cache.stats.details.tokens_dropped == 1
    assert parent.get_seq_length() == 60


@pytest.mark.parametrize("lengths", [(100, 45), (45, 100), (100, 64, 120)])
def test_a_prompt_with_other_frequencies_is_computed_as_by_a_new_cache(store, lengths):
    """Longrope has other frequencies in prompts of more than 64 tokens, so nothing that the cache holds fits them."""
    model, ids = build("llama", rope_parameters=longrope(64)), prompt(120)
    cache = TieredCache(model, store)
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    for length in lengths:
        output, right = (model.generate(ids[:, :length], past_key_values=c, **options) for c in (cache, None))
        assert torch.equal(output.sequences, right.sequences)
        # with PyTorch 2.8, kernels round 24 tokens after a restored prefix otherwise than 120 at once
        assert torch.allclose(output.logits[0], right.logits[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}])
def test_a_prompt_may_be_only_what_the_cache_lacks(model, store, mode, pad):
    """As transformers allows: the attention mask covers all tokens, the ids are the new ones."""
    if "prompt_lookup_num_tokens" in mode and not PREFILL_CONTINUES_CACHE:
        pytest.skip("in this version of transformers, assisted decoding does not: DynamicCache gives other tokens, too")
    full_prompt, copies = prompt(100), mode.get("num_beams", 1)
    store.precompute(model, full_prompt, progress=False)
    mask = torch.ones_like(full_prompt)
    if "prompt_lookup_num_tokens" not in mode:  # there, transformers cuts a mask with padding
        mask[:, :pad] = 0
    cached_inputs = {"input_ids": full_prompt[:, :40], "attention_mask": mask[:, :40]}
    cached_inputs["position_ids"] = (cached_inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    cache = TieredCache(model, store)
    model(**{name: tensor.expand(copies, -1) for name, tensor in cached_inputs.items()}, past_key_values=cache)
    output = plain(model, full_prompt[:, 40:], attention_mask=mask, past_key_values=cache, **mode)
    assert torch.equal(output[:, 60:], plain(model, full_prompt, attention_mask=mask, **mode)[:, 100:])
    assert cache.get_seq_length() >= 105
    assert cache.stats.requests == 2
    assert cache.stats.details.tokens_dropped == 0
    assert pad or cache.stats.tokens_restored >= 32 * copies


def test_a_mask_that_covers_other_tokens_than_those_of_cache_and_prompt_is_refused(model, store):
    ids = prompt(60)
    cache = TieredCache(model, store)
    for cached_tokens, suspend in ((45, False), (0, True)):
        output = model.generate(ids[:, :40], past_key_values=cache, **GREEDY)
        if suspend:
            cache.suspend()
        message = f"covers {46 + 14} tokens, but this cache holds {cached_tokens} and the prompt has 14; pass the whole"
        new = torch.cat([output, prompt(14, seed=2)], dim=1)[:, 46:]
        with pytest.raises(CacheMismatchError, match=message):
            plain(model, new, attention_mask=torch.ones(1, 60, dtype=torch.int64), past_key_values=cache)


@pytest.mark.parametrize(("shared_tokens", "tokens"), pairs([0, 1, 17, 64, 99], [20, 100, 140]))
def test_whatever_two_prompts_share(model, store, shared_tokens, tokens):
    cache = TieredCache(model, store)
    first, second = prompt(100), prompt(tokens, seed=9)
    second[:, :shared_tokens] = first[:, : min(shared_tokens, tokens)]
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
    other_prompt = prompt(100, seed=2)
    store.precompute(model, other_prompt, progress=False)
    cache = TieredCache(model, store)
    model.generate(prompt(40), past_key_values=cache, **GREEDY)
    assert torch.equal(model.generate(other_prompt, past_key_values=cache, **GREEDY), plain(model, other_prompt))
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
    other_prompt = prompt(90, seed=5)
    assert torch.equal(model.generate(other_prompt, past_key_values=cache, **GREEDY), plain(model, other_prompt))
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
        full_prompt, mask = torch.cat([padded, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
        model.generate(full_prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
    assert cache.stats.details.tokens_kept == 40 + 29
    assert cache.stats.details.tokens_dropped == 0


def padded(*rows):
    """Return a batch of rows with left padding, and its mask."""
    most = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (most - row.shape[1], 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": torch.stack([torch.arange(most) >= most - r.shape[1] for r in rows])}


def test_a_batch_goes_on_although_the_padding_of_a_row_grows(store):
    """The rows share nothing but padding, so the store has what the cache had."""
    model = build("llama")
    cache = TieredCache(model, store)
    first, second = prompt(40), prompt(29, seed=3)
    model.generate(**padded(first, second), past_key_values=cache, **GREEDY)
    longer = padded(torch.cat([first, prompt(30, seed=7)], 1), torch.cat([second, prompt(9, seed=8)], 1))
    assert torch.equal(model.generate(**longer, past_key_values=cache, **GREEDY), model.generate(**longer, **GREEDY))
    assert cache.stats.tokens_restored > 0
    assert reasons.ODD_MASK not in cache.stats.reasons


def test_padding_that_becomes_tokens_is_computed(store):
    model = build("llama")
    cache = TieredCache(model, store)
    ids = torch.cat([torch.full((1, 8), 5), prompt(40)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :8] = 0
    model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    more = torch.cat([ids, prompt(8, seed=4)], dim=1)
    mask = torch.ones_like(more)
    logits = {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask} | GREEDY
    first, want = (model.generate(more, **logits, **c).logits[0] for c in ({"past_key_values": cache}, {}))
    assert torch.equal(first, want)
    assert reasons.ODD_MASK not in cache.stats.reasons


@pytest.mark.parametrize(("end", "dropped"), [(None, True), (5, True), ((5, 0), False), (torch.tensor([0]), False)])
def test_a_padding_token_in_what_was_said_is_masked_from_then_on(store, end, dropped):
    """Without a mask, `generate()` masks it, also in what the cache holds, unless it ends answers, too."""
    model, ids = build("llama"), prompt(60)
    ids[0, 30] = model.config.pad_token_id
    cache = TieredCache(model, store)
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)
    more = torch.cat([ids, prompt(8, seed=4)], dim=1)
    logits = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": end} | GREEDY
    first_logits, want = (model.generate(more, **logits, **c).logits[0] for c in ({"past_key_values": cache}, {}))
    torch.testing.assert_close(first_logits, want, rtol=0, atol=1e-5)
    assert (cache.stats.details.tokens_dropped > 10) == dropped


@pytest.mark.parametrize("rows", [(2, 1), (1, 2)])
@pytest.mark.parametrize("how", ["generate", "forward"])
def test_a_cache_that_is_cropped_to_nothing_takes_another_batch(store, rows, how):
    model = build("llama")
    cache = TieredCache(model, store)
    model(prompt(40, rows=rows[0]), past_key_values=cache)
    cache.crop(-40)
    ids = prompt(40, seed=5, rows=rows[1])
    if how == "generate":
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), plain(model, ids))
    else:
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)
    assert reasons.ODD_MASK not in cache.stats.reasons


def test_after_an_interrupted_prompt_comes_another_batch(store):
    model = build("llama")
    cache = TieredCache(model, store, tag="interrupted")  # the hook has no name of its own

    def interrupt(*arguments):
        raise KeyboardInterrupt

    hook = model.model.layers[-1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(40, rows=2), past_key_values=cache, **GREEDY)
    hook.remove()
    assert torch.equal(model.generate(prompt(40), past_key_values=cache, **GREEDY), plain(model, prompt(40)))
    cache.store_now()
    assert cache.stats.tokens_stored > 0
    assert reasons.ODD_MASK not in cache.stats.reasons


@pytest.mark.parametrize("why", ["training", "hook", "mask"])
def test_a_cache_that_runs_without_the_store_drops_other_prompts_too(store, why):
    model, ids = build("llama"), prompt(40)
    cache, mask = TieredCache(model, store), torch.ones_like(ids)
    if why == "mask":
        mask[:, 5:9] = 0
    hook = model.model.layers[0].register_forward_hook(lambda *arguments: None) if why == "hook" else None
    output = model.train(why == "training").generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert cache.stats.reason
    if hook is not None:
        hook.remove()
    model.eval()
    if why != "mask":
        twin = copy.deepcopy(cache)
        more = torch.cat([output, prompt(9, seed=4)], dim=1)
        assert torch.equal(model.generate(more, past_key_values=twin, **GREEDY), plain(model, more))
        assert twin.stats.details.tokens_dropped == 0
    for other_prompt in (prompt(30, seed=7), prompt(90, seed=7)):
        twin = copy.deepcopy(cache)
        assert torch.equal(model.generate(other_prompt, past_key_values=twin, **GREEDY), plain(model, other_prompt))
        twin.store_now()
        assert twin.stats.tokens_stored > 0


def test_a_length_is_a_number_after_assisted_decoding_cropped_by_a_tensor(store):
    """That tensor is on the model's device, where NumPy cannot read a length."""
    model, ids = build("llama"), prompt(100)
    cache = TieredCache(model, store, record=False)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    cache.crop(torch.tensor(-3))
    assert type(cache.get_seq_length()) is int and cache.get_seq_length() == 97
