"""An attached model runs the methods that its class has at the call, also those patched since."""

from __future__ import annotations

import inspect

import pytest
import torch
from families import build, prompt
from transformers import LlamaForCausalLM

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.patches.attach import attach, detach

IDS = prompt(40)
PLAIN = LlamaForCausalLM.forward


def doubled(self, *args, **kwargs):
    output = PLAIN(self, *args, **kwargs)
    output.logits *= 2
    return output


doubled.__signature__ = inspect.signature(PLAIN)


class Doubled(LlamaForCausalLM):
    forward = doubled


def patch(model, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)


def change_class(model, monkeypatch):
    model.__class__ = Doubled


@pytest.mark.parametrize("change", [patch, change_class])
def test_a_class_that_changes_while_a_model_is_attached_changes_the_model(tmp_path, monkeypatch, change):
    model = build("llama", num_hidden_layers=2)
    with torch.no_grad(), KVStore(tmp_path) as store:
        attach(model)
        before = model(IDS).logits
        change(model, monkeypatch)
        assert torch.equal(model(IDS).logits, 2 * before)
        cache = TieredCache(model, store)
        logits = model(IDS, past_key_values=cache, logits_to_keep=1).logits
        torch.testing.assert_close(logits, 2 * before[:, -1:])
        assert "cannot be identified" not in cache.stats.reason
        detach(model)
        assert torch.equal(model(IDS).logits, 2 * before)
        assert "forward" not in vars(model)
