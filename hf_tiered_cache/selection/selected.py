"""Selected tokens of rows: their blocks, their copy to contiguous positions, and interfaces for reselection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ..restore.fetch import FetchUnit
from ..restore.gather import Gather
from ..restore.plan import RowGroup, SegmentSlice
from ..stats import StatsCollector
from ..store.geometry import BlockGroup, Part
from ..store.shape import SegmentShape
from .selector import ChunkMap, Selector

Rotate = Callable[[torch.Tensor, np.ndarray, int], None]
"""Function that rotates `[heads, n, dim]` in place to positions, int64 `[sets, n]`: one set for all heads, or one for
each. All positions are below the third argument."""


class DecodeSelection(Protocol):
    """Decode selections of one pass."""

    def reselect(
        self,
        layer: int,
        rows: Sequence[Any],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> Sequence[Any]:
        """Select for a layer's queries and replace deselected tokens by newly selected ones, in place.

        Args:
            layer: Index of a layer with full attention.
            rows: State of each row, as returned by `DecodeSelector.row`; None for a row that holds all of its restored
                tokens or has none.
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, all keys that the layer holds, restored ones first.
            values: Like `keys`.
            rotate_: Rotates stored keys.
            scaling: Scale of the logits; None for dim ** -0.5.

        Returns:
            New state of each row.

        Raises:
            RestoreError: A block did not arrive; nothing has changed.
        """

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""


class DecodeSelector(Protocol):
    """Decode selector of a cache, kept for the lifetime of the cache."""

    @property
    def selector(self) -> Selector:
        """The selector."""

    @property
    def may_stay(self) -> bool:
        """True if the last selection may be kept if blocks of the next one cannot be read."""

    def row(self, layer: int, prefix: int, tokens: np.ndarray) -> Any:
        """Return the state of a layer's row, or None if the row never reselects.

        The state has a method `fork()` that returns an independent copy, because rows may be copied.

        Args:
            layer: Layer index.
            prefix: Number of the row's prefix.
            tokens: int64 `[sets, columns]`, tokens at the layer's restored positions.
        """

    def num_to_offload(self, rows: Sequence[Any], computed: int) -> int:
        """Return the number of leading computed positions to offload now, which are selected from afterwards.

        Args:
            rows: State of each row of a layer, as returned by `row`; None for rows that do not select.
            computed: Number of computed positions that the layer holds after the restored ones.
        """

    def offload(self, rows: Sequence[Any], keys: torch.Tensor, values: torch.Tensor) -> list[Any]:
        """Offload rotated keys and values, `[batch, kv_heads, n, dim]`, of a layer, and return its new row states."""

    def begin(self, collector: StatsCollector) -> DecodeSelection:
        """Begin the decode selections of a pass."""


@dataclass(frozen=True)
class RowPrefix:
    """Restored tokens of one group of rows: token positions `[0, tokens)`, padding not counted."""

    group: RowGroup
    tokens: int
    _chunks: dict[tuple[int, bool], ChunkMap] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pieces(self) -> Iterator[SegmentSlice]:
        """Yield the segment slices that hold the restored tokens."""
        return (piece for piece in self.group.pieces if piece.at < self.tokens)

    def chunks(self, layer: int, per_head: bool) -> ChunkMap:
        """Return the chunks of the tokens as stored in a layer's blocks: for the first kv head, or for each kv head."""
        shapes = [piece.reader.shape for piece in self.pieces()]
        ordered = all(shape.in_order(group) for shape in shapes for group in restoring_groups(shape, (layer,)))
        name = (-1 if ordered else layer, per_head and not ordered)
        if name not in self._chunks:
            self._chunks[name] = ChunkMap.by_slot(*self._slots(layer, name[1]))
        return self._chunks[name]

    def _slots(self, layer: int, per_head: bool) -> tuple[np.ndarray, int]:
        """Return token slots, int64 `[heads or 1, tokens]`, numbered across all segments, and the slots per chunk."""
        shapes = [piece.reader.shape for piece in self.pieces()]
        step = max(shape.geometry.chunk_tokens for shape in shapes)
        heads = shapes[0].layout.layer(layer).key_heads if per_head else 1
        slots, begin = np.empty((heads, self.tokens), np.int64), 0
        for piece, shape in zip(self.pieces(), shapes, strict=True):
            tokens = np.arange(piece.first, piece.first + min(piece.count, self.tokens - piece.at))
            for group in restoring_groups(shape, (layer,)):
                chunk, place = np.divmod(shape.slot_of_token(group, tokens), shape.geometry.chunk_tokens)
                for part in parts_of(group, layer, "key"):
                    head_slots = slots[part.first_head : part.first_head + part.heads]
                    head_slots[:, piece.at : piece.at + len(tokens)] = begin + chunk * step + place
            begin += -(-shape.tokens // shape.geometry.chunk_tokens) * step
        return slots, step

    def inside(self, piece: SegmentSlice, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """Find the tokens of a row that `piece` holds.

        Args:
            piece: Segment slice of the row.
            tokens: int64, ascending token positions in the row.

        Returns:
            Index into `tokens` of the first token held, and the held tokens counted in the segment.
        """
        low, high = np.searchsorted(tokens, (piece.at, piece.at + piece.count))
        return int(low), tokens[low:high] - piece.at + piece.first


class Gathers:
    """Copy plan from blocks to the layers of a period, for selected tokens of one row.

    Args:
        row: Restored tokens of the row.
        tokens: int64 `[sets, tokens]`, each set ascending: one set for all kv heads, or one for each.
        counts: int64 `[sets]`, number of leading tokens used of each set; None for all.
    """

    def __init__(self, row: RowPrefix, tokens: np.ndarray, counts: np.ndarray | None = None) -> None:
        self.row, self.tokens = row, tokens
        self._sets = list(tokens) if counts is None else [row[:n] for row, n in zip(tokens, counts, strict=True)]
        self._gather_of_group: dict[int, tuple[BlockGroup, Gather]] = {}

    def copy(self, units: Sequence[FetchUnit], layer: int, name: str, target: torch.Tensor) -> None:
        """Copy the selected tokens to contiguous positions of `target`.

        Args:
            units: Units that hold the tokens and have arrived.
            layer: Layer index.
            name: "key" or "value".
            target: `[kv_heads, tokens, dim]`, filled in place.
        """
        new_gathers: dict[int, tuple[BlockGroup, Gather]] = {}
        for unit in units:
            if id(unit.block_group) not in self._gather_of_group:
                gather = new_gathers.setdefault(
                    id(unit.block_group), (unit.block_group, Gather(unit.reader.shape, unit.block_group))
                )[1]
                self._add(unit, gather)
        self._gather_of_group.update(new_gathers)
        for block_group in {id(unit.block_group): unit.block_group for unit in units}.values():
            for part in parts_of(block_group, layer, name):
                if part.first_head < len(target):
                    self._gather_of_group[id(block_group)][1].copy(part, target)

    def forget(self, units: Iterable[FetchUnit]) -> None:
        """Release the memory of units that no later layer copies from."""
        for unit in units:
            self._gather_of_group.pop(id(unit.block_group), None)

    def _add(self, unit: FetchUnit, gather: Gather) -> None:
        for piece in self.row.pieces():
            if unit.reader is not piece.reader:
                continue
            for head, tokens in sets_in(self._sets, unit.block_group):
                first, inside = self.row.inside(piece, tokens)
                columns = np.arange(first, first + len(inside))
                gather.add(unit.reader.shape, unit.blocks, inside, columns, head)

    def sources(self, layers: Collection[int]) -> Iterator[tuple[SegmentSlice, BlockGroup, np.ndarray]]:
        """Yield slices and KV cache groups that `layers` copy from, and tokens of any head, int64 `[n]`, ascending."""
        for piece in self.row.pieces():
            for block_group in restoring_groups(piece.reader.shape, layers):
                token_sets = [self.row.inside(piece, tokens)[1] for _, tokens in sets_in(self._sets, block_group)]
                tokens = token_sets[0] if len(token_sets) == 1 else np.unique(np.concatenate(token_sets))
                if len(tokens):
                    yield piece, block_group, tokens

    def note_use(self, units: Sequence[FetchUnit], layers: Collection[int]) -> None:
        """Record that `layers` attend to the tokens of these units. Units that read nothing from disk are skipped."""
        for unit in units:
            unit_layers = set(layers).intersection(unit.block_group.layers)
            for piece in self.row.pieces() if unit.from_disk else ():
                if piece.reader is unit.reader:
                    sets = [self.row.inside(piece, tokens)[1] for tokens in self._sets]
                    unit.use(unit_layers, sets)


def sets_in(tokens: Sequence[np.ndarray], block_group: BlockGroup) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each head of `block_group` with its set of `tokens`, or -1 with the single set for all heads."""
    if len(tokens) == 1:
        yield -1, tokens[0]
        return
    first = min(part.first_head for part in block_group.parts)
    for head in range(first, min(len(tokens), max(part.first_head + part.heads for part in block_group.parts))):
        yield head, tokens[head]


def parts_of(block_group: BlockGroup, layer: int, name: str) -> Iterator[Part]:
    """Yield the parts of a KV cache group that hold one tensor of a layer."""
    return (part for part in block_group.parts if part.layer == layer and part.tensor == name)


def restoring_groups(shape: SegmentShape, layers: Collection[int]) -> list[BlockGroup]:
    """Return the KV cache groups of a segment that `layers` restore from."""
    groups = {group.index: group for layer in layers for group in shape.restoring_groups.get(layer, ())}
    return [groups[index] for index in sorted(groups)]


def key_groups(shape: SegmentShape, layer: int, heads: int | None) -> list[BlockGroup]:
    """Return KV cache groups that hold a layer's keys, with as little other data as possible.

    Args:
        shape: Shape of the segment.
        layer: Layer index.
        heads: Number of leading kv heads needed; None for all.

    Returns:
        One index group if one holds all of these heads, else the ordinary groups that hold the keys.
    """
    kind = shape.layout.layer(layer)
    num_heads = kind.key_heads if heads is None else min(heads, kind.key_heads)
    index_groups, shared_groups = [], []
    for block_group in shape.block_groups:
        key_parts = [
            p for p in block_group.parts if p.layer == layer and p.tensor == "key" and p.first_head < num_heads
        ]
        if key_parts and block_group.identifies:
            index_groups.append((sum(p.heads for p in key_parts), block_group))
        elif key_parts:
            shared_groups.append(block_group)
    complete_groups = [block_group for count, block_group in index_groups if count >= num_heads]
    return complete_groups[:1] or shared_groups
