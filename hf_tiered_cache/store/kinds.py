"""File kinds of a store: the folder, name pattern and content check of each, and checks of JSON values in them.

This is the whitelist of `root.py`. A file belongs to the store if it is a regular file, and its name and content match
one kind. A file with a matching name that is empty or holds only zeros, e.g. after a power failure, also belongs to it.
Every JSON value that is read from a file of a store passes one of the checks at the end.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from ..errors import FormatError
from . import HASH_BYTES

PAGE_BYTES = 4096
RECORD_BYTES = 16 << 20
"""Maximum size of a record that is read."""
SEGMENT_MAGIC = b"HFTCKV\r\n"
"""First bytes of a segment. The CR LF reveals line ending conversion by a text-mode transfer."""
SIDECAR_MAGIC = b"HFTCBS\r\n"
SEGMENT_SUFFIX, RECORD_SUFFIX, LOCK_SUFFIX = ".kv", ".json", ".lock"
CATALOGUE_NAME = "catalogue.sqlite"
MARKER_NAME = "hf_tiered_cache.json"
CALIBRATIONS_NAME = "calibrations.json"
MARKER_FORMAT = "hf_tiered_cache store"
MARKER_VERSION = 1
RECORD_BEGINNING = b'{\n "'
"""First bytes of every record that `encode_record` writes."""
_WAL_MAGIC = b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83"
_JOURNAL_MAGIC = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
_SHM_VERSION = (3_007_000).to_bytes(4, sys.byteorder)
_T = TypeVar("_T")
_MOST_SECONDS = 1e12
_MOST_OF_CAUSE = 200
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions raised when decoding invalid JSON."""
_FINGERPRINT = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


@dataclass(frozen=True)
class FileKind:
    """Kind of files in a subfolder ("" for the store's root): the pattern of their names, and a check of their content.

    Args:
        recognises: Function that returns whether a name and the first bytes of the content match this kind.
        most_bytes: Number of first bytes that `recognises` needs.
        key: For records, the fields that determine the name of a file (see `record_name`).
        lock: Kind of the lock file, named like the file with `LOCK_SUFFIX`, without which a file is not own.
    """

    folder: str
    names: re.Pattern[str]
    recognises: Callable[[str, bytes], bool]
    most_bytes: int = PAGE_BYTES
    key: tuple[str, ...] = ()
    lock: FileKind | None = None

    def bytes_to_read(self, size: int) -> int:
        """Return how many bytes to read of a file of `size` bytes. Raises FormatError if a record is too large."""
        if size > self.most_bytes == RECORD_BYTES:  # records are needed as a whole
            raise FormatError(f"a record of {size} bytes is too large")
        return min(size, self.most_bytes)

    def is_own(self, name: str, beginning: bytes) -> bool:
        """Return whether the library wrote the regular file with this name and these first bytes."""
        return is_blank(beginning) or self.recognises(name, beginning)

    def owns(self, name: str, read: Callable[[FileKind, str], bytes]) -> bool:
        """Return whether a file exists and was written by the library. Raises the OSErrors of `read`."""
        try:
            is_own = self.names.fullmatch(name) is not None and self.is_own(name, read(self, name))
        except (FormatError, FileNotFoundError):
            return False
        return is_own and (self.lock is None or self.lock.owns(name + LOCK_SUFFIX, read))


