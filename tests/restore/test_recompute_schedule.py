"""A front of a stored prefix is computed while its back is loaded: any schedule gives full computation's logits."""

from __future__ import annotations

import time
from functools import lru_cache

import numpy as np
import pytest
import torch
import transformers
from families import build_class, prompt
from families import build_deep as build
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import kv_of
from thorough import pairs, some

from eval.baselines import PartialRecompute
from hf_tiered_cache import ConfigError, Exact, KVStore, TieredCache, reasons
from hf_tiered_cache.cache.calibrations import PrefixCosts, keep_prefix_costs, prefix_calibration
from hf_tiered_cache.cache.cost_model import fastest_plan, plan_recompute_lengths, streams_of, unit_tiers_of
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.layers import buffer
from hf_tiered_cache.methods import make_method
from hf_tiered_cache.methods.base import overlapping
from hf_tiered_cache.restore.plan import Plan
from hf_tiered_cache.restore.rows import RowGroup, SegmentSlice
from hf_tiered_cache.restore.schedule import RATIOS, STEEPNESS, Load, Streams, fastest, recompute_lengths
from hf_tiered_cache.store.geometry import Geometry, KVLayout, LayerKV, block_groups, in_groups
from hf_tiered_cache.tiers.collector import StatsCollector

CPU = torch.device("cpu")
TOKENS = 198
STORED = 192
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt_neox", "phi3", "opt"]
FAMILIES += ["deepseek_v3", "deepseek_v2"]
GREEDY = {"do_sample": False, "max_new_tokens": 12}
RATIO = st.floats(0, 1)


# --- schedules


@given(st.integers(1, 5000), RATIO, st.integers(1, 40), st.integers(1, 64), st.integers(1, 9))
@example(160, 0.5, 24, 16, 4)
@example(159, 1.0, 6, 16, 1)
def test_fronts_fall_with_depth_and_have_the_share_that_is_asked_for(tokens, ratio, layers, step, together):
    groups = [range(first, min(first + together, layers)) for first in range(0, layers, together)]
    lengths = recompute_lengths(tokens, ratio, layers, groups, step)
    assert ((lengths >= 0) & (lengths <= tokens)).all() and (np.diff(lengths) <= 0).all()
    assert ((lengths % step == 0) | (lengths == tokens)).all()
    assert all(len(set(lengths[list(group)])) == 1 for group in groups)
    assert abs(lengths.mean() - ratio * tokens) <= step / 2 + 1e-6 * tokens or (lengths == tokens).any()
    assert abs(lengths.mean() - ratio * tokens) <= step


@given(st.integers(1, 5000), RATIO, st.integers(1, 40), st.integers(1, 64), st.integers(1, 9), st.floats(1, 8))
@example(6, 0.5, 6, 1, 3, 2.0)  # both groups contain layers between
def test_steeper_fronts_fall_over_fewer_layers(tokens, ratio, layers, step, together, steepness):
    groups = [range(first, min(first + together, layers)) for first in range(0, layers, together)]
    lengths = recompute_lengths(tokens, ratio, layers, groups, step, steepness)
    assert ((lengths >= 0) & (lengths <= tokens)).all() and (np.diff(lengths) <= 0).all()
    between = ((lengths > 0) & (lengths < tokens)).sum()
    # the groups of the first and the last of these layers may hold others
    assert between <= (layers - 1) / steepness + 2 * together - 1 or layers == 1
    assert abs(lengths.mean() - ratio * tokens) <= step + tokens / layers


def test_fronts_are_those_of_the_formula():
    assert recompute_lengths(1200, 0.25, 5, step=1).tolist() == [600, 450, 300, 150, 0]
    assert recompute_lengths(1200, 0.75, 5, step=1).tolist() == [1200, 1050, 900, 750, 600]
    assert recompute_lengths(1200, 0.25, 1, step=1).tolist() == [300]
    assert recompute_lengths(1200, 0.25, 5, step=1, steepness=2).tolist() == [1200, 600, 0, 0, 0]
    assert recompute_lengths(1200, 0.5, 5, step=1, steepness=2).tolist() == [1200, 1200, 600, 0, 0]
    assert recompute_lengths(1200, 0.75, 5, step=1, steepness=2).tolist() == [1200, 1200, 1200, 600, 0]
    several = recompute_lengths(1200, np.array([0.0, 0.25, 1.0]), 5, step=1)
    assert several[:, 0].tolist() == [0, 600, 1200] and (several[2] == 1200).all()


