"""How many rows of a batch are ranked together, before their blocks are asked for: measured at the first tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

_ROUNDS = 3
"""Passes that each size is measured in; the median counts."""


class MicroBatches:
    """The size of micro-batches (KVDRIVE, Section 6.1), as it is quickest here.

    Fewer rows at a time overlap more with the reads of others, and cost more of the processor for each row; which
    weighs more depends on the machine and on where the blocks lie. So all rows together, halves, quarters and so on
    down to single rows take turns for some passes, behind a first one that finds nothing in place; then the quickest
    stays. What is attended to does not depend on it.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        """Rows at a time, once it is settled."""
        self._rows = 0
        self._seconds: dict[int, list[float]] = {}
        self._turns: Iterator[int] = iter(())
        self._now: int | None = None
        self._took = 0.0

    def begin(self) -> None:
        """A pass begins: what the last one took counts for its size."""
        if self.size is None and self._took:
            if self._now is not None:
                self._seconds.setdefault(self._now, []).append(self._took)
            self._now, self._took = next(self._turns, None), 0.0
            if self._now is None and self._seconds:
                self.size = min(self._seconds, key=lambda size: statistics.median(self._seconds[size]))

    def of(self, rows: int) -> int:
        """How many of a layer's `rows` to take together."""
        if rows != self._rows:  # the first pass, or another batch
            self._rows, self.size, self._now = rows, rows if rows == 1 else None, None
            self._seconds.clear()
            self._turns = (size for _ in range(_ROUNDS) for size in _sizes(rows))
        return self.size or self._now or rows

    def took(self, seconds: float) -> None:
        """A layer of this pass took so long."""
        self._took += seconds


def _sizes(rows: int) -> Iterator[int]:
    """All rows, half of them, and so on: 6, 3, 2, 1."""
    while rows > 1:
        yield rows
        rows = -(-rows // 2)
    yield 1
