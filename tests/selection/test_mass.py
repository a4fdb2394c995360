"""A budget by mass: a choice takes the fewest chunks that hold a share of the attention, and layers hold no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import build, prompt
from reference import assert_same, attending_to, kv_of
from test_selective import GREEDY, NEW, PREFIX, ask, fill, question
from torch.nn.functional import pad

from hf_tiered_cache import KVStore, TieredCache, detach
from hf_tiered_cache.errors import CacheMismatchError, ConfigError
from hf_tiered_cache.methods import ContiguousKV, describe_method, make_method
from hf_tiered_cache.selection.selectors import TopChunks
from hf_tiered_cache.store.geometry import in_groups

pytestmark = pytest.mark.usefixtures("unfolded")

METHOD = ContiguousKV(
    budget=0.75, mass=0.5, chunk_tokens=8, per_head=False, reorder=False, identify="keys", reselect=False, queries=4
)
AGAIN = replace(METHOD, reselect=True, gain=0)
RESTORED, BOUGHT = 192, 144


def peaked(family, **changes):
    """Build a model with uneven attention that differs by layer."""
    return build(family, **{"init_std" if family == "opt" else "initializer_range": 0.2}, **changes)


@pytest.fixture(scope="module")
def model():
    return peaked("qwen2")


@pytest.fixture
def chosen(monkeypatch):
    """Record the tokens of each selection, in order: period by period, and within it row by row."""
    noted: list[np.ndarray] = []

    def choose(self, asked, real=TopChunks.choose):
        choice = real(self, asked)
        noted.append(choice.tokens[0])
        return choice

    monkeypatch.setattr(TopChunks, "choose", choose)
    return noted


def periods_of(cache):
    selector = cache.method.selector()
    choosing = [layer.index for layer in cache.layers if layer.selects]
    return in_groups(choosing, selector.period, selector.solo_layers)


def by_layer(cache, choices, restored=RESTORED):
    """Return the tokens that each layer attends to, from one selection per period."""
    found = [np.arange(restored)] * len(cache.layers)
    for period, tokens in zip(periods_of(cache), choices, strict=True):
        for layer in period:
            found[layer] = tokens
    return found


def nothing(stored):
    return [(keys[:, :, :0], values[:, :, :0]) for keys, values in stored]


def attends_to_what_was_chosen(model, method, store, chosen):
    """Assert bits equal to a DynamicCache whose layers hold the selected tokens only.

    But for a choice that is made again: it stands in other columns, so sums have another order.
    """
    ids = prompt(PREFIX)
    fill(store, model, ids, method)
    whole = question(ids)
    ours, cache = ask(model, store, whole, method)
    stored, steps = kv_of(model, ids), iter(chosen)
    own, inputs, position = nothing(stored), whole[:, RESTORED:], RESTORED
    periods = periods_of(cache)
    sizes: list[int] = []
    for step, logits in enumerate(ours.logits):
        if step == 0 or method.reselect:
            choices = [next(steps) for _ in periods]
            sizes = sizes or [len(tokens) for tokens in choices]
            assert sizes == [len(tokens) for tokens in choices]
        expected, own = attending_to(model, stored, by_layer(cache, choices), own, inputs, position)
        tolerance = {"rtol": 0, "atol": 1e-4 if method.reselect else 0}
        torch.testing.assert_close(logits, expected, **tolerance)
        position += inputs.shape[1]
        inputs = ours.sequences[:, position : position + 1]
    assert next(steps, None) is None
    assert cache.stats.tokens_restored == RESTORED
    layers = [len(tokens) for tokens, each in zip(by_layer(cache, choices), cache.layers, strict=True) if each.selects]
    assert cache.stats.tokens_attended == round(np.mean(layers))
    return sizes


@pytest.mark.parametrize("method", [METHOD, AGAIN], ids=["once", "again"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "smollm3", "gpt_neox", "glm4", "opt"])
def test_every_family_attends_to_what_holds_the_mass(family, method, store, chosen):
    sizes = attends_to_what_was_chosen(peaked(family), method, store, chosen)
    assert len(set(sizes)) > 1 and min(sizes) < BOUGHT


@pytest.mark.parametrize(
    "method",
    [
        replace(METHOD, period=2, subperiod=2, solo_layers=1),
        replace(METHOD, identify="index"),
        replace(METHOD, ahead_bytes=0),
        replace(METHOD, queries=0, chunk_tokens=16),
        replace(AGAIN, identify="index"),
    ],
    ids=describe_method,
)
def test_every_way_of_choosing_goes_by_mass(method, model, store, chosen):
    assert len(set(attends_to_what_was_chosen(model, method, store, chosen))) > 1


def test_layers_with_a_window_keep_all_of_it(store, chosen):
    sizes = attends_to_what_was_chosen(peaked("gemma3"), AGAIN, store, chosen)
    assert len(sizes) == 2


def test_a_choice_is_the_fewest_chunks_that_hold_the_mass(model, store, chosen):
    """The reference is the model's own attention at its first layer."""
    ids = prompt(PREFIX)
    fill(store, model, ids, METHOD)
    whole = question(ids)
    eager = peaked("qwen2", attn_implementation="eager")
    with torch.no_grad():
        weights = eager(input_ids=whole, output_attentions=True).attentions[0]
    by_chunk = weights[0, :, -4:, :RESTORED].sum((0, 1)).view(-1, 8).sum(1)
    best = by_chunk.sort(descending=True)
    held = (best.values.cumsum(0) / by_chunk.sum()).tolist()
    for mass in (0.05, 0.3, 0.6):
        chosen.clear()
        ask(model, store, whole, replace(METHOD, mass=mass))
        count = next(number for number, share in enumerate(held, 1) if share >= mass)
        expected = best.indices[:count].sort().values
        assert chosen[0].tolist() == [8 * int(chunk) + i for chunk in expected for i in range(8)]


