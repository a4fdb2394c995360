"""Description of functions, by what they refer to."""

from __future__ import annotations

import builtins
import enum
import functools
import logging
import os
import sys
import types
import weakref
from abc import abstractmethod
from contextlib import suppress
from importlib.util import resolve_name
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import GeneralInterface

from ..patches.replacement import Replacement
from .description import BUILTIN, HEAP_TYPE, INERT, PLAIN, PLAIN_TORCH, SEQUENCES, Description, Undescribable
from .origin import (
    DRAWING,
    ENVIRONMENT,
    INSTALLED,
    PYTHON,
    USER,
    References,
    code_digest,
    compiled_from,
    file_digest,
    home_of,
    impure_part,
    origin_of,
    origin_of_class,
    origin_of_module,
    referenced_names,
    references,
    text_names,
)
from .watch import Places, Watch

_FOREIGN_DEPTH = 1  # maximum depth of calls within torch and other installed packages that are followed
_LEVEL_READERS = frozenset({"isEnabledFor", "getEffectiveLevel", "level"})
"""Names by which code reads the level of a logger."""
LEAF = 1 << 10
"""Depth at which no call is followed."""
_STATIC_ITEMS = 64
NOTHING: frozenset[str] = frozenset()
_DESCRIBED = (
    *(type, types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper),
    *(property, staticmethod, classmethod, Replacement, torch.Tensor, nn.Module, enum.Enum, np.generic),
    *(slice, *PLAIN_TORCH, *BUILTIN),
)
"""Types of package objects that are described in full; other package objects are described by their type only."""
_REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)
_LOADED = frozenset(
    {
        *("torch", "torch.nn", "torch.nn.functional", "torch._C", "torch._C._nn", "torch._C._linalg"),
        *("torch.linalg", "torch.special", "torch.fft", "torch.autograd", "torch.utils", "torch.backends"),
    }
)
"""Submodules that are loaded whenever torch is. The set of other loaded submodules differs between processes."""


