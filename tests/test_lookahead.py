"""Queries ahead of their layer: what is fetched by them changes nothing but the time, and leaves nothing behind."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from accelerate import dispatch_model
from families import build, prompt
from test_selective import GREEDY, ask, fill, question, same

from hf_tiered_cache import KVStore, TieredCache, attach, detach
from hf_tiered_cache.errors import ConfigError, IntegrityError
from hf_tiered_cache.methods import KVDrive
from hf_tiered_cache.patches.lookahead import LookAhead
from hf_tiered_cache.patches.scope import current
from hf_tiered_cache.restore.lookahead import FetchAhead
from hf_tiered_cache.restore.window import WindowChoices
from hf_tiered_cache.tiers import residency
from hf_tiered_cache.tiers.residency import Residency

TOKENS = 400
FAMILIES = ["qwen2", "llama", "qwen3_moe", "phi3", "gemma3", "olmo2", "smollm3", "cohere", "glm4", "gpt_neox", "opt"]
LEAVING = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "out_proj", "fc2")
"""By these projections layers add to the residual stream."""


def method(ahead, **changes):
    return KVDrive(**{"budget": 0.2, "local": 16, "ahead": ahead} | changes)


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


@pytest.fixture
def stored(tmp_path, model):
    """A folder with the KV of a prompt, and that prompt."""
    return keep(tmp_path, model)


def keep(tmp_path, model):
    ids = prompt(TOKENS)
    with KVStore(tmp_path / "kv", engine="posix") as store:
        fill(store, model, ids, method(0))
        ask(model, store, question(ids), method(0))  # keeps the indexes
    return tmp_path / "kv", ids


def asked(model, stored, ahead=2, host="64MiB", asks=None, **changes):
    """An answer in a process that has nothing in memory yet, and the figures."""
    path, ids = stored
    with KVStore(path, engine="posix", host_memory=host) as store:
        answer, cache = (asks or ask)(model, store, question(ids), method(ahead, **changes))
        assert cache.stats.tokens_restored == TOKENS and cache.stats.reason == ""
        return answer, cache.stats


def without_layers(family):
    """A model whose layers add nothing to the residual stream, so that all see the same hidden states."""
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not set(name.split(".")).isdisjoint(LEAVING):
                parameter.zero_()
    return model


# --- what is predicted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ahead", [1, 4])
def test_where_layers_add_nothing_the_prediction_is_right(family, ahead, tmp_path, monkeypatch):
    """So each family's own norm, projection and rotation are what the queries went through."""
    predicted, own = {}, []

    def prepare(self, ahead, real=WindowChoices.prepare):
        predicted[ahead.layer] = ahead
        return real(self, ahead)

    def follow(self, layer, rows, query, *rest, real=WindowChoices.follow):
        if layer in predicted:
            own.append(layer)
            assert torch.equal(predicted.pop(layer).query, query)
        return real(self, layer, rows, query, *rest)

    monkeypatch.setattr(WindowChoices, "prepare", prepare)
    monkeypatch.setattr(WindowChoices, "follow", follow)
    model = without_layers(family)
    _, stats = asked(model, keep(tmp_path, model), ahead)
    assert own and not predicted
    assert stats.ahead_hits == stats.ahead_blocks


def test_each_layer_but_the_first_is_predicted_from_as_far_as_there_are_layers(model):
    layers = model.model.layers
    ahead = LookAhead(None, layers, [0, 2, 3, 5], 2, set())
    assert [ahead.after(layer) for layer in range(6)] == [[2, 3], [], [5], [], [], []]
    ahead = LookAhead(None, layers, [1, 4], 4, set())
    assert [ahead.after(layer) for layer in range(6)] == [[], [4], [], [], [], []]


# --- nothing changes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_however_far_ahead(family, tmp_path):
    model = build(family)
    stored = keep(tmp_path, model)
    expected, off = asked(model, stored, 0)
    assert off.ahead_blocks == off.ahead_hits == 0 < off.ahead_misses
    for ahead in (1, 2, 4):
        found, stats = asked(model, stored, ahead)
        same(found, expected)
        assert 0 < stats.ahead_hits <= stats.ahead_blocks
        assert stats.ahead_hits + stats.ahead_misses == off.ahead_misses
    found, stats = asked(model, stored, 2, host=0)  # no memory to fetch to
    same(found, expected)
    assert stats.ahead_blocks == 0


