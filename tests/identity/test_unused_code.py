"""User code that no pass runs is no reason to run plain; a change of what a pass runs is noticed, whoever calls it."""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import random
import sys
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from descriptions import describe
from families import build
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.identity.code import CodeDescription

Point = collections.namedtuple("Point", "x y")


class Steered(modeling_llama.LlamaMLP):
    """MLP with code for other purposes than passes."""

    def __init__(self, config, path):
        super().__init__(config)
        self.vector = torch.load(path)
        self.created = time.time()

    def forward(self, x):
        return self.steer(super().forward(x))

    def steer(self, x):
        return x * self.scale

    @functools.cached_property
    def scale(self):
        return 1.0

    def dump(self, path):
        with open(path, "w") as file:
            file.write(f"{random.random()} {self.vector}")

    def __repr__(self):
        return f"Steered at {time.time()}"

    def __getstate__(self):
        return {"time": time.time()}


def steered():
    model = build("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.__class__ = Steered
        layer.mlp.vector = torch.ones(64)
    return model


@pytest.fixture(scope="module")
def model():
    return steered()


def test_what_no_pass_runs_is_no_reason(model):
    assert not Fingerprinter(model).look().problem


def test_a_path_that_no_code_reads_is_no_reason():
    model = build("llama", num_hidden_layers=2)
    name = Fingerprinter(model)
    before = name.look().fingerprint
    model.log_dir = model.model.layers[1].mlp.files = {"log": [Path("runs")]}
    assert (name.look().fingerprint, name.look().problem) == (before, "")


def test_a_path_that_code_reads_is_a_reason():
    model = steered()
    model.model.layers[1].mlp.scale = Path("runs")
    assert "layers.1.mlp.scale, which uses pathlib." in Fingerprinter(model).look().problem


@pytest.mark.parametrize("name", ["forward", "steer", "scale", "dump", "__init__", "__repr__"])
def test_an_edit_of_any_method_is_noticed(monkeypatch, model, name):
    """Code can call a method by a name that it computes."""
    identity = Fingerprinter(model)
    before = identity.look().fingerprint
    monkeypatch.setattr(Steered, name, lambda self, *arguments: arguments[0] * 3)
    assert identity.look().fingerprint != before


CALLS = {
    "by name": "self.helper(x)",
    "by text": "getattr(self, 'helper')(x)",
    "by one of several texts": "[getattr(self, name)(x) for name in ('helper',)][0]",
    "by text in its state": "getattr(self, self.method)(x)",
    "by a getter": "GETTER(self)(x)",
    "by another object": "CALLER.call(self, x)",
    "by another class": "Base.call(self, x)",
    "by an operator": "self @ x",
}
SOURCE = """
import operator
FACTOR = 1.0
GETTER = operator.attrgetter('helper')
class Caller:
    def call(self, other, x):
        return other.helper(x)
CALLER = Caller()
class Base:
    def call(self, x):
        return self.helper(x)
class Layer(Base):
    def __init__(self):
        self.method = 'helper'
    def helper(self, x):
        return x * FACTOR
    def __matmul__(self, x):
        return self.helper(x)
    def __call__(self, x):
        return {call}
layer = Layer()
"""


@given(call=st.sampled_from(sorted(CALLS)))
def test_what_a_method_computes_with_is_noticed_however_it_is_called(call):
    namespace = {}
    exec(SOURCE.format(call=CALLS[call]), namespace)

    before = describe(namespace["layer"])
    namespace["FACTOR"] = 3.0
    assert not before.watch.holds()
    assert describe(namespace["layer"]).words != before.words


KEPT = weakref.WeakSet()


def with_a_named_tuple(x):
    return Point(x, 2.0).x * Point._make([x, x]).y


def with_a_signature(x):
    return x * len(inspect.signature(with_a_named_tuple).parameters)


def with_a_hash(x):
    return x * len(hashlib.blake2b(b"text").digest())


def with_weak_references(x):
    return x * len(KEPT)


def with_messages(x):
    try:
        return x * 2
    except ValueError:
        traceback.print_exc()
        print("failed", file=sys.stderr)
        return nn.functional.silu(x)


def with_numpy(x):
    return x * float(np.exp(np.linalg.norm(np.concatenate([np.zeros(2), np.zeros(1)]))))


def with_a_choice_of_attention(x):
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(x, x, x)


ORDINARY = [
    *(with_a_named_tuple, with_a_signature, with_a_hash, with_weak_references, with_messages, with_numpy),
    with_a_choice_of_attention,
]


@pytest.mark.parametrize("function", ORDINARY)
def test_ordinary_code_is_described(function):
    description = CodeDescription()
    description.add("it", function)
    description.finish()
    assert description.words
