"""First tokens of conversations that are not stored, and stay in memory while they fit (see `UnstoredPrefixReader`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..errors import EvictedError
from ..restore.plan import Plan, RecomputePlan
from ..store.container import Group
from ..store.geometry import BlockGroup, LayerKV
from ..store.lazy import torch
from ..store.relayout import unstored_blocks, unstored_shape
from ..store.segment import SegmentReader, UnstoredPrefixReader, owners_of_unstored
from ..store.shape import SegmentShape
from ..tiers.collector import StatsCollector
from ..tiers.handles import BlockRequest
from ..tiers.residency import Residency
from .captured import CapturedKV


class ComputedPrefix:
    """First tokens that segments lack, as a pass computes them; `shapes` are those of these tokens, by segment."""

    def __init__(self, plan: RecomputePlan, shapes: Mapping[str, SegmentShape]) -> None:
        self._plan, self._shapes = plan, shapes
        self._captured = CapturedKV()

    def capture(self, layer: int, kind: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Capture a layer's computed keys and values, unrotated, `[batch, heads, n, dim]` each."""
        length = self._plan.recompute_lengths[layer]
        self._captured.add(layer, kind, keys[:, :, :length], values[:, :, :length])

    def end(self) -> int:
        """End the capture after the pass. Returns the size in bytes of what is captured."""
        self._captured.note_work()
        return self._captured.nbytes

    def packed(self) -> Iterator[tuple[SegmentReader, SegmentShape, list[BlockGroup], Iterator[Group]]]:
        """Yield each segment, the shape of what it lacks, the groups whose tokens are all computed, and their blocks.

        A group's blocks are uint8 `[chunks, block_bytes]`, valid until the next group's are requested.
        """
        for rows in self._plan.groups:
            for piece in rows.pieces:
                shape, start = self._shapes.get(piece.reader.id), piece.at - piece.first
                if shape is None or isinstance(piece.reader, UnstoredPrefixReader):
                    continue
                groups = [group for group in shape.block_groups if self._has_all(shape, group, start)]
                yield piece.reader, shape, groups, self._captured.packer(shape, rows.rows[0], start, groups)()

    def _has_all(self, shape: SegmentShape, group: BlockGroup, start: int) -> bool:
        tokens = shape.tokens_by_slot(group)
        lengths = [self._plan.recompute_lengths[layer] for layer in group.layers if layer in self._captured.layers]
        return len(tokens) > 0 and len(lengths) == len(group.layers) and start + int(tokens.max()) < min(lengths)


class UnstoredPrefixes:
    """First tokens that segments lack and that memory may hold. The memory tiers evict these blocks like others."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.segments: set[str] = set()  # the shapes of many conversations would take memory
        """Ids of the segments with such tokens."""

    def keep(self, segment: SegmentReader, replaced: Sequence[SegmentReader]) -> None:
        """Keep the tokens in memory that a new segment lacks, as far as they are there and fit besides the segment."""
        shape = self._shape_of(segment)
        if shape is None:
            return

        def blocks_of(reader: SegmentReader, block_group: int) -> torch.Tensor:
            blocks, missing = blocks_in_memory(self._residency, reader, block_group)
            if len(missing):
                raise EvictedError(reader.id)
            return blocks

        owners = owners_of_unstored(segment, shape)
        self.segments.add(segment.id)
        unstored = [self.of(reader, None) for reader in replaced]
        for group, blocks in unstored_blocks(replaced, unstored, shape, blocks_of):
            self._residency.admit(owners[group], blocks)

    def to_compute(self, plan: Plan) -> ComputedPrefix | None:
        """Return an object that captures the tokens that segments lack and a pass computes.

        Return None if there are no such tokens, or they do not fit in memory besides their segments.
        """
        if not isinstance(plan, RecomputePlan):
            return None
        shapes: dict[str, SegmentShape] = {}
        for reader in plan.readers:
            if not isinstance(reader, UnstoredPrefixReader) and (shape := self._shape_of(reader)) is not None:
                shapes[reader.id] = shape
        return ComputedPrefix(plan, shapes) if shapes else None

    def put(self, prefix: ComputedPrefix, confirmed: Callable[[], bool]) -> None:
        """Keep the tokens in memory that a pass has computed, if `confirmed` returns that they may be stored."""
        if not confirmed():
            return
        for reader, shape, groups, packed in prefix.packed():
            owners = owners_of_unstored(reader, shape)
            self.segments.add(reader.id)
            for group, blocks in zip(groups, packed, strict=True):
                self._residency.admit(
                    owners[group.index], blocks if isinstance(blocks, torch.Tensor) else blocks.blocks
                )

    def _shape_of(self, segment: SegmentReader) -> SegmentShape | None:
        """Return the shape of the tokens that a segment lacks, or None if there are none, or memory has no room."""
        if not any(segment.shape.held_from):
            return None
        shape = unstored_shape(segment.shape)
        fits = shape.blocks_bytes + segment.shape.blocks_bytes <= self._residency.host.budget
        return shape if fits else None

    def forget(self, segments: Collection[str]) -> None:
        """Forget the tokens that these segments lack."""
        self.segments.difference_update(segments)

    def of(self, segment: SegmentReader, devices: Sequence[torch.device] | None) -> UnstoredPrefixReader | None:
        """Return a reader of the tokens that a segment lacks, or None if memory holds none of them.

        `devices` are those of the layers; None for the CPU.
        """
        if segment.id not in self.segments:
            return None
        shape = unstored_shape(segment.shape)
        held_tokens = np.zeros((len(shape.layout.layers), shape.tokens), bool)
        step = shape.geometry.chunk_tokens
        for group, owner in zip(shape.block_groups, owners_of_unstored(segment, shape), strict=True):
            device = torch.device("cpu") if devices is None else devices[group.layers[0]]
            tiers = self._residency.find(owner, np.arange(shape.chunks_in(group)), device)
            tokens = shape.tokens_by_slot(group)
            is_held = ~np.isin(np.arange(len(tokens)) // step, tiers["disk"])
            held_tokens[np.array(group.layers)[:, None], tokens[is_held]] = True
        if not held_tokens.any():
            self.segments.discard(segment.id)
            return None
        return UnstoredPrefixReader(segment, shape, held_tokens)

    def added_to(self, plan: Plan, devices: Sequence[torch.device]) -> Plan:
        """Return a plan that can also restore these tokens."""
        groups = []
        for group in plan.groups:
            unstored = ((piece, self.of(piece.reader, devices)) for piece in group.pieces)
            added = tuple(replace(piece, reader=prefix) for piece, prefix in unstored if prefix is not None)
            groups.append(replace(group, pieces=(*group.pieces, *added)))
        return replace(plan, groups=tuple(groups))


def blocks_in_memory(residency: Residency, reader: SegmentReader, block_group: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return room for all blocks of a KV cache group, filled from host memory, and the chunks that are not there.

    They are uint8 `[chunks, block_bytes]`, and int64, ascending.
    """
    blocks = reader.shape.room_for(reader.shape.block_groups[block_group])
    missing, cpu = np.arange(len(blocks)), torch.device("cpu")
    on_host = residency.find(reader.owners[block_group], missing, cpu)["host"]
    if len(on_host):
        request = BlockRequest(reader, block_group, on_host)
        with residency.fetched(request, cpu, StatsCollector()) as handle:
            for first, memory in handle.fetched[0].arrived.runs():
                blocks[first : first + len(memory)] = memory
        missing = np.setdiff1d(missing, handle.fetched[0].chunks, assume_unique=True)
    return blocks, missing
