"""Choosing again while decoding: each token attends to what was chosen for it, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from families import build, build_deep, prompt
from reference import kv_of, put
from thorough import pairs
from transformers import DynamicCache

from eval.baselines import H2O
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.layers import SelectedSource
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.selection.selectors import Selection, TopChunks
from hf_tiered_cache.store.geometry import in_groups

FAMILY = "qwen2"

PREFIX, NEW = 200, 8
SHARED = {"per_head": False, "reorder": False, "solo_layers": 1}
METHOD = ContiguousKV(budget=0.25, chunk_tokens=16, period=2, identify="keys", reselect=True, gain=0, **SHARED)
PER_HEAD = {"per_head": True, "identify": "index", "period": 1, "solo_layers": 0}
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(params=[{}, PER_HEAD], ids=["all", "heads"])
def method(request):
    return replace(METHOD, **request.param)


@pytest.fixture
def chosen(monkeypatch):
    """Record the selections, in order."""
    noted: list[Selection] = []

    def note(self, request, choose=TopChunks.choose):
        choice = choose(self, request)
        noted.append(choice)
        return choice

    monkeypatch.setattr(TopChunks, "choose", note)
    return noted


@pytest.fixture
def erratic(monkeypatch):
    """Select other chunks each time, so that columns often change."""
    random = np.random.default_rng(3)

    def choose(self, request, real=TopChunks.choose):
        choice = real(self, request)
        chunk_sets = [random.permutation(request.chunks.tokens // 16)[: request.count // 16] for _ in choice.tokens]
        chunks = np.sort(np.stack(chunk_sets), axis=1)  # [sets, chunks]
        return replace(choice, tokens=(16 * chunks[:, :, None] + np.arange(16)).reshape(len(chunk_sets), -1))

    monkeypatch.setattr(TopChunks, "choose", choose)


def question(ids, tokens=24, seed=5):
    return torch.cat([ids, prompt(tokens, seed=seed)], dim=1)


def ask(model, store, ids, method=METHOD, **kwargs):
    cache = TieredCache(model, store, method=method, record=False)
    return model.generate(ids, past_key_values=cache, **{**GREEDY, **kwargs}), cache


def decode(model, cache, steps, seed=9):
    for token in prompt(steps, seed=seed).split(1, dim=1):
        model(input_ids=token.expand(len(cache.layers[0].keys), 1), past_key_values=cache)


def holds_what_it_says(cache, stored):
    """Assert that each restored column is bit for bit the KV of the token that the layer states."""
    for layer, (keys, values) in zip(cache.layers, stored, strict=True):
        if not isinstance(layer, SelectedSource):
            continue
        for row, row_selection in enumerate(layer._rows):
            sets = row_selection.window.columns
            assert all(len(set(tokens.tolist())) == len(tokens) == layer._num_selected for tokens in sets)
            for tensor, full in ((layer.keys, keys), (layer.values, values)):
                assert torch.equal(tensor[row, :, : layer._num_selected], of_sets(full, sets)[0])


def of_sets(tensor, sets):
    """Gather from `[1, kv_heads, tokens, dim]` the tokens int64 `[1 or kv_heads, n]`: `[1, kv_heads, n, dim]`."""
    heads, dim = tensor.shape[1], tensor.shape[3]
    tokens = torch.from_numpy(np.broadcast_to(sets, (heads, sets.shape[1])).copy())
    return tensor.gather(2, tokens[None, :, :, None].expand(-1, -1, -1, dim))


@pytest.mark.parametrize(
    ("family", "changes"),
    pairs(
        ["llama", "qwen3", "phi3", "gpt_neox", "smollm3"],
        [{}, {"identify": "index"}, {"gain": 0.0003}, PER_HEAD, PER_HEAD | {"gain": 0.0003}],
    ),
    ids=str,
)
@pytest.mark.thin(2)
def test_each_token_attends_to_what_was_chosen_for_it(family, changes, store, chosen):
    """The reference is a DynamicCache with the selected tokens of each step and all computed ones."""
    model, ids, method = build(family), prompt(PREFIX), replace(METHOD, **changes)
    store.precompute(model, ids, method=method, progress=False)
    chosen.clear()
    full_ids = question(ids)
    result, cache = ask(model, store, full_ids, method)
    tokens_restored, stored_kv = cache.stats.tokens_restored, kv_of(model, ids)
    assert tokens_restored == 192
    layers = len(stored_kv)
    periods = in_groups(range(layers), method.period, method.solo_layers)
    choices, logits, inputs, position = iter(chosen), [], full_ids[:, tokens_restored:], tokens_restored
    own = [(k[:, :, :0], v[:, :, :0]) for k, v in stored_kv]
    choice: list[np.ndarray] = []  # of each period, [sets, tokens]
    replacements: list[int] = []
    for step in range(NEW):
        for number, selection in enumerate(islice(choices, len(periods))):
            if step == 0:
                choice.append(selection.tokens.copy())
                continue
            for at, (mass, tokens) in enumerate(zip(selection.mass, selection.tokens, strict=True)):
                if not method.gain or mass[tokens].sum() - mass[choice[number][at]].sum() >= method.gain:
                    choice[number][at] = tokens
                    replacements.append(step)
        reference, attended = DynamicCache(config=model.config), choice[0].shape[1]
        for period, tokens in zip(periods, choice, strict=True):
            for layer in period:
                pairs = zip(stored_kv[layer], own[layer], strict=True)
                put(reference.layers[layer], *(torch.cat([of_sets(all_, tokens), part], 2) for all_, part in pairs))
        positions = torch.arange(position, position + inputs.shape[1]).unsqueeze(0)
        with torch.no_grad():
            output = model(input_ids=inputs, position_ids=positions, past_key_values=reference, logits_to_keep=1)
        own = [(layer.keys[:, :, attended:], layer.values[:, :, attended:]) for layer in reference.layers]
        logits.append(output.logits[:, -1])
        position += inputs.shape[1]
        inputs = result.sequences[:, full_ids.shape[1] + step : full_ids.shape[1] + step + 1]
    assert next(choices, None) is None
    assert 0 < len(replacements) <= (len(chosen) - len(periods)) * len(choice[0]) - bool(method.gain)
    for step_logits, expected in zip(result.logits, logits, strict=True):
        torch.testing.assert_close(step_logits, expected, rtol=0, atol=1e-5)
    holds_what_it_says(cache, stored_kv)


@pytest.mark.parametrize("host_memory", [0, 40_000, 1 << 24])
def test_columns_hold_what_they_say_with_any_memory(model, method, tmp_path, erratic, host_memory):
    ids = prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", host_memory=host_memory) as store:
        store.precompute(model, ids, method=method, progress=False)
        _, cache = ask(model, store, question(ids), method)
        holds_what_it_says(cache, kv_of(model, ids))
        assert not store._storage.residency._pins


@pytest.mark.parametrize("more", [0, 1, 2])
def test_each_decoded_token_chooses(more, model, store, chosen):
    """This holds for questions of any length, and after tokens are removed."""
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=METHOD, progress=False)
    cache = TieredCache(model, store, method=METHOD, record=False)
    model(input_ids=question(ids, 24 + more), past_key_values=cache, logits_to_keep=1)
    periods, selections = len(chosen), []
    for taken_back in (0, 0, 3, 0):
        if taken_back:
            cache.crop(-taken_back)
        chosen.clear()
        decode(model, cache, 1)
        selections.append(len(chosen) / periods)
    assert selections == [1, 1, 1, 1]


def test_beams_keep_their_rows_apart(model, method, store, erratic):
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=method, progress=False)
    _, cache = ask(model, store, question(ids), method, num_beams=3)
    assert len(cache.layers[0]._rows) == 3
    holds_what_it_says(cache, kv_of(model, ids))


def test_rows_of_a_batch_are_what_they_are_alone(model, method, store):
    ids = [prompt(PREFIX), prompt(PREFIX - 37, seed=7)]
    for row_ids in ids:
        store.precompute(model, row_ids, method=method, progress=False)
    full_ids = [question(row_ids) for row_ids in ids]
    pad = full_ids[0].shape[1] - full_ids[1].shape[1]
    batch = torch.cat([full_ids[0], torch.nn.functional.pad(full_ids[1], (pad, 0))])
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    together, cache = ask(model, store, batch, method, attention_mask=mask)
    alone, _ = ask(model, store, full_ids[0], method)
    assert cache.stats.tokens_restored > 300
    for a, b in zip(together.logits, alone.logits, strict=True):
        torch.testing.assert_close(a[:1], b, rtol=0, atol=1e-4)
    second_output, _ = ask(model, store, batch, method, attention_mask=mask)
    assert torch.equal(second_output.sequences, together.sequences)


def test_forks_choose_apart(model, method, store, erratic):
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=method, progress=False)
    stored_kv = kv_of(model, ids)
    _, cache = ask(model, store, question(ids), method)
    before = [layer.keys.clone() for layer in cache.layers]
    twin = cache.fork()
    decode(model, twin, 5)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    decode(model, cache, 3, seed=11)
    holds_what_it_says(twin, stored_kv)
    holds_what_it_says(cache, stored_kv)


def test_a_pass_that_fails_may_be_run_again(model, method, store, erratic):
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=method, progress=False)
    _, cache = ask(model, store, question(ids), method)
    columns = cache.get_seq_length()
    for layer in range(len(cache.layers)):
        handle = model.model.layers[layer].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode(model, cache, 1)
        handle.remove()
        assert cache.get_seq_length() == columns
        holds_what_it_says(cache, kv_of(model, ids))
    assert not store._storage.residency._pins
    decode(model, cache, 2)
    assert cache.get_seq_length() == columns + 2


def test_a_disk_that_fails_while_decoding_leaves_what_was_chosen(model, method, tmp_path, erratic, monkeypatch, caplog):
    ids = prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, method=method, progress=False)
        _, cache = ask(model, store, question(ids), method)
        stored_kv, rows = kv_of(model, ids), [layer._rows[0].window.columns for layer in cache.layers]

        def fails(*args, **kwargs):
            raise OSError("gone")

        monkeypatch.setattr(store._storage.disk.backend.engine, "submit", fails)
        decode(model, cache, 3)
        assert "the current selection is kept" in caplog.text
        holds_what_it_says(cache, stored_kv)
        assert all(
            (layer._rows[0].window.columns == columns).all() for layer, columns in zip(cache.layers, rows, strict=True)
        )
        assert cache.stats.details.read_errors > 0


def test_a_period_keeps_its_selection_if_its_first_layer_does(store, erratic):
    model = build_deep("qwen2")
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=METHOD, progress=False)
    _, cache = ask(model, store, question(ids))
    cache.layers[1].decode_selector = None  # as after a read error; layer 2 shares its selection
    rows = [layer._rows[0].window.columns for layer in cache.layers]
    decode(model, cache, 2)
    holds_what_it_says(cache, kv_of(model, ids))
    unchanged = [
        np.array_equal(layer._rows[0].window.columns, columns)
        for layer, columns in zip(cache.layers, rows, strict=True)
    ]
    assert unchanged == [False, True, True, False, False, False]


def test_a_store_that_is_closed_while_decoding_leaves_what_was_chosen(model, method, tmp_path, erratic):
    ids = prompt(PREFIX)
    store = KVStore(tmp_path, engine="posix", host_memory=0)
    store.precompute(model, ids, method=method, progress=False)
    _, cache = ask(model, store, question(ids), method)
    store.close()
    decode(model, cache, 3)
    holds_what_it_says(cache, kv_of(model, ids))


@pytest.mark.parametrize("wrong", [-0.1, 1, True, "0.1"])
def test_gain_is_a_share_of_attention(wrong):
    with pytest.raises(ConfigError, match="share of a token's attention"):
        ContiguousKV(gain=wrong)


def test_a_choice_that_gains_too_little_brings_nothing(model, store):
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=METHOD, progress=False)
    bytes_delivered = {}
    for gain in (0, 0.9):
        _, cache = ask(model, store, question(ids), replace(METHOD, gain=gain))
        before = cache.stats.details.bytes_delivered
        decode(model, cache, 4)
        bytes_delivered[gain] = cache.stats.details.bytes_delivered - before
    assert bytes_delivered[0] > 0 == bytes_delivered[0.9]


def test_a_whole_budget_chooses_nothing(model, store, chosen):
    ids = prompt(PREFIX)
    store.precompute(model, ids, method=METHOD, progress=False)
    output, _ = ask(model, store, question(ids), replace(METHOD, budget=1.0))
    exact, _ = ask(model, store, question(ids), None)
    assert not chosen
    for a, b in zip(output.logits, exact.logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_single_tokens_of_each_head_are_chosen_again(family, store):
    model, ids, method = build(family), prompt(PREFIX), H2O(0.1, reselect=True)
    store.precompute(model, ids, method=method, progress=False)
    _, once = ask(model, store, question(ids), H2O(0.1))
    before = [layer.keys[:, :, : layer._num_selected].clone() for layer in once.layers]
    _, cache = ask(model, store, question(ids), method)
    holds_what_it_says(cache, kv_of(model, ids))
    assert cache.stats.details.bytes_delivered > once.stats.details.bytes_delivered
    assert not all(
        torch.equal(layer.keys[:, :, : layer._num_selected], keys)
        for layer, keys in zip(cache.layers, before, strict=True)
    )
