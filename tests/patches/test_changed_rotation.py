"""Rotations that other code changes: keys are then stored as the model has them, and restored right."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt
from torch import nn
from transformers.models.llama import modeling_llama

from hf_tiered_cache import KVStore, TieredCache, attach, detach
from hf_tiered_cache.patches.tap import RotaryTap


class InPlace(nn.Module):
    """Module that changes the tables of another one in place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        cos, sin = self.inner(*args, **kwargs)
        cos *= 1.2
        return cos, sin


def wrap(model, monkeypatch):
    model.model.rotary_emb = InPlace(model.model.rotary_emb)


def hook(model, monkeypatch):
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, tables: (tables[0] * 1.2, tables[1]), prepend=True
    )


def hook_in_place(model, monkeypatch):
    def scale(module, args, tables):
        tables[1].mul_(1.2)

    model.model.rotary_emb.register_forward_hook(scale)


def double_positions(model, monkeypatch):
    change_positions(model, lambda positions: positions * 2)


def double_positions_in_place(model, monkeypatch):
    change_positions(model, lambda positions: positions.mul_(2))


def shift_positions(model, monkeypatch):
    change_positions(model, lambda positions: positions + 9)


def group_late_positions(model, monkeypatch):
    change_positions(model, lambda positions: torch.where(positions < 50, positions, 50 + (positions - 50) // 2))


def change_positions(model, change):
    def changed(module, args, kwargs):
        return args, kwargs | {"position_ids": change(kwargs["position_ids"])}

    model.model.rotary_emb.register_forward_pre_hook(changed, with_kwargs=True)


def scale_keys(model, monkeypatch):
    change_keys(monkeypatch, lambda keys: keys.mul_(1.2))


def zero_one(model, monkeypatch):
    change_keys(monkeypatch, lambda keys: keys[..., 0].zero_())


def change_keys(monkeypatch, change):
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotated(*args, **kwargs):
        queries, keys = rotate(*args, **kwargs)
        change(keys)
        return queries, keys

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)


def unchanged(model, monkeypatch):
    """Change nothing."""


POSITIONS = [double_positions, double_positions_in_place, shift_positions, group_late_positions]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [unchanged, wrap, hook, hook_in_place, *POSITIONS, scale_keys, zero_one])
def test_keys_of_a_changed_rotation_are_restored_right(change, mode, tmp_path, monkeypatch):
    model, ids, taps, take = build("llama", torch.float64, initializer_range=0.3), prompt(60), [], RotaryTap.take
    attach(model)
    monkeypatch.setattr(RotaryTap, "take", lambda *args: taps.append(take(*args)) or taps[-1])
    with monkeypatch.context() as patches, KVStore(tmp_path, spot_checks=0.0) as store, mode():
        change(model, patches)
        expected = model(ids, logits_to_keep=1).logits
        for tokens_restored in (0, 48):
            cache = TieredCache(model, store, tag="changed")
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
            assert cache.stats.tokens_restored == tokens_restored, cache.stats.reason
            del cache
            store.flush()
    assert {kv.position_independent for kv in taps} == {change is unchanged}
    detach(model)
