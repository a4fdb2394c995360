"""Rotations observed in a pass, and their repetition at other positions by the model's own function.

A pass observes two things: the modules that make cos and sin tables, and the modeling code's `apply_rotary_pos_emb`
(and its variants). Their arguments and results show for each layer which tensor is rotated, how many of its dimensions,
and how to rotate at other positions. No model family needs its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

_PIECE_BYTES = 512 << 10
"""Number of bytes that the CPU rotates at once. The rotation makes several tensors of this size, and memory for larger
ones comes from the system each time, page by page. At 4096 tokens that took longer than the rest of a restore."""


_SAMPLED = 16
"""Number of positions at which two rotations are compared."""


def writes_to(*tensors: torch.Tensor) -> tuple[int, ...] | None:
    """Return the number of in-place writes to each tensor so far; None in inference mode, which does not count them."""
    try:
        return tuple(tensor._version for tensor in tensors)
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

    def arguments(self, *names: str) -> list[Any]:
        """Return the arguments with these names."""
        args, kwargs, places = self.args, self.kwargs, self.places
        return [args[place] if (place := places[name]) < len(args) else kwargs[name] for name in names]

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
        return _equal(cos[:, :-1], self.cos[:, :_SAMPLED]) and _equal(sin[:, :-1], self.sin[:, :_SAMPLED])

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[1, n, dims]` at text positions, int64 `[n]`, with the frequencies of this pass."""
        pass_positions: torch.Tensor = self.call["position_ids"]
        # some frequencies depend on the largest position of a pass: append it, and cut its result off
        latest = on(positions.device, pass_positions.max()).view(1)
        position_ids = torch.cat([positions, latest]).expand(*pass_positions.shape[:-2], 1, -1)
        cos, sin = self.call.repeat(position_ids=position_ids)
        return cos[:, :-1], sin[:, :-1]

    def has_positions(self, numbers: torch.Tensor) -> bool:
        """Return whether these are the positions of the table, int64 `[rows, n]`; negative ones stand for any."""
        positions: torch.Tensor = self.call["position_ids"]
        if positions.shape[-1] != numbers.shape[-1]:
            return False
        numbers = on(positions.device, numbers)
        return bool(((positions == numbers) | (numbers < 0)).all())


class TableCache:
    """Tables on the CPU that the passes of a model share: making one of 128k positions takes as long as ten layers.

    A cached table is compared with the output of the pass's own module at two positions. What comparing tensors of a
    layer has shown once is remembered, since each comparison waits for the GPU; it depends only on the model's code.

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
        if tables is None or tables[0].shape[1] < stop or not _agree(tables, table, stop):
            with torch.inference_mode(False), torch.no_grad():  # later passes may run without inference mode
                tables = self._tables[table.key] = table.at(torch.arange(stop))
        return tables

    def is_repeatable(self, layer: int, call: RotaryCall, table: RotaryTable) -> bool:
        """Return whether repeating the recorded calls gives the keys that a layer has.

        Hooks of the module are noticed once for each kind of table, in-place writes each time. In inference mode,
        nothing counts writes, so tables and keys are compared once for each layer.
        """
        if call.writes != writes_to(*call.tensors) or table.writes != writes_to(table.cos, table.sin):
            return False
        counted = call.writes is not None and table.writes is not None
        case = table.key if counted else (*table.key, layer, call.rotated.shape[-1])
        if (is_repeatable := self._repeatable.get(case)) is None:
            is_repeatable = table.is_repeatable() and (counted or _equal(call.repeat()[1], call.rotated))
            if not is_repeatable or bool(table.sin[:, :_SAMPLED].any()):  # position 0 alone shows little
                self._repeatable[case] = is_repeatable
        return is_repeatable

    def is_by_halves(self, call: RotaryCall, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return whether a function's rotation of keys on the CPU equals `rotate_halves_`, bit for bit; asked once."""
        others = list(call.settings().values())
        is_too_short = cos.shape[1] < _SAMPLED  # for a reliable answer
        if is_too_short or keys.device.type != "cpu" or any(isinstance(value, torch.Tensor) for value in others):
            return False
        key = call.function, keys.shape[1], keys.shape[3], keys.dtype, cos.shape[2], cos.dtype, repr(others)
        if key not in self._by_halves:
            self._by_halves[key] = call.is_by_halves(keys, cos, sin)
        return self._by_halves[key]


