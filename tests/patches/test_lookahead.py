"""Queries predicted ahead of their layer: they are right where they can be, and leave nothing behind."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from accelerate import dispatch_model
from families import build, prompt
from reference import assert_same
from test_selective import GREEDY, ask, fill, question

from hf_tiered_cache import KVStore, TieredCache, attach, detach
from hf_tiered_cache.methods import ContiguousKV
from hf_tiered_cache.patches.lookahead import LookAhead
from hf_tiered_cache.patches.scope import CACHE_ARGUMENTS, current
from hf_tiered_cache.selection.prompt import SelectiveRestore

TOKENS = 400
FAMILIES = ["qwen2", "llama", "qwen3_moe", "phi3", "olmo2", "smollm3", "cohere", "glm4", "gpt_neox", "opt"]
LEAVING = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "out_proj", "fc2")
"""By these projections layers add to the residual stream."""


def method(ahead):
    return ContiguousKV(0.25, period=2, ahead=ahead, reselect=False, per_head=False, reorder=False)


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


@pytest.fixture
def stored(tmp_path, model):
    """Create a folder with the KV of a prompt, and return it with the prompt."""
    return keep(tmp_path, model)


def keep(tmp_path, model):
    ids = prompt(TOKENS)
    with KVStore(tmp_path / "kv", engine="posix") as store:
        fill(store, model, ids, method(0))
        ask(model, store, question(ids), method(0))  # makes the indexes
        store.flush()
    return tmp_path / "kv", ids


def asked(model, stored, ahead=2, asks=None):
    """Answer in a process that has only the indexes in memory."""
    path, ids = stored
    with KVStore(path, engine="posix", host_memory="64MiB") as store:
        (asks or ask)(model, store, question(ids), method(0))
        answer, cache = (asks or ask)(model, store, question(ids), method(ahead))
        assert cache.stats.tokens_restored == TOKENS and cache.stats.reason == ""
        return answer


def without_layers(family):
    """Build a model whose layers add nothing to the residual stream."""
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not set(name.split(".")).isdisjoint(LEAVING):
                parameter.zero_()
    return model


# --- what is predicted


@pytest.fixture
def predicted(monkeypatch):
    """Record for each selecting layer whether its queries were predicted, the predicted and its own queries."""
    noted = []

    def to_choose_by(self, layer, query, own_keys, real=SelectiveRestore._to_choose_by):
        found = real(self, layer, query, own_keys)
        noted.append((layer, found[0] is not query, found[0], query))
        return found

    monkeypatch.setattr(SelectiveRestore, "_to_choose_by", to_choose_by)
    return noted


def layers_of(predicted):
    """Return the layers that selected by predicted queries."""
    return [layer for layer, was, *_ in predicted if was]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ahead", [1, 4])
def test_where_layers_add_nothing_the_prediction_is_right(family, ahead, tmp_path, predicted):
    """The queries then passed the family's own norm, projection and rotation."""
    model = without_layers(family)
    answer = asked(model, keep(tmp_path, model), ahead)
    assert layers_of(predicted)
    assert all(torch.equal(guess, own) for _, _, guess, own in predicted)
    assert_same(answer, asked(model, (tmp_path / "kv", prompt(TOKENS)), 0))


def test_each_layer_but_the_first_is_predicted_from_as_far_as_there_are_layers(model):
    layers = model.model.layers
    ahead = LookAhead(None, layers, [0, 2, 3, 5], 2)
    assert [ahead.after(layer) for layer in range(6)] == [[2, 3], [], [5], [], [], []]
    ahead = LookAhead(None, layers, [1, 4], 4)
    assert [ahead.after(layer) for layer in range(6)] == [[], [4], [], [], [], []]


# --- nothing is left behind, and nobody else notices


def test_a_pass_that_fails_lets_go_of_what_was_on_its_way(model, stored):
    path, ids = stored
    with KVStore(path, engine="posix") as store:
        ask(model, store, question(ids), method(0))
        store._storage.residency.clear()
        cache = TieredCache(model, store, method=method(4), record=False, tag="hooked")
        hook = model.model.layers[2].register_forward_hook(interrupting)
        try:
            with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                model(input_ids=question(ids), past_key_values=cache, logits_to_keep=1)
        finally:
            hook.remove()
        tiers, until = store._storage.residency, time.monotonic() + 30
        while len(tiers._pins) and time.monotonic() < until:  # reads that are under way end by themselves
            time.sleep(0.01)
            tiers._tick(None)
        assert len(tiers._pins) == 0 and not any(pool.pins.any() for pool in tiers.host.pools())
        assert current() is None and not hooks(model)


def interrupting(*_):
    raise KeyboardInterrupt


def hooks(model):
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if "rotary" not in hook.__module__  # those that last as long as the attachment
    ]


def test_nothing_is_left_behind(model, stored):
    attach(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    asked(model, stored, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not hooks(model) and current() is None
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def tagged(model, store, ids, chosen):
    cache = TieredCache(model, store, method=chosen, record=False, tag="hooked")
    return model.generate(ids, past_key_values=cache, **GREEDY), cache


@pytest.mark.parametrize("where", ["layer", "inside"])
def test_hooks_of_others_do_not_see_it(where, tmp_path, predicted):
    model, calls = build("qwen2"), []
    layer = model.model.layers[3]
    module = layer if where == "layer" else layer.self_attn.q_proj
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("behind"))
    ids, counts = prompt(TOKENS), []
    with KVStore(tmp_path / "kv", engine="posix") as store:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=(filling := TieredCache(model, store, tag="hooked")))
        filling.store_now()
        store.flush()
    for ahead in (0, 1, 2):
        calls.clear(), predicted.clear()
        asked(model, (tmp_path / "kv", ids), ahead, asks=tagged)
        counts.append(len(calls))
        assert bool(layers_of(predicted)) == (ahead > 0)  # the other layers are predicted
    assert counts[0] > 0 and counts == counts[:1] * 3


def test_layers_of_accelerate_run_as_before(tmp_path, predicted):
    model = build("qwen2")
    stored = keep(tmp_path, model)
    expected = asked(model, stored, 0)
    detach(model)
    model = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert_same(asked(model, stored, 2), expected)
    assert not layers_of(predicted)


def test_a_layer_that_needs_its_cache_runs_as_before(tmp_path, monkeypatch, caplog, predicted):
    model = build("qwen2")
    kind = type(model.model.layers[0])

    def forward(self, hidden_states, *args, real=kind.forward, **kwargs):
        if all(kwargs.get(name) is None for name in CACHE_ARGUMENTS):
            logging.getLogger("tried").warning(self.self_attn.layer_idx)  # a list would change the model at each pass
            raise AttributeError("no cache")
        return real(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    stored = keep(tmp_path, model)
    expected = asked(model, stored, 0)
    assert_same(asked(model, stored, 1), expected)
    tried = [record.msg for record in caplog.records if record.name == "tried"]
    assert not layers_of(predicted) and tried == [2, 4]  # the layers that choose


def test_a_layer_that_writes_to_its_hidden_states_writes_to_its_own(tmp_path, monkeypatch, predicted):
    model = without_layers("qwen2")
    kind = type(model.model.layers[0])

    def forward(self, hidden_states, *args, real=kind.forward, **kwargs):
        return real(self, hidden_states.mul_(1.5), *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    stored = keep(tmp_path, model)
    expected = asked(model, stored, 0)
    assert_same(
        asked(model, stored, 1), expected
    )  # RMSNorm undoes the factor, so the predicted queries are the layer's own
    assert layers_of(predicted)