@given(st.integers(1, 5000), RATIO, st.integers(1, 40), st.integers(1, 64))
def test_flat_fronts_are_one_for_all_layers(tokens, ratio, layers, step):
    lengths = recompute_lengths(tokens, ratio, layers, [range(layers)], step, steepness=0)
    assert len(lengths) == layers and len(set(lengths)) == 1
    assert abs(lengths[0] - ratio * tokens) <= step / 2 + 1e-6 * tokens or lengths[0] == tokens
    none_and_all = recompute_lengths(tokens, np.array([0.0, 1.0]), layers, steepness=0)
    assert none_and_all.tolist() == [[0] * layers, [tokens] * layers]


class Segment:
    """Reader with the attributes that plans need."""

    def __init__(self, layout, geometry, tokens):
        from hf_tiered_cache.store.shape import SegmentShape

        self.shape, self.id = SegmentShape(layout, geometry, tokens), "segment"


WINDOWS = st.lists(st.sampled_from([0, 0, 24, 50]), min_size=1, max_size=12)
GEOMETRY = st.builds(
    Geometry, st.sampled_from([4, 16, 64]), st.integers(1, 5), st.sampled_from([None, 1]), st.booleans()
)


@given(WINDOWS, GEOMETRY, st.integers(1, 20), st.integers(0, 15), st.integers(1, 40), RATIO)
def test_every_layer_has_the_kv_and_the_hidden_states_that_it_needs(windows, geometry, hashes, short, suffix, ratio):
    """This holds for all numbers of layers, block sizes and ratios."""
    layout = KVLayout(tuple(LayerKV(2, 8, 2, 8, window, "key", 8) for window in windows), torch.float32)
    tokens = hashes * 16
    until, columns = tokens - short, tokens - short + suffix
    piece = SegmentSlice(Segment(layout, geometry, tokens), 0, tokens, 0)
    group = RowGroup((0,), 0, (piece,))
    plain = Plan(0, columns, (np.arange(until, columns),) * len(windows), (group,))
    fronts = plan_recompute_lengths(plain, ratio)
    if not fronts.any():
        return
    plan = plain.with_recompute_lengths(fronts.tolist())  # which refuses columns that the layer before does not compute
    assert plan.restored_until == until and plan.suffix is None and plan.restored_tokens == until
    loaded_rows = {layer: set() for layer in range(len(windows))}
    for block_group in block_groups(layout, geometry):
        for layer in block_group.layers:
            fetched_tokens = plan.tokens_to_restore(block_group, group, piece)
            used_tokens = plan.tokens_to_restore(block_group, group, piece, layer)
            assert np.isin(used_tokens, fetched_tokens).all()
            loaded_rows[layer] |= set(used_tokens.tolist())
    for layer, window in enumerate(windows):
        front, computed_tokens = fronts[layer], set(plan.computed[layer].tolist())
        assert computed_tokens == {*range(front), *range(until, columns)}
        visible_tokens = set(range(max(0, until - window + 1) if window else 0, until))  # by the suffix
        assert visible_tokens <= loaded_rows[layer] | computed_tokens
        assert loaded_rows[layer] <= visible_tokens - computed_tokens  # and nothing for nothing


@given(
    st.integers(1, 9),
    st.floats(0, 3),
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 2)), min_size=1, max_size=4),
    st.lists(RATIO, min_size=1, max_size=4),
)
def test_the_two_streams_take_as_long_as_one_step_after_the_other(chunks, suffix, groups, ratios):
    tokens, first, loads = chunks * 16, 0, []
    for count, cost in groups:
        layers = tuple(range(first, first + count))
        loads.append(Load(layers, np.arange(16, tokens + 1, 16), np.full(chunks, cost)))
        first += count
    streams = Streams(tokens, suffix, lambda n: 0.1 * n + 0.001 * n**2, 0.01, tuple(loads))
    lengths = recompute_lengths(tokens, np.array(ratios), first, [load.layers for load in loads])
    for took, front in zip(streams.seconds(lengths), lengths, strict=True):
        finish = loading_seconds = 0.0
        for load, (_, cost) in zip(loads, groups, strict=True):
            loading_seconds += cost * sum(end > front[load.layers[-1]] for end in load.ends)
            finish = max(finish, loading_seconds)
            for layer in load.layers:
                n = int(front[layer])
                finish += suffix + 0.1 * n + 0.001 * n**2 + 0.01 * (tokens - n)
        assert took == pytest.approx(finish)


