"""Exactness: every family, every way of generating, in float32 and bfloat16, over stores another process has written.

Logits are compared bit for bit with those of a DynamicCache that was filled by the same forward passes and cropped
to the same prefix.
"""

from __future__ import annotations

import functools
import sys
import zlib
from pathlib import Path

import processes
import pytest
import torch
import write_stores
from families import FAMILIES, build, prompt
from reference import KV, Remembering, assert_same, kv_of, prefilled, put, trimming_first_pass
from thorough import pairs
from write_stores import DTYPES, PROMPTS

from hf_tiered_cache import KVStore, TieredCache

NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}


def pytest_generate_tests(metafunc):
    """Run each test with every family; by default data types take turns, by families and by tests."""
    turn = zlib.crc32(metafunc.function.__name__.encode())
    metafunc.parametrize(("family", "dtype"), pairs(FAMILIES, DTYPES, turn))


@pytest.fixture(scope="session")
def stores(tmp_path_factory) -> Path:
    """Open stores that another process has written."""
    root = tmp_path_factory.mktemp("stores")
    processes.run([sys.executable, write_stores.__file__, root], check=True, timeout=280)
    return root


@functools.cache
def model_of(family, dtype):
    return build(family, DTYPES[dtype])


@functools.cache
def kv(family, dtype, name) -> KV:
    return kv_of(model_of(family, dtype), PROMPTS[name])


@pytest.fixture
def model(family, dtype):
    return model_of(family, dtype)


@pytest.fixture
def store(stores, family, dtype):
    with KVStore(stores / f"{family}-{dtype}", engine="posix") as store:
        yield store


@pytest.fixture
def cache(model, store):
    """Create a cache that restores and does not change the store."""
    return TieredCache(model, store, record=False)


def longer(name: str, keep: int, more: int, seed: int = 7) -> torch.Tensor:
    """Return a prompt that shares its first `keep` tokens with a stored one."""
    return torch.cat([PROMPTS[name][:, :keep], prompt(more, seed=seed)], dim=1)


def test_greedy(model, cache, family, dtype):
    ids = longer("a", 90, 12)
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 80
    assert_same(output, model.generate(ids, past_key_values=prefilled(model, [kv(family, dtype, "a")], 80), **GREEDY))


def test_logits_of_one_forward_pass(model, cache, family, dtype):
    ids = longer("a", 100, 9)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=5).logits
        reference = prefilled(model, [kv(family, dtype, "a")], 96)
        expected = model(input_ids=ids[:, 96:], past_key_values=reference, logits_to_keep=5).logits
    assert cache.stats.tokens_restored == 96
    assert torch.equal(logits, expected)


def test_without_logits_to_keep_all_logits_are_there(model, cache, family, dtype):
    ids = longer("a", 50, 4)
    with torch.no_grad():
        assert torch.equal(
            model(input_ids=ids, past_key_values=cache).logits, model(input_ids=ids, use_cache=True).logits
        )


def test_sampling_with_the_same_seed(model, cache, family, dtype):
    ids = longer("a", 90, 12)
    arguments = GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 20}
    torch.manual_seed(3)
    output = model.generate(ids, past_key_values=cache, **arguments)
    torch.manual_seed(3)
    assert_same(
        output, model.generate(ids, past_key_values=prefilled(model, [kv(family, dtype, "a")], 80), **arguments)
    )


@pytest.mark.parametrize("mode", ["beams", "sequences"])
@pytest.mark.thin(2)
def test_several_rows_of_one_prompt(model, cache, family, dtype, mode):
    ids = longer("a", 70, 5)
    arguments = GREEDY | ({"num_beams": 3} if mode == "beams" else {"do_sample": True, "num_return_sequences": 3})
    torch.manual_seed(3)
    output = model.generate(ids, past_key_values=cache, **arguments)
    assert cache.stats.tokens_restored == 3 * 64
    assert cache.stats.disk.blocks == cache.stats.host.misses  # read once for all rows
    torch.manual_seed(3)
    reference = prefilled(model, [kv(family, dtype, "a")] * 3, 64)
    assert_same(output, model.generate(ids, past_key_values=reference, **arguments))


@pytest.mark.parametrize("mode", ["prompt lookup", "assistant"])
@pytest.mark.thin(2)
def test_assisted_decoding(model, cache, family, dtype, mode):
    ids = torch.cat([longer("a", 90, 4), PROMPTS["a"][:, 10:18]], dim=1)  # an n-gram to look up
    arguments = GREEDY | (
        {"prompt_lookup_num_tokens": 4} if mode == "prompt lookup" else {"assistant_model": build("llama", seed=5)}
    )
    output = model.generate(ids, past_key_values=cache, **arguments)
    assert cache.stats.tokens_restored == 80
    reference = prefilled(model, [kv(family, dtype, "a")], 80)
    reference.activate_past_recording()
    with trimming_first_pass(model, 80):
        assert_same(output, model.generate(ids, past_key_values=reference, **arguments))


