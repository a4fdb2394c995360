"""Records of a store: small JSON files that belong to no segment, of conversations, documents and calibrations.

They are kept by the store's backend, as everything else is. Losing a record costs no KV.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ..errors import FormatError, NewerFormatError
from .kinds import CALIBRATIONS, CALIBRATIONS_NAME, FileKind, encode_record

Room = Callable[[int], AbstractContextManager[object]]
"""Context manager that reserves the given number of bytes until a file takes them."""
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions raised when decoding invalid JSON records."""


class RecordFiles(Protocol):
    """Small files of a backend, by kind and name. `StoreRoot` keeps them in a folder. Faults are OSErrors."""

    def where(self, kind: FileKind, name: str) -> Path | str:
        """Return the path or address of a file, for messages. No other store of this process has the same."""

    def names(self, kind: FileKind) -> list[str]:
        """Return the sorted names of all files of a kind. Raises OSError."""

    def version(self, kind: FileKind, name: str) -> Hashable:
        """Return an identifier that changes with the content of a file, or None if there is none. Raises OSError."""

    def read(self, kind: FileKind, name: str) -> bytes:
        """Return the content of a file. Raises FormatError if it is too large, OSError if it cannot be read."""

    def is_own(self, kind: FileKind, name: str) -> bool:
        """Return whether a file exists and was written by the library. Raises OSError."""

    def write(self, kind: FileKind, name: str, content: bytes, room: Room | None = None) -> None:
        """Write or replace a file of the library atomically. Raises OSError; exceptions of `room` are passed on."""

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


R = TypeVar("R")


class Records(Generic[R]):
    """Records of one kind.

    Args:
        files: files of the store.
        kind: kind of the files.
        encode: returns the content of a record's file.
        decode: returns the record of a content. Raises FormatError.
        name_of: returns the name of a record's file.
    """

    def __init__(
        self,
        files: RecordFiles,
        kind: FileKind,
        encode: Callable[[R], bytes],
        decode: Callable[[bytes], R],
        name_of: Callable[[R], str],
    ) -> None:
        self.files, self.kind = files, kind
        self._encode, self._decode, self._name_of = encode, decode, name_of

    def read(self, name: str) -> R:
        """Read a record. Raises OSError or FormatError."""
        return self._decode(self.files.read(self.kind, name))

    def get(self, name: str) -> R | None:
        """Return a record, or None if there is no readable one, or the file has the name of another one."""
        with suppress(OSError, FormatError):
            record = self.read(name)
            if self._name_of(record) == name:
                return record
        return None

    def names(self) -> list[str]:
        """Return the names of all files, or [] if they cannot be listed."""
        with suppress(OSError):
            return self.files.names(self.kind)
        return []

    def all(self) -> list[R]:
        """Return all readable records."""
        return [record for record in map(self.get, self.names()) if record is not None]

    def write(self, records: Sequence[R], room: Room) -> None:
        """Write records in place of the previous ones, each atomically, and durably.

        Raises:
            OSError: a record cannot be written. Exceptions of `room` are passed on.
        """
        for record in records:
            self.files.write(self.kind, self._name_of(record), self._encode(record), room)
        if records:
            self.files.sync(self.kind)

    def delete(self, name: str) -> None:
        """Delete a record, if it exists. Raises OSError."""
        self.files.delete(self.kind, name)

    def sweep(self, is_needed: Callable[[R], bool], is_locked: Callable[[str], bool], dry_run: bool) -> list[str]:
        """Delete the records that are damaged or not needed, except those of a newer format or not readable now.

        Args:
            is_needed: returns whether a record is still needed.
            is_locked: returns whether the record of a name is in use.
            dry_run: whether to delete nothing.

        Returns:
            Paths of the deleted records, or with `dry_run` of those to be deleted.
        """
        removed = []
        for name in self.names():
            with suppress(OSError):
                if self._may_be_needed(name, is_needed) or is_locked(name):
                    continue
                if self.files.is_own(self.kind, name) if dry_run else self.files.delete(self.kind, name):
                    removed.append(str(self.files.where(self.kind, name)))
        return removed

    def _may_be_needed(self, name: str, is_needed: Callable[[R], bool]) -> bool:
        try:
            return is_needed(self.read(name))
        except (OSError, NewerFormatError):
            return True
        except FormatError:
            return False


class Calibrations:
    """Records of a store's calibrations, all in one file. It is parsed again only when it was replaced.

    Args:
        files: small files of the store.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._version: Hashable = None
        self._records: dict[str, list[dict[str, Any]]] = {}

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """Return all records by name; {} if there are none, or the file is damaged. They must not be changed."""
        try:
            version = self._files.version(CALIBRATIONS, CALIBRATIONS_NAME)
        except OSError:
            return {}
        if version is None:
            return {}
        if version != self._version:
            self._version, self._records = version, self._parse()
        return self._records

    def write(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        """Write records under a name, in place of earlier ones. The caller holds the store's lock. Raises OSError."""
        content = encode_record(self.read() | {name: list(records)})
        self._files.write(CALIBRATIONS, CALIBRATIONS_NAME, content)

    def _parse(self) -> dict[str, list[dict[str, Any]]]:
        try:
            records = json.loads(self._files.read(CALIBRATIONS, CALIBRATIONS_NAME))
            is_sound = all(isinstance(record, dict) for named in records.values() for record in named)
        except (OSError, FormatError, ValueError, AttributeError, TypeError):  # deleted meanwhile, or damaged
            is_sound = False
        return records if is_sound else {}  # as if nothing had been measured


@contextmanager
def decoded(data: bytes, newest: int, subject: str) -> Iterator[dict[str, Any]]:
    """Yield the parsed JSON of a record, and convert decoding errors of the body to FormatError.

    Args:
        data: content of the record file.
        newest: newest record format that this version reads.
        subject: expected subject of the record, for the error message, such as "a document".

    Raises:
        FormatError: the data is not such a record, or the body failed to decode it.
        NewerFormatError: the record has a newer format.
    """
    try:
        facts = json.loads(data)
        version = facts.pop("format")
        if isinstance(version, int) and version > newest:
            raise NewerFormatError(f"it is a record of format {version}, which this version does not support")
        yield facts
    except _UNREADABLE as error:
        raise FormatError(f"not a valid record of {subject}: {error!r}") from None


def are_times(*values: object) -> bool:
    """Return whether all values are valid Unix times in seconds."""
    return all(type(value) in (int, float) and 0 <= value < 1e12 for value in values)  # type: ignore[operator]