def test_the_same_bits_in_batches_and_beams(model, stored):
    path, ids = stored
    rows = torch.zeros(2, TOKENS + 24, dtype=torch.int64)
    rows[0], rows[1, -88:] = question(ids)[0], question(prompt(64, seed=3))[0]
    mask = (rows != 0).long()
    answers = []
    for ahead in (0, 1, 4):
        with KVStore(path, engine="posix") as store:
            batch = TieredCache(model, store, method=method(ahead), record=False)
            together = model.generate(rows, attention_mask=mask, past_key_values=batch, **GREEDY)
            beam = TieredCache(model, store, method=method(ahead), record=False)
            beams = model.generate(question(ids), past_key_values=beam, num_beams=3, do_sample=False, max_new_tokens=8)
            torch.manual_seed(7)
            drawn = TieredCache(model, store, method=method(ahead), record=False)
            sampled = model.generate(question(ids), past_key_values=drawn, do_sample=True, max_new_tokens=8)
            answers.append((together, beams, sampled, torch.get_rng_state()))
            assert all((cache.stats.ahead_hits > 0) == (ahead > 0) for cache in (batch, drawn))
    for together, *rest in answers[1:]:
        same(together, answers[0][0])
        assert all(map(torch.equal, rest, answers[0][1:]))


def test_blocks_ahead_are_not_fetched_at_their_need(model, stored, monkeypatch):
    at_need = []

    def fetch(self, requests, device, collector, ahead=False, real=Residency.fetch):
        at_need[-1] += 0 if ahead else sum(len(request.chunks) for request in requests)
        return real(self, requests, device, collector, ahead)

    monkeypatch.setattr(Residency, "fetch", fetch)
    for ahead in (0, 1):
        at_need.append(0)
        _, stats = asked(model, stored, ahead)
    assert at_need[0] - at_need[1] == stats.ahead_hits > at_need[0] / 10


# --- faults


@pytest.fixture
def preparing(monkeypatch):
    """Not empty while something is fetched ahead of its layer."""
    under_way = []

    def prepare(self, *given, real=FetchAhead.prepare):
        under_way.append(True)
        try:
            return real(self, *given)
        finally:
            under_way.clear()

    monkeypatch.setattr(FetchAhead, "prepare", prepare)
    return under_way


@pytest.mark.parametrize("error", [OSError(5, "no good"), IntegrityError("no good"), MemoryError()], ids=repr)
@pytest.mark.parametrize("begins", [True, False])
def test_a_read_that_fails_ahead_of_its_need_changes_nothing(error, begins, model, stored, preparing, monkeypatch):
    expected, _ = asked(model, stored, 0)
    doomed, failed = threading.local(), []

    def begin(self, *given, real=Residency._begin):
        read, arrive = real(self, *given)
        if not preparing or read is None:
            return read, arrive

        def read_doomed():
            doomed.now = True
            try:
                read()
            finally:
                doomed.now = False

        return read_doomed, arrive

    def read_batch(*given, real=residency.read_batch):
        if not getattr(doomed, "now", False):
            return real(*given)
        failed.append(True)
        if not begins:
            raise error
        future = Future()
        future.set_exception(error)
        return future

    monkeypatch.setattr(Residency, "_begin", begin)
    monkeypatch.setattr(residency, "read_batch", read_batch)
    found, stats = asked(model, stored, 2)
    same(found, expected)
    assert failed and stats.ahead_blocks > 0
    assert stats.read_errors + stats.verification_failures > 0 == stats.recomputed


def test_a_fetch_that_cannot_begin_ahead_changes_nothing(model, stored, preparing, monkeypatch):
    expected, _ = asked(model, stored, 0)

    def fetch(self, *given, real=Residency.fetch):
        if preparing:
            raise MemoryError
        return real(self, *given)

    monkeypatch.setattr(Residency, "fetch", fetch)
    found, stats = asked(model, stored, 2)
    same(found, expected)
    assert stats.ahead_blocks == 0 < stats.read_errors


