"""Deferred RoPE: keys are captured before their rotation (see `rope.py`).

The patches watch the modules that make cos and sin tables, and the modeling code's `apply_rotary_pos_emb` and its
variants. Compiled code reports to them only if it was asked to (`watching_compiled`), since each report splits it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .layers import offloaded
from .replacement import Patch, Replacement
from .rope import Call, RotaryCall, RotaryTable
from .scope import current


def watch_tables(model: nn.Module) -> list[tuple[nn.Module, RemovableHandle]]:
    """Register a hook on every module that makes cos and sin tables. Return these modules with their hook handles."""
    tables = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            places = _places(module.forward)
            if "position_ids" in places:
                tables.append((module, module.register_forward_hook(_TableHook(places), with_kwargs=True)))
    return tables


def key_biases_of(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return a copy of the bias of each decoder layer's key projection, `[heads * dim]`, where it has one.

    It is the same in all keys of a layer, before their rotation, and often larger than what differs (Qwen2). A norm
    after the projection (Qwen3, GLM-4.5) scales keys and bias, so they no longer contain it.
    """
    biases: dict[int, torch.Tensor] = {}
    for module in (getattr(model, "get_decoder", lambda: None)() or model).modules():
        layer, projection = getattr(module, "layer_idx", None), getattr(module, "k_proj", None)
        bias: Any = getattr(projection, "bias", None)
        if projection is not None and isinstance(bias, torch.Tensor) and bias.device.type == "meta":
            bias = (offloaded(projection) or {}).get("bias")
        # such as k_norm, key_layernorm or qk_norm
        is_normed = any("norm" in name and "k" in name.partition("norm")[0] for name, _ in module.named_children())
        if type(layer) is int and type(bias) in (torch.Tensor, nn.Parameter) and not is_normed:
            biases[layer] = bias.detach().clone()
    return biases


def _places(function: Callable[..., Any]) -> dict[str, int]:
    """Return the index of each parameter of a function, by name."""
    return {name: place for place, name in enumerate(inspect.signature(function).parameters)}


class _Reporter:
    """Observer of calls. Compiled code reports them while `compiled_users` is not 0."""

    compiled_users = 0

    def report(self, *call: Any) -> None:
        """Report a call to the current pass, if there is one."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def report_compiled(self, *call: Any) -> None:
        """Report a call of compiled code."""
        self.report(*call)


class _TableHook(_Reporter):
    """Hook of a module that makes tables. It reports them."""

    def __init__(self, places: Mapping[str, int]) -> None:
        self.places = places

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.report(module, args, kwargs, output)
        elif self.compiled_users:
            self.report_compiled(module, args, kwargs, output)

    def report(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        scope = current()
        if scope is None or not scope.captures or not isinstance(output, tuple) or len(output) != 2:
            return
        call = Call(module.forward, self.places, args, kwargs)
        positions, (cos, sin) = call["position_ids"], output
        # one position per token, or several (vision models), which are equal for text
        if positions.ndim in (2, 3) and cos.ndim == 3 and cos.shape[1] == positions.shape[-1]:
            scope.tap.tables.append(RotaryTable(call, cos, sin))


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


_reporters_lock = threading.Lock()


@contextmanager
def watching_compiled(tables: Iterable[tuple[nn.Module, RemovableHandle]], patches: Iterable[Patch]) -> Iterator[None]:
    """Let compiled code report to the hooks of `watch_tables` and to applied patches, within this context."""
    hooks = (module._forward_hooks.get(handle.id) for module, handle in tables)
    observers = (*hooks, *(patch.get() for patch in patches))
    reporters = [observer for observer in observers if isinstance(observer, _Reporter)]

    def add(users: int) -> None:
        with _reporters_lock:
            for reporter in reporters:
                reporter.compiled_users += users

    add(1)
    try:
        yield
    finally:
        add(-1)


class _WatchedFunction(_Reporter, Replacement):
    """Rotation function. It reports its calls."""

    def __init__(self, function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(function)
        self.places = _places(function)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.compiled_users:
                self.report_compiled(args, kwargs, rotated[1])
        elif (
            scope := current()
        ) is not None and scope.captures:  # written out: a call of `report` at each layer and token takes time
            scope.tap.last = RotaryCall(self.original, self.places, args, kwargs, rotated[1])
        return rotated

    def report(self, args: tuple[Any, ...], kwargs: dict[str, Any], rotated: torch.Tensor) -> None:
        scope = current()
        if scope is not None and scope.captures:
            scope.tap.last = RotaryCall(self.original, self.places, args, kwargs, rotated)