def name_of(text: str) -> str:
    """Return the hash of a text as 32 hexadecimal digits. Raises UnicodeEncodeError if UTF-8 cannot encode it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def record_name(*key: str) -> str:
    """Return the file name of a record with this key. Raises UnicodeEncodeError, as `name_of` does."""
    return name_of("\0".join(key)) + RECORD_SUFFIX


def is_blank(beginning: bytes) -> bool:
    """Return whether a file is empty or holds only zeros."""
    return not beginning.strip(b"\0")


def encode_record(facts: Mapping[str, Any]) -> bytes:
    """Return the JSON of a record, formatted to begin with `RECORD_BEGINNING`."""
    return (json.dumps(facts, indent=1) + "\n").encode()


def json_object(beginning: bytes) -> dict[str, Any]:
    """Parse a JSON object. Returns an empty dict if the bytes are not a JSON object."""
    try:
        facts = json.loads(beginning)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _container(key: str) -> Callable[[str, bytes], bool]:
    """Return a check for segments or sidecars: the magic or, if that is damaged, the id as the value of a key."""
    # compact, as it is written
    return lambda name, beginning: _has_magic(beginning) or f'"{key}":"{name[:32]}"'.encode() in beginning


def _has_magic(beginning: bytes) -> bool:
    return beginning[:8] in (SEGMENT_MAGIC, SIDECAR_MAGIC)


def _is_calibrations(name: str, beginning: bytes) -> bool:
    """Return whether these are lists of objects, by names with a fingerprint."""
    facts = json_object(beginning)
    lists = [value for value in facts.values() if isinstance(value, list)]
    are_objects = all(isinstance(entry, dict) for value in lists for entry in value)
    return bool(facts) and all(map(_FINGERPRINT.search, facts)) and len(lists) == len(facts) and are_objects


def _kind(folder: str, names: str, recognises: Callable[[str, bytes], bool], most_bytes: int = PAGE_BYTES) -> FileKind:
    return FileKind(folder, re.compile(names), recognises, most_bytes)


def _record_kind(folder: str, *key: str) -> FileKind:
    def is_record(name: str, beginning: bytes) -> bool:
        facts = json_object(beginning)
        texts = [facts.get(field) for field in key]
        with suppress(TypeError, UnicodeEncodeError):  # the key has something other than text
            return type(facts.get("format")) is int and name == record_name(*texts)  # type: ignore[arg-type]
        return False

    return FileKind(folder, re.compile(rf"{_HEX}\.json"), is_record, RECORD_BYTES, key)


SCHEMA_MARK = b"usable_links INTEGER NOT NULL"
"""Part of the catalogue's schema, which SQLite stores as text. It is in the first page before there is a log."""
_HEX = "[0-9a-f]{32}"
_DATABASE = re.escape(CATALOGUE_NAME)

SEGMENT = _kind("segments", rf"{_HEX}\.kv", _container("id"))
SIDECAR = _kind("beside", rf"{_HEX}\.[a-z][a-z0-9_]{{0,31}}", _container("segment"))
TEMPORARY_LOCK = _kind("tmp", r"\d+-\d+-\d+\.lock", lambda _, beginning: not beginning)
# the name alone proves nothing, e.g. 2024-01-15; the first page is written last, so an unfinished file starts blank
TEMPORARY = FileKind(
    "tmp",
    re.compile(r"\d+-\d+-\d+"),
    lambda _, beginning: _has_magic(beginning) or beginning.startswith(RECORD_BEGINNING),
    lock=TEMPORARY_LOCK,
)
PIN = _kind("pins", _HEX, lambda _, beginning: not beginning)
CONVERSATION = _record_kind("conversations", "id")
CONVERSATION_LOCK = _kind(
    "conversations", rf"{_HEX}\.lock", lambda _, beginning: json_object(beginning).keys() == {"pid", "since"}
)
DOCUMENT = _record_kind("documents", "label", "fingerprint", "made")
# lookup entries of a remote: the beginnings of segments, named by prefix hashes
ENTRY = _kind("prefixes", _HEX, lambda _, beginning: beginning.startswith(SEGMENT_MAGIC))
CALIBRATIONS = _kind("", re.escape(CALIBRATIONS_NAME), _is_calibrations, RECORD_BYTES)
MARKER = _kind("", re.escape(MARKER_NAME), lambda _, beginning: json_object(beginning).get("format") == MARKER_FORMAT)
# the content of these locks is never read or written, and they are deleted only with the whole store
LOCK = _kind("", "lock", lambda *_: True)
CATALOGUE_LOCK = _kind("", rf"{_DATABASE}\.lock", lambda *_: True)
CATALOGUE = _kind("", _DATABASE, lambda _, beginning: SCHEMA_MARK in beginning)
CATALOGUE_LOG = _kind("", rf"{_DATABASE}-wal", lambda _, beginning: beginning[:4] in _WAL_MAGIC)
CATALOGUE_SHARED_MEMORY = _kind("", rf"{_DATABASE}-shm", lambda _, beginning: beginning[:4] == _SHM_VERSION)
CATALOGUE_JOURNAL = _kind("", rf"{_DATABASE}-journal", lambda _, beginning: beginning[:8] == _JOURNAL_MAGIC)

