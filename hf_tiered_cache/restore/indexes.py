"""The indexes that chunks of the prefix are chosen by: kept in memory, or made of the keys of its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..select.decode_index import DecodeIndex
from ..store.disk import SegmentStore
from ..store.segment import SegmentReader
from .chosen import RowPrefix, key_groups, parts_of
from .fetch import Fetcher, FetchUnit
from .gather import Gather
from .live import Rotate
from .plan import SegmentSlice

_VERSION = 1
"""Of how indexes are built: one more makes those that are kept be made anew."""


class KeptIndexes:
    """Indexes beside the segments that they are made of, all layers of a segment together.

    Args:
        disk: the segments.
        later: does something behind the request.
    """

    def __init__(self, disk: SegmentStore, later: Callable[[Callable[[], object]], object]) -> None:
        self._disk, self.later = disk, later

    def find(self, reader: SegmentReader, kind: type[DecodeIndex], chunk_tokens: int) -> dict[int, DecodeIndex]:
        """Those of a segment, by layer, on the CPU; none if they are not there, or not whole."""
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in (self._disk.beside.kept(reader, *self._named(kind, chunk_tokens)) or {}).items():
            layer, _, field = name.partition(".")
            by_layer.setdefault(int(layer), {})[field] = tensor
        return {layer: kind.from_tensors(tensors, chunk_tokens) for layer, tensors in by_layer.items()}

    def keep(self, reader: SegmentReader, indexes: Mapping[int, DecodeIndex]) -> None:
        """Keep all of a segment, behind the request."""
        self.later(partial(self._write, reader, dict(indexes)))

    def _write(self, reader: SegmentReader, indexes: Mapping[int, DecodeIndex]) -> None:
        one = next(iter(indexes.values()))
        arrays: dict[str, torch.Tensor] = {}
        for layer, index in indexes.items():
            arrays |= {f"{layer}.{name}": tensor.cpu() for name, tensor in index.tensors().items()}
        name, made_by = self._named(type(one), one.chunk_tokens)
        self._disk.beside.keep(reader, name, arrays, made_by)  # without room it is not kept, which is counted

    @staticmethod
    def _named(kind: type[DecodeIndex], chunk_tokens: int) -> tuple[str, dict[str, Any]]:
        """Under which name they lie, and what they were made by."""
        made_by = {"index": kind.__name__, "chunk_tokens": chunk_tokens, "version": _VERSION}
        return f"{kind.__name__.lower()}_{chunk_tokens}", made_by


class RowIndexes:
    """Indexes of the restored tokens of rows, layer by layer: one for each segment of a row.

    They hold rotated keys, so each belongs to the position at which the prefix has its segment.

    Args:
        kind: of index.
        chunk_tokens: of their chunks.
        fetcher: of the pass that restores; brings keys.
        rows: whose tokens.
        kept: has those of other processes.
    """

    def __init__(
        self,
        kind: type[DecodeIndex],
        chunk_tokens: int,
        fetcher: Fetcher,
        rows: Sequence[RowPrefix],
        kept: KeptIndexes,
    ) -> None:
        self._kind, self.chunk_tokens = kind, chunk_tokens
        self._fetcher, self._rows, self._kept = fetcher, rows, kept
        # held from the beginning: where a segment is laid out anew meanwhile, its indexes go to the new one
        self._held = {reader: self._in_memory(reader) for row in rows for reader in {p.reader for p in row.pieces()}}
        self._of_file: dict[SegmentReader, dict[int, DecodeIndex]] = {}  # what was kept of whole segments, by layer
        self._of_segment: dict[SegmentReader, dict[int, DecodeIndex]] = {}  # all that there is of these
        self._made: set[SegmentReader] = set()
        self._found: dict[tuple[int, int], list[DecodeIndex | None]] = {}  # by layer and number of the row
        # the keys of those that are missing, and the chunks that have them
        self._units: dict[tuple[int, int], list[tuple[FetchUnit, np.ndarray]]] = {}

    def fetch(self, layer: int, ahead: bool = False) -> None:
        """Look up a layer's indexes, and start to bring the keys of segments that have none."""
        for place, row in enumerate(self._rows):
            if (layer, place) in self._units:
                continue
            found, units = self._look_up(layer, place), self._units.setdefault((layer, place), [])
            for piece, index in zip(row.pieces(), found, strict=True):
                tokens = self._to_index(row, piece)
                for group in key_groups(piece.reader.shape, layer, None) if index is None else ():
                    unit = FetchUnit(piece.reader, group, identifies=True)
                    units.append((unit, unit.chunks_of(tokens)))
            self._fetcher.bring(units, ahead, attends=False)

    def of(self, layer: int, place: int, rotate_: Rotate) -> list[DecodeIndex]:
        """Those of a row at a layer, in the order of its tokens; made of its keys where they are missing.

        Raises:
            RestoreError: a block did not arrive.
        """
        self.fetch(layer)
        row, found = self._rows[place], self._found[layer, place]
        if wanted := self._units[layer, place]:
            self._units[layer, place] = []
            self._fetcher.bring(wanted, attends=False)  # what there was no room for before
            units = [unit for unit, _ in wanted]
            self._fetcher.wait_for(units)
            self._fetcher.confirm()  # what is made of keys outlives the pass
            for number, piece in enumerate(row.pieces()):
                if found[number] is None:
                    mine = [unit for unit in units if unit.reader is piece.reader]
                    built = self._built(piece, layer, self._keys(row, piece, mine, layer, rotate_))
                    found[number] = self._part(row, piece, built)
            self._fetcher.finish(units)
        return [index for index in found if index is not None]

    @property
    def nbytes(self) -> int:
        """Of all that have been looked up or made. Rows may share one."""
        found = {id(index): index.nbytes for some in self._found.values() for index in some if index is not None}
        return sum(found.values())

    @property
    def fit(self) -> bool:
        """Whether memory can hold all that are shared with other requests. No memory at all was asked to hold none."""
        shared = sum(index.nbytes for some in self._of_segment.values() for index in some.values())
        return not 0 < self._fetcher.residency.resident.budget < shared

    def merge(self) -> None:
        """All layers have theirs, and are asked again and again from now on: let them be as few as can be."""
        for where, found in self._found.items():
            self._found[where] = [*self._kind.merged([index for index in found if index is not None])]
        self._of_file.clear()
        self._of_segment.clear()

    def lacks(self, layer: int, place: int) -> bool:
        """Whether a segment of a row has no index of a layer."""
        return None in self._look_up(layer, place)

    def make(self, layer: int, place: int, keys: torch.Tensor) -> None:
        """Make those that are missing of all of a row's rotated keys, `[kv_heads, tokens, dim]`."""
        row, found = self._rows[place], self._look_up(layer, place)
        self._fetcher.confirm()  # what is made of keys outlives the pass
        for number, piece in enumerate(row.pieces()):
            if found[number] is None:
                found[number] = self._built(piece, layer, keys[:, piece.at : piece.at + _count(row, piece)])

    def _look_up(self, layer: int, place: int) -> list[DecodeIndex | None]:
        if (layer, place) not in self._found:
            row = self._rows[place]
            self._found[layer, place] = [self._resident(row, piece, layer) for piece in row.pieces()]
        return self._found[layer, place]

    def keep(self) -> None:
        """All layers have theirs: keep those that were made."""
        for reader in self._made:
            self._kept.keep(reader, self._of_segment[reader])
        self._made.clear()

    def _keys(
        self, row: RowPrefix, piece: SegmentSlice, units: list[FetchUnit], layer: int, rotate_: Rotate
    ) -> torch.Tensor:
        """`[kv_heads, tokens, dim]`: the rotated keys of a piece, or of all of its segment."""
        inside = self._to_index(row, piece)
        positions = inside + piece.at - piece.first
        layout, device = piece.reader.shape.layout, self._fetcher.device_of(layer)
        kind = layout.layer(layer)
        keys = torch.empty(kind.key_heads, len(inside), kind.key_dim, dtype=layout.dtype, device=device)
        for unit in units:
            gather = Gather(piece.reader.shape, unit.block_group)
            gather.add(piece.reader.shape, unit.blocks, inside, np.arange(len(inside)))
            for part in parts_of(unit.block_group, layer, "key"):
                gather.copy(part, keys)
        rotate_(keys, positions[None], max(row.tokens, int(positions[-1]) + 1))
        return keys

    def _to_index(self, row: RowPrefix, piece: SegmentSlice) -> np.ndarray:
        """The tokens of a piece's segment that an index is made of, int64, ascending: all, where it can be divided."""
        if self._kind.divisible:
            return np.arange(piece.reader.shape.tokens)
        return np.arange(piece.first, piece.first + _count(row, piece))

    def _part(self, row: RowPrefix, piece: SegmentSlice, index: DecodeIndex) -> DecodeIndex:
        """What a row needs of an index that may be the whole segment's."""
        count = _count(row, piece)
        whole = not self._kind.divisible or count == piece.reader.shape.tokens
        return index if whole else index.part(piece.first, count)

    def _built(self, piece: SegmentSlice, layer: int, keys: torch.Tensor) -> DecodeIndex:
        """The index of a piece's keys; that of a whole segment is for others, too."""
        with self._fetcher.collector.timing("index_seconds"):
            index = self._kind.build(keys, self.chunk_tokens)
        if keys.shape[1] == piece.reader.shape.tokens and not piece.reader.gone:
            self._fetcher.residency.resident.admit(self._owner(piece.reader, layer), index)
            self._of_segment.setdefault(piece.reader, {})[layer] = index
            self._made.add(piece.reader)
        return index

    def _resident(self, row: RowPrefix, piece: SegmentSlice, layer: int) -> DecodeIndex | None:
        """What is there of a segment that the row has all of, or of any whose index can be divided."""
        reader, device = piece.reader, self._fetcher.device_of(layer)
        if _count(row, piece) < reader.shape.tokens and not self._kind.divisible:
            return None
        resident = self._fetcher.residency.resident
        found = self._held[reader].get(layer)
        if found is None:
            found = resident.get(self._owner(reader, layer), device)
        if found is None:
            if reader not in self._of_file:
                self._of_file[reader] = self._read(reader)
            if (kept := self._of_file[reader].get(layer)) is not None:
                found = kept.to(device)
                resident.admit(self._owner(reader, layer), found)
        if found is None:
            return None
        self._of_segment.setdefault(reader, {})[layer] = found
        return self._part(row, piece, found)

    def _in_memory(self, reader: SegmentReader) -> dict[int, DecodeIndex]:
        """Return what memory has of a segment, by layer."""
        resident, device_of = self._fetcher.residency.resident, self._fetcher.device_of
        layers = [layer for layer, kind in enumerate(reader.shape.layout.layers) if kind is not None]
        found = {layer: resident.get(self._owner(reader, layer), device_of(layer)) for layer in layers}
        return {layer: index for layer, index in found.items() if index is not None}

    def _read(self, reader: SegmentReader) -> dict[int, DecodeIndex]:
        """What was kept of a segment, by layer: read at once, and waited for."""
        collector = self._fetcher.collector
        with collector.timing("stall_seconds"):
            found = self._kept.find(reader, self._kind, self.chunk_tokens)
        nbytes = sum(index.nbytes for index in found.values())
        collector.add(bytes_read=nbytes, bytes_identifying=nbytes, bytes_brought=nbytes, brought_identifying=nbytes)
        return found

    def _owner(self, reader: SegmentReader, layer: int) -> tuple[str, int, int, str]:
        return reader.key_owner(layer, f"{self._kind.__name__} {self.chunk_tokens}")


def _count(row: RowPrefix, piece: SegmentSlice) -> int:
    """Tokens of a piece that the row restores."""
    return min(piece.count, row.tokens - piece.at)


def rotate_nothing(tensor: torch.Tensor, positions: np.ndarray, stop: int) -> None:
    """Indexes stand since the prompt's choice, so no key is rotated to make one."""
    raise AssertionError("a layer that holds chosen chunks has no index")
