"""Tiny models of every family, built from configs: random weights, real architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

VOCABULARY = 160
ROUNDS_MORE = torch.__version__.startswith("2.8.")
"""True for PyTorch 2.8: its attention on the CPU rounds float64 like float32, and otherwise after earlier tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
"""Chat template for the reference model's tokenizer, which has none."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

_DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def _spec(model: str, config: str, **changes: Any) -> tuple[str, str, dict[str, Any]]:
    return model, config, changes


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": _spec("LlamaForCausalLM", "LlamaConfig"),
    "mistral": _spec("MistralForCausalLM", "MistralConfig", sliding_window=40),
    "qwen2": _spec("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen2_sliding": _spec(
        "Qwen2ForCausalLM", "Qwen2Config", use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen3": _spec("Qwen3ForCausalLM", "Qwen3Config", head_dim=16),
    "qwen3_moe": _spec(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "phi3": _spec("Phi3ForCausalLM", "Phi3Config", sliding_window=None),
    "gemma2": _spec("Gemma2ForCausalLM", "Gemma2Config", head_dim=16, sliding_window=40),
    "gemma3": _spec("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=16, sliding_window=40, sliding_window_pattern=2),
    "gpt_oss": _spec(
        "GptOssForCausalLM",
        "GptOssConfig",
        head_dim=16,
        sliding_window=40,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "olmo2": _spec("Olmo2ForCausalLM", "Olmo2Config"),
    "granite": _spec("GraniteForCausalLM", "GraniteConfig"),
    "smollm3": _spec("SmolLM3ForCausalLM", "SmolLM3Config", no_rope_layer_interval=2),
    "cohere": _spec("CohereForCausalLM", "CohereConfig"),
    "glm4": _spec("Glm4ForCausalLM", "Glm4Config", head_dim=16, partial_rotary_factor=0.5),
    "stablelm": _spec("StableLmForCausalLM", "StableLmConfig", partial_rotary_factor=0.25),
    "phi": _spec("PhiForCausalLM", "PhiConfig", partial_rotary_factor=0.5),
    "gpt_neox": _spec("GPTNeoXForCausalLM", "GPTNeoXConfig", rotary_pct=0.25),
    "starcoder2": _spec("Starcoder2ForCausalLM", "Starcoder2Config", sliding_window=40),
    "opt": _spec("OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=True),
    "deepseek_v3": _spec("DeepseekV3ForCausalLM", "DeepseekV3Config", **_DEEPSEEK),
    # its layers get cos and sin as one complex tensor
    "deepseek_v2": _spec("DeepseekV2ForCausalLM", "DeepseekV2Config", **_DEEPSEEK),
    "falcon": _spec("FalconForCausalLM", "FalconConfig"),  # its code asks for the attention implementation by name
}


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a tiny model with random weights, in eval mode: of two layers, if the family needs no more."""
    model, config, family_changes = FAMILIES[family]
    return build_class(model, config, dtype, seed, **family_changes | changes)


def build_class(
    model: str, config: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Build a tiny model of these classes of transformers as `build` does, for models that one test needs."""
    arguments = _COMMON | changes
    if config == "OPTConfig":
        arguments.pop("intermediate_size")
        arguments.pop("num_key_value_heads")
    torch.manual_seed(seed)
    built: PreTrainedModel = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    return built.to(dtype).eval()


_DEEP = {
    "gemma3": {"sliding_window_pattern": 3},
    "qwen2_sliding": {"max_window_layers": 2},
    "smollm3": {"no_rope_layer_interval": 3},
}
"""Kinds of layers that take turns as in the pretrained models, where there are enough layers."""


def build_deep(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Build a model with six layers, for tests of layers that share KV or a selection."""
    return build(family, dtype, **({"num_hidden_layers": 6} | _DEEP.get(family, {}) | changes))


def build_eager(family: str) -> PreTrainedModel:
    """Build a model with eager attention, no windows, and a softcap or sinks that matter, if it has any."""
    kinds = {"layer_types": ["full_attention", "full_attention"]} if family in ("gemma2", "gpt_oss") else {}
    softcap = {"attn_logit_softcapping": 0.3} if family == "gemma2" else {}
    model = build(family, attn_implementation="eager", initializer_range=0.1, **kinds, **softcap)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(1, 4, len(parameter)))
    return model


def attend_by_another_name(model: PreTrainedModel) -> None:
    """Let a model attend by a function that a user has registered under a name of its own."""
    AttentionInterface.register("of_a_user", sdpa_attention_forward)
    AttentionMaskInterface.register("of_a_user", sdpa_mask)
    model.set_attn_implementation("of_a_user")


def longrope(original_length: int) -> dict[str, Any]:
    """Return RoPE parameters with other frequencies in prompts beyond this length."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
        "original_max_position_embeddings": original_length,
    }


def with_key_biases(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """Set the biases of a model's key projections, in place, to random numbers of this standard deviation."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(torch.randn(bias.shape, generator=generator) * size)
    return model


def prompt(tokens: int, seed: int = 1, rows: int = 1) -> torch.Tensor:
    """Draw random token ids without padding, int64 `[rows, tokens]`."""
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