DATABASE_FILES = {
    f"{CATALOGUE_NAME}-wal": CATALOGUE_LOG,
    f"{CATALOGUE_NAME}-shm": CATALOGUE_SHARED_MEMORY,
    f"{CATALOGUE_NAME}-journal": CATALOGUE_JOURNAL,
    CATALOGUE_NAME: CATALOGUE,
}
"""Files that SQLite writes. The log is deleted first, so that it never exists next to a new database."""
FIXED_FILES = {"lock": LOCK, f"{CATALOGUE_NAME}{LOCK_SUFFIX}": CATALOGUE_LOCK, MARKER_NAME: MARKER} | DATABASE_FILES
"""Files in the root that are written in place or opened by path. They must be regular files."""
FOLDERS = ("segments", "beside", "tmp", "pins", "conversations", "documents")
"""Subfolders, in order of creation."""
ALL_FOLDERS = (*FOLDERS, ENTRY.folder)
"""Subfolders that a store may have. That of the entries is created with the first one."""
KINDS = (
    *(SEGMENT, SIDECAR, TEMPORARY, TEMPORARY_LOCK, PIN, CONVERSATION, CONVERSATION_LOCK, DOCUMENT, ENTRY),
    *(CALIBRATIONS, *FIXED_FILES.values()),
)


def kind_of(folder: str, name: str) -> FileKind | None:
    """Return the kind that matches a file name in a subfolder, or None."""
    for kind in KINDS:
        if kind.folder == folder and kind.names.fullmatch(name):
            return kind
    return None


def not_own(place: object) -> str:
    """Return the message about a file of others, at a path or address where the library has one of its own."""
    return f"{place} was not written by this library; move it elsewhere"


def sidecar_sizes(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the bytes of sidecars by segment and kind, given the bytes of each file."""
    by_segment: dict[str, dict[str, int]] = {}
    for name, nbytes in sizes.items():
        segment, _, kind = name.partition(".")
        by_segment.setdefault(segment, {})[kind] = nbytes
    return by_segment


# --- values of JSON


@contextmanager
def decoding(fault: str) -> Iterator[None]:
    """Convert errors of the body, which decodes JSON, to FormatErrors that begin with `fault`."""
    try:
        yield
    except _UNREADABLE as error:
        raise FormatError(f"{fault}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Describe an error of decoding without the data, which its text may contain as a whole."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    return str(error)[:_MOST_OF_CAUSE] or type(error).__name__


# each function returns the checked value, or raises FormatError


def whole(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """Check an integer."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FormatError(f"{value!r} is not an integer from {least} to {most}")
    return value


def seconds(value: Any) -> float:
    """Check a time in Unix seconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST_SECONDS:  # also NaN
        raise FormatError(f"{value!r} is not a time")
    return float(value)


def text(value: Any) -> str:
    """Check a string, which must be valid Unicode."""
    if not isinstance(value, str) or value.encode(errors="replace").decode() != value:
        raise FormatError(f"{value!r} is not a string")
    return value


def hexadecimal(value: Any, nbytes: int = HASH_BYTES) -> str:
    """Check a string of `2 * nbytes` hexadecimal digits."""
    if not isinstance(value, str) or re.fullmatch(f"[0-9a-f]{{{2 * nbytes}}}", value) is None:
        raise FormatError(f"{value!r} is not a name of {2 * nbytes} hexadecimal digits")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "str": text,
    "int": whole,
    "float": seconds,
    "tuple[str, ...]": lambda names: tuple(map(hexadecimal, names)),
    "Mapping[str, str]": lambda texts: {text(name): text(value) for name, value in texts.items()},
}
"""Check of a dataclass field, by its type."""


def checked(schema: type[_T], facts: dict[str, Any]) -> _T:
    """Create a dataclass instance from JSON, with a check of each field that follows from its type (see `_CHECKS`).

    Other keys are ignored. Raises FormatError for an invalid value, or KeyError for a missing one without a default.
    """
    stored_fields = [field for field in fields(schema) if field.name in facts or field.default is MISSING]  # type: ignore[arg-type]
    return schema(**{field.name: _CHECKS[str(field.type)](facts[field.name]) for field in stored_fields})
