"""Inventory of everything that a model's passes compute with, and ways to change each part, found by reflection.

A `Site` is a place (an attribute, an item, a global, a member of a class, a weight) together with a way to change it.
Nothing here knows how the fingerprint is made.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from families import build
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

Undo = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Site:
    """Place that can be changed.

    Args:
        name: Name for messages.
        change: Function that changes it in a model, and returns a function that undoes the change.
        kind: Group of sites with the same kind of change.
    """

    name: str
    change: Callable[[PreTrainedModel], Undo]
    kind: str = ""

    def __repr__(self) -> str:
        return self.name


# --- a model that computes with all kinds of things


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    nested: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"a": [1.0]})


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Caller:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def bound(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


FACTOR = 1.0
TABLE = {"factor": [1.0]}


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR * TABLE["factor"][0]


def by_callee(x: torch.Tensor) -> torch.Tensor:
    return by_global(x)


def closing_over(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    return scaled


def with_default(x: torch.Tensor, scale: float = 1.0, *, other: float = 1.0) -> torch.Tensor:
    return x * scale * other


class Base(modeling_llama.LlamaMLP):
    factor = 1.0
    table = (1.0, {"b": 1.0})

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * self.table[0] * self.table[1]["b"]


class Rich(Base):
    """MLP that keeps the values that it computes with in all ways that Python has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(super().forward(x))
        x = x * self.settings.scale * self.settings.nested["a"][0] * self.slotted.scale * float(self.number)
        x = x * self.tensors[0] * float(self.arrays["a"][0]) * self.modules_in_a_list[0].weight[0, 0]
        for function in self.functions:
            x = function(x)
        return x


def rich(seed: int = 0) -> PreTrainedModel:
    """Build a Llama with a `Rich` MLP in one layer."""
    model = build("llama", seed=seed)
    mlp = model.model.layers[1].mlp
    mlp.__class__ = Rich
    mlp.settings, mlp.slotted, mlp.number = Settings(), Slotted(), np.float32(1.0)
    mlp.tensors, mlp.arrays = [torch.tensor(1.0)], {"a": np.ones(3, np.float32)}
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1.0)
    mlp.modules_in_a_list = [module]
    caller = Caller()
    mlp.functions = [
        closing_over(1.0),
        with_default,
        by_callee,
        caller,
        caller.bound,
        functools.partial(with_default, scale=1.0),
    ]
    return model


# --- ways to change something


