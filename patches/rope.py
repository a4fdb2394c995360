"""Repetition of a rotation at other positions: calls of a model's own functions, and tables of cos and sin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

_PIECE_BYTES = 512 << 10
"""Number of bytes that the CPU rotates at once. The rotation makes several tensors of this size, and memory for larger
ones comes from the system each time, page by page. At 4096 tokens that took longer than the rest of a restore."""


_POSITIONS_AT_ONCE = 1 << 14
"""Number of positions for which a module makes cos and sin at once. It needs several times the memory of the result."""
_SAMPLED = 16  # number of positions at which two rotations are compared
_version = attrgetter("_version")


def writes_to(*tensors: torch.Tensor) -> tuple[int, ...] | None:
    """Return the number of in-place writes to each tensor so far; None in inference mode, which does not count them."""
    try:
        return tuple(map(_version, tensors))
    except RuntimeError:
        return None


@dataclass(eq=False)
class Call:
    """Recorded call that can be repeated.

    `places` holds the index of each parameter by name: binding a signature at every layer and token would cost more
    than the rotation.
    """

    function: Callable[..., Any]
    places: Mapping[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return the argument with this name."""
        place = self.places[name]
        return self.args[place] if place < len(self.args) else self.kwargs[name]

    def named(self) -> list[tuple[str, Any]]:
        """Return the arguments that were passed, with their names."""
        return [*zip(self.places, self.args, strict=False), *self.kwargs.items()]

    def repeat(self, **changed: Any) -> Any:
        """Repeat the call with some arguments changed."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changed.items():
            if (place := self.places[name]) < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return self.function(*args, **kwargs)


@dataclass(eq=False)
class RotaryTable:
    """Recorded call of a module that makes cos and sin tables."""

    call: Call
    cos: torch.Tensor
    sin: torch.Tensor

    def __post_init__(self) -> None:
        self.writes = writes_to(self.cos, self.sin)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Key of the tables of this kind in all passes: one module may make tables of several kinds of layers."""
        return self.call.function, *(value for _, value in self.call.named() if isinstance(value, str))

    def is_repeatable(self) -> bool:
        """Return whether the module makes these tables itself, bit for bit: no hook has changed them since."""
        pass_positions: torch.Tensor = self.call["position_ids"]
        latest = pass_positions.max().expand(*pass_positions.shape[:-1], 1)  # see `at`
        cos, sin = self.call.repeat(position_ids=torch.cat([pass_positions[..., :_SAMPLED], latest], dim=-1))
        return same_values(cos[:, :-1], self.cos[:, :_SAMPLED]) and same_values(sin[:, :-1], self.sin[:, :_SAMPLED])

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[1, n, dims]` at text positions, int64 `[n]`, with the frequencies of this pass."""
        pass_positions: torch.Tensor = self.call["position_ids"]
        # some frequencies depend on the largest position of a pass: append it, and cut its result off
        latest = on(positions.device, pass_positions.max()).view(1)
        tables: list[torch.Tensor] = []
        first = 0
        for part_positions in positions.split(_POSITIONS_AT_ONCE):
            position_ids = torch.cat([part_positions, latest]).expand(*pass_positions.shape[:-2], 1, -1)
            parts = [part[:, :-1] for part in self.call.repeat(position_ids=position_ids)]
            if len(part_positions) == len(positions):
                return parts[0], parts[1]
            tables = tables or [part.new_empty(part.shape[0], len(positions), part.shape[2]) for part in parts]
            for table, part in zip(tables, parts, strict=True):
                table[:, first : first + len(part_positions)] = part
            first += len(part_positions)
        return tables[0], tables[1]

    def has_positions(self, numbers: torch.Tensor) -> bool:
        """Return whether these are the positions of the table, int64 `[rows, n]`; negative ones stand for any."""
        positions: torch.Tensor = self.call["position_ids"]
        if positions.shape[-1] != numbers.shape[-1]:
            return False
        numbers = on(positions.device, numbers)
        return bool(((positions == numbers) | (numbers < 0)).all())


class TableCache:
    """Tables on the CPU that the passes of a model share: making one of 128k positions takes as long as ten layers.

    A cached table is compared with that of the pass. What comparing tensors of a layer has shown once is remembered,
    since each comparison waits for the GPU; it depends only on the model's code.

    Args:
        key_biases: Bias of each layer's key projection, `[heads * dim]`, that is not stored with the keys.
    """

    def __init__(self, key_biases: Mapping[int, torch.Tensor] | None = None) -> None:
        self.key_biases = dict(key_biases or {})
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._by_halves: dict[tuple[Any, ...], bool] = {}
        self._repeatable: dict[tuple[Any, ...], bool] = {}
        self.has_other_positions: dict[tuple[Any, ...], bool] = {}
        """Keys of tables, with True if such a table had other positions than the tokens of its pass."""
        self.partial: set[tuple[int, int, int]] = set()
        """Layers that were seen to concatenate the rotated dimensions with the others: index and both widths."""
        self.copied: dict[tuple[int, int], int] = {}
        """Number of the table whose copy a layer was seen to rotate with, by layer and width."""

    def at(self, table: RotaryTable, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[1, stop or more, dims]`, with the frequencies of the pass of `table`."""
        tables = self._tables.get(table.key)
        if tables is None or tables[0].shape[1] < stop or not _agree(tables, table):
            stop = max(stop, int(table.call["position_ids"].numpy().max()) + 1)  # to compare it with later passes
            with torch.inference_mode(False), torch.no_grad():  # later passes may run without inference mode
                tables = self._tables[table.key] = table.at(torch.arange(stop))
        return tables

    def is_repeatable(self, layer: int, call: RotaryCall, table: RotaryTable) -> bool:
        """Return whether repeating the recorded calls gives the keys that a layer has.

        Hooks of the module are noticed once for each kind of table, in-place writes each time. In inference mode,
        nothing counts writes, so tables and keys are compared once for each layer.
        """
        if call.writes != writes_to(call.rotated, call.unrotated) or table.writes != writes_to(table.cos, table.sin):
            return False
        counted = call.writes is not None and table.writes is not None
        case = table.key if counted else (*table.key, layer, call.rotated.shape[-1])
        if (is_repeatable := self._repeatable.get(case)) is None:
            is_repeatable = table.is_repeatable() and (counted or same_values(call.repeat()[1], call.rotated))
            if not is_repeatable or bool(table.sin[:, :_SAMPLED].any()):  # position 0 alone shows little
                self._repeatable[case] = is_repeatable
        return is_repeatable

    def is_by_halves(self, call: RotaryCall, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return whether a function's rotation of keys on the CPU equals `rotate_halves_`, bit for bit; asked once."""
        extras = list(call.settings().values())
        is_too_short = cos.shape[1] < _SAMPLED  # for a reliable answer
        if is_too_short or keys.device.type != "cpu" or any(isinstance(value, torch.Tensor) for value in extras):
            return False
        key = call.function, keys.shape[1], keys.shape[3], keys.dtype, cos.shape[2], cos.dtype, repr(extras)
        if key not in self._by_halves:
            self._by_halves[key] = call.is_by_halves(keys, cos, sin)
        return self._by_halves[key]


