"""Replacement of functions while a model is attached, and copies of the model as if it never had been."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.utils.hooks import RemovableHandle


class Replacement:
    """Replacement of a transformers function or a model's method, while a model is attached.

    Args:
        original: The replaced function. Results are the same.
    """

    users = 0
    """Number of attached models that share it (see `Patch`)."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(cast(Callable[..., Any], self), original)
        self.original = original


_patch_lock = threading.Lock()


@dataclass(frozen=True)
class Patch:
    """Replacement of a function that all attached models share.

    Args:
        get: Returns the function.
        put: Puts another one in its place.
        make: Makes the replacement of a function.
    """

    get: Callable[[], Any]
    put: Callable[[Any], object]
    make: Callable[[Callable[..., Any]], Replacement]

    def apply(self) -> None:
        """Replace the function, or count one more user of its replacement."""
        with _patch_lock:
            function = self.get()
            if not isinstance(function, Replacement):
                function = self.make(function)
                self.put(function)
            function.users += 1

    def undo(self) -> None:
        """Undo one `apply`; the last call restores the function."""
        with _patch_lock:
            function = self.get()
            if isinstance(function, Replacement):
                function.users -= 1
                if not function.users:
                    self.put(function.original)


State = dict[str, Any]


def _reduce(module: nn.Module, clean: Callable[[State], None], protocol: Any) -> Any:
    """Reduce a module as its class does, and let `clean` remove what was added from a copy of its `__dict__`."""
    reduced = type(module).__reduce_ex__(module, protocol)
    assert isinstance(reduced, tuple)  # a string names a global, which no module instance is
    function, arguments, state, *items = reduced
    if isinstance(state, dict):
        state = _without_added(state)
        clean(state)
    return function, arguments, state, *items


def _replicate(module: nn.Module, clean: Callable[[State], None]) -> Any:
    """Replicate a module as its class does for `nn.DataParallel`, and let `clean` remove what was added."""
    replica = type(module)._replicate_for_data_parallel(module)
    replica.__dict__ = _without_added(replica.__dict__)
    clean(replica.__dict__)
    return replica


def _without_added(state: State) -> State:
    return {name: value for name, value in state.items() if name not in ADDED}


ADDED: dict[str, Callable[..., Any]] = {"__reduce_ex__": _reduce, "_replicate_for_data_parallel": _replicate}
"""Attributes of an attached module: the methods with which it is copied, pickled and replicated."""


def copy_without(module: nn.Module, clean: Callable[[State], None]) -> None:
    """Omit from later copies, pickles and replicas of `module` what `clean` removes from its state.

    `pickle`, `torch.save` and `copy.deepcopy` call `__reduce_ex__` of an object. The result can be loaded where this
    library is not installed. A replica with our bound methods would compute with the weights of the original.
    """
    for name, method in ADDED.items():
        module.__dict__[name] = functools.partial(method, module, clean)


def copy_as_it_is(module: nn.Module) -> None:
    """Undo `copy_without`."""
    for name, method in ADDED.items():
        if getattr(module.__dict__.get(name), "func", None) is method:
            del module.__dict__[name]


def without_hook(handle: RemovableHandle) -> Callable[[State], None]:
    """Return a function that removes one forward hook from a module's state."""

    def clean(state: State) -> None:
        for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            if handle.id in state.get(name, ()):
                hooks = state[name] = state[name].copy()
                del hooks[handle.id]

    return clean
