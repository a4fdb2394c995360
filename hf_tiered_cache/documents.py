"""Documents of a store: entering, replacing and deleting them, with the passages that no other label names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from .errors import ConfigError, FormatError, StoreError
from .geometry import ALIGNMENT, aligned
from .storage import Storage
from .store.catalogue import SegmentRow
from .store.documents import DocumentInfo, DocumentRecord, by_passage, changed


class Entry(NamedTuple):
    """A label, and what is stored under it from now on."""

    key: tuple[str, str, str]
    """Label, fingerprint, and how the passages were computed (see `DocumentRecord`)."""
    passages: tuple[str, ...]
    tokens: int
    model: Mapping[str, str]


def enter_documents(storage: Storage, entries: Sequence[Entry]) -> int:
    """Let labels stand for what was stored for them, and delete what they stood for, unless others name it, too.

    A label stands for the old passages or for the new ones, whoever is killed when; what was to be deleted then is
    deleted by `gc`, or when the label is entered again.

    Args:
        entries: whose passages are durable.

    Returns:
        How many segments were deleted.

    Raises:
        StoreError, OSError: not all labels were entered.
    """
    if not entries:
        return 0
    if not storage.disk.backend.writable:
        raise StoreError(f"{storage.path} cannot be written, so no labels are kept")
    documents = storage.documents
    with storage.disk.backend.locked():
        records = [changed(documents.read(key), key, names, tokens, model) for key, names, tokens, model in entries]
        own = {name for record in records for name in record.passages}
        spared = [row.id for row in rows_of(storage, own)]
        storage.disk.make_room(sum(aligned(len(record.encode()), ALIGNMENT) for record in records), spared)
        documents.write(records, _there)
        return _settle(storage, [record for record in records if record.leaving])


def documents_of(storage: Storage, label: str | None) -> list[DocumentInfo]:
    """What is known of this label, or of all."""
    return storage.documents.listed(storage.segments(), label)


def find_documents(storage: Storage, labels: Collection[str]) -> list[DocumentRecord]:
    """The records of labels. Raises ConfigError: there is none of one."""
    found = [record for record in storage.documents.all() if record.label in labels]
    if unknown := set(labels) - {record.label for record in found}:
        raise ConfigError(f"no document is called {min(unknown)!r}; store.documents() lists them")
    return found


def segments_of_documents(storage: Storage, labels: Collection[str]) -> list[SegmentRow]:
    """The segments that only these labels name. Raises ConfigError: one is not there."""
    records = find_documents(storage, labels)
    names = {name for record in records for name in (*record.passages, *record.leaving)}
    return rows_of(storage, storage.documents.only_of(records, names))


def remove_documents(storage: Storage, labels: Collection[str]) -> int:
    """Delete documents, and `segments_of_documents`. Returns how many segments went.

    Raises:
        ConfigError: one is not there; then none is deleted.
    """
    storage.check_open()
    storage.disk.check_writable()
    storage.flush()
    with storage.disk.backend.locked():
        records, rows = find_documents(storage, labels), segments_of_documents(storage, labels)
        removed = storage.remove(row.id for row in rows)  # first: killed here, the label still says what it was
        storage.documents.forget(records)
    return removed


def finish_documents(storage: Storage, dry_run: bool = False) -> list[str]:
    """Delete what replaced documents left behind where their process was killed, and records of which nothing is left.

    Returns:
        The files of the records that went, or with `dry_run` would.
    """
    storage.check_open()
    if not dry_run:
        storage.disk.check_writable()
    with storage.disk.backend.locked():
        if not dry_run:
            _settle(storage, [record for record in storage.documents.all() if record.leaving])
        return storage.documents.sweep(storage.segments(), dry_run)


def rows_of(storage: Storage, names: Collection[str]) -> list[SegmentRow]:
    """The segments of these passages."""
    if not names:
        return []
    there = by_passage(storage.segments())
    return [row for name in sorted(names) for row in there.get(name, ())]


def _settle(storage: Storage, records: Sequence[DocumentRecord]) -> int:
    """Delete what these documents leave behind, and note that. Returns how many segments went."""
    if not records:
        return 0
    try:
        only = storage.documents.only_of((), {name for record in records for name in record.leaving})
    except (FormatError, OSError) as error:  # a label that cannot be read may name any of it
        storage.disk.warn("documents", f"what documents were replaced by new ones stays for now: {error}")
        return 0
    removed = storage.remove(row.id for row in rows_of(storage, only))
    storage.documents.write([replace(record, leaving=()) for record in records], _there)
    return removed


@contextmanager
def _there(nbytes: int) -> Iterator[None]:
    """Room that was made for all at once."""
    yield
