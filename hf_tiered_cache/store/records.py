"""Small JSON files that say what a store's segments are to its users: written whole or not at all, believed little."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import FormatError, NewerFormatError
from .files import allocate, open_file, open_regular, read_all, write_all

SUFFIX, PARTIAL = ".json", ".partial"
_MOST_BYTES = 16 << 20
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading JSON of any content may raise."""


def name_of(text: str) -> str:
    """32 hexadecimal digits that stand for a text. Raises UnicodeEncodeError."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def understood(data: bytes, newest: int, what: str) -> Iterator[dict[str, Any]]:
    """What a record's JSON says, for a body that makes something of it.

    Args:
        newest: the newest format that this version knows.
        what: that it should be a record of, as "a document".

    Raises:
        FormatError: it is none, or the body could make nothing of it. NewerFormatError: it is of a newer format.
    """
    try:
        facts = json.loads(data)
        version = facts.pop("format")
        if isinstance(version, int) and version > newest:
            raise NewerFormatError(f"it is a record of format {version}")
        yield facts
    except _UNREADABLE as error:
        raise FormatError(f"it is no record of {what}: {error!r}") from None


def are_moments(*values: object) -> bool:
    """Whether these may be times, in seconds since 1970."""
    return all(type(value) in (int, float) and 0 <= value < 1e12 for value in values)  # type: ignore[operator]


def read_record(path: Path) -> bytes:
    """A record's bytes. Raises OSError or FormatError."""
    with open_regular(path) as (fd, stat):
        if stat.st_size > _MOST_BYTES:
            raise FormatError(f"a record of {stat.st_size} bytes")
        return read_all(fd, stat.st_size, 0)


def write_record(path: Path, data: bytes, room: Callable[[int], AbstractContextManager[object]]) -> None:
    """Put a record in the place of the one before, durable but for its name: `fsync` the folder for that.

    Args:
        path: of the record. Nobody else writes it meanwhile.
        room: takes care of room for so many bytes, as long as the room is not taken by the file itself.

    Raises:
        OSError: it cannot be written. What `room` raises comes through.
    """
    partial = path.with_suffix(PARTIAL)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with room(len(data)):
            file = open_file(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
            allocate(file.fileno(), len(data))
        with file:
            write_all(file.fileno(), memoryview(data), 0)
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def files_in(folder: Path, suffix: str) -> Iterator[Path]:
    """The files of a folder whose names end so, in the order of their names; none if it cannot be listed."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    yield from (folder / name for name in sorted(names) if Path(name).suffix == suffix)
