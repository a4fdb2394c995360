"""Description of what runs a module besides the code of its class: hooks, and replacements of its methods.

Those of trusted packages are described, or ignored if they change no result. Those of other code are a problem: passes
of the model run without the store unless the user names the code with `TieredCache(tag=...)`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils.module_tracker import ModuleTracker

from ..patches.replacement import Replacement
from .code import CodeDescription
from .functions import Statics
from .origin import TRUSTED, USER, compiled_from, home_of, origin_of, origin_of_class
from .watch import Watch

METHODS = ("forward", "_call_impl", "_compiled_call_impl")
"""Methods that run a module and may be replaced by an attribute of the module."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OURS = "hf_tiered_cache"
_OBSERVERS = frozenset({"accelerate", "transformers"})  # packages with hooks that only move or observe tensors
_MOVERS = frozenset({"ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload"})
"""Hooks of accelerate that only move tensors."""
_WATCHED = frozenset({*METHODS, "_hf_hook", "_old_forward"})


class RunnerDescription(CodeDescription):
    """Description that follows hooks, and replacements of the methods of modules, too."""

    def __init__(self, watch: Watch, statics: Statics) -> None:
        super().__init__(watch, statics)
        self._checked: dict[type, bool] = {}  # class that is not described -> whether it runs user code

    def add_runners(self, location: str, module: nn.Module) -> None:
        """Watch and describe the hooks of a module and the replacements of its methods."""
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
        if hook is None or origin_of_class(type(hook)) not in TRUSTED:
            self.problem = self.problem or f"the accelerate hook of {location}"
            return
        if type(hook).__name__ not in _MOVERS:
            self.add(f"the accelerate hook of {location}", hook)
        self.watch.type_of(hook)
        for name in ("hooks", "weights_map"):
            self.watch.item(hook.__dict__, name)
        for name in ("pre_forward", "post_forward"):
            self.watch.item(hook.__dict__, name)
            if name in hook.__dict__:
                self.problem = self.problem or f"the accelerate hook of {location}"
        self.check_class(f"the accelerate hook of {location}", type(hook), frozenset({"pre_forward", "post_forward"}))
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
