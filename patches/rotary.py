"""Deferred RoPE: keys are caught before their rotation, and rotated on load by the model's own function.

Two things are watched during a pass: the modules that make cos and sin tables, and the modelling code's
`apply_rotary_pos_emb` (and its variants). What they are given and return says for each layer which tensor rotates,
how much of it, and how to do the same at other positions. No family needs code of its own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .scope import current, on

_patching = threading.Lock()

_PIECE_BYTES = 512 << 10
"""What the CPU rotates at once: the rotation makes several tensors of this size, and memory for larger ones comes from
the system each time, page by page. At 4096 tokens that took longer than all the rest of a restore."""


@dataclass(eq=False)
class RotaryTable:
    """One call of a module that makes cos and sin tables."""

    module: nn.Module
    arguments: inspect.BoundArguments
    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[1, n, dims]` at other positions of text, int64 `[n]`, under the frequencies of this pass."""
        asked: torch.Tensor = self.arguments.arguments["position_ids"]
        # some frequencies depend on the longest position of a pass: it is shown to the module, and cut off again
        latest = on(positions.device, asked.max()).view(1)
        changed = {"position_ids": torch.cat([positions, latest]).expand(*asked.shape[:-2], 1, -1)}
        cos, sin = _call(self.module.forward, self.arguments, changed)
        return cos[:, :-1], sin[:, :-1]


