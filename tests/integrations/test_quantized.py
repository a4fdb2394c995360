"""Models whose weights are quantized by torchao or quanto: exact KV, or a plain pass with a reason."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from hf_tiered_cache import TieredCache


def ask(model, store):
    """Return the logits of a prompt of 70 tokens, and what its cache says."""
    cache = TieredCache(model, store)
    with torch.no_grad():
        logits = model(prompt(70), past_key_values=cache, logits_to_keep=1).logits
    return logits, cache.stats


def after_prefix(model):
    """Return the logits behind a `DynamicCache` of the first 64 tokens."""
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(prompt(70)[:, :64], past_key_values=cache, logits_to_keep=1)
        return model(prompt(70)[:, 64:], past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_restores_every_bit_and_notices_other_weights(store, config):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = build("llama")
    quantization.quantize_(model, getattr(quantization, config)())
    ask(model, store)
    logits, stats = ask(model, store)
    assert torch.equal(logits, after_prefix(model))
    assert stats.tokens_restored == 64
    assert "weights" in ask(build("llama"), store)[1].reason
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.qdata.zero_()
    assert "weights" in ask(model, store)[1].reason


@pytest.mark.parametrize("weights", ["qint8", "qint4", "qfloat8"])
def test_quanto_weights_restore_every_bit_and_are_noticed(store, weights):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = quantized(quanto, weights)
    ask(model, store)
    logits, stats = ask(model, store)
    assert torch.equal(logits, after_prefix(model))
    assert stats.tokens_restored == ask(quantized(quanto, weights), store)[1].tokens_restored == 64
    assert ask(build("llama"), store)[1].tokens_restored == 0
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight._scale.mul_(2)
    assert "weights" in ask(model, store)[1].reason


def test_quanto_activations_run_plain_with_a_reason(store):
    """Hooks of quanto quantize what passes between layers."""
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = quantized(quanto, "qint8", activations=quanto.qint8)
    for _ in range(2):
        logits, stats = ask(model, store)
        assert torch.equal(logits, model(prompt(70)).logits[:, -1:])
        assert stats.tokens_restored == 0
        assert "a hook on" in stats.reason


def quantized(quanto, weights, **options):
    """Return a model that quanto has quantized."""
    model = build("llama")
    quanto.quantize(model, weights=getattr(quanto, weights), **options)
    if options:
        with quanto.Calibration(), torch.no_grad():
            model(prompt(70))
    quanto.freeze(model)
    return model