def test_what_lies_between_must_be_worth_it():
    times = 10 - 8 * RATIOS
    assert fastest(times) == 64 and fastest(times[::-1]) == 0
    times[20] = 1.75
    assert fastest(times) == 64  # 2.0 alone
    times[20] = 1.65
    assert fastest(times) == 20
    assert fastest(10 - 8 * RATIOS, may_compute_all=False) == 63
    assert fastest(10 - RATIOS, may_compute_all=False) == 0


@pytest.mark.parametrize("load", [0.1, 0.3, 1.0, 3.0, 5.0])
@pytest.mark.parametrize(
    ("count", "geometry", "most"),
    [
        (6, Geometry(layers_per_block=1), 1.03),
        (12, Geometry(layers_per_block=1), 1.02),
        (24, Geometry(layers_per_block=1), 1.015),
        (24, Geometry(layers_per_block=4), 1.03),
        *((count, overlapping(Geometry(), count), 1.02) for count in (8, 16, 24, 28, 30, 32, 48)),
    ],
)
def test_bubbles_are_few(count, geometry, most, load):
    """A token is computed in 1 and loaded in `load`: both at once without bubbles take 1 / (1 + 1 / load)."""
    layers = in_groups(list(range(count)), geometry.layers_per_block, geometry.solo_layers)
    ends = np.arange(16, 4097, 16)
    loads = tuple(Load(tuple(group), ends, np.full(256, load * 16 * len(group) / count)) for group in layers)
    streams = Streams(4096, 0.0, lambda n: n / count, 0.0, loads)
    took = [streams.seconds(recompute_lengths(4096, RATIOS, count, layers, steepness=steep)) for steep in STEEPNESS]
    assert np.min(took) < most * 4096 / (1 + 1 / load)


def test_choosing_takes_milliseconds():
    layers = [tuple(range(first, first + 4)) for first in range(0, 48, 4)]
    ends = np.arange(16, 131073, 16)
    streams = Streams(1 << 17, 0.0, lambda n: n * 1e-6, 0.0, tuple(Load(group, ends, ends * 1e-9) for group in layers))

    def choose():
        schedules = [recompute_lengths(1 << 17, RATIOS, 48, layers, steepness=steep) for steep in STEEPNESS]
        return fastest(streams.seconds(np.concatenate(schedules)))

    best = min(_timed(choose) for _ in range(5))
    assert best < 0.05


