"""Description of classes, by the members that described code names, and of what else runs a module.

These are hooks, and replacements of its methods. Those of trusted packages are described, or ignored if they change no
result. Those of other code are a problem: passes of the model run without the store unless the user names the code with
`TieredCache(tag=...)`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils.module_tracker import ModuleTracker

from ..patches.replacement import Replacement
from .description import HEAP_TYPE, functions_of
from .functions import LEAF, NOTHING, FunctionDescription
from .origin import (
    CONSTRUCTORS,
    INSTALLED,
    NO_MEMBER,
    NOT_CONSTRUCTED,
    TRUSTED,
    USER,
    code_digest,
    compiled_from,
    home_of,
    is_special,
    origin_of,
    origin_of_class,
    referenced_names,
    uncalled,
)

METHODS = ("forward", "_call_impl", "_compiled_call_impl")
"""Methods that run a module and may be replaced by an attribute of the module."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OURS = "hf_tiered_cache"
_OBSERVERS = frozenset({"accelerate", "transformers"})  # packages with hooks that only move or observe tensors
_MOVERS = frozenset({"ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload"})
"""Hooks of accelerate that only move tensors."""
_WATCHED = frozenset({*METHODS, "_hf_hook", "_old_forward"})


class CodeDescription(FunctionDescription):
    """A description that follows functions, classes and what else runs a module. See `FunctionDescription`."""

    def _describe_class(self, location: str, kind: type) -> None:
        names = NOTHING if issubclass(kind, NOT_CONSTRUCTED) else CONSTRUCTORS | {"__call__"}
        if issubclass(kind, torch.autograd.Function):
            names = frozenset({"forward"})  # which `apply` runs
        elif origin_of_class(kind) != USER:  # of a package: calls of its constructors are not followed
            self._depth = LEAF
        self.add_members(location, kind, names, special=False)

    def _add_called_members(self) -> None:
        for kind, location in list(self._user_classes.items()):
            named = {name for base in kind.__mro__ if origin_of_class(base) == USER for name in base.__dict__}
            self._guard(self.add_members, location, kind, frozenset(named & self._called - uncalled(kind)), False)
        for kind, location in list(self._package_classes.items()):
            named = {name for base in kind.__mro__ if _holds_methods(base) for name in base.__dict__}
            self._guard(self.add_members, location, kind, frozenset(named & self._called - uncalled(kind)), False)

    def add_members(self, location: str, kind: type, names: frozenset[str], special: bool = True) -> None:
        """Describe the members of a class with the given names, and the members that their code refers to.

        Of a class in user code, `forward`, special methods and data are described, too, and if `special`, the special
        methods of its bases. `finish` describes what other code calls.
        """
        described = self._members.get(kind)
        if described is not None and names <= described and not (special and kind not in self._with_special):
            return
        bases = [base for base in kind.__mro__ if base.__flags__ & HEAP_TYPE]
        pending = set(names)
        if described is None:
            described = self._members[kind] = set()
            self.words.append(" ".join(f"{base.__module__}.{base.__qualname__}" for base in bases))
            self.watch.slot(kind, "__mro__")  # a class gets another one if the bases of any of its bases change
            for base in bases:
                self.watch.members(base)
                if origin_of_class(base) == USER:
                    self._user_classes[kind] = location
                    pending |= self._add_own_members(base) - uncalled(kind) - {"__hash__"}
            if origin_of_class(type(kind)) == USER:  # a metaclass
                self.watch.type_of(kind)
                self.add(location, type(kind))
        if special and kind not in self._with_special:
            self._with_special.add(kind)
            self._package_classes[kind] = location
            pending |= {name for base in bases for name in base.__dict__ if is_special(name)}
        pending -= described | NO_MEMBER
        while pending:
            described |= pending
            referenced: set[str] = set()
            for base in bases:
                origin = origin_of_class(base)
                for name in sorted(pending & base.__dict__.keys()):
                    if not self.watch.member(base, name):
                        continue
                    self.words.append(f"{base.__qualname__}.{name}")
                    member = base.__dict__[name]
                    self._refer(f"{location}.{name}", member, origin)
                    for function in functions_of(member, []):
                        referenced |= referenced_names(function.__code__)
            pending = referenced - described - NO_MEMBER

    def _add_own_members(self, kind: type) -> set[str]:
        """Describe the code of all members of a user class, and return those that are used without their name."""
        unnamed = set()
        for name in sorted(kind.__dict__.keys() - NO_MEMBER):
            functions = functions_of(kind.__dict__[name], [])
            self.watch.member(kind, name)
            self.words += [name, *(code_digest(function.__code__) for function in functions)]
            for function in functions:
                self.watch.function(function)
            if not functions or name == "forward" or (name.startswith("__") and name.endswith("__")):
                unnamed.add(name)
        return unnamed

    # --- what else runs a module

    def add_runners(self, location: str, module: nn.Module) -> None:
        """Watch and describe the type of a module, its hooks and the replacements of its methods."""
        self.watch.type_of(module)
        self.watch.state_of(module)
        for name in (*_HOOKS, "_parameters", "_buffers", "_modules"):
            self.watch.inner(module.__dict__, name)
        for name in _WATCHED & module.__dict__.keys():  # an added attribute changes the size of the dictionary
            self.watch.item(module.__dict__, name)
        for name in _HOOKS:
            self.add_hooks(location, module.__dict__[name])
        for name in METHODS:
            self._add_method(location, module, name)

    def add_hooks(self, location: str, hooks: dict[int, Callable[..., Any]]) -> None:
        for key, hook in list(hooks.items()):  # passes in other threads add and remove their own
            self.watch.item(hooks, key)
            home = home_of(hook)
            if home not in TRUSTED:
                self.problem = self.problem or f"a hook on {location}"
            elif isinstance(getattr(hook, "__self__", None), ModuleTracker):
                continue  # tracks the current module only
            elif home in _OBSERVERS:
                self._check(f"a hook on {location}", hook)
            elif home != _OURS:
                self.add(f"a hook on {location}", hook)

    def _add_method(self, location: str, module: nn.Module, name: str) -> None:
        """Check the replacements of a method: by this library, by `torch.compile`, or by accelerate with its hook."""
        method: Any = module.__dict__.get(name)
        while method is not None:
            if isinstance(method, Replacement):
                method = method.original
            elif (compiled := compiled_from(method)) is not None:
                for cell in method.__closure__ or ():
                    self.watch.cell(cell)
                method = compiled
            elif _is_accelerates(method, module):
                self._check_hook(location, module.__dict__.get("_hf_hook"))
                method = module.__dict__.get("_old_forward")
            elif _is_own(method, module, name) or (type(module) is OptimizedModule and _runs_inner(method, module)):
                return
            elif home_of(method) in TRUSTED - {"accelerate"}:
                self.add(f"the replaced {name} of {location}", method)
                return
            else:
                self.problem = self.problem or f"the replaced {name} of {location}"
                return

    def _check_hook(self, location: str, hook: Any) -> None:
        """Watch an accelerate hook. One that only moves tensors is not described. Hooks of others are a problem."""
        where, methods = f"the accelerate hook of {location}", frozenset({"pre_forward", "post_forward"})
        if hook is None or origin_of_class(type(hook)) not in TRUSTED:
            self.problem = self.problem or where
            return
        if type(hook).__name__ not in _MOVERS:
            self.add(where, hook)
        self.watch.type_of(hook)
        for name in ("hooks", "weights_map", *methods):
            self.watch.item(hook.__dict__, name)
        if not methods.isdisjoint(hook.__dict__):
            self.problem = self.problem or where
        self.check_class(where, type(hook), methods)
        for inner in getattr(hook, "hooks", ()):
            self._check_hook(location, inner)

    def _check(self, location: str, function: Any) -> None:
        """Watch a function without a description; record a problem if it runs user code."""
        aside = CodeDescription(watch=self.watch, statics=self._statics)
        aside.add(location, function)
        self._guard(lambda location: aside.finish(), location)
        if USER in aside.origins:
            self.problem = self.problem or location

    def check_class(self, location: str, kind: type, names: frozenset[str]) -> None:
        """Watch members of a class without a description; record a problem if they run user code."""
        if kind not in self._checked:
            aside = CodeDescription(watch=self.watch, statics=self._statics)
            self._guard(aside.add_members, location, kind, names)
            self._guard(lambda location: aside.finish(), location)
            self._checked[kind] = USER in aside.origins
        if self._checked[kind]:
            self.problem = self.problem or location