def test_a_little_mass_reads_one_chunk(tmp_path):
    model, ids = (
        peaked("qwen2", hidden_size=256),
        prompt(PREFIX),
    )  # blocks of whole pages, so that padding counts nothing
    stats = {}
    for mass in (None, 1e-6):
        with KVStore(tmp_path / str(mass), engine="posix", host_memory=0) as store:
            fill(store, model, ids, METHOD)
            stats[mass] = ask(model, store, question(ids), replace(METHOD, mass=mass))[1].stats
    layers, kv = 6, 2 * 8 * 2 * 64 * 4  # of one chunk in one layer
    assert stats[1e-6].tokens_attended == 8
    assert stats[1e-6].details.bytes_used == layers * kv
    assert stats[None].details.bytes_used == layers * kv * BOUGHT // 8
    keys = stats[None].details.bytes_identifying
    assert stats[1e-6].details.bytes_identifying == keys
    assert stats[1e-6].bytes_read - keys == layers * kv < stats[None].bytes_read - keys


@pytest.mark.parametrize("budget", [0.25, 0.75])
@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {"prompt_lookup_num_tokens": 3}]
)
def test_all_the_mass_is_the_whole_budget(model, store, mode, budget):
    ids, found = prompt(PREFIX), []
    fill(store, model, ids, METHOD)
    for mass in (None, 1.0):
        torch.manual_seed(3)
        cache = TieredCache(model, store, method=replace(AGAIN, budget=budget, mass=mass), record=False)
        found.append(model.generate(question(ids), past_key_values=cache, **(GREEDY | mode)))
        assert cache.stats.tokens_attended == budget * RESTORED * mode.get("num_return_sequences", 1) * mode.get(
            "num_beams", 1
        )
    assert_same(found[1], found[0])


def test_a_whole_budget_is_the_exact_method(model, store):
    ids = prompt(PREFIX)
    fill(store, model, ids, METHOD)
    exact, _ = ask(model, store, question(ids), None)
    for mass in (0.5, 1.0):
        assert_same(ask(model, store, question(ids), replace(METHOD, budget=1.0, mass=mass))[0], exact)


# --- rows


