"""Complete state of Python objects."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import operator
import types
import typing
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_VALUES = (int, float, complex, str, bytes, tuple, frozenset)
"""Built-in immutable types. Subclasses may add state to the value."""
_CONTAINERS = (collections.OrderedDict, collections.defaultdict, dict, list, set, deque)
PARTS: Any = {
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    contextlib._GeneratorContextManager: ("func", "args", "kwds"),
    torch.autocast: ("device", "fast_dtype", "_enabled", "_cache_enabled"),
    torch.profiler.record_function: ("name", "args"),
    typing.ForwardRef: ("__forward_arg__", "__forward_module__"),
}
"""Types with attributes that are their state: the others change in use, or are no Python objects."""
_FIELD: Any = collections._tuplegetter  # type: ignore[attr-defined]  # of a named tuple
_CALLS = (operator.attrgetter, operator.itemgetter, operator.methodcaller, _FIELD)
_TYPES = (types.GenericAlias, types.UnionType, typing.TypeVar)


@dataclass(frozen=True)
class State:
    """State of an object.

    Args:
        values: Immutable parts.
        attributes: The `__dict__` of the object, or None.
        slots: Contents of the `__slots__` of the object, by name.
        base: Built-in container type of the object, or None.
    """

    values: tuple[Any, ...] = ()
    attributes: dict[str, Any] | None = None
    slots: Mapping[str, Any] = field(default_factory=dict)
    base: type | None = None


def slots_of(kind: type) -> list[str]:
    """Return the names of the `__slots__` of a class and its bases."""
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    return names


def state_of(value: Any) -> State:
    """Return the complete state of an object.

    Overrides of methods such as `__reduce__` and `__getstate__` are ignored: they may omit state that the object
    computes with.

    Raises:
        TypeError: The object has state that Python code cannot read, such as a lock or a file.
    """
    kind = type(value)
    if kind in _CALLS:
        return State(value.__reduce__())
    if kind in _TYPES:
        return State((repr(value), *typing.get_args(value)))
    base: Any = next(base for base in kind.__mro__ if base in (*_VALUES, *_CONTAINERS, *PARTS, object))
    if _has_hidden_state(kind, base):  # type: ignore[arg-type]  # classes are hashable
        return State((_member_name(value, kind),))
    names = (*slots_of(kind), *PARTS.get(base, ()))
    slots = {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}
    return State(
        (_plain(value, base),) if base in _VALUES else (),
        value.__dict__ if kind.__dictoffset__ else None,
        slots,
        base if base in _CONTAINERS else None,
    )


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
    names = [f"slot{number}" for number in range(len(slots_of(kind)))]
    names += ["__dict__"] if kind.__dictoffset__ and not base.__dictoffset__ else []
    names += ["__weakref__"] if kind.__weakrefoffset__ and not base.__weakrefoffset__ else []
    return kind.__basicsize__ > type("Reference", (base,), {"__slots__": names}).__basicsize__


def _member_name(value: Any, kind: type) -> str:
    """Return the name of a member of an enumeration that an extension defines, such as PyTorch's pybind11 enums.

    Raises:
        TypeError: The object is not a member of such an enumeration.
    """
    members, name = getattr(kind, "__members__", None), getattr(value, "name", None)
    if isinstance(members, dict) and isinstance(name, str) and members.get(name) == value:
        return name
    raise TypeError(f"instances of {kind.__qualname__} have state that is not visible to Python code")
