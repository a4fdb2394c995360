"""Passages that are stored as they are behind text which the model writes."""

from __future__ import annotations

import logging
import re
import shutil
import warnings

import pytest
import torch
from families import build, prompt
from reference import Remembering, kv_of
from test_passages import BOS, PASSAGES, PLACES, PROMPT, QUESTION, Replacing, ask, epic, fill, join, tune
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_tiered_cache import KVStore, TieredCache, attach
from hf_tiered_cache.cache.calibrations import keep_records
from hf_tiered_cache.methods import CacheBlend, CacheTune, Epic
from hf_tiered_cache.operations import passage_cache as module
from hf_tiered_cache.reasons import OTHER_LEAD

LEAD = 33
METHOD = CacheTune(0.0, lead=LEAD, ranking="random")


def kept_lead(store):
    """Return the lead text in a store's calibrations."""
    ((text,),) = [
        [record["text"]]
        for name, records in store._storage.calibrations.read().items()
        if " lead " in name
        for record in records
    ]
    return torch.tensor(text)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen2_sliding", "gpt_neox", "cohere"])
def test_a_passage_is_what_it_is_behind_the_lead(family, store):
    """Full reuse is compared with the model's own KV of passages after the stored lead."""
    model = build(family)
    fill(store, model, method=METHOD)
    logits, cache = ask(model, store, PROMPT, METHOD)
    assert cache.stats.tokens_restored == sum(len(PASSAGES[number]) for number in PLACES)
    lead, columns, parts = torch.cat([BOS, kept_lead(store)]), [], []
    assert len(lead) == LEAD
    for number, start in PLACES.items():
        tokens, reference_cache = PASSAGES[number], Remembering(model)
        positions = torch.arange(start - LEAD, start + len(tokens)).unsqueeze(0)
        with torch.no_grad():
            model(input_ids=join(lead, tokens), position_ids=positions, past_key_values=reference_cache, use_cache=True)
        columns += range(start, start + len(tokens))
        parts.append([tuple(tensor[:, :, LEAD:] for tensor in layer) for layer in reference_cache.all()])
    kv = [tuple(torch.cat([part[i][t] for part in parts], dim=2) for t in (0, 1)) for i in range(len(parts[0]))]
    with torch.no_grad():
        reference = model(input_ids=PROMPT, past_key_values=Replacing(model, columns, kv, 0), logits_to_keep=1).logits
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))


def test_what_the_model_writes_is_kept_and_has_no_special_tokens(tmp_path):
    model = build("qwen2", eos_token_id=[2, 5, 9], pad_token_id=0)
    texts = []
    for name in ("one", "another"):
        with KVStore(tmp_path / name) as store:
            fill(store, model, PASSAGES[:1], METHOD)
            texts.append(kept_lead(store))
    assert torch.equal(*texts)
    assert not set(texts[0].tolist()) & {0, 1, 2, 5, 9}
    other_model = build("qwen2", seed=3, eos_token_id=[2, 5, 9], pad_token_id=0)
    with KVStore(tmp_path / "other") as store:
        fill(store, other_model, PASSAGES[:1], METHOD)
        assert not torch.equal(kept_lead(store), texts[0])


