"""Who is not served reads why, and figures are true whatever the reason."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from families import build, prompt

from hf_tiered_cache import ConfigError, KVStore, TieredCache, detach, reasons
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Epic, KVDrive

GREEDY = {"do_sample": False, "max_new_tokens": 4}


def ask(model, store, ids=None, **settings):
    cache = TieredCache(model, store, **settings)
    model.generate(prompt(80) if ids is None else ids, past_key_values=cache, **GREEDY)
    return cache.stats


def test_a_first_prompt_is_new_and_a_second_needs_no_reason(store, caplog):
    model = build("llama")
    assert ask(model, store).reason == reasons.NOTHING
    assert ask(model, store).reason == ""
    assert not caplog.records  # neither is worth a warning


@pytest.mark.parametrize("added", [0, 1, 15, 40])
def test_a_prompt_that_a_cache_already_holds_needs_no_reason(store, caplog, added):
    model, ids = build("llama"), prompt(120)
    store.precompute(model, ids[:, :80])
    cache = TieredCache(model, store)
    for tokens in (80, 80 + added):
        model.generate(ids[:, :tokens], past_key_values=cache, **GREEDY)
    assert cache.stats.reason == "" and not caplog.records


def test_a_first_prompt_behind_padding_is_new_too(store):
    model, mask = build("llama"), torch.ones(1, 80, dtype=torch.int64)
    mask[0, :3] = 0
    for expected in (reasons.NOTHING, ""):
        cache = TieredCache(model, store)
        model.generate(prompt(80), attention_mask=mask, past_key_values=cache, **GREEDY)
        assert cache.stats.reason == expected


class AllLogits(transformers.LlamaForCausalLM):
    """Model that cannot be asked for the last logits only, such as Qwen2-Audio."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **kwargs)


def test_a_model_that_always_computes_all_logits_is_not_told_to_keep_fewer(store):
    model = AllLogits(build("llama").config).eval()
    assert [ask(model, store).reason for _ in range(2)] == [reasons.NO_LOGITS_TO_KEEP] * 2
    cache = TieredCache(build("llama"), store)
    cache.model(prompt(80), past_key_values=cache)
    assert cache.stats.reason == reasons.ALL_LOGITS


def test_training_mode(store, caplog):
    model = build("llama").train()
    stats = [ask(model, store) for _ in range(2)]
    assert stats[0].reason == reasons.TRAINING
    assert stats[0].tokens_computed == 83
    assert caplog.text.count(reasons.TRAINING) == 1  # one warning for each cause


@pytest.mark.parametrize("method", ["exact", "kv_drive"])
@pytest.mark.parametrize("beside", ["the model without its head", "a detached model"])
def test_a_cache_that_is_filled_beside_the_attached_model(store, caplog, method, beside):
    model = build("llama")
    store.precompute(model, prompt(80), method=method)
    cache = TieredCache(model, store, method=method)
    model(prompt(96), past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored == 80 and not cache.stats.reason
    if beside == "a detached model":
        detach(model)
    called_model = model if beside == "a detached model" else model.model
    for token in prompt(2)[0]:
        called_model(token.view(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 98
    assert cache.stats.reason == reasons.FILLED_ELSEWHERE
    assert caplog.text.count(reasons.FILLED_ELSEWHERE) == 1


@pytest.mark.parametrize("tokens", [1, 15])
def test_a_prompt_below_one_block(store, tokens):
    stats = ask(build("llama"), store, prompt(tokens))
    store.flush()  # what the cache left is stored behind the request
    assert stats.reason == reasons.SHORT
    assert stats.tokens_stored == (tokens + 3) // 16 * 16


def test_logits_of_every_token_are_asked_for(store):
    model = build("llama")
    cache = TieredCache(model, store)
    model(prompt(80), past_key_values=cache)
    assert cache.stats.reason == reasons.ALL_LOGITS


def test_embeddings_have_no_tokens(store):
    model = build("llama")
    cache = TieredCache(model, store)
    model.generate(inputs_embeds=model.get_input_embeddings()(prompt(80)), past_key_values=cache, **GREEDY)
    assert "no token ids" in cache.stats.reason
    assert cache.stats.tokens_computed == 83


def test_padding_is_not_counted_where_nothing_can_be_stored(store):
    model = build("llama")
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 30:] = 0  # padding on the right
    cache = TieredCache(model, store)
    model(prompt(40, rows=2), attention_mask=mask, past_key_values=cache)
    assert "left padding" in cache.stats.reason
    assert cache.stats.tokens_computed == 70


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"seed": 5}, "weights"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, "RoPE"),
        ({"rms_norm_eps": 1e-4}, "config"),
    ],
)
def test_another_model_differs_in_a_part(store, changes, part):
    store.precompute(build("llama"), prompt(80), progress=False)
    stats = ask(build("llama", **changes), store)
    assert stats.tokens_restored == 0
    assert stats.reason.endswith(f"which differs in {part}")


