"""Beginning of a segment: its first chunks, as a segment of their own, for a prompt that shares only these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from ..store.format import SegmentHeader, end_of_chain, is_passage, segment_id
from ..store.geometry import HASH_TOKENS

_MOST_SHARE = 0.75
"""Share of a segment above which it is fetched as a whole."""


def beginning_of(header: SegmentHeader, prefix_hashes: Sequence[bytes], num_hashes: int) -> SegmentHeader:
    """Return the header of the first chunks of a segment, which cover so many prefix hashes.

    Args:
        header: Header of the segment.
        prefix_hashes: All its prefix hashes.
        num_hashes: Number of prefix hashes that are needed.

    Returns:
        Header of a segment of fewer tokens, with blocks that are the first ones of each KV cache group. The header
        itself if most of the segment is needed, or if its tokens are not in order.
    """
    shape = header.shape
    step = lcm(shape.geometry.chunk_tokens, HASH_TOKENS)
    tokens = -(-num_hashes * HASH_TOKENS // step) * step
    if tokens > _MOST_SHARE * shape.tokens or shape.tables is not None or shape.geometry.pairs:
        return header
    if is_passage(header.provenance):
        return header
    shape = replace(shape, tokens=tokens)
    last = end_of_chain(prefix_hashes[: tokens // HASH_TOKENS], header.provenance)
    return replace(header, id=segment_id(header.parent, last, shape, header.provenance), shape=shape)
