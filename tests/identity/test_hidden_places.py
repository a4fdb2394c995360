"""Changes in places that objects of their kind rarely have: slots of tensors, parts of slices, classes of settings."""

from __future__ import annotations

import pytest
import torch
from descriptions import with_activation
from families import build
from torch import nn
from torch.nn import functional

from hf_tiered_cache.identity import Fingerprinter


class Scaled(nn.Parameter):
    __slots__ = ("scale",)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return result * args[1].scale if function is functional.linear else result


def a_slot_of_a_tensor(monkeypatch):
    model = build("llama", num_hidden_layers=2)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = Scaled(layer.weight.detach())
    layer.weight.scale = 1.0
    return model, lambda: setattr(layer.weight, "scale", 3.0)


def a_tensor_in_a_slice(monkeypatch):
    part = slice(torch.ones(()), None)
    return with_activation(lambda x: x * part.start), lambda: part.start.mul_(3)


def an_object_in_a_slice(monkeypatch):
    settings = {"scale": 1.0}
    part = slice(None, settings)
    return with_activation(lambda x: x * part.stop["scale"]), lambda: settings.update(scale=3.0)


def an_attribute_of_a_class_of_transformers(monkeypatch):
    model = build("llama", num_hidden_layers=2)
    return model, lambda: monkeypatch.setattr(type(model.config), "use_bidirectional_attention", True, raising=False)


CASES = [a_slot_of_a_tensor, a_tensor_in_a_slice, an_object_in_a_slice, an_attribute_of_a_class_of_transformers]


@pytest.mark.parametrize("case", CASES)
def test_a_change_in_a_hidden_place_is_noticed(monkeypatch, case):
    model, change = case(monkeypatch)
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem
    change()
    after = name.look()
    assert after.fingerprint != before.fingerprint
