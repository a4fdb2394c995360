"""Which columns the rows of a batch compute: the same in all, or each row its own, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Columns = np.ndarray
"""int64 `[n]`, ascending: the columns of every row. Or `[rows, n]`: each row has its own, ascending, and one that has
fewer than another repeats its first one in front. So rows end alike, a repeated column has the same hidden states, keys
and values each time, and a batch costs what its longest row does."""


def side_by_side(rows: Sequence[np.ndarray]) -> Columns:
    """The columns of each row, int64 ascending, none of them empty, as one array."""
    first = rows[0]
    if all(np.array_equal(first, row) for row in rows[1:]):
        return first
    most = max(map(len, rows))
    return np.stack([np.concatenate([np.full(most - len(row), row[0]), row]) for row in rows])


def repeats(columns: Columns, row: int) -> int:
    """How often a row repeats its first column in front."""
    return 0 if columns.ndim == 1 else int((columns[row] != columns[row, 0]).argmax() or columns.shape[1]) - 1


def of_row(columns: Columns, row: int) -> np.ndarray:
    """A row's columns, each once: int64 ascending."""
    return columns if columns.ndim == 1 else columns[row, repeats(columns, row) :]


def row_by_row(*several: Columns) -> Iterator[tuple[np.ndarray, ...]]:
    """What each row has of several: see `of_row`. Once, where all rows have the same."""
    for row in range(max(1 if columns.ndim == 1 else len(columns) for columns in several)):
        yield tuple(of_row(columns, row) for columns in several)


def places(mine: Columns, its: Columns) -> Columns | None:
    """Where columns stand among others that hold them all: int64 `[n]` or `[rows, n]`; None if they are the same."""
    if mine is its or np.array_equal(mine, its):
        return None
    if mine.ndim == its.ndim == 1:
        return np.searchsorted(its, mine)
    rows = max(len(columns) for columns in (mine, its) if columns.ndim == 2)
    wide = (np.broadcast_to(columns, (rows, columns.shape[-1])) for columns in (its, mine))
    return np.stack([np.searchsorted(theirs, own) for theirs, own in zip(*wide, strict=True)])
