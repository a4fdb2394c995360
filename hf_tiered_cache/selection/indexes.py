"""Indexes for the selection of prefix chunks: cached in memory, read from sidecars, or built from segment keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..restore.fetch import Fetcher
from ..restore.plan import SegmentSlice
from ..store.disk import SegmentStore
from ..store.segment import SegmentReader
from .decode_index import DecodeIndex
from .fetched import Request, Rotate, RowPrefix, RowTokens, UnitTable

_VERSION = 1
"""Version of how indexes are built. Increment it to rebuild stored indexes."""


class IndexSidecars:
    """Indexes in sidecars of their segments, all layers of a segment in one sidecar.

    Args:
        disk: Segment store.
        defer: Runs a callable after the request.
    """

    def __init__(self, disk: SegmentStore, defer: Callable[[Callable[[], object]], object]) -> None:
        self._disk, self.defer = disk, defer

    def find(self, reader: SegmentReader, kind: type[DecodeIndex], chunk_tokens: int) -> dict[int, DecodeIndex]:
        """Return the indexes of a segment by layer, on the CPU; empty if the sidecar is missing or damaged."""
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        tensors_by_name = self._disk.sidecars.kept(reader, *self._name_and_settings(kind, chunk_tokens)) or {}
        for name, tensor in tensors_by_name.items():
            layer, _, field = name.partition(".")
            by_layer.setdefault(int(layer), {})[field] = tensor
        return {layer: kind.from_tensors(tensors, chunk_tokens) for layer, tensors in by_layer.items()}

    def keep(self, reader: SegmentReader, indexes: Mapping[int, DecodeIndex]) -> None:
        """Write the indexes of all layers of a segment to its sidecar, after the request."""
        self.defer(partial(self._write, reader, dict(indexes)))

    def _write(self, reader: SegmentReader, indexes: Mapping[int, DecodeIndex]) -> None:
        first_index = next(iter(indexes.values()))
        arrays: dict[str, torch.Tensor] = {}
        for layer, index in indexes.items():
            arrays |= {f"{layer}.{name}": tensor.cpu() for name, tensor in index.tensors().items()}
        name, settings = self._name_and_settings(type(first_index), first_index.chunk_tokens)
        self._disk.sidecars.keep(reader, name, arrays, settings)  # not written if there is no room; this is counted

    @staticmethod
    def _name_and_settings(kind: type[DecodeIndex], chunk_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the sidecar name and the settings that the indexes are built with."""
        settings = {"index": kind.__name__, "chunk_tokens": chunk_tokens, "version": _VERSION}
        return f"{kind.__name__.lower()}_{chunk_tokens}", settings


