"""Conversion of stored segments without the model: change the geometry, join segments, merge pairs of layers.

Merging turns a conversation's segments into a smaller one: paired layers, no recomputed prefix (Krul, Section 6.1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ..errors import EvictedError
from . import hashes_of
from .codecs import checked_encode
from .disk import SegmentStore, Written
from .format import SegmentHeader, end_of_chain, segment_id
from .geometry import HASH_TOKENS, BlockGroup, Geometry, Part, TensorName, block_groups
from .lazy import torch
from .pairs import TOWARD, angle, encode, retained
from .segment import SegmentReader
from .shape import SegmentShape, TokenTables

_SOON = 4  # number of next KV cache groups that keep their source blocks in memory. Later groups read them again
_RUN = 2048  # tokens that are merged at once. Merging needs several times the memory of their KV
Fields: TypeAlias = "tuple[torch.Tensor, ...]"
"""Encoded fields of keys or values, `[heads, tokens, field's dim]` each."""
BlocksOf: TypeAlias = "Callable[[SegmentReader, int], torch.Tensor]"
"""Function that returns all blocks of a segment's KV cache group, uint8 `[chunks, block_bytes]`.

It raises IntegrityError or OSError.
"""
Made: TypeAlias = "tuple[SegmentHeader, list[bytes], Iterator[torch.Tensor]]"
"""Arguments of `SegmentStore.publish`: header, prefix hashes, and a lazy iterator over the KV cache groups' blocks."""


def join_segments(
    readers: Sequence[SegmentReader],
    geometry: Geometry,
    tables: TokenTables | None = None,
    blocks_of: BlocksOf = SegmentReader.blocks,
    toward: float = TOWARD,
) -> Made:
    """Join consecutive segments into one, or convert a single one to another geometry or other token tables.

    The codec is kept, and encoded values are copied without loss. Another codec would mean another provenance, and its
    hash chain can only be computed from the tokens. Layers that are a pair in the new geometry only are merged, and
    existing pairs are copied. Layers that leave their pair, or change to another, get the values that the old pair
    decodes to. Only a few KV cache groups are in memory at a time.

    Args:
        readers: Readers of the segments. Each segment continues the one before at its end, or inside it; then the one
            before is cut there. Expiry, label and model names are those of the last segment.
        geometry: Geometry of the new segment. Its codec is replaced by the old segments' codec.
        tables: Token tables of the new segment (see `TokenTables.by_pairs`). None: all tokens in order.
        blocks_of: Function that returns the blocks of an old segment.
        toward: Interpolation weight for newly merged pairs (see `pairs.merge`).

    Raises:
        ValueError: The segments are not consecutive, differ in model, layout or provenance, or lack requested tokens.
        FormatError: The pairs or tables are invalid.
    """
    first, last = readers[0].header, readers[-1].header
    pieces, prefix_hashes = _chain(readers)
    geometry = replace(geometry, codec=first.shape.geometry.codec)
    tables = None if tables is None or tables.same(None) else tables
    shape = SegmentShape(first.shape.layout, geometry, len(prefix_hashes) * HASH_TOKENS, tables)
    _check_held(pieces, shape)
    name = segment_id(first.parent, end_of_chain(prefix_hashes, first.provenance), shape, first.provenance)
    header = replace(last, id=name, shape=shape, parent=first.parent, position=first.position, created=time.time())
    return header, prefix_hashes, _Join(pieces, shape, blocks_of, toward).block_groups()


def pair_angles(
    readers: Sequence[SegmentReader], pair: tuple[int, int], tokens: np.ndarray, blocks_of: BlocksOf
) -> torch.Tensor:
    """Compute the angles between two layers' keys, and values, in radians: float32 `[key heads + value heads, n]`.

    Both layers have full attention. Tokens are int64 `[n]`, ascending, relative to the first one of the chain. For the
    other arguments see `join_segments`.
    """
    join = _Join(_chain(readers)[0], readers[0].shape, blocks_of)
    runs = [tokens[at : at + _RUN] for at in range(0, len(tokens), _RUN)]
    first, second = pair
    layer_kv = readers[0].shape.layout.layer(first)
    tensors: tuple[TensorName, ...] = ("key", "value")
    angles = []
    for tensor in tensors:
        part = Part(first, tensor, 0, layer_kv.heads(tensor), layer_kv.dim(tensor), ())
        parts = part, replace(part, layer=second)
        angles.append(torch.cat([angle(*(join.numbers(target, run) for target in parts)) for run in runs], dim=1))
    return torch.cat(angles)


