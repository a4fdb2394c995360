"""Laying a segment out anew, in another geometry, without the model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..geometry import Geometry, Part
from ..shape import SegmentShape, TokenTables
from .format import HASH_BYTES, SegmentHeader, segment_id
from .memory import aligned_bytes
from .segment import SegmentReader


def relayout_segment(
    reader: SegmentReader, geometry: Geometry, tables: TokenTables | None = None
) -> tuple[SegmentHeader, list[bytes], Iterator[torch.Tensor]]:
    """What `SegmentStore.publish` takes, for the same tokens in another geometry, or in other slots.

    Blocks keep their codec: what lies in them is moved, and nothing is lost on the way. Another codec would be another
    provenance, whose chain takes the tokens to hash.

    Args:
        tables: of the new geometry's block groups. None: all tokens in order.

    Returns:
        Header, prefix hashes, and each block group's blocks, uint8 `[chunks, block_bytes]`: read as they are asked for.

    Raises:
        ValueError: the segment does not hold all its tokens everywhere, so that another geometry's would be missing.
    """
    prefix_hashes = [reader.chain[at : at + HASH_BYTES] for at in range(0, len(reader.chain), HASH_BYTES)]
    geometry = replace(geometry, codec=reader.shape.geometry.codec)
    old = reader.header
    if not old.shape.whole:
        raise ValueError(f"segment {old.id} holds a part of its tokens and cannot be laid out anew")
    shape = SegmentShape(old.shape.layout, geometry, old.shape.tokens, tables)
    name = segment_id(old.parent, prefix_hashes[-1], shape, old.provenance)
    header = replace(old, id=name, shape=shape, created=time.time())
    return header, prefix_hashes, _block_groups(reader, shape)


def _block_groups(reader: SegmentReader, shape: SegmentShape) -> Iterator[torch.Tensor]:
    """The old segment's block groups are read as the new ones need them, and held as long as later ones do."""
    held: dict[int, torch.Tensor] = {}
    for number, block_group in enumerate(shape.block_groups):
        blocks = torch.zeros(shape.chunks_in(block_group), block_group.block_bytes, dtype=torch.uint8)
        for part in block_group.parts:
            shape.pack_fields(blocks, block_group, part, _fields(reader, part, held))
        yield blocks
        later = {part.layer for after in shape.block_groups[number + 1 :] for part in after.parts}
        for index in [index for index in held if later.isdisjoint(reader.shape.block_groups[index].layers)]:
            del held[index]


def _fields(reader: SegmentReader, wanted: Part, held: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The fields of one layer's keys or values, as they are coded, of the heads that `wanted` has."""
    shape, stop = reader.shape, wanted.first_head + wanted.heads
    found = tuple(torch.empty(wanted.heads, shape.tokens, slot.dim, dtype=slot.dtype) for slot in wanted.fields)
    for block_group in shape.block_groups:
        for part in block_group.parts if not block_group.identifies else ():
            low, high = max(part.first_head, wanted.first_head), min(part.first_head + part.heads, stop)
            if (part.layer, part.tensor) == (wanted.layer, wanted.tensor) and low < high:
                if block_group.index not in held:
                    held[block_group.index] = _read(reader, block_group.index)
                for target, source in zip(
                    found, shape.unpack_fields(held[block_group.index], block_group, part), strict=True
                ):
                    mine = source[low - part.first_head : high - part.first_head]
                    target[low - wanted.first_head : high - wanted.first_head] = mine
    return found


def _read(reader: SegmentReader, block_group: int) -> torch.Tensor:
    """All blocks of a block group, checked: uint8 `[chunks, block_bytes]`. Raises IntegrityError or OSError."""
    group = reader.shape.block_groups[block_group]
    blocks = aligned_bytes(reader.shape.chunks_in(group) * group.block_bytes).view(-1, group.block_bytes)
    reader.read(block_group, [(0, blocks)]).result()
    return blocks
