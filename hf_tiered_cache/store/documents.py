"""Documents of a store: a small record per label, which lists the passages of a text. Independent of KV.

<root>/documents/<name>.json

A record identifies passages by their content, so it stays valid if their layout changes. Two labels may share a
passage: its KV is stored once, and deleted with the last label. Code that changes records reads and writes them under
the store's lock, so that no process deletes a passage that another one has just added. A lost record costs no KV.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ConfigError, FormatError, NewerFormatError
from . import HASH_BYTES
from .catalogue import SegmentRow
from .kinds import DOCUMENT, RECORD_SUFFIX, encode_record, name_of
from .records import RecordFiles, Records, Room, are_times, decoded

FORMAT_VERSION = 1
MOST_LETTERS = 1000
"""Maximum length of a label in characters."""
_NAME = re.compile("[0-9a-f]{32}")


def passage_name(chain: bytes) -> str:
    """Return 32 hexadecimal digits that identify a passage's tokens, model and provenance, from all prefix hashes."""
    return hashlib.blake2b(chain, digest_size=HASH_BYTES).hexdigest()


def by_passage(rows: Iterable[SegmentRow]) -> dict[str, list[SegmentRow]]:
    """Group the segments of passages by passage name: one each, or several if a passage has several layouts."""
    rows_by_passage: dict[str, list[SegmentRow]] = {}
    for row in rows:
        if row.scan:  # only passages have scan hashes
            rows_by_passage.setdefault(passage_name(row.chain), []).append(row)
    return rows_by_passage


def check_label(label: str) -> None:
    """Raise ConfigError if the label is invalid."""
    if not isinstance(label, str) or not 0 < len(label) <= MOST_LETTERS:
        raise ConfigError(f"a document's label must be a str of 1 to {MOST_LETTERS} characters, not {label!r:.80}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the label {label!r:.80} is not valid Unicode") from None


@dataclass(frozen=True)
class DocumentRecord:
    """Stored record of a label."""

    label: str
    fingerprint: str
    """Fingerprint of the model that computed it."""
    made: str
    """Provenance of the passages, and the token that preceded them."""
    passages: tuple[str, ...]
    """Names (see `passage_name`) of the passages that are long enough to be stored, in the order of the text."""
    tokens: int
    """Number of tokens of these passages."""
    created: float
    """Time when the label was first stored, in Unix seconds."""
    changed: float
    leaving: tuple[str, ...] = ()
    """Names of previous passages that are still to be deleted, unless another label uses them."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Human-readable description of the model."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique key of the record: label, fingerprint and `made`."""
        return self.label, self.fingerprint, self.made

    def encode(self) -> bytes:
        """Return the content of the record's file."""
        facts = asdict(self) | {"format": FORMAT_VERSION, "passages": list(self.passages), "model": dict(self.model)}
        return encode_record(facts | {"leaving": list(self.leaving)})

    @classmethod
    def decode(cls, data: bytes) -> DocumentRecord:
        """Decode the content of a file. Raises FormatError."""
        with decoded(data, FORMAT_VERSION, "a document") as facts:
            record = cls(**{name: facts[name] for name in cls.__dataclass_fields__})
            record = replace(
                record, passages=tuple(record.passages), leaving=tuple(record.leaving), model=dict(record.model)
            )
            texts = [*record.key, *record.model, *record.model.values()]
            sound = all(isinstance(text, str) for text in texts)
            sound &= all(map(_NAME.fullmatch, (*record.passages, *record.leaving)))
            sound &= type(record.tokens) is int and 0 <= record.tokens < 1 << 63
            sound &= are_times(record.created, record.changed)
        if not sound:
            raise FormatError("not a valid record of a document")
        return record


