"""Parts of a model, its argument for a cache, and dropping of hidden states between its layers.

For plans that compute less with depth, see Krul, Section 4.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from .replacement import Replacement
from .rope import picked
from .scope import CACHE_ARGUMENTS, EAGER_STANCE, Scope, current

logger = logging.getLogger("hf_tiered_cache")

_KNOWN_ARGUMENTS = frozenset(
    {
        *("self", "hidden_states", "attention_mask", "position_ids", "position_embeddings", "cache_position"),
        *(*CACHE_ARGUMENTS, "past_key_value", "layer_past", "use_cache", "kwargs", "flash_attn_kwargs"),
        *("output_attentions", "output_router_logits", "head_mask", "layer_head_mask"),
    }
)
"""Arguments of decoder layers that are cut with the hidden states, or do not depend on single tokens."""
PREFILL_CONTINUES_CACHE = Version(transformers.__version__) >= Version("5.23")
"""True if chunked prefill continues from a cache in use; transformers 5.17 passes the whole prompt again."""


def cache_argument(signature: inspect.Signature) -> str:
    """Return the name of the argument in which a method of a model takes its cache.

    Args:
        signature: Signature of the method. If it names no such argument, the name is that of this transformers version.
    """
    names = [*signature.parameters, *inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
    return next(name for name in names if name in CACHE_ARGUMENTS)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside wrappers (PEFT adapters, `torch.compile`).

    Raises:
        UnsupportedModelError: There is none, or it is wrapped in a way that changes what its KV depends on.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(compiled_model := getattr(model, "_orig_mod", None), nn.Module):
        return base_model(compiled_model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            "prompt-learning adapters insert KV of their own before the prompt, which is not part of stored "
            "prefixes; use a LoRA-style adapter or a DynamicCache"
        )
    if callable(get_base := getattr(model, "get_base_model", None)):
        return base_model(get_base())
    part = next((name for name in ("base_model", "model") if name in model._modules), "")
    if part and type(model).__module__.startswith("peft."):  # a `PeftMixedModel`, or a tuner
        return base_model(model.get_submodule(part))
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a transformers model; pass the model that has generate()"
    )


@contextmanager
def restoring_depth(config: PreTrainedConfig) -> Iterator[None]:
    """Restore a configuration's number of layers if the body raises: drafts by the first layers have changed it."""
    depth = config.num_hidden_layers
    try:
        yield
    except BaseException:
        config.num_hidden_layers = depth
        raise


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """Return the model's list of `count` decoder layers. The layers of a vision encoder do not count.

    Raises:
        UnsupportedModelError: It has no such list.
    """
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    for module in modules_in(decoder):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {count} decoder layers; use the exact method with this model"
    )


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules in it, faster than `modules()`. Shared modules come repeatedly."""
    modules = [module]
    while modules:
        yield (module := modules.pop())
        modules.extend(part for part in reversed(module._modules.values()) if part is not None)


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of a function without its decorators, or None if it is not written in Python."""
    return getattr(inspect.unwrap(function), "__code__", None)


