"""Attention and masks: transformers' functions, given the positions of a plan's queries.

While a model is attached, `sdpa` and the masks of `WRAPPED` are wrapped in transformers' registries under their own
names, since modeling code looks them up by name. The function of eager attention is wrapped in the modeling code, which
has one of its own. In passes without one of our caches, also in other threads, the wrappers only call the original
functions.
"""

from __future__ import annotations

import dis
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers import code_of, decoder_layers, modules_in
from .replacement import Patch, Replacement
from .rope import on
from .scope import AttentionCall, Scope, current

WRAPPED = ("sdpa", "eager")
"""Implementations with masks that accept the position of each query, and that `attend` can stand for."""

_EAGER = "eager_attention_forward"
_EAGER_NAMES = frozenset(
    {
        *("torch", "nn", "functional", "F", "maybe_autocast", "device", "training", "dropout"),
        *("matmul", "softmax", "tanh", "logsumexp", "sigmoid", "max", "values", "sinks", "cat"),
        *("repeat_kv", "num_key_value_groups", "head_dim", "size", "shape", "transpose", "reshape", "expand", "view"),
        *("unsqueeze", "contiguous", "to", "type", "dtype", "float", "float32"),
    }
)
"""Names in eager attention that treats all keys alike, whatever their index: logits, sinks, softcaps and a softmax."""
_HARMLESS = frozenset({"position_ids", "s_aux"})
"""Names of tensors that the attention function gets, and on which a key's logits do not depend: s_aux holds sinks."""
_PLAIN: int = SDPBackend.MATH.value  # PyTorch's number of attention that no fused kernel computes


def can_select(model: PreTrainedModel) -> bool:
    """Return whether queries can be observed and can select with the model's attention implementation."""
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    return implementation == "sdpa" or (implementation == "eager" and all(map(_is_known, _attention_classes(model))))


def _is_known(kind: Any) -> bool:
    """Return whether the eager attention of a class consists of known operations."""
    function = _globals_of(kind).get(_EAGER)
    code = None if function is None else code_of(function)
    return code is not None and _EAGER_NAMES.issuperset(code.co_names)


def _globals_of(kind: Any) -> dict[str, Any]:
    """Return the global variables among which a class finds its eager attention, or {} if it looks for none."""
    function: Any = getattr(kind, "forward", None)  # a scripted module's class has none
    forward = inspect.unwrap(function)
    code = getattr(forward, "__code__", None)
    names = {"ALL_ATTENTION_FUNCTIONS", _EAGER}
    return forward.__globals__ if code is not None and names.issubset(code.co_names) else {}


def shows_queries(model: PreTrainedModel, cache_layers: Sequence[Any] = ()) -> bool:
    """Return whether the model attends through the registered functions, to the keys that it passes to its cache.

    Latent attention (MLA) caches what keys are computed from. Some layers attend to the keys of an earlier layer. The
    layers of a cache for this model show which ones; without them, a cache is made.
    """
    config = model.config.get_text_config(decoder=True)
    cache_layers = cache_layers or DynamicCache(config=config).layers
    num_caching = sum(isinstance(layer, CacheLayerMixin) for layer in cache_layers)
    if getattr(config, "kv_lora_rank", None) or num_caching < config.num_hidden_layers:
        return False
    names = {kind.__module__ for kind in _attention_classes(model)}
    return all(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in names)


def passes_mask_on(model: PreTrainedModel) -> bool:
    """Return whether the model makes no mask in its attention, but passes on what `make_mask` returned."""
    kinds = _attention_classes(model)
    return bool(kinds) and all(_passes_mask_on(kind.forward) for kind in kinds)


@cache
def _passes_mask_on(forward: Callable[..., Any]) -> bool:
    if (code := code_of(forward)) is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return False
    names = {name for name in (*code.co_varnames, *code.co_names) if "mask" in name}
    stores = (str(step.argval) for step in dis.get_instructions(code) if step.opname.startswith("STORE_FAST"))
    return names == {"attention_mask"} and not any("attention_mask" in store for store in stores)


