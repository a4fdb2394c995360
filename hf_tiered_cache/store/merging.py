"""Merge of a conversation's segments into a smaller one: paired layers, no recomputed prefix (Krul, Section 6.1)."""

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
"""Callback for written blocks. Takes the `SegmentReader.owner` name and the blocks, uint8 `[chunks, block_bytes]`."""


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
    """Merge a chain of segments into one new segment.

    The old segments are kept. If one of them is pinned, the new segment is pinned, too.

    Args:
        disk: store of the segments.
        readers: readers of the segments. Each segment continues the one before it.
        geometry: geometry of the new segment, with its layer pairs. Its codec is replaced by the old segments' codec.
        stored_from: for each layer, the first token that is stored. The old segments must hold all tokens from there.
        share: share of a pair's common tokens that stay unmerged: the tokens with the largest angles.
        toward: interpolation weight of the shared direction: 0 for the first layer's direction, 1 for the second's.
        blocks_of: function that returns the blocks of an old segment.
        admit: callback for each KV cache group of the new segment. The segment may still fail to be stored.

    Returns:
        Id of the new segment. None if there was no room, or the segment already has this layout.

    Raises:
        ValueError: see `join_segments`.
        IntegrityError: a block of a segment fails its checksum.
        OSError: a segment cannot be read.
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
    """Return the number of tokens of a chain of segments."""
    first, last = readers[0].header, readers[-1].header
    return last.position + last.shape.tokens - first.position
