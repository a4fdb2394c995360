"""Description of objects: everything that a value computes with, in words that are equal in every process.

A function is described by its code, defaults, closure and the globals that it refers to, a class by the members that
described code refers to, and an object by its class and state. An object that cannot be described is reported as a
problem. Each place that is read is watched afterwards (see `Watch`), so that changes of described objects are detected.
"""

from __future__ import annotations

import collections
import functools
import gc
import logging
import re
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from ..errors import UnsupportedModelError
from ..patches.replacement import Replacement
from .origin import INSTALLED, OVERWRITTEN, USER, file_digest, origin_of_class, origin_of_module
from .watch import PARTS, Watch, slots_of, state_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range)
PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
SEQUENCES = (list, tuple, set, frozenset, deque, torch.Size)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
HEAP_TYPE = 1 << 9
"""Flag of classes that are created at runtime (`Py_TPFLAGS_HEAPTYPE`), such as all classes in Python code."""
INERT = (logging.Logger, torch.utils.hooks.RemovableHandle)
"""Types with instances that do not affect computation, except for the levels of loggers (see `CodeDescription`)."""
_WRAPPERS: dict[type, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    types.MethodType: ("method", attrgetter("__func__", "__self__")),
    type(vars(torch._C._SDPBackend)["__eq__"]): ("native method", lambda method: [method.__func__]),  # of pybind11
    type(np.concatenate): ("numpy function", lambda function: [function._implementation]),
    slice: ("slice", attrgetter("start", "stop", "step")),
    types.MappingProxyType: ("mappingproxy", lambda proxy: gc.get_referents(proxy)[:1]),
    weakref.ref: ("weakref", lambda reference: [reference()]),
}
"""Types of objects that only hold others: their word, and a function that returns the others."""
_TENSOR_MARKS = frozenset({"_is_hf_initialized", "_is_param", "_is_buffer", "persistent"})
"""Attributes that torch and transformers set on tensors without effect on results, besides those of `torch.compile`."""
_MOST_PARTS = 200_000


class Undescribable(Exception):
    """Error for an object that affects the computation and cannot be distinguished from others of its kind."""


