"""Looking after a store: verify every byte, collect garbage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import FormatError, IntegrityError, NotOursError, OtherKeyError, StoreError
from .disk import SegmentStore
from .memory import aligned_bytes
from .segment import SegmentReader, read_head

_WINDOW_BYTES = 16 << 20


@dataclass
class VerifyReport:
    """What `verify` found. `bad` names all that is damaged and says why; `removed` are those of them that are gone.

    Arrays beside a segment have its name, a dot and their kind.
    """

    segments: int = 0
    blocks: int = 0
    nbytes: int = 0
    beside: int = 0
    """Files with arrays that belong to segments."""
    bad: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    unread: int = 0
    """Segments besides, that are of another key than the store's, or only one of the two has a key."""
    unknown: list[str] = field(default_factory=list)
    """Files in the store's folder that this library did not write. They are left alone, and are no damage."""

    @property
    def ok(self) -> bool:
        """Whether all that is there is whole."""
        return len(self.bad) == len(self.removed)

    def as_dict(self) -> dict[str, Any]:
        return {"segments": self.segments, "blocks": self.blocks, "bytes": self.nbytes} | {
            "beside": self.beside,
            "bad": self.bad,
            "removed": self.removed,
            "unread": self.unread,
            "unknown": self.unknown,
        }


@dataclass
class GcReport:
    """What `gc` deleted."""

    expired: int = 0
    damaged: int = 0
    temporary_bytes: int = 0
    """What dead writers left unfinished, and what lay beside segments that are gone."""
    evicted: int = 0
    conversations: int = 0
    """Those of which nothing is left."""
    documents: int = 0
    """The same of labels."""
    deleted: dict[str, str] = field(default_factory=dict)
    """The files that these are, with what lies beside segments left out, and why each was deleted."""
    unknown: list[str] = field(default_factory=list)
    """Files in the store's folder that this library did not write. They are left alone."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def verify(store: SegmentStore, *, progress: bool = False, repair: bool = False) -> VerifyReport:
    """Read every segment, and what lies beside it, from disk and compare every checksum.

    Args:
        store: nothing in it is changed, unless it is to be repaired.
        progress: whether to show a progress bar.
        repair: whether what is damaged is removed, to be computed and stored again when it is next asked for.
            What failed to read for another reason than damage stays.

    Raises:
        StoreError: the folder cannot be listed.
    """
    report, backend = VerifyReport(), store.backend
    if repair:
        store.check_writable()
    try:
        report.unknown = backend.unknown()
        foreign = {os.path.join(store.place, path) for path in report.unknown}
        names = [name for name in sorted(backend.names()) if backend.where(name) not in foreign]
        found = {segment_id: backend.find(segment_id) for segment_id in names}
        beside = [f"{segment_id}.{kind}" for segment_id, kinds in store.beside.sizes().items() for kind in kinds]
        beside = [name for name in beside if backend.where(name) not in foreign]
    except OSError as error:
        raise StoreError(f"{store.place} cannot be listed ({error.strerror}); check the disk") from error
    sizes = {segment_id: stored.size for segment_id, stored in found.items() if stored is not None}
    bar = tqdm(
        total=sum(sizes.values()), unit="iB", unit_scale=True, unit_divisor=1024, desc="verify", disable=not progress
    )
    for segment_id in sizes:
        report.segments += 1
        try:
            reader = SegmentReader(backend, segment_id, True, store.cipher)
            bar.update(reader.header.blocks.offset)
            for nbytes, blocks in _read_all(reader):
                report.blocks += blocks
                report.nbytes += nbytes
                bar.update(nbytes)
        except (NotOursError, FileNotFoundError) as error:
            report.segments -= 1  # not ours to judge, or evicted meanwhile
            report.unread += isinstance(error, OtherKeyError)
        except (FormatError, IntegrityError, OSError) as error:
            report.bad[segment_id] = str(error)
            if repair and not isinstance(error, OSError) and store.remove([segment_id]):
                report.removed.append(segment_id)
    bar.close()
    for name in sorted(beside):
        try:
            report.nbytes += store.beside.check(name)
            report.beside += 1
        except (NotOursError, FileNotFoundError):
            pass  # as its segment, which says so
        except (FormatError, IntegrityError, OSError) as error:
            report.beside += 1
            report.bad[name] = str(error)
            if repair and not isinstance(error, OSError) and backend.delete(name):
                report.removed.append(name)
    return report


def _read_all(reader: SegmentReader) -> Iterator[tuple[int, int]]:
    """Read all blocks, window by window; yields the bytes and blocks of each."""
    for index, block_group in enumerate(reader.shape.block_groups):
        step = max(1, _WINDOW_BYTES // block_group.block_bytes)
        chunks = reader.shape.chunks_in(block_group)
        memory = aligned_bytes(min(step, chunks) * block_group.block_bytes).view(-1, block_group.block_bytes)
        for first in range(0, chunks, step):
            count = min(step, chunks - first)
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
    if not dry_run:
        store.check_writable()
    with store.backend.locked():
        unfinished, orphans = store.clean_up(dry_run), store.beside.sweep(dry_run)
        report.temporary_bytes = sum(unfinished.values()) + sum(orphans.values())
        report.deleted |= dict.fromkeys(unfinished, "unfinished") | dict.fromkeys(orphans, "its segment is gone")
        store.index.scan()
        try:
            pinned = store.pinned()
        except OSError as error:
            raise StoreError(f"{store.place}: pins cannot be listed ({error.strerror}); check the disk") from error
        rows = {row.id: row for row in store.index.rows()}
        expired = [row.id for row in store.index.ask(lambda c: c.expired(time.time()), []) if row.id not in pinned]
        damaged = [row.id for row in rows.values() if row.valid_hashes == 0 and row.id not in expired]
        damaged += [segment_id for segment_id in store.index.unlisted if _is_damaged(store, segment_id)]
        report.expired, report.damaged = len(expired), len(damaged)
        report.deleted |= _files(store, expired, "expired") | _files(store, damaged, "damaged")
        if dry_run:
            beside = store.beside.by_segment()
            freed = report.temporary_bytes + sum(beside.get(name, 0) for name in (*expired, *damaged))
            freed += sum(rows[name].nbytes if name in rows else store.nbytes_of(name) for name in (*expired, *damaged))
        else:
            report.expired = store.remove(expired)
            report.damaged = store.remove(damaged)
            store.counters.add("expired_segments", report.expired)
            freed = 0
        over = 0 if store.limits.quota is None else store.limits.overflow(store.used_bytes() - freed)
        if over > 0:
            victims = store.victims(over, but={*expired, *damaged})
            report.evicted = len(victims)
            report.deleted |= _files(store, [name for name, _ in victims], "least recently used")
            if not dry_run:
                store.evict(victims)
        store.index.scan()
        with suppress(OSError):
            report.unknown = store.backend.unknown(rows.keys())
    return report


def _files(store: SegmentStore, ids: Iterable[str], reason: str) -> dict[str, str]:
    return {store.backend.where(segment_id): reason for segment_id in ids}


def _is_damaged(store: SegmentStore, segment_id: str) -> bool:
    """Return whether this is a segment that can never be read, rather than not by this version or not now."""
    try:
        if not store.backend.is_own(segment_id):
            return False
        read_head(partial(store.backend.head, segment_id))
    except NotOursError:
        return False
    except FormatError:
        return True
    except OSError:
        return False
    return False