def _agree(tables: tuple[torch.Tensor, torch.Tensor], table: RotaryTable) -> bool:
    """Return whether cached tables equal those of the pass, at the position of its last token.

    If the cached tables end before it, such as for a decoded token, the module is run at their last position. At any
    position but 0, other frequencies have other cos and sin.
    """
    last, places = tables[0].shape[1] - 1, table.call["position_ids"][..., 0, -1].numpy()  # of the kinds, if several
    place = int(places.max())
    if 0 < place <= last and (places == place).all():
        current_tables = table.cos[:1, -1:], table.sin[:1, -1:]
    else:
        place, current_tables = last, table.at(torch.tensor([last]))
    for cached_table, current_table in zip(tables, current_tables, strict=True):
        cached_row = cached_table[:, place : place + 1]
        if cached_row.dtype != current_table.dtype or not torch.equal(cached_row, current_table):
            return False
    return True


@dataclass(eq=False)
class RotaryCall(Call):
    """Recorded call of the modeling code's rotation of queries and keys, `unrotated`, by the tables `cos` and `sin`.

    Args:
        rotated: Keys that it returned.
        table: Table that it was given, if observed.
    """

    rotated: torch.Tensor
    table: RotaryTable | None = None

    def __post_init__(self) -> None:
        args, kwargs, places = self.args, self.kwargs, self.places
        self.unrotated, self.cos, self.sin = (
            args[place] if (place := places[name]) < len(args) else kwargs[name] for name in ("k", "cos", "sin")
        )
        self.writes = writes_to(self.rotated, self.unrotated)

    def rotate_(
        self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int = 0, by_halves: bool = False
    ) -> None:
        """Rotate other keys in the same way, in place.

        Args:
            keys: `[batch, heads, n, dims]`.
            cos: Table `[1, first + n, dims]`, or longer.
            sin: Like `cos`.
            first: Row of the tables for the first key.
            by_halves: True if `rotate_halves_` gives the bits of the model's function (see `is_by_halves`).
        """
        num_keys = step = keys.shape[2]
        if keys.device.type == "cpu" and keys.numel():
            step = max(1, num_keys * _PIECE_BYTES // (keys.numel() * keys.element_size()))
        for at in range(0, num_keys, step or 1):
            count = min(step, num_keys - at)
            part = keys.narrow(2, at, count)
            cos_part, sin_part = (table.narrow(1, first + at, count) for table in (cos, sin))
            if by_halves:
                rotate_halves_(part, cos_part, sin_part)
            else:
                part.copy_(self._rotate(part, cos_part, sin_part))

    def settings(self) -> dict[str, Any]:
        """Return the arguments besides queries, keys and tables, by name."""
        return {name: value for name, value in self.named() if name not in ("q", "k", "cos", "sin")}

    def rotates_like(self, other: RotaryCall) -> bool:
        """Return whether both calls have the same function, tables and settings."""
        settings, other_settings = self.settings(), other.settings()
        return (
            self.function is other.function
            and self.table is other.table
            and settings.keys() == other_settings.keys()
            and all(
                value is other_settings[name] or (not isinstance(value, torch.Tensor) and value == other_settings[name])
                for name, value in settings.items()
            )
        )

    def is_by_halves(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return whether `rotate_halves_` gives the bits of the model's function, by rotating random keys with both."""
        if cos.dtype != keys.dtype or cos.shape[2] % 2:
            return False
        generator = torch.Generator().manual_seed(0)
        sample = torch.randn(1, keys.shape[1], _SAMPLED, keys.shape[3], generator=generator).to(keys.dtype)
        cos, sin = cos[:1, -_SAMPLED:], sin[:1, -_SAMPLED:]
        expected = self._rotate(sample.clone(), cos, sin)
        rotate_halves_(sample, cos, sin)
        return expected.dtype == sample.dtype and torch.equal(expected, sample)

    def _rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        try:
            return self.repeat(q=keys[:, :0], k=keys, cos=cos, sin=sin)[1]  # no query is needed
        except RuntimeError:  # it infers a size from the queries, so one is needed
            return self.repeat(q=keys[:, :1], k=keys, cos=cos, sin=sin)[1]


def rotate_halves_(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first half of the tables' dimensions against the second, in place, with half of the temporary memory.

    Args:
        keys: `[batch, heads, n, dims or more]`.
        cos: `[1 or batch, n, dims]`.
        sin: Like `cos`.
    """
    keys = keys[..., : cos.shape[-1]]
    first, second = keys.chunk(2, dim=-1)
    first_sin, second_sin = sin.unsqueeze(1).chunk(2, dim=-1)
    from_second, from_first = second * first_sin, first * second_sin
    keys.mul_(cos.unsqueeze(1))
    first.sub_(from_second)
    second.add_(from_first)


def same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors, maybe on different devices, have the same shape, type and values."""
    if first is second:
        return True
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(on(second.device, first), second)


def on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` on `device`. A copy is made only if a model's layers are on several devices."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def picked(tensor: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Select entries along a dimension.

    Args:
        tensor: `[batch or 1, ...]`.
        index: int64 `[n]`, or `[batch, n]` with different entries for each row of the batch.
        dim: Dimension after that of the batch.
    """
    index = on(tensor.device, index)
    if index.ndim == 1:
        return tensor.index_select(dim, index)
    rows, count = len(index), tensor.shape[dim]
    expanded = tensor.expand(rows, *tensor.shape[1:]).movedim(dim, 1)
    flat = index + torch.arange(0, rows * count, count, device=index.device).unsqueeze(1)
    return expanded.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape).movedim(1, dim)