def stand_ins(value: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield functions with results other than those of `value`, some of them disguised."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        return _changed(value(*args, **kwargs))

    yield "function", changed
    disguised = functools.wraps(value)(lambda *args, **kwargs: changed(*args, **kwargs))
    disguised.__module__ = "transformers.models.llama.modeling_llama"
    yield "disguised", disguised
    yield "no_grad", torch.no_grad()(changed)


def _changed(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result * 1.5 if result.is_floating_point() else result
    if isinstance(result, tuple) and result:
        return type(result)([_changed(result[0]), *result[1:]]) if type(result) is tuple else result
    return result


def _other(value: Any) -> Any:
    """Return another value of the same kind, or None."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.1
    if isinstance(value, np.generic):
        return type(value)(value * 3)
    return None


def _set(target: Any, name: str, value: Any) -> Undo:
    previous = target.__dict__.get(name, _set) if hasattr(target, "__dict__") else getattr(target, name)
    setattr(target, name, value)
    return lambda: delattr(target, name) if previous is _set else setattr(target, name, previous)


def _item(container: Any, key: Any, value: Any) -> Undo:
    previous = container[key]
    if isinstance(container, np.ndarray):  # a part of it is a view
        previous = previous.copy()
    container[key] = value
    return lambda: container.__setitem__(key, previous)


def _reach(model: PreTrainedModel, path: tuple) -> Any:
    """Follow a path of attribute names, and of keys in lists of one."""
    value: Any = model
    for step in path:
        value = value[step[0]] if isinstance(step, list) else getattr(value, step)
    return value


def _values_in(path: tuple, value: Any, depth: int = 0) -> Iterator[tuple[tuple, Any]]:
    """Yield the paths of everything that can be assigned to within plain state, with the values."""
    yield path, value
    if depth > 4:
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _values_in((*path, [number]), item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _values_in((*path, [key]), item, depth + 1)
    elif isinstance(value, Slotted):
        yield from _values_in((*path, "scale"), value.scale, depth + 1)
    elif isinstance(value, Settings | Caller):
        for name, item in vars(value).items():
            yield from _values_in((*path, name), item, depth + 1)


def _state_sites(model: PreTrainedModel) -> Iterator[Site]:
    """Yield the attributes of all modules and configurations, with nested values."""
    for module_path, module in model.named_modules():
        steps = tuple([int(part)] if part.isdigit() else part for part in module_path.split(".") if part)
        states = [(steps, vars(module))]
        if "config" in vars(module):
            states.append(((*steps, "config"), vars(module.config)))
        for prefix, state in states:
            for name, value in state.items():
                if name in ("_parameters", "_buffers", "_modules") or name.startswith("_"):
                    continue
                for path, nested in _values_in((*prefix, name), value):
                    yield from _value_sites(path, nested)


def _value_sites(path: tuple, value: Any) -> Iterator[Site]:
    replacement, name = _other(value), ".".join(str(step) for step in path)
    parent, last = path[:-1], path[-1]
    kind = "configuration" if "config" in path else "attribute"

    def assign(model: PreTrainedModel, new_value: Any) -> Undo:
        target = _reach(model, parent)
        return _item(target, last[0], new_value) if isinstance(last, list) else _set(target, last, new_value)

    if replacement is not None:
        yield Site(f"{name} = {replacement!r}", lambda model: assign(model, replacement), kind)
    if isinstance(value, torch.Tensor):
        yield Site(f"{name}.mul_(3)", lambda model: _scaled(_reach(model, path)), kind)
    if isinstance(value, np.ndarray):
        yield Site(f"{name}[:] *= 3", lambda model: _item(_reach(model, path), slice(None), np.full(3, 3.0)), kind)
    if isinstance(value, nn.Module) and path[-1] == [0]:
        yield Site(f"{name}.weight.mul_(3)", lambda model: _scaled(_reach(model, path).weight), kind)
    if callable(value) and not isinstance(value, nn.Module | type):
        for number in range(3):
            yield Site(
                f"{name} = stand-in {number}",
                lambda model, number=number: assign(model, list(stand_ins(_reach(model, path)))[number][1]),
                "stand-in",
            )


def _scaled(tensor: torch.Tensor, data: bool = False) -> Undo:
    with torch.no_grad():
        previous = tensor.clone()
        (tensor.data if data else tensor).mul_(3)

    def undo() -> None:
        with torch.no_grad():
            (tensor.data if data else tensor).copy_(previous)

    return undo


def _module_sites(model: PreTrainedModel) -> Iterator[Site]:
    """Yield hooks, replaced forwards, classes, children and weights of all modules."""
    for path, module in model.named_modules():
        if not path or "lm_head" in path:
            continue
        steps = tuple([int(part)] if part.isdigit() else part for part in path.split("."))
        yield Site(f"{path}.forward", _at(steps, _replace_forward), "forward")
        yield Site(f"{path}._call_impl", _at(steps, _replace_call), "forward")
        yield Site(f"a hook on {path}", _at(steps, _hook), "hook")
        yield Site(f"the class of {path}", _at(steps, _replace_class), "class")
        if isinstance(getattr(module, "weight", None), nn.Parameter) or not list(module.parameters()):
            yield Site(f"{path} in a module", _at(steps[:-1], _wrap, path.rpartition(".")[2]), "module")
        for name, parameter in module.named_parameters(recurse=False):
            tensor = (*steps, name)
            yield Site(f"{path}.{name}.mul_(3)", _at(tensor, _scaled), "weight")
            yield Site(f"{path}.{name}.data.mul_(3)", _at(tensor, _scaled, True), "data of a weight")
            if parameter.ndim == 2:
                yield Site(f"{path}.{name} reversed", _at(tensor, _reversed), "memory of a weight")


def _at(path: tuple, change: Callable[..., Undo], *arguments: Any) -> Callable[[PreTrainedModel], Undo]:
    """Return a change of what is at a path."""
    return lambda model: change(_reach(model, path), *arguments)


class Wrapping(nn.Module):
    """Module that changes the results of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a changed result of the module within."""
        return _changed(self.inner(*args, **kwargs))


def _wrap(parent: nn.Module, name: str) -> Undo:
    inner = parent._modules[name]
    parent._modules[name] = Wrapping(inner)
    return lambda: parent._modules.__setitem__(name, inner)


def _replace_forward(module: nn.Module) -> Undo:
    return _set(module, "forward", next(stand_ins(module.forward))[1])


def _replace_call(module: nn.Module) -> Undo:
    return _set(module, "_call_impl", next(stand_ins(module._call_impl))[1])


def _hook(module: nn.Module) -> Undo:
    return module.register_forward_hook(lambda module, args, output: _changed(output)).remove


def _replace_class(module: nn.Module) -> Undo:
    kind = type(module)

    class Other(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return _changed(super().forward(*args, **kwargs))

    Other.__name__, Other.__qualname__, Other.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    module.__class__ = Other

    def undo() -> None:
        module.__class__ = kind

    return undo


def _reversed(parameter: torch.Tensor) -> Undo:
    """Reverse the rows of a parameter."""
    previous = parameter.data
    parameter.data = previous.flip(0)

    def undo() -> None:
        parameter.data = previous

    return undo


def _class_sites(model: PreTrainedModel) -> Iterator[Site]:
    """Yield the members of all classes."""
    kinds = {base for module in model.modules() for base in type(module).__mro__ if issubclass(base, nn.Module)}
    for kind in sorted(kinds - {PreTrainedModel}, key=lambda kind: (kind.__module__, kind.__qualname__)):
        for name, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType) and name in ("forward", "_call_impl", "scaled", "__call__"):
                for disguise, stand_in in stand_ins(value):
                    yield Site(
                        f"{kind.__name__}.{name} {disguise}",
                        lambda model, kind=kind, name=name, stand_in=stand_in: _set(kind, name, stand_in),
                    )
            elif kind in (Base, Rich) and _other(value) is not None:
                yield Site(f"{kind.__name__}.{name}", lambda model, k=kind, n=name, v=value: _set(k, n, _other(v)))
    yield Site("Base.table[1]['b']", lambda model: _item(Base.table[1], "b", 3.0))


def _global_sites() -> Iterator[Site]:
    """Yield functions and values of the modules that contain the model's code."""
    places: list[tuple[Any, str]] = []
    for module in (modeling_llama, sys.modules["transformers.integrations.sdpa_attention"]):
        places += [(module, name) for name, value in vars(module).items() if isinstance(value, types.FunctionType)]
    masks = sys.modules["transformers.masking_utils"]
    places += [(masks, name) for name in ("create_causal_mask", "sdpa_mask", "causal_mask_function")]
    places += [(functional, name) for name in ("linear", "silu", "scaled_dot_product_attention", "embedding")]
    places += [(torch, name) for name in ("cat", "rsqrt", "matmul", "cos", "sin")]
    places += [(torch._C._nn, "silu")]
    places += [(torch.Tensor, name) for name in ("transpose", "pow", "mean", "cos", "to", "__mul__")]
    this_module = sys.modules[__name__]
    places += [(this_module, "by_global")]
    for target, name in places:
        value = getattr(target, name, None)
        if callable(value):
            for disguise, stand_in in stand_ins(value):
                yield Site(
                    f"{target.__name__}.{name} {disguise}",
                    lambda model, target=target, name=name, stand_in=stand_in: _set(target, name, stand_in),
                )
    yield Site("FACTOR", lambda model: _set(this_module, "FACTOR", 3.0))
    yield Site("TABLE['factor'][0]", lambda model: _item(TABLE["factor"], 0, 3.0))


def _function_sites() -> Iterator[Site]:
    """Yield code, defaults and closures of functions, edited in place."""

    def first_cell(model: PreTrainedModel) -> Undo:
        cell = model.model.layers[1].mlp.functions[0].__closure__[0]
        previous, cell.cell_contents = cell.cell_contents, 3.0

        def undo() -> None:
            cell.cell_contents = previous

        return undo

    yield Site("a closure cell", first_cell)
    yield Site("with_default.__defaults__", lambda model: _assign(with_default, "__defaults__", (3.0,)))
    yield Site("with_default.__kwdefaults__", lambda model: _assign(with_default, "__kwdefaults__", {"other": 3.0}))
    yield Site("with_default.__kwdefaults__['other']", lambda model: _item(with_default.__kwdefaults__, "other", 3.0))
    code = (lambda x: x * FACTOR * TABLE["factor"][0] * 3).__code__
    yield Site("by_global.__code__", lambda model: _assign(by_global, "__code__", code))
    rotate = modeling_llama.rotate_half
    plain = (lambda x: x).__code__
    yield Site("rotate_half.__code__", lambda model: _assign(rotate, "__code__", plain))


def _assign(target: Any, name: str, value: Any) -> Undo:
    previous = getattr(target, name)
    setattr(target, name, value)
    return lambda: setattr(target, name, previous)


def sites_within(model: PreTrainedModel) -> list[Site]:
    """Return the sites of any model that belong to it alone, and to no other of its family."""
    return [*_state_sites(model), *_module_sites(model)]


@functools.lru_cache
def inventory() -> tuple[Site, ...]:
    """Return all sites of the model that `rich` builds."""
    model = rich()
    groups = sites_within(model), _class_sites(model), _global_sites(), _function_sites()
    return tuple(site for group in groups for site in group)