def _timed(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# --- what comes of it


@lru_cache
def stored(family, root):
    """Return a model, a store with a prefix on disk, a prompt that continues it, and the logits of computing it."""
    model, ids = build(family), prompt(TOKENS)
    store = KVStore(root / family, engine="posix", host_memory=0)
    store.precompute(model, ids[:, :STORED], progress=False)
    with torch.no_grad():
        return model, store, ids, model(input_ids=ids, logits_to_keep=2).logits


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("schedule")


def ask(model, store, ids, ratio, method=Exact, **options):
    cache = TieredCache(model, store, method=method(recompute=ratio), **({"record": False} | options))
    with torch.no_grad():
        return cache, model(input_ids=ids, past_key_values=cache, logits_to_keep=2).logits


def close(logits, full):
    torch.testing.assert_close(logits, full, rtol=0, atol=2e-5 * full.abs().max().item() + 1e-6)


@pytest.mark.parametrize("family", some(FAMILIES))
@settings(max_examples=settings.default.max_examples // 8)
@given(ratio=RATIO)
@example(ratio=0.04)
@example(ratio=0.3)
@example(ratio=0.5)
@example(ratio=0.8)
@example(ratio=1.0)
def test_any_share_gives_the_logits_of_computing_everything(root, family, ratio):
    model, store, ids, full = stored(family, root)
    cache, logits = ask(model, store, ids, ratio)
    stats = cache.stats
    assert (stats.tokens_restored, stats.tokens_computed) == (STORED, TOKENS - STORED)
    assert abs(stats.tokens_recomputed - ratio * STORED) <= 16 or family in ("gemma2", "gemma3")  # blocks take turns
    assert stats.bytes_read == 0 if ratio == 1 else stats.bytes_read > 0 or ratio > 0.9
    assert stats.reason == ""
    close(logits, full)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_a_partial_recompute_computes_as_much_in_every_layer(root, family, ratio, monkeypatch):
    model, store, ids, full = stored(family, root)
    plans, real = [], Plan.with_recompute_lengths
    monkeypatch.setattr(Plan, "with_recompute_lengths", lambda plan, fronts: plans.append(fronts) or real(plan, fronts))
    cache, logits = ask(model, store, ids, ratio, PartialRecompute)
    close(logits, full)
    layers = model.config.num_hidden_layers
    assert plans == [[round(ratio * STORED / 16) * 16] * layers]
    assert cache.stats.tokens_recomputed == plans[0][0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_back_comes_from_the_store_and_the_front_does_not(root, family, tmp_path):
    """This shows that the test above can fail: KV of another prompt changes the logits."""
    model, _, ids, full = stored(family, root)
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, prompt(STORED, seed=99), progress=False)
        storage = store._storage
        honest = storage.match

        def other(hashes, *args, **named):
            return honest(cache_hashes(cache), *args, **named)

        for ratio, spoilt in ((0.3, True), (1.0, False)):
            cache = TieredCache(model, store, method=Exact(recompute=ratio), record=False)
            storage.match = other
            with torch.no_grad():
                logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=2).logits
            assert ((logits - full).abs().max() > 1e-3 * full.abs().max()) == spoilt


def cache_hashes(cache):
    return cache._executor.sequence.history.hasher.hashes(prompt(STORED, seed=99)[0].numpy())


@pytest.mark.parametrize(("family", "ratio"), pairs(["llama", "gemma2", "gemma3", "gpt_neox", "phi3"], [0.2, 0.6]))
def test_generating_goes_on_from_it(root, family, ratio):
    model, store, ids, _ = stored(family, root)
    cache = TieredCache(model, store, method=Exact(recompute=ratio), record=False)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
    assert cache.stats.tokens_recomputed > 0


def test_bfloat16(tmp_path):
    model, ids = build("qwen2", torch.bfloat16), prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store, torch.no_grad():
        store.precompute(model, ids[:, :STORED], progress=False)
        _, logits = ask(model, store, ids, 0.4)
        full = model(input_ids=ids, logits_to_keep=2).logits
    torch.testing.assert_close(logits, full, rtol=0, atol=2e-2 * full.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_several_rows(tmp_path, family):
    model = build(family)
    ids = torch.cat([prompt(TOKENS), prompt(TOKENS, seed=2), prompt(TOKENS)])
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, [row[:STORED] for row in ids], progress=False)
        cache = TieredCache(model, store, method=Exact(recompute=0.4), record=False)
        output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(ids, **GREEDY))
    assert cache.stats.tokens_restored == 3 * STORED
    assert abs(cache.stats.tokens_recomputed - 0.4 * 3 * STORED) < 3 * 40


def test_rows_of_which_one_is_stored_further(tmp_path):
    model, ids = build("llama"), torch.cat([prompt(TOKENS), prompt(TOKENS, seed=2)])
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, [ids[0, :STORED], ids[1, :96]], progress=False)
        cache = TieredCache(model, store, method=Exact(recompute=0.5), record=False)
        output = model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(ids, **GREEDY))
    assert cache.stats.tokens_restored == 2 * 96 and cache.stats.tokens_recomputed > 0


# --- where all is loaded, without a word


