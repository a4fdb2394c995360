"""A conversation's segments become one that takes less room: layers in pairs, and no front (Krul, Section 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..codecs.pairs import TOWARD, retained
from ..geometry import Geometry, block_groups
from ..shape import TokenTables
from .disk import SegmentStore
from .relayout import BlocksOf, join_segments, pair_angles
from .segment import SegmentReader

Admit = Callable[[tuple[str, int, int], torch.Tensor], None]
"""Is given blocks that were written, uint8 `[chunks, block_bytes]`, and the name that `SegmentReader.owner` has."""


def merge_segments(
    disk: SegmentStore,
    readers: Sequence[SegmentReader],
    geometry: Geometry,
    stored_from: Sequence[int],
    share: float,
    toward: float = TOWARD,
    blocks_of: BlocksOf = SegmentReader.blocks,
    admit: Admit = lambda owner, blocks: None,
) -> str | None:
    """Make one segment of a chain of them, which stay.

    Args:
        disk: where they lie.
        readers: of the segments, each of which goes on where the one before ends.
        geometry: of the new one, with its pairs.
        stored_from: for each layer the first token that it keeps. One that a segment lacks must not be asked for.
        share: of the tokens that a pair shares the share that stays unmerged: those of the largest angles.
        toward: how far the shared direction lies from the first layer's to the second's.
        blocks_of: gives the blocks of these segments.
        admit: is given each block group of the new one. That may still come to nothing.

    Returns:
        The new one's id. None where there was no room, or they lie as they should.

    Raises:
        ValueError: see `join_segments`. IntegrityError, OSError: a segment cannot be read.
    """
    first, tokens, apart = readers[0].header, tokens_of(readers), {}
    for pair in geometry.pairs:
        shared = np.arange(max(stored_from[layer] for layer in pair), tokens)
        if len(shared):
            apart[pair] = shared[retained(pair_angles(readers, pair, shared, blocks_of), share).numpy()]
    geometry = replace(geometry, codec=first.shape.geometry.codec)
    tables = TokenTables.by_pairs(stored_from, apart, block_groups(first.shape.layout, geometry), tokens)
    unless_in_order = None if tables.same(None) else tables
    header, prefix_hashes, groups = join_segments(readers, geometry, unless_in_order, blocks_of, toward)

    def written(block_group: int, blocks: torch.Tensor, content: int) -> None:
        admit((header.id, block_group, content), blocks)

    old = [reader.id for reader in readers]
    if header.id in old or not disk.publish(header, prefix_hashes, groups, old, written):
        return None
    if not disk.pinned().isdisjoint(old):
        disk.pin([header.id])
    return header.id


def tokens_of(readers: Sequence[SegmentReader]) -> int:
    """How many tokens a chain of segments has."""
    first, last = readers[0].header, readers[-1].header
    return last.position + last.shape.tokens - first.position
