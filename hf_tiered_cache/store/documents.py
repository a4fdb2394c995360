"""Documents of a store: a small record per label, which lists the passages of a text. Independent of KV.

<root>/documents/<name>.json

A record identifies passages by their content, so it stays valid if their layout changes. Two labels may share a
passage: its KV is stored once, and deleted with the last label. Code that changes records reads and writes them under
the store's lock, so that no process deletes a passage that another one has just added. A lost record costs no KV.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from . import HASH_BYTES
from .catalogue import SegmentRow
from .kinds import DOCUMENT, FileKind, record_name
from .records import Record, Records


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


@dataclass(frozen=True)
class DocumentRecord(Record):
    """Stored record of a label. For fields that it has in common with its entry see there."""

    kind: ClassVar[FileKind] = DOCUMENT
    subject: ClassVar[str] = "a document"

    label: str
    fingerprint: str
    made: str
    passages: tuple[str, ...]
    """Names (see `passage_name`) of the passages that are long enough to be stored, in the order of the text."""
    tokens: int
    created: float
    changed: float
    leaving: tuple[str, ...] = ()
    """Names of previous passages that are still to be deleted, unless another label uses them."""
    model: Mapping[str, str] = field(default_factory=dict)

    def in_place_of(self, before: DocumentRecord | None) -> DocumentRecord:
        """Return this record with what follows from the previous record of the label, or None."""
        if before is None:
            return self
        leaving = {*before.passages, *before.leaving} - set(self.passages)
        return replace(self, created=before.created, leaving=tuple(sorted(leaving)))


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
    """Time when the label was first stored, in Unix seconds."""
    changed: float

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serializable dict."""
        return asdict(self)


class Documents(Records[DocumentRecord]):
    """Documents of a store. Whoever changes records holds the store's lock."""

    record = DocumentRecord

    def all(self) -> list[DocumentRecord]:
        """Return all readable records, sorted by label. Raises OSError if they cannot be listed."""
        return sorted(super().all(), key=lambda record: record.key)

    def listed(self, rows: Iterable[SegmentRow]) -> list[DocumentInfo]:
        """Return the listing entries of all documents, sorted by label, given the rows of all stored segments."""
        stored_rows, records = by_passage(rows), self.all()
        num_uses = Counter(name for record in records for name in set(record.passages))
        return [_describe(record, stored_rows, num_uses) for record in records]

    def only_of(self, leaving: Iterable[DocumentRecord], names: Iterable[str]) -> set[str]:
        """Return those passages that no record uses but those in `leaving`. Raises FormatError or OSError."""
        unused = set(names)
        for record in self.naming(unused.copy(), but={record_name(*record.key) for record in leaving}):
            unused.difference_update(record.passages)
        return unused

    def sweep(self, rows: Iterable[SegmentRow], dry_run: bool = False) -> list[str]:
        """Delete records that are blank or have no stored passage left. See `_sweep`."""
        stored_names = by_passage(rows).keys()

        def is_needed(_: str, record: DocumentRecord | None) -> bool:
            return record is not None and not stored_names.isdisjoint((*record.passages, *record.leaving))

        return self._sweep(is_needed, dry_run)


def _describe(
    record: DocumentRecord, stored_rows: Mapping[str, Collection[SegmentRow]], num_uses: Mapping[str, int]
) -> DocumentInfo:
    rows = {name: stored_rows[name] for name in record.passages if name in stored_rows}
    segments = [row for layouts in rows.values() for row in layouts]
    tokens = sum(max(0 if row.is_expired else row.usable_tokens for row in layouts) for layouts in rows.values())
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
        shared=sum(num_uses[name] > 1 for name in record.passages),
        created=record.created,
        changed=record.changed,
    )
