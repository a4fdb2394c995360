"""Number of batch rows that are ranked together before their blocks are requested, measured at the first tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

_ROUNDS = 3
"""Number of passes measured per size; the median counts."""


class MicroBatches:
    """Size of micro-batches (KVDRIVE, Section 6.1), tuned on this machine.

    Smaller micro-batches overlap ranking with more reads, but cost more processor time per row. Which effect is larger
    depends on the machine and on the tier of the blocks. So all rows, halves, quarters and so on down to single rows
    are measured in turn, after an unmeasured first pass that finds no blocks in place, and the fastest size is kept.
    The selection does not depend on the size.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        """Rows per micro-batch; None until it is measured."""
        self._rows = 0
        self._seconds: dict[int, list[float]] = {}
        self._turns: Iterator[int] = iter(())
        self._now: int | None = None
        self._took = 0.0

    def begin(self) -> None:
        """Begin a pass: record the time of the last pass for its size, and take the next size to measure."""
        if self.size is None and self._took:
            if self._now is not None:
                self._seconds.setdefault(self._now, []).append(self._took)
            self._now, self._took = next(self._turns, None), 0.0
            if self._now is None and self._seconds:
                self.size = min(self._seconds, key=lambda size: statistics.median(self._seconds[size]))

    def of(self, rows: int) -> int:
        """Return the micro-batch size for a layer with `rows` rows."""
        if rows != self._rows:  # first pass, or another batch size
            self._rows, self.size, self._now = rows, rows if rows == 1 else None, None
            self._seconds.clear()
            self._turns = (size for _ in range(_ROUNDS) for size in _sizes(rows))
        return self.size or self._now or rows

    def took(self, seconds: float) -> None:
        """Add the time of one layer of this pass."""
        self._took += seconds


def _sizes(rows: int) -> Iterator[int]:
    """Yield all rows, half of them (rounded up), and so on down to 1: 6, 3, 2, 1."""
    while rows > 1:
        yield rows
        rows = -(-rows // 2)
    yield 1
