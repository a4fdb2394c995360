"""Objects are described by all that they hold, whatever they tell `pickle`, or not at all."""

from __future__ import annotations

import collections
import operator
import random
import threading

import pytest
import torch
from families import build, prompt
from torch import nn

from hf_tiered_cache import TieredCache
from hf_tiered_cache.identity import fingerprint
from hf_tiered_cache.identity.code import CodeDescription
from hf_tiered_cache.identity.description import Undescribable


class Reduced:
    """An object that `pickle` makes again by a call."""

    def __init__(self, scale):
        self.scale = scale

    def __reduce__(self):
        return Reduced, (self.scale,)


class Forgetful:
    """An object that tells `pickle` a number."""

    def __init__(self, scale):
        self.scale = scale

    def __getstate__(self):
        return 3


class Slotted:
    """An object with a slot of a private name."""

    __slots__ = ("__scale",)

    def __init__(self, scale):
        self.__scale = scale

    def __getstate__(self):
        return {}


class Number(int):
    """A number."""


class Pair(tuple):
    """Two numbers that tell `pickle` nothing."""

    def __getnewargs__(self):
        return ()


class Names(set):
    """A set."""


class Table(collections.defaultdict):
    """A dictionary."""


class Scaled:
    """An object without attributes of its own."""

    scale = 1.0

    def __call__(self, x):
        return x * self.scale


MAKERS = [
    Reduced,
    Forgetful,
    Slotted,
    Number,
    lambda number: Pair((number, 1)),
    lambda number: Names([number]),
    lambda number: Table([int, float][number - 1]),
    lambda number: collections.deque([1], number),
    operator.itemgetter,
    lambda number: operator.methodcaller("pow", number),
    lambda number: [int | str, int | float][number - 1],
    lambda number: [torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA][number - 1],
]


@pytest.mark.parametrize("make", MAKERS)
def test_objects_that_differ_are_described_by_other_words(make):
    first, equal, second = CodeDescription(), CodeDescription(), CodeDescription()
    for description, number in ((first, 1), (equal, 1), (second, 2)):
        description.add("value", make(number))
    assert first.words == equal.words
    assert first.words != second.words


@pytest.mark.parametrize("make", [threading.Lock, random.Random, torch.Generator, lambda: iter([1])])
def test_objects_with_hidden_state_are_not_described(make):
    description = CodeDescription()
    description.add("value", make())
    with pytest.raises(Undescribable):
        description.finish()


@pytest.mark.parametrize("value", [Scaled(), random.Random(1), operator.itemgetter(0), Forgetful(2)])
def test_a_model_that_holds_any_object_answers(store, value):
    """What is restored is right; a model that cannot be described runs plain, and says why."""
    model = build("llama")
    model.model.layers[1].mlp.extra = value
    with torch.no_grad():
        expected = model(prompt(70)).logits[:, -1]
        for _ in range(2):
            cache = TieredCache(model, store)
            logits = model(prompt(70), past_key_values=cache, logits_to_keep=1).logits[:, -1]
            torch.testing.assert_close(logits, expected)
    assert cache.stats.tokens_restored == 64 or "Random" in cache.stats.reason


def test_an_attribute_that_an_object_without_attributes_gets_is_noticed(store):
    class Rescaled(nn.SiLU):
        def forward(self, x):
            return self.by(super().forward(x))

    model = build("llama")
    activation = model.model.layers[1].mlp.act_fn = Rescaled()
    activation.by = Scaled()
    with torch.no_grad():
        for _ in range(2):
            cache = TieredCache(model, store)
            model(prompt(70), past_key_values=cache, logits_to_keep=1)
        assert cache.stats.tokens_restored == 64
        activation.by.scale = 3.0
        cache = TieredCache(model, store)
        model(prompt(70), past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored == 0


class Unpacked(nn.Linear):
    """A layer that computes with other weights once it was saved, like some of bitsandbytes."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.weight.data = self.weight.data * 2
        super()._save_to_state_dict(destination, prefix, keep_vars)


def test_a_description_saves_no_module_of_other_code():
    model = build("llama")
    model.model.layers[0].mlp.up_proj.__class__ = Unpacked
    with torch.no_grad():
        expected = model(prompt(4)).logits
        name = fingerprint(model)
        assert torch.equal(model(prompt(4)).logits, expected)
    assert fingerprint(model) == name