@pytest.mark.parametrize("method", [METHOD, AGAIN], ids=["once", "again"])
def test_rows_take_what_each_of_them_needs(model, store, chosen, method):
    """Rows of a left-padded batch need different numbers of chunks for the same attention."""
    prefixes = [prompt(PREFIX), prompt(163, seed=7), prompt(40, seed=8)]
    for ids in prefixes:
        fill(store, model, ids, method)
    rows = [question(ids) for ids in prefixes]
    pads = [rows[0].shape[1] - row.shape[1] for row in rows]
    batch = torch.cat([pad(row, (left, 0)) for row, left in zip(rows, pads, strict=True)])
    mask = torch.cat([pad(torch.ones_like(row), (left, 0)) for row, left in zip(rows, pads, strict=True)])
    ours, cache = ask(model, store, batch, method, attention_mask=mask)
    assert cache.stats.tokens_restored == 192 + 160 + 32
    together = [tokens.tolist() for tokens in chosen]
    for number, row in enumerate(rows):
        chosen.clear()
        alone, _ = ask(model, store, row, method)
        assert [tokens.tolist() for tokens in chosen] == together[number :: len(rows)]
        for a, b in zip(ours.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[number], b[0], rtol=0, atol=1e-4)
    counts = np.array([len(tokens) for tokens in together]).reshape(-1, len(rows))  # [choices, rows]
    assert (counts.min(1) < counts.max(1)).all()


def goes_on(model, cache, stored, chosen, tokens):
    """Assert that one more pass, of ids `[rows, n]`, attends to the selected and the computed tokens of each row.

    And layers hold, bit for bit, the KV of the tokens that they say.
    """
    behind = cache.get_seq_length() - RESTORED
    own = [(layer.keys[:, :, -behind:].clone(), layer.values[:, :, -behind:].clone()) for layer in cache.layers]
    chosen.clear()
    with torch.no_grad():
        logits = model(input_ids=tokens, past_key_values=cache).logits
    assert {layer.get_seq_length() for layer in cache.layers} == {RESTORED + behind + tokens.shape[1]}
    for row in range(len(tokens)):
        choices = by_layer(cache, chosen[row :: len(tokens)])
        kv = [(keys[row : row + 1], values[row : row + 1]) for keys, values in own]
        expected, _ = attending_to(model, stored, choices, kv, tokens[row : row + 1], RESTORED + behind)
        torch.testing.assert_close(logits[row : row + 1, -1], expected, rtol=0, atol=1e-4)
        for layer, (keys, values), took in zip(cache.layers, stored, choices, strict=True):
            rows = layer._rows
            assert sorted(rows[row].window.columns[0].tolist()) == took.tolist()
            columns = slice(0, len(took))
            assert layer.held == len(took) + behind + tokens.shape[1]
            assert torch.equal(layer.keys[row, :, columns], keys[0][:, rows[row].window.columns[0]])
            assert torch.equal(layer.values[row, :, columns], values[0][:, rows[row].window.columns[0]])


def begun(model, store, **kwargs):
    """Return a cache that has answered a question, and its prefix's KV."""
    ids = prompt(PREFIX)
    fill(store, model, ids, AGAIN)
    _, cache = ask(model, store, question(ids), AGAIN, **kwargs)
    assert len({layer.held for layer in cache.layers}) > 1
    return cache, kv_of(model, ids)


def test_beams_go_on(model, store, chosen):
    cache, stored = begun(model, store, num_beams=3)
    goes_on(model, cache, stored, chosen, prompt(1, seed=9, rows=3))
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    goes_on(model, cache, stored, chosen, prompt(1, seed=10, rows=3))
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    goes_on(model, cache, stored, chosen, prompt(1, seed=11, rows=2))


def test_several_tokens_at_once_are_masked(model, store, chosen):
    cache, stored = begun(model, store)
    for seed, tokens in ((9, 5), (10, 1), (11, 3)):
        goes_on(model, cache, stored, chosen, prompt(tokens, seed=seed))


def test_tokens_are_taken_back(model, store, chosen):
    cache, stored = begun(model, store)
    goes_on(model, cache, stored, chosen, prompt(4, seed=9))
    cache.crop(-3)
    assert {layer.get_seq_length() for layer in cache.layers} == {PREFIX + 24 + NEW - 1 + 1}
    goes_on(model, cache, stored, chosen, prompt(2, seed=10))
    for layer in cache.layers:
        with pytest.raises(RuntimeError, match="within a budget"):
            layer.crop(RESTORED - cache.get_seq_length() - 1)
    goes_on(model, cache, stored, chosen, prompt(1, seed=11))


def test_forks_go_their_own_ways(model, store, chosen):
    cache, stored = begun(model, store)
    twin = cache.fork()
    for seed, one in enumerate((twin, cache, twin, cache), 9):
        goes_on(model, one, stored, chosen, prompt(1 + seed % 2, seed=seed))