def _holds_methods(kind: type) -> bool:
    """Return whether passes may call methods of a package's class on an object that they do not belong to.

    The methods of torch and of the base classes of transformers have common names, which mean others in most code.
    """
    is_module_of_others = issubclass(kind, nn.Module) and origin_of_class(kind) == INSTALLED
    return is_module_of_others or kind.__module__.startswith(("transformers.models.", "peft.tuners."))


def _is_own(method: Any, module: nn.Module, name: str) -> bool:
    """Return whether a method is the one that the class of a module has under this name."""
    own = isinstance(method, types.MethodType) and method.__self__ is module
    return own and method.__func__ is getattr(type(module), name.removeprefix("_compiled"), None)  # `module.compile()`


def _runs_inner(method: Any, wrapper: nn.Module) -> bool:
    """Return whether a method of a compiled module, uncompiled, calls the module in it."""
    inner = wrapper._modules["_orig_mod"]
    return method is inner or method == types.MethodType(type(inner).__call__, inner)


def _is_accelerates(method: Any, module: nn.Module) -> bool:
    """Return whether a method is the wrapper of accelerate around `_old_forward`."""
    if not isinstance(method, functools.partial) or method.args != (module,) or method.keywords:
        return False
    return isinstance(method.func, types.FunctionType) and origin_of(method.func) == "accelerate"
