"""Prefetch of a plan's blocks in the order in which layers need them, and their assembly to keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..errors import RestoreError
from ..store.geometry import BlockGroup, LayerKV, TensorName
from ..store.segment import SegmentReader
from .fetch import Fetcher, FetchUnit, no_chunks
from .gather import Gather
from .plan import Plan, RecomputePlan
from .rows import RowGroup, SegmentSlice


@dataclass(eq=False)
class PlanUnit(FetchUnit):
    """Blocks of one KV cache group that a plan needs of one segment, with the segment slices that they serve."""

    pieces: list[tuple[RowGroup, SegmentSlice, np.ndarray]] = field(default_factory=list)
    """Rows, segment slice, and the tokens needed of it, int64 ascending, counted in the segment."""
    chunks: np.ndarray = field(default_factory=no_chunks)
    """Chunks that hold these tokens, int64, ascending."""

    @cached_property
    def last_ahead(self) -> int:
        """Layer after which the blocks no longer count as fetched ahead."""
        return self.block_group.layers[0 if self.block_group.merged else -1]

    @cached_property
    def nbytes(self) -> int:
        return len(self.chunks) * self.block_group.block_bytes


@dataclass(frozen=True, eq=False)
class JoinedLayers:
    """Restored tokens of all layers of a KV cache group, in one tensor."""

    layers: tuple[int, ...]
    memory: torch.Tensor  # [layers, 2, heads, capacity, dim]
    like: Any
    """Unrotated keys of the layer that was restored first. The other layers must rotate in the same way."""

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of a layer's keys and values, `[1, heads, capacity, dim]` each.

        They are no views for PyTorch, so that passes with gradients may write to them.
        """
        keys, values = self.memory[self.layers.index(layer)].split(1)
        return keys.data, values.data

    def tensors(self, name: TensorName) -> torch.Tensor:
        """Return the keys or the values of all layers, `[layers, heads, capacity, dim]`."""
        return self.memory[:, 0 if name == "key" else 1]


