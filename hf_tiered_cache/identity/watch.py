"""State of Python objects: what it consists of, and whether it is still the same."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import gc
import operator
import types
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import CellType, FunctionType
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


# --- changes


Places = dict[tuple[int, Any], tuple[dict[Any, Any], Any]]
"""Items of dictionaries: (id of the dictionary, key) -> (the dictionary, the value when it was described)."""
_Reads = dict[Callable[..., Any], dict[tuple[int, Any], tuple[Any, ...]]]
"""Places by the function that reads them: (id of an object, key) -> the arguments of the function."""
_getter = functools.lru_cache(operator.attrgetter)
_is_filled: Callable[[CellType], bool] = CellType().__ne__  # an empty cell equals other empty ones only


class Watch:
    """Objects that a description was made from, by the places where they were found.

    A place is an item of a dictionary, a member of a class, the type or an attribute of an object, the content of a
    closure cell, or the items or the number of items of a container. `holds` compares the objects in all places by
    identity, in loops that run in C. A place with nothing in it, such as an empty dictionary, must only stay empty. The
    watch keeps references to the objects, so that no new object reuses the address of an old one.

    Args:
        unsteady: Items of dictionaries that change at every pass, which are not watched.
    """

    def __init__(self, unsteady: Places | None = None) -> None:
        self._unsteady = unsteady or {}
        self._values: _Reads = collections.defaultdict(dict)  # with the value before the arguments
        self._empty: _Reads = collections.defaultdict(dict)
        self._sized: dict[int, Any] = {}
        self._containers: dict[int, Any] = {}

    # --- adding places

    def item(self, container: dict[Any, Any], key: Any) -> bool:
        """Watch the value of a key in a dictionary, or that there is none.

        Returns:
            Whether the value is part of the description: unsteady ones are not.
        """
        place = id(container), key
        if place in self._unsteady:
            return False
        if dict.__contains__(container, key):
            self._values[dict.get].setdefault(place, (dict.get(container, key), container, key))
        else:
            self._empty[dict.__contains__][place] = container, key
        return True

    def member(self, kind: type, name: str) -> bool:
        """Watch a member of a class itself, without its bases, like an item."""
        return self.item(_members(kind), name)

    def members(self, kind: type) -> None:
        """Watch the number of members of a class itself."""
        self.size(_members(kind))

    def type_of(self, value: Any) -> None:
        """Watch the type of an object."""
        self._values[type].setdefault((id(value), ""), (type(value), value))

    def state_of(self, value: Any) -> None:
        """Watch the identity and size of the `__dict__` of an object, or that it is empty."""
        if value.__dict__:
            self.slot(value, "__dict__")
            self.size(value.__dict__)
        else:
            self._empty[_getter("__dict__")][id(value), ""] = (value,)

    def inner(self, state: dict[str, Any], name: str) -> None:
        """Watch the identity and size of a dictionary within another one, or that it is empty."""
        if state[name]:
            self.item(state, name)
            self.size(state[name])
        else:
            self._empty[dict.get][id(state), name] = state, name

    def function(self, function: FunctionType) -> None:
        """Watch the code of a function, and the defaults of its parameters, if it has any."""
        self.slot(function, "__code__")
        if function.__code__.co_argcount:
            self.slot(function, "__defaults__")
        if function.__code__.co_kwonlyargcount:
            self.slot(function, "__kwdefaults__")

    def cell(self, cell: CellType) -> None:
        """Watch the content of a closure cell."""
        if _is_filled(cell):
            self.slot(cell, "cell_contents")
        else:
            self._empty[_is_filled][id(cell), ""] = (cell,)

    def slot(self, value: Any, name: str) -> None:
        """Watch an attribute of an object that is not in its `__dict__`, such as one in its `__slots__`."""
        self._values[_getter(name)].setdefault((id(value), ""), (getattr(value, name), value))

    def size(self, container: Any) -> None:
        """Watch the number of items in a container."""
        self._sized[id(container)] = container

    def content(self, container: Any, kind: Any = None) -> None:
        """Watch the items of a list, a set or another container, which is an instance of the built-in type `kind`."""
        own, place = type(container), id(container)
        if kind is not None and (own.__iter__ is not kind.__iter__ or own.__len__ is not kind.__len__):
            container = self._containers.get(place) or _BuiltIn(container, kind)
        self.size(container)
        self._containers[place] = container

    def complete(self) -> None:
        """Record the objects in all places, which `holds` compares with later ones."""
        columns = [(read, list(zip(*places.values(), strict=True))) for read, places in self._values.items()]
        self._reads = [(read, arguments) for read, (_, *arguments) in columns]
        self._empty_reads = [(read, list(zip(*places.values(), strict=True))) for read, places in self._empty.items()]
        self._sizes = list(map(len, self._sized.values()))
        self._filled_containers = list(filter(len, self._containers.values()))  # for others the size is sufficient
        values = chain.from_iterable(values for _, (values, *_) in columns)
        self._recorded = [*values, *chain.from_iterable(self._filled_containers)]

    # --- comparing

    def holds(self) -> bool:
        """Return whether every place still holds the same object."""
        values = chain.from_iterable(map(read, *arguments) for read, arguments in self._reads)
        empty = chain.from_iterable(map(read, *arguments) for read, arguments in self._empty_reads)
        try:
            return (
                list(map(len, self._sized.values())) == self._sizes
                and not any(empty)
                and all(map(operator.is_, self._recorded, chain(values, chain.from_iterable(self._filled_containers))))
            )
        except Exception:  # an attribute was deleted, a container changed meanwhile, or what took its place raises
            return False

    def changed(self) -> Places:
        """Return the items of dictionaries that have another value now."""
        absent = {place: (None, *arguments) for place, arguments in self._empty[dict.__contains__].items()}
        return {
            place: (container, value)
            for place, (value, container, key) in (self._values[dict.get] | absent).items()
            if dict.get(container, key) is not value
        }


class _BuiltIn:
    """Container as the instance of a built-in type, although its class has other methods."""

    def __init__(self, container: Any, kind: Any) -> None:
        self._container, self._kind = container, kind

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kind.__iter__(self._container))

    def __len__(self) -> int:
        return int(self._kind.__len__(self._container))


def _members(kind: type) -> dict[str, Any]:
    """Return the dictionary of a class, which `__dict__` returns a new proxy of."""
    members: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
    return members
