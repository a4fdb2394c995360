"""Hooks of accelerate that cast weights or replace them are part of the fingerprint, those that move them are not."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, hooks
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from families import build

from hf_tiered_cache.identity import Fingerprinter, fingerprint


def hooked(hook):
    """Build a model with a hook on one layer of its MLP."""
    model = build("llama", torch.bfloat16, num_hidden_layers=2)
    add_hook_to_module(model.model.layers[0].mlp.up_proj, hook)
    return model


def casting_hook(dtype):
    """Create a hook that casts weights to a dtype. Skip the test if accelerate has none."""
    if not hasattr(hooks, "LayerwiseCastingHook"):
        pytest.skip("accelerate before 1.7 has no LayerwiseCastingHook")
    return hooks.LayerwiseCastingHook(torch.bfloat16, dtype, non_blocking=False)


def test_the_dtype_that_a_hook_casts_to_counts():
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
    names = [fingerprint(hooked(casting_hook(dtype))) for dtype in dtypes]
    assert names[0] == names[1] != names[2]


def test_an_edited_dtype_of_a_hook_is_noticed():
    hook = casting_hook(torch.bfloat16)
    name = Fingerprinter(hooked(hook))
    before = name.look()
    hook.compute_dtype = torch.float32
    assert not before.problem and name.look().fingerprint != before.fingerprint


def test_a_hook_that_moves_tensors_does_not_count():
    hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    assert fingerprint(hooked(hook)) == fingerprint(build("llama", torch.bfloat16, num_hidden_layers=2))


def another_tensor(weights):
    weights.dataset["model.layers.0.mlp.up_proj.weight"] = weights["weight"] * 3


def another_mapping(weights):
    weights.dataset = {"model.layers.0.mlp.up_proj.weight": weights["weight"] * 3}


def another_prefix(weights):
    weights.prefix = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize("change", [another_tensor, another_mapping, another_prefix])
def test_offloaded_weights_that_are_replaced_count(change):
    model = build("llama", num_hidden_layers=2)
    cpu_offload(model, execution_device="cpu")
    name = Fingerprinter(model)
    before = name()
    change(model.model.layers[0].mlp.up_proj._hf_hook.weights_map)
    assert name() == fingerprint(model) != before


def test_another_map_of_offloaded_weights_counts():
    """PEFT makes one when it merges an adapter."""
    model = build("llama", num_hidden_layers=2)
    cpu_offload(model, execution_device="cpu")
    name, hook = Fingerprinter(model), model.model.layers[0].mlp.up_proj._hf_hook
    before = name()
    hook.weights_map = {"weight": hook.weights_map["weight"] * 3}
    assert name() == fingerprint(model) != before