def test_padding_a_cache_in_use_and_lossy_codecs_load_all(tmp_path, caplog):
    model, ids = build("llama"), prompt(TOKENS)
    method = Exact(recompute=0.5)
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, ids[:, :STORED], progress=False)
        batch, mask = torch.zeros(2, TOKENS, dtype=torch.int64), torch.ones(2, TOKENS, dtype=torch.int64)
        batch[0], batch[1, 30:], mask[1, :30] = ids[0], ids[0, :-30], 0
        cache = TieredCache(model, store, method=method, record=False)
        output = model.generate(batch, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert torch.equal(output, model.generate(batch, attention_mask=mask, **GREEDY))
        assert cache.stats.tokens_recomputed == 0 < cache.stats.tokens_restored

        cache = TieredCache(model, store, method=method, record=False)
        model.generate(ids[:, :50], past_key_values=cache, do_sample=False, max_new_tokens=1)
        before = cache.stats.tokens_recomputed
        output = model.generate(ids, past_key_values=cache, **GREEDY)
        assert torch.equal(output, model.generate(ids, **GREEDY))
        assert cache.stats.tokens_recomputed == before and cache.stats.tokens_restored > STORED - 50
        assert not caplog.records

        store.precompute(model, ids[:, :STORED], method=Exact(codec="int8"), progress=False)
        cache = TieredCache(model, store, method=Exact(recompute=0.5, codec="int8"), record=False)
        model.generate(ids, past_key_values=cache, **GREEDY)
        assert (cache.stats.tokens_restored, cache.stats.tokens_recomputed) == (STORED, 0)


def test_a_model_whose_layers_take_more_of_each_token_loads_all(root, caplog):
    model, store, ids, full = stored("falcon", root)  # its layers take a bias for each token
    cache, logits = ask(model, store, ids, 0.5)
    close(logits, full)
    assert (cache.stats.tokens_restored, cache.stats.tokens_recomputed) == (STORED, 0)
    assert not caplog.records


def test_an_attention_that_cannot_be_told_where_queries_stand_loads_all(root, monkeypatch):
    model, store, ids, full = stored("llama", root)
    monkeypatch.setattr("hf_tiered_cache.cache.suitability.can_scatter", lambda config: False)
    cache, logits = ask(model, store, ids, 0.5)
    close(logits, full)
    assert (cache.stats.tokens_restored, cache.stats.tokens_recomputed) == (STORED, 0)


@pytest.mark.parametrize("kind", ["GPTNeo", "Doge"])
def test_an_attention_that_makes_a_mask_of_its_own_loads_all(root, kind):
    """They take all queries for the last ones, or expect a mask of all queries."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.3}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    if kind == "GPTNeo":
        sizes |= {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 24}
    else:
        sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model, ids = (
        getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)),
        prompt(TOKENS),
    )
    with KVStore(root / kind, engine="posix", host_memory=0) as store, torch.no_grad():
        store.precompute(model.eval(), ids[:, :STORED], progress=False)
        cache, logits = ask(model, store, ids, 0.5)
        full = model(input_ids=ids, logits_to_keep=2).logits
        if not torch.allclose(full[:, :1], model(input_ids=ids[:, :-1], logits_to_keep=1).logits, atol=1e-3):
            pytest.skip(f"in this version of transformers, tokens of {kind} attend to later tokens")
        close(logits, full)
    assert (cache.stats.tokens_restored, cache.stats.tokens_recomputed) == (STORED, 0)


# --- reading


def test_of_a_sliding_layer_the_window_before_the_suffix_is_read(root):
    """The last 39 of 192 tokens are read, in 3 chunks of two KV cache groups."""
    model, store, ids, _ = stored("mistral", root)
    blocks_read = {ratio: ask(model, store, ids, ratio)[0].stats.disk.blocks for ratio in (0.0, 0.3, 0.6, 1.0)}
    assert blocks_read == {0.0: 6, 0.3: 6, 0.6: 6, 1.0: 0}


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_what_is_neither_computed_nor_read_is_finite(root, family, monkeypatch):
    """It is masked, but a mask does not hide what is no number."""
    real_empty = buffer._empty
    monkeypatch.setattr(buffer, "_empty", lambda *shape: real_empty(*shape).fill_(torch.nan))
    model, store, ids, full = stored(family, root)
    close(ask(model, store, ids, 0.3)[1], full)


def test_what_is_computed_is_not_read(root):
    model, store, ids, _ = stored("llama", root)
    full = ask(model, store, ids, 0.0)[0].stats
    half = ask(model, store, ids, 0.5)[0].stats
    assert half.bytes_read < 0.6 * full.bytes_read
    # blocks hold no more than is wanted
    assert half.details.bytes_used == half.bytes_read and half.read_amplification == 1.0


def test_idle_time_is_that_between_reads_of_one_pass(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    total, collector = StatsCollector(), StatsCollector()
    collector.total = total

    def read():
        collector.read_started()
        collector.read_done(1)

    collector.expect_reads(True)
    read()
    collector.expect_reads(False)
    read()
    idle = collector.stats.details.load_idle_seconds
    assert idle > 0 and total.stats.details.load_idle_seconds == idle
    read()  # nothing was to follow
    collector.expect_reads(True)
    read()
    collector.forget_reads()  # the pass is over
    read()
    assert collector.stats.details.load_idle_seconds == idle


# --- what is stored behind it


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_what_is_computed_behind_it_is_stored(tmp_path, family):
    model, ids = build(family), prompt(STORED + 83)
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, ids[:, :STORED], progress=False)
        cache, _ = ask(model, store, ids, 0.4, record=True)
        assert cache.stats.tokens_recomputed > 0
        del cache
        store.flush()
        assert sum(row.tokens for row in store.segments()) == STORED + 80
        second_cache, logits = ask(model, store, ids, 0.0)
        assert second_cache.stats.tokens_restored == STORED + 80
        with torch.no_grad():
            close(logits, model(input_ids=ids, logits_to_keep=2).logits)
        for layer, (keys, values) in zip(second_cache.layers, kv_of(model, ids), strict=True):
            num_positions = layer.keys.shape[2]
            torch.testing.assert_close(layer.keys, keys[:, :, -num_positions:], rtol=0, atol=1e-4)
            torch.testing.assert_close(layer.values, values[:, :, -num_positions:], rtol=0, atol=1e-4)


def test_generated_tokens_are_stored_too_and_the_next_turn_finds_them(tmp_path):
    model, ids = build("qwen3"), prompt(STORED + 40)
    with KVStore(tmp_path, engine="posix") as store:
        store.precompute(model, ids[:, :STORED], progress=False)
        cache = TieredCache(model, store, method=Exact(recompute=0.6))
        turn = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=30)
        del cache
        store.flush()
        longer = torch.cat([turn, prompt(9, seed=3)], dim=1)
        for ratio in (0.0, 0.3):
            cache = TieredCache(model, store, method=Exact(recompute=ratio), record=False)
            output = model.generate(longer, past_key_values=cache, **GREEDY)
            assert torch.equal(output, model.generate(longer, **GREEDY))
            assert cache.stats.tokens_restored == 256  # of 261 that went through the model


def test_a_block_that_cannot_be_read_is_computed(tmp_path):
    """The last layers' blocks are damaged: the pass is half done when that is found."""
    model, ids = build("llama"), prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids[:, :STORED], progress=False)
    (file,) = tmp_path.rglob("*.kv")
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        cache = TieredCache(model, store, method=Exact(recompute=0.3))
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
        stats = cache.stats
        assert (stats.details.recomputed, stats.details.verification_failures) == (1, 1)
        assert stats.tokens_restored == STORED - 16 and stats.tokens_recomputed > 0  # up to the damaged block
        assert stats.reason == reasons.DAMAGED


