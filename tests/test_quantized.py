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


def test_quanto_is_exact_or_runs_plain_with_a_reason(store):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = build("llama")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    for _ in range(2):
        logits, stats = ask(model, store)
        whole = after_prefix(model)
        assert torch.equal(logits, whole) if stats.tokens_restored else stats.reason
        assert torch.allclose(logits, whole, atol=1e-5)
    assert ask(build("llama"), store)[1].tokens_restored == 0