@dataclass(frozen=True)
class DocumentInfo:
    """Listing entry of a document of a store."""

    label: str
    model: dict[str, str]
    """Human-readable description of the model that computed it."""
    fingerprint: str
    made: str
    """Provenance of the passages, and the token that preceded them."""
    passages: int
    """Number of passages that it was stored as."""
    tokens: int
    """Number of tokens of these passages."""
    tokens_there: int
    """Number of these tokens that are still stored."""
    bytes: int
    """Bytes that its passages take on disk now; a shared passage counts in each document."""
    segments: list[str]
    """Ids of its segments, in order."""
    evicted: int
    """Number of its passages that are no longer stored."""
    shared: int
    """Number of its passages that another label also uses."""
    created: float
    changed: float

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serializable dict."""
        return asdict(self)


class Documents:
    """Documents of a store.

    Args:
        files: small files of the store.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._records = Records(
            files, DOCUMENT, DocumentRecord.encode, DocumentRecord.decode, lambda record: _file_name(record.key)
        )

    def read(self, key: tuple[str, str, str]) -> DocumentRecord | None:
        """Return a record, or None if there is no readable one."""
        return self._records.get(_file_name(key))

    def all(self, label: str | None = None) -> list[DocumentRecord]:
        """Return the readable records of one label or of all labels, sorted by label."""
        records = [record for record in self._records.all() if label in (None, record.label)]
        return sorted(records, key=lambda record: record.key)

    def listed(self, rows: Iterable[SegmentRow], label: str | None = None) -> list[DocumentInfo]:
        """Return the listing entries of documents, sorted by label.

        Args:
            rows: rows of all stored segments.
            label: label of the documents; None for all.
        """
        stored_rows, records = by_passage(rows), self.all()
        named: dict[str, int] = {}
        for record in records:
            for name in set(record.passages):
                named[name] = named.get(name, 0) + 1
        return [_describe(record, stored_rows, named) for record in records if label in (None, record.label)]

    def only_of(self, leaving: Iterable[DocumentRecord], names: Iterable[str]) -> set[str]:
        """Return the given passages that no record uses, except the records to be deleted.

        Args:
            leaving: records to be deleted.
            names: names of passages.

        Raises:
            NewerFormatError: there is a record that this version cannot read. OSError: one cannot be read now.
        """
        keys, unused = {record.key for record in leaving}, set(names)
        with suppress(FileNotFoundError):
            self._spare(keys, unused)
        return unused

    def _spare(self, keys: Collection[tuple[str, str, str]], unused: set[str]) -> None:
        """Remove from `left` the passages of all records except those with `keys`. Raises as `only_of`."""
        for name in self._records.files.names(DOCUMENT) if unused else ():
            try:
                record = self._records.read(name)
            except NewerFormatError:
                raise
            except (FormatError, FileNotFoundError):
                continue
            if record.key not in keys:
                unused.difference_update(record.passages)

    def write(self, records: Sequence[DocumentRecord], room: Room) -> None:
        """Write records in place of the previous ones (see `Records.write`). The caller holds the store's lock."""
        self._records.write(records, room)

    def forget(self, records: Iterable[DocumentRecord]) -> None:
        """Delete records; their passages stay. The caller holds the store's lock. Raises OSError."""
        for record in records:
            self._records.delete(_file_name(record.key))

    def sweep(self, rows: Iterable[SegmentRow], dry_run: bool = False) -> list[str]:
        """Delete records that are damaged or have no passage left. The caller holds the store's lock.

        Args:
            rows: rows of all stored segments.
            dry_run: whether to delete nothing.

        Returns:
            Paths of the deleted records, or with `dry_run` of those to be deleted.
        """
        stored = by_passage(rows).keys()
        return self._records.sweep(
            lambda record: not stored.isdisjoint((*record.passages, *record.leaving)), lambda name: False, dry_run
        )


def _file_name(key: tuple[str, str, str]) -> str:
    """Return the name of the file of a record (see `DocumentRecord.key`)."""
    return name_of("\0".join(key)) + RECORD_SUFFIX


def changed(
    before: DocumentRecord | None,
    key: tuple[str, str, str],
    passages: Sequence[str],
    tokens: int,
    model: Mapping[str, str],
) -> DocumentRecord:
    """Create the record of a label that is now stored as these passages, in place of the record `before`."""
    now = time.time()
    leaving: set[str] = set() if before is None else {*before.passages, *before.leaving} - set(passages)
    created = now if before is None else before.created
    return DocumentRecord(*key, tuple(passages), tokens, created, now, tuple(sorted(leaving)), dict(model))


def _describe(
    record: DocumentRecord, stored_rows: Mapping[str, Collection[SegmentRow]], named: Mapping[str, int]
) -> DocumentInfo:
    rows = {name: stored_rows[name] for name in record.passages if name in stored_rows}
    segments = [row for layouts in rows.values() for row in layouts]
    tokens = sum(max(_usable(row) for row in layouts) for layouts in rows.values())
    return DocumentInfo(
        label=record.label,
        model=dict(record.model),
        fingerprint=record.fingerprint,
        made=record.made,
        passages=len(record.passages),
        tokens=record.tokens,
        tokens_there=min(tokens, record.tokens),
        bytes=sum(row.nbytes for row in segments),
        segments=[row.id for row in segments],
        evicted=sum(name not in rows for name in record.passages),
        shared=sum(named[name] > 1 for name in record.passages),
        created=record.created,
        changed=record.changed,
    )


def _usable(row: SegmentRow) -> int:
    """Return the number of tokens of a segment that can be restored."""
    if row.expires is not None and row.expires <= time.time():
        return 0
    return row.tokens * row.valid_hashes // (len(row.chain) // HASH_BYTES)
