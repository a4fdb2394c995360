"""Maintenance of a store: verification of all checksums, garbage collection, and what a deletion would leave."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from ..errors import (
    FormatError,
    IntegrityError,
    NotOursError,
    OtherFormatError,
    OtherKeyError,
    as_store_error,
    reason_of,
)
from .catalogue import SegmentRow
from .conversations import Conversations
from .disk import SegmentStore
from .documents import Documents
from .format import HEADER_BYTES, decode_times
from .memory import aligned_bytes
from .records import Calibrations
from .segment import SegmentReader, read_head

_WINDOW_BYTES = 16 << 20


@dataclass
class VerifyReport:
    """Result of `verify`.

    `bad` maps damaged or unreadable segments, sidecars and records to the reason, and `removed` lists those that were
    deleted. A sidecar is named after its segment, followed by a dot and its kind, a record by its path in the store.
    """

    segments: int = 0
    blocks: int = 0
    nbytes: int = 0
    sidecars: int = 0
    """Number of sidecar files."""
    records: int = 0
    """Number of records of conversations and documents, and files of calibrations."""
    bad: dict[str, str] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    """Files in `bad` that could not be read, such as for lack of permission. A repair keeps them."""
    removed: list[str] = field(default_factory=list)
    unread: int = 0
    """Number of segments that were not read: encrypted with another key, or only one of segment and store has a key."""
    other_format: int = 0
    """Number of segments and records that were not read because this process does not know their format or codec."""
    unknown: list[str] = field(default_factory=list)
    """Files in the store's folder that this library did not write. They are ignored, and do not count as damaged."""

    @property
    def ok(self) -> bool:
        """True if no damaged or unreadable files are left."""
        return len(self.bad) == len(self.removed)

    def as_dict(self) -> dict[str, Any]:
        return {"bytes" if name == "nbytes" else name: value for name, value in vars(self).items()}


