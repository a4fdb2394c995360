"""A model with a value or tensor that changes at every pass, and with a tag: all other changes are noticed."""

from __future__ import annotations

import itertools

import pytest
import torch
from families import build, prompt
from torch import nn
from transformers.models.llama import modeling_llama

from hf_tiered_cache.identity import Fingerprinter

TAG = "counting"


class Counting(modeling_llama.LlamaMLP):
    """A layer that counts its passes."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class CountingForAll(modeling_llama.LlamaMLP):
    """A layer that counts the passes of all layers of its class."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class Keeping(modeling_llama.LlamaMLP):
    """A layer that keeps a tensor of the last pass, as layers with a loss of their own do."""

    def forward(self, x):
        self.calls = x.float().mean()
        return super().forward(x)


class Renewing(modeling_llama.LlamaMLP):
    """A layer that replaces its weights by equal ones at each pass."""

    def forward(self, x):
        self.up_proj.weight = nn.Parameter(self.up_proj.weight.detach().clone())
        return super().forward(x)


class Alternating(modeling_llama.LlamaMLP):
    """A layer with a setting that has one of two values at each pass."""

    scale = 1.0

    def forward(self, x):
        self.scale = 4.0 - self.scale
        return super().forward(x) * self.scale


def run(model, name, passes, tag=TAG, begins_request=False):
    """Run passes with a look before each one, and return the fingerprints in the order of the passes."""
    names = []
    with torch.no_grad():
        for seed in range(passes):
            names.append(name.look(tag, begins_request=begins_request).fingerprint)
            model(prompt(4, seed), use_cache=False)
    return names


def changing(kind):
    """Return a model with two layers of a kind, and its fingerprinter after enough passes to notice what changes."""
    model = build("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
    name = Fingerprinter(model)
    run(model, name, 15)
    return model, name


def load(model):
    model.load_state_dict({key: value.neg() for key, value in model.state_dict().items()}, assign=True)


def replace(model):
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=False)


def rescale(model):
    model.model.layers[1].self_attn.scaling = 3.0


@pytest.mark.parametrize("kind", [Counting, CountingForAll, Keeping])
@pytest.mark.parametrize("change", [load, replace, rescale])
def test_other_changes_are_noticed(kind, change):
    model, name = changing(kind)
    (before,) = set(run(model, name, 5))
    change(model)
    (after,) = set(run(model, name, 5))
    assert after != before


@pytest.mark.parametrize("kind", [Counting, CountingForAll, Keeping])
def test_what_changes_is_no_part_of_the_fingerprint_in_any_process(kind):
    names = [set(run(*changing(kind), passes)) for passes in (3, 5)]
    assert names[0] == names[1] and len(names[0]) == 1


@pytest.mark.parametrize("kind", [Counting, CountingForAll, Keeping, Renewing])
def test_without_a_tag_it_is_a_reason(kind):
    _, name = changing(kind)
    assert ("weight" if kind is Renewing else "calls") in name.look().problem
    assert not name.look(TAG).problem


def test_weights_that_are_renewed_at_each_pass_stay_in_the_fingerprint():
    model, name = changing(Renewing)
    (before,) = set(run(model, name, 3))
    load(model)
    (after,) = set(run(model, name, 3))
    assert after != before


def test_a_setting_that_returns_to_earlier_values_stays_in_the_fingerprint():
    model = build("llama", num_hidden_layers=2)
    model.model.layers[1].mlp.__class__ = Alternating
    model.model.layers[1].mlp.scale = 1.0
    name = Fingerprinter(model)
    names = run(model, name, 16)
    assert len(set(names)) == 2 and all(first != second for first, second in itertools.pairwise(names))


def test_a_setting_that_a_user_changes_before_each_request_stays_in_the_fingerprint():
    model = build("llama", num_hidden_layers=2)
    name, names = Fingerprinter(model), []
    for step in range(16):
        model.model.layers[1].self_attn.scaling = 1.0 + step
        names += run(model, name, 1, begins_request=True)
    assert len(set(names)) == 16


def test_tensors_that_a_user_replaces_before_each_request_are_no_reason():
    model = build("llama", num_hidden_layers=2)
    name, names = Fingerprinter(model), []
    for step in range(16):
        model.model.layers[1].mlp.steering = torch.tensor(1.0 + step % 2)
        names += run(model, name, 1, tag="", begins_request=True)
    assert len(set(names)) == 2
    assert not name.look().problem