def test_a_pass_that_fails_may_be_run_again(model, store, chosen):
    ids = prompt(PREFIX)
    expected = begun(model, store)[0]
    cache, stored = TieredCache(model, store, method=AGAIN, record=False), kv_of(model, ids)
    for asked in (question(ids), prompt(1, seed=9)):
        for layer in range(len(cache.layers)):
            handle = model.model.layers[layer].mlp.register_forward_hook(lambda *_: 1 / 0)
            columns, sizes = cache.get_seq_length(), [each.get_mask_sizes(1) for each in cache.layers]
            with pytest.raises(ZeroDivisionError):
                model(input_ids=asked, past_key_values=cache, logits_to_keep=1)
            handle.remove()
            assert cache.get_seq_length() == columns
            assert [each.get_mask_sizes(1) for each in cache.layers] == sizes
        with torch.no_grad():
            model(input_ids=asked, past_key_values=cache, logits_to_keep=1)
    behind = cache.get_seq_length() - RESTORED
    widths = [layer.held - behind for layer in cache.layers]
    assert widths == [layer.held - (layer.get_seq_length() - RESTORED) for layer in expected.layers]
    goes_on(model, cache, stored, chosen, prompt(1, seed=10))


def test_what_transformers_is_told_of_lengths(model, store):
    """All layers have the same tokens behind them, and one mask, as wide as the budget, serves them all."""
    cache, _ = begun(model, store)
    total = PREFIX + 24 + NEW - 1
    for layer in cache.layers:
        assert layer.get_seq_length() == total
        assert layer.get_mask_sizes(3) == (BOUGHT + total - RESTORED + 3, RESTORED - BOUGHT)


def test_a_conversation_goes_idle_and_comes_back(model, store, chosen):
    ids = prompt(PREFIX)
    fill(store, model, ids, AGAIN)
    first, _ = ask(model, store, question(ids), AGAIN)
    cache = TieredCache(model, store, method=AGAIN, conversation="alice", record=False)
    for _ in range(2):
        assert_same(model.generate(question(ids), past_key_values=cache, **GREEDY), first)
        assert cache.suspend().tokens == RESTORED
        assert {layer.get_mask_sizes(3) for layer in cache.layers} == {(3, 0)}
    with TieredCache(model, store, method=AGAIN, conversation="alice", record=False) as again:
        assert_same(model.generate(question(ids), past_key_values=again, **GREEDY), first)
        goes_on(model, again, kv_of(model, ids), chosen, prompt(1, seed=9))
        turn = torch.cat([first.sequences, prompt(40, seed=9)], dim=1)
        model.generate(turn, past_key_values=again, **GREEDY)
        assert len({layer.get_seq_length() for layer in again.layers}) == 1


# --- passes in which nobody cuts masks


