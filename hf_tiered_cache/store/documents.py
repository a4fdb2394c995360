"""Documents of a store: a small record of each label, which says the passages that a text was stored as. Knows no KV.

<root>/documents/<name>.json

A record names passages by what they hold, so that it stands whatever becomes of their layout. Two labels may name the
same passage: its KV is stored once, and goes with the last of them. Records are read and written under the store's
lock by whoever changes them, so that nobody deletes what another has just named. A lost record costs no KV.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ConfigError, FormatError, NewerFormatError
from . import HASH_BYTES
from .catalogue import SegmentRow
from .kinds import DOCUMENT, RECORD_SUFFIX, encode_record, name_of
from .records import are_moments, understood
from .root import StoreRoot

FORMAT_VERSION = 1
MOST_LETTERS = 1000
"""Of a label."""
_NAME = re.compile("[0-9a-f]{32}")


def passage_name(chain: bytes) -> str:
    """32 hexadecimal digits that stand for a passage's tokens, and who computed them how: of all its prefix hashes."""
    return hashlib.blake2b(chain, digest_size=HASH_BYTES).hexdigest()


def by_passage(rows: Iterable[SegmentRow]) -> dict[str, list[SegmentRow]]:
    """The segments of passages, by the passage's name: one each, but for those that were laid out in two ways."""
    found: dict[str, list[SegmentRow]] = {}
    for row in rows:
        if row.scan:  # no other segment has that
            found.setdefault(passage_name(row.chain), []).append(row)
    return found


def check_label(label: str) -> None:
    """Raises ConfigError: it cannot be a document's."""
    if not isinstance(label, str) or not 0 < len(label) <= MOST_LETTERS:
        raise ConfigError(f"a document's label is a text of 1 to {MOST_LETTERS} letters, not {label!r:.80}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the label {label!r:.80} is not valid Unicode") from None


@dataclass(frozen=True)
class DocumentRecord:
    """What is kept of a label."""

    label: str
    fingerprint: str
    """Of the model that computed it."""
    made: str
    """How: the passages' provenance, and the token that stood before them."""
    passages: tuple[str, ...]
    """By name (see `passage_name`), in the order in which they were given; those that are long enough to be stored."""
    tokens: int
    """Of these."""
    created: float
    """When the label was first stored, in Unix seconds."""
    changed: float
    leaving: tuple[str, ...] = ()
    """Passages of what stood here before: they are still to be deleted, unless another label names them."""
    model: Mapping[str, str] = field(default_factory=dict)
    """What is known of the model, in words."""

    @property
    def key(self) -> tuple[str, str, str]:
        """There is one record of a label, a model and a way of computing."""
        return self.label, self.fingerprint, self.made

    def encode(self) -> bytes:
        """The file."""
        facts = asdict(self) | {"format": FORMAT_VERSION, "passages": list(self.passages), "model": dict(self.model)}
        return encode_record(facts | {"leaving": list(self.leaving)})

    @classmethod
    def decode(cls, data: bytes) -> DocumentRecord:
        """What a file says. Raises FormatError."""
        with understood(data, FORMAT_VERSION, "a document") as facts:
            found = cls(**{name: facts[name] for name in cls.__dataclass_fields__})
            found = replace(
                found, passages=tuple(found.passages), leaving=tuple(found.leaving), model=dict(found.model)
            )
            texts = [*found.key, *found.model, *found.model.values()]
            sound = all(isinstance(text, str) for text in texts)
            sound &= all(map(_NAME.fullmatch, (*found.passages, *found.leaving)))
            sound &= type(found.tokens) is int and 0 <= found.tokens < 1 << 63
            sound &= are_moments(found.created, found.changed)
        if not sound:
            raise FormatError("it is no record of a document")
        return found


@dataclass(frozen=True)
class DocumentInfo:
    """A document of a store, as listings show it."""

    label: str
    model: dict[str, str]
    """What is known of the model that computed it."""
    fingerprint: str
    made: str
    """How: the passages' provenance, and the token that stood before them."""
    passages: int
    """That it was stored as."""
    tokens: int
    """Of these."""
    tokens_there: int
    """Of these, those that still are."""
    bytes: int
    """That its passages take on disk now; what other labels name, too, counts in each."""
    segments: list[str]
    """In which it lies, in order."""
    evicted: int
    """Of its passages, how many are gone."""
    shared: int
    """Of its passages, how many another label names, too."""
    created: float
    changed: float

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)


