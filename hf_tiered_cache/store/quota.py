"""Room: quota with watermarks, a free-space floor, and who goes first. Arithmetic; `disk.py` counts and deletes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigError

CATALOGUE_GROWTH = 256 << 10
"""Room left within the quota for the catalogue and its log to grow until the next reckoning."""
Use = tuple[str, int, float | None]
"""A segment's id, the bytes it takes, and when it expires."""


@dataclass(frozen=True)
class Limits:
    """How much of the disk a store may take.

    Args:
        quota: bytes of the store's folder that are never exceeded, or None.
        high: share of the quota at which eviction begins.
        low: share of the quota to which it goes on.
        floor: bytes that stay free on the file system, whatever the quota says.
    """

    quota: int | None = None
    high: float = 0.95
    low: float = 0.85
    floor: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(f"watermarks must satisfy 0 < low <= high <= 1, not low={self.low}, high={self.high}")
        if self.quota is not None and self.quota < 0:
            raise ConfigError(f"disk_quota must not be negative: {self.quota}")

    def shortfall(self, nbytes: int, used: int, free: int | None) -> tuple[int, int]:
        """What is to be evicted before `nbytes` more are written.

        Args:
            nbytes: that are to be written.
            used: bytes that the store takes; of no account without a quota.
            free: bytes that the disk has left, or None if it has no bound.

        Returns:
            Bytes that must go, and bytes that should; nothing where these are not above 0.
        """
        needed = 0 if free is None else nbytes + self.floor - free
        wanted = needed + nbytes if needed > 0 else needed  # somewhat more, so that not every write evicts
        if self.quota is not None:
            needed = max(needed, used + nbytes - self.quota)
            if used + nbytes > self.quota * self.high:
                wanted = max(wanted, needed, used + nbytes - int(self.quota * self.low))
        return needed, wanted

    def overflow(self, used: int) -> int:
        """What of `used` bytes is to be evicted, to be under the quota with room to spare; 0 if it is."""
        over = self.quota is not None and used > self.quota * self.high
        return used - int(self.quota * self.low) if self.quota is not None and over else 0


def victims(uses: Sequence[Use], nbytes: int, spared: Collection[str], now: float) -> list[tuple[str, int]]:
    """Which segments go until `nbytes` are freed: expired ones first, then the least recently used.

    Args:
        uses: all segments, last used last, and of two the deeper first.
        nbytes: how many.
        spared: these stay.
        now: in Unix seconds.

    Returns:
        Ids and bytes.
    """
    rows = [row for row in uses if row[0] not in spared]
    rows.sort(key=lambda row: row[2] is None or row[2] > now)  # else as they were
    freed = accumulate((size for _, size, _ in rows), initial=0)
    return [(segment_id, size) for (segment_id, size, _), before in zip(rows, freed, strict=False) if before < nbytes]
