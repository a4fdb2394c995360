"""Bytes of stored conversations."""

from __future__ import annotations

from hf_tiered_cache import KVStore
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store.shape import SegmentShape


def shapes_of(store: KVStore, conversation: str) -> list[SegmentShape]:
    """Return the shapes of a suspended conversation's segments, in order."""
    (record,) = [info for info in store.conversations() if info.id == conversation]
    readers = [storage_of(store).disk.reader(segment) for segment in record.segments]
    return [reader.shape for reader in readers if reader is not None]


def payload_bytes(shape: SegmentShape) -> float:
    """Return the bytes of the tokens that a segment's KV cache groups hold, without the padding of blocks."""
    chunk = shape.geometry.chunk_tokens
    return sum(shape.tokens_in(group) * group.payload_bytes / chunk for group in shape.block_groups)
