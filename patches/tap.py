"""Rotations observed in a pass: keys without their rotation, and with that of other positions.

A pass observes two things: the modules that make cos and sin tables, and the modeling code's `apply_rotary_pos_emb`
(and its variants). Their arguments and results show for each layer which tensor is rotated, how many of its dimensions,
and how to rotate at other positions. No model family needs its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from .rope import RotaryCall, RotaryTable, TableCache, on, picked, same_values, writes_to


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
        self.rotates, rotated, unrotated = True, call.rotated, call.unrotated
        call.table = table = self._table_with(layer, call.cos, call.sin)
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

    def rotate_at_(self, like: PreRopeKV, tensor: torch.Tensor, positions: torch.Tensor, stop: int) -> None:
        """Turn stored keys, in place, into those of any positions: add the bias, and rotate. See `rotate_`.

        Args:
            like: Keys that rotate in the same way, and lack the same bias.
            tensor: `[heads, n, dim]`: of all KV heads, or of the first ones.
            positions: int64 `[sets, n]` on the tensor's device: one set for all heads, or one for each.
            stop: Upper bound of the positions, exclusive.
        """
        if like.bias is not None:
            tensor.add_(like.bias[: len(tensor)])
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
            given_positions, writes = self._given
            is_passed_on = positions is given_positions and writes is not None and writes == writes_to(given_positions)
            if not is_passed_on and (positions.device.type == "cpu" or key not in results):
                results[key] = results.get(key, False) or not table.has_positions(self.numbers())
        return results.get(key, False)

    def _begins_with(self, layer: int, keys: torch.Tensor, rotated: torch.Tensor) -> bool:
        if keys.shape[:-1] != rotated.shape[:-1] or keys.shape[-1] <= rotated.shape[-1]:
            return False
        known_cases, case = self.table_cache.partial, (layer, keys.shape[-1], rotated.shape[-1])
        if case not in known_cases and torch.equal(keys[:, :, -1:, : rotated.shape[-1]], rotated[:, :, -1:]):
            known_cases.add(case)
        return case in known_cases

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
        known_places, case = self.table_cache.copied, (layer, cos.shape[-1])
        if (place := known_places.get(case, len(self.tables))) < len(self.tables):
            return self.tables[place]
        places = [
            at for at, table in enumerate(self.tables) if same_values(table.cos, cos) and same_values(table.sin, sin)
        ]
        if len(places) == 1:  # at position 0 all tables are equal
            known_places[case] = places[0]
        return self.tables[places[0]] if places else None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