@dataclass
class GcReport:
    """Result of `gc`."""

    expired: int = 0
    damaged: int = 0
    temporary_bytes: int = 0
    """Bytes of unfinished files of dead writers, and of sidecars without a segment."""
    evicted: int = 0
    freed_bytes: int = 0
    """Bytes of all that was deleted, except conversations and documents."""
    not_evicted: str = ""
    """Why no segments were evicted, although the store is above its quota."""
    conversations: int = 0
    """Number of conversations without remaining segments."""
    documents: int = 0
    """Number of labels without remaining segments."""
    deleted: dict[str, str] = field(default_factory=dict)
    """Reason of the deletion by path. Sidecars that were deleted with their segment are left out."""
    unreadable: list[str] = field(default_factory=list)
    """Segments that could not be read, with the reasons. They are kept, and so are records that may name them."""
    unknown: list[str] = field(default_factory=list)
    """Files in the store's folder that this library did not write. They are ignored."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def verify(store: SegmentStore, *, progress: bool = False, repair: bool = False) -> VerifyReport:
    """Read all segments, sidecars and records from disk, and verify every checksum. See `KVStore.verify`.

    Files that could not be read for another reason than damage are kept. Raises StoreError if the folder cannot be
    listed, or the store to `repair` is not writable.
    """
    report, backend = VerifyReport(), store.backend
    if repair:
        store.check_writable()
    with as_store_error(f"{store.place} cannot be listed"):
        report.unknown = backend.unknown()
        foreign = {os.path.join(store.place, path) for path in report.unknown}
        names = [name for name in sorted(backend.names()) if backend.where(name) not in foreign]
        stored_by_id = {segment_id: backend.find(segment_id) for segment_id in names}
        sidecars = [name for name in backend.sidecars() if backend.where(name) not in foreign]
        all_records: list[tuple[Conversations | Documents | Calibrations, list[str]]] = [
            (records, records.names())
            for records in (Conversations(backend.records), Documents(backend.records), Calibrations(backend.records))
        ]
    sizes = {segment_id: stored.size for segment_id, stored in stored_by_id.items() if stored is not None}
    bar = tqdm(
        total=sum(sizes.values()), unit="iB", unit_scale=True, unit_divisor=1024, desc="verify", disable=not progress
    )
    for name in [*sizes, *sorted(sidecars)]:
        is_segment = name in sizes
        try:
            if is_segment:
                reader = SegmentReader(backend, name, True, store.cipher)
                row = store.index.row(name)
                if row is not None and not row.fits(reader.header, reader.chain):
                    store.index.read_again(name)
                bar.update(reader.header.blocks.offset)
                for nbytes, blocks in _read_all(reader):
                    report.blocks += blocks
                    report.nbytes += nbytes
                    bar.update(nbytes)
            else:
                report.nbytes += store.sidecars.check(name)
        except (NotOursError, FileNotFoundError) as error:  # of another key or format, or evicted meanwhile
            report.unread += is_segment and isinstance(error, OtherKeyError)
            report.other_format += is_segment and isinstance(error, OtherFormatError)
            continue
        except (FormatError, IntegrityError, OSError) as error:
            report.bad[name] = reason_of(error, names_file=False)
            report.unreadable += [name] * isinstance(error, OSError)
            if repair and not isinstance(error, OSError):
                report.removed += [name] * (store.remove([name]) if is_segment else backend.delete(name))
        report.segments += is_segment
        report.sidecars += not is_segment
    bar.close()
    with backend.locked() if repair else nullcontext():  # nobody replaces a record before it is removed
        for records, names in all_records:
            for name in names:
                _verify_record(records, name, report, repair)
    report.unknown = [path for path in report.unknown if path not in report.bad]
    return report


def _verify_record(
    records: Conversations | Documents | Calibrations, name: str, report: VerifyReport, repair: bool
) -> None:
    path = os.path.join(records.kind.folder, name)
    try:
        report.nbytes += records.check(name)
    except (NotOursError, FileNotFoundError) as error:
        report.other_format += isinstance(error, OtherFormatError)
        return
    except (FormatError, OSError) as error:
        report.bad[path] = reason_of(error, names_file=False)
        report.unreadable += [path] * isinstance(error, OSError)
        if repair and not isinstance(error, OSError) and records.files.delete(records.kind, name):
            report.removed.append(path)
    report.records += 1


def check(store: SegmentStore, segment_id: str) -> None:
    """Read a segment and verify its checksums, unless it has another key.

    Raises FormatError, IntegrityError or OSError.
    """
    with suppress(OtherKeyError):
        for _ in _read_all(SegmentReader(store.backend, segment_id, True, store.cipher)):
            pass


def _read_all(reader: SegmentReader) -> Iterator[tuple[int, int]]:
    """Read all blocks in windows of `_WINDOW_BYTES`. Yields the bytes and number of blocks of each window."""
    for index, block_group in enumerate(reader.shape.block_groups):
        step = max(1, _WINDOW_BYTES // block_group.block_bytes)
        chunks = reader.shape.chunks_in(block_group)
        memory = aligned_bytes(min(step, chunks) * block_group.block_bytes).view(-1, block_group.block_bytes)
        for first in range(0, chunks, step):
            count = min(step, chunks - first)
            reader.read(index, [(first, memory[:count])]).result()
            yield count * block_group.block_bytes, count


def gc(store: SegmentStore, replaced: Mapping[str, int] | None = None, *, dry_run: bool = False) -> GcReport:
    """Delete expired and damaged segments, and unfinished files of dead writers, and evict segments above the quota.

    Nothing is evicted if that would not be enough, as in `Space.make_room`. Segments that cannot be read are kept. With
    `dry_run`, only report what would be deleted. The catalogue is first synchronized with the files. `replaced` are
    segments that the caller has deleted, or with `dry_run` would have, and their bytes with sidecars. Raises StoreError
    if the pins cannot be listed, the store is not writable, or another process holds its lock.
    """
    report, replaced = GcReport(), replaced or {}
    if not dry_run:
        store.check_writable()
    with store.backend.locked():
        unfinished, orphans = store.clean_up(dry_run), store.sidecars.sweep(dry_run)
        report.temporary_bytes = sum(unfinished.values()) + sum(orphans.values())
        report.deleted |= dict.fromkeys(unfinished, "unfinished") | dict.fromkeys(
            orphans, "its segment no longer exists"
        )
        store.index.scan()
        with as_store_error(f"{store.place}: pins cannot be listed"):
            pinned = store.backend.pinned()
        store.correct_sizes()
        rows = {row.id: row for row in store.index.rows() if row.id not in replaced}
        unreadable = dict(store.index.unreadable)
        expired = [row.id for row in rows.values() if _is_expired(store, row) and row.id not in pinned]
        expired = _readable(store, expired, unreadable)
        useless = [row.id for row in rows.values() if row.valid_hashes == 0 and row.id not in expired]
        damaged = [segment_id for segment_id in useless if _begins_damaged(store, segment_id)]
        damaged += unlisted_damaged(store)
        report.expired, report.damaged = len(expired), len(damaged)
        report.deleted |= _files(store, expired, "expired") | _files(store, damaged, "damaged")
        sidecars, spared_ids = store.sidecars.by_segment(), {*expired, *damaged, *replaced}
        report.freed_bytes = report.temporary_bytes + sum(replaced.values())
        for name in (*expired, *damaged):
            report.freed_bytes += rows[name].nbytes if name in rows else store.nbytes_of(name)
            report.freed_bytes += sidecars.get(name, 0)
        if not dry_run:
            report.expired = store.remove(expired, "expired_segments")
            report.damaged = store.remove(damaged)
        quota = store.limits.quota
        usage = 0 if quota is None else store.used_bytes() - (report.freed_bytes if dry_run else 0)
        if quota is not None and (over := store.limits.overflow(usage)) > 0:
            while True:
                candidates, num_unreadable = store.victims(over, but=spared_ids | unreadable.keys()), len(unreadable)
                _readable(store, [name for name, _ in candidates], unreadable)
                if len(unreadable) == num_unreadable:
                    break
            floor = usage - sum(nbytes for _, nbytes in candidates)
            if floor > quota:
                report.not_evicted = (
                    f"without its unpinned segments, {store.place} would still use {floor} bytes, more than the quota "
                    f"of {quota}, so none is evicted; raise the quota, or unpin segments"
                )
            else:
                victims = [name for name, _ in candidates]
                report.evicted, report.freed_bytes = len(victims), report.freed_bytes + usage - floor
                report.deleted |= _files(store, victims, "least recently used")
                if not dry_run:
                    store.remove(victims, "evicted_segments")
        store.index.scan()
        report.unreadable = sorted(unreadable.values())
        with suppress(OSError):
            report.unknown = store.backend.unknown(rows.keys())
    return report


def _readable(store: SegmentStore, ids: Iterable[str], unreadable: dict[str, str]) -> list[str]:
    """Return the segments that can be read to be deleted, and add the others, with the reasons, to `unreadable`."""
    readable = []
    for segment_id in ids:
        try:
            store.backend.is_own(segment_id)
            readable.append(segment_id)
        except OSError as error:
            place = store.backend.where(segment_id)
            unreadable[segment_id] = f"{place} cannot be read ({error.strerror or error})"
    return readable


def _files(store: SegmentStore, ids: Iterable[str], reason: str) -> dict[str, str]:
    return {store.backend.where(segment_id): reason for segment_id in ids}


def _is_expired(store: SegmentStore, row: SegmentRow) -> bool:
    """Return whether a segment has expired, as its row says. If its file says otherwise, its row is read again."""
    if row.is_expired:
        with suppress(FormatError, OSError):
            _, page = store.backend.head(row.id, lambda stored, page: HEADER_BYTES)
            if row.has_times(*decode_times(page)):
                return True
            store.index.adopt([row.id])
    return False


def _begins_damaged(store: SegmentStore, segment_id: str) -> bool:
    """Return whether the first blocks of a segment are damaged. If they are intact, its row is read again."""
    try:
        for _ in _read_all(SegmentReader(store.backend, segment_id, True, store.cipher)):
            pass
    except IntegrityError as error:
        if not error.valid_hashes:
            return True
    except (FormatError, OSError):  # such as another key
        return False
    store.index.adopt([segment_id])
    return False


def _is_damaged(store: SegmentStore, segment_id: str) -> bool:
    """Return whether a segment is permanently unreadable, as opposed to another format or a temporary read error."""
    try:
        if store.backend.is_own(segment_id):
            read_head(store.backend.head, segment_id)
    except (FormatError, OSError) as error:
        return isinstance(error, FormatError) and not isinstance(error, NotOursError)
    return False


def unlisted_damaged(store: SegmentStore) -> list[str]:
    """Return the ids of the library's segments that are too damaged to have a row."""
    return [segment_id for segment_id in store.index.unlisted if _is_damaged(store, segment_id)]


def unlisted_intact(store: SegmentStore) -> set[str]:
    """Return the ids of stored segments without rows that may be intact: records that may name them are kept.

    They are of another format, or cannot be read.
    """
    return {name for name in store.index.unlisted if store.index.is_stored(name) and not _is_damaged(store, name)}


def continuing(store: SegmentStore, rows: Collection[SegmentRow]) -> list[SegmentRow]:
    """Return the segments that continue these, directly or indirectly. Unreadable segments are skipped."""
    ids, ends = {row.id for row in rows}, {(row.fingerprint, end) for row in rows for end in row.hashes}
    continuing_rows = []
    for row in sorted(store.index.rows(), key=lambda row: row.position):
        if row.id in ids or not row.position:
            continue
        with suppress(FormatError, OSError):
            parent = read_head(store.backend.head, row.id).header.parent
            if (row.fingerprint, parent) in ends:
                continuing_rows.append(row)
                ends |= {(row.fingerprint, end) for end in row.hashes}
    return continuing_rows
