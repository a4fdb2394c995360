"""State of objects: everything that an instance holds, regardless of its support for `copy` and `pickle`.

PEFT adapters and RoPE have state of their own: which adapters are active in which layers, and frequencies that depend
on the prompt length. KV of one frequency regime is not served under another.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

_VALUES = (int, float, complex, str, bytes, tuple, frozenset)
"""Built-in immutable types. Subclasses may add state to the value."""
_CONTAINERS = (collections.OrderedDict, collections.defaultdict, dict, list, set, collections.deque)
_CALLS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_TYPES = (types.GenericAlias, types.UnionType, typing.TypeVar)


@dataclass(frozen=True)
class State:
    """State of an object.

    Args:
        values: immutable parts.
        attributes: the `__dict__` of the object, or None.
        slots: contents of the `__slots__` of the object, by name.
        base: built-in container type of the object, or None.
    """

    values: tuple[Any, ...] = ()
    attributes: dict[str, Any] | None = None
    slots: Mapping[str, Any] = field(default_factory=dict)
    base: type | None = None


def state_of(value: Any) -> State:
    """Return the complete state of an object.

    Overrides of methods such as `__reduce__` and `__getstate__` are ignored: they may omit state that the object
    computes with.

    Raises:
        TypeError: the object has state that Python code cannot read, such as a lock or a file.
    """
    kind = type(value)
    if kind in _CALLS:
        return State(value.__reduce__())
    if kind in _TYPES:
        return State((repr(value), *typing.get_args(value)))
    base = _builtin_base(kind)
    if _has_hidden_state(kind, base):  # type: ignore[arg-type]  # classes are hashable
        return State((_member_name(value, kind),))
    slots = {name: getattr(value, name) for name in sorted(copyreg._slotnames(kind)) if hasattr(value, name)}  # type: ignore[attr-defined]
    return State(
        (_plain(value, base),) if base in _VALUES else (),
        value.__dict__ if kind.__dictoffset__ else None,
        slots,
        base if base in _CONTAINERS else None,
    )


def _builtin_base(kind: type) -> Any:
    return next(base for base in kind.__mro__ if base in (*_VALUES, *_CONTAINERS, object))


def _plain(value: Any, base: Any) -> Any:
    """Convert a value of a subclass to the built-in type `base`."""
    if base in (tuple, frozenset):
        return base(base.__iter__(value))
    return base.__getnewargs__(value)[0]


@functools.lru_cache(maxsize=4096)
def _has_hidden_state(kind: type, base: type) -> bool:
    """Return whether instances are larger than those of an equivalent Python class with the same `__slots__`."""
    if base.__itemsize__:  # subclasses of variable-size types have no slots
        return kind.__basicsize__ > type("Reference", (base,), {}).__basicsize__
    names = [f"slot{number}" for number in range(len(copyreg._slotnames(kind)))]  # type: ignore[attr-defined]
    names += ["__dict__"] if kind.__dictoffset__ and not base.__dictoffset__ else []
    names += ["__weakref__"] if kind.__weakrefoffset__ and not base.__weakrefoffset__ else []
    return kind.__basicsize__ > type("Reference", (base,), {"__slots__": names}).__basicsize__


def _member_name(value: Any, kind: type) -> str:
    """Return the name of a member of an enumeration that an extension defines, such as PyTorch's pybind11 enums.

    Raises:
        TypeError: the object is not a member of such an enumeration.
    """
    members, name = getattr(kind, "__members__", None), getattr(value, "name", None)
    if isinstance(members, dict) and isinstance(name, str) and members.get(name) == value:
        return name
    raise TypeError(f"instances of {kind.__qualname__} have state that is not visible to Python code")


def is_tuner(module: Any) -> bool:
    """Return whether a module is a layer that an adapter wraps."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "active_adapters")


def active_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the active adapters of a layer."""
    return () if getattr(layer, "disable_adapters", False) else tuple(layer.active_adapters)


def merged_adapters(layer: Any) -> tuple[str, ...]:
    """Return the names of the adapters that are merged into the weights of a layer."""
    return tuple(getattr(layer, "merged_adapters", ()))


def adapter_state(layers: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
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
    hooks = (hook for layer in layers for hook in list(layer._forward_pre_hooks.values()))  # other threads add theirs
    return any({"adapter_names", "alora_offsets"} & getattr(hook, "keywords", {}).keys() for hook in hooks)


def varying_rope(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the RoPE parameters of a model if its frequencies depend on the prompt length, otherwise None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for group in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = group.get("rope_type") or ""
        if kind == "longrope" or "dynamic" in kind:
            return group
    return None


def rope_regime(config: PreTrainedConfig, length: int) -> str | None:
    """Return the frequency regime of a pass with the last position `length - 1`.

    KV computed under one regime is not served under another.

    Returns:
        "short" or "long" for longrope. Otherwise "", or None if the frequencies depend on the exact length (dynamic NTK
        scaling beyond the trained length), so that nothing can be reused.
    """
    group = varying_rope(config)
    if group is None:
        return ""
    if group["rope_type"] == "longrope":
        original = group.get("original_max_position_embeddings") or config.max_position_embeddings
        return "long" if length > original else "short"
    return "" if length < config.max_position_embeddings else None
