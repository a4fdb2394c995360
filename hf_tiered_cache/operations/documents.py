"""Documents of a store: adding, replacing and deleting labels, and the passages that no other label names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ..cache.storage import Storage
from ..errors import ConfigError, StoreError
from ..store.catalogue import SegmentRow
from ..store.documents import DocumentRecord, by_passage
from ..store.geometry import ALIGNMENT, aligned
from ..store.maintain import unlisted_intact

BATCH_TOKENS = 4096
"""Maximum number of tokens computed in one pass, for passages of equal length."""


def enter_documents(storage: Storage, records: Sequence[DocumentRecord]) -> int:
    """Save the records of labels, and delete replaced passages unless other labels name them; return their number.

    The new passages must be durable. At any time, a label names either its old or its new passages, even if a process
    is killed. In that case, `gc` or the next save of the label deletes the replaced passages. Raises StoreError or
    OSError if not all labels were saved.
    """
    if not records:
        return 0
    if not storage.disk.backend.writable:
        raise StoreError(f"{storage.place} is not writable, so labels cannot be saved")
    documents = storage.documents
    with storage.disk.backend.locked():
        records = [record.in_place_of(documents.read(*record.key)) for record in records]
        passage_names = {name for record in records for name in record.passages}
        kept_ids = [row.id for row in rows_of(passage_names, storage.disk.index.rows())]
        storage.disk.make_room(sum(aligned(len(record.encode()), ALIGNMENT) for record in records), kept_ids)
        documents.write(records)
        return _delete_replaced(storage, [record for record in records if record.leaving])


def find_documents(storage: Storage, labels: Collection[str]) -> list[DocumentRecord]:
    """Return the records of labels. Raise ConfigError if a label has none."""
    records = [record for record in storage.documents.all() if record.label in labels]
    if unknown := set(labels) - {record.label for record in records}:
        raise ConfigError(f"document {min(unknown)!r} does not exist; store.documents() lists all documents")
    return records


def segments_of_documents(storage: Storage, labels: Collection[str]) -> list[SegmentRow]:
    """Return the segments that only these labels name. Raise ConfigError if a label does not exist."""
    records = find_documents(storage, labels)
    names = {name for record in records for name in (*record.passages, *record.leaving)}
    return rows_of(storage.documents.only_of(records, names), storage.disk.index.complete_rows())


def remove_documents(storage: Storage, labels: Collection[str]) -> int:
    """Delete documents and the segments that only they name. Return the number of segments deleted.

    Raises ConfigError if a label does not exist; then nothing is deleted.
    """
    storage.disk.check_writable()
    storage.flush()
    with storage.disk.backend.locked():
        records, rows = find_documents(storage, labels), segments_of_documents(storage, labels)
        removed = storage.remove(row.id for row in rows)  # before the records: the process may be killed here
        for record in records:
            storage.documents.delete(*record.key)
    return removed


def finish_documents(storage: Storage, dry_run: bool) -> list[str]:
    """Delete replaced passages that a killed process did not delete, and records without stored passages.

    Return the files of the records that were deleted, or with `dry_run` would be.
    """
    if not dry_run:
        storage.disk.check_writable()
    with storage.disk.backend.locked():
        if not dry_run:
            _delete_replaced(storage, [record for record in storage.documents.all() if record.leaving])
        rows = storage.disk.index.complete_rows(but_unreadable=True)
        # which passages these are is not known
        return [] if unlisted_intact(storage.disk) else storage.documents.sweep(rows, dry_run)


def rows_of(names: Collection[str], rows: Iterable[SegmentRow]) -> list[SegmentRow]:
    """Return the segments of passages, given the names of the passages and the rows of all stored segments."""
    rows_by_passage = by_passage(rows)
    return [row for name in sorted(names) for row in rows_by_passage.get(name, ())]


def _delete_replaced(storage: Storage, records: Sequence[DocumentRecord]) -> int:
    """Delete the replaced passages of these records, and update the records. Return the number of segments deleted."""
    if not records:
        return 0
    try:
        unshared_names = storage.documents.only_of((), {name for record in records for name in record.leaving})
        rows = rows_of(unshared_names, storage.disk.index.complete_rows())
        removed = storage.remove(row.id for row in rows)
    except (StoreError, OSError) as error:  # an unreadable record may name any passage
        storage.disk.warn("documents", f"replaced passages of documents could not be deleted yet: {error}")
        return 0
    storage.documents.write([replace(record, leaving=()) for record in records])
    return removed
