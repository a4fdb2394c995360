"""Rows of a batch: the positions that each of them computes, and the runs of segments that it can restore.

`PlanContext` is what a method plans a pass from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from ..store.segment import SegmentReader

T = TypeVar("T")
_LARGE_MASK = 1 << 28
_SHORT_PREFIX_SHARE = 1 / 8
"""Maximum length of a stored prefix, as a share of the suffix, that is not worth a large mask."""

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


def first_of_end(positions: Positions) -> int:
    """Return the first position from which on every row has all positions up to its last one."""
    gaps = np.diff(positions) > 1  # bool [n - 1], or [rows, n - 1]
    return int(positions[..., 1:][gaps].max(initial=positions[..., 0].max()))


def places(subset: Positions, superset: Positions) -> Positions | None:
    """Return the indexes of `subset` in `superset`, int64 `[n]` or `[rows, n]`; None if the two are equal."""
    if subset is superset or np.array_equal(subset, superset):
        return None
    if subset.ndim == superset.ndim == 1:
        return np.searchsorted(superset, subset)
    rows = max(len(positions) for positions in (subset, superset) if positions.ndim == 2)
    wide = (np.broadcast_to(positions, (rows, positions.shape[-1])) for positions in (superset, subset))
    return np.stack([np.searchsorted(row_positions, row) for row_positions, row in zip(*wide, strict=True)])


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
        mask = piece.held
        for other in self.pieces:
            start, stop = max(piece.at, other.at), min(piece.stop, other.stop)
            if other is not piece and start < stop:
                mask = mask.copy()
                mask[:, start - piece.at : stop - piece.at] |= other.held[:, start - other.at : stop - other.at]
        return mask


def count_tokens(groups: Sequence[RowGroup], base: int, positions: Positions) -> int:
    """Return the number of tokens, over all rows, at positions of a pass that begins after `base` others."""
    return sum(
        len(group.rows) * int((of_row(positions, group.rows[0]) >= max(0, group.pad - base)).sum()) for group in groups
    )


@dataclass(frozen=True)
class PlanContext:
    """Input for the planning of a method: the pass, and what can be restored."""

    base: int
    """Number of padded positions that the cache holds already."""
    num_positions: int
    """Number of padded positions of this pass."""
    restorable: int
    """First position that some row cannot restore; all rows can restore those before it. Padding counts as restored."""
    must_compute: int
    """Number of last positions with requested logits."""
    layers: int
    groups: tuple[RowGroup, ...] = ()
    """Sources of the other positions of each row."""

    def suffix_positions(self) -> tuple[Positions, ...]:
        """Return the plan of prefix reuse: every layer computes the suffix, and restores the tokens before it."""
        return (np.arange(self._first_computed(self.restorable), self.num_positions),) * self.layers

    @cached_property
    def own_prefixes(self) -> list[int]:
        """Number of tokens of each group's rows that a row restores alone. The cache is empty."""
        return [self._first_computed(group.pad + group.tokens, group.pad) - group.pad for group in self.groups]

    def own_suffixes(self) -> tuple[Positions, ...]:
        """Return the plan in which every layer computes what follows `own_prefixes` in each row."""
        firsts = [group.pad + tokens for group, tokens in zip(self.groups, self.own_prefixes, strict=True)]
        last = self.num_positions - 1  # which a row of padding alone computes
        return (self.for_rows([np.arange(min(first, last), last + 1) for first in firsts]),) * self.layers

    def _first_computed(self, restorable: int, pad: int = 0) -> int:
        """Return the first computed position of a suffix, of a row with this padding or of all rows."""
        first = max(pad, min(restorable, self.num_positions - self.must_compute))
        suffix = self.num_positions - first
        # a whole prompt needs no mask; the suffix x prompt mask of a suffix costs more than a short prefix saves
        is_short = first - pad < _SHORT_PREFIX_SHARE * suffix
        if self.base == 0 and is_short and suffix * (self.num_positions - pad) > _LARGE_MASK:
            first = pad
        return first

    @cached_property
    def inexact(self) -> Positions:
        """Positions that cannot be restored exactly, with the last `must_compute`: all that a pass may compute."""
        return self.without([self.restored_mask(group, exact=True) for group in self.groups])

    @cached_property
    def missing(self) -> Positions:
        """Positions that cannot be restored, with the last `must_compute`: all that a pass has to compute."""
        return self.without([self.restored_mask(group) for group in self.groups])

    def positions_of(self, group: RowGroup, piece: SegmentSlice) -> np.ndarray:
        """Return the positions of a piece's tokens in the pass; negative for tokens that the cache already holds."""
        return np.arange(piece.count) + piece.at + group.pad - self.base

    def restored_mask(self, group: RowGroup, exact: bool = False) -> np.ndarray:
        """Return where a row needs no computation, bool `[positions]`: padding, and all pieces or the exact ones."""
        is_restored = np.zeros(self.num_positions, bool)
        is_restored[: max(0, group.pad - self.base)] = True
        for piece in group.pieces:
            if piece.exact or not exact:
                positions = self.positions_of(group, piece)
                is_restored[positions[positions >= 0]] = True
        return is_restored

    def without(self, is_restored: Sequence[np.ndarray]) -> Positions:
        """Return the positions to compute if rows restore other positions, bool `[positions]` for each group of rows.

        Rows share their positions if everything restored is exact: each layer then computes a suffix, which is recorded
        completely, with the same bits as in any other pass over it.
        """
        if all(piece.exact for group in self.groups for piece in group.pieces):
            is_restored = [np.logical_and.reduce(is_restored)] * len(is_restored)
        is_computed = [~mask for mask in is_restored]
        for mask in is_computed:
            mask[self.num_positions - self.must_compute :] = True
        return self.for_rows([np.flatnonzero(mask) for mask in is_computed])

    def for_rows(self, positions: Sequence[np.ndarray]) -> Positions:
        """Return the positions of each group of rows, combined for all rows."""
        return side_by_side(by_row(self.groups, positions))
