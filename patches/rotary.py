"""Deferred RoPE: keys are caught before their rotation, and rotated on load by the model's own function.

Two things are watched during a pass: the modules that make cos and sin tables, and the modelling code's
`apply_rotary_pos_emb` (and its variants). What they are given and return says for each layer which tensor rotates,
how much of it, and how to do the same at other positions. No family needs code of its own.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .scope import Replacement, current, on, picked

_patching = threading.Lock()

_PIECE_BYTES = 512 << 10
"""What the CPU rotates at once: the rotation makes several tensors of this size, and memory for larger ones comes from
the system each time, page by page. At 4096 tokens that took longer than all the rest of a restore."""


@dataclass(eq=False)
class Call:
    """A call that was seen, and can be made again.

    Args:
        function: what was called.
        places: of its parameters, by name. Binding a signature at every layer and token would cost more than rotating.
        args, kwargs: what it was given.
    """

    function: Callable[..., Any]
    places: Mapping[str, int]
    args: tuple
    kwargs: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """What it was given under a name."""
        place = self.places[name]
        return self.args[place] if place < len(self.args) else self.kwargs[name]

    def again(self, **changed: Any) -> Any:
        """The same call with some arguments changed."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changed.items():
            if (place := self.places[name]) < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class RotaryTable:
    """One call of a module that makes cos and sin tables."""

    call: Call
    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[1, n, dims]` at other positions of text, int64 `[n]`, under the frequencies of this pass."""
        asked: torch.Tensor = self.call["position_ids"]
        # some frequencies depend on the longest position of a pass: it is shown to the module, and cut off again
        latest = on(positions.device, asked.max()).view(1)
        cos, sin = self.call.again(position_ids=torch.cat([positions, latest]).expand(*asked.shape[:-2], 1, -1))
        return cos[:, :-1], sin[:, :-1]


class KeptTables:
    """Tables on the CPU that the passes of a model share: of 128k positions, one takes as long as ten layers.

    A table that is kept is compared with what the pass's own module gives now, for two of its positions.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, table: RotaryTable, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[1, stop or more, dims]`, under the frequencies of the pass that `table` is of."""
        call = table.call
        kinds = (given for given in (*call.args, *call.kwargs.values()) if isinstance(given, str))
        key = call.function, *kinds  # one module may make tables of several kinds of layers
        held = self._held.get(key)
        if held is None or held[0].shape[1] < stop or not _agree(held, table, stop):
            with torch.inference_mode(False), torch.no_grad():  # later passes use it outside of it, too
                held = self._held[key] = table.at(torch.arange(stop))
        return held


def _agree(held: tuple[torch.Tensor, torch.Tensor], table: RotaryTable, stop: int) -> bool:
    """Whether kept tables are those of the pass: other frequencies would differ at the second position, or the last."""
    some = torch.tensor([min(1, stop - 1), stop - 1])
    for kept, now in zip(held, table.at(some), strict=True):
        if kept.dtype != now.dtype or not torch.equal(kept[:, some], now):
            return False
    return True


@dataclass(eq=False)
class RotaryCall(Call):
    """One call of the modelling code's rotation of queries and keys.

    Args:
        rotated: the keys that it returned.
        table: what it was given, as far as that was seen.
    """

    rotated: torch.Tensor
    table: RotaryTable | None = None

    def rotate_(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int = 0) -> None:
        """The same rotation, in place, of other keys, `[batch, heads, n, dims]`.

        Args:
            keys: which.
            cos, sin: tables `[1, first + n, dims]`, or longer ones: the keys' own begin with row `first`.
            first: see there.
        """
        columns = step = keys.shape[2]
        if keys.device.type == "cpu" and keys.numel():
            step = max(1, columns * _PIECE_BYTES // (keys.numel() * keys.element_size()))
        for at in range(0, columns, step or 1):
            count = min(step, columns - at)
            some = keys.narrow(2, at, count)
            some.copy_(self._rotated(some, *(table.narrow(1, first + at, count) for table in (cos, sin))))

    def _rotated(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        try:
            return self.again(q=keys[:, :0], k=keys, cos=cos, sin=sin)[1]  # no query is wanted
        except RuntimeError:  # it infers a size from those that are left, so that there must be some
            return self.again(q=keys[:, :1], k=keys, cos=cos, sin=sin)[1]


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
    """What was seen of rotations in one forward pass.

    Args:
        kept: tables of earlier passes.
    """

    kept: KeptTables = field(default_factory=KeptTables)
    tables: list[RotaryTable] = field(default_factory=list)
    last: RotaryCall | None = None
    rotates: bool = False
    """Whether any layer of this pass was seen to rotate."""
    _picked: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())
    _at: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> PreRopeKV:
        """What the layer that calls `update(keys, values)` would have handed over without its rotation.

        A call is used up by the layer that made it, so that it never leaks to a layer without rotation (NoPE).
        """
        call, self.last = self.last, None
        if call is None:
            return PreRopeKV(keys, values, position_independent=self.rotates)
        self.rotates, before, rotated = True, call["k"], call.rotated
        call.table = self._table_with(call["cos"], call["sin"])
        if call.table is None or rotated.data_ptr() == before.data_ptr():
            return PreRopeKV(keys, values, position_independent=False)  # tables from elsewhere, or rotated in place
        dims = before.shape[-1]
        if _same(keys, rotated):
            return PreRopeKV(before, values, "key", dims, True, call)
        if _same(values, rotated):  # MLA keeps latents as keys and rotated parts as values
            return PreRopeKV(keys, before, "value", dims, True, call)
        if _begins_with(keys, rotated):  # partial rotation: the rotated part was joined with the rest
            return PreRopeKV(torch.cat([before, keys[..., dims:]], dim=-1), values, "key", dims, True, call)
        return PreRopeKV(keys, values, position_independent=False)

    def rotate_(self, like: PreRopeKV, tensor: torch.Tensor, first: int) -> None:
        """Rotate, in place, keys of the positions `first`, `first + 1`, … as those of `like` were.

        Args:
            like: keys that rotate.
            tensor: `[batch, heads, n, dim]`.
        """
        call = like.rotation
        cos, sin = self._tables_at(call, first + tensor.shape[2], tensor.device)
        call.rotate_(tensor.narrow(3, 0, like.dims), cos, sin, first)

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
        rows = positions.reshape(-1)  # rows in one piece are copied as such
        call.rotate_(part, *(table[0].index_select(0, rows).unflatten(0, positions.shape) for table in (cos, sin)))

    def _tables_at(self, call: RotaryCall, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """At least `stop` positions: rows that end elsewhere share the longest table."""
        table = call.table
        assert table is not None  # else `take` has left the rotation in
        key = (id(table), device)
        if key not in self._at or self._at[key][0].shape[1] < stop:
            where = table.call["position_ids"].device
            if where.type == "cpu":
                cos, sin = self.kept.at(table, stop)
            else:  # where to compare would be to wait
                cos, sin = table.at(torch.arange(stop, device=where))
            self._at[key] = on(device, cos), on(device, sin)
        return self._at[key]

    def pick(self, tables: tuple[torch.Tensor, ...], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of cos and sin tables that a layer's queries need, and note what they are rows of."""
        some = tuple(picked(table, rows, 1) for table in tables)
        self._picked = some, tables
        return some

    def _table_with(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTable | None:
        """Return the table that a rotation was given, or None if it got other values than a module made.

        Code between a module and the rotation may scale what the module made: then the module cannot give the tables
        of other positions. A copy, such as one on another device, is compared.
        """
        some, whole = self._picked
        if len(some) == 2 and some[0] is cos and some[1] is sin:
            cos, sin = whole
        for table in self.tables:
            if table.cos is cos and table.sin is sin:
                return table
        return next((table for table in self.tables if _equal(table.cos, cos) and _equal(table.sin, sin)), None)


def _equal(made: torch.Tensor, given: torch.Tensor) -> bool:
    if made is given:
        return True
    return made.shape == given.shape and made.dtype == given.dtype and torch.equal(on(given.device, made), given)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _begins_with(keys: torch.Tensor, rotated: torch.Tensor) -> bool:
    if keys.shape[:-1] != rotated.shape[:-1] or keys.shape[-1] <= rotated.shape[-1]:
        return False
    if keys.is_cuda and keys.shape[2] == 1:
        return True  # seen in the prompt's pass already; comparing would stop the GPU at every layer and token
    return torch.equal(keys[:, :, -1:, : rotated.shape[-1]], rotated[:, :, -1:])


# --- watching


def watch_tables(model: nn.Module) -> list[tuple[nn.Module, RemovableHandle]]:
    """Watch every module that makes cos and sin tables. Returns these modules, and the handles of their hooks."""
    watched = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            places = _places(module.forward)
            if "position_ids" in places:
                watched.append((module, module.register_forward_hook(_note_table(places), with_kwargs=True)))
    return watched


def _places(function: Callable[..., Any]) -> dict[str, int]:
    """Of a function's parameters, by name."""
    return {name: place for place, name in enumerate(inspect.signature(function).parameters)}


def _note_table(places: Mapping[str, int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        scope = None if torch.compiler.is_compiling() else current()
        if scope is None or not isinstance(output, tuple) or len(output) != 2:
            return
        call = Call(module.forward, places, args, kwargs)
        positions, (cos, sin) = call["position_ids"], output
        # one position a token, or several (vision models) that are equal in text
        if positions.ndim in (2, 3) and cos.ndim == 3 and cos.shape[1] == positions.shape[-1]:
            scope.tap.tables.append(RotaryTable(call, cos, sin))

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
                setattr(module, name, function.original)


class _Watched(Replacement):
    """A rotation function that tells the current pass of its calls."""

    def __init__(self, function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(function)
        self.places = _places(function)
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = self.original(*args, **kwargs)
        if not torch.compiler.is_compiling() and (scope := current()) is not None:
            scope.tap.last = RotaryCall(self.original, self.places, args, kwargs, rotated[1])
        return rotated
