"""Methods of transformers and PEFT that passes call without a name in the class itself are described."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import build
from transformers.models.bloom import modeling_bloom
from transformers.models.gemma3n import modeling_gemma3n

from hf_tiered_cache.identity import Fingerprinter, fingerprint


def a_method_that_another_module_calls(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": [32] * 2, "num_hidden_layers": 2, "vocab_size": 160}
    parts = {"vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_kv_shared_layers": 0}
    options = {"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0] * 2}
    config = transformers.Gemma3nTextConfig(**sizes, **parts, **heads, **options)
    model = transformers.Gemma3nForCausalLM(config).eval()
    real = modeling_gemma3n.Gemma3nTextAltUp.predict
    change = lambda self, *arguments: 3 * real(self, *arguments)  # noqa: E731
    return model, lambda: monkeypatch.setattr(modeling_gemma3n.Gemma3nTextAltUp, "predict", change)


def a_method_that_a_registered_function_calls(monkeypatch):
    model = build("qwen3_moe", num_hidden_layers=2)
    experts = type(model.model.layers[0].mlp.experts)
    if not hasattr(experts, "_apply_gate"):
        pytest.skip("this version of transformers has no such method")
    change = lambda self, gate_up: 3 * gate_up.chunk(2, dim=-1)[0]  # noqa: E731
    return model, lambda: monkeypatch.setattr(experts, "_apply_gate", change)


def what_an_autograd_function_computes(monkeypatch):
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=160)
    model = transformers.BloomForCausalLM(config).eval()
    return model, lambda: monkeypatch.setattr(modeling_bloom, "bloom_gelu_forward", torch.relu)


def a_method_of_an_object_of_peft(monkeypatch):
    peft = pytest.importorskip("peft")
    model = build("llama", num_hidden_layers=2)
    config = peft.LoraConfig(target_modules=["k_proj"], use_dora=True, init_lora_weights=False)
    layer = peft.get_peft_model(model, config).eval().base_model.model.model.layers[0].self_attn.k_proj
    kind = type(layer.lora_variant["default"])
    change = staticmethod(lambda module, active_adapter, x, result, **options: 3 * result)
    return model, lambda: monkeypatch.setattr(kind, "forward", change)


CASES = [
    *(a_method_that_another_module_calls, a_method_that_a_registered_function_calls),
    *(what_an_autograd_function_computes, a_method_of_an_object_of_peft),
]


@pytest.mark.parametrize("case", CASES)
def test_a_change_of_a_method_that_passes_call_is_noticed(monkeypatch, case):
    model, change = case(monkeypatch)
    name = Fingerprinter(model)
    before = name.look()
    assert not before.problem and fingerprint(model) == before.fingerprint
    change()
    after = name.look()
    assert after.fingerprint != before.fingerprint