def _attention_classes(model: PreTrainedModel) -> set[Any]:
    layers = decoder_layers(model, model.config.get_text_config(decoder=True).num_hidden_layers)
    return {kind for kind in map(type, modules_in(layers)) if "Attention" in kind.__name__}


def can_scatter(config: PreTrainedConfig) -> bool:
    """Return whether plans other than a suffix can be computed with the model's attention implementation."""
    return config._attn_implementation in WRAPPED


class _Scoped(Replacement):
    """Registered function, with its replacement within passes with one of our caches."""

    def __init__(self, replacement: Callable[..., Any], function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.replacement = replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope = None if torch.compiler.is_compiling() else current()
        if scope is None:
            return self.original(*args, **kwargs)
        return self.replacement(scope, self.original, *args, **kwargs)


def make_mask(
    scope: Scope, base: Callable[..., Any], *args: Any, mask_function: Callable[..., Any], **kwargs: Any
) -> torch.Tensor | None:
    """Return the model's own mask for queries at the positions of the plan.

    `mask_function(batch, head, query, key)` expects query positions. The base counts queries from 0, so it gets a
    function that looks the position up; sliding windows, padding and additions of the model are included.
    """
    if scope.positions is not None:
        positions = on(kwargs["device"], scope.positions)  # [queries] or [batch, queries]
        model_mask = mask_function

        def mask_function(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return model_mask(batch, head, positions[query] if positions.ndim == 1 else positions[batch, query], key)

        kwargs |= {"q_offset": 0, "allow_is_causal_skip": False}
        if scope.recompute_lengths:
            kwargs["q_length"] = len(positions)
    mask: torch.Tensor | None = base(*args, mask_function=mask_function, **kwargs)
    if mask is not None:
        scope.masks.append(weakref.ref(mask))
    return mask


def attend(
    scope: Scope,
    base: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    is_eager: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with the fastest kernel that gives the same bits as the model's own, `base`.

    The query is `[batch, heads, queries, dim]`. Key and value are `[batch, kv_heads, positions, dim]`: only computed
    positions, if the pass attends to a part of what it restores. The mask is the result of `make_mask`.

    Returns:
        `[batch, queries, heads, dim]`, and the attention weights if the base returns them.
    """
    call = AttentionCall(query, key, value, attention_mask, kwargs.get("scaling"))
    if scope.selects or scope.observer is not None:
        call = call._replace(is_plain=_is_plain(scope, attention_mask, kwargs, is_eager))
        if is_eager:
            call = call._replace(softcap=kwargs.get("softcap"), sinks=getattr(module, "sinks", None))
    if scope.observer is not None and call.is_plain:
        scope.observer.observe(module.layer_idx, query, call.scaling)
    if scope.selects:
        attended = scope.attend(module.layer_idx, call)
        if isinstance(attended, torch.Tensor):
            return attended.transpose(1, 2).contiguous(), None
        call = attended
    if scope.recompute_lengths and (length := scope.recompute_lengths[module.layer_idx]):
        # the recomputed prefix sees only itself: no prompt-sized mask, and no computation of hidden weights
        mask = scope.recompute_mask(module.layer_idx, query.device)
        keys, values = (tensor[:, :, :length] for tensor in (call.keys, call.values))
        prefix = AttentionCall(query[:, :, :length], keys, values, mask, call.scaling)
        suffix = call._replace(query=query[:, :, length:])
        return torch.cat([_attend(base, module, part, kwargs)[0] for part in (prefix, suffix)], dim=1), None
    if scope.folds and base is sdpa_attention_forward and can_fold(call, kwargs):
        return attend_folded(call, kwargs), None
    return _attend(base, module, call, kwargs)


def without_first(mask: torch.Tensor | None, hidden: torch.Tensor, width: int) -> torch.Tensor:
    """Return a mask of `width` positions that also hides the first positions of each row.

    Args:
        mask: `[batch or 1, heads or 1, queries, positions]`, bool, or added to the logits; at least as wide. None for a
            single query that sees all positions.
        hidden: Number of positions to hide of each row, int64 `[batch]`.
        width: Number of positions.
    """
    visible = torch.arange(width, device=hidden.device) >= hidden[:, None, None, None]  # bool [batch, 1, 1, width]
    if mask is None:
        return visible
    mask = mask[..., -width:]
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


def can_fold(call: AttentionCall, kwargs: dict[str, Any]) -> bool:
    """Return whether one token attends with several query heads per KV head, and with the same mask for all heads."""
    is_grouped = call.query.shape[2] == 1 and call.query.shape[1] > call.keys.shape[1]
    is_plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    return is_grouped and is_plain and (call.mask is None or call.mask.shape[1] == 1)


def attend_folded(call: AttentionCall, kwargs: dict[str, Any]) -> torch.Tensor:
    """Compute the attention of one token, with the query heads of each KV head as rows of one matrix.

    Each key and value is then read once, not once per query head.

    Returns:
        `[batch, 1, heads, dim]`.
    """
    query, keys, values, mask, scaling, *_ = call
    folded_query = query.reshape(len(query), keys.shape[1], -1, query.shape[3])  # [batch, kv_heads, group, dim]
    output = torch.nn.functional.scaled_dot_product_attention(
        folded_query, keys, values, mask, kwargs.get("dropout", 0.0), scale=scaling
    )
    return output.reshape(len(query), 1, query.shape[1], values.shape[3])


def _attend(
    base: Callable[..., Any], module: Any, call: AttentionCall, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of some queries. See `attend`.

    The function of transformers repeats keys and values for each query head, although the kernel can share them. On the
    CPU, the fused kernel gives the same bits either way. PyTorch 2.8's cannot share them, nor CUDA's with a mask: they
    would fall back to plain arithmetic, with other bits.
    """
    query, keys, values, mask, scaling, *_ = call
    dropout = kwargs.get("dropout", 0.0)
    if (
        base is sdpa_attention_forward  # and no function that a user registered in its place
        and query.device.type == "cpu"
        and mask is not None
        and query.shape[2] > 1
        and getattr(module, "num_key_value_groups", 1) > 1
        and query.shape[1] != keys.shape[1]
        and kwargs.get("position_bias") is None
        and torch._fused_sdp_choice(query, keys, values, mask, dropout, scale=scaling, enable_gqa=True) != _PLAIN
    ):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, mask, dropout, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None
    return base(module, query, keys, values, mask, **kwargs)


def _is_plain(scope: Scope, mask: torch.Tensor | None, kwargs: dict[str, Any], is_eager: bool) -> bool:
    """Return whether logits depend only on queries, keys, and what a mask of `make_mask` hides.

    accelerate copies masks to the devices of the layers. Eager attention adds its mask, so it has one in any case.
    """
    if mask is None:
        is_made = not is_eager
    else:
        is_made = any(
            mask is made or (mask.device != made.device and (mask.shape, mask.dtype) == (made.shape, made.dtype))
            for made in (reference() for reference in scope.masks)
            if made is not None
        )
    return is_made and not any(isinstance(kwargs[name], torch.Tensor) for name in kwargs.keys() - _HARMLESS)


def patches_of(model: PreTrainedModel) -> list[Patch]:
    """Return patches of the registered functions, and of the eager attention of the model's classes."""
    eager = {id(found): found for kind in map(type, model.modules()) if (found := _globals_of(kind)).get(_EAGER)}
    return [
        *_REGISTERED,
        *(
            Patch(
                partial(names.__getitem__, _EAGER),
                partial(names.__setitem__, _EAGER),
                partial(_Scoped, cast(Callable[..., Any], partial(attend, is_eager=True))),
            )
            for names in eager.values()
        ),
    ]


_REGISTERED = tuple(
    Patch(
        partial(functions.__getitem__, name),
        partial(registry.register, name),
        partial(_Scoped, cast(Callable[..., Any], replacement)),
    )
    for registry, functions, name, replacement in (
        (AttentionInterface, ALL_ATTENTION_FUNCTIONS, "sdpa", attend),
        *((AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS, name, make_mask) for name in WRAPPED),
    )
)