def _agree(tables: tuple[torch.Tensor, torch.Tensor], table: RotaryTable, stop: int) -> bool:
    """Return whether cached tables equal those of the pass. Other frequencies differ at position 1 or the last one."""
    positions = torch.tensor([min(1, stop - 1), stop - 1])
    for cached_table, current_table in zip(tables, table.at(positions), strict=True):
        if cached_table.dtype != current_table.dtype or not torch.equal(cached_table[:, positions], current_table):
            return False
    return True


@dataclass(eq=False)
class RotaryCall(Call):
    """Recorded call of the modeling code's rotation of queries and keys.

    Args:
        rotated: Keys that it returned.
        table: Table that it was given, if observed.
    """

    rotated: torch.Tensor
    table: RotaryTable | None = None

    def __post_init__(self) -> None:
        self.tensors = self.rotated, self["k"]
        self.writes = writes_to(*self.tensors)

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
        settings, others = self.settings(), other.settings()
        return (
            self.function is other.function
            and self.table is other.table
            and settings.keys() == others.keys()
            and all(
                value is others[name] or (not isinstance(value, torch.Tensor) and value == others[name])
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


@dataclass
class PreRopeKV:
    """Keys and values of a layer as they are stored, and how to rotate the one that is rotated."""

    keys: torch.Tensor
    values: torch.Tensor
    rotated: Literal["", "key", "value"] = ""
    dims: int = 0
    position_independent: bool = True
    """False if the tensors may contain a rotation that could not be removed."""
    call: RotaryCall | None = None
    bias: torch.Tensor | None = None
    """Bias, `[..., heads, 1, dim]`, that the stored keys lack; None if they lack nothing."""

    @property
    def rotation(self) -> RotaryCall:
        """Recorded rotation; only available if one of the tensors is rotated."""
        assert self.call is not None
        return self.call

    def rotates_like(self, other: PreRopeKV) -> bool:
        """Return whether the same tensor of two layers rotates, in the same way."""
        if self.call is None or other.call is None:
            return self.call is other.call
        return (self.rotated, self.dims) == (other.rotated, other.dims) and self.call.rotates_like(other.call)


@dataclass(eq=False)
class RotaryTap:
    """Rotations observed in one forward pass.

    Args:
        table_cache: Tables of earlier passes.
    """

    table_cache: TableCache = field(default_factory=TableCache)
    tables: list[RotaryTable] = field(default_factory=list)
    last: RotaryCall | None = None
    numbers: Callable[[], torch.Tensor] | None = None
    """Function that returns the numbers of the pass's tokens, int64 `[rows, n]`, at which stored keys are rotated. None
    if they are not compared with the positions of tables, which code within the model may change."""
    rotates: bool = False
    """True if any layer of this pass was observed to rotate."""
    _compared: list[RotaryTable] = field(default_factory=list)
    _given: tuple[torch.Tensor | None, tuple[int, ...] | None] = (None, None)
    _picked_tables: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())
    _at: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def begin(self, position_ids: torch.Tensor | None) -> None:
        """Note an argument of the pass. It has the `numbers` of the tokens, unless somebody writes to it."""
        self._given = position_ids, None if position_ids is None else writes_to(position_ids)

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PreRopeKV:
        """Return the keys and values that `layer` would have passed to `update` without its rotation.

        The recorded rotation is used up by the layer that made it, so it never applies to a layer without rotation
        (NoPE).
        """
        call, self.last = self.last, None
        if call is None:
            return PreRopeKV(keys, values, position_independent=self.rotates)
        self.rotates, rotated = True, call.rotated
        unrotated, cos, sin = call.arguments("k", "cos", "sin")
        call.table = table = self._table_with(layer, cos, sin)
        if table is None or rotated.data_ptr() == unrotated.data_ptr():
            return PreRopeKV(keys, values, position_independent=False)  # unknown tables, or rotated in place
        if not self.table_cache.is_repeatable(layer, call, table) or self._has_other_positions(table):
            return PreRopeKV(keys, values, position_independent=False)
        dims = unrotated.shape[-1]
        if keys is rotated or _same(keys, rotated):
            unrotated, bias = self.unbiased(layer, unrotated)
            return PreRopeKV(unrotated, values, "key", dims, True, call, bias)
        if _same(values, rotated):  # MLA keeps latents as keys and rotated parts as values
            return PreRopeKV(keys, unrotated, "value", dims, True, call)
        if self._begins_with(layer, keys, rotated):  # partial rotation: the rotated part was concatenated with the rest
            unrotated, bias = self.unbiased(layer, torch.cat([unrotated, keys[..., dims:]], dim=-1))
            return PreRopeKV(unrotated, values, "key", dims, True, call, bias)
        return PreRopeKV(keys, values, position_independent=False)

    def key_bias(self, layer: int, keys: torch.Tensor) -> torch.Tensor | None:
        """Return the bias of a layer's keys, `[heads, 1, dim]`, that is not stored with them; None if there is none."""
        biases, (_, heads, _, dim) = self.table_cache.key_biases, keys.shape
        bias = biases.get(layer)
        if bias is None or bias.numel() != heads * dim:
            return None
        if bias.device != keys.device:  # its layer is offloaded between passes
            bias = biases[layer] = bias.to(keys.device)
        return bias.to(keys.dtype).view(heads, 1, dim)

    def unbiased(self, layer: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return unrotated keys of a layer without the bias that is not stored with them, and the bias or None."""
        bias = self.key_bias(layer, keys)
        return (keys, None) if bias is None else (keys - bias, bias)

    def joined(self, like: PreRopeKV, layers: Sequence[int]) -> PreRopeKV:
        """Return `like` with the biases of several layers, `[layers, heads, 1, dim]`, if its keys lack theirs."""
        if like.bias is None:
            return like
        biases = [self.key_bias(layer, like.keys) for layer in layers]
        # a layer without a bias refuses its keys afterwards, since they are stored in another layout (`check_fit`)
        return replace(like, bias=torch.stack([like.bias if bias is None else bias for bias in biases]))

    def rotate_(self, like: PreRopeKV, tensor: torch.Tensor, first: int) -> None:
        """Turn stored keys, in place, into those of the positions `first`, `first + 1`, …: add the bias, and rotate.

        Args:
            like: Keys that rotate in the same way, and lack the same bias.
            tensor: `[batch, heads, n, dim]`.
            first: Position of the first key.
        """
        if like.bias is not None:
            tensor.add_(like.bias)
        call = like.rotation
        cos, sin = self._tables_at(call, first + tensor.shape[2], tensor.device)
        keys = tensor.narrow(3, 0, like.dims)
        call.rotate_(keys, cos, sin, first, self.table_cache.is_by_halves(call, keys, cos, sin))

    def rotate_at_(
        self,
        like: PreRopeKV,
        tensor: torch.Tensor,
        positions: torch.Tensor,
        stop: int,
        heads: torch.Tensor | None = None,
    ) -> None:
        """Turn stored keys, in place, into those of any positions: add the bias, and rotate. See `rotate_`.

        Args:
            like: Keys that rotate in the same way, and lack the same bias.
            tensor: `[heads, n, dim]`: of all KV heads, or of the first ones.
            positions: int64 `[sets, n]` on the tensor's device: one set for all heads, or one for each.
            stop: Upper bound of the positions, exclusive.
            heads: KV head of each key, int64 `[n]` on the tensor's device, if those of several heads are in one row.
        """
        if like.bias is not None:
            tensor.add_(like.bias[: len(tensor)] if heads is None else like.bias[heads].movedim(-2, 0))
        call = like.rotation
        cos, sin = self._tables_at(call, stop, tensor.device)
        part = tensor[..., : like.dims]
        part = part.unsqueeze(0 if len(positions) == 1 else 1)  # heads with other positions become rows of a batch
        rows = positions.reshape(-1)  # a flat index copies whole rows
        by_halves = self.table_cache.is_by_halves(call, part, cos, sin)
        cos, sin = (table[0].index_select(0, rows).unflatten(0, positions.shape) for table in (cos, sin))
        call.rotate_(part, cos, sin, by_halves=by_halves)

    def _tables_at(self, call: RotaryCall, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tables of at least `stop` positions: rows of different lengths share the longest table."""
        table = call.table
        assert table is not None  # otherwise `take` did not remove the rotation
        key = (id(table), device)
        tables = self._at.get(key)
        if tables is None or tables[0].shape[1] < stop:
            table_device = table.call["position_ids"].device
            if table_device.type == "cpu":
                cos, sin = self.table_cache.at(table, stop)
            else:  # a comparison would wait for the device
                cos, sin = table.at(torch.arange(stop, device=table_device))
            tables = self._at[key] = on(device, cos), on(device, sin)
        return tables  # another thread may have exchanged them meanwhile for shorter ones

    def pick(self, tables: tuple[torch.Tensor, ...], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of cos and sin tables that a layer's queries need, and record the tables they come from."""
        picked_tables = tuple(picked(table, rows, 1) for table in tables)
        self._picked_tables = picked_tables, tables
        return picked_tables

    def _has_other_positions(self, table: RotaryTable) -> bool:
        """Return whether tables like this have other positions than the tokens, in this pass or an earlier one.

        Most models pass their argument on. Other positions are compared by value: on a GPU, which would be waited for,
        once for each kind of table.
        """
        results, key = self.table_cache.has_other_positions, table.key
        if self.numbers is not None and table not in self._compared:
            self._compared.append(table)
            positions: torch.Tensor = table.call["position_ids"]
            given, writes = self._given
            is_passed_on = positions is given and writes is not None and writes == writes_to(given)
            if not is_passed_on and (positions.device.type == "cpu" or key not in results):
                results[key] = results.get(key, False) or not table.has_positions(self.numbers())
        return results.get(key, False)

    def _begins_with(self, layer: int, keys: torch.Tensor, rotated: torch.Tensor) -> bool:
        if keys.shape[:-1] != rotated.shape[:-1] or keys.shape[-1] <= rotated.shape[-1]:
            return False
        known, case = self.table_cache.partial, (layer, keys.shape[-1], rotated.shape[-1])
        if case not in known and torch.equal(keys[:, :, -1:, : rotated.shape[-1]], rotated[:, :, -1:]):
            known.add(case)
        return case in known

    def _table_with(self, layer: int, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTable | None:
        """Return the observed table with the cos and sin that a rotation got, or None if no module made these values.

        Code between a module and the rotation may scale the table. Then the module cannot give the tables of other
        positions. A copy, such as one on another device, is compared by value.
        """
        picked_tables, full_tables = self._picked_tables
        if len(picked_tables) == 2 and picked_tables[0] is cos and picked_tables[1] is sin:
            cos, sin = full_tables
        for table in self.tables:
            if table.cos is cos and table.sin is sin:
                return table
        known, case = self.table_cache.copied, (layer, cos.shape[-1])
        if (place := known.get(case, len(self.tables))) < len(self.tables):
            return self.tables[place]
        places = [at for at, table in enumerate(self.tables) if _equal(table.cos, cos) and _equal(table.sin, sin)]
        if len(places) == 1:  # at position 0 all tables are equal
            known[case] = places[0]
        return self.tables[places[0]] if places else None


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first is second:
        return True
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(on(second.device, first), second)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


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
