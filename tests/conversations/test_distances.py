"""Distances of attention, gathered while a model runs: those of its weights, and nothing of what is undone."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conversing import Conversing
from families import attend_by_another_name, prompt
from families import build_deep as build
from test_plans import Chosen
from thorough import amount
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.forward_pass import ForwardPass
from hf_tiered_cache.conversations.distances import AttentionDistances, SampledPass
from hf_tiered_cache.identity import settings
from hf_tiered_cache.methods import Exact

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from steps import Operations


@pytest.fixture(autouse=True)
def counting_changes_nothing(monkeypatch):
    """Allow the counting mode, which would change the identity of the model if it were the user's."""
    monkeypatch.setattr(settings, "HARMLESS_MODES", (*settings.HARMLESS_MODES, Operations))


ALL = {"interval": 1, "prompt_interval": 1, "prompt_rows": 1 << 30}
"""Every row is sampled."""
TOKENS = 100
FULL = {"qwen2_sliding": (0, 1), "gemma3": (2, 5)}
"""The layers with full attention, where not all six have it."""


@dataclass(frozen=True, kw_only=True)
class Watched(Exact, Conversing):
    """Exact reuse with an observer."""

    options: dict = field(default_factory=lambda: dict(ALL), hash=False)

    def observer(self):
        return AttentionDistances(**self.options)


class Pyramid(Chosen, Conversing):
    """Plan with depth and an observer."""

    def observer(self):
        return AttentionDistances(**ALL)


