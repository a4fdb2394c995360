"""Where what a token computes depends on later tokens, no prefix is reused: for all causal models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import prompt
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_tiered_cache import KVStore, TieredCache, reasons
from hf_tiered_cache.errors import TieredCacheError

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, "num_experts_per_tok": 2, "initializer_range": 0.3},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True},
}
"""Small values of settings that many configurations have. Large weights make the attention depend on its tokens."""
MOST_PARAMETERS = 60_000_000
ORDINARY = [
    ("doge", {}),
    ("doge", {"is_moe": True}),
    ("bert", {}),
    ("bert", {"is_decoder": False}),
    ("gpt2", {}),
    ("bart", {}),
]
BROKEN = (TypeError,) if transformers.__version__.startswith("5.17.") else ()
"""Errors of kinds that cannot compute: Doge's mixture of experts takes transformers 5.18 and later."""
ALL = [(kind, {}) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def tiny(kind: str, changes: dict[str, Any]) -> PreTrainedModel:
    """Build a small model of a kind with random weights. Skip the test if the sizes do not fit an unusual kind."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    torch.manual_seed(0)
    try:
        config_class = CONFIG_MAPPING[kind]
        default = config_class()
        config = config_class(**{name: value for name, value in SIZES.items() if hasattr(default, name)} | changes)
        model_class = getattr(transformers, names if isinstance(names, str) else names[0])
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
        assert num_parameters < MOST_PARAMETERS, "it is too large"
        model = model_class(config).eval()
        model(input_ids=prompt(8), use_cache=False)
    except Exception as error:
        if (kind, changes) in ORDINARY and not isinstance(error, BROKEN):
            raise
        pytest.skip(f"no small {kind} can be built: {error!r}"[:200])
    return model


@pytest.mark.parametrize(
    ("kind", "changes"), [*ORDINARY, *(pytest.param(*case, marks=pytest.mark.thorough) for case in ALL)]
)
@torch.no_grad()
def test_no_prefix_is_reused_where_tokens_depend_on_later_ones(kind, changes, tmp_path):
    model, first = tiny(kind, changes), prompt(80)
    second = torch.cat([first[:, :64], prompt(16, seed=2)], dim=1)
    beginnings = [model(input_ids=ids, use_cache=False).logits[:, :64] for ids in (first, second)]
    looks_ahead = not torch.allclose(*beginnings, atol=1e-3 * float(beginnings[0].abs().max()))
    try:
        with KVStore(tmp_path, engine="posix") as store:
            for ids in (first, second):
                cache = TieredCache(model, store)
                options = {"do_sample": False, "max_new_tokens": 2, "pad_token_id": 0}
                model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
                store.flush()
    except TieredCacheError:  # refused
        return
    if looks_ahead:
        assert cache.stats.tokens_restored == 0
        assert kind != "doge" or cache.stats.reason == reasons.LOOKS_AHEAD
    elif not cache.stats.reason:
        assert cache.stats.tokens_restored == 64


@torch.no_grad()
def test_a_decoder_that_can_attend_to_an_encoder_reuses_prefixes_without_one(tmp_path):
    model, ids, with_states = tiny("bart", {}), prompt(80), {"encoder_hidden_states": torch.randn(1, 8, 64)}
    with KVStore(tmp_path, engine="posix") as store:
        for kwargs, tokens_restored in ((with_states, 0), ({}, 0), ({}, 79), (with_states, 0)):
            cache = TieredCache(model, store)
            logits = model(ids, past_key_values=cache, logits_to_keep=1, **kwargs).logits
            assert cache.stats.tokens_restored == tokens_restored
            expected = model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1, **kwargs).logits
            torch.testing.assert_close(logits, expected)
            store.flush()