def test_another_adapter(store):
    model = build("llama")
    store.precompute(model, prompt(80), progress=False)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    cache = TieredCache(adapted, store)
    adapted.generate(input_ids=prompt(80), past_key_values=cache, **GREEDY)
    assert cache.stats.reason.endswith("which differs in adapter")


def test_passages_ranked_under_another_name(store):
    model, passage = build("llama"), prompt(48, seed=3)[0]
    store.precompute(model, passage, passages=True, method=CacheTune(lead=1, ranking="random"), progress=False)
    ids = torch.cat([prompt(10), passage.unsqueeze(0), prompt(10, seed=4)], dim=1)
    stats = ask(model, store, ids, method=CacheTune.paper())
    assert stats.reason == reasons.unranked("low_frequency 0.5") and stats.tokens_restored == 48 - 7
    assert ask(model, store, ids, method=CacheTune(lead=1, ranking="random")).reason == ""
    assert ask(model, store, ids, method=Epic(lead=1)).reason == ""


def batch(*prompts):
    """Return left-padded rows, int64 `[rows, positions]`, and their mask."""
    width = max(len(ids) for ids in prompts)
    mask = torch.stack([(torch.arange(width) >= width - len(ids)).long() for ids in prompts])
    return torch.stack([torch.cat([torch.zeros(width - len(ids), dtype=torch.int64), ids]) for ids in prompts]), mask


STORED, NEW, NEWER, BRIEF = prompt(80)[0], prompt(80, seed=2)[0], prompt(80, seed=3)[0], prompt(8, seed=4)[0]


@pytest.mark.parametrize(
    ("rows", "codec", "reason"),
    [
        ((STORED, NEW), "raw", reasons.OTHER_ROWS),
        ((NEW, STORED), "raw", reasons.OTHER_ROWS),
        ((NEW, STORED), "int8", reasons.other_codec("raw")),
        ((NEW, NEWER), "raw", reasons.NOTHING),
        ((BRIEF, NEW), "raw", reasons.NOTHING),
        ((BRIEF, BRIEF.flip(0)), "raw", reasons.SHORT),
    ],
)
def test_the_reason_of_a_batch_is_true_of_all_its_rows(store, rows, codec, reason):
    model = build("llama")
    store.precompute(model, STORED, progress=False)
    ids, mask = batch(*rows)
    cache = TieredCache(model, store, method=f"exact:codec={codec}")
    model.generate(ids, attention_mask=mask, pad_token_id=0, past_key_values=cache, **GREEDY)
    assert (cache.stats.tokens_restored, cache.stats.reason) == (0, reason)


def test_the_reason_of_a_batch_names_a_row_that_cannot_be_read(store):
    model = build("llama")
    store.precompute(model, STORED, progress=False)
    (segment,) = store.segments()
    store._storage.disk.report(segment.id, OSError("the disk failed"))
    ids, _ = batch(NEW, STORED)
    assert ask(model, store, ids).reason == reasons.UNREADABLE


def test_a_full_store_says_that_not_all_was_stored(tmp_path):
    model = build("llama")
    with KVStore(tmp_path, disk_quota="64KiB") as store:
        cache = TieredCache(model, store)
        model.generate(prompt(400), past_key_values=cache, **GREEDY)
        store.flush()
        assert reasons.NOT_STORED in cache.stats.reasons
        assert cache.stats.tokens_stored == 0