class Documents:
    """The documents of a store.

    Args:
        files: the store's folder.
    """

    def __init__(self, files: StoreRoot) -> None:
        self._files = files

    def read(self, key: tuple[str, str, str]) -> DocumentRecord | None:
        """A record, or None where there is none that can be read."""
        with suppress(OSError, FormatError):
            found = self._read(_record_name(key))
            if found.key == key:
                return found
        return None

    def all(self, label: str | None = None) -> list[DocumentRecord]:
        """Those that can be read, of this label or of all, by label."""
        found = []
        for name in self._names():
            with suppress(OSError, FormatError):
                record = self._read(name)
                if _record_name(record.key) == name and label in (None, record.label):
                    found.append(record)
        return sorted(found, key=lambda record: record.key)

    def listed(self, rows: Iterable[SegmentRow], label: str | None = None) -> list[DocumentInfo]:
        """What is to be said of each, by label.

        Args:
            rows: of all segments that are stored.
            label: of those that are asked for; None for all.
        """
        there, every = by_passage(rows), self.all()
        named: dict[str, int] = {}
        for record in every:
            for name in set(record.passages):
                named[name] = named.get(name, 0) + 1
        return [_describe(record, there, named) for record in every if label in (None, record.label)]

    def only_of(self, gone: Iterable[DocumentRecord], names: Iterable[str]) -> set[str]:
        """Those of these passages that no record names but the ones that go.

        Raises:
            NewerFormatError: there is a record that this version cannot read. OSError: one cannot be read now.
        """
        keys, left = {record.key for record in gone}, set(names)
        with suppress(FileNotFoundError):
            self._spare(keys, left)
        return left

    def _spare(self, keys: Collection[tuple[str, str, str]], left: set[str]) -> None:
        """Take the passages of all records but these out of `left`. Raises as `only_of`."""
        for name in self._files.names(DOCUMENT) if left else ():
            try:
                record = self._read(name)
            except NewerFormatError:
                raise
            except (FormatError, FileNotFoundError):
                continue
            if record.key not in keys:
                left.difference_update(record.passages)

    def write(self, records: Sequence[DocumentRecord], room: Callable[[int], AbstractContextManager[object]]) -> None:
        """Keep records in the place of those before, each whole or not at all, and durable. Under the store's lock.

        Args:
            room: takes care of room for so many bytes, as long as the room is not taken by the file itself.

        Raises:
            OSError: one cannot be written. What `room` raises comes through.
        """
        for record in records:
            self._files.write(DOCUMENT, _record_name(record.key), record.encode(), room)
        if records:
            self._files.sync(DOCUMENT)

    def forget(self, records: Iterable[DocumentRecord]) -> None:
        """Delete records; their passages stay. Under the store's lock. Raises OSError."""
        for record in records:
            self._files.delete(DOCUMENT, _record_name(record.key))

    def sweep(self, rows: Iterable[SegmentRow], dry_run: bool = False) -> list[str]:
        """Delete records that are damaged, or of which nothing is left. Under the store's lock.

        Args:
            rows: of all segments that are stored.
            dry_run: whether nothing is deleted.

        Returns:
            The files of the documents that went, or would.
        """
        there, removed = by_passage(rows).keys(), []
        for name in self._names():
            try:
                record = self._read(name)
                if not there.isdisjoint((*record.passages, *record.leaving)):
                    continue
            except (OSError, NewerFormatError):
                continue
            except FormatError:
                pass
            with suppress(OSError):
                if self._files.is_own(DOCUMENT, name) if dry_run else self._files.delete(DOCUMENT, name):
                    removed.append(str(self._files.where(DOCUMENT, name)))
        return removed

    def _names(self) -> list[str]:
        try:
            return self._files.names(DOCUMENT)
        except OSError:
            return []

    def _read(self, name: str) -> DocumentRecord:
        """Read a record. Raises OSError or FormatError."""
        return DocumentRecord.decode(self._files.read(DOCUMENT, name))


def _record_name(key: tuple[str, str, str]) -> str:
    """Return the name of the file of a record (see `DocumentRecord.key`)."""
    return name_of("\0".join(key)) + RECORD_SUFFIX


def changed(
    before: DocumentRecord | None,
    key: tuple[str, str, str],
    passages: Sequence[str],
    tokens: int,
    model: Mapping[str, str],
) -> DocumentRecord:
    """The record of a label that is stored now as these passages, in the place of what was there `before`."""
    now = time.time()
    leaving: set[str] = set() if before is None else {*before.passages, *before.leaving} - set(passages)
    created = now if before is None else before.created
    return DocumentRecord(*key, tuple(passages), tokens, created, now, tuple(sorted(leaving)), dict(model))


def _describe(
    record: DocumentRecord, there: Mapping[str, Collection[SegmentRow]], named: Mapping[str, int]
) -> DocumentInfo:
    rows = {name: there[name] for name in record.passages if name in there}
    segments = [row for every in rows.values() for row in every]
    tokens = sum(max(_usable(row) for row in every) for every in rows.values())
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
    """How many of its tokens can be restored."""
    if row.expires is not None and row.expires <= time.time():
        return 0
    return row.tokens * row.valid_hashes // (len(row.chain) // HASH_BYTES)
