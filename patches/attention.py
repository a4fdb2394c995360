"""The registered attention and mask functions: the model's own ones, told where the queries of a plan stand.

A model's attention implementation is exchanged only while a pass of ours runs, and only for those in `WRAPPED`; to
every other pass, also in other threads, the functions here are those they wrap.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .scope import current

WRAPPED = ("sdpa", "eager")
"""Implementations whose masks can say where each query stands."""

_PREFIX = "tiered_"
_exchanging = threading.Lock()


def can_scatter(config: PreTrainedConfig) -> bool:
    """Whether plans other than a suffix can be computed with this model's attention implementation."""
    return config._attn_implementation.removeprefix(_PREFIX) in WRAPPED


@contextmanager
def exchanged(config: PreTrainedConfig) -> Iterator[None]:
    """Let the model's layers call the functions here for the time of a pass."""
    with _exchanging:
        base = config._attn_implementation.removeprefix(_PREFIX)
        users = getattr(config, "_tiered_passes", 0)
        if base in WRAPPED:
            _register(base)
            config._tiered_passes = users + 1
            config._attn_implementation_internal = _PREFIX + base
    try:
        yield
    finally:
        with _exchanging:
            if base in WRAPPED:
                config._tiered_passes -= 1
                if not config._tiered_passes:
                    del config._tiered_passes
                    config._attn_implementation_internal = base


def _register(base: str) -> None:
    name = _PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, functools.partial(attend, base))
        AttentionMaskInterface.register(name, functools.partial(make_mask, base))


def make_mask(base: str, *, mask_function: Callable, **kwargs: Any) -> torch.Tensor | None:
    """The model's own mask, for queries that stand where the plan says.

    `mask_function(batch, head, query, key)` counts queries by column. The base counts them from 0, so it is given a
    function that looks the column up; sliding windows, padding and models' own additions come with it.
    """
    scope = current()
    if scope is not None and scope.positions is not None:
        positions = scope.positions.to(kwargs["device"])
        asked = mask_function

        def mask_function(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return asked(batch, head, positions[query], key)

        kwargs |= {"q_offset": 0, "allow_is_causal_skip": False}
    return ALL_MASK_ATTENTION_FUNCTIONS[base](mask_function=mask_function, **kwargs)


def attend(
    base: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention through the fastest kernel that gives the same bits as the model's own.

    Args:
        query: `[batch, heads, queries, dim]`.
        key: `[batch, kv_heads, columns, dim]`; value likewise.
        attention_mask: as `make_mask` made it.

    Returns:
        `[batch, queries, heads, dim]`, and the attention weights where the base gives them.
    """
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
    if current() is not None and _repeats_for_nothing(module, query, key, attention_mask, kwargs):
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=kwargs.get("dropout", 0.0),
            scale=kwargs.get("scaling"),
            enable_gqa=True,
        )
        return output.transpose(1, 2).contiguous(), None
    return ALL_ATTENTION_FUNCTIONS[base](module, query, key, value, attention_mask, **kwargs)


def _repeats_for_nothing(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether the base would copy keys and values once for each query head, where the kernel can share them.

    On the CPU the kernel gives the same bits either way; with a mask, CUDA's falls back to plain arithmetic.
    """
    return (
        query.device.type == "cpu"
        and mask is not None
        and query.shape[2] > 1
        and getattr(module, "num_key_value_groups", 1) > 1
        and query.shape[1] != key.shape[1]
        and kwargs.get("position_bias") is None
    )
