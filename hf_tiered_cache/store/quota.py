"""Quota with watermarks, free-space floor and eviction order. `disk.py` measures usage and deletes segments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigError

CATALOGUE_GROWTH = 256 << 10
"""Bytes reserved within the quota for growth of the catalogue and its log until usage is measured again."""
Use = tuple[str, int, float | None]
"""Id of a segment, its size in bytes, and its expiry in Unix seconds, or None."""


@dataclass(frozen=True)
class Limits:
    """Limits of the disk space that a store may use.

    Args:
        quota: maximum size of the store's folder in bytes, or None for no quota.
        high: share of the quota above which eviction starts.
        low: share of the quota down to which it evicts.
        floor: bytes that always stay free on the file system.
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
        """Return the number of bytes to evict before `nbytes` more are written.

        Args:
            nbytes: bytes to write.
            used: bytes that the store uses; ignored without a quota.
            free: free bytes on the disk, or None if unlimited.

        Returns:
            Bytes that must be evicted, and bytes that should be. Values that are not positive mean no eviction.
        """
        needed = 0 if free is None else nbytes + self.floor - free
        wanted = needed + nbytes if needed > 0 else needed  # room for two such writes, so that not every write evicts
        if self.quota is not None:
            needed = max(needed, used + nbytes - self.quota)
            if used + nbytes > self.quota * self.high:
                wanted = max(wanted, needed, used + nbytes - int(self.quota * self.low))
        return needed, wanted

    def overflow(self, used: int) -> int:
        """Return the bytes to evict to get down to the low watermark; 0 if `used` is not above the high watermark."""
        over = self.quota is not None and used > self.quota * self.high
        return used - int(self.quota * self.low) if self.quota is not None and over else 0


def victims(uses: Sequence[Use], nbytes: int, spared: Collection[str], now: float) -> list[tuple[str, int]]:
    """Select segments to evict until `nbytes` are freed: expired ones first, then the least recently used.

    Args:
        uses: all segments, most recently used last; with equal times, the segment at the larger position first.
        nbytes: bytes to free.
        spared: ids of segments that are not evicted.
        now: current time in Unix seconds.

    Returns:
        Ids and sizes in bytes of the selected segments.
    """
    rows = [row for row in uses if row[0] not in spared]
    rows.sort(key=lambda row: row[2] is None or row[2] > now)  # a stable sort: the order of use is kept
    freed = accumulate((size for _, size, _ in rows), initial=0)
    return [(segment_id, size) for (segment_id, size, _), before in zip(rows, freed, strict=False) if before < nbytes]
