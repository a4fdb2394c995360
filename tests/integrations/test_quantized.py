"""Models with weights that a package has quantized: exact KV, or a plain pass with a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import build, prompt
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache

from hf_tiered_cache import KVStore, TieredCache


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
def test_quanto_weights_restore_every_bit_and_are_noticed(store, monkeypatch, weights):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    # instead of an extension in C++, which it would compile
    monkeypatch.setattr("optimum.quanto.library.extensions.cpp.ext._lib", SimpleNamespace(unpack=unpacked))
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


@pytest.mark.parametrize(
    "config",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ],
)
def test_bitsandbytes_restores_from_the_first_request_of_each_process(tmp_path, config):
    """The first pass converts the weights, and each one keeps the outliers of its inputs."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    build("llama", hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "model")
    with KVStore(tmp_path / "kv") as store:
        for is_later in (False, True):  # loaded twice, as by two processes
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path / "model", quantization_config=BitsAndBytesConfig(**config), device_map="cpu"
            )
            for tokens_restored in (64 * is_later, 64):
                logits, stats = ask(model, store)
                assert stats.tokens_restored == tokens_restored
            assert torch.equal(logits, after_prefix(model))
            for _ in range(20):  # more than a model that changes at every pass may change
                assert ask(model, store)[1].tokens_restored == 64
        layer = model.model.layers[0].self_attn.k_proj
        with torch.no_grad():
            (layer.state.SCB if "load_in_8bit" in config else layer.weight.quant_state.absmax).mul_(2)
        assert "weights" in ask(model, store)[1].reason


def test_hqq_weights_restore_every_bit_in_each_process(store):
    pytest.importorskip("hqq", reason="hqq is not installed")
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    for is_later in (False, True):
        model = build("llama")
        config = BaseQuantizeConfig(nbits=4, group_size=64)
        AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device="cpu")
        model.linear_tags.sort(reverse=is_later)  # in the order of a set of texts, which differs between processes
        for tokens_restored in (64 * is_later, 64):
            logits, stats = ask(model, store)
            assert stats.tokens_restored == tokens_restored
        assert torch.equal(logits, after_prefix(model))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.meta["scale"].mul_(2)
    assert "weights" in ask(model, store)[1].reason


def unpacked(packed, bits):
    """Return numbers of a few bits that are packed into uint8."""
    return torch.cat([(packed >> bits * place) & (2**bits - 1) for place in range(8 // bits)])


def quantized(quanto, weights, **options):
    """Return a model that quanto has quantized."""
    model = build("llama")
    quanto.quantize(model, weights=getattr(quanto, weights), **options)
    if options:
        with quanto.Calibration(), torch.no_grad():
            model(prompt(70))
    quanto.freeze(model)
    return model
