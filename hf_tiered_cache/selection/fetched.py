"""Tokens of rows to fetch, and the table of fetched units that hold them.

Restoring a selected prompt, reselecting while decoding and streaming a prefix all do the same with it: want tokens,
fetch their blocks, wait, copy the tokens to contiguous positions, note their use, and finish. `Fetcher` brings blocks
and cancels fetches, and `UnitTable` does the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ..restore.fetch import Fetcher, FetchUnit
from ..restore.gather import Gather
from ..restore.rows import RowGroup, SegmentSlice
from ..store.geometry import BlockGroup
from ..store.segment import SegmentReader
from ..store.shape import SegmentShape
from ..tiers.scores import Attention
from .selectors import ChunkMap

Rotate = Callable[[torch.Tensor, np.ndarray, int], None]
"""Function that turns stored keys, `[heads, n, dim]`, in place into those of positions, int64 `[sets, n]`: one set for
all heads, or one for each. Its last argument is an upper bound of the positions, exclusive."""

Request = tuple[FetchUnit, np.ndarray]
"""Unit and the chunks to fetch of it, int64, ascending."""

HeldSet = tuple[int, int, np.ndarray]
"""Tokens of one set that a KV cache group holds: head of the set, or -1 for the single set of all heads; index of the
first held token in the set; and the held tokens, counted in the segment."""


class HeldTokens(NamedTuple):
    """Tokens that a KV cache group of a segment slice holds of a row's sets."""

    piece: SegmentSlice
    block_group: BlockGroup
    sets: list[HeldSet]
    tokens: np.ndarray  # distinct tokens of all sets, int64 [n], ascending, counted in the segment
    counts: np.ndarray  # number of sets with each of them, int64 [n]
    chunks: np.ndarray