def test_a_lead_is_written_without_a_warning():
    """Transformers 5.24 warns if the cache is passed by its older name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert len(module.write(attach(build("qwen2")), 5, 3)) == 3


def test_a_kept_lead_is_taken_and_a_damaged_one_written_again(tmp_path, monkeypatch):
    model, calls, write = build("qwen2"), [], module.write
    monkeypatch.setattr(module, "write", lambda *args: calls.append(args) or write(*args))
    for number in (0, 1):
        with KVStore(tmp_path) as store:
            fill(store, model, [PASSAGES[number]], METHOD)
    assert len(calls) == 1
    for wrong in ([{}], [{"text": []}], [{"text": [1] * LEAD}], [{"text": [-1] * (LEAD - 1)}], [{"text": "abc"}], []):
        with KVStore(tmp_path) as store:
            (name,) = [name for name in store._storage.calibrations.read() if " lead " in name]
            keep_records(store._storage, name, wrong)
            calls.clear()
            fill(store, model, [prompt(64, seed=9 + len(str(wrong)))[0]], METHOD)
            assert len(calls) == 1 and len(kept_lead(store)) == LEAD - 1


def test_no_passage_is_in_the_kv_of_another(tmp_path):
    """A deleted passage leaves no trace, whatever is stored with it."""
    model, stored_blocks = build("qwen2"), []
    for number, calls in enumerate(([PASSAGES], [PASSAGES[::-1]], [[passage] for passage in PASSAGES])):
        with KVStore(tmp_path / str(number), engine="posix") as store:
            for passages in calls:
                fill(store, model, passages, METHOD)
            readers = {row.chain: store._storage.disk.reader(row.id) for row in store.segments()}
            stored_blocks.append({chain: reader.blocks(0) for chain, reader in readers.items()})
    for chain, blocks in stored_blocks[0].items():
        assert torch.equal(blocks, stored_blocks[1][chain])
        torch.testing.assert_close(  # batches of other sizes round otherwise
            blocks.view(torch.float32), stored_blocks[2][chain].view(torch.float32), rtol=1e-4, atol=1e-5
        )


def test_methods_find_passages_of_their_lead(store, caplog):
    model, tokens = build("qwen2", num_hidden_layers=4), sum(len(PASSAGES[number]) for number in PLACES)
    fill(store, model, method=METHOD)
    for method in (METHOD, Epic(first=0, lead=LEAD), CacheBlend(0.15, lead=LEAD)):
        assert sum(passage.tokens_found for passage in ask(model, store, PROMPT, method)[1].stats.passages) == tokens
    for method in (tune(), epic(), CacheTune(lead=LEAD + 1)):
        _, cache = ask(model, store, PROMPT, method)
        assert cache.stats.tokens_restored == 0 and cache.stats.reason == OTHER_LEAD
    _, cache = ask(model, store, PROMPT, Epic(lead=0))  # of which nothing is known where nothing stood before
    assert cache.stats.tokens_restored == 0 and cache.stats.reason
    fill(store, model, method=epic())
    assert len(store.segments()) == 2 * len(PASSAGES)
    assert ask(model, store, PROMPT, epic(first=0))[1].stats.tokens_restored == tokens


def test_behind_text_a_passage_is_exact_nowhere(store):
    model = build("qwen2")
    fill(store, model, method=METHOD)
    ids = join(BOS, PASSAGES[0], QUESTION)
    logits, cache = ask(model, store, ids, METHOD)
    assert cache.stats.tokens_restored == len(PASSAGES[0])
    full = model(input_ids=ids, logits_to_keep=1).logits
    assert (logits - full).abs().max() > 1e-3 * full.abs().max()
    cache = TieredCache(model, store, method=METHOD)  # records approximate KV under no exact name
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    store.flush()
    assert ask(model, store, ids, None)[1].stats.tokens_restored == 0


def test_a_long_passage_has_as_much_lead_as_positions_leave(store):
    model = build("llama", max_position_embeddings=129)
    fill(store, model, [prompt(112, seed=6)[0], prompt(128, seed=7)[0]], METHOD)
    assert sorted(row.tokens for row in store.segments()) == [112, 128]
    text = torch.cat([BOS, kept_lead(store)])
    with torch.no_grad():
        for tokens, seed in ((112, 6), (128, 7)):
            passage = prompt(tokens, seed=seed)[0]
            ids = torch.cat([QUESTION[:1], passage, QUESTION[:1]])[None]
            _ours, cache = ask(model, store, ids, METHOD)
            assert cache.stats.tokens_restored == tokens
            reference_kv = kv_of(model, torch.cat([text[: 129 - tokens], passage])[None])
            values = cache.layers[-1].values[0, :, 1 : 1 + tokens]
            torch.testing.assert_close(values, reference_kv[-1][1][0, :, 129 - tokens :], rtol=1e-4, atol=1e-5)


def test_a_store_that_cannot_be_written_keeps_no_lead(store, monkeypatch, caplog):
    model = build("qwen2")
    monkeypatch.setattr(store._storage.disk.backend, "writable", False)
    with caplog.at_level(logging.WARNING):
        fill(store, model, method=METHOD)
    assert not store.segments() and not store._storage.calibrations.read()


def test_by_the_tokenizer_of_the_model_it_is_a_text_that_ends_like_a_document(tmp_path):
    """The model comes from a folder with a tokenizer; one with other words is not used."""
    vocabulary = {
        word: number for number, word in enumerate(["<unk>", *dict.fromkeys(re.findall(r"\w+|\W", module.TEXT))])
    }
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = Split(Regex(r"\w+|\W"), "isolated")
    folder = tmp_path / "model"
    build("qwen2", vocab_size=max(160, len(vocabulary))).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with KVStore(tmp_path / "store") as store:
        fill(store, model, PASSAGES[:1], METHOD)
        text = kept_lead(store)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert text.tolist() == tokenizer(module.TEXT)["input_ids"][1 - LEAD :]
    shutil.rmtree(folder)
    with KVStore(tmp_path / "again") as store:
        fill(store, model, PASSAGES[:1], METHOD)
        assert kept_lead(store).tolist() != text.tolist()  # the model has written it
