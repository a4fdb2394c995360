"""Looking after a store: verify every byte, collect garbage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import FormatError, IntegrityError, NotOursError, OtherKeyError, StoreError
from . import quota
from .catalogue import Catalogue
from .disk import SegmentStore
from .memory import aligned_bytes
from .segment import SegmentReader, read_head

_WINDOW_BYTES = 16 << 20


@dataclass
class VerifyReport:
    """What `verify` found. `bad` names each damaged segment and says why; `removed` are those of them that are gone."""

    segments: int = 0
    blocks: int = 0
    nbytes: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    unread: int = 0
    """Segments besides, that are of another key than the store's, or only one of the two has a key."""

    @property
    def ok(self) -> bool:
        """Whether every segment that is there is whole."""
        return len(self.bad) == len(self.removed)

    def as_dict(self) -> dict[str, Any]:
        return {"segments": self.segments, "blocks": self.blocks, "bytes": self.nbytes} | {
            "bad": self.bad,
            "removed": self.removed,
            "unread": self.unread,
        }


@dataclass
class GcReport:
    """What `gc` deleted."""

    expired: int = 0
    damaged: int = 0
    temporary_bytes: int = 0
    evicted: int = 0

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def verify(store: SegmentStore, *, progress: bool = False, repair: bool = False) -> VerifyReport:
    """Read every segment from disk and compare every checksum.

    Args:
        store: nothing in it is changed, unless it is to be repaired.
        progress: whether to show a progress bar.
        repair: whether damaged segments are removed, to be computed and stored again when they are next asked for.
            What failed to read for another reason than damage stays.

    Raises:
        StoreError: the folder cannot be listed.
    """
    report = VerifyReport()
    sizes: dict[Path, int] = {}
    try:
        files = sorted(store.segment_files())
    except OSError as error:
        raise StoreError(f"{store.segments_dir} cannot be listed ({error.strerror}); check the disk") from error
    for path in files:
        with suppress(FileNotFoundError):
            sizes[path] = path.lstat().st_size
    bar = tqdm(
        total=sum(sizes.values()), unit="iB", unit_scale=True, unit_divisor=1024, desc="verify", disable=not progress
    )
    for path in sizes:
        report.segments += 1
        try:
            reader = SegmentReader(path, store.engine, True, store.cipher)
            if reader.id != path.stem:
                raise FormatError(f"{path.name} calls itself {reader.id}")
            bar.update(reader.header.blocks.offset)
            for nbytes, blocks in _read_all(reader):
                report.blocks += blocks
                report.nbytes += nbytes
                bar.update(nbytes)
        except (NotOursError, FileNotFoundError) as error:
            report.segments -= 1  # not ours to judge, or evicted meanwhile
            report.unread += isinstance(error, OtherKeyError)
        except (FormatError, IntegrityError, OSError) as error:
            report.bad[path.stem] = str(error)
            if repair and not isinstance(error, OSError) and store.remove([path.stem]):
                report.removed.append(path.stem)
    bar.close()
    return report


def _read_all(reader: SegmentReader) -> Iterator[tuple[int, int]]:
    """Read all blocks, window by window; yields the bytes and blocks of each."""
    for index, lane in enumerate(reader.shape.lanes):
        step = max(1, _WINDOW_BYTES // lane.block_bytes)
        memory = aligned_bytes(min(step, reader.shape.chunks) * lane.block_bytes).view(-1, lane.block_bytes)
        for first in range(0, reader.shape.chunks, step):
            count = min(step, reader.shape.chunks - first)
            window: torch.Tensor = memory[:count]
            done: Future = reader.read(index, [(first, window)])
            done.result()
            yield window.numel(), count


def gc(store: SegmentStore, *, dry_run: bool = False) -> GcReport:
    """Delete what no request can use: expired and damaged segments, files of dead writers, what is over the quota.

    Args:
        store: is brought in line with its files first.
        dry_run: whether nothing is deleted; the report says what would be.

    Raises:
        StoreError: it is not to be found out what is pinned, or another process does not let go of the store's lock.
    """
    report = GcReport()
    with store.locked():
        report.temporary_bytes = quota.clean_tmp(store, dry_run)
        store.scan()
        try:
            pinned = store.pinned()
        except OSError as error:
            raise StoreError(f"{store.pins_dir} cannot be listed ({error.strerror}); check the disk") from error
        rows = {row.id: row for row in store.ask(Catalogue.all, [])}
        expired = [row.id for row in store.ask(lambda c: c.expired(time.time()), []) if row.id not in pinned]
        damaged = [row.id for row in rows.values() if row.usable_links == 0 and row.id not in expired]
        unreadable = [path for path in store.unlisted if _is_damaged(path)]
        report.expired, report.damaged = len(expired), len(damaged) + len(unreadable)
        freed = sum(rows[name].nbytes for name in (*expired, *damaged)) + sum(map(quota.disk_bytes, unreadable))
        if dry_run:
            freed += report.temporary_bytes
        else:
            report.expired = store.remove(expired)
            report.damaged = store.remove([*damaged, *(path.stem for path in unreadable)])
            store.counters.add("expired_segments", report.expired)
            freed = 0
        limit = store.limits.quota
        if limit is not None and (used := quota.used_bytes(store) - freed) > limit * store.limits.high:
            victims = quota.victims(store, used - int(limit * store.limits.low), but={*expired, *damaged})
            report.evicted = len(victims)
            if not dry_run:
                quota.evict(store, victims)
        store.scan()
    return report


def _is_damaged(path: Path) -> bool:
    """Whether a file can never be read, rather than not by this version or not now."""
    if path.is_dir() and not path.is_symlink():
        return False  # not of our making
    try:
        read_head(path)
    except NotOursError:
        return False
    except FormatError:
        return True
    except OSError:
        return False
    return False