def test_chunked_prefill(model, cache, family, dtype):
    """Each chunk restores its stored tokens, except a ragged end and its last token."""
    ids = longer("a", 96, 10)
    output = model.generate(ids, past_key_values=cache, prefill_chunk_size=40, **GREEDY)
    reference = prefilled(model, [kv(family, dtype, "a")], 32)
    with torch.no_grad():
        model(input_ids=ids[:, 32:40], past_key_values=reference, logits_to_keep=1)
        _restore(model, reference, kv(family, dtype, "a"), 40, 79)
        model(input_ids=ids[:, 79:80], past_key_values=reference, logits_to_keep=1)
        _restore(model, reference, kv(family, dtype, "a"), 80, 96)
    assert cache.stats.tokens_restored == 32 + 39 + 16
    assert_same(output, model.generate(ids, past_key_values=reference, **GREEDY))


def _restore(model, reference, full: KV, first, stop):
    """Put columns `[first, stop)` of the stored prompt behind what a reference cache holds."""
    for index, layer in enumerate(reference.layers):
        tensors = []
        for tensor, expected in zip((layer.keys, layer.values), full[index], strict=True):
            num_left = first - tensor.shape[2]  # what has left the window, and is not looked at again
            zeros = tensor.new_zeros(1, tensor.shape[1], num_left, tensor.shape[3])
            tensors.append(torch.cat([zeros, tensor, expected[:, :, first:stop]], dim=2))
        put(layer, *tensors)


def test_streaming(model, cache, family, dtype):
    class Collector:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    ids = longer("a", 90, 12)
    streamer = Collector()
    output = model.generate(ids, past_key_values=cache, streamer=streamer, **GREEDY)
    assert cache.stats.tokens_restored == 80
    assert streamer.ended
    assert streamer.tokens == output.sequences[0].tolist()
    assert_same(output, model.generate(ids, past_key_values=prefilled(model, [kv(family, dtype, "a")], 80), **GREEDY))


def test_input_embeddings_reuse_nothing_and_are_right(model, cache, family, dtype):
    embeddings = model.get_input_embeddings()(longer("a", 90, 4)).detach()
    output = model.generate(inputs_embeds=embeddings, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 0
    assert_same(output, model.generate(inputs_embeds=embeddings, **GREEDY))


@pytest.mark.parametrize("rows", ["share a prefix", "differ", "partly stored"])
@pytest.mark.thin(3)
def test_left_padded_batches(model, cache, family, dtype, rows):
    first = longer("a", 90, 12, seed=3)
    second, name = {
        "share a prefix": (longer("a", 85, 5, seed=4), "a"),
        "differ": (longer("b", 80, 9, seed=4), "b"),
        "partly stored": (longer("b", 40, 30, seed=4), "b"),
    }[rows]
    pad = first.shape[1] - second.shape[1]
    ids = torch.cat([first, torch.cat([torch.zeros(1, pad, dtype=torch.int64), second], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    columns = {"share a prefix": 80, "differ": 80, "partly stored": pad + 32}[rows]
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == columns + columns - pad
    reference = prefilled(model, [kv(family, dtype, "a"), kv(family, dtype, name)], columns, [0, pad])
    assert_same(output, model.generate(ids, attention_mask=mask, past_key_values=reference, **GREEDY))


def test_a_batch_with_one_unknown_row_restores_nothing(model, cache, family, dtype):
    ids = torch.cat([longer("a", 60, 4), prompt(64, seed=11)])
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 0
    assert_same(output, model.generate(ids, **GREEDY))


def test_a_second_turn_with_the_same_cache(model, cache, family, dtype):
    ids = longer("a", 90, 12)
    reference = prefilled(model, [kv(family, dtype, "a")], 80)
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    expected = model.generate(ids, past_key_values=reference, **GREEDY)
    next_ids = torch.cat([output.sequences, prompt(8, seed=12)], dim=1)
    assert_same(
        model.generate(next_ids, past_key_values=cache, **GREEDY),
        model.generate(next_ids, past_key_values=reference, **GREEDY),
    )
    assert_same(output, expected)


def test_a_full_hit_computes_one_token(model, cache, family, dtype):
    ids = PROMPTS["a"][:, :96]
    output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 95
    assert_same(output, model.generate(ids, past_key_values=prefilled(model, [kv(family, dtype, "a")], 95), **GREEDY))


def test_an_empty_store_is_a_dynamic_cache(model, family, dtype, tmp_path):
    ids = longer("a", 90, 12)
    with KVStore(tmp_path / "empty") as store:
        cache = TieredCache(model, store)
        assert_same(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
        assert cache.stats.tokens_restored == 0


@pytest.mark.thin(4)
def test_generated_tokens_are_found_by_the_next_turn(model, family, dtype, tmp_path):
    """The second turn, in a cache of its own, restores the answer too."""
    ids = longer("a", 30, 10)
    arguments = GREEDY | {"max_new_tokens": 40}
    with KVStore(tmp_path / "turns") as store:
        first = model.generate(ids, past_key_values=TieredCache(model, store), **arguments)
    next_ids = torch.cat([first.sequences, prompt(8, seed=12)], dim=1)  # 40 + 40 + 8 tokens, KV of 79 computed
    options = GREEDY | {"attention_mask": torch.ones_like(next_ids)}  # an answer may contain the padding token
    turn = Remembering(model)
    model.generate(ids, past_key_values=turn, **arguments)
    reference = prefilled(model, [turn.all()], 64)
    with KVStore(tmp_path / "turns") as store:
        cache = TieredCache(model, store)
        output = model.generate(next_ids, past_key_values=cache, **options)
    assert cache.stats.tokens_restored == 64
    assert_same(output, model.generate(next_ids, past_key_values=reference, **options))
