"""Adapters (PEFT): which are switched on, and where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_tuner(module: Any) -> bool:
    """Return whether a module is a layer that an adapter wraps."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "active_adapters")


def active_adapters(layer: Any) -> tuple[str, ...]:
    """The adapters of a layer that are switched on."""
    return () if getattr(layer, "disable_adapters", False) else tuple(layer.active_adapters)


def merged_adapters(layer: Any) -> tuple[str, ...]:
    """The adapters of a layer that its weights hold already."""
    return tuple(getattr(layer, "merged_adapters", ()))


def adapter_state(layers: Iterable[Any]) -> tuple[tuple, ...]:
    """For each of them with an adapter switched on: its number, the active and merged adapters, and their scales."""
    states = []
    for number, layer in enumerate(layers):
        merged = merged_adapters(layer)
        active = active_adapters(layer)
        if active or merged:
            scaling = getattr(layer, "scaling", {})
            states.append((number, active, merged, tuple(scaling.get(adapter) for adapter in active)))
    return tuple(states)


def rows_have_adapters(layers: Iterable[Any]) -> bool:
    """Whether the pass under way gives each row an adapter of its own (PEFT's `adapter_names`, activated LoRA)."""
    hooks = (hook for layer in layers for hook in layer._forward_pre_hooks.values())
    return any({"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys() for hook in hooks)