@dataclass(frozen=True)
class RowPrefix:
    """Restored tokens of one group of rows: token positions `[0, tokens)`, padding not counted."""

    group: RowGroup
    tokens: int
    _chunks: dict[tuple[int, bool], ChunkMap] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def pieces(self) -> tuple[SegmentSlice, ...]:
        """Segment slices that hold the restored tokens, and no others."""
        pieces = (piece for piece in self.group.pieces if piece.at < self.tokens)
        return tuple(replace(piece, count=min(piece.count, self.tokens - piece.at)) for piece in pieces)

    @property
    def all_tokens(self) -> RowTokens:
        """All restored tokens, to fetch."""
        return RowTokens(self, np.arange(self.tokens)[None])

    def chunks(self, layer: int, per_head: bool) -> ChunkMap:
        """Return the chunks of the tokens as stored in a layer's blocks: for the first kv head, or for each kv head."""
        is_ordered = all(piece.reader.shape.tables is None for piece in self.pieces)
        name = (-1, False) if is_ordered else (layer, per_head)  # all layers and heads in order share one map
        if name not in self._chunks:
            self._chunks[name] = ChunkMap.by_slot(*self._slots(layer, name[1]))
        return self._chunks[name]

    def _slots(self, layer: int, per_head: bool) -> tuple[np.ndarray, int]:
        """Return token slots, int64 `[heads or 1, tokens]`, numbered across all segments, and the slots per chunk."""
        shapes = [piece.reader.shape for piece in self.pieces]
        step = max(shape.geometry.chunk_tokens for shape in shapes)
        heads = shapes[0].layout.layer(layer).key_heads if per_head else 1
        slots, begin = np.empty((heads, self.tokens), np.int64), 0
        for piece, shape in zip(self.pieces, shapes, strict=True):
            tokens = np.arange(piece.first, piece.first + piece.count)
            for group in restoring_groups(shape, (layer,)):
                chunk, place = np.divmod(shape.slot_of_token(group, tokens), shape.geometry.chunk_tokens)
                for part in group.parts:
                    if part.layer == layer and part.tensor == "key":
                        head_slots = slots[part.first_head : part.first_head + part.heads]
                        head_slots[:, piece.at : piece.at + piece.count] = begin + chunk * step + place
            begin += -(-shape.tokens // shape.geometry.chunk_tokens) * step
        return slots, step


@dataclass(frozen=True, eq=False)
class RowTokens:
    """Tokens of one row to fetch: one set for all kv heads, or one set for each.

    Args:
        tokens: int64 `[sets, tokens]`, each set ascending.
        counts: int64 `[sets]`, number of leading tokens used of each set; None for all.
    """

    row: RowPrefix
    tokens: np.ndarray
    counts: np.ndarray | None = None
    _held: dict[tuple[int, int], HeldTokens] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def sets(self) -> list[np.ndarray]:
        """Tokens of each set."""
        if self.counts is None:
            return list(self.tokens)
        return [tokens[:count] for tokens, count in zip(self.tokens, self.counts, strict=True)]

    @cached_property
    def inside(self) -> dict[int, list[tuple[int, np.ndarray]]]:
        """Tokens of each set that a segment slice holds, for each slice by its position in the row.

        An entry is the index of the first held token in the set, and the held tokens, counted in the segment.
        """
        tokens_inside = {}
        for piece in self.row.pieces:
            spans = [np.searchsorted(tokens, (piece.at, piece.at + piece.count)).tolist() for tokens in self.sets]
            tokens_inside[piece.at] = [
                (low, tokens[low:high] - piece.at + piece.first)
                for tokens, (low, high) in zip(self.sets, spans, strict=True)
            ]
        return tokens_inside

    def held(self, layers: Collection[int]) -> list[HeldTokens]:
        """Return what is held, of each segment slice, by the KV cache groups that `layers` restore from, if anything.

        It is computed once: selected tokens are rated by their attention, and then fetched.
        """
        groups = {
            (piece.at, block_group.index): (piece, block_group)
            for piece in self.row.pieces
            for block_group in restoring_groups(piece.reader.shape, layers)
        }
        new_sets = {name: self.in_group(*group) for name, group in groups.items() if name not in self._held}
        for name, sets in new_sets.items():
            piece, block_group = groups[name]
            tokens, counts = sets[0][2], np.ones(len(sets[0][2]), np.int64)
            if len(sets) > 1:
                tokens, counts = np.unique(np.concatenate([inside for *_, inside in sets]), return_counts=True)
            chunks = piece.reader.shape.chunks_of(block_group, tokens)
            self._held[name] = HeldTokens(piece, block_group, sets, tokens, counts, chunks)
        return [self._held[name] for name in groups if len(self._held[name].tokens)]

    def in_group(self, piece: SegmentSlice, block_group: BlockGroup) -> list[HeldSet]:
        """Return what a segment slice and a KV cache group hold of each set."""
        tokens_inside, parts = self.inside[piece.at], block_group.parts
        if len(tokens_inside) == 1:
            return [(-1, *tokens_inside[0])]
        first, stop = min(part.first_head for part in parts), max(part.first_head + part.heads for part in parts)
        return [(head, *tokens_inside[head]) for head in range(first, min(stop, len(tokens_inside)))]


@dataclass(eq=False)
class UnitTable:
    """Fetched units of layers that share a selection, ascending: one unit for each segment and KV cache group.

    The `cancel` of the fetcher releases all blocks, wherever the pass has stopped.
    """

    fetcher: Fetcher
    layers: Sequence[int]
    _units: dict[tuple[SegmentReader, int], FetchUnit] = field(default_factory=dict)
    _gathers: dict[RowTokens, dict[Hashable, Gather]] = field(default_factory=dict)  # see `_gather_key`

    def want(self, tokens: RowTokens, layers: Collection[int]) -> list[Request]:
        """Return the units that hold tokens of some layers, and the chunks to fetch of them."""
        requests = []
        for piece, block_group, *_, chunks in tokens.held(layers):
            unit = self._units.setdefault((piece.reader, block_group.index), FetchUnit(piece.reader, block_group))
            requests.append((unit, chunks))
        return requests

    def fetch(self, rows: Iterable[RowTokens], layers: Sequence[int], prefetches: bool = False) -> None:
        """Start to fetch tokens for the first of some layers, and with `prefetches` for the others, ahead of need."""
        batches: dict[tuple[int, ...], list[Request]] = {}  # a layer waits only for its own batch
        for tokens in rows:
            for unit, chunks in self.want(tokens, layers):
                batches.setdefault(unit.block_group.layers, []).append((unit, chunks))
        for batch_layers, requests in sorted(batches.items()):
            is_first = layers[0] in batch_layers
            if is_first or prefetches:
                self.fetcher.fetch(requests, ahead=not is_first)

    def want_keys(self, tokens: RowTokens, layer: int, heads: int | None) -> list[Request]:
        """Return units that hold keys of a layer (see `key_groups`), and their chunks with tokens of one set."""
        requests = []
        for piece in tokens.row.pieces:
            _, inside = tokens.inside[piece.at][0]
            for block_group in key_groups(piece.reader.shape, layer, heads):
                unit = self._units.setdefault((piece.reader, block_group.index), FetchUnit(piece.reader, block_group))
                unit.identifies = True
                requests.append((unit, piece.reader.shape.chunks_of(block_group, inside)))
        return requests

    def wait(self, layer: int) -> list[FetchUnit]:
        """Wait for the units of a layer, and return them. Raises RestoreError if a block did not arrive."""
        units = self.units(layer)
        self.fetcher.wait_for(units)
        return units

    def units(self, layer: int) -> list[FetchUnit]:
        """Return the units of a layer."""
        return [unit for unit in self._units.values() if layer in unit.block_group.layers]

    def restore(self, tokens: RowTokens, layer: int, keys: torch.Tensor, values: torch.Tensor, rotate_: Rotate) -> None:
        """Copy tokens to `[kv_heads, tokens, dim]` of a layer, rotate their keys, and note that attention uses them."""
        units = self.units(layer)
        self.copy(tokens, units, layer, {"key": keys, "value": values})
        rotate_(keys, tokens.tokens, tokens.row.tokens)
        for unit in units:
            if not unit.from_disk:  # only what was read is compared with its use
                continue
            for piece in tokens.row.pieces:
                if piece.reader is unit.reader:
                    unit.use((layer,), [inside for _, inside in tokens.inside[piece.at]])

    def keys(self, tokens: RowTokens, units: Sequence[FetchUnit], layer: int, heads: int | None = None) -> torch.Tensor:
        """Return the keys of a layer's tokens as stored, `[kv_heads, tokens, dim]`, of `heads` heads or all."""
        layout = tokens.row.pieces[0].reader.shape.layout
        kind = layout.layer(layer)
        shape = min(heads or kind.key_heads, kind.key_heads), tokens.tokens.shape[1], kind.key_dim
        keys = torch.empty(shape, dtype=layout.dtype, device=self.fetcher.device_of(layer))
        self.copy(tokens, units, layer, {"key": keys})
        return keys

    def copy(
        self, tokens: RowTokens, units: Sequence[FetchUnit], layer: int, targets: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy keys, values or both of a layer's tokens, from units that have arrived, to contiguous positions.

        `targets`, `[kv_heads, tokens, dim]`, are filled in place; for some leading heads only, if they have fewer.
        """
        gathers, units_by_key = self._gathers.setdefault(tokens, {}), dict[Hashable, list[FetchUnit]]()
        for unit in units:
            units_by_key.setdefault(_gather_key(tokens, unit), []).append(unit)
        for key, like_units in units_by_key.items():
            if key not in gathers:
                gathers[key] = _gather_of(tokens, like_units)
            parts = [part for part in like_units[0].block_group.parts if part.layer == layer and part.tensor in targets]
            gathers[key].copy(
                (part, targets[part.tensor]) for part in parts if part.first_head < len(targets[part.tensor])
            )

    def finish(self, layer: int) -> None:
        """Record the I/O of units that no layer after `layer` needs, and release their blocks."""
        self._finish([unit for unit in self._units.values() if max(self._used_by(unit)) == layer])

    def finish_keys(self) -> None:
        """Record the I/O of units with keys to select by that hold nothing to attend to, and release their blocks."""
        self._finish([unit for unit in self._units.values() if unit.block_group.identifies])

    def begins_at(self, layer: int) -> bool:
        """Return whether `layer` is the first one that needs a unit."""
        return any(min(self._used_by(unit)) == layer for unit in self.units(layer))

    def _used_by(self, unit: FetchUnit) -> set[int]:
        return set(unit.block_group.layers).intersection(self.layers)

    def _finish(self, units: Sequence[FetchUnit]) -> None:
        for unit in units:
            del self._units[unit.reader, unit.block_group.index]
            for tokens, gathers in self._gathers.items():
                gathers.pop(_gather_key(tokens, unit), None)
        self.fetcher.finish(units)


def _gather_key(tokens: RowTokens, unit: FetchUnit) -> Hashable:
    """Return the key of units that share a gather: those of one KV cache group, or of like groups of single heads."""
    parts = unit.block_group.parts
    if len(tokens.sets) == 1 or any(part.heads > 1 for part in parts):
        return id(unit.block_group)  # segments of one geometry share their KV cache groups
    return unit.reader.shape.geometry, *((part.layer, part.tensor, part.fields) for part in parts)


def _gather_of(tokens: RowTokens, units: Sequence[FetchUnit]) -> Gather:
    """Return the gather of the tokens that units of one key hold."""
    tokens_held = [
        (unit, *held_set)
        for unit, piece in itertools.product(units, tokens.row.pieces)
        for held_set in (tokens.in_group(piece, unit.block_group) if piece.reader is unit.reader else ())
    ]
    gather = Gather(units[0].reader.shape, units[0].block_group)
    for unit, head, first, inside in tokens_held:
        positions = np.arange(first, first + len(inside))
        gather.add(unit.reader.shape, unit.blocks, inside, positions, head, unit.block_group)
    return gather


def restoring_groups(shape: SegmentShape, layers: Collection[int]) -> list[BlockGroup]:
    """Return the KV cache groups of a segment that `layers` restore from."""
    groups = {group.index: group for layer in layers for group in shape.restoring_groups.get(layer, ())}
    return [groups[index] for index in sorted(groups)]


def key_groups(shape: SegmentShape, layer: int, heads: int | None) -> list[BlockGroup]:
    """Return KV cache groups that hold the keys of a layer's first `heads` KV heads, or of all for None.

    They hold as little other data as possible: one index group if one holds all of these heads, else the ordinary
    groups that hold the keys.
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


# --- attention of a selection, by which the tiers evict chunks and segments are rewritten (`tiers/scores.py`)


def attention_of(
    selected: RowTokens,
    mass: np.ndarray,
    layers: Collection[int],
    scanned_groups: Collection[tuple[SegmentReader, int]],
) -> list[Attention]:
    """Return the attention to each selected chunk of a row, for layers that share the selection.

    `mass`, float32 `[heads or 1, tokens]`, is the attention to each restored token of the row. The selection has read
    `scanned_groups`, KV cache groups by index, as a whole.
    """
    attention: list[Attention] = []
    for piece, block_group, sets, tokens, counts, chunks in selected.held(layers):
        if (piece.reader, block_group.index) in scanned_groups:
            continue
        head_mass = mass if min(len(mass), len(selected.sets)) == 1 else mass[[head for head, _, _ in sets]]
        token_mass = head_mass.mean(axis=0)[tokens - piece.first + piece.at]
        shape, step = piece.reader.shape, piece.reader.shape.geometry.chunk_tokens
        chunk_of_token = shape.slot_of_token(block_group, tokens) // step
        token_counts = np.minimum(step, shape.tokens_in(block_group) - chunks * step)  # tokens of each chunk
        share = np.bincount(chunk_of_token, counts / len(sets))[chunks] / token_counts  # of heads with a token
        owner, num_chunks = piece.reader.owners[block_group.index], shape.chunks_in(block_group)
        attention.append((owner, num_chunks, chunks, np.bincount(chunk_of_token, token_mass)[chunks], share))
    for piece, (reader, index) in itertools.product(selected.row.pieces, scanned_groups):
        if piece.reader is reader:  # every selection reads all of these chunks, and all attention depends on them
            shape, block_group = reader.shape, reader.shape.block_groups[index]
            chunks = shape.chunks_of(block_group, np.arange(piece.first, piece.first + piece.count))
            total = np.full(len(chunks), mass.sum() / len(mass))
            attention.append((reader.owners[index], shape.chunks_in(block_group), chunks, total, np.ones(len(chunks))))
    return attention