def test_what_flush_stores_is_counted(store):
    model = build("llama")
    cache = TieredCache(model, store)
    with torch.no_grad():
        model(prompt(80), past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_stored == 0
    store.flush()
    assert cache.stats.tokens_stored == 80


def test_what_follows_a_selection_is_computed(store):
    model, method = build("llama"), ContiguousKV(0.25, period=2)
    store.precompute(model, prompt(80), method=method, progress=False)
    cache = TieredCache(model, store, method=method)
    output = model.generate(prompt(80), past_key_values=cache, **GREEDY)
    model.generate(torch.cat([output, prompt(20, seed=2)], dim=1), past_key_values=cache, **GREEDY)
    assert cache.stats.reason == reasons.APPROXIMATE


@pytest.mark.parametrize("method", [ContiguousKV(0.25), KVDrive(0.25, local=16)], ids=["contiguous_kv", "kv_drive"])
def test_chunked_prefill_restores_all_instead_of_a_budget_and_says_so(store, caplog, method):
    model, ids = build("llama"), prompt(200)
    store.precompute(model, ids[:, :160], method=method, progress=False)
    cache = TieredCache(model, store, method=method)
    output = model.generate(ids, past_key_values=cache, prefill_chunk_size=80, **GREEDY)
    assert cache.stats.reason == reasons.IN_CHUNKS and "prefill_chunk_size" in caplog.text
    assert cache.stats.tokens_restored == 158  # the last tokens of two chunks have logits
    assert torch.equal(output, model.generate(ids, **GREEDY))
    for options in ({}, {"prompt_lookup_num_tokens": 2}):
        cache = TieredCache(model, store, method=method)
        model.generate(ids, past_key_values=cache, **options, **GREEDY)
        assert cache.stats.reason == "" and cache.stats.tokens_attended < 160


def test_pieces_of_a_long_prompt_are_those_of_the_method_in_chunked_prefill_too(store):
    model, ids, method = build("llama"), prompt(400), KVDrive(0.25, prefill_tokens=64, local=16)
    cache = TieredCache(model, store, method=method)
    model.generate(ids, past_key_values=cache, prefill_chunk_size=200, **GREEDY)
    assert cache.stats.reasons == {reasons.IN_CHUNKS: 1}


def test_one_line_a_request(store, caplog):
    caplog.set_level(logging.INFO, "hf_tiered_cache")
    model = build("llama")
    for expected in ("0 tokens restored (slowest tier: none), 80 computed", "64 tokens restored (slowest tier: host)"):
        caplog.clear()
        ask(model, store, prompt(80)[:, : 80 if "80" in expected else 70])
        (line,) = [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]
        assert line.startswith(expected)


def test_the_line_of_a_request_says_what_the_budget_left(store, caplog):
    caplog.set_level(logging.INFO, "hf_tiered_cache")
    model, method = build("llama"), KVDrive(0.5, local=16)
    store.precompute(model, prompt(160)[:, :128], method=method, progress=False)
    cache = TieredCache(model, store, method=method, record=False)
    model.generate(prompt(160), past_key_values=cache, **GREEDY)
    attended = cache.stats.tokens_attended
    assert 0 < attended < 128
    assert f"128 tokens restored (slowest tier: host), {attended} of them attended to, 32 computed" in caplog.text


def test_the_reason_stands_in_the_table_in_json_and_in_notebooks(store):
    stats = ask(build("llama"), store)
    assert "no stored KV" in str(stats)
    assert stats.as_dict()["reason"] == reasons.NOTHING
    page = stats._repr_html_()
    assert reasons.NOTHING in page
    assert page.count("<table>") == 2
    assert "<table>" in store._repr_html_()
    assert max(map(len, str(stats).splitlines())) <= 80


def test_a_cache_that_goes_on_counts_what_it_keeps(store):
    model = build("llama")
    cache = TieredCache(model, store)
    output = model.generate(prompt(80), past_key_values=cache, **GREEDY)
    model.generate(torch.cat([output, prompt(20, seed=2)], dim=1), past_key_values=cache, **GREEDY)
    assert cache.stats.details.tokens_kept == 83
    assert "1 of 2 requests" in str(cache.stats)


def test_a_model_that_adds_tokens_of_its_own_runs_as_it_is(tmp_path):
    """CPM-Ant puts a prompt of its own before every pass."""
    config = transformers.CpmAntConfig(
        vocab_size=160, hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96, num_hidden_layers=4
    )
    torch.manual_seed(0)
    model, ids = transformers.CpmAntForCausalLM(config).eval(), prompt(100)
    plain = model.generate(ids, do_sample=False, max_new_tokens=2)
    with KVStore(tmp_path) as store:
        for _ in range(2):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=2), plain)
            store.flush()
            assert cache.stats.reason == reasons.OTHER_TOKENS
        assert store.stats.segments == 0


def test_a_model_of_fewer_layers_than_when_it_was_attached_is_refused(tmp_path):
    model = build("llama")
    with KVStore(tmp_path) as store:
        store.precompute(model, prompt(100), progress=False)
        model.config.num_hidden_layers = 1
        with pytest.raises(ConfigError, match=r"2 layers .* now has 1"):
            TieredCache(model, store)
        detach(model)
        cache = TieredCache(model, store)
        model.generate(prompt(100), past_key_values=cache, do_sample=False, max_new_tokens=2)
        assert cache.stats.tokens_restored == 0