def next_pass(model, store, method, tokens, *prefixes):
    """Return a cache that has answered a question after each prefix, a copy, and valid and unusual next passes."""
    for ids in prefixes:
        fill(store, model, ids, method)
    rows = [question(ids) for ids in prefixes]
    pads = [rows[0].shape[1] - row.shape[1] for row in rows]
    batch = torch.cat([pad(row, (left, 0)) for row, left in zip(rows, pads, strict=True)])
    seen = torch.tensor([[0] * left + [1] * (rows[0].shape[1] - left) for left in pads])
    _, cache = ask(model, store, batch, method, attention_mask=seen)
    mask = pad(seen, (0, cache.get_seq_length() - seen.shape[1] + tokens), value=1)
    positions = (mask.cumsum(1) - 1)[:, -tokens:]
    ids = prompt(tokens, seed=9, rows=len(rows))
    return cache, {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": True}


def within(model, cache, inputs):
    """Run a pass through the module within the model."""
    return model.lm_head(model.model(**inputs, past_key_values=cache).last_hidden_state)


def detached(model, cache, inputs):
    detach(model)
    return model(**inputs, past_key_values=cache).logits


every_other_way = pytest.mark.parametrize("way", [within, detached])
LONG, SHORTER, SHORT = 200, 168, 40  # with the same remainder, so that rows compute equally many tokens
UNEVEN = replace(METHOD, mass=0.7)


def widths(cache):
    return {layer.held for layer in cache.layers if layer.selects}


@every_other_way
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding"])
@pytest.mark.parametrize(
    ("prefixes", "tokens"),
    [((LONG,), 3), ((LONG, SHORTER), 3), ((LONG, SHORT), 1), ((LONG, LONG - 30), 1)],
    ids=["several tokens", "a padded batch", "one token behind padding that shows", "rows that hold other numbers"],
)
def test_a_pass_in_which_nobody_cuts_masks_is_refused(family, store, way, prefixes, tokens):
    model = peaked(family)
    cache, inputs = next_pass(model, store, UNEVEN, tokens, *(prompt(each, seed=each) for each in prefixes))
    assert len(widths(cache)) > 1
    held, twin = cache.get_seq_length(), cache.fork()
    with torch.no_grad():
        with pytest.raises(CacheMismatchError, match=r"call the model itself .* create a new TieredCache"):
            way(model, cache, inputs)
        assert cache.get_seq_length() == held
        if way is within:
            right, again = (model(**inputs, past_key_values=one).logits for one in (twin, cache))
            assert torch.equal(right, again)


@every_other_way
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding"])
@pytest.mark.parametrize("prefixes", [(LONG,), (LONG, LONG)], ids=["one row", "rows that hold as many"])
def test_a_token_that_sees_all_needs_no_mask(family, store, way, prefixes):
    model = peaked(family)
    cache, inputs = next_pass(model, store, UNEVEN, 1, *(prompt(each, seed=each) for each in prefixes))
    assert len(widths(cache)) > 1
    with torch.no_grad():
        right = model(**inputs, past_key_values=cache.fork()).logits
        assert torch.equal(way(model, cache, inputs), right)


@every_other_way
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding"])
@pytest.mark.parametrize("prefixes", [(LONG,), (LONG, SHORTER), (LONG, SHORT)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_that_hold_as_many_share_a_mask(family, store, way, prefixes, tokens):
    """Fewer than the budget buys, but the same number in all; a mask that hides nothing is made here, and not there."""
    model, method = peaked(family), replace(METHOD, mass=1e-6)
    cache, inputs = next_pass(model, store, method, tokens, *(prompt(each, seed=each) for each in prefixes))
    assert widths(cache) == {8 + cache.get_seq_length() - RESTORED}
    with torch.no_grad():
        right = model(**inputs, past_key_values=cache.fork()).logits
        torch.testing.assert_close(way(model, cache, inputs), right, rtol=0, atol=1e-5)


@every_other_way
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_compute_other_numbers_need_masks_of_their_own(store, way, tokens):
    """Layers and rows hold as many restored tokens, but the second row computes fewer after them."""
    model, method = peaked("llama"), replace(METHOD, mass=1e-6)
    cache, inputs = next_pass(model, store, method, tokens, prompt(LONG, seed=LONG), prompt(163, seed=163))
    assert len(widths(cache)) == 1
    with torch.no_grad(), pytest.raises(CacheMismatchError, match="call the model itself"):
        way(model, cache, inputs)


@pytest.mark.parametrize("tokens", [1, 3])
def test_other_attention_masks_all_and_is_refused(store, tokens):
    model = peaked("llama")
    cache, inputs = next_pass(model, store, UNEVEN, tokens, prompt(LONG))
    with torch.no_grad():
        right = model(**inputs, past_key_values=cache.fork()).logits
        model.set_attn_implementation("eager")
        for way in (lambda *asked: model(**inputs, past_key_values=cache), within, detached):
            with pytest.raises(CacheMismatchError, match="attention implementation 'sdpa'"):
                way(model, cache, inputs)
        model.set_attn_implementation("sdpa")
        if tokens == 1:
            assert torch.equal(detached(model, cache, inputs), right)


# --- settings


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, True, "0.9", float("nan")])
def test_mass_is_a_share(wrong):
    with pytest.raises(ConfigError, match="mass must be a share of the attention"):
        ContiguousKV(mass=wrong)


def test_mass_by_name():
    assert make_method("contiguous_kv:mass=0.9") == ContiguousKV(mass=0.9)
    assert make_method("contiguous_kv.paper:mass=0.9:budget=0.1") == ContiguousKV.paper(0.1, mass=0.9)
    assert make_method(describe_method(ContiguousKV(0.1, mass=0.9))) == ContiguousKV(0.1, mass=0.9)
    assert ContiguousKV().mass is None
    with pytest.raises(ConfigError, match="of type float"):
        make_method("contiguous_kv:mass=most")
    for other in ("h2o", "impress", "kv_drive", "exact"):
        with pytest.raises(ConfigError, match="no option 'mass'"):
            make_method(f"{other}:mass=0.9")
