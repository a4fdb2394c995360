"""Copying and pickling of an attached model as if it had never been attached.

`pickle`, `torch.save` and `copy.deepcopy` call `__reduce_ex__` of an object. Each module that `attach` changes gets its
own, which omits what `attach` added. The result can be loaded where this library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_NAME = "__reduce_ex__"
State = dict[str, Any]


class _Reduce:
    """`__reduce_ex__` of one module.

    Args:
        module: The module.
        clean: Removes what was added from a copy of the module's `__dict__`.
    """

    def __init__(self, module: nn.Module, clean: Callable[[State], None]) -> None:
        self.module = module
        self.clean = clean

    def __call__(self, protocol: Any) -> Any:
        reduced = type(self.module).__reduce_ex__(self.module, protocol)
        assert isinstance(reduced, tuple)  # a string names a global, which no module instance is
        function, arguments, state, *items = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != _NAME}
            self.clean(state)
        return function, arguments, state, *items


def pickle_without(module: nn.Module, clean: Callable[[State], None]) -> None:
    """Omit from later copies and pickles of `module` what `clean` removes from its state."""
    module.__dict__[_NAME] = _Reduce(module, clean)


def pickle_as_it_is(module: nn.Module) -> None:
    """Undo `pickle_without`."""
    if isinstance(module.__dict__.get(_NAME), _Reduce):
        del module.__dict__[_NAME]


def without_hook(handle: RemovableHandle) -> Callable[[State], None]:
    """Return a function that removes one forward hook from a module's state."""

    def clean(state: State) -> None:
        for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            if handle.id in state.get(name, ()):
                hooks = state[name] = state[name].copy()
                del hooks[handle.id]

    return clean
