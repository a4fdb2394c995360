"""Small JSON files that say what a store's segments are to its users: written whole or not at all, believed little."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ..errors import FormatError
from .files import allocate, open_file, open_regular, read_all, write_all

SUFFIX, PARTIAL = ".json", ".partial"
_MOST_BYTES = 16 << 20
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading JSON of any content may raise."""


def name_of(text: str) -> str:
    """32 hexadecimal digits that stand for a text. Raises UnicodeEncodeError."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
