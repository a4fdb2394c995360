"""Selection of the segments of a conversation that are rewritten when it is suspended.

A turn appends a segment. Rewriting the whole chain at each turn would write bytes in proportion to the square of the
number of turns, so only its last segments are rewritten, as few as possible:

- Segments that were not compacted yet are, if layers share KV or a part of them is not stored: once for each segment.
- Older segments are rewritten with them if this saves a fifth of their bytes. A rewrite then writes at most four times
  the bytes that it drops, and each byte is dropped at most once. Such rewrites together write at most four times the
  bytes that the turns append.
- More than `MOST_SMALL` consecutive segments of less than `SMALL_TOKENS` tokens at the end of a chain are joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .geometry import ALIGNMENT, Geometry, KVLayout, block_groups
from .segment import SegmentReader

SMALL_TOKENS = 512
"""Number of tokens below which a segment is small."""
MOST_SMALL = 8
"""Maximum number of small segments at the end of a chain."""
_WORTH = 0.8
"""Bytes of a joined segment, as a share of those of its parts, below which old segments are rewritten."""
_HEAD_BYTES = 3 * ALIGNMENT
"""Bytes of a segment before its blocks, at least."""


def first_rewritten(
    readers: Sequence[SegmentReader], geometry: Geometry, stored_from: np.ndarray, retained: float
) -> int | None:
    """Return the index of the first segment of a chain to rewrite, or None to rewrite none.

    All segments from this one on become one segment.

    Args:
        readers: Segments of the chain, in order.
        geometry: Geometry of the new segment.
        stored_from: For each layer, the first token of the chain that is to be stored: int64 `[layers]`.
        retained: Share of a merged pair's tokens that stay unmerged.
    """
    layout, last = readers[0].shape.layout, readers[-1].header
    starts = [reader.header.position - readers[0].header.position for reader in readers]
    stop = last.position + last.shape.tokens - readers[0].header.position
    old_bytes = 0
    first = None
    for index in reversed(range(len(readers))):
        old_bytes += readers[index].shape.blocks_bytes + _HEAD_BYTES
        held = stop - np.clip(stored_from, starts[index], stop)
        if _blocks_bytes(layout, geometry, held, retained) + _HEAD_BYTES < _WORTH * old_bytes:
            first = index
    if first is not None:
        return first
    if (small := _run_at_end([reader.shape.tokens < SMALL_TOKENS for reader in readers])) > MOST_SMALL:
        return len(readers) - small
    new = _run_at_end([reader.shape.tables is None and not reader.shape.geometry.pairs for reader in readers])
    if new and (geometry.pairs or stored_from.max() > starts[-new]):
        return len(readers) - new
    return None


def first_stored_tokens(readers: Sequence[SegmentReader]) -> np.ndarray:
    """Return the first token from which on each layer of a chain is stored: int64 `[layers]`, non-increasing."""
    first_stored = np.zeros(len(readers[0].shape.layout.layers), np.int64)
    for number, reader in enumerate(readers):
        offset = reader.header.position - readers[0].header.position
        count = readers[number + 1].header.position - reader.header.position if number + 1 < len(readers) else None
        is_missing = ~reader.shape.held[:, :count]  # [layers, tokens]; the next segment may begin inside this one
        last = is_missing.shape[1] - is_missing[:, ::-1].argmax(1)
        first_stored = np.where(is_missing.any(1), offset + last, first_stored)
    return np.maximum.accumulate(first_stored[::-1])[::-1]


def _blocks_bytes(layout: KVLayout, geometry: Geometry, held: np.ndarray, retained: float) -> int:
    """Return the bytes of a segment's blocks if each layer holds so many last tokens, int64 `[layers]`."""
    alone, shared = held.astype(np.int64), dict[tuple[int, ...], int]()
    for pair in geometry.pairs:
        both = min(alone[layer] for layer in pair)
        shared[pair] = both - round(retained * both)
        alone[list(pair)] -= shared[pair]
    total = 0
    for group in block_groups(layout, geometry):
        tokens = shared[group.layers] if group.merged else max(alone[layer] for layer in group.layers)
        total += -(-int(tokens) // geometry.chunk_tokens) * group.block_bytes
    return total


def _run_at_end(flags: Sequence[bool]) -> int:
    """Return the number of true flags at the end of a sequence."""
    return next((number for number, flag in enumerate(reversed(flags)) if not flag), len(flags))
