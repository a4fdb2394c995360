"""Decoded tokens whose query heads are folded: where it happens, and that it changes nothing but rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import build, prompt
from thorough import pairs
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_tiered_cache import TieredCache
from hf_tiered_cache.methods import ContiguousKV, Krul, KVDrive
from hf_tiered_cache.patches import attention
from hf_tiered_cache.patches.scope import AttentionCall

NEW = 5
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
GROUPED = ("llama", "qwen3", "gemma3", "qwen2_sliding")


@pytest.fixture
def folded(monkeypatch):
    """Record the shapes of the queries of each call that folds."""
    shapes: list[torch.Size] = []
    fold = attention.attend_folded

    def noting(call, kwargs):
        shapes.append(call.query.shape)
        return fold(call, kwargs)

    monkeypatch.setattr(attention, "attend_folded", noting)
    return shapes


@pytest.mark.parametrize(("family", "batch"), pairs(GROUPED, [1, 3]))
def test_folding_changes_only_rounding(family, batch, store, folded):
    model, ids = build(family), prompt(90, rows=batch)
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    plain = model.generate(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config), **GREEDY)
    cache = TieredCache(model, store, fold_heads=True)
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert len(folded) == (NEW - 1) * model.config.get_text_config().num_hidden_layers
    assert torch.equal(output.sequences, plain.sequences)
    for a, b in zip(output.logits, plain.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_an_exact_cache_does_not_fold_unless_asked(store, folded):
    model, ids = build("llama"), prompt(90)
    model.generate(ids, past_key_values=TieredCache(model, store), **GREEDY)
    assert not folded


@pytest.mark.parametrize(
    "method",
    [ContiguousKV(budget=0.25, quality=None), KVDrive(budget=0.25, exact_from=1), Krul()],
    ids=["contiguous_kv", "kv_drive", "krul"],
)
def test_caches_with_approximate_kv_fold(method, store, folded):
    model, ids = build("llama"), prompt(300)
    store.precompute(model, ids, method=method, progress=False)
    conversation = "talk" if isinstance(method, Krul) else None
    cache = TieredCache(model, store, method=method, conversation=conversation)
    model.generate(torch.cat([ids, prompt(9, seed=2)], dim=1), past_key_values=cache, **GREEDY)
    assert folded


def test_a_users_own_attention_function_is_called(store):
    model, ids, calls = build("llama"), prompt(90), []
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def own(module, query, *args, **kwargs):
        calls.append(query.shape[2])
        return plain(module, query, *args, **kwargs)

    AttentionInterface.register("sdpa", own)
    try:
        model.generate(ids, past_key_values=TieredCache(model, store, fold_heads=True, tag="own"), **GREEDY)
    finally:
        AttentionInterface.register("sdpa", plain)
    assert calls.count(1) == (NEW - 1) * model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("can_share", [True, False])
def test_query_heads_share_keys_only_where_that_gives_the_same_bits(dtype, can_share, monkeypatch):
    """PyTorch 2.8 computes shared keys with plain arithmetic, whose bits differ."""
    if not can_share:
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors, **options: int(SDPBackend.MATH.value))
    generator, shared_flags = torch.Generator().manual_seed(0), []
    query, keys, values = (torch.randn(2, heads, 70, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    mask = torch.ones(70, 70, dtype=torch.bool).tril()[None, None]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    kernel = torch.nn.functional.scaled_dot_product_attention

    def noting(query, keys, *args, **options):
        shared_flags.append(keys.shape[1] == 2)
        return kernel(query, keys, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    kernel_choice = torch._fused_sdp_choice(query, keys, values, mask, enable_gqa=True)
    output, _ = attention._attend(sdpa_attention_forward, module, AttentionCall(query, keys, values, mask, None), {})
    expected, _ = sdpa_attention_forward(module, query, keys, values, mask)
    assert torch.equal(output, expected)
    assert shared_flags == [kernel_choice != SDPBackend.MATH.value, False]
