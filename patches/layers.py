"""Dropping hidden states between layers, where a plan computes fewer columns with depth (Krul, Section 4)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..errors import UnsupportedModelError
from .rotary import RotaryTap
from .scope import Scope, current, picked

_TAKEN = frozenset(
    {
        *("self", "hidden_states", "attention_mask", "position_ids", "position_embeddings", "cache_position"),
        *("past_key_values", "past_key_value", "layer_past", "use_cache", "kwargs", "flash_attn_kwargs"),
        *("output_attentions", "output_router_logits", "head_mask", "layer_head_mask"),
    }
)
"""Arguments of decoder layers that are cut with the hidden states, or say nothing of single tokens."""


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The model's list of `count` decoder layers.

    Raises:
        UnsupportedModelError: it has no such list.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers")


def can_drop(model: nn.Module, count: int) -> bool:
    """Whether the model's layers are given nothing of each token that dropping leaves as it is.

    Raises:
        UnsupportedModelError: it has no list of `count` decoder layers.
    """
    forwards = {type(layer).forward for layer in decoder_layers(model, count)}
    return all(inspect.signature(forward).parameters.keys() <= _TAKEN for forward in forwards)


class Stopped(Exception):
    """A pass has got as far as it was to."""


@contextmanager
def stopping(layers: nn.ModuleList, before: int) -> Iterator[None]:
    """Within this, a pass of this thread ends with `Stopped` before it comes to layer `before`."""
    scope = current()

    def stop(module: nn.Module, args: tuple) -> None:
        if current() is scope:
            raise Stopped

    handle = layers[before].register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def dropping(layers: nn.ModuleList, first: int, scope: Scope) -> Iterator[None]:
    """Within this, the layers from `first` on keep only the hidden states that `scope` says, in its pass."""
    handles = [
        layers[i].register_forward_pre_hook(_drop_before(i, scope), with_kwargs=True) for i in range(first, len(layers))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop_before(layer: int, scope: Scope) -> Any:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple | None:
        # other threads' passes over the same layers have hooks of their own; in them one that is just coming or going
        # may be called without keywords
        if kwargs is None or current() is not scope:
            return None
        if scope.peeks_at(layer) and runs_unnoticed(module):
            some, named = again(*_dropped(scope, layer, args, kwargs))
            scope.peek(layer, lambda: module.forward(*some, **named))
        return _dropped(scope, layer, args, kwargs)

    return hook


def _dropped(scope: Scope, layer: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A layer's arguments, of the hidden states that it keeps."""
    if layer not in scope.rows:
        return args, kwargs
    rows = scope.rows[layer]
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if layer in scope.kept:
        hidden_states = picked(hidden_states, scope.kept[layer], 1)
    # all but the hidden states is made once for the first layer's queries, and handed to every layer
    masks = () if scope.fronts else ("attention_mask",)  # fronts have none, and the rest is every layer's
    changed = {name: _sliced(name, value, rows, masks, scope.tap) for name, value in kwargs.items()}
    if args:
        return (hidden_states, *args[1:]), changed
    return args, changed | {"hidden_states": hidden_states}


def runs_unnoticed(layer: nn.Module) -> bool:
    """Whether nobody sees that it runs: no hook within it, no forward that was replaced, and nothing random.

    Its own hooks are left out, and those of accelerate, which brings weights from elsewhere, replace the forward.
    """
    if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
        return False
    return not any(
        module.training
        or "forward" in module.__dict__
        or (module is not layer and (module._forward_pre_hooks or module._forward_hooks))
        for module in layer.modules()
    )


def again(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A layer's arguments with hidden states of their own, should it write to them."""
    if args:
        return (args[0].clone(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].clone()}


def _sliced(name: str, value: Any, rows: torch.Tensor, masks: tuple[str, ...], tap: RotaryTap) -> Any:
    if value is None:
        return None
    if name == "position_ids":
        return picked(value, rows, 1)
    if name == "position_embeddings":
        return tap.pick(value, rows)
    if name in masks and isinstance(value, torch.Tensor) and value.ndim == 4:
        return picked(value, rows, 2)
    return value