@dataclass(frozen=True)
class _Piece:
    """First `count` tokens of a segment, which become the tokens from `at` on of the new segment."""

    reader: SegmentReader
    at: int
    count: int


def _chain(readers: Sequence[SegmentReader]) -> tuple[list[_Piece], list[bytes]]:
    """Return the pieces of consecutive segments, and their prefix hashes. Raises ValueError if they do not fit."""
    pieces: list[_Piece] = []
    hashes: list[bytes] = []
    first = readers[0].header
    for number, reader in enumerate(readers):
        header = reader.header
        alike = (header.fingerprint, header.provenance, header.shape.layout)
        if alike != (first.fingerprint, first.provenance, first.shape.layout):
            raise ValueError(f"segments {first.id} and {header.id} differ in model, layout or provenance")
        stop = header.position + header.shape.tokens
        if number + 1 < len(readers):
            following = readers[number + 1].header
            stop = min(stop, following.position)
        pieces.append(_Piece(reader, header.position - first.position, stop - header.position))
        hashes += hashes_of(reader.chain)[: max(0, stop - header.position) // HASH_TOKENS]
        if number + 1 < len(readers) and (stop != following.position or hashes[-1:] != [following.parent]):
            raise ValueError(f"segment {following.id} does not continue segment {header.id}")
    return pieces, hashes


def _check_held(pieces: Sequence[_Piece], shape: SegmentShape) -> None:
    """Raise ValueError if a segment lacks tokens that `shape` is to hold."""
    shape.check_tables()
    for piece in pieces:
        if piece.reader.shape.whole:
            continue
        held_tokens = piece.reader.shape.held
        for group in shape.block_groups:
            tokens = _inside(piece, shape.tokens_by_slot(group))
            for layer in group.layers:
                if not held_tokens[layer][tokens].all():
                    raise ValueError(
                        f"layer {layer} of segment {piece.reader.id} holds only a part of its tokens, and lacks some "
                        "of the requested tokens"
                    )


def _inside(piece: _Piece, tokens: np.ndarray) -> np.ndarray:
    """Select the tokens of the new segment that a piece holds, and return them relative to the piece's segment."""
    return tokens[(tokens >= piece.at) & (tokens < piece.at + piece.count)] - piece.at


class _Join:
    """Builder of a new segment's KV cache groups from old segments. For arguments see `join_segments`."""

    def __init__(
        self, pieces: Sequence[_Piece], shape: SegmentShape, blocks_of: BlocksOf, toward: float = TOWARD
    ) -> None:
        self._pieces, self._shape, self._blocks_of, self._toward = pieces, shape, blocks_of, toward
        self._read: dict[tuple[int, int], torch.Tensor] = {}  # blocks by piece and KV cache group

    def block_groups(self) -> Iterator[torch.Tensor]:
        """Yield the blocks of each KV cache group, uint8 `[chunks, block_bytes]`, in order."""
        shape = self._shape
        for number, group in enumerate(shape.block_groups):
            yield self.blocks(group)
            soon = {layer for after in shape.block_groups[number + 1 :][:_SOON] for layer in after.layers}
            for piece, index in list(self._read):
                if soon.isdisjoint(self._pieces[piece].reader.shape.block_groups[index].layers):
                    del self._read[piece, index]

    def blocks(self, group: BlockGroup) -> torch.Tensor:
        """Return the blocks of a KV cache group, uint8 `[chunks, block_bytes]`."""
        shape = self._shape
        blocks = torch.zeros(shape.chunks_in(group), group.block_bytes, dtype=torch.uint8)
        if len(blocks):
            for part, fields in self._merged(group) if group.merged else self._alone(group):
                shape.pack_fields(blocks, group, part, fields)
        return blocks

    def forget(self) -> None:
        """Release the source blocks in memory."""
        self._read.clear()

    def _alone(self, group: BlockGroup) -> Iterator[tuple[Part, Fields]]:
        """Yield the encoded fields of each part of an unmerged KV cache group."""
        codec, tokens = self._shape.codec_of(group), self._shape.tokens_by_slot(group)
        for part in group.parts:
            part_fields = self._empty(part)
            for source in self._sources(part, tokens):
                fields = source.fields()
                if source.group.merged:
                    fields = checked_encode(codec, source.decode(fields))
                _put(part_fields, source.to_heads, source.to_tokens, fields)
            yield part, part_fields

    def _merged(self, group: BlockGroup) -> Iterator[tuple[Part, Fields]]:
        """Yield the encoded fields of each part of a merged KV cache group. Copies tokens that are merged already."""
        codec, tokens = self._shape.codec_of(group), self._shape.tokens_by_slot(group)
        for pair in zip(group.parts[::2], group.parts[1::2], strict=True):
            merged_kv = [self._empty(part) for part in pair]
            num_merged = np.zeros(self._shape.tokens, np.int64)  # number of heads that are already merged, by token
            rotated_tensors = [
                [s for s in self._sources(part, tokens) if s.group.merged and s.group.layers == group.layers]
                for part in pair
            ]
            for source in rotated_tensors[0]:
                num_merged[source.to_tokens] += source.heads.stop - source.heads.start
            new_tokens = np.sort(tokens[num_merged[tokens] < pair[0].heads])
            for at in range(0, len(new_tokens), _RUN):
                run = new_tokens[at : at + _RUN]
                parts = encode(self.numbers(pair[0], run), self.numbers(pair[1], run), codec, self._toward)
                for targets, fields in zip(merged_kv, parts, strict=True):
                    _put(targets, slice(None), run, fields)
            for sources, targets in zip(rotated_tensors, merged_kv, strict=True):
                for source in sources:
                    _put(targets, source.to_heads, source.to_tokens, source.fields())
            yield from zip(pair, map(tuple, merged_kv), strict=True)

    def numbers(self, part: Part, tokens: np.ndarray) -> torch.Tensor:
        """Decode the given tokens of a part, int64 `[n]`, ascending, to `[heads, n, dim]`."""
        values = torch.empty(part.heads, len(tokens), part.dim, dtype=self._shape.layout.dtype)
        for source in self._sources(part, tokens):
            at = np.searchsorted(tokens, source.to_tokens)
            _put((values,), source.to_heads, at, (source.decode(source.fields()),))
        return values

    def _empty(self, part: Part) -> Fields:
        return tuple(torch.zeros(part.heads, self._shape.tokens, slot.dim, dtype=slot.dtype) for slot in part.fields)

    def _sources(self, target: Part, tokens: np.ndarray) -> Iterator[_Source]:
        """Yield the sources of the given tokens of a part in the old segments."""
        stop = target.first_head + target.heads
        for number, piece in enumerate(self._pieces):
            shape, piece_tokens = piece.reader.shape, _inside(piece, tokens)
            for group in shape.block_groups:
                for part in group.parts if not group.identifies else ():
                    low, high = max(part.first_head, target.first_head), min(part.first_head + part.heads, stop)
                    if (part.layer, part.tensor) != (target.layer, target.tensor) or low >= high:
                        continue
                    if len(held_tokens := shape.held_by(group, piece_tokens)):
                        heads, to_heads = (
                            slice(low - base_head, high - base_head)
                            for base_head in (part.first_head, target.first_head)
                        )
                        blocks = self._blocks(number, group)
                        yield _Source(shape, group, part, blocks, heads, to_heads, held_tokens, held_tokens + piece.at)

    def _blocks(self, piece: int, group: BlockGroup) -> torch.Tensor:
        """Return all blocks of a piece's KV cache group, uint8 `[chunks, block_bytes]`. Cached while needed."""
        if (piece, group.index) not in self._read:
            self._read[piece, group.index] = self._blocks_of(self._pieces[piece].reader, group.index)
        return self._read[piece, group.index]


@dataclass(frozen=True, eq=False)
class _Source:
    """Tokens and heads of a part in a KV cache group of an old segment, and their target in the new one."""

    shape: SegmentShape
    group: BlockGroup
    part: Part
    blocks: torch.Tensor
    heads: slice
    to_heads: slice
    tokens: np.ndarray  # int64 [n]
    to_tokens: np.ndarray  # int64 [n]

    def fields(self) -> Fields:
        """Return the encoded fields, `[heads, n, field's dim]` each."""
        slots = self.shape.slot_of_token(self.group, self.tokens)
        chunk, inside = map(torch.from_numpy, np.divmod(slots, self.shape.geometry.chunk_tokens))
        views = self.shape.field_views(self.blocks, self.part)  # [chunks, heads, chunk_tokens, field's dim] each
        return tuple(view[chunk, self.heads, inside].transpose(0, 1) for view in views)

    def decode(self, fields: Fields) -> torch.Tensor:
        return self.shape.decode(self.group, self.part, fields)


def _put(targets: Fields, heads: slice, tokens: np.ndarray, fields: Fields) -> None:
    """Copy tensors, `[heads, n, ...]` each, to the given heads and tokens of the target tensors."""
    columns = torch.from_numpy(tokens)
    for target, field in zip(targets, fields, strict=True):
        target[heads].index_copy_(1, columns, field)


def merge_segments(
    disk: SegmentStore,
    readers: Sequence[SegmentReader],
    geometry: Geometry,
    stored_from: Sequence[int],
    share: float,
    toward: float = TOWARD,
    blocks_of: BlocksOf = SegmentReader.blocks,
    admit: Written = lambda owner, blocks: None,
) -> str | None:
    """Merge a chain of segments into one new segment. The old ones are kept, and it is pinned if one of them is.

    Each layer is stored from the token `stored_from` on, and the old segments must hold all tokens from there. Of the
    common tokens of a pair, the `share` with the largest angles stays unmerged. `admit` is called for each KV cache
    group of the new segment, which may still fail to be stored. For the other arguments see `join_segments`.

    Returns the id of the new segment, or None if there was no room, or the segment already has this layout. Raises
    ValueError (see `join_segments`), or IntegrityError or OSError if a segment is damaged, or cannot be read.
    """
    first, tokens, apart = readers[0].header, tokens_of(readers), {}
    for pair in geometry.pairs:
        pair_tokens = np.arange(max(stored_from[layer] for layer in pair), tokens)
        if len(pair_tokens):
            apart[pair] = pair_tokens[retained(pair_angles(readers, pair, pair_tokens, blocks_of), share).numpy()]
    geometry = replace(geometry, codec=first.shape.geometry.codec)
    tables = TokenTables.by_pairs(stored_from, apart, block_groups(first.shape.layout, geometry), tokens)
    header, prefix_hashes, groups = join_segments(readers, geometry, tables, blocks_of, toward)
    old = [reader.id for reader in readers]
    if header.id in old or not disk.publish(header, prefix_hashes, groups, old, admit):
        return None
    if not disk.backend.pinned().isdisjoint(old):
        disk.pin([header.id])
    return header.id


def unstored_shape(shape: SegmentShape) -> SegmentShape:
    """Return the shape of the first tokens of each layer that a segment of this shape lacks."""
    geometry = replace(shape.geometry, pairs=())
    groups = block_groups(shape.layout, geometry)
    tables = TokenTables.of_first(shape.held_from, groups, shape.tokens)
    return replace(shape, geometry=geometry, tables=tables)


def unstored_blocks(
    readers: Sequence[SegmentReader], unstored: Sequence[SegmentReader | None], shape: SegmentShape, blocks_of: BlocksOf
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield number and blocks, uint8 `[chunks, block_bytes]`, of the groups of `shape` that are completely in memory.

    The segments of `readers` were rewritten as one, which has this `unstored_shape`. `unstored` reads the tokens that
    each of them lacks, if any, and `blocks_of` may raise EvictedError.
    """
    pieces, _ = _chain(readers)
    masked_pieces = zip(pieces, unstored, strict=True)
    pieces += [replace(piece, reader=reader) for piece, reader in masked_pieces if reader is not None]
    is_held = np.zeros((len(shape.layout.layers), shape.tokens), bool)
    for piece in pieces:
        is_held[:, piece.at : piece.at + piece.count] |= piece.reader.held[:, : piece.count]
    join = _Join(pieces, shape, blocks_of)
    for group in shape.block_groups:
        if is_held[np.array(group.layers)[:, None], shape.tokens_by_slot(group)].all():
            with suppress(EvictedError):
                yield group.index, join.blocks(group)
            join.forget()


def tokens_of(readers: Sequence[SegmentReader]) -> int:
    """Return the number of tokens of a chain of segments."""
    first, last = readers[0].header, readers[-1].header
    return last.position + last.shape.tokens - first.position
