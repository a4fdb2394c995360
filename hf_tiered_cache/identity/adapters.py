"""State of PEFT adapters: which ones are active, and in which layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_tuner(module: Any) -> bool:
    """Return whether a module is a layer that an adapter wraps."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "active_adapters")


def active_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the active adapters of a layer."""
    return () if getattr(layer, "disable_adapters", False) else tuple(layer.active_adapters)


def merged_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the adapters that are merged into the weights of a layer."""
    return tuple(getattr(layer, "merged_adapters", ()))


def adapter_state(layers: Iterable[Any]) -> tuple[tuple, ...]:
    """Return the adapter state of layers with an active or merged adapter.

    Returns:
        For each such layer its index in `layers`, the active adapters, the merged adapters and the scales of the active
        ones.
    """
    states = []
    for number, layer in enumerate(layers):
        merged = merged_adapters(layer)
        active = active_adapters(layer)
        if active or merged:
            scaling = getattr(layer, "scaling", {})
            states.append((number, active, merged, tuple(scaling.get(adapter) for adapter in active)))
    return tuple(states)


def rows_have_adapters(layers: Iterable[Any]) -> bool:
    """Return whether the current pass selects adapters by row (PEFT's `adapter_names`, activated LoRA)."""
    hooks = (hook for layer in layers for hook in layer._forward_pre_hooks.values())
    return any({"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys() for hook in hooks)