class RowIndexes:
    """Indexes of the restored tokens of rows: for each layer, one per segment of a row.

    Indexes describe rotated keys, so each is valid only for its segment's position in the prefix.

    Args:
        kind: Index class.
        chunk_tokens: Tokens per chunk.
        fetcher: Fetcher of the restoring pass; fetches keys.
        rows: Restored tokens of each row group.
        sidecars: Stored indexes, including those of other processes.
    """

    def __init__(
        self,
        kind: type[DecodeIndex],
        chunk_tokens: int,
        fetcher: Fetcher,
        rows: Sequence[RowPrefix],
        sidecars: IndexSidecars,
    ) -> None:
        self._kind, self.chunk_tokens = kind, chunk_tokens
        self._fetcher, self._rows, self._sidecars = fetcher, rows, sidecars
        # looked up now: if a segment is relaid out during the request, its cached indexes move to the new segment
        readers = {piece.reader for row in rows for piece in row.pieces}
        self._cached_indexes = {reader: self._cached(reader) for reader in readers}
        self._stored_indexes: dict[SegmentReader, dict[int, DecodeIndex]] = {}  # read from sidecars, by layer
        self._segment_indexes: dict[SegmentReader, dict[int, DecodeIndex]] = {}  # by layer
        self._built_readers: set[SegmentReader] = set()
        self._row_indexes: dict[tuple[int, int], list[DecodeIndex | None]] = {}  # by layer and row number
        self._keys: dict[tuple[int, int], tuple[UnitTable, list[Request]]] = {}  # keys for missing indexes

    def fetch(self, layer: int, ahead: bool = False) -> None:
        """Look up a layer's indexes, and start to fetch the keys of segments without one."""
        for place, row in enumerate(self._rows):
            if (layer, place) not in self._keys:
                table, requests = UnitTable(self._fetcher, (layer,)), list[Request]()
                self._keys[layer, place] = table, requests
                for piece, index in zip(row.pieces, self._look_up(layer, place), strict=True):
                    if index is None:
                        requests += table.want_keys(self._to_index(row, piece), layer, None)
                if requests:
                    self._fetcher.bring(requests, ahead, attends=False)

    def of(self, layer: int, place: int, rotate_: Rotate) -> list[DecodeIndex]:
        """Return the indexes of a row at a layer, in token order. Missing ones are built from the row's keys.

        Raises:
            RestoreError: A block did not arrive.
        """
        self.fetch(layer)
        row, indexes = self._rows[place], self._row_indexes[layer, place]
        table, requests = self._keys[layer, place]
        if requests:
            self._fetcher.bring(requests, attends=False)  # chunks that a prefetch had no room for
            requests.clear()
            table.wait(layer)
            self._fetcher.confirm()  # indexes built from keys outlive the pass
            for number, piece in enumerate(row.pieces):
                if indexes[number] is None:
                    keys = self._rotated_keys(table, row, piece, layer, rotate_)
                    indexes[number] = self._part(piece, self._build(piece, layer, keys))
            table.finish(layer)
        return [index for index in indexes if index is not None]

    def held(self, layer: int, place: int) -> list[DecodeIndex]:
        """Return the indexes of a row at a layer, all of which exist: the row was selected from them before."""
        return [index for index in self._row_indexes[layer, place] if index is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes looked up or built so far. Indexes that rows share count once."""
        indexes = (index for row_indexes in self._row_indexes.values() for index in row_indexes if index is not None)
        return sum({id(index): index.nbytes for index in indexes}.values())

    @property
    def fit(self) -> bool:
        """True if the index cache has room for all indexes of whole segments. True if its budget is 0."""
        nbytes = sum(index.nbytes for indexes in self._segment_indexes.values() for index in indexes.values())
        return not 0 < self._fetcher.residency.index_cache.budget < nbytes

    def merge(self) -> None:
        """Merge the indexes of each layer and row for decoding. Call when all layers have their indexes."""
        for key, indexes in self._row_indexes.items():
            self._row_indexes[key] = [*self._kind.merged([index for index in indexes if index is not None])]
        self._keys.clear()
        self._cached_indexes.clear()
        self._stored_indexes.clear()
        self._segment_indexes.clear()

    def lacks(self, layer: int, place: int) -> bool:
        """Return whether a segment of a row lacks its index of a layer."""
        return None in self._look_up(layer, place)

    def make(self, layer: int, place: int, keys: torch.Tensor) -> None:
        """Build missing indexes of a row at a layer from all of its rotated keys, `[kv_heads, tokens, dim]`."""
        row, indexes = self._rows[place], self._look_up(layer, place)
        self._fetcher.confirm()  # indexes built from keys outlive the pass
        for number, piece in enumerate(row.pieces):
            if indexes[number] is None:
                indexes[number] = self._build(piece, layer, keys[:, piece.at : piece.at + piece.count])

    def _look_up(self, layer: int, place: int) -> list[DecodeIndex | None]:
        if (layer, place) not in self._row_indexes:
            self._row_indexes[layer, place] = [self._find_index(piece, layer) for piece in self._rows[place].pieces]
        return self._row_indexes[layer, place]

    def keep(self) -> None:
        """Write newly built indexes to sidecars. Call when all layers have their indexes."""
        for reader in self._built_readers:
            self._sidecars.keep(reader, self._segment_indexes[reader])
        self._built_readers.clear()

    def _rotated_keys(
        self, table: UnitTable, row: RowPrefix, piece: SegmentSlice, layer: int, rotate_: Rotate
    ) -> torch.Tensor:
        """Return the keys to index of a slice: `[kv_heads, tokens, dim]`."""
        tokens = self._to_index(row, piece)
        layout, device = piece.reader.shape.layout, self._fetcher.device_of(layer)
        kind, (to_index,) = layout.layer(layer), tokens.row.pieces
        keys = torch.empty(kind.key_heads, to_index.count, kind.key_dim, dtype=layout.dtype, device=device)
        table.copy(tokens, table.units(layer), layer, "key", keys)
        positions = tokens.tokens + to_index.first + piece.at - piece.first
        rotate_(keys, positions, max(row.tokens, int(positions[0, -1]) + 1))
        return keys

    def _to_index(self, row: RowPrefix, piece: SegmentSlice) -> RowTokens:
        """Return the tokens to index of a slice: those of the whole segment if the index class is divisible."""
        whole = replace(piece, first=0, count=piece.reader.shape.tokens, at=0)
        to_index = whole if self._kind.divisible else replace(piece, at=0)
        prefix = RowPrefix(replace(row.group, pieces=(to_index,)), to_index.count)
        return RowTokens(prefix, np.arange(to_index.count)[None])

    def _part(self, piece: SegmentSlice, index: DecodeIndex) -> DecodeIndex:
        """Return the part of an index that a row needs; the index may cover the whole segment."""
        is_complete = not self._kind.divisible or piece.count == piece.reader.shape.tokens
        return index if is_complete else index.part(piece.first, piece.count)

    def _build(self, piece: SegmentSlice, layer: int, keys: torch.Tensor) -> DecodeIndex:
        """Build the index of a slice's keys. The index of a whole segment is also cached for other requests."""
        with self._fetcher.collector.timing("index_seconds"):
            index = self._kind.build(keys, self.chunk_tokens)
        if keys.shape[1] == piece.reader.shape.tokens and not piece.reader.gone:
            self._fetcher.residency.index_cache.admit(self._owner(piece.reader, layer), index)
            self._segment_indexes.setdefault(piece.reader, {})[layer] = index
            self._built_readers.add(piece.reader)
        return index

    def _find_index(self, piece: SegmentSlice, layer: int) -> DecodeIndex | None:
        """Return a cached or stored index, or None. An indivisible index requires a row with the whole segment."""
        reader, device = piece.reader, self._fetcher.device_of(layer)
        if piece.count < reader.shape.tokens and not self._kind.divisible:
            return None
        index_cache = self._fetcher.residency.index_cache
        index = self._cached_indexes.get(reader, {}).get(layer)
        if index is None:
            index = index_cache.get(self._owner(reader, layer), device)
        if index is None:
            if reader not in self._stored_indexes:
                self._stored_indexes[reader] = self._read(reader)
            if (stored_index := self._stored_indexes[reader].get(layer)) is not None:
                index = stored_index.to(device)
                index_cache.admit(self._owner(reader, layer), index)
        if index is None:
            return None
        self._segment_indexes.setdefault(reader, {})[layer] = index
        return self._part(piece, index)

    def _cached(self, reader: SegmentReader) -> dict[int, DecodeIndex]:
        """Return the indexes of a segment in the index cache, by layer."""
        index_cache, device_of = self._fetcher.residency.index_cache, self._fetcher.device_of
        layers = [layer for layer, kind in enumerate(reader.shape.layout.layers) if kind is not None]
        indexes = {layer: index_cache.get(self._owner(reader, layer), device_of(layer)) for layer in layers}
        return {layer: index for layer, index in indexes.items() if index is not None}

    def _read(self, reader: SegmentReader) -> dict[int, DecodeIndex]:
        """Read the stored indexes of a segment, by layer. Blocks, and counts as stall time."""
        collector = self._fetcher.collector
        with collector.timing("stall_seconds"):
            indexes = self._sidecars.find(reader, self._kind, self.chunk_tokens)
        nbytes = sum(index.nbytes for index in indexes.values())
        collector.add(bytes_read=nbytes, bytes_identifying=nbytes, bytes_brought=nbytes, brought_identifying=nbytes)
        return indexes

    def _owner(self, reader: SegmentReader, layer: int) -> tuple[str, int, int, str]:
        return reader.key_owner(layer, f"{self._kind.__name__} {self.chunk_tokens}")


def rotate_nothing(tensor: torch.Tensor, positions: np.ndarray, stop: int) -> None:
    """Raise AssertionError. Used where all indexes exist already, so no keys need to be rotated."""
    raise AssertionError("a layer that holds selected chunks has no index")