def test_a_model_with_chunked_attention_restores_the_whole_prefix(tmp_path):
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2}
    model = build_class("Llama4ForCausalLM", "Llama4TextConfig", attention_chunk_size=32, **sizes)
    ids = prompt(TOKENS)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids[:, :STORED], progress=False)
        cache = TieredCache(model, store, method=Exact(recompute=0.5), record=False)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
        assert (cache.stats.tokens_restored, cache.stats.tokens_recomputed) == (STORED, 0)


# --- auto


def plant(store, model, *costs):
    keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, "exact", list(costs))


BALANCED = PrefixCosts(STORED, 1e-3, {"disk": 1e-3, "host": 1e-6})
"""Loading takes as long as computing."""


@pytest.fixture
def path(tmp_path):
    with KVStore(tmp_path / "store", engine="posix") as store:
        store.precompute(build("llama"), prompt(TOKENS)[:, :STORED], progress=False)
    return tmp_path / "store"


def asked(path, *costs, method=None, warm=0, ids=None):
    """Return the counters of a prompt after the stored prefix, with its first tokens in memory."""
    model, ids = build("llama"), prompt(TOKENS) if ids is None else ids
    with KVStore(path, engine="posix") as store:
        if warm:
            store.warm(model, ids[:, : warm + 1], progress=False)
        plant(store, model, *costs)
        cache = TieredCache(model, store, method=method, record=False)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))
        return cache.stats


def test_without_a_calibration_all_is_loaded_bit_for_bit(path):
    model, ids = build("llama"), prompt(TOKENS)
    with KVStore(path, engine="posix") as store, torch.no_grad():
        caches = [TieredCache(model, store, method=method, record=False) for method in (None, Exact(recompute=0.0))]
        first, second = (model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits for cache in caches)
        assert torch.equal(first, second)
        assert caches[0].stats.tokens_recomputed == 0 and caches[0].method == Exact()


