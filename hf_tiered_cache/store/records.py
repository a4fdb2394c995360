"""Records of a store: small JSON files that belong to no segment, of conversations, documents and calibrations.

They are kept by the store's backend, as everything else is. Losing a record costs no KV.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..errors import ConfigError, FormatError, NotOursError, OtherFormatError, StoreError, as_store_error
from .faults import Notices
from .kinds import (
    CALIBRATIONS,
    CALIBRATIONS_NAME,
    RECORD_BEGINNING,
    FileKind,
    checked,
    decoding,
    encode_record,
    is_blank,
    json_object,
    record_name,
)
from .tree import Stored

_ID = re.compile(rb'"([0-9a-f]{32})"')
_CHECKSUM = b',\n "checksum": "'


FORMAT_VERSION = 1
"""Newest format of conversations and documents."""


class RecordFiles(Protocol):
    """Small files of a backend, by kind and name. `StoreRoot` keeps them in a folder. Faults are OSErrors."""

    @property
    def identity(self) -> Hashable:
        """Identifier of the place. No other store of this process has the same."""

    def where(self, kind: FileKind, name: str) -> Path | str:
        """Return the path or address of a file, for messages."""

    def names(self, kind: FileKind) -> list[str]:
        """Return the sorted names of all files of a kind. Raises OSError."""

    def stored(self, kind: FileKind, name: str) -> Stored | None:
        """Return the metadata of a file, or None if there is none. Raises OSError."""

    def version(self, kind: FileKind, name: str) -> Hashable:
        """Return an identifier that changes with the content of a file, or None if there is none. Raises OSError."""

    def read(self, kind: FileKind, name: str) -> bytes:
        """Return the content of a file. Raises FormatError if it is too large, OSError if it cannot be read."""

    def is_own(self, kind: FileKind, name: str) -> bool:
        """Return whether a file exists and was written by the library. Raises OSError."""

    def write(self, kind: FileKind, name: str, content: bytes, replace: bool = True) -> None:
        """Write a file atomically. Raises OSError, FileExistsError for one that must not or may not be replaced."""

    def make_empty(self, kind: FileKind, name: str) -> None:
        """Create an empty file, unless the library has already. Raises OSError."""

    def delete(self, kind: FileKind, name: str) -> bool:
        """Delete a file that the library wrote. Returns whether it existed. Raises OSError if it remains."""

    def sync(self, kind: FileKind) -> None:
        """Make the names of all files of a kind durable. Raises OSError."""

    def lock(self, kind: FileKind, name: str) -> Any:
        """Lock a file until the returned object is closed. Returns None if it is locked already. Raises OSError."""

    def is_locked(self, kind: FileKind, name: str) -> bool:
        """Return whether a file is locked."""

    def rewrite(self, lock: Any, kind: FileKind, name: str, content: bytes) -> None:
        """Replace the content of a file that the caller has locked. Raises OSError."""


R = TypeVar("R", bound="Record")


@dataclass(frozen=True)
class Record:
    """Base class of records. The fields of the dataclass are the schema of the file (see `checked`)."""

    kind: ClassVar[FileKind]
    subject: ClassVar[str]
    """What the record is of, for messages, such as "a document"."""

    @property
    def key(self) -> tuple[str, ...]:
        """Unique key of the record: its fields `FileKind.key`."""
        return tuple(getattr(self, name) for name in self.kind.key)

    def encode(self) -> bytes:
        """Return the content of its file."""
        facts = asdict(self) | {"format": FORMAT_VERSION}
        return encode_record(facts | {"checksum": _checksum_of(encode_record(facts))})

    @classmethod
    def decode(cls: type[R], data: bytes) -> R:
        """Decode the content of a file. Raises FormatError, or OtherFormatError for a record of a newer format."""
        with decoding(f"not a valid record of {cls.subject}"):
            facts = json.loads(data)
            if isinstance(version := facts["format"], int) and version > FORMAT_VERSION:
                raise OtherFormatError(f"it is a record of format {version}, which this version does not support")
            return checked(cls, facts)


def _checksum_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _has_checksum(content: bytes) -> bool:
    """Return whether a record ends with its own checksum, which older versions did not write."""
    before, _, end = content.rpartition(_CHECKSUM)
    checksum = _checksum_of(before + b"\n}\n")
    return end == f'{checksum}"\n}}\n'.encode()


def _recognized(files: RecordFiles, kind: FileKind, name: str) -> bytes:
    """Return the content of a record, b"" if it is blank.

    Raises NotOursError for a file of another program, FormatError if it may be a damaged record, or OSError.
    """
    try:
        content = files.read(kind, name)
    except FormatError as error:  # it is too large, or no regular file
        raise NotOursError(str(error)) from error
    if is_blank(content):
        return b""
    if not kind.is_own(name, content):
        if content.startswith(RECORD_BEGINNING):
            raise FormatError("it is damaged beyond recognition, or of another program; move it elsewhere")
        raise NotOursError("it is of another program")
    return content


class Records(Generic[R]):
    """Records of one kind. Subclasses set the class of the records."""

    record: type[R]

    def __init__(self, files: RecordFiles) -> None:
        self.files, self.kind, self._warn = files, self.record.kind, Notices().warn

    def _get(self, name: str) -> R | None:
        """Return the record in a file, or None if there is none. One that cannot be used is logged."""
        place = self.files.where(self.kind, name)
        try:
            content = self.files.read(self.kind, name)
            if is_blank(content):  # its writer was killed
                return None
            record = self.record.decode(content)
            if record_name(*record.key) == name:
                return record
            self._warn(name, f"{place} is a record of another name, and is not used; move it elsewhere")
        except FileNotFoundError:
            pass
        except OtherFormatError as error:
            self._warn(name, f"{place}: {error}; upgrade hf-tiered-cache")
        except FormatError as error:
            self._warn(name, f"{place} is damaged, or of another program, and is not used ({error}); move it elsewhere")
        except OSError as error:
            self._warn(name, f"{place} cannot be read ({error.strerror}); check the disk and its permissions")
        return None

    def read(self, *key: str) -> R | None:
        """Return the record of a key, or None if there is no readable one, or the file has the name of another one."""
        return self._get(record_name(*key))

    def all(self) -> list[R]:
        """Return all readable records. Others are logged. Raises OSError if they cannot be listed."""
        return [record for record in map(self._get, self.names()) if record is not None]

    def naming(self, ids: Collection[str], but: Collection[str] = ()) -> Iterator[R]:
        """Yield the records that contain some of these ids of 32 hexadecimal digits, but those in the files `but`.

        Raises OSError, FormatError or OtherFormatError for a record that cannot be read, is damaged or of a newer
        format: it may contain any of them.
        """
        encoded_ids = {id.encode() for id in ids}
        for name in self.names() if ids else ():
            if name in but:
                continue
            try:
                content = self.files.read(self.kind, name)
                is_named = not encoded_ids.isdisjoint(_ID.findall(content))
                if not is_named and _has_checksum(content):  # decoding takes longer
                    continue
                record = self._undamaged(name, content)
            except FileNotFoundError:
                continue
            except FormatError as error:
                place, advice = self.files.where(self.kind, name), "move it elsewhere, and try again"
                if isinstance(error, OtherFormatError):
                    advice = "upgrade hf-tiered-cache"
                raise type(error)(f"{place}: {error}, so nothing is deleted that it may name; {advice}") from error
            if is_named:
                yield record

    def names(self) -> list[str]:
        """Return the names of all files that may be records. Raises OSError."""
        with suppress(FileNotFoundError):  # no subfolder
            return self.files.names(self.kind)
        return []

    def check(self, name: str) -> int:
        """Read a record, verify it, and return its bytes. Raises OSError or FormatError (see `_recognized`)."""
        content = _recognized(self.files, self.kind, name)
        if content:
            self._undamaged(name, content)
        return len(content)

    def _undamaged(self, name: str, content: bytes) -> R:
        """Decode the content of a file. Raises FormatError also for another checksum, or the name of another record."""
        record = self.record.decode(content)
        if b'"checksum"' in content and not _has_checksum(content):
            raise FormatError("the record is damaged: it does not match its checksum")
        if record_name(*record.key) != name:
            raise FormatError("it is a record of another name")
        return record

    def write(self, records: Sequence[R]) -> None:
        """Write records in place of the previous ones, each atomically, and durably.

        Raises OtherFormatError instead of replacing a record of a newer format, or OSError.
        """
        for record in records:
            name = record_name(*record.key)
            with suppress(FileNotFoundError):
                try:
                    self.record.decode(self.files.read(self.kind, name))
                except OtherFormatError as error:
                    place = self.files.where(record.kind, name)
                    raise OtherFormatError(
                        f"{place}: {error}, so it is not replaced; upgrade hf-tiered-cache"
                    ) from error
                except FormatError:  # damaged, or of another program: `write` replaces only the library's own
                    pass
            self.files.write(record.kind, name, record.encode())
        if records:
            self.files.sync(self.kind)

    def delete(self, *key: str) -> None:
        """Delete a record, if it exists. Raises OSError."""
        self.files.delete(self.kind, record_name(*key))

    def _sweep(self, is_needed: Callable[[str, R | None], bool], dry_run: bool) -> list[str]:
        """Delete records that are not needed, unless they are damaged or of a newer format.

        Returns the paths of the deleted records, or with `dry_run` of those to be deleted. `is_needed` gets the name of
        a file and its record, or None for a blank one.
        """
        removed_paths, kind = [], self.kind
        with suppress(OSError):
            for name in self.files.names(kind):
                with suppress(OSError, FormatError):
                    content = self.files.read(kind, name)
                    if is_needed(name, None if is_blank(content) else self._undamaged(name, content)):
                        continue
                    if self.files.is_own(kind, name) if dry_run else self.files.delete(kind, name):
                        removed_paths.append(str(self.files.where(kind, name)))
        return removed_paths


def check_name(name: object, subject: str, most: int) -> None:
    """Raise ConfigError unless the name of a `subject` has 1 to `most` characters of valid Unicode."""
    if not isinstance(name, str) or not 0 < len(name) <= most:
        raise ConfigError(f"a {subject} must be a str of 1 to {most} characters, not {name!r:.80}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the {subject} {name!r:.80} is not valid Unicode") from None


class Calibrations:
    """Records of a store's calibrations, all in one file. It is parsed again only when it was replaced."""

    kind = CALIBRATIONS

    def __init__(self, files: RecordFiles) -> None:
        self.files, self._warn = files, Notices().warn
        self._where = files.where(CALIBRATIONS, CALIBRATIONS_NAME)
        self._advice = (
            f"{self._where} is damaged, or of another program, and is not used; move it elsewhere, and calibrate again"
        )
        self._loaded: tuple[Hashable, dict[str, list[dict[str, Any]]]] = None, {}
        """Version of the file, and its records: one attribute, since several threads may load them."""

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """Return all records by name, which must not be changed. Returns {} if there are none, or none can be read."""
        try:
            return self._load()
        except OSError as error:
            advice = "so no calibration is used; check the disk and its permissions"
            self._warn("unreadable", f"{self._where}: {error.strerror}, {advice}")
            return {}

    def names(self) -> list[str]:
        """Return the name of the file, if it exists. Raises OSError."""
        return self.files.names(CALIBRATIONS)

    def check(self, name: str) -> int:
        """Read the file, and return its bytes. Raises OSError or FormatError (see `_recognized`)."""
        return len(_recognized(self.files, CALIBRATIONS, name))

    def check_writable(self) -> None:
        """Raise StoreError if `write` would fail, since the file is damaged or cannot be read."""
        with as_store_error(f"{self._where} cannot be read"):
            is_missing = self.files.version(CALIBRATIONS, CALIBRATIONS_NAME) is None
            if is_missing or self.files.is_own(CALIBRATIONS, CALIBRATIONS_NAME):
                return
        raise StoreError(self._advice)

    def write(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        """Replace the records of a name. The caller holds the store's lock. Raises OSError."""
        content = encode_record(self._load() | {name: list(records)})
        self.files.write(CALIBRATIONS, CALIBRATIONS_NAME, content)

    def _load(self) -> dict[str, list[dict[str, Any]]]:
        """Return all records; {} if there are none, or the file is damaged. Raises OSError."""
        version = self.files.version(CALIBRATIONS, CALIBRATIONS_NAME)
        if version is None:
            return {}
        loaded = self._loaded
        if version != loaded[0]:
            try:
                content = self.files.read(CALIBRATIONS, CALIBRATIONS_NAME)
                is_own = CALIBRATIONS.is_own(CALIBRATIONS_NAME, content)
            except FileNotFoundError:  # deleted meanwhile
                return {}
            except FormatError:
                is_own = False
            if not is_own:
                self._warn("damaged", self._advice)
            loaded = self._loaded = version, json_object(content) if is_own else {}
        return loaded[1]
