"""Tiny models of all causal LMs that the installed transformers has, from the names of their settings.

Nothing here knows how an architecture computes.
"""

from __future__ import annotations

from typing import Any

import torch
from families import VOCABULARY
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

ARCHITECTURES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig]]] = {
    models[-1].__name__: (models[-1], config)
    for config, models in (
        (config, found if isinstance(found, tuple) else (found,))
        for config, found in sorted(MODEL_FOR_CAUSAL_LM_MAPPING.items(), key=lambda item: item[0].__name__)
    )
}
"""Class of the model and its configuration, by the name of the former."""

_SIZES: dict[str, Any] = {
    # tokens
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 1024),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size"), 40),
    # layers
    **dict.fromkeys(("n_input_layers", "n_output_layers"), 1),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "mamba_head_dim"), 16),
    **dict.fromkeys(("index_n_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_num_key_heads": 2,
    "index_topk": 16,
    "rotary_dim": 8,
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("rnn_width", "lru_width", "attention_hidden_size", "attention_out_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim", "n_inner"), 96),
    **dict.fromkeys(("dim_feedforward", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_hidden_size"), 96),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group"), 2),
    **dict.fromkeys(("topk_group", "moe_topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "expert_intermediate_size"), 32),
    # recurrent layers
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
}
"""Values of settings, by the names that configurations have for them."""
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SPECIAL: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "MinistralForCausalLM": {"head_dim": 16},
    "MllamaForCausalLM": {"cross_attention_layers": [1]},
    "MptForCausalLM": {"use_cache": True},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
_MOST_PARAMETERS = 60_000_000


class TooSpecialError(Exception):
    """Architecture that transformers cannot build at these sizes."""


def build_architecture(name: str) -> PreTrainedModel:
    """Build a tiny model with random weights, whose predictions depend on all of the prompt, in eval mode.

    Raises:
        TooSpecialError: It cannot be built.
    """
    kind, config_kind = ARCHITECTURES[name]
    try:
        config = _tiny(name, config_kind)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind(config).parameters())
        if size > _MOST_PARAMETERS:
            raise TooSpecialError(f"{name} has {size} parameters")
        torch.manual_seed(0)
        model = kind(_tiny(name, config_kind)).eval()
    except TooSpecialError:
        raise
    except Exception as error:
        raise TooSpecialError(f"{name} cannot be built: {error}") from error
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.std() < 0.05:  # the usual initialization gives almost uniform attention
                weight.mul_(2.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def _tiny(name: str, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    whole = kind()
    text = whole.get_text_config(decoder=True)
    defaults = text.to_dict()
    if type(text) is kind:  # without the settings of an encoder, and with other names of the decoder's
        defaults = whole.to_dict() | defaults
    sizes = {key: size for key, size in _SIZES.items() if key in defaults}
    for key in ("head_dim", "sliding_window"):
        if defaults.get(key) is None:
            sizes.pop(key, None)
    if defaults.get("num_key_value_heads") == defaults.get("num_attention_heads"):
        sizes["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in defaults:  # the head dimension that the rotation has
        sizes |= {key: size for key, size in {"head_dim": 8, "num_key_value_heads": 4}.items() if key in sizes}
    if "is_decoder" in defaults:
        sizes["is_decoder"] = True
    if not defaults.get("hidden_size_per_layer_input"):
        sizes.pop("hidden_size_per_layer_input", None)
    return type(text)(**sizes | _SPECIAL.get(name, {}))
