"""When blocks move: units of one lane and one segment, brought in ahead of the layers that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..errors import IntegrityError, RestoreError
from ..geometry import Lane
from ..stats import Account
from ..store.segment import SegmentReader
from ..tiers.residency import Lease, Residency
from .plan import Piece, Plan, RowGroup


@dataclass(eq=False)
class Unit:
    """The blocks of one lane that a pass needs of one segment, and the pieces of rows they serve."""

    reader: SegmentReader
    lane: Lane
    pieces: list[tuple[RowGroup, Piece]] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Tokens of the segment that are needed, ascending."""
    lease: Lease | None = None

    def add(self, group: RowGroup, piece: Piece, tokens: np.ndarray) -> None:
        self.pieces.append((group, piece))
        self.tokens = np.union1d(self.tokens, tokens) if len(self.tokens) else tokens

    @cached_property
    def chunks(self) -> np.ndarray:
        return self.reader.shape.chunks_of(self.lane, self.tokens)

    @cached_property
    def nbytes(self) -> int:
        return len(self.chunks) * self.lane.block_bytes

    def bytes_used(self) -> int:
        """Of the bytes read from disk for this unit, those that tokens were needed of."""
        return self.reader.shape.bytes_of(self.lane, self.tokens, self.lease.from_disk)


@dataclass(eq=False)
class Prefetch:
    """Walks the units of a plan in the order in which layers need them, a bounded number of bytes ahead.

    Args:
        plan: what to restore.
        residency: the tiers.
        account: counts what happens.
        device_of: the device of each layer.
        ahead_bytes: how far to run ahead of the layers: at least one unit, unless it is 0, which fetches what a layer
            needs when it needs it.
    """

    plan: InitVar[Plan]
    residency: Residency
    account: Account
    device_of: Callable[[int], torch.device]
    ahead_bytes: int
    _by_layer: dict[int, list[Unit]] = field(default_factory=dict)
    _waiting: list[Unit] = field(default_factory=list)
    _under_way: int = 0
    _layer: int = -1  # whose blocks are in use
    _furthest: int = -1  # first layer of the last unit that was started

    def __post_init__(self, plan: Plan) -> None:
        order = units_of(plan)
        for unit in order:
            for layer in unit.lane.layers:
                self._by_layer.setdefault(layer, []).append(unit)
        self._waiting = order[::-1]

    def start(self) -> None:
        """Start to fetch. Call `cancel` in the end, also if this fails.

        Raises:
            RestoreError: a fetch could not begin.
        """
        self._issue()

    def units(self, layer: int) -> Iterator[Unit]:
        """The units of `layer`, each when it has arrived.

        Raises:
            RestoreError: a block could not be fetched or failed its checksum.
        """
        units = self._by_layer.get(layer, [])
        while any(unit.lease is None for unit in units):
            self._start(self._waiting.pop())
        self._layer = layer
        self._issue()
        for unit in units:
            try:
                with self.account.timing("stall_seconds"):
                    unit.lease.wait()
            except Exception as error:
                raise restore_error(self.account, unit.reader, error) from error
            yield unit

    def done(self, layer: int) -> None:
        """Layer `layer` has its keys and values: let go what no later layer needs, and fetch on."""
        for unit in self._by_layer.get(layer, []):
            if unit.lane.layers[-1] == layer:
                self._under_way -= unit.nbytes
                self.account.add(bytes_used=unit.bytes_used())
                unit.lease.release()
        self._issue()

    def cancel(self) -> None:
        """Let everything go, at whatever point the pass has ended."""
        for units in self._by_layer.values():
            for unit in units:
                if unit.lease is not None:
                    unit.lease.release()
        self._waiting.clear()

    def _issue(self) -> None:
        """Start the next units as far as the bound allows; one ahead of the layer in use whatever its size."""
        while self._waiting and self.ahead_bytes:
            ahead = self._furthest > self._layer
            if ahead and self._under_way + self._waiting[-1].nbytes > self.ahead_bytes:
                break
            self._start(self._waiting.pop())

    def _start(self, unit: Unit) -> None:
        self._under_way += unit.nbytes
        self._furthest = unit.lane.layers[0]
        device = self.device_of(unit.lane.layers[0])
        try:
            unit.lease = self.residency.fetch(unit.reader, unit.lane.index, unit.chunks, device, self.account)
        except Exception as error:
            raise restore_error(self.account, unit.reader, error) from error


def units_of(plan: Plan) -> list[Unit]:
    """What a plan restores, in the order in which layers need it."""
    units: dict[tuple[SegmentReader, int], Unit] = {}
    for group in plan.groups:
        for piece in group.pieces:
            for lane in piece.reader.shape.lanes:
                tokens = plan.wanted_tokens(lane, group, piece)
                if len(tokens):
                    unit = units.setdefault((piece.reader, lane.index), Unit(piece.reader, lane))
                    unit.add(group, piece, tokens)
    return sorted(units.values(), key=lambda unit: unit.lane.layers[0])


def restore_error(account: Account, reader: SegmentReader, error: Exception) -> RestoreError:
    """Whatever kept a block, the request can do without it: no memory, a store that was closed, a bad disk."""
    failure = "verification_failures" if isinstance(error, IntegrityError) else "read_errors"
    account.add(**{failure: 1})
    return RestoreError(reader.id, str(error))
