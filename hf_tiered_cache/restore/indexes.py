"""The indexes that chunks of the prefix are chosen by: kept in memory, or made of the keys of its segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..select.decode_index import DecodeIndex
from .chosen import Gathers, RowPrefix, key_groups
from .fetch import Fetcher, FetchUnit
from .live import Rotate
from .plan import SegmentSlice


class RowIndexes:
    """Indexes of the restored tokens of rows, layer by layer: one for each segment of a row.

    They hold rotated keys, so each belongs to the position at which the prefix has its segment.

    Args:
        kind: of the indexes.
        chunk_tokens: tokens of a chunk.
        fetcher: of the pass that restores; brings keys.
        rows: whose tokens.
    """

    def __init__(self, kind: type[DecodeIndex], chunk_tokens: int, fetcher: Fetcher, rows: Sequence[RowPrefix]) -> None:
        self._kind, self._chunk_tokens, self._fetcher, self._rows = kind, chunk_tokens, fetcher, rows
        self._found: dict[tuple[int, int], list[DecodeIndex | None]] = {}  # by layer and number of the row
        # the keys of those that are missing, and the chunks that have them
        self._units: dict[tuple[int, int], list[tuple[FetchUnit, np.ndarray]]] = {}

    def fetch(self, layer: int, ahead: bool = False) -> None:
        """Look up a layer's indexes, and start to bring the keys of segments that have none."""
        for place, row in enumerate(self._rows):
            if (layer, place) in self._found:
                continue
            found = self._found[layer, place] = [self._resident(row, piece, layer) for piece in row.pieces()]
            units = self._units[layer, place] = []
            for piece, index in zip(row.pieces(), found, strict=True):
                tokens = np.arange(piece.first, piece.first + _count(row, piece))
                for group in key_groups(piece.reader.shape, layer, None) if index is None else ():
                    unit = FetchUnit(piece.reader, group, identifies=True)
                    units.append((unit, unit.chunks_of(tokens)))
            self._fetcher.bring(units, ahead)

    def of(self, layer: int, place: int, rotate_: Rotate) -> list[DecodeIndex]:
        """Those of a row at a layer, in the order of its tokens; made of its keys where they are missing.

        Raises:
            RestoreError: a block did not arrive.
        """
        self.fetch(layer)
        row, found = self._rows[place], self._found[layer, place]
        if wanted := self._units.pop((layer, place), []):
            self._fetcher.bring(wanted)  # what there was no room for before
            units = [unit for unit, _ in wanted]
            self._fetcher.wait_for(units)
            self._fetcher.confirm()  # what is made of keys outlives the pass
            for number, piece in enumerate(row.pieces()):
                if found[number] is None:
                    mine = [unit for unit in units if unit.reader is piece.reader]
                    found[number] = self._make(row, piece, mine, layer, rotate_)
            self._fetcher.finish(units)
        return [index for index in found if index is not None]

    def _make(
        self, row: RowPrefix, piece: SegmentSlice, units: list[FetchUnit], layer: int, rotate_: Rotate
    ) -> DecodeIndex:
        tokens = np.arange(piece.at, piece.at + _count(row, piece))
        layout, device = piece.reader.shape.layout, self._fetcher.device_of(layer)
        kind = layout.layer(layer)
        keys = torch.empty(kind.key_heads, len(tokens), kind.key_dim, dtype=layout.dtype, device=device)
        gathers = Gathers(row, tokens[None])
        gathers.copy(units, layer, "key", keys)
        rotate_(keys, tokens[None], row.tokens)
        index = self._kind.build(keys, self._chunk_tokens)
        if len(tokens) == piece.reader.shape.tokens and not piece.reader.gone:
            self._fetcher.residency.resident.admit(self._owner(piece, layer), index)
        return index

    def _resident(self, row: RowPrefix, piece: SegmentSlice, layer: int) -> DecodeIndex | None:
        """What is in memory of a segment that the row has all of."""
        if _count(row, piece) < piece.reader.shape.tokens:
            return None
        return self._fetcher.residency.resident.get(self._owner(piece, layer), self._fetcher.device_of(layer))

    def _owner(self, piece: SegmentSlice, layer: int) -> tuple[str, int, int, str]:
        return piece.reader.key_owner(layer, f"{self._kind.__name__} {self._chunk_tokens}")


def _count(row: RowPrefix, piece: SegmentSlice) -> int:
    """Tokens of a piece that the row restores."""
    return min(piece.count, row.tokens - piece.at)