def devices_of(model: PreTrainedModel, count: int) -> list[torch.device]:
    """Return the device on which each of `count` layers computes; that of the model if it has no list of layers."""
    devices = []
    try:
        layers = decoder_layers(model, count)
    except UnsupportedModelError:
        return [model.device] * count
    for layer in layers:
        device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
        if device is None:
            parts = (part for module in modules_in(layer) for part in module._parameters.values())
            device = next((part.device for part in parts if part is not None and not part.is_meta), "cpu")
        devices.append(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    return devices


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of a model, or its forward, was compiled by `torch.compile`."""
    modules = list(model.modules())
    forwards = {getattr(type(module), "forward", None) for module in modules}  # a scripted module has none
    forwards.update(module.__dict__["forward"] for module in modules if "forward" in module.__dict__)
    originals = (forward.original if isinstance(forward, Replacement) else forward for forward in forwards)
    return any(hasattr(forward, "_torchdynamo_orig_callable") for forward in originals) or any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in modules
    )


def offloaded(module: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """Return the weights of a module that accelerate moves to the device for each pass, by name, or None."""
    hook = getattr(module, "_hf_hook", None)
    maps = (getattr(candidate, "weights_map", None) for candidate in (hook, *getattr(hook, "hooks", ())))
    return next((weights for weights in maps if weights is not None), None)


def warn_if_inexact(model: PreTrainedModel) -> None:
    """Warn of layers that quantize their inputs by a scale, or by outliers (LLM.int8), of all tokens of a pass."""
    modules = list(model.modules())
    states = (getattr(module, "state", None) for module in modules if _is_of_bitsandbytes(module))
    has_outliers = any(getattr(state, "threshold", 0) > 0 for state in states)
    if has_outliers or any("quantized.dynamic" in type(module).__module__ for module in modules):
        logger.warning(
            "%s has layers that quantize the inputs of all tokens of a pass together, so answers after a restored "
            "prefix may differ from those of one pass over the whole prompt",
            type(model).__name__,
        )


def convert_weights(model: PreTrainedModel) -> None:
    """Run one token if the model has layers of bitsandbytes, which convert their weights in the first pass."""
    if not model.training and any(map(_is_of_bitsandbytes, model.modules())):
        with torch.no_grad(), EAGER_STANCE if is_compiled(model) else nullcontext():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


def _is_of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes.")


def can_drop(model: nn.Module, count: int) -> bool:
    """Return whether the model's layers take no argument for each token that dropping does not cut.

    Raises:
        UnsupportedModelError: It has no list of `count` decoder layers.
    """
    forwards = {type(layer).forward for layer in decoder_layers(model, count)}
    return all(inspect.signature(forward).parameters.keys() <= _KNOWN_ARGUMENTS for forward in forwards)


@contextmanager
def dropping(layers: nn.ModuleList, first: int, scope: Scope) -> Iterator[None]:
    """Keep only the hidden states that `scope` specifies, in its pass from layer `first` on, within this context."""
    handles = [
        layers[i].register_forward_pre_hook(_drop_before(i, scope), with_kwargs=True) for i in range(first, len(layers))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop_before(layer: int, scope: Scope) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Any, ...] | None:
        # passes of other threads over the same layers have their own hooks; they may call a hook that is just being
        # added or removed without keyword arguments
        if kwargs is None or current() is not scope:
            return None
        if layer == scope.preview_layer and has_no_side_effects(module):
            preview_args, preview_kwargs = with_copied_states(*_narrowed_arguments(scope, layer, args, kwargs))
            scope.preview(layer, lambda: module.forward(*preview_args, **preview_kwargs))
        return _narrowed_arguments(scope, layer, args, kwargs)

    return hook


def _narrowed_arguments(
    scope: Scope, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments for the hidden states that it keeps."""
    if layer not in scope.query_indexes:
        return args, kwargs
    indexes = scope.query_indexes[layer]
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if layer in scope.hidden_indexes:
        hidden_states = picked(hidden_states, scope.hidden_indexes[layer], 1)
    # the other arguments are made once, for the first layer's queries, and passed to every layer
    narrowed_kwargs = dict(kwargs)
    dims = {"position_ids": 1, "position_embeddings": 1}  # some models pass cos and sin as one complex tensor
    if not scope.recompute_lengths:  # otherwise the mask covers the suffix alone
        dims["attention_mask"] = 2
    for name, dim in dims.items():
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and (dim == 1 or value.ndim == 4):
            narrowed_kwargs[name] = picked(value, indexes, dim)
            if name == "attention_mask":
                scope.masks.append(weakref.ref(narrowed_kwargs[name]))
        elif name == "position_embeddings" and value is not None:
            narrowed_kwargs[name] = scope.tap.pick(value, indexes)
    if args:
        return (hidden_states, *args[1:]), narrowed_kwargs
    return args, narrowed_kwargs | {"hidden_states": hidden_states}


def has_no_side_effects(layer: nn.Module) -> bool:
    """Return whether running the layer has no side effects: no hooks inside, no replaced forward, nothing random.

    The layer's own hooks do not count. Hooks of accelerate, which load offloaded weights, replace the forward.
    """
    if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
        return False
    return not any(
        module.training
        or "forward" in module.__dict__
        or (module is not layer and (module._forward_pre_hooks or module._forward_hooks))
        for module in modules_in(layer)
    )


def with_copied_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with a copy of the hidden states, in case the layer writes to them."""
    if args:
        return (args[0].clone(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].clone()}