class FunctionDescription(Description):
    """A description that follows functions into what they refer to. `CodeDescription` follows classes, too.

    Args:
        watch: Records the places that are read; a new one by default.
        statics: Objects found first for package globals that are described by their type only; a new dictionary by
            default. If another object replaces one of them, the model is undescribable.
    """

    def __init__(self, watch: Watch | None = None, statics: Places | None = None) -> None:
        super().__init__(watch)
        self._statics: Places = {} if statics is None else statics
        self._members: dict[type, set[str]] = {}
        self._with_special: set[type] = set()  # classes with described special methods
        self._globals: set[tuple[int, str, bool]] = set()  # globals described so far
        self.origins: set[str] = set()
        """Origins of the classes of described modules, and `USER` if a described function is user code."""
        self.compiles = False
        """True if code outside of torch and transformers refers to a function that `torch.compile` made."""
        self.is_impure = False
        """True if user code may not use a described part of the standard library."""
        self._names: set[str] = set()  # names that user code or another installed package refers to
        self._called: set[str] = set()  # names that any described code refers to, or described texts
        self._user_classes: dict[type, str] = {}  # classes with members in user code, with their locations
        self._package_classes: dict[type, str] = {}  # classes of objects that were described, with their locations
        self._loggers: dict[int, logging.Logger] = {}  # that user code refers to
        self._checked: dict[type, bool] = {}  # class that is not described -> whether it runs user code
        self._ignored: list[tuple[str, dict[str, Any], str, set[str]]] = []  # attributes that no code is known to read

    def _add_value(self, location: str, value: Any) -> None:
        if type(value) is str:
            self._called |= text_names(value)
        if self._origin == USER and isinstance(value, (type, types.FunctionType, *BUILTIN)):
            if impure := impure_part(value):
                self.is_impure = True
                raise Undescribable(f"{location}, which uses {impure},")
            if value is os.getenv:
                self.add(location, os.environ)
        if self._origin == USER and isinstance(value, logging.Logger):
            self._loggers[id(value)] = value
        super()._add_value(location, value)

    def ignore(self, location: str, state: dict[str, Any], name: str, by_any_code: bool = False) -> None:
        """Leave out an attribute, unless code that is not trusted, or any code, refers to its name (see `finish`)."""
        self._ignored.append((location, state, name, self._called if by_any_code else self._names))

    def finish(self) -> None:
        """Describe the queued functions and classes, and the members of held modules that user code may refer to.

        Call this after all values are added.

        Raises:
            Undescribable: There is a problem.
        """
        count = -1
        while self._later or len(self._called) > count:
            while self._later:
                location, value, self._depth, referrer = self._later.popleft()
                if isinstance(value, type):
                    self._guard(self._describe_class, location, value)
                else:
                    self._guard(self._describe_function, location, value, referrer)
            count = len(self._called)
            self._add_called_members()
            for location, module in list(self._held_modules.values()):
                self._add_modules(location, [module], frozenset(self._names), USER)
            self._depth = 0
            if self._names & _LEVEL_READERS:
                self._add_levels()
            ignored, self._ignored = self._ignored, []
            for location, state, name, names in ignored:
                if name not in names:
                    self._ignored.append((location, state, name, names))
                elif name in state:
                    self._add_named_item(location, state, name)
        self._depth = 0
        if self.problem:
            raise Undescribable(self.problem)

    def _add_levels(self) -> None:
        """Describe the levels of the loggers that user code refers to."""
        while self._loggers:
            _, logger = self._loggers.popitem()
            self.words.append(f"level {logger.getEffectiveLevel()} {logger.manager.disable} {logger.disabled}")
            self.watch.item(logger.manager.__dict__, "_disable")
            ancestor: logging.Logger | None = logger
            while ancestor is not None:
                self.watch.item(ancestor.__dict__, "level")
                self.watch.item(ancestor.__dict__, "disabled")
                ancestor = ancestor.parent

    @abstractmethod
    def _describe_class(self, location: str, kind: type) -> None:
        """Describe a class."""

    @abstractmethod
    def _add_called_members(self) -> None:
        """Describe the members of described classes that any described code names."""

    # --- functions

    def _describe_function(self, location: str, function: types.FunctionType, referrer: str) -> None:
        """Describe a function that code of the origin `referrer` refers to.

        A package's function that user code holds may be made by a decorator: then its closure holds what the user
        decorated, and the arguments of the decorator.
        """
        code, origin = function.__code__, origin_of(function)
        is_compiled = compiled_from(function) is not None
        self.compiles |= is_compiled and referrer in (USER, INSTALLED)
        holder = USER if referrer == USER and not is_compiled else origin
        self._called |= referenced_names(code)
        self.watch.function(function)
        self.words.append(f"def {function.__qualname__} {code_digest(code)}")
        if origin == INSTALLED:
            self.words.append(file_digest(code.co_filename))
        elif origin == USER:
            self.origins.add(USER)
            self._add_state(location, function)
        for value in (code.co_argcount and function.__defaults__) or ():  # without parameters, they have no effect
            self._refer(location, value, origin)
        keywords = (code.co_kwonlyargcount and function.__kwdefaults__) or {}
        for name, value in keywords.items():
            self.watch.item(keywords, name)
            self.words.append(name)
            self._refer(location, value, origin)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.watch.cell(cell)
            try:
                content = cell.cell_contents
            except ValueError:
                self.words.append(f"{name} unset")
                continue
            is_cache = isinstance(content, weakref.WeakKeyDictionary)  # such as that of `functools.singledispatch`
            self._refer(f"{location} ({name})", content, origin if is_cache else holder)
        if origin in ("torch", INSTALLED) and not (function.__name__ == "forward" and origin == "torch"):
            self._depth += 1  # `forward` of a torch module only passes on what it holds
        if origin == USER:
            self._depth = 0
            refs = references(code)
            self._names |= refs.members
            self._called |= refs.members
            self._add_variables(location, refs.variables)
            self._add_globals(location, function.__globals__, refs.globals, refs.members, USER)
            self._add_imports(location, function.__globals__, refs)
            draws = sorted(DRAWING & (refs.globals | refs.members))
            if draws and "training" not in refs.members:  # most code draws random numbers in training mode only
                self.problem = self.problem or f"{location}, which uses {draws[0]},"
        elif origin != PYTHON and self._depth <= _FOREIGN_DEPTH:
            names = referenced_names(code)
            if origin == INSTALLED:
                self._names |= names
            self._add_globals(location, function.__globals__, names, names, origin)

    def _add_globals(
        self, location: str, namespace: dict[str, Any], names: frozenset[str], members: frozenset[str], origin: str
    ) -> None:
        """Describe the globals and builtins called `names`, and of modules among them the `members`."""
        modules = []
        for name in sorted(names):
            if name in namespace:
                self._add_global(location, namespace, name, origin)
                value = namespace.get(name)
                if isinstance(value, types.ModuleType):
                    modules.append(value)
            elif origin == USER or name in builtins.__dict__:
                self.watch.item(namespace, name)
                self._add_global(location, builtins.__dict__, name, USER if origin == USER else PYTHON)
        self._add_modules(location, modules, members, origin)

    def _add_variables(self, location: str, names: frozenset[str]) -> None:
        """Describe environment variables, or all of them if "" is among the names."""
        if "" in names:
            self.add(location, os.environ)
            return
        state: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        for name in sorted(names):
            key = os.environ.encodekey(name)
            self.watch.item(state, key)
            self.words.append(f"variable {name} {state.get(key)!r}")

    def _add_imports(self, location: str, namespace: dict[str, Any], refs: References) -> None:
        """Describe what user code refers to in modules that it imports within functions."""
        for name, members in sorted(refs.imports):
            absolute_name = name
            with suppress(ImportError):  # no package has that many parents
                absolute_name = resolve_name(name, namespace.get("__package__") or "")
            self.watch.item(sys.modules, absolute_name)
            module = sys.modules.get(absolute_name)
            if module is None or not all(hasattr(module, member) for member in members):
                self.problem = self.problem or f"{location}, which imports {name},"
            if module is not None:
                self._add_modules(location, [module], refs.members, USER)

    def _add_modules(self, location: str, modules: list[types.ModuleType], names: frozenset[str], origin: str) -> None:
        """Describe the members among `names` of Python modules and their submodules."""
        visited: set[int] = set()
        for module in modules:  # grows in the loop
            if id(module) in visited:
                continue
            visited.add(id(module))
            module_origin = origin if origin == USER else origin_of_module(module)
            members = names | {"__getattr__"} if origin_of_module(module) == USER else names
            if origin == USER and (module is torch.ops or isinstance(module, torch._ops._OpNamespace)):
                _bind_operators(module, names)
            for name in sorted(members if origin == USER else members & module.__dict__.keys()):
                value = module.__dict__.get(name)
                if origin == USER or not isinstance(value, types.ModuleType):
                    self._add_global(f"{location}, module {module.__name__}", module.__dict__, name, module_origin)
                if isinstance(value, types.ModuleType) and (origin == USER or value.__name__ in _LOADED):
                    modules.append(value)

    def _add_global(self, location: str, namespace: dict[str, Any], name: str, origin: str) -> None:
        """Describe a global. One that the namespace lacks is only watched."""
        key = id(namespace), name, origin == USER
        if not self.watch.item(namespace, name) or name not in namespace or key in self._globals:
            return
        self._globals.add(key)
        self.words.append(name)
        value = namespace[name]
        if isinstance(value, types.ModuleType):  # its members are described by name
            return
        if name in ENVIRONMENT and (value is os.environ or value is os.getenv):  # see `_add_variables`
            return
        is_drawing = name in DRAWING and any(value is getattr(home, name, None) for home in (torch, functional))
        if is_drawing and origin == USER:  # see `_describe_function`
            return
        is_opaque = origin != USER and _is_opaque(value)
        if is_opaque and self._statics.setdefault((id(namespace), name), (namespace, value))[1] is not value:
            self.problem = self.problem or f"the global {name} of {namespace.get('__name__')}, which was replaced,"
        self._refer(f"{location}, global {name}", value, origin)

    def _refer(self, location: str, value: Any, origin: str) -> None:
        """Describe a value that code of the given origin refers to."""
        before, self._origin = self._origin, origin
        try:
            if origin == USER:
                self.add(location, value)
            else:
                self._add_static(location, value, 0)
        finally:
            self._origin = before

    def _add_static(self, location: str, value: Any, depth: int) -> None:
        """Describe a value of a package: functions, classes and plain values in full, other objects by their type.

        A user's object that replaces such a value is described in full.
        """
        kind = type(value)
        if isinstance(value, GeneralInterface):  # the model description covers the entry in use of transformers' own
            self.words.append("registry")
            if not any(value is registry for registry in _REGISTRIES):
                self.add(location, value._local_mapping)
        elif kind is tuple:
            self.words.append(f"tuple of {len(value)}")
            for item in value if len(value) <= _STATIC_ITEMS and depth < 2 else ():
                self._add_static(location, item, depth + 1)
        elif kind is dict:  # a table that grows as modules are loaded; its functions must not change
            self.words.append("dict")
            for key, item in list(value.items())[:_STATIC_ITEMS]:
                if callable(item) and isinstance(key, str):
                    self.watch.item(value, key)
                    if self._statics.setdefault((id(value), key), (value, item))[1] is not item:
                        self.problem = self.problem or f"{location}, in which {key!r} was replaced,"
                    if home_of(item) == USER:
                        self.add(f"{location}[{key!r}]", item)
            self._add_settings(value)
        elif self._origin == INSTALLED and kind in SEQUENCES and all(type(item) in PLAIN for item in value):
            self.add(location, value)
        elif _is_opaque(value):
            self.words.append(f"some {kind.__qualname__}")
            if not isinstance(value, INERT):
                self._add_settings(getattr(value, "__dict__", {}))
        else:
            self.add(location, value)

    def _add_settings(self, state: dict[Any, Any]) -> None:
        """Describe the plain items of a dictionary of an installed package."""
        if self._origin != INSTALLED:  # the tables of other packages grow
            return
        self.watch.size(state)
        settings = {key: item for key, item in list(state.items()) if type(key) in PLAIN and type(item) in PLAIN}
        for key in sorted(settings, key=repr):
            if self.watch.item(state, key):
                self.words.append(f"{key!r} {settings[key]!r}")


def _bind_operators(module: types.ModuleType, names: frozenset[str]) -> None:
    """Bind the operators with these names to `torch.ops` or one of its namespaces, as their first use does."""
    for operator in torch._C._dispatch_get_all_op_names():
        namespace, name = operator.partition(".")[0].split("::")
        if name in names and namespace in (names if module is torch.ops else (module.name,)):
            getattr(getattr(torch.ops, namespace), name, None)


def _is_opaque(value: Any) -> bool:
    """Return whether an object belongs to a package and is neither code nor plain data."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, _DESCRIBED):
        return False
    return not (kind.__flags__ & HEAP_TYPE) or origin_of_class(kind) != USER