class Prefetch:
    """Prefetch of the units of a plan.

    At most `ahead_bytes` bytes of the fetcher are fetched ahead of the layers, but at least one unit. 0 fetches blocks
    when a layer needs them. Blocks that a merged pair of layers shares stay until the second layer has used them, and
    do not count from the first one on. A plan with recomputed prefixes has no bound: its early layers compute long and
    load little, and meanwhile the disk reads what the later ones load.
    """

    def __init__(self, plan: Plan, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self.plan = plan
        """Plan that tells which fetched tokens count as used. A deferred plan replaces it: positions that a comparison
        adds are computed, although they were fetched."""
        self.joined: dict[int, JoinedLayers] = {}
        """Layers that were restored together with an earlier one, and have not run yet."""
        self._by_layer: dict[int, list[PlanUnit]] = {}
        self._gathers: dict[tuple[int, int], tuple[int, BlockGroup, Gather]] = {}  # by KV cache group and row
        order = units_of(plan)
        for unit in order:
            for layer in unit.block_group.layers:
                self._by_layer.setdefault(layer, []).append(unit)
        self._waiting = order[::-1]
        self._ahead_bytes = fetcher.ahead_bytes
        if isinstance(plan, RecomputePlan) and self._ahead_bytes:
            self._ahead_bytes = sum(unit.nbytes for unit in order)
        self._in_flight_bytes = 0
        self._layer = -1  # layer with blocks in use
        self._furthest = -1  # first layer of the last unit that was started

    def units(self, layer: int) -> list[PlanUnit]:
        """Wait for the units of `layer`, and return them. Raises RestoreError if a block is missing or damaged."""
        self._layer = layer
        self.start()
        units = self._by_layer.get(layer, [])
        self.fetcher.wait_for(units)
        return units

    def gathers(self, layer: int, first_position: int) -> Iterator[tuple[int, BlockGroup, Gather]]:
        """Return the copies of a layer's restored tokens: row, KV cache group, and gather of its tokens in the row.

        The layer's first entry has position `first_position`, counted as in the plan. Raises RestoreError, see `units`.
        """
        gathers: dict[tuple[int, int], tuple[int, BlockGroup, Gather]] = {}
        for unit in self.units(layer):
            for group, piece, tokens in unit.pieces:
                row, shape = group.rows[0], unit.reader.shape
                key = id(unit.block_group), row  # segments of one geometry share their KV cache groups
                if key in self._gathers:
                    gathers[key] = self._gathers[key]
                    continue
                _, _, gather = gathers.setdefault(key, (row, unit.block_group, Gather(shape, unit.block_group)))
                shift = piece.at - piece.first + group.pad - self.plan.base - first_position
                gather.add(shape, unit.blocks, tokens, tokens + shift)
        self._gathers.update(gathers)
        return iter(gathers.values())

    def join(
        self, layer: int, kind: LayerKV, like: Any, allocate: Callable[[int, int], torch.Tensor]
    ) -> JoinedLayers | None:
        """Restore all layers of a layer's KV cache group into one tensor, unrotated, if they have one form.

        One copy then replaces two for each layer, which matters if a GPU waits for this thread. `joined` keeps the
        result for the other layers. Return None with batches, cached positions before the prompt, sliding windows,
        layers on several devices, or layers that restore different tokens. Raises RestoreError, see `units`.

        Args:
            layer: First layer of the group.
            kind: Layout of the tensors that the model passes to the cache.
            like: See `JoinedLayers`.
            allocate: Allocates `[rows, heads, capacity, dim]`, given rows and number of positions.
        """
        plan, units = self.plan, self._by_layer.get(layer)
        if not units or len(units[0].block_group.layers) == 1:
            return None
        is_one_row = not plan.base and len(plan.groups) == 1 and plan.groups[0].rows == (0,) and not plan.groups[0].pad
        if not is_one_row or kind.window or len({id(unit.block_group) for unit in units}) != 1:
            return None
        parts, layers = units[0].block_group.joined, units[0].block_group.layers
        layouts = [unit.reader.shape.layout for unit in units]
        if parts is None or any(layout.layers[i] != kind for layout in layouts for i in layers):
            return None
        if not plan.restores_alike(layers) or len({self.fetcher.device_of(i) for i in layers}) > 1:
            return None
        ((_, _, gather),) = self.gathers(layer, 0)
        memory = allocate(parts.count, plan.num_positions)  # [layers * 2, heads, capacity, dim]
        gather.copy_joined(parts, memory)
        joined = JoinedLayers(layers, memory.unflatten(0, (len(layers), 2)), like)
        self.joined.update({joined_layer: joined for joined_layer in layers if joined_layer != layer})
        return joined

    def done(self, layer: int) -> None:
        """Release the blocks that no layer after `layer` needs, and continue to fetch. Call when `layer` is filled."""
        self._layer = layer
        units = self._by_layer.get(layer, [])
        finished = [unit for unit in units if unit.block_group.layers[-1] == layer]
        # blocks that wait for the second layer of a merged pair do not limit the prefetch
        self._in_flight_bytes -= sum(unit.nbytes for unit in units if unit.last_ahead == layer)
        for unit in finished:
            if unit.from_disk:
                self._note_use(unit)
            for group, _, _ in unit.pieces:
                self._gathers.pop((id(unit.block_group), group.rows[0]), None)
        self.fetcher.finish(finished)
        self.start()

    def _note_use(self, unit: PlanUnit) -> None:
        alike = self.plan.suffix is not None
        for group, piece, tokens in unit.pieces:
            if alike:
                unit.use(unit.block_group.layers, [tokens])
                continue
            for layer in unit.block_group.layers:
                unit.use((layer,), [self.plan.tokens_to_restore(unit.block_group, group, piece, layer)])

    def start(self) -> None:
        """Start to fetch what the current layer needs, and more within the bound; one unit ahead whatever its size.

        Raises RestoreError if that fails.
        """
        if not self._waiting:
            return
        units: list[PlanUnit] = []
        while self._waiting and self._may_start(self._waiting[-1]):
            unit = self._waiting.pop()
            self._in_flight_bytes += unit.nbytes
            self._furthest = unit.block_group.layers[0]
            units.append(unit)
        later_requests = [(unit, unit.chunks) for unit in (*units, *reversed(self._waiting))]
        for _, batch in groupby(units, lambda unit: unit.block_group.layers[0]):  # a layer waits only for its own batch
            requests = [(unit, unit.chunks) for unit in batch]
            later_requests = later_requests[len(requests) :]
            self.fetcher.fetch(requests, later=later_requests)
        self.fetcher.collector.expect_reads(bool(self._waiting))

    def _may_start(self, unit: PlanUnit) -> bool:
        if unit.block_group.layers[0] <= self._layer:
            return True
        ahead = self._furthest > self._layer
        return bool(self._ahead_bytes) and (not ahead or self._in_flight_bytes + unit.nbytes <= self._ahead_bytes)


def units_of(plan: Plan) -> list[PlanUnit]:
    """Return the units that a plan restores, in the order in which layers need them.

    Raises ValueError if a segment lacks tokens that the plan restores.
    """
    units: dict[tuple[SegmentReader, int], PlanUnit] = {}
    for group in plan.groups:
        for piece in group.pieces:
            plan.check_stored(group, piece)
            for block_group in piece.reader.shape.block_groups:
                tokens = plan.tokens_to_restore(block_group, group, piece)
                if len(tokens):
                    unit = units.setdefault((piece.reader, block_group.index), PlanUnit(piece.reader, block_group))
                    unit.pieces.append((group, piece, tokens))
    for unit in units.values():
        token_sets = [tokens for _, _, tokens in unit.pieces]
        distinct = token_sets[0] if len(token_sets) == 1 else np.unique(np.concatenate(token_sets))
        unit.chunks = unit.reader.shape.chunks_of(unit.block_group, distinct)
    return sorted(units.values(), key=lambda unit: unit.block_group.layers[0])


def restore_layer(
    prefetch: Prefetch,
    layer: int,
    kind: LayerKV,
    dtype: torch.dtype,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    rotate_: Callable[[torch.Tensor, int], None],
) -> None:
    """Fill and rotate the restored positions of one layer; the caller fills the computed positions.

    Keys and values are `[batch, heads, positions - first_position, dim]`, filled in place; their first entry has the
    position `first_position`, counted as in the plan. The model passes tensors of the layout `kind` to the cache, with
    this dtype before rotation (autocast may rotate into another dtype). `rotate_` rotates `[rows, heads, n, dim]` in
    place; its second argument is the index of the first token.

    Raises:
        RestoreError: A block did not arrive, or its layout does not match.
    """
    plan = prefetch.plan
    check_fit(plan, layer, kind, dtype)
    for row, block_group, gather in prefetch.gathers(layer, first_position):
        targets = {"key": keys[row], "value": values[row]}
        gather.copy((part, targets[part.tensor]) for part in block_group.parts if part.layer == layer)
    low, end_restored = plan.restored_span(layer, kind.window) or (0, plan.num_positions)
    for group in plan.groups:
        begin = max(0, group.pad - plan.base - first_position, low - first_position)  # where the row's tokens begin
        end = end_restored - first_position
        first_row = group.rows[0]
        if begin < end and kind.rotated:
            rotated = keys if kind.rotated == "key" else values
            rotate_(rotated[first_row : first_row + 1, :, begin:end], begin + first_position + plan.base - group.pad)
        if begin or len(group.rows) > 1:
            for tensor in (keys, values):
                share_row(tensor, group.rows, begin, end)
    prefetch.done(layer)


def share_row(tensor: torch.Tensor, rows: Sequence[int], begin: int, end: int) -> None:
    """Copy positions `[begin, end)` of `tensor`, `[batch, heads, positions, dim]`, from the first row to the others.

    Earlier positions, such as padding, are set to zero in all rows: they are masked or computed, but must be finite.
    """
    for row in rows:
        if begin:
            tensor[row, :, :begin].zero_()
        if begin < end and row != rows[0]:
            tensor[row, :, begin:end].copy_(tensor[rows[0], :, begin:end])


def check_fit(plan: Plan, layer: int, kind: LayerKV, dtype: torch.dtype) -> None:
    """Raise RestoreError unless stored layer and dtype match those of a model with the same fingerprint."""
    for reader in plan.readers:
        layout = reader.shape.layout
        stored = layout.layers[layer] if layer < len(layout.layers) else None
        if stored != kind or layout.dtype != dtype:
            raise RestoreError(
                reader.id,
                f"layer {layer} is stored as {stored} in {layout.dtype}, but the model uses {kind} in {dtype}",
            )
