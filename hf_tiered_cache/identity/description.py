"""Describing objects: everything that a value computes with, in words that are the same in every process.

A function is its code, its defaults, its closure and the globals that it refers to; a class is the members that reached
code refers to; an object is its class and its state. What cannot be described is a problem, never a guess. Each place
that was looked at is watched from then on (see `Watch`), so that whatever is described is also noticed when it changes.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import gc
import logging
import re
import types
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..patches.scope import Replacement
from .origin import (
    INSTALLED,
    PYTHON,
    USER,
    code_digest,
    file_digest,
    origin_of,
    origin_of_class,
    origin_of_file,
    referenced_names,
)
from .watch import Watch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_SEQUENCES = (list, tuple, set, frozenset, deque, torch.Size)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict, types.MappingProxyType)
_INERT = (logging.Logger, logging.LoggerAdapter)
"""Types whose instances compute nothing."""
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_UNCALLED = _CONSTRUCTORS | {"__init_subclass__", "__class_getitem__", "__del__", "__repr__", "__str__", "__dir__"}
_NO_MEMBER = frozenset(
    {
        *("loss_function", "loss_type"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__annotate_func__"),
        *("__annotations_cache__", "__slotnames__", "__qualname__"),
    }
)
_FOREIGN_DEPTH = 1
"""Calls within torch and other installed packages are followed so far; what they call beyond is theirs."""
_LEAF = 1 << 10
_NOTHING: frozenset[str] = frozenset()
_MOST_PARTS = 200_000
_STATIC_ITEMS = 64


class Undescribable(Exception):
    """Something changes what is computed, and cannot be told from others of its kind."""


class Description:
    """The words for a graph of objects, the tensors in it, and a watch over it.

    Args:
        lenient: whether what cannot be described is given by its type, since the user has named the model.
        watch: notes the places that were looked at; one of its own by default.
        tensors: takes the tensors that are found, with their names.
    """

    def __init__(
        self,
        lenient: bool = False,
        watch: Watch | None = None,
        tensors: dict[int, tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.watch = Watch() if watch is None else watch
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {} if tensors is None else tensors
        self.lenient = lenient
        self.words: list[str] = []
        self._seen: dict[int, tuple[int, Any]] = {}
        self._later: deque[tuple[str, Any, int]] = deque()
        self._members: dict[type, set[str]] = {}
        self._globals: set[tuple[int, str]] = set()  # those that are described
        self._open: set[int] = set()  # containers that are being described
        self._parts = 0
        self._depth = 0  # of calls within foreign packages

    # --- values

    def add(self, where: str, value: Any) -> None:
        """Describe a value.

        Args:
            where: path of the value within the model, for names of tensors and error messages.
            value: any object.

        Raises:
            Undescribable: the value, or something that it computes with, cannot be described.
        """
        value = self.original(where, value)
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _PLAIN_TORCH):
            self.words.append(repr(value))
        elif isinstance(value, np.generic | np.dtype):
            self.words.append(
                f"{value.dtype.str} {value.tobytes().hex()}" if isinstance(value, np.generic) else str(value)
            )
        elif kind in _SEQUENCES or kind in _MAPPINGS:
            self._add_container(where, value, kind)
        elif self.number(value):
            self._add_new(where, value, kind)

    def original(self, where: str, value: Any) -> Any:
        """Return what a value stands in for, and computes the same as; itself if that is nothing."""
        while isinstance(value, Replacement):
            value = value.original
        return value

    def finish(self) -> None:
        """Describe the functions and classes that values refer to. Call it when all values are added."""
        while self._later:
            where, value, self._depth = self._later.popleft()  # code of the user's is followed from anywhere
            if isinstance(value, type):
                self._describe_class(where, value)
            else:
                self._describe_function(where, value)
        self._depth = 0

    def number(self, value: Any) -> bool:
        """Return whether a value is met for the first time, and gets a number; else refer to it by its number."""
        number, _ = self._seen.setdefault(id(value), (new := len(self._seen), value))
        if number != new:
            self.words.append(f"#{number}")
        return number == new

    def _add_new(self, where: str, value: Any, kind: type) -> None:
        if isinstance(value, torch.Tensor):
            self.add_tensor(where, value)
        elif isinstance(value, np.ndarray):
            self._add_array(where, value)
        elif isinstance(value, nn.Module):
            self.add_module(where, value)
        elif isinstance(value, PreTrainedConfig):
            self.add_config(where, value)
        elif isinstance(value, type | types.FunctionType):
            self._later.append((where, value, self._depth))
            self.words.append(f"{type(value).__name__} {value.__qualname__}")
        elif isinstance(value, types.ModuleType):
            self.words.append(f"module {value.__name__}")
        else:
            self._add_object(where, value, kind)

    def _add_object(self, where: str, value: Any, kind: type) -> None:
        if isinstance(value, enum.Enum):
            self.words.append(f"{kind.__qualname__}.{value.name}")
        elif isinstance(value, types.MethodType):
            self.words.append("method")
            self.add(where, value.__func__)
            self.add(where, value.__self__)
        elif isinstance(value, functools.partial):
            self.words.append("partial")
            for part in (value.func, value.args, value.keywords):
                self.add(where, part)
        elif isinstance(value, _BUILTIN):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
            self.words.append(f"builtin {getattr(owner, '__name__', owner)}.{value.__qualname__}")
            bound = getattr(value, "__self__", None)
            native = isinstance(bound, types.ModuleType | type) or type(bound).__name__.startswith(
                ("PyCapsule", "pybind")
            )
            if bound is not None and not native:
                self.add(where, bound)
        elif isinstance(value, property):
            self.words.append("property")
            for accessor in (value.fget, value.fset):
                self.add(where, accessor)
        elif isinstance(value, staticmethod | classmethod):
            self.words.append(kind.__name__)
            self.add(where, value.__func__)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.words.append("lru_cache")
            self._add_items(where, _cached_functions(value), list)
        elif isinstance(value, weakref.ref):
            self.words.append("weakref")
            self.add(where, value())
        elif isinstance(value, types.SimpleNamespace):
            self.words.append("namespace")
            self._add_state(where, value, vars(value))
        elif isinstance(value, re.Pattern):
            self.words.append(f"pattern {value.pattern!r} {value.flags}")
        elif isinstance(value, torch.jit.ScriptFunction):
            self.words.append(f"script {value.code}")
        elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self.words.append(f"operator {value}")
        elif kind is torch.ScriptObject:  # packed weights, which its module saves as tensors
            self.words.append(f"script object {value._type().name()}")
        elif isinstance(value, _INERT):
            self.words.append(kind.__qualname__)
        else:
            self._add_instance(where, value, kind)

    def _add_instance(self, where: str, value: Any, kind: type) -> None:
        """Describe an instance of a Python class: its class, and its whole state."""
        try:
            _, arguments, state, items, pairs = _reduced(value)
        except Exception:
            if not self.lenient:
                raise Undescribable(f"{where}, a {kind.__qualname__},") from None
            self.words.append(f"some {kind.__qualname__}")
            return
        self.watch.type_of(value)
        self.add(where, kind)
        self.add_members(where, kind, _NOTHING)
        self._add_items(where, arguments[1:], tuple)
        states = state if type(state) is tuple else (state,)
        if states[0]:
            self._add_state(where, value, states[0])
        for name, item in sorted(states[1].items()) if len(states) > 1 and states[1] else ():
            self.watch.slot(value, name)
            self.words.append(name)
            self.add(f"{where}.{name}", item)
        if items is not None:
            self.watch.content(value)
            self._add_items(where, list(items), list)
        if pairs is not None:
            self._add_mapping(where, value, dict)

    def _add_state(self, where: str, value: Any, state: dict[str, Any]) -> None:
        self.watch.state_of(value)
        for name in sorted(state):
            self.watch.item(value.__dict__, name)
            self.words.append(name)
            self.add(f"{where}.{name}", state[name])

    def _add_container(self, where: str, value: Any, kind: type) -> None:
        """Describe a container each time it is met: whether two places share one differs between processes."""
        self._parts += 1
        if id(value) in self._open or self._parts > _MOST_PARTS:
            raise Undescribable(f"{where}, which holds itself or too much,")
        self._open.add(id(value))
        (self._add_items if kind in _SEQUENCES else self._add_mapping)(where, value, kind)
        self._open.remove(id(value))

    def _add_items(self, where: str, value: Any, kind: type) -> None:
        self.words.append(f"{kind.__name__} of {len(value)}")
        if isinstance(value, list | set | deque):
            self.watch.content(value)
        if isinstance(value, set | frozenset):
            value = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        for number, item in enumerate(value):
            self.add(f"{where}[{number}]", item)

    def _add_mapping(self, where: str, value: Any, kind: type) -> None:
        self.words.append(f"{kind.__name__} of {len(value)}")
        if isinstance(value, types.MappingProxyType):
            value = dict(value)
        self.watch.content(value)
        for key, item in value.items():
            self.watch.item(value, key)
            self.add(f"{where} key", key)
            self.add(f"{where}[{key!r}]", item)
        if isinstance(value, collections.defaultdict):
            self.add(where, value.default_factory)

    # --- tensors

    def add_tensor(self, where: str, tensor: torch.Tensor) -> None:
        """Describe a tensor; its bytes are digested by whoever takes `tensors`."""
        kind, bits = type(tensor), tensor.is_neg() or tensor.is_conj()
        if tensor.layout != torch.strided or tensor.device.type == "meta" or bits:
            how = "negated or conjugated lazily" if bits else f"{tensor.layout} on {tensor.device.type}"
            raise Undescribable(f"{where}, a tensor {how},")
        self.tensors[id(tensor)] = where, tensor
        self.words.append(f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        if kind in (torch.Tensor, nn.Parameter, nn.Buffer):
            return
        self.watch.type_of(tensor)
        self.add(where, kind)
        if is_traceable_wrapper_subclass(tensor):
            self.add(where, tensor.__tensor_flatten__()[1])
        for name, value in sorted(tensor.__dict__.items()):
            if not name.startswith("_"):
                self.watch.item(tensor.__dict__, name)
                self.words.append(name)
                self.add(f"{where}.{name}", value)

    def _add_array(self, where: str, array: np.ndarray) -> None:
        try:
            self.tensors[id(array)] = where, torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise Undescribable(f"{where}, an array of {array.dtype},") from error
        self.words.append(f"array {array.dtype.str} {array.shape} {array.strides}")

    # --- modules and configurations: see `ModelDescription`

    def add_module(self, where: str, module: nn.Module) -> None:
        """Describe a module."""
        raise NotImplementedError

    def add_config(self, where: str, config: PreTrainedConfig) -> None:
        """Describe a configuration."""
        raise NotImplementedError

    # --- functions

    def _describe_function(self, where: str, function: types.FunctionType) -> None:
        code, origin = function.__code__, origin_of(function)
        self.watch.function(function)
        self.words.append(f"def {function.__qualname__} {code_digest(code)}")
        if origin == INSTALLED:
            self.words.append(file_digest(code.co_filename))
        for value in function.__defaults__ or ():
            self._refer(where, value, origin)
        keywords = function.__kwdefaults__ or {}
        for name, value in keywords.items():
            self.watch.item(keywords, name)
            self.words.append(name)
            self._refer(where, value, origin)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.watch.cell(cell)
            try:
                content = cell.cell_contents
            except ValueError:
                self.words.append(f"{name} unset")
                continue
            self._refer(f"{where} ({name})", content, origin)
        if origin in ("torch", INSTALLED) and not (function.__name__ == "forward" and origin == "torch"):
            self._depth += 1  # a module of torch only hands on what it holds
        elif origin == USER:
            self._depth = 0
        if origin != PYTHON and self._depth <= _FOREIGN_DEPTH:
            self._add_globals(where, function.__globals__, referenced_names(code), origin)

    def _add_globals(self, where: str, namespace: dict[str, Any], names: frozenset[str], origin: str) -> None:
        """Describe the globals among `names`, those of the modules among these globals included."""
        for name in sorted(names):
            if name in namespace:
                self._add_global(where, namespace, name, origin)
            elif name in builtins.__dict__:
                self.watch.item(namespace, name)
                self._add_global(where, builtins.__dict__, name, PYTHON)
        modules = [value for name in sorted(names) if isinstance(value := namespace.get(name), types.ModuleType)]
        visited: set[int] = set()
        while modules:
            module = modules.pop(0)
            if id(module) in visited:
                continue
            visited.add(id(module))
            origin = _origin_of_module(module)
            for name in sorted(names & module.__dict__.keys()):
                self._add_global(f"{where}, module {module.__name__}", module.__dict__, name, origin)
                if isinstance(value := module.__dict__[name], types.ModuleType):
                    modules.append(value)

    def _add_global(self, where: str, namespace: dict[str, Any], name: str, origin: str) -> None:
        self.watch.item(namespace, name)
        if (id(namespace), name) not in self._globals:
            self._globals.add((id(namespace), name))
            self.words.append(name)
            self._refer(f"{where}, global {name}", namespace[name], origin)

    def _refer(self, where: str, value: Any, origin: str) -> None:
        """Describe what code of some origin refers to."""
        if origin == USER:
            self.add(where, value)
        else:
            self._add_static(where, value, 0)

    def _add_static(self, where: str, value: Any, depth: int) -> None:
        """Describe what a package keeps for itself: functions, classes and plain values; other objects by their type.

        A user's object that was put in its place is described in full.
        """
        kind = type(value)
        if value is ALL_ATTENTION_FUNCTIONS:  # the entry that is used is described with the model
            self.words.append("attention functions")
        elif kind in (list, tuple, dict, set, frozenset):
            items = (*value.items(),) if isinstance(value, dict) else (*value,)
            self.words.append(f"{kind.__name__} of {len(items)}")
            if len(items) <= _STATIC_ITEMS and depth < 2 and not isinstance(value, set | frozenset):
                for item in items:
                    self._add_static(where, item, depth + 1)
        elif _is_opaque(value, kind):
            if self.number(value):
                self.words.append(f"some {kind.__qualname__}")
        else:
            self.add(where, value)

    # --- classes

    def _describe_class(self, where: str, kind: type) -> None:
        if origin_of_class(kind) != USER:  # a package's own: what its constructors call is theirs
            self._depth = _LEAF
        constructed = not issubclass(kind, BaseException | enum.Enum | nn.Module | torch.Tensor)
        self.add_members(where, kind, _CONSTRUCTORS | {"__call__"} if constructed else frozenset(), special=False)

    def add_members(self, where: str, kind: type, names: frozenset[str], special: bool = True) -> None:
        """Describe the members of a class that have one of `names`, and those that their code refers to in turn.

        All members of a class that the user wrote are described.

        Args:
            where: as for `add`.
            kind: the class.
            names: of members.
            special: whether special methods are described, too, since no name refers to them.
        """
        bases = [base for base in kind.__mro__ if base.__flags__ & _HEAP_TYPE]
        pending = set(names)
        if kind not in self._members:
            self._members[kind] = set()
            self.words.append(" ".join(f"{base.__module__}.{base.__qualname__}" for base in bases))
            for base in bases:
                self.watch.size(base.__dict__)
                written = origin_of_class(base) == USER
                pending |= {name for name in base.__dict__ if written or (special and _is_special(name))}
        done = self._members[kind]
        pending -= done | _NO_MEMBER
        while pending:
            done |= pending
            referenced: set[str] = set()
            for base in bases:
                origin = origin_of_class(base)
                for name in sorted(pending & base.__dict__.keys()):
                    self.watch.member(base, name)
                    self.words.append(f"{base.__qualname__}.{name}")
                    member = base.__dict__[name]
                    self._refer(f"{where}.{name}", member, origin)
                    for function in _functions_of(member, []):
                        referenced |= referenced_names(function.__code__)
            pending = referenced - done - _NO_MEMBER


_HEAP_TYPE = 1 << 9
"""Flag of classes that are not built into the interpreter or an extension."""


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _UNCALLED


def _reduced(value: Any) -> tuple[Any, ...]:
    """Return how an object is made again from its state.

    Raises:
        TypeError: it has state that Python code does not see, such as that of a lock or a file.
    """
    reduced = object.__reduce_ex__(value, 2)
    return (*reduced, *(None,) * (5 - len(reduced)))


def _functions_of(member: Any, found: list[types.FunctionType]) -> list[types.FunctionType]:
    """Add to `found` the functions that a member of a class runs, those within decorators included."""
    if isinstance(member, Replacement):
        _functions_of(member.original, found)
    elif isinstance(member, property):
        _functions_of(member.fget, found)
        _functions_of(member.fset, found)
    elif isinstance(member, staticmethod | classmethod | types.MethodType):
        _functions_of(member.__func__, found)
    elif isinstance(member, functools.partial | functools.partialmethod | functools.cached_property):
        _functions_of(member.func, found)
    elif isinstance(member, functools._lru_cache_wrapper):
        found += _cached_functions(member)
    elif isinstance(member, types.FunctionType) and member not in found:
        found.append(member)
        for cell in member.__closure__ or ():
            with suppress(ValueError):  # nothing was assigned to it yet
                _functions_of(cell.cell_contents, found)
    return found


def _cached_functions(wrapper: Any) -> list[types.FunctionType]:
    """Return the function that an `lru_cache` calls, whatever its `__wrapped__` says."""
    return [value for value in gc.get_referents(wrapper) if isinstance(value, types.FunctionType)][:1]


def _origin_of_module(module: types.ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return PYTHON if file is None else origin_of_file(file)


def _is_opaque(value: Any, kind: type) -> bool:
    """Return whether an object is a package's own, neither code nor plain data."""
    if isinstance(value, type | types.FunctionType | types.MethodType | functools.partial | Replacement | torch.Tensor):
        return False
    if isinstance(value, nn.Module | property | staticmethod | classmethod | functools._lru_cache_wrapper):
        return False
    if kind in _PLAIN or isinstance(value, (*_PLAIN_TORCH, *_BUILTIN, np.generic, enum.Enum)):
        return False
    return not (kind.__flags__ & _HEAP_TYPE) or origin_of_class(kind) != USER
