"""Chosen tokens of rows: which segments and lanes hold them, and how they come to stand side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..geometry import Lane, Part, SegmentShape
from ..select.chunks import ChunkMap
from .fetch import FetchUnit
from .gather import Gather
from .plan import Piece, RowGroup


@dataclass(frozen=True)
class RowPrefix:
    """The restored tokens of one group of rows, of the positions `[0, tokens)`, and the chunks they lie in."""

    group: RowGroup
    tokens: int

    def pieces(self) -> Iterator[Piece]:
        """The pieces that hold them."""
        return (piece for piece in self.group.pieces if piece.at < self.tokens)

    @cached_property
    def chunks(self) -> ChunkMap:
        starts = []
        for piece in self.pieces():
            step = piece.reader.shape.geometry.chunk_tokens
            stop = piece.first + min(piece.count, self.tokens - piece.at)
            firsts = np.arange(piece.first - piece.first % step, stop, step)
            starts.append(np.maximum(firsts, piece.first) - piece.first + piece.at)
        return ChunkMap(np.concatenate(starts), self.tokens)

    def inside(self, piece: Piece, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """Which of ascending `tokens` of the row `piece` holds: the first one's index, and their numbers in it."""
        low, high = np.searchsorted(tokens, (piece.at, piece.at + piece.count))
        return int(low), tokens[low:high] - piece.at + piece.first


class Gathers:
    """Copies chosen tokens of one row to the layers of a period.

    Args:
        row: whose tokens.
        chosen: int64 `[sets, tokens]`, each ascending: one set for all kv heads, or one for each.
    """

    def __init__(self, row: RowPrefix, chosen: np.ndarray) -> None:
        self.row, self.chosen = row, chosen
        self._of_lane: dict[int, tuple[Lane, Gather]] = {}

    def copy(self, units: Sequence[FetchUnit], layer: int, name: str, target: torch.Tensor) -> None:
        """Copy them side by side to `target`, `[kv_heads, tokens, dim]`.

        Args:
            units: hold them, and have arrived.
            name: "key" or "value".
        """
        new: dict[int, tuple[Lane, Gather]] = {}
        for unit in units:
            if id(unit.lane) not in self._of_lane:
                gather = new.setdefault(id(unit.lane), (unit.lane, Gather(unit.reader.shape, unit.lane)))[1]
                self._add(unit, gather)
        self._of_lane.update(new)
        for lane in {id(unit.lane): unit.lane for unit in units}.values():
            for part in parts_of(lane, layer, name):
                if part.first_head < len(target):
                    self._of_lane[id(lane)][1].copy(part, target)

    def forget(self, units: Iterable[FetchUnit]) -> None:
        """No later layer copies from these: let go of their memory."""
        for unit in units:
            self._of_lane.pop(id(unit.lane), None)

    def _add(self, unit: FetchUnit, gather: Gather) -> None:
        for piece in self.row.pieces():
            if unit.reader is not piece.reader:
                continue
            for head, tokens in sets_in(self.chosen, unit.lane):
                first, inside = self.row.inside(piece, tokens)
                columns = np.arange(first, first + len(inside))
                gather.add(unit.reader.shape, unit.blocks, inside, columns, head)

    def wanted(self, layers: Collection[int]) -> Iterator[tuple[Piece, Lane, np.ndarray]]:
        """The pieces and lanes that hold them for some layers, and int64 `[n]`, ascending: those of any head there."""
        for piece in self.row.pieces():
            for lane in restoring_lanes(piece.reader.shape, layers):
                each = [self.row.inside(piece, tokens)[1] for _, tokens in sets_in(self.chosen, lane)]
                tokens = each[0] if len(each) == 1 else np.unique(np.concatenate(each))
                if len(tokens):
                    yield piece, lane, tokens

    def note_use(self, units: Sequence[FetchUnit], layers: Collection[int]) -> None:
        """They go into the attention of `layers`."""
        for unit in units:
            mine = set(layers).intersection(unit.lane.layers)
            for piece in self.row.pieces() if unit.from_disk else ():
                if piece.reader is unit.reader:
                    sets = [self.row.inside(piece, tokens)[1] for tokens in self.chosen]
                    unit.use(mine, sets)


def sets_in(chosen: np.ndarray, lane: Lane) -> Iterator[tuple[int, np.ndarray]]:
    """What the heads of `lane` want of sets, int64 `[sets, tokens]`: each head and its set, or -1 and that of all."""
    if len(chosen) == 1:
        yield -1, chosen[0]
        return
    first = min(part.first_head for part in lane.parts)
    for head in range(first, min(len(chosen), max(part.first_head + part.heads for part in lane.parts))):
        yield head, chosen[head]


def parts_of(lane: Lane, layer: int, name: str) -> Iterator[Part]:
    """Those of one tensor of a layer."""
    return (part for part in lane.parts if part.layer == layer and part.tensor == name)


def restoring_lanes(shape: SegmentShape, layers: Collection[int]) -> list[Lane]:
    """The lanes of a segment that these layers restore from."""
    return [lane for lane in shape.lanes if not lane.identifies and not set(lane.layers).isdisjoint(layers)]


def key_lanes(shape: SegmentShape, layer: int, heads: int | None) -> list[Lane]:
    """The lanes that hold a layer's keys, of its first `heads` heads or of all, and as little else as can be."""
    kind = shape.layout.layers[layer]
    assert kind is not None
    wanted = kind.key_heads if heads is None else min(heads, kind.key_heads)
    apart, among = [], []
    for lane in shape.lanes:
        mine = [p for p in lane.parts if p.layer == layer and p.tensor == "key" and p.first_head < wanted]
        if mine and lane.identifies:
            apart.append((sum(p.heads for p in mine), lane))
        elif mine:
            among.append(lane)
    whole = [lane for count, lane in apart if count >= wanted]
    return whole[:1] or among
