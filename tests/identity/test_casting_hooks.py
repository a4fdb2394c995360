"""Hooks of accelerate that cast weights for each pass are part of the fingerprint, those that move them are not."""

from __future__ import annotations

import torch
from accelerate.hooks import AlignDevicesHook, LayerwiseCastingHook, add_hook_to_module
from families import build

from hf_tiered_cache.identity import Fingerprinter, fingerprint


def hooked(hook):
    """Build a model with a hook on one layer of its MLP."""
    model = build("llama", torch.bfloat16, num_hidden_layers=2)
    add_hook_to_module(model.model.layers[0].mlp.up_proj, hook)
    return model


def test_the_dtype_that_a_hook_casts_to_counts():
    names = [
        fingerprint(hooked(LayerwiseCastingHook(torch.bfloat16, dtype, non_blocking=False)))
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    ]
    assert names[0] == names[1] != names[2]


def test_an_edited_dtype_of_a_hook_is_noticed():
    hook = LayerwiseCastingHook(torch.bfloat16, torch.bfloat16, non_blocking=False)
    name = Fingerprinter(hooked(hook))
    before = name.look()
    hook.compute_dtype = torch.float32
    assert not before.problem and name.look().fingerprint != before.fingerprint


def test_a_hook_that_moves_tensors_does_not_count():
    hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    assert fingerprint(hooked(hook)) == fingerprint(build("llama", torch.bfloat16, num_hidden_layers=2))