class Description(ABC):
    """Description of a graph of objects: its words, its tensors, and a watch over the places that are read."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.watch = Watch() if watch is None else watch
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        """Names and tensors that were found, by id of the tensor."""
        self.words: list[str] = []
        self.problem = ""
        """Reason why the described objects cannot be distinguished from others, or ""."""
        self.caches: list[Any] = []
        """Functions with a `functools.lru_cache` that were found."""
        self._seen: dict[int, tuple[int, Any]] = {}
        self._open_containers: set[int] = set()  # containers that are being described
        self._parts = 0
        self._later: deque[tuple[str, types.FunctionType | type, int, str]] = deque()  # code that `finish` describes
        self._held_modules: dict[int, tuple[str, types.ModuleType]] = {}  # Python modules that objects hold
        self._depth = 0  # depth of calls within foreign packages
        self._origin = USER  # of the code that refers to what is being described

    # --- values

    def add(self, location: str, value: Any) -> None:
        """Describe a value. Its `location` in the model is for tensor names and error messages.

        If it cannot be described, that is the `problem`, and the description goes on: changes of other values must be
        noticed although a tag names this one.
        """
        self._guard(self._add_value, location, value)

    def _guard(self, describe: Callable[..., None], location: str, *arguments: Any) -> None:
        """Call a describing function, and record the first failure as the problem."""
        try:
            describe(location, *arguments)
            return
        except Undescribable as error:
            problem = str(error)
        except UnsupportedModelError:
            raise
        except Exception as error:  # user code that raises, or infinite nesting
            problem = f"{location or 'the model'}, which raised {type(error).__name__} when it was inspected,"
        self.problem = self.problem or problem

    def _add_value(self, location: str, value: Any) -> None:
        """Describe a value.

        Raises:
            Undescribable: The value cannot be described.
        """
        value = self.original(location, value)
        kind = type(value)
        if kind in PLAIN or isinstance(value, PLAIN_TORCH):
            self.words.append(repr(value))
        elif value is sys.stdout or value is sys.stderr:
            self.words.append("output")
        elif isinstance(value, np.dtype):
            self.words.append(str(value))
        elif isinstance(value, np.generic) and not kind.__flags__ & HEAP_TYPE:
            self.words.append(f"{value.dtype.str} {value.tobytes().hex()}")
        elif kind in SEQUENCES or kind in _MAPPINGS:
            self._add_container(location, value, kind)
        elif self.number(value):
            self._add_new(location, value, kind)
            self.words.append("end")  # what follows belongs to another object

    def original(self, location: str, value: Any) -> Any:
        """Return the object that a value replaces and is computationally equivalent to, or the value itself."""
        while isinstance(value, Replacement):
            value = value.original
        return value

    def number(self, value: Any) -> bool:
        """Assign a number to a new value and return True; describe a known value by its number and return False."""
        number, _ = self._seen.setdefault(id(value), (next_number := len(self._seen), value))
        if number != next_number:
            self.words.append(f"#{number}")
        return number == next_number

    def _add_new(self, location: str, value: Any, kind: type) -> None:
        if isinstance(value, torch.Tensor):
            self.add_tensor(location, value)
        elif kind is np.ndarray:
            self._add_array(location, value)
        elif isinstance(value, nn.Module):
            self.add_module(location, value)
        elif isinstance(value, PreTrainedConfig):
            self.add_config(location, value)
        elif isinstance(value, (type, types.FunctionType)):
            self.words.append(f"{type(value).__name__} {value.__qualname__}")
            self._later.append((location, value, self._depth, self._origin))
        elif isinstance(value, types.ModuleType):
            self.words.append(f"module {value.__name__}")
            self._held_modules[id(value)] = location, value
        else:
            self._add_object(location, value, kind)

    def _add_object(self, location: str, value: Any, kind: type) -> None:
        """Describe an object of a built-in type; one of a subclass, which may add state and code, as an instance."""
        if kind in _WRAPPERS:
            word, content = _WRAPPERS[kind]
            self.words.append(word)
            for part in content(value):
                self.add(location, part)
        elif kind in PARTS:
            self.words.append(kind.__name__)
            for name in PARTS[kind]:
                self.watch.slot(value, name)
                self.add(location, getattr(value, name))
            if kind is functools.partial:
                self._add_state(location, value)
        elif isinstance(value, BUILTIN):
            owner: Any = getattr(value, "__objclass__", None) or getattr(value, "__module__", None)
            self.words.append(f"builtin {getattr(owner, '__name__', owner)}.{value.__qualname__}")
            bound = getattr(value, "__self__", None)
            home = bound if isinstance(bound, types.ModuleType) else sys.modules.get(owner)
            if home is not None and origin_of_module(home) in (INSTALLED, USER):
                self.words.append(file_digest(getattr(home, "__file__", None) or ""))
            native = isinstance(bound, types.ModuleType | type) or type(bound).__name__.startswith(
                ("PyCapsule", "pybind")
            )
            if bound is not None and not native:
                self.add(location, bound)
        elif kind is np.ufunc and value == getattr(np, value.__name__, None):
            self.words.append(f"ufunc {value.__name__}")
        elif kind is functools._lru_cache_wrapper:
            self.words.append("lru_cache")
            self.caches.append(value)
            self._add_items(location, cached_functions(value), list)
            self._add_state(location, value, frozenset({"__wrapped__"}))
        elif kind is types.SimpleNamespace:
            self.words.append("namespace")
            self._add_state(location, value)
        elif isinstance(value, re.Pattern):
            self.words.append(f"pattern {value.pattern!r} {value.flags}")
        elif isinstance(value, torch.jit.ScriptFunction):
            code: Any = value.code  # lacks constants, and the functions that it calls
            if "CONSTANTS." in code or "__torch__." in code:
                raise Undescribable(f"{location}, a script with constants or calls,")
            self.words.append(f"script {code}")
        elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            if str(value).partition(".")[0] not in ("aten", "prims", "prim"):
                raise Undescribable(f"{location}, the operator {value},")
            self.words.append(f"operator {value}")
        elif isinstance(value, INERT) and origin_of_class(kind) != USER:
            self.words.append(kind.__qualname__)
        else:
            self._add_instance(location, value, kind)

    def _add_instance(self, location: str, value: Any, kind: type) -> None:
        """Describe an instance of a Python class: its class and its complete state."""
        try:
            state = state_of(value)
        except TypeError:
            raise Undescribable(f"{location}, a {kind.__qualname__},") from None
        self.watch.type_of(value)
        self._add_value(location, kind)
        self.add_members(location, kind, frozenset())
        self._add_items(location, state.values, tuple)
        if state.attributes is not None:
            self._add_state(location, value, OVERWRITTEN.get(f"{kind.__module__}.{kind.__qualname__}", frozenset()))
        self._add_slots(location, value, state.slots)
        if state.base is not None:
            self._add_container(location, value, state.base)

    def _add_slots(self, location: str, value: Any, slots: Mapping[str, Any]) -> None:
        for name, item in slots.items():
            self.watch.slot(value, name)
            self.words.append(name)
            self.add(f"{location}.{name}", item)

    def _add_state(self, location: str, value: Any, ignored: frozenset[str] = frozenset()) -> None:
        self.watch.state_of(value)
        for name in sorted(value.__dict__.keys() - ignored):
            self._add_named_item(location, value.__dict__, name)

    def _add_named_item(self, location: str, state: dict[str, Any], name: str) -> None:
        if self.watch.item(state, name):
            self.words.append(name)
            self.add(f"{location}.{name}", state[name])

    def _add_container(self, location: str, value: Any, kind: type) -> None:
        """Describe a container at each occurrence, because sharing of containers may differ between processes."""
        self._parts += 1
        if id(value) in self._open_containers or self._parts > _MOST_PARTS:
            raise Undescribable(f"{location}, which is recursive or nested too deeply,")
        self._open_containers.add(id(value))
        try:
            (self._add_items if kind in SEQUENCES else self._add_mapping)(location, value, kind)
        finally:
            self._open_containers.remove(id(value))

    def _add_items(self, location: str, value: Any, kind: Any) -> None:
        """Describe the items that a container has as a `kind`: methods of a subclass may show others."""
        self.words.append(f"{kind.__name__} of {kind.__len__(value)}")
        if isinstance(value, deque):
            self.words.append(f"at most {value.maxlen}")
        if isinstance(value, (list, set, deque)):
            self.watch.content(value, kind)
        items = kind.__iter__(value)
        if isinstance(value, (set, frozenset)):
            items = sorted(items, key=lambda item: (type(item).__name__, repr(item)))
        for number, item in enumerate(items):
            self.add(f"{location}[{number}]", item)

    def _add_mapping(self, location: str, value: Any, kind: Any) -> None:
        self.words.append(f"{kind.__name__} of {kind.__len__(value)}")
        self.watch.content(value, kind)
        for key, item in kind.items(value):
            self.add(f"{location} key", key)
            if self.watch.item(value, key):
                self.add(f"{location}[{key!r}]", item)
        if isinstance(value, collections.defaultdict):
            self.watch.slot(value, "default_factory")
            self.add(location, value.default_factory)

    # --- tensors

    def add_tensor(self, location: str, tensor: torch.Tensor) -> None:
        """Describe a tensor without its bytes. The user of `tensors` digests these."""
        kind, bits = type(tensor), tensor.is_neg() or tensor.is_conj()
        self.watch.type_of(tensor)
        if tensor.layout != torch.strided or tensor.device.type == "meta" or bits:
            state = "negated or conjugated lazily" if bits else f"{tensor.layout} on {tensor.device.type}"
            raise Undescribable(f"{location}, a tensor {state},")
        self.tensors[id(tensor)] = location, tensor
        self.words.append(f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        if kind not in (torch.Tensor, nn.Parameter, nn.Buffer):
            self.add(location, kind)
            if is_traceable_wrapper_subclass(tensor):
                self.add(location, tensor.__tensor_flatten__()[1])
        slots = {name: getattr(tensor, name) for name in slots_of(kind) if hasattr(tensor, name)}
        self._add_slots(location, tensor, slots)
        compiled = {name for name in tensor.__dict__ if name.startswith("_dynamo")}
        self._add_state(location, tensor, _TENSOR_MARKS | compiled)

    def _add_array(self, location: str, array: np.ndarray) -> None:
        try:
            self.tensors[id(array)] = location, torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise Undescribable(f"{location}, an array of {array.dtype},") from error
        self.words.append(f"array {array.dtype.str} {array.shape} {array.strides}")

    # --- classes, PyTorch modules and configurations: see `CodeDescription` and `ModelDescription`

    @abstractmethod
    def add_members(self, location: str, kind: type, names: frozenset[str]) -> None:
        """Describe members of a class."""

    def add_module(self, location: str, module: nn.Module) -> None:
        """Reject a PyTorch module. Only `ModelDescription` describes modules."""
        raise Undescribable(f"{location}, a module,")

    def add_config(self, location: str, config: PreTrainedConfig) -> None:
        """Reject a configuration. Only `ModelDescription` describes configurations."""
        raise Undescribable(f"{location}, a configuration,")


def cached_functions(wrapper: Any) -> list[types.FunctionType]:
    """Return the function that an `lru_cache` calls in a list, regardless of `__wrapped__`; empty if there is none."""
    return [value for value in gc.get_referents(wrapper) if isinstance(value, types.FunctionType)][:1]


def functions_of(member: Any, functions: list[types.FunctionType]) -> list[types.FunctionType]:
    """Append the functions that a class member runs, including decorated ones, to `functions`, and return it."""
    if isinstance(member, Replacement):
        functions_of(member.original, functions)
    elif isinstance(member, property):
        functions_of(member.fget, functions)
        functions_of(member.fset, functions)
    elif isinstance(member, (staticmethod, classmethod, types.MethodType)):
        functions_of(member.__func__, functions)
    elif isinstance(member, (functools.partial, functools.partialmethod, functools.cached_property)):
        functions_of(member.func, functions)
    elif isinstance(member, functools._lru_cache_wrapper):
        functions += cached_functions(member)
    elif isinstance(member, types.FunctionType) and member not in functions:
        functions.append(member)
        for cell in member.__closure__ or ():
            with suppress(ValueError):  # the cell is empty
                functions_of(cell.cell_contents, functions)
    return functions