def test_what_was_measured_says_how_much_is_computed(path):
    def computed(restore, **more):
        costs = PrefixCosts(STORED, 1e-3, {"disk": restore, "host": 1e-6}, **more)
        stats = asked(path, costs)
        return STORED if stats.reason == reasons.SLOWER else stats.tokens_recomputed

    shares = [computed(restore) for restore in (1e-6, 8e-4, 1.2e-3, 1.0)]
    assert shares[0] == 0 < shares[1] < shares[2] < shares[3] == STORED
    assert computed(1.0, load={"disk": 1e-6}) == 0  # how long reading keeps the disk busy is what counts


@pytest.mark.parametrize(
    ("method", "disk", "layers"),
    [
        (Exact(), 1e-3, 2),
        (Exact(), 1e-5, 4),
        (Exact(), None, 4),
        (Exact(recompute=0.5), None, 2),
        (Exact(geometry=Geometry(16, 3)), 1e-3, 3),
        (Exact(codec="int8"), 1e-3, 4),
    ],
)
@pytest.mark.thin(2)
def test_few_layers_share_blocks_if_a_front_is_likely(tmp_path, method, disk, layers):
    model, ids = build("llama", num_hidden_layers=16), prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        if disk is not None:
            plant(store, model, PrefixCosts(STORED, 1e-3, {"disk": disk, "host": 1e-6}))
        store.precompute(model, ids[:, :STORED], method=method, progress=False)
        for turn, row in enumerate(store.segments()):
            assert storage_of(store).disk.reader(row.id).shape.geometry.layers_per_block == layers, turn
        cache = TieredCache(model, store, method=method)
        model.generate(ids, past_key_values=cache, **GREEDY)
        store.flush()
        assert len(store.segments()) > 1 and cache.stats.tokens_restored >= STORED // 16 * 16
        assert {storage_of(store).disk.reader(row.id).shape.geometry.layers_per_block for row in store.segments()} == {
            layers
        }


def test_a_partial_recompute_takes_the_share_that_is_best_for_one_front(path, monkeypatch):
    plans, real = [], Plan.with_recompute_lengths
    monkeypatch.setattr(Plan, "with_recompute_lengths", lambda plan, fronts: plans.append(fronts) or real(plan, fronts))
    stats = asked(path, BALANCED, method="partial_recompute")
    assert 0 < stats.tokens_recomputed < STORED and plans and all(len(set(front)) == 1 for front in plans)
    assert asked(path, method=PartialRecompute()).tokens_recomputed == 0  # nothing was measured
    assert asked(path, PrefixCosts(STORED, 1e-3, {"disk": 1.0}), method=PartialRecompute()).reason == reasons.SLOWER


def test_what_lies_in_memory_is_not_computed(path):
    """The front in memory, the back on disk: to compute a front would spare nothing that takes time."""
    assert asked(path, BALANCED).tokens_recomputed > 0
    assert asked(path, BALANCED, warm=96).tokens_recomputed == 0
    assert asked(path, BALANCED, warm=STORED).tokens_recomputed == 0


def test_it_can_be_switched_off_and_set(path):
    assert asked(path, BALANCED, method=Exact(recompute=0.0)).tokens_recomputed == 0
    assert asked(path, BALANCED, method="exact:recompute=0.0").tokens_recomputed == 0
    assert asked(path, method="exact:recompute=0.5").tokens_recomputed > 0
    slow = PrefixCosts(STORED, 1e-3, {"disk": 1.0})
    assert asked(path, slow).reason == reasons.SLOWER
    stats = asked(path, slow, method=Exact(decline=False))
    assert stats.reason == "" and stats.tokens_recomputed > 0.8 * STORED
    stats = asked(path, slow, method=Exact(recompute=0.5, decline=False))
    assert stats.reason == "" and 0 < stats.tokens_recomputed < 0.7 * STORED
    assert asked(path, slow, method=Exact(recompute=0.5)).reason == reasons.SLOWER


def test_look_ups_say_what_is_stored_whatever_is_computed_of_it(path):
    model, ids = build("llama"), prompt(TOKENS)
    with KVStore(path, engine="posix") as store:
        before = store.lookup(model, ids)
        plant(store, model, BALANCED)
        assert store.lookup(model, ids) == before and before.stored == STORED
        assert store.warm(model, ids, progress=False).bytes["disk"] == 0  # all of it


