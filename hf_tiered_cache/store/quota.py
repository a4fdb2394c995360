"""Limits of the disk space of a store, and the choice of segments to evict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

CATALOGUE_GROWTH = 256 << 10
"""Bytes reserved within the quota for growth of the catalogue and its log until usage is measured again."""
Use = tuple[str, int, float | None]
"""Id of a segment, its size in bytes, and its expiry in Unix seconds, or None."""


@dataclass(frozen=True)
class Limits:
    """Limits of the disk space that a store may use.

    Args:
        quota: Maximum size of the store's folder in bytes, or None for no quota.
        high: Share of the quota above which eviction starts.
        low: Share of the quota down to which it evicts.
        floor: Bytes that always stay free on the file system.
    """

    quota: int | None = None
    high: float = 0.95
    low: float = 0.85
    floor: int = 256 << 20

    def shortfall(self, nbytes: int, used: int, free: int | None) -> tuple[int, int]:
        """Return the bytes that must be evicted, and that should be, before `nbytes` are written; none if not positive.

        The store uses `used` bytes, which counts only with a quota. `free` bytes are free, or None: unlimited.
        """
        needed = 0 if free is None else nbytes + self.floor - free
        desired = needed + nbytes if needed > 0 else needed  # room for two such writes, so that not every write evicts
        if self.quota is not None:
            needed = max(needed, used + nbytes - self.quota)
            if used + nbytes > self.quota * self.high:
                desired = max(desired, needed, used + nbytes - int(self.quota * self.low))
        return needed, desired

    def overflow(self, used: int) -> int:
        """Return the bytes to evict to get down to the share `low`; 0 if `used` is not above the share `high`."""
        over = self.quota is not None and used > self.quota * self.high
        return used - int(self.quota * self.low) if self.quota is not None and over else 0


def victims(uses: Sequence[Use], nbytes: int, spared: Collection[str], now: float) -> list[tuple[str, int]]:
    """Select segments to evict until `nbytes` are freed: expired ones first, then the least recently used.

    `uses` are all segments, most recently used last; with equal times, the segment at the larger position first.
    Returns ids and sizes in bytes.
    """
    rows = [row for row in uses if row[0] not in spared]
    rows.sort(key=lambda row: row[2] is None or row[2] > now)  # a stable sort: the order of use is kept
    freed = accumulate((size for _, size, _ in rows), initial=0)
    return [(segment_id, size) for (segment_id, size, _), before in zip(rows, freed, strict=False) if before < nbytes]
