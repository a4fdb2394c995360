"""Members of classes: which of them passes call, and which functions they run."""

from __future__ import annotations

import enum
import functools
import types
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..patches.replacement import Replacement
from .description import cached_functions

CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_UNCALLED = CONSTRUCTORS | {
    *("__init_subclass__", "__class_getitem__", "__set_name__", "__del__"),
    *("__repr__", "__str__", "__format__", "__dir__"),
    *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"),
    *("__copy__", "__deepcopy__", "__sizeof__", "__hash__"),
}
"""Special methods that change no result: construction, printing, pickling, hashing. torch.compile replaces some."""
NO_MEMBER = frozenset(
    {
        *("loss_function", "loss_type"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__annotate_func__"),
        *("__annotations_cache__", "__slotnames__", "__qualname__"),
    }
)
"""Members that change no result."""
NOT_CONSTRUCTED = (BaseException, enum.Enum, nn.Module, torch.Tensor, PreTrainedConfig)
"""Classes with instances that no pass creates, or whose constructors pass values on only."""


def uncalled(kind: type) -> frozenset[str]:
    """Return the names of methods that no pass calls of a class."""
    return _UNCALLED if issubclass(kind, NOT_CONSTRUCTED) else frozenset()


def is_special(name: str) -> bool:
    """Return whether passes may call a method of this name without a reference to the name."""
    return name.startswith("__") and name.endswith("__") and name not in _UNCALLED


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
