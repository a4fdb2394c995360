"""Room on disk: quota with watermarks, a free-space floor, and eviction of the least recently used segments."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

from ..errors import ConfigError, QuotaError
from .catalogue import Catalogue
from .files import LOCK_SUFFIX, lock_beside

if TYPE_CHECKING:
    from .disk import SegmentStore


CATALOGUE_GROWTH = 256 << 10
"""Room left within the quota for the catalogue and its log to grow until the next reckoning."""


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


def used_bytes(store: SegmentStore) -> int:
    """Bytes that the store's files take on disk (segments, files being written, catalogue) or soon may.

    Raises:
        OSError: that cannot be found out.
    """
    listed = store.listed_bytes()
    if listed is None:  # no shared catalogue, or one that is new: it would not know what others have written
        total = sum(disk_bytes(path) for path in store.segment_files())
    else:
        total = listed + sum(disk_bytes(path) for path in store.unlisted)
    return (
        total
        + CATALOGUE_GROWTH
        + sum(disk_bytes(p) for folder in (store.root, store.tmp_dir) for p in folder.iterdir())
    )


def disk_bytes(path: Path) -> int:
    """Bytes that a file takes on disk; none if it is gone, or is no file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 if S_ISREG(found.st_mode) else 0


def make_room(store: SegmentStore, nbytes: int) -> None:
    """Evict until `nbytes` more fit. The caller holds the store's lock.

    Raises:
        QuotaError: they would not fit with everything evicted that may be; then nothing is.
    """
    limits = store.limits
    clean_tmp(store)
    store.forget_lost_readers()
    needed = nbytes + limits.floor - shutil.disk_usage(store.root).free
    wanted = needed + nbytes if needed > 0 else needed  # somewhat more, so that not every write evicts
    if limits.quota is not None:
        used = used_bytes(store)
        needed = max(needed, used + nbytes - limits.quota)
        if used + nbytes > limits.quota * limits.high:
            wanted = max(wanted, needed, used + nbytes - int(limits.quota * limits.low))
    if wanted <= 0:
        return
    found = victims(store, wanted)
    if sum(nbytes for _, nbytes in found) < needed:
        raise QuotaError(
            f"no room for {nbytes} bytes: raise disk_quota, lower free_space_floor, or make room on the disk"
        )
    evict(store, found)


def victims(store: SegmentStore, nbytes: int, but: Collection[str] = ()) -> list[tuple[str, int]]:
    """Which segments go until `nbytes` are freed: least recently used first, and the deeper of two.

    Args:
        store: whose pinned segments stay.
        nbytes: how many.
        but: these are not counted on.

    Returns:
        Ids and bytes.
    """
    spared, now = store.pinned().union(but), time.time()
    rows = [row for row in store.ask(Catalogue.by_use, []) if row[0] not in spared]
    rows.sort(key=lambda row: row[2] is None or row[2] > now)  # expired ones first, else as they were
    freed = accumulate((size for _, size, _ in rows), initial=0)
    return [(segment_id, size) for (segment_id, size, _), before in zip(rows, freed, strict=False) if before < nbytes]


def evict(store: SegmentStore, segments: list[tuple[str, int]]) -> None:
    """Delete these, as `victims` returned them."""
    for segment_id, _ in segments:
        store.remove([segment_id])
        store.counters.add("evicted_segments")


def clean_tmp(store: SegmentStore, dry_run: bool = False) -> int:
    """Delete temporary files whose writer has died: those whose lock can be had. The caller holds the store's lock.

    Returns:
        Bytes freed, or with `dry_run` those that would be.
    """
    try:
        names = {name.removesuffix(LOCK_SUFFIX) for name in os.listdir(store.tmp_dir)}
    except OSError:
        return 0
    orphans = [_remove_if_orphan(store.tmp_dir / name, dry_run) for name in names]
    if not dry_run and any(named for _, named in orphans):  # killed when the file was there, and its row was not
        store.scan()
    return sum(nbytes for nbytes, _ in orphans)


def _remove_if_orphan(path: Path, dry_run: bool) -> tuple[int, bool]:
    """Bytes that it took, and whether it has the name of a segment, too, under which it stays."""
    lock = lock_beside(path)
    try:
        with lock.acquire(timeout=0):
            Path(lock.lock_file).unlink(missing_ok=True)
            nbytes, named = disk_bytes(path), path.exists() and path.stat().st_nlink > 1
            if not dry_run:
                path.unlink(missing_ok=True)
            return 0 if named else nbytes, named
    except OSError:  # locked: it is being written
        return 0, False
