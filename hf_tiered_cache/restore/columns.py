"""Positions that the rows of a batch compute: the same for all rows, or different ones per row, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Columns = np.ndarray
"""Padded positions, int64 `[n]`, ascending, for all rows. Or `[rows, n]`, ascending in each row; a row with fewer
positions repeats its first one at the front. So rows are aligned at the end, a repeated position has the same hidden
states, keys and values each time, and a batch costs as much as its longest row."""


def side_by_side(rows: Sequence[np.ndarray]) -> Columns:
    """Stack the positions of each row, int64 ascending and not empty, into one array."""
    first = rows[0]
    if all(np.array_equal(first, row) for row in rows[1:]):
        return first
    most = max(map(len, rows))
    return np.stack([np.concatenate([np.full(most - len(row), row[0]), row]) for row in rows])


def repeats(columns: Columns, row: int) -> int:
    """Return how often a row repeats its first position at the front."""
    return 0 if columns.ndim == 1 else int((columns[row] != columns[row, 0]).argmax() or columns.shape[1]) - 1


def of_row(columns: Columns, row: int) -> np.ndarray:
    """Return the distinct positions of a row, int64 ascending."""
    return columns if columns.ndim == 1 else columns[row, repeats(columns, row) :]


def row_by_row(*several: Columns) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield `of_row` of several arrays, row by row; once if all rows share the same positions."""
    for row in range(max(1 if columns.ndim == 1 else len(columns) for columns in several)):
        yield tuple(of_row(columns, row) for columns in several)


def places(mine: Columns, its: Columns) -> Columns | None:
    """Return the indexes of `mine` in its superset `its`, int64 `[n]` or `[rows, n]`; None if the two are equal."""
    if mine is its or np.array_equal(mine, its):
        return None
    if mine.ndim == its.ndim == 1:
        return np.searchsorted(its, mine)
    rows = max(len(columns) for columns in (mine, its) if columns.ndim == 2)
    wide = (np.broadcast_to(columns, (rows, columns.shape[-1])) for columns in (its, mine))
    return np.stack([np.searchsorted(theirs, own) for theirs, own in zip(*wide, strict=True)])