@lru_cache
def model_of(family, **changes):
    """Build a model whose heads attend to few tokens, so that layers differ."""
    model = build(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query_key_value", "qkv_proj")):
                parameter.mul_(6)
    return model


@pytest.fixture
def model():
    return model_of("qwen2")


def observer_of(cache):
    return cache._executor.observer


def weights(model, ids, layers=None):
    """Return the attention weights of one row by eager attention, float64 `[layers, heads, n, n]`."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = model(input_ids=ids[None], use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return torch.stack([attentions[layer][0] for layer in layers or range(len(attentions))]).double()


def direct(attention, rows=slice(None)):
    """Compute Euclidean distances and shares at the ends of the sequence of some rows, by Algorithm 1 of the paper."""
    seq_length, attention = attention.shape[-1], attention[:, :, rows]
    flat = attention.flatten(2)
    apart = (flat[:, None] - flat[None]).square().sum(-1)  # [layers, layers, heads]
    euclidean = (apart / attention.shape[2]).sqrt().mean(-1)
    initial, recent = attention[..., : int(0.1 * seq_length)], attention[..., int(0.9 * seq_length) :]
    ends = initial.sum(-1) + recent.sum(-1)  # [layers, heads, rows]
    return euclidean.numpy(), ends.mean((1, 2)).numpy()


def assert_same(result, expected, rows):
    assert result.missing == "" and result.rows == rows
    for actual, reference in zip((result.euclidean, result.initial_recent), expected, strict=True):
        assert reference.max() > 0.05, "or there is nothing to compare"
        np.testing.assert_allclose(actual, reference, atol=2e-4)


def generate(model, ids, cache, tokens=6):
    return model.generate(
        input_ids=ids, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )


def step(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits


# --- what is counted


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "phi3", "gpt_neox", "opt", "granite", "smollm3", "qwen2_sliding", "gemma3"],
)
def test_every_row_equals_the_direct_computation(family, store):
    """This covers prompt and decoded tokens, grouped heads, scalings, layers without RoPE, and sliding layers."""
    model, ids = model_of(family), prompt(60)
    cache = TieredCache(model, store, method=Watched())
    output = generate(model, ids, cache)
    result = observer_of(cache).result()
    assert result.layers == FULL.get(family, tuple(range(6)))
    assert_same(result, direct(weights(model, output[0, :-1], result.layers)), output.shape[1] - 1)


def test_watching_changes_no_bit(model, store):
    ids = prompt(60)
    plain, watched = TieredCache(model, store, record=False), TieredCache(model, store, method=Watched(), record=False)
    for part in (ids[:, :50], ids[:, 50:51], ids[:, 51:]):
        assert torch.equal(step(model, plain, part), step(model, watched, part))


def test_bfloat16_is_compared_in_float32(store):
    model = build("qwen2", torch.bfloat16)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, prompt(60))
    result = observer_of(cache).result()
    assert result.rows == 60 and result.missing == "" and np.isfinite(result.euclidean).all()


def test_of_a_restored_prefix_the_computed_rows_count(model, store):
    ids = prompt(TOKENS)
    store.precompute(model, ids[:, :64], progress=False)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids)
    assert cache.stats.tokens_restored == 64
    assert_same(observer_of(cache).result(), direct(weights(model, ids[0]), slice(64, None)), TOKENS - 64)


def test_rows_that_fall_with_depth_count_after_what_is_restored(model, store):
    ids = prompt(TOKENS)
    store.precompute(model, ids[:, :96], progress=False)
    first, dropped_tokens = frozenset(range(40)), (frozenset(), frozenset(range(20, 40)), frozenset(range(12, 20)))
    cache = TieredCache(model, store, method=Pyramid(first=first, dropped=dropped_tokens))
    step(model, cache, ids)
    assert cache.stats.tokens_restored == 96 - 12
    assert_same(observer_of(cache).result(), direct(weights(model, ids[0]), slice(96, None)), TOKENS - 96)


def test_rows_of_a_padded_batch_are_those_of_each_alone(model, store):
    short, long = prompt(40, seed=3)[0], prompt(60, seed=4)[0]
    ids = torch.stack([torch.cat([torch.zeros(20, dtype=torch.long), short]), long])
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache = TieredCache(model, store, method=Watched())
    output = model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
    observer = observer_of(cache)
    for row, pad in enumerate((20, 0)):
        assert_same(observer.result(row), direct(weights(model, output[row, pad:-1])), 64)


@pytest.mark.parametrize("at_once", [1 << 7, 1 << 13])
def test_blocks_of_any_size_give_the_same(at_once, model, store, monkeypatch):
    """The smallest block is one head and one row."""
    monkeypatch.setattr("hf_tiered_cache.conversations.distances._LARGEST", at_once)
    ids = prompt(60)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids)
    assert_same(observer_of(cache).result(), direct(weights(model, ids[0])), 60)


def test_sampled_rows_are_spread_and_stand_for_the_others(model, store):
    ids = prompt(600)
    cache = TieredCache(model, store, method=Watched(options={"interval": 8, "prompt_interval": 4, "prompt_rows": 50}))
    step(model, cache, ids[:, :400])  # one of 8, so that there are 50
    for token in range(400, 440):
        step(model, cache, ids[:, token : token + 1])
    result = observer_of(cache).result()
    rows = [*range(4, 400, 8), *range(404, 440, 8)]
    assert_same(result, direct(weights(model, ids[0, :440]), rows), len(rows))
    assert sum(int(sample.weights.sum()) for sample in observer_of(cache)._samples) == 440


# --- what is undone


def test_columns_that_are_taken_back_do_not_count(model, store):
    ids, other_ids = prompt(80), prompt(80, seed=5)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :60])
    for token in range(60, 72):
        step(model, cache, ids[:, token : token + 1])
    cache.crop(-4)
    result = observer_of(cache).result()
    assert_same(result, direct(weights(model, ids[0, :68])), 68)
    mixed = torch.cat([ids[:, :68], other_ids[:, :4]], dim=1)
    for token in range(68, 72):
        step(model, cache, mixed[:, token : token + 1])
    assert_same(observer_of(cache).result(), direct(weights(model, mixed[0])), 72)


@pytest.mark.parametrize("tokens_left", [70, 37])
def test_waiting_rows_that_are_taken_back_do_not_count(tokens_left, model, store):
    """They are removed before their reduction, and other tokens take their columns."""
    mixed = torch.cat([prompt(100)[:, :tokens_left], prompt(20, seed=6)], dim=1)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, prompt(100))
    cache.crop(tokens_left - 100)
    step(model, cache, mixed[:, tokens_left:])
    assert_same(observer_of(cache).result(), direct(weights(model, mixed[0])), tokens_left + 20)


def test_a_pass_that_fails_does_not_count(model, store, monkeypatch):
    ids = prompt(60)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :40])
    for failing in (0, 3, 5):

        def append(self, layer, keys, values, failing=failing, real=ForwardPass.append):
            if layer == failing:
                raise RuntimeError("on purpose")
            return real(self, layer, keys, values)

        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="on purpose"):
            patched.setattr(ForwardPass, "append", append)
            step(model, cache, ids[:, 40:])
    assert observer_of(cache).result().rows == 40
    step(model, cache, ids[:, 40:])
    assert_same(observer_of(cache).result(), direct(weights(model, ids[0])), 60)


def test_an_interrupt_behind_a_pass_leaves_nothing_of_it(model, store, monkeypatch):
    ids = prompt(60)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :59])
    observer_of(cache).result()

    def interrupted(self, real=SampledPass.end):
        real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(SampledPass, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, ids[:, 59:])
    assert observer_of(cache).result().rows == 59


def damage(store):
    """Damage the last block of the only segment."""
    (file,) = Path(store.path).rglob("*.kv")
    content = bytearray(file.read_bytes())
    content[-5000:] = bytes(5000)
    file.write_bytes(content)


def test_a_restore_that_fails_is_counted_once(model, store):
    ids = prompt(TOKENS)
    store.precompute(model, ids[:, :64], progress=False)
    damage(store)
    with KVStore(store.path, engine="posix") as fresh:
        cache = TieredCache(model, fresh, method=Watched())
        step(model, cache, ids)
        assert cache.stats.details.recomputed == 1 and cache.stats.tokens_restored == 48
        assert_same(observer_of(cache).result(), direct(weights(model, ids[0]), slice(48, None)), TOKENS - 48)


def test_rows_follow_beams(model, store):
    ids = prompt(70, rows=2)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :50])
    step(model, cache, ids[:, 50:51])
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = ids[[1, 0]]
    step(model, cache, swapped[:, 51:52])
    cache.reorder_cache(torch.tensor([1, 1]))
    step(model, cache, ids[[0, 0], 52:53])
    for row in (0, 1):
        assert_same(observer_of(cache).result(row), direct(weights(model, ids[0, :53])), 53)


def test_beams_that_come_of_one_prompt_have_its_rows(model, store):
    ids = prompt(60)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :50])
    cache.batch_repeat_interleave(3)
    step(model, cache, ids[:, 50:51].repeat(3, 1))
    for row in range(3):
        assert_same(observer_of(cache).result(row), direct(weights(model, ids[0, :51])), 51)


def test_in_inference_mode_and_out_of_it(model, store):
    ids = prompt(70)
    cache = TieredCache(model, store, method=Watched(), record=False)
    with torch.inference_mode():
        for part in (ids[:, :60], ids[:, 60:61]):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    step(model, cache, ids[:, 61:])
    assert_same(observer_of(cache).result(), direct(weights(model, ids[0])), 70)


def test_beam_search_and_assistants_run_watched(model, store):
    ids = prompt(60)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        plain, watched = (TieredCache(model, store, method=method, record=False) for method in (None, Watched()))
        outputs = [
            model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=8, do_sample=False, **options)
            for cache in (plain, watched)
        ]
        assert torch.equal(*outputs)
        result = observer_of(watched).result()
        assert result.missing == "" and 60 <= result.rows <= watched.get_seq_length()


def test_forks_go_their_own_ways(model, store):
    ids, other_ids = prompt(70), prompt(70, seed=8)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :50])
    twin = cache.fork()
    mixed = torch.cat([ids[:, :40], other_ids[:, :20]], dim=1)
    twin.crop(-10)
    step(model, twin, mixed[:, 40:])
    step(model, cache, ids[:, 50:])
    assert_same(observer_of(cache).result(), direct(weights(model, ids[0])), 70)
    assert_same(observer_of(twin).result(), direct(weights(model, mixed[0])), 60)


def test_a_cache_that_starts_over_counts_anew(model, store):
    ids, other_ids = prompt(60), prompt(50, seed=9)
    cache = TieredCache(model, store, method=Watched(), record=False)
    step(model, cache, ids)
    cache.reset()
    assert observer_of(cache).result().missing == "no attention was observed"
    step(model, cache, other_ids)
    assert_same(observer_of(cache).result(), direct(weights(model, other_ids[0])), 50)


def test_rows_count_whatever_happens_to_buffers_since(model, store):
    """Later, buffers have grown, columns were overwritten, and rows have changed."""
    ids, other_ids = prompt(300, rows=2), prompt(300, seed=10, rows=2)
    cache = TieredCache(model, store, method=Watched())
    step(model, cache, ids[:, :100])
    step(model, cache, ids[:, 100:250])  # more than the first buffers have room for
    cache.crop(-200)
    mixed = torch.cat([ids[:, :50], other_ids[:, :60]], dim=1)
    step(model, cache, mixed[:, 50:])
    cache.reorder_cache(torch.tensor([1, 0]))
    for row in (0, 1):
        result = observer_of(cache).result(row)
        assert result.rows == 110
        assert_same(result, direct(weights(model, mixed[1 - row])), 110)


def test_rows_of_a_cache_that_is_gone_hold_no_memory(model, store, uncollected):
    cache = TieredCache(model, store, method=Watched(), record=False)
    step(model, cache, prompt(60))
    references = weakref.ref(cache.layers[0]._keys), weakref.ref(observer_of(cache))
    del cache
    assert references[0]() is None and references[1]() is None


def test_passes_that_were_watched_are_gone_when_they_are_over(model, store, monkeypatch, uncollected):
    """This includes a pass with a plan, whose observer asks what each layer computes."""
    passes = []

    def run(self, *args, real=ForwardPass.run):
        if self.observer is not None:
            passes.append(weakref.ref(self))
        return real(self, *args)

    monkeypatch.setattr(ForwardPass, "run", run)
    store.precompute(model, prompt(96), progress=False)
    cache = TieredCache(model, store, method=Pyramid(first=frozenset(range(40))), record=False)
    step(model, cache, prompt(TOKENS))
    assert cache.stats.tokens_restored > 0
    step(model, cache, prompt(1))
    assert len(passes) == 2 and all(watched() is None for watched in passes)


def test_what_fails_while_comparing_fails_no_request(model, store, monkeypatch, caplog):
    def broken(*args):
        raise MemoryError("no room")

    ids = prompt(61)
    expected = generate(model, ids, TieredCache(model, store, record=False))
    monkeypatch.setattr("hf_tiered_cache.conversations.distances.attention_sums", broken)
    cache = TieredCache(model, store, method=Watched(), record=False)
    assert torch.equal(generate(model, ids, cache), expected)
    assert "no room" in observer_of(cache).result().missing
    assert "no room" in caplog.text


# --- who is not seen


def test_models_that_show_no_queries_say_so(store):
    for family, why in (
        ("deepseek_v3", "other keys than it passes to its cache"),
        ("falcon", "bypasses the registered attention function"),
        ("qwen2", "'of_a_user'"),
    ):
        model, ids = build(family), prompt(60)
        if family == "qwen2":
            attend_by_another_name(model)
        cache = TieredCache(model, store, method=Watched(), record=False)
        generate(model, ids, cache)
        assert why in observer_of(cache).result().missing


def test_an_implementation_that_changes_under_way_is_noticed(store):
    model = build("qwen2")
    cache = TieredCache(model, store, method=Watched(), record=False)
    step(model, cache, prompt(60))
    assert observer_of(cache).result().rows == 60
    model.set_attn_implementation("eager")
    step(model, cache, prompt(10))
    result = observer_of(cache).result()
    assert result.missing or result.rows == 60  # another implementation makes other KV: the pass may run plain


def test_a_bias_on_logits_is_not_seen(store):
    """Queries and keys do not determine what such a layer attends to."""
    model, ids = build("qwen2"), prompt(60)
    for layer in model.model.layers:
        attention = layer.self_attn
        real = attention.forward
        attention.forward = lambda *args, real=real, **kwargs: real(
            *args, **kwargs, position_bias=torch.zeros(1, 1, 60, 60)
        )
    cache = TieredCache(model, store, method=Watched(), tag="biased", record=False)
    step(model, cache, ids)
    assert "is not computed from queries and keys alone" in observer_of(cache).result().missing


# --- what it costs


def operations(run):
    with Operations() as operations:
        run()
    return operations.kernels


def test_tokens_that_are_not_sampled_cost_nothing(model, store):
    ids = prompt(70)

    def kernels(method):
        cache = TieredCache(model, store, method=method, record=False)
        step(model, cache, ids[:, :50])
        return [operations(lambda at=at: step(model, cache, ids[:, at : at + 1])) for at in range(50, 66)]

    plain, watched = kernels(None), kernels(Watched(options={}))
    extra = [more - less for more, less in zip(watched, plain, strict=True)]
    assert sorted(extra)[:15] == [0] * 15  # one of 16 is sampled
    assert max(extra) <= 6  # one a layer


def test_decoding_does_no_more_arithmetic(store):
    """The layers have Qwen2.5-0.5B's shape, without output layer and weighing."""
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    model = build("qwen2", num_hidden_layers=3, max_position_embeddings=4096, **shape)
    for tokens in amount([1024], [1024, 4000]):
        cache = TieredCache(model, store, method=Watched(options={}), record=False)
        with FlopCounterMode(display=False) as prefill:
            step(model, cache, prompt(tokens))
        with FlopCounterMode(display=False) as reducing:
            observer_of(cache).result()
        assert reducing.get_total_flops() < 0.05 * prefill.get_total_flops()
        plain = DynamicCache(config=model.config)
        step(model, plain, prompt(tokens))
        flops = {}
        for kv_cache in (plain, cache):
            with FlopCounterMode(display=False) as decoding:
                for token in range(16):
                    step(model, kv_cache, prompt(1, seed=token))
            flops[kv_cache] = decoding.get_total_flops()
        assert flops[cache] == flops[plain] > 0  # what was sampled is computed at the end