def test_a_pass_that_fails_lets_go_of_what_was_on_its_way(model, stored):
    path, ids = stored
    with KVStore(path, engine="posix") as store:
        cache = TieredCache(model, store, method=method(4), record=False)
        with torch.no_grad():
            model(input_ids=question(ids), past_key_values=cache, logits_to_keep=1)
            hook = model.model.layers[2].register_forward_hook(interrupting)
            try:
                with pytest.raises(KeyboardInterrupt):
                    model(input_ids=prompt(1), past_key_values=cache, logits_to_keep=1)
            finally:
                hook.remove()
        tiers, until = store._storage.residency, time.monotonic() + 30
        while len(tiers._holds) and time.monotonic() < until:  # reads that are under way end by themselves
            time.sleep(0.01)
            tiers._tick(None)
        assert len(tiers._holds) == 0 and not any(pool.pins.any() for pool in tiers.host.pools())
        assert current() is None and not hooks(model)


def interrupting(*_):
    raise KeyboardInterrupt


# --- nothing is left behind, and nobody else notices


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
def test_hooks_of_others_do_not_see_it(where, tmp_path):
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
        calls.clear()
        answer, stats = asked(model, (tmp_path / "kv", ids), ahead, asks=tagged)
        counts.append((len(calls), answer.sequences.tolist()))
        assert (stats.ahead_blocks > 0) == (ahead > 0)  # the other layers are predicted
    assert counts == counts[:1] * 3


def test_layers_of_accelerate_run_as_before(tmp_path):
    model = build("qwen2")
    stored = keep(tmp_path, model)
    expected, _ = asked(model, stored, 0)
    detach(model)
    model = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    found, stats = asked(model, stored, 2)
    same(found, expected)
    assert stats.ahead_blocks == 0


def test_a_layer_that_needs_its_cache_runs_as_before_and_is_tried_once(tmp_path, monkeypatch, caplog):
    model = build("qwen2")
    kind = type(model.model.layers[0])

    def forward(self, hidden_states, *args, real=kind.forward, **kwargs):
        if kwargs.get("past_key_values") is None:
            logging.getLogger("tried").warning(self.self_attn.layer_idx)  # a list would change the model at each pass
            raise AttributeError("no cache")
        return real(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    stored = keep(tmp_path, model)
    expected, _ = asked(model, stored, 0)
    found, stats = asked(model, stored, 1)
    same(found, expected)
    tried = [record.msg for record in caplog.records if record.name == "tried"]
    assert stats.ahead_blocks == 0 and tried == [1, 2, 3, 4, 5]


def test_a_layer_that_writes_to_its_hidden_states_writes_to_its_own(tmp_path, monkeypatch):
    model = build("qwen2")
    kind = type(model.model.layers[0])

    def forward(self, hidden_states, *args, real=kind.forward, **kwargs):
        return real(self, hidden_states.mul_(1.5), *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    stored = keep(tmp_path, model)
    expected, _ = asked(model, stored, 0)
    found, stats = asked(model, stored, 1)
    same(found, expected)
    assert stats.ahead_blocks > 0


# --- choosing by them


def test_choosing_ahead_is_choosing_by_the_predicted_queries(model, stored, tmp_path):
    changes = {"index": "keys", "chunk_tokens": 1, "window": 0, "eviction": "none", "budget": 0.05}
    own, _ = asked(model, stored, 1, **changes)
    predicted, stats = asked(model, stored, 1, choose_ahead=True, **changes)
    assert not all(map(torch.equal, own.logits, predicted.logits))
    assert not torch.equal(own.logits[0], predicted.logits[0])  # the prompt's own pass too
    assert stats.ahead_hits == stats.ahead_blocks > 0
    idle = without_layers("qwen2")
    kept = keep(tmp_path / "idle", idle)
    same(asked(idle, kept, 1, choose_ahead=True, **changes)[0], asked(idle, kept, 0, **changes)[0])


@pytest.mark.parametrize("wrong", [{"ahead": -1}, {"ahead": 0, "choose_ahead": True}], ids=str)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        KVDrive(**wrong)
