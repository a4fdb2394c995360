"""Deferred RoPE: keys are captured before their rotation (see `rope.py`).

The patches watch the modules that make cos and sin tables, and the modeling code's `apply_rotary_pos_emb` and its
variants.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .rope import Call, RotaryCall, RotaryTable
from .scope import Patch, Replacement, current


def watch_tables(model: nn.Module) -> list[tuple[nn.Module, RemovableHandle]]:
    """Register a hook on every module that makes cos and sin tables. Return these modules with their hook handles."""
    tables = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            places = _places(module.forward)
            if "position_ids" in places:
                tables.append((module, module.register_forward_hook(_note_table(places), with_kwargs=True)))
    return tables


def _places(function: Callable[..., Any]) -> dict[str, int]:
    """Return the index of each parameter of a function, by name."""
    return {name: place for place, name in enumerate(inspect.signature(function).parameters)}


def _note_table(places: Mapping[str, int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        scope = None if torch.compiler.is_compiling() else current()
        if scope is None or not isinstance(output, tuple) or len(output) != 2:
            return
        call = Call(module.forward, places, args, kwargs)
        positions, (cos, sin) = call["position_ids"], output
        # one position per token, or several (vision models), which are equal for text
        if positions.ndim in (2, 3) and cos.ndim == 3 and cos.shape[1] == positions.shape[-1]:
            scope.tap.tables.append(RotaryTable(call, cos, sin))

    return hook


def patches_of(model: nn.Module) -> list[Patch]:
    """Return patches of the functions that rotate queries and keys, as found by the model's classes."""
    patches = []
    for module in (sys.modules.get(name) for name in sorted({type(module).__module__ for module in model.modules()})):
        for name, function in list(vars(module).items()) if module is not None else ():
            is_rotary = name.startswith("apply_") and "rotary" in name and callable(function)
            if is_rotary and {"q", "k", "cos", "sin"} <= inspect.signature(function).parameters.keys():
                access = partial(getattr, module, name), partial(setattr, module, name)
                patches.append(Patch(*access, _WatchedFunction))
    return patches


class _WatchedFunction(Replacement):
    """Rotation function that reports its calls to the current pass."""

    def __init__(self, function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(function)
        self.places = _places(function)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = self.original(*args, **kwargs)
        if not torch.compiler.is_compiling() and (scope := current()) is not None:
            scope.tap.last = RotaryCall(self.original, self.places, args, kwargs, rotated[1])
        return rotated
