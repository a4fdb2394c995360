"""Indexes for the selection of prefix chunks: cached in memory, read from sidecars, or built from segment keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..restore.fetch import Fetcher
from ..restore.rows import SegmentSlice
from ..store.disk import SegmentStore
from ..store.segment import SegmentReader
from ..tiers.index_cache import IndexKey
from .decode_index import DecodeIndex, build_index
from .fetched import Request, Rotate, RowPrefix, RowTokens, UnitTable

_VERSION = 2  # version of how indexes are built. Increment it to rebuild stored indexes


@dataclass(frozen=True, eq=False)
class IndexSidecars:
    """Indexes in sidecars, all layers of a segment in one. They are written by `defer`, after the request."""

    disk: SegmentStore
    defer: Callable[[Callable[[], object]], object]

    def find(self, reader: SegmentReader, kind: type[DecodeIndex], chunk_tokens: int) -> dict[int, DecodeIndex]:
        """Return the indexes of a segment by layer, on the CPU; empty if the sidecar is missing or damaged.

        A sidecar that another version of a plug-in's index wrote is as good as missing.
        """
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        tensors_by_name = self.disk.sidecars.kept(reader, *self._name_and_settings(kind, chunk_tokens)) or {}
        layout, chunks = reader.shape.layout, -(-reader.shape.tokens // chunk_tokens)
        try:
            for name, tensor in tensors_by_name.items():
                layer, _, field = name.partition(".")
                by_layer.setdefault(int(layer), {})[field] = tensor
            indexes = {layer: kind.from_tensors(tensors, chunk_tokens) for layer, tensors in by_layer.items()}
            are_fit = all(
                index.chunks == chunks
                and all(len(tensor) == layout.layer(layer).key_heads for tensor in index.tensors().values())
                for layer, index in indexes.items()
            )
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            are_fit = False
        return indexes if are_fit else {}

    def keep(self, reader: SegmentReader, indexes: Mapping[int, DecodeIndex]) -> None:
        """Write the indexes of all layers of a segment to its sidecar, after the request."""
        self.defer(partial(self._write, reader, dict(indexes)))

    def _write(self, reader: SegmentReader, indexes: Mapping[int, DecodeIndex]) -> None:
        first_index = next(iter(indexes.values()))
        arrays: dict[str, torch.Tensor] = {}
        for layer, index in indexes.items():
            arrays |= {f"{layer}.{name}": tensor.cpu() for name, tensor in index.tensors().items()}
        name, settings = self._name_and_settings(type(first_index), first_index.chunk_tokens)
        self.disk.sidecars.keep(reader, name, arrays, settings)  # not written if there is no room; this is counted

    @staticmethod
    def _name_and_settings(kind: type[DecodeIndex], chunk_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the sidecar name and the settings that the indexes are built with."""
        settings = {"index": kind.__name__, "chunk_tokens": chunk_tokens, "version": _VERSION}
        return f"{kind.__name__.lower()}_{chunk_tokens}", settings


@dataclass(eq=False)
class _Run:
    """Consecutive slices of a row with one index, or None if it is missing.

    `held` is the index that owns the memory: this one, or that of a whole segment of which this one is a part.
    """

    pieces: tuple[SegmentSlice, ...]
    index: DecodeIndex | None = None
    held: DecodeIndex | None = None

    @property
    def of_segment(self) -> DecodeIndex | None:
        """Index of a whole segment; None if it is missing, or if the index covers something else."""
        is_whole = len(self.pieces) == 1 and _is_whole(self.pieces[0])
        return self.held if is_whole or self.held is not self.index else None


