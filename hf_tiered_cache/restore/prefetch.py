"""When blocks of a plan move: in the order in which layers need them, a bounded number of bytes ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np

from ..geometry import BlockGroup
from ..store.segment import SegmentReader
from .fetch import Fetcher, FetchUnit
from .gather import Gather
from .plan import Plan, RowGroup, SegmentSlice


@dataclass(eq=False)
class PlanUnit(FetchUnit):
    """The blocks of one block group that a plan needs of one segment, and the pieces of rows they serve."""

    pieces: list[tuple[RowGroup, SegmentSlice, np.ndarray]] = field(default_factory=list)
    """With the tokens of each, int64 ascending, counted in the segment."""

    @cached_property
    def chunks(self) -> np.ndarray:
        every = [tokens for _, _, tokens in self.pieces]
        return self.chunks_of(every[0] if len(every) == 1 else np.unique(np.concatenate(every)))

    @cached_property
    def nbytes(self) -> int:
        return len(self.chunks) * self.block_group.block_bytes


class Prefetch:
    """Walks the units of a plan.

    Args:
        plan: what to restore.
        fetcher: brings it.
        ahead_bytes: how far to run ahead of the layers: at least one unit, unless it is 0, which fetches what a layer
            needs when it needs it. What a pair of layers shares stays, beside that, until the second has had it. A plan
            with fronts is fetched without a pause: its early layers compute long and load little, and in that time the
            disk brings what the later ones load.
    """

    def __init__(self, plan: Plan, fetcher: Fetcher, ahead_bytes: int) -> None:
        self.fetcher = fetcher
        self.plan = plan
        """What is used of it: what a comparison under way adds is computed, though it was fetched."""
        self._by_layer: dict[int, list[PlanUnit]] = {}
        self._gathers: dict[tuple[int, int], Gather] = {}  # of each block group and row
        order = units_of(plan)
        for unit in order:
            for layer in unit.block_group.layers:
                self._by_layer.setdefault(layer, []).append(unit)
        self._waiting = order[::-1]
        unpaused = bool(plan.fronts and ahead_bytes)
        self._ahead_bytes = sum(unit.nbytes for unit in order) if unpaused else ahead_bytes
        self._under_way = 0
        self._layer = -1  # whose blocks are in use
        self._furthest = -1  # first layer of the last unit that was started

    def start(self) -> None:
        """Start to fetch.

        Raises:
            RestoreError: a fetch could not begin.
        """
        self._issue()

    def units(self, layer: int) -> list[PlanUnit]:
        """The units of `layer`, when they have arrived.

        Raises:
            RestoreError: a block could not be fetched or failed its checksum.
        """
        self._layer = layer
        self._issue()
        units = self._by_layer.get(layer, [])
        self.fetcher.wait_for(units)
        return units

    def gathers(self, layer: int, first_column: int) -> Iterator[tuple[int, BlockGroup, Gather]]:
        """What copies a layer's restored tokens to their columns: a row, a block group and its tokens there.

        Args:
            first_column: the column, in the plan's count, that stands first in the layer.

        Raises:
            RestoreError: see `units`.
        """
        wanted: dict[tuple[int, int], tuple[int, BlockGroup, Gather]] = {}
        for unit in self.units(layer):
            for group, piece, tokens in unit.pieces:
                row, shape = group.rows[0], unit.reader.shape
                key = id(unit.block_group), row  # segments of one geometry share their block groups
                if key in self._gathers:
                    wanted[key] = row, unit.block_group, self._gathers[key]
                    continue
                gather = wanted.setdefault(key, (row, unit.block_group, Gather(shape, unit.block_group)))[2]
                shift = piece.at - piece.first + group.pad - self.plan.base - first_column
                gather.add(shape, unit.blocks, tokens, tokens + shift)
        self._gathers.update({key: gather for key, (_, _, gather) in wanted.items()})
        return iter(wanted.values())

    def done(self, layer: int) -> None:
        """Layer `layer` has its keys and values: let go what no later layer needs, and fetch on."""
        units = self._by_layer.get(layer, [])
        over = [unit for unit in units if unit.block_group.layers[-1] == layer]
        # what waits for the other layer of its pair, maybe far behind, keeps nobody from running ahead
        self._under_way -= sum(unit.nbytes for unit in units if _last_ahead(unit.block_group) == layer)
        for unit in over:
            self._note_use(unit)
            for group, _, _ in unit.pieces:
                self._gathers.pop((id(unit.block_group), group.rows[0]), None)
        self.fetcher.finish(over)
        self._issue()

    def _note_use(self, unit: PlanUnit) -> None:
        alike = self.plan.suffix is not None
        for group, piece, tokens in unit.pieces if unit.from_disk else ():
            if alike:
                unit.use(unit.block_group.layers, [tokens])
                continue
            for layer in unit.block_group.layers:
                unit.use((layer,), [self.plan.wanted_tokens(unit.block_group, group, piece, layer)])

    def _issue(self) -> None:
        """Start what the layer in use needs, and more as far as the bound allows; one ahead whatever its size."""
        due: list[PlanUnit] = []
        while self._waiting and self._may_start(self._waiting[-1]):
            unit = self._waiting.pop()
            self._under_way += unit.nbytes
            self._furthest = unit.block_group.layers[0]
            due.append(unit)
        for _, batch in groupby(due, lambda unit: unit.block_group.layers[0]):  # a layer waits for its own batch alone
            self.fetcher.bring([(unit, unit.chunks) for unit in batch])
        self.fetcher.collector.expect_reads(bool(self._waiting))

    def _may_start(self, unit: PlanUnit) -> bool:
        if unit.block_group.layers[0] <= self._layer:
            return True
        ahead = self._furthest > self._layer
        return bool(self._ahead_bytes) and (not ahead or self._under_way + unit.nbytes <= self._ahead_bytes)


def _last_ahead(block_group: BlockGroup) -> int:
    """The layer with which a block group's blocks are no longer what runs ahead of the layers."""
    return block_group.layers[0 if block_group.merged else -1]


def units_of(plan: Plan) -> list[PlanUnit]:
    """What a plan restores, in the order in which layers need it.

    Raises:
        ValueError: it restores what a segment does not hold.
    """
    units: dict[tuple[SegmentReader, int], PlanUnit] = {}
    for group in plan.groups:
        for piece in group.pieces:
            plan.check_held(group, piece)
            for block_group in piece.reader.shape.block_groups:
                tokens = plan.wanted_tokens(block_group, group, piece)
                if len(tokens):
                    unit = units.setdefault((piece.reader, block_group.index), PlanUnit(piece.reader, block_group))
                    unit.pieces.append((group, piece, tokens))
    return sorted(units.values(), key=lambda unit: unit.block_group.layers[0])
