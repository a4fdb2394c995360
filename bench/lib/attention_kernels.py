"""Attention of baselines: the kernel that this library uses for decoded tokens, for any cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_tiered_cache.patches import attention
from hf_tiered_cache.patches.scope import AttentionCall


def attend_folded(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention like `sdpa`, and fold the query heads of a KV head where one token is decoded."""
    call = AttentionCall(query, key, value, mask, kwargs.get("scaling"))
    if attention.can_fold(call, kwargs):
        return attention.attend_folded(call, kwargs), None
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


@contextmanager
def registered(kernel: Callable[..., Any]) -> Iterator[None]:
    """Register `kernel` as `sdpa`."""
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", kernel)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", function)