def test_an_estimate_of_a_plain_restore_and_of_computing_all(path):
    """20 ms of the suffix, which the first block group of two is not waited for in: it loads for 2/3 of 192 ms."""
    model, ids = build("llama"), torch.cat([prompt(TOKENS)[:, :STORED], prompt(20, seed=5)], dim=1)
    with KVStore(path, engine="posix") as store:
        cache = TieredCache(model, store, record=False)
        storage = storage_of(store)
        plan, _ = cache.look_up(ids)
        streams = streams_of(plan, BALANCED, unit_tiers_of(plan, storage.residency, lambda layer: CPU))
        lengths = plan_recompute_lengths(plan, np.array([0.0, 1.0]))
        plain, full = streams.seconds(lengths)
        assert full == pytest.approx(0.192 + 0.020)
        assert plain == pytest.approx(0.192 + 0.020 / 3, rel=1e-3)
        assert fastest_plan(plan, lengths[0], 0.0, True, BALANCED, storage.residency, lambda layer: CPU) is plan


def test_loading_is_estimated_from_the_bytes_of_blocks_that_are_not_full(tmp_path):
    """Two segments of 80 tokens, in blocks of 64 tokens, take as long as 4 full blocks."""
    model, ids = build("llama"), prompt(180)
    method = Exact(geometry=Geometry(chunk_tokens=64), recompute=0.0)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        for stop in (80, 160):
            cache = TieredCache(model, store, method=method)
            model(ids[:, :stop], past_key_values=cache, use_cache=True, logits_to_keep=1)
            store.flush()
        storage = storage_of(store)
        plan, _ = TieredCache(model, store, record=False, method=method).look_up(ids)
        streams = streams_of(plan, BALANCED, unit_tiers_of(plan, storage.residency, lambda layer: CPU))
    assert [reader.shape.tokens for reader in plan.readers] == [80, 80]
    nothing_computed = np.zeros(1, np.int64)
    loading = sum(load.seconds_after(nothing_computed)[0] for load in streams.loads)
    assert loading == pytest.approx(4 * 64 * BALANCED.loading("disk"))


def test_costs_grow_with_length_and_are_kept(path):
    model = build("llama")
    with KVStore(path, engine="posix") as store:
        plant(
            store,
            model,
            PrefixCosts(100, 1e-3, {"disk": 1e-3}, {"disk": 9e-4}, 0.01, 1e-5),
            PrefixCosts(200, 2e-3, {"disk": 1e-3}, {"disk": 7e-4}, 0.03, 1e-5),
        )
        costs = {
            n: prefix_calibration(storage_of(store), Fingerprinter(model)(), CPU, "exact").at(n) for n in (50, 150, 400)
        }
    assert costs[150].load == {"disk": pytest.approx(8e-4)} and costs[150].overhead == pytest.approx(0.02)
    assert costs[150].growth == pytest.approx(1e-5)
    assert costs[150].computing(100) == pytest.approx(100e-3)
    assert costs[400].compute == pytest.approx(4e-3)  # on the line through both
    assert costs[50].compute == pytest.approx(1e-3)
    assert costs[400].load == {"disk": pytest.approx(6e-4)}  # 0.14 s for 200 tokens, 0.05 s more than for 100
    assert costs[400].restore == {"disk": pytest.approx(1e-3)}


def test_growth_never_makes_a_token_cost_less_than_nothing(path):
    model = build("llama")
    with KVStore(path, engine="posix") as store:
        plant(store, model, PrefixCosts(100, 1e-3, {"disk": 1e-3}, growth=1.0))
        costs = prefix_calibration(storage_of(store), Fingerprinter(model)(), CPU, "exact").at(100)
    assert costs.computing(np.arange(1, 100)).min() >= 0 and costs.growth == pytest.approx(1e-5)


def test_by_name():
    assert make_method("exact:recompute=0.25") == Exact(recompute=0.25)
    assert make_method("exact:recompute=auto") == Exact() == make_method("exact")
    for wrong in ("most", "2"):
        with pytest.raises(ConfigError, match="recompute"):
            make_method(f"exact:recompute={wrong}")
    assert make_method("partial_recompute:recompute=0.25") == PartialRecompute(0.25)
    for wrong in (-0.1, 1.1, True, None):
        for method in (Exact, PartialRecompute):
            with pytest.raises(ConfigError, match="recompute"):
                method(recompute=wrong)
