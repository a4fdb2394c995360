"""Rows of a batch: the positions that each of them computes, and the runs of segments that it can restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ..store.segment import SegmentReader

T = TypeVar("T")

Positions = np.ndarray
"""Padded positions, int64 `[n]`, ascending, for all rows. Or `[rows, n]`, ascending in each row; a row with fewer
positions repeats its first one at the front. So rows are aligned at the end, a repeated position has the same hidden
states, keys and values each time, and a batch costs as much as its longest row."""


def side_by_side(rows: Sequence[np.ndarray]) -> Positions:
    """Stack the positions of each row, int64 ascending and not empty, into one array."""
    first = rows[0]
    if all(np.array_equal(first, row) for row in rows[1:]):
        return first
    most = max(map(len, rows))
    return np.stack([np.concatenate([np.full(most - len(row), row[0]), row]) for row in rows])


def repeats(positions: Positions, row: int) -> int:
    """Return how often a row repeats its first position at the front."""
    return 0 if positions.ndim == 1 else int((positions[row] != positions[row, 0]).argmax() or positions.shape[1]) - 1


def of_row(positions: Positions, row: int) -> np.ndarray:
    """Return the distinct positions of a row, int64 ascending."""
    return positions if positions.ndim == 1 else positions[row, repeats(positions, row) :]


def by_row(groups: Sequence[RowGroup], values: Sequence[T]) -> list[T]:
    """Return the value of each row, given one for each group of rows."""
    rows = {row: value for group, value in zip(groups, values, strict=True) for row in group.rows}
    return [rows[row] for row in sorted(rows)]


def row_by_row(*several: Positions) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield `of_row` of several arrays, row by row; once if all rows share the same positions."""
    for row in range(max(1 if positions.ndim == 1 else len(positions) for positions in several)):
        yield tuple(of_row(positions, row) for positions in several)


def places(subset: Positions, superset: Positions) -> Positions | None:
    """Return the indexes of `subset` in `superset`, int64 `[n]` or `[rows, n]`; None if the two are equal."""
    if subset is superset or np.array_equal(subset, superset):
        return None
    if subset.ndim == superset.ndim == 1:
        return np.searchsorted(superset, subset)
    rows = max(len(positions) for positions in (subset, superset) if positions.ndim == 2)
    wide = (np.broadcast_to(positions, (rows, positions.shape[-1])) for positions in (superset, subset))
    return np.stack([np.searchsorted(theirs, row) for theirs, row in zip(*wide, strict=True)])


@dataclass(frozen=True)
class SegmentSlice:
    """Run of a segment's tokens, with its position in a row."""

    reader: SegmentReader
    first: int
    """Index of the first token in the segment."""
    count: int
    at: int
    """Position of that token in the row, padding not counted."""
    exact: bool = True
    """True if the KV equals what computing the row gives. A passage's lacks the context of the tokens before it."""
    scores: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Scores of a passage's tokens by the ranking that the method uses, float32 `[segment's tokens]`: how much it
    matters that each token is recomputed. None if the passage has not been ranked so."""

    @property
    def stop(self) -> int:
        """Position in the row after the last token."""
        return self.at + self.count

    @property
    def held(self) -> np.ndarray:
        """Tokens of each layer that can be restored, bool `[layers, count]`."""
        return self.reader.held[:, self.first : self.first + self.count]


@dataclass(frozen=True)
class RowGroup:
    """Rows with the same tokens and padding. They are restored once and copied to each row."""

    rows: tuple[int, ...]
    pad: int
    pieces: tuple[SegmentSlice, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens up to the end of the last piece: those of the stored prefix, if there are no passages."""
        return self.pieces[-1].stop if self.pieces else 0

    def held_by_any(self, piece: SegmentSlice) -> np.ndarray:
        """Return the tokens of a piece that can be restored from any piece of the row, bool `[layers, count]`."""
        held = piece.held
        for other in self.pieces:
            start, stop = max(piece.at, other.at), min(piece.stop, other.stop)
            if other is not piece and start < stop:
                held = held.copy()
                held[:, start - piece.at : stop - piece.at] |= other.held[:, start - other.at : stop - other.at]
        return held
