"""First tokens of conversations that are not stored, and stay in memory while they fit (see `FrontReader`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..restore.plan import Plan
from ..store.front import FrontReader, owners_of_front
from ..store.relayout import BlocksOf, front_blocks, front_shape
from ..store.segment import SegmentReader
from ..tiers.residency import Residency

_CPU = torch.device("cpu")


class Fronts:
    """First tokens that segments lack and that memory may hold.

    Args:
        residency: Memory tiers. They evict these blocks like others.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.segments: set[str] = set()  # the shapes of many conversations would take memory
        """Ids of the segments with such tokens."""

    def keep(self, segment: SegmentReader, replaced: Sequence[SegmentReader], blocks_of: BlocksOf) -> None:
        """Keep the tokens in memory that a new segment lacks, if they fit besides the segment.

        Args:
            segment: The new segment.
            replaced: The segments it was made of, in order.
            blocks_of: Function that returns the blocks of a segment, and raises EvictedError if they are not in memory.
        """
        if not any(segment.shape.held_from):
            return
        shape = front_shape(segment.shape)
        if shape.blocks_bytes + segment.shape.blocks_bytes > self._residency.host.budget:
            return
        owners = owners_of_front(segment, shape)
        self.segments.add(segment.id)
        fronts = [self.of(reader, None) for reader in replaced]
        for group, blocks in front_blocks(replaced, fronts, shape, blocks_of):
            self._residency.admit(owners[group], blocks)

    def forget(self, segments: Collection[str]) -> None:
        """Forget the tokens that these segments lack."""
        self.segments.difference_update(segments)

    def of(self, segment: SegmentReader, devices: Sequence[torch.device] | None) -> FrontReader | None:
        """Return a reader of the tokens that a segment lacks, or None if memory holds none of them.

        Args:
            segment: The segment.
            devices: Device of each layer; None for the CPU.
        """
        if segment.id not in self.segments:
            return None
        shape = front_shape(segment.shape)
        held = np.zeros((len(shape.layout.layers), shape.tokens), bool)
        step = shape.geometry.chunk_tokens
        for group, owner in zip(shape.block_groups, owners_of_front(segment, shape), strict=True):
            tiers = self._residency.find(
                owner, np.arange(shape.chunks_in(group)), _CPU if devices is None else devices[group.layers[0]]
            )
            tokens = shape.tokens_by_slot(group)
            is_held = ~np.isin(np.arange(len(tokens)) // step, tiers["disk"])
            held[np.array(group.layers)[:, None], tokens[is_held]] = True
        if not held.any():
            self.segments.discard(segment.id)
            return None
        return FrontReader(segment, shape, held)

    def added_to(self, plan: Plan, devices: Sequence[torch.device]) -> Plan:
        """Return a plan that can also restore these tokens."""
        groups = []
        for group in plan.groups:
            fronts = ((piece, self.of(piece.reader, devices)) for piece in group.pieces)
            added = tuple(replace(piece, reader=front) for piece, front in fronts if front is not None)
            groups.append(replace(group, pieces=(*group.pieces, *added)))
        return replace(plan, groups=tuple(groups))