@dataclass(eq=False)
class RotaryCall:
    """One call of the modelling code's rotation of queries and keys."""

    watched: _Watched
    args: tuple
    kwargs: dict[str, Any]
    rotated: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        return self._argument("k")

    @property
    def cos(self) -> torch.Tensor:
        return self._argument("cos")

    def _argument(self, name: str) -> Any:
        """By hand: binding a signature at every layer and token would cost more than the rotation."""
        place = self.watched.places[name]
        return self.args[place] if place < len(self.args) else self.kwargs[name]

    def rotate_(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """The same rotation, in place, of other keys, `[batch, heads, n, dims]`, with tables `[1, n, dims]`."""
        arguments = self.watched.signature.bind(*self.args, **self.kwargs)
        count = step = keys.shape[2]
        if keys.device.type == "cpu" and keys.numel():
            step = max(1, count * _PIECE_BYTES // (keys.numel() * keys.element_size()))
        for at in range(0, count, step or 1):
            some, here = keys[:, :, at : at + step], slice(at, at + step)
            # the queries' half of the work is not wanted: one head stands in for them
            changed = {"q": some[:, :1], "k": some, "cos": cos[:, here], "sin": sin[:, here]}
            some.copy_(_call(self.watched.function, arguments, changed)[1])


@dataclass
class PreRopeKV:
    """A layer's two tensors as they are stored, and how the rotated one gets its rotation back."""

    keys: torch.Tensor
    values: torch.Tensor
    rotated: Literal["", "key", "value"] = ""
    dims: int = 0
    position_independent: bool = True
    """False if a rotation may be in the tensors that could not be taken out."""
    call: RotaryCall | None = None

    @property
    def rotation(self) -> RotaryCall:
        """How it got its rotation; only where something rotates."""
        assert self.call is not None
        return self.call


@dataclass(eq=False)
class RotaryTap:
    """What was seen of rotations in one forward pass."""

    tables: list[RotaryTable] = field(default_factory=list)
    last: RotaryCall | None = None
    rotates: bool = False
    """Whether any layer of this pass was seen to rotate."""
    rows: torch.Tensor | None = None
    """Which queries of the pass the present layer has, if not all (see `layers`)."""
    _at: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> PreRopeKV:
        """What the layer that calls `update(keys, values)` would have handed over without its rotation.

        A call is used up by the layer that made it, so that it never leaks to a layer without rotation (NoPE).
        """
        call, self.last = self.last, None
        if call is None:
            return PreRopeKV(keys, values, position_independent=self.rotates)
        self.rotates = True
        dims = call.keys.shape[-1]
        if self._table_of(call) is None or call.rotated.data_ptr() == call.keys.data_ptr():
            return PreRopeKV(keys, values, position_independent=False)  # tables from elsewhere, or rotated in place
        if _same(keys, call.rotated):
            return PreRopeKV(call.keys, values, "key", dims, True, call)
        if _same(values, call.rotated):  # MLA keeps latents as keys and rotated parts as values
            return PreRopeKV(keys, call.keys, "value", dims, True, call)
        if _begins_with(keys, call.rotated):  # partial rotation: the rotated part was joined with the rest
            return PreRopeKV(torch.cat([call.keys, keys[..., dims:]], dim=-1), values, "key", dims, True, call)
        return PreRopeKV(keys, values, position_independent=False)

    def rotate_(self, like: PreRopeKV, tensor: torch.Tensor, first: int) -> None:
        """Rotate, in place, keys of the positions `first`, `first + 1`, … as those of `like` were.

        Args:
            like: keys that rotate.
            tensor: `[batch, heads, n, dim]`.
        """
        count, call = tensor.shape[2], like.rotation
        cos, sin = self._tables_at(call, first + count, tensor.device)
        call.rotate_(tensor[..., : like.dims], cos[:, first : first + count], sin[:, first : first + count])

    def rotate_at_(self, like: PreRopeKV, tensor: torch.Tensor, positions: torch.Tensor, stop: int) -> None:
        """The same for keys of any positions.

        Args:
            like: keys that rotate.
            tensor: `[heads, n, dim]`.
            positions: int64 `[sets, n]` on the tensor's device: one set for all heads, or one for each.
            stop: they are all below this.
        """
        call = like.rotation
        cos, sin = self._tables_at(call, stop, tensor.device)
        part = tensor[..., : like.dims]
        part = part.unsqueeze(0 if len(positions) == 1 else 1)  # heads that stand elsewhere are rows of a batch
        call.rotate_(part, cos[0][positions], sin[0][positions])

    def _tables_at(self, call: RotaryCall, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """At least `stop` positions: rows that end elsewhere share the longest table."""
        table = self._table_of(call)
        assert table is not None  # else `take` has left the rotation in
        key = (id(table), device)
        if key not in self._at or self._at[key][0].shape[1] < stop:
            cos, sin = table.at(torch.arange(stop, device=table.arguments.arguments["position_ids"].device))
            self._at[key] = on(device, cos), on(device, sin)
        return self._at[key]

    def _table_of(self, call: RotaryCall) -> RotaryTable | None:
        """The table that a call was given; it may be a copy on another device, or rows of it."""
        if len(self.tables) == 1:
            return self.tables[0] if self._seen(self.tables[0]).shape == call.cos.shape else None
        for table in self.tables:
            if table.cos is call.cos:
                return table
        for table in self.tables:
            cos = self._seen(table)
            if cos.shape == call.cos.shape and torch.equal(on(call.cos.device, cos), call.cos):
                return table
        return None

    def _seen(self, table: RotaryTable) -> torch.Tensor:
        """cos as the present layer gets it."""
        return table.cos if self.rows is None else table.cos[:, on(table.cos.device, self.rows)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _begins_with(keys: torch.Tensor, rotated: torch.Tensor) -> bool:
    if keys.shape[:-1] != rotated.shape[:-1] or keys.shape[-1] <= rotated.shape[-1]:
        return False
    if keys.is_cuda and keys.shape[2] == 1:
        return True  # seen in the prompt's pass already; comparing would stop the GPU at every layer and token
    return torch.equal(keys[:, :, -1:, : rotated.shape[-1]], rotated[:, :, -1:])


def _call(function: Callable[..., Any], arguments: inspect.BoundArguments, changed: dict[str, Any]) -> Any:
    """Call `function` as it was called before, with some arguments changed."""
    bound = inspect.BoundArguments(arguments.signature, OrderedDict(arguments.arguments | changed))
    return function(*bound.args, **bound.kwargs)


# --- watching


def watch_tables(model: nn.Module) -> list[tuple[nn.Module, RemovableHandle]]:
    """Watch every module that makes cos and sin tables. Returns these modules, and the handles of their hooks."""
    watched = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            signature = inspect.signature(module.forward)
            if "position_ids" in signature.parameters:
                watched.append((module, module.register_forward_hook(_note_table(signature), with_kwargs=True)))
    return watched


def _note_table(signature: inspect.Signature) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        scope = None if torch.compiler.is_compiling() else current()
        if scope is None or not isinstance(output, tuple) or len(output) != 2:
            return
        arguments = signature.bind(*args, **kwargs)
        positions, (cos, sin) = arguments.arguments["position_ids"], output
        # one position a token, or several (vision models) that are equal in text
        if positions.ndim in (2, 3) and cos.ndim == 3 and cos.shape[1] == positions.shape[-1]:
            scope.tap.tables.append(RotaryTable(module, arguments, cos, sin))

    return hook


def rotary_functions(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Where the model's classes find functions that rotate queries and keys: pairs of a module and a name in it."""
    found: dict[tuple[str, str], tuple[ModuleType, str]] = {}
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("apply_") and "rotary" in attribute and callable(value):
                with_tables = {"q", "k", "cos", "sin"} <= inspect.signature(value).parameters.keys()
                if with_tables:
                    found[name, attribute] = (module, attribute)
    return list(found.values())


def patch_function(module: ModuleType, name: str) -> None:
    """Wrap a rotation function so that passes of ours see its calls. Counted: two models may share it."""
    with _patching:
        function = getattr(module, name)
        if not isinstance(function, _Watched):
            function = _Watched(function)
            setattr(module, name, function)
        function.users += 1


def unpatch_function(module: ModuleType, name: str) -> None:
    """Undo one `patch_function`; the last one puts the function back."""
    with _patching:
        function = getattr(module, name)
        if isinstance(function, _Watched):
            function.users -= 1
            if function.users == 0:
                setattr(module, name, function.function)


class _Watched:
    """A rotation function that tells the current pass of its calls."""

    def __init__(self, function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.signature = inspect.signature(function)
        self.places = {name: place for place, name in enumerate(self.signature.parameters)}
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = self.function(*args, **kwargs)
        if not torch.compiler.is_compiling() and (scope := current()) is not None:
            scope.tap.last = RotaryCall(self, args, kwargs, rotated[1])
        return rotated