class RowIndexes:
    """Indexes of the restored tokens of rows: for each layer, one per segment of a row, or one for several.

    Indexes describe rotated keys, so each is valid only for its segment's position in the prefix. `rows` are the
    restored tokens of the row groups to select from, by number of the group, and `layers` those that select.
    """

    def __init__(
        self,
        kind: type[DecodeIndex],
        chunk_tokens: int,
        fetcher: Fetcher,
        rows: Mapping[int, RowPrefix],
        layers: Sequence[int],
        sidecars: IndexSidecars,
    ) -> None:
        self._kind, self.chunk_tokens = kind, chunk_tokens
        self._fetcher, self._rows, self._sidecars = fetcher, rows, sidecars
        self._index_cache = fetcher.residency.index_cache
        # By layer and row number. Looked up now: if a segment is relaid out during the request, its cached indexes move
        # to the new segment.
        self._runs = {(layer, place): self._find_runs(row, layer) for place, row in rows.items() for layer in layers}
        self._stored_indexes: dict[SegmentReader, dict[int, DecodeIndex]] = {}  # read from sidecars, by layer
        self._built_readers: set[SegmentReader] = set()
        self._keys: dict[tuple[int, int], tuple[UnitTable, list[Request]] | None] = {}  # keys for missing indexes

    def fetch(self, layer: int, ahead: bool = False) -> None:
        """Look up a layer's indexes, and start to fetch the keys of segments without one."""
        for place, row in self._rows.items():
            if (layer, place) in self._keys:
                continue
            self._keys[layer, place] = None
            if missing := [run.pieces[0] for run in self._look_up(layer, place) if run.index is None]:
                table, requests = UnitTable(self._fetcher, (layer,)), list[Request]()
                for piece in missing:
                    requests += table.want_keys(self._to_index(row, piece), layer, None)
                self._keys[layer, place] = table, requests
                self._fetcher.fetch(requests, ahead, attends=False)

    def of(self, layer: int, place: int, rotate_: Rotate) -> list[DecodeIndex]:
        """Return the indexes of a row at a layer, in token order. Missing ones are built from the row's keys.

        Raises RestoreError if a block did not arrive.
        """
        self.fetch(layer)
        if (keys_to_index := self._keys[layer, place]) is not None:
            table, requests = keys_to_index
            self._fetcher.fetch(requests, attends=False)  # chunks that a prefetch had no room for
            self._keys[layer, place] = None
            table.wait(layer)
            self._fetcher.confirm()  # indexes built from keys outlive the pass
            for run in self._runs[layer, place]:
                if run.index is None:
                    self._build(run, layer, self._rotated_keys(table, self._rows[place], run.pieces[0], layer, rotate_))
            table.finish(layer)
        return self.held(layer, place)

    def held(self, layer: int, place: int) -> list[DecodeIndex]:
        """Return the indexes of a row at a layer, all of which exist: the row was selected from them before."""
        return [run.index for run in self._runs[layer, place] if run.index is not None]

    def finish(self) -> bool:
        """Store newly built indexes, merge the indexes for decoding, and count their bytes.

        Call when all layers have their indexes. Return whether the index cache has room for them, or no budget at all.
        """
        self._keep()
        self._merge()
        runs = [run for runs in self._runs.values() for run in runs]
        in_use = {id(run.index): run.index for run in runs}  # rows share indexes, which count once
        in_memory = {id(run.held): run.held for run in runs}
        nbytes, held_bytes = (
            sum(index.nbytes for index in indexes.values() if index is not None) for indexes in (in_use, in_memory)
        )
        self._fetcher.collector.add(index_bytes=nbytes)
        return not 0 < self._index_cache.budget < held_bytes

    def _merge(self) -> None:
        """Merge the indexes of each layer and row.

        Merged indexes replace the original ones, also in the index cache. One layer at a time is held twice.
        """
        self._keys.clear()
        self._stored_indexes.clear()
        for (layer, place), runs in self._runs.items():
            if len(runs) > 1 and (merged := self._merged(runs, layer)) is not None:
                self._runs[layer, place] = [_Run(self._rows[place].pieces, merged, merged)]

    def _merged(self, runs: Sequence[_Run], layer: int) -> DecodeIndex | None:
        """Return one index for all runs of a row. None if the index class cannot merge them."""
        pieces = [piece for run in runs for piece in run.pieces]
        index: DecodeIndex | None = self._index_cache.get(self._key(pieces, layer), self._fetcher.device_of(layer))
        if index is None:
            merged = self._kind.merged([run.index for run in runs if run.index is not None])
            if len(merged) > 1:
                return None
            index = merged[0]
        replaced = [self._key(run.pieces if run.held is run.index else [_whole(run.pieces[0])], layer) for run in runs]
        return self._admit(pieces, layer, index, replaced)

    def lacks(self, layer: int, place: int) -> bool:
        """Return whether a segment of a row lacks its index of a layer that selects."""
        return (layer, place) in self._runs and any(run.index is None for run in self._look_up(layer, place))

    def make(self, layer: int, place: int, keys: torch.Tensor) -> None:
        """Build missing indexes of a row at a layer from all of its rotated keys, `[kv_heads, tokens, dim]`."""
        self._fetcher.confirm()  # indexes built from keys outlive the pass
        for run in self._look_up(layer, place):
            if run.index is None:
                (piece,) = run.pieces
                self._build(run, layer, keys[:, piece.at : piece.at + piece.count])

    def _keep(self) -> None:
        """Write newly built indexes to sidecars.

        A sidecar has all layers. A segment is skipped if some of its layers are in memory only as merged indexes.
        """
        layers = {layer for layer, _ in self._runs}
        by_reader: dict[SegmentReader, dict[int, DecodeIndex]] = {reader: {} for reader in self._built_readers}
        for (layer, _), runs in self._runs.items():
            for run in runs:
                if run.pieces[0].reader in by_reader and (index := run.of_segment) is not None:
                    by_reader[run.pieces[0].reader][layer] = index
        for reader, indexes in by_reader.items():
            if indexes.keys() == layers:
                self._sidecars.keep(reader, indexes)
        self._built_readers.clear()

    def _rotated_keys(
        self, table: UnitTable, row: RowPrefix, piece: SegmentSlice, layer: int, rotate_: Rotate
    ) -> torch.Tensor:
        """Return the keys to index of a slice: `[kv_heads, tokens, dim]`."""
        tokens = self._to_index(row, piece)
        keys = table.keys(tokens, table.units(layer), layer)
        positions = tokens.tokens + tokens.row.pieces[0].first + piece.at - piece.first
        rotate_(keys, positions, max(row.tokens, int(positions[0, -1]) + 1))
        return keys

    def _to_index(self, row: RowPrefix, piece: SegmentSlice) -> RowTokens:
        """Return the tokens to index of a slice: those of the whole segment if the index class is divisible."""
        to_index = replace(_whole(piece) if self._kind.divisible else piece, at=0)
        return RowPrefix(replace(row.group, pieces=(to_index,)), to_index.count).all_tokens

    # --- finding and building

    def _find_runs(self, row: RowPrefix, layer: int) -> list[_Run]:
        """Divide a row into the longest runs with a cached index, and slices without one."""
        runs, first = list[_Run](), 0
        while first < len(row.pieces):
            for stop in range(len(row.pieces), first, -1):
                run = _Run(row.pieces[first:stop])
                if self._find(run, layer):
                    break
            runs.append(run)  # with a cached index, or of one slice
            first += len(run.pieces)
        return runs

    def _look_up(self, layer: int, place: int) -> list[_Run]:
        """Return the runs of a row at a layer, with all indexes that exist."""
        for run in self._runs[layer, place]:
            if run.index is None and not self._find(run, layer):
                self._find_stored(run, layer)
        return self._runs[layer, place]

    def _find(self, run: _Run, layer: int) -> bool:
        """Take the index of a run from the index cache, or as a part of its segment's. Return whether it is there."""
        device = self._fetcher.device_of(layer)
        run.index = run.held = self._index_cache.get(self._key(run.pieces, layer), device)
        piece = run.pieces[0]
        if run.index is None and len(run.pieces) == 1 and self._kind.divisible and not _is_whole(piece):
            self._set(run, self._index_cache.get(self._key([_whole(piece)], layer), device))
        return run.index is not None

    def _find_stored(self, run: _Run, layer: int) -> None:
        """Take the index of a slice from its segment's sidecar. An indivisible index requires the whole segment."""
        piece = run.pieces[0]
        if not self._kind.divisible and not _is_whole(piece):
            return
        if piece.reader not in self._stored_indexes:
            collector = self._fetcher.collector
            with collector.timing("stall_seconds"):
                indexes = self._sidecars.find(piece.reader, self._kind, self.chunk_tokens)
            bytes_read = sum(index.nbytes for index in indexes.values())
            collector.add(bytes_read=bytes_read, bytes_identifying=bytes_read)
            collector.add(bytes_delivered=bytes_read, bytes_delivered_identifying=bytes_read)
            self._stored_indexes[piece.reader] = indexes
        if (index := self._stored_indexes[piece.reader].pop(layer, None)) is not None:
            self._set(run, self._admit([_whole(piece)], layer, index.to(self._fetcher.device_of(layer))))

    def _build(self, run: _Run, layer: int, keys: torch.Tensor) -> None:
        """Build the index of a slice from its keys, or from those of its whole segment."""
        with self._fetcher.collector.timing("index_seconds"):
            index = build_index(self._kind, keys, self.chunk_tokens)
        (piece,) = run.pieces
        if keys.shape[1] < piece.reader.shape.tokens:
            run.index = run.held = self._admit(run.pieces, layer, index)
            return
        self._set(run, self._admit([_whole(piece)], layer, index))
        if not piece.reader.gone:
            self._built_readers.add(piece.reader)

    @staticmethod
    def _set(run: _Run, index: DecodeIndex | None) -> None:
        """Set the index of a slice from that of its whole segment."""
        piece = run.pieces[0]
        run.held = index
        run.index = index if index is None or _is_whole(piece) else index.part(piece.first, piece.count)

    def _admit(
        self, pieces: Sequence[SegmentSlice], layer: int, index: DecodeIndex, replaced: Sequence[IndexKey] = ()
    ) -> DecodeIndex:
        """Cache an index for other requests, and return the index to use: another cache may have made it, too."""
        if any(piece.reader.gone for piece in pieces):
            self._index_cache.track(index)
            return index
        shared: DecodeIndex = self._index_cache.admit(self._key(pieces, layer), index, replaced)
        return shared

    def _key(self, pieces: Sequence[SegmentSlice], layer: int) -> IndexKey:
        made_with = f"{self._kind.__name__} {self.chunk_tokens}"
        owners = ((piece.reader.id, layer, piece.reader.header.digests.digest, made_with) for piece in pieces)
        return tuple((owner, piece.first, piece.count) for owner, piece in zip(owners, pieces, strict=True))


def _is_whole(piece: SegmentSlice) -> bool:
    return piece.count == piece.reader.shape.tokens


def _whole(piece: SegmentSlice) -> SegmentSlice:
    return replace(piece, first=0, count=piece.reader.shape.tokens, at=0)
