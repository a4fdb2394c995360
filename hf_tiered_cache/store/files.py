"""File system calls that need special care."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from typing import NamedTuple

from ..errors import FormatError


class Stored(NamedTuple):
    """Metadata of the bytes stored under a name."""

    version: Hashable
    """Identifier of the content. It changes when other bytes take the name."""
    size: int
    """Number of bytes."""
    nbytes: int
    """Space that they take, in bytes."""


def open_file(path: str | os.PathLike[str], flags: int, folder: int | None = None) -> FileIO:
    """Open a file, not a folder. New files get mode 0600. It is closed with its last reference at the latest.

    This is one call of C code: a Ctrl-C between `os.open` and the use of its result would leak the descriptor.

    Args:
        path: absolute, or relative to `folder`.
        flags: as for `os.open`.
        folder: descriptor of a folder.
    """
    opening = os.open if folder is None else partial(os.open, dir_fd=folder)
    return next(map(FileIO, map(opening, [path], [flags | os.O_CLOEXEC], [0o600])))


@contextmanager
def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, folder: int | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file. Links are not followed. Pipes and devices are not opened: that may block or have effects.

    Args:
        path: as for `open_file`.
        flags: as for `open_file`.
        folder: as for `open_file`.

    Yields:
        Descriptor and status.

    Raises:
        FormatError: it is not a regular file. OSError: it cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
        raise FormatError(f"{os.path.basename(path)} is not a regular file")
    with open_file(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, folder) as file:
        yield file.fileno(), os.fstat(file.fileno())


def read_all(fd: int, nbytes: int, offset: int) -> bytes:
    """Read `nbytes` at `offset`, in as many calls as needed. Returns fewer bytes only if the file ends."""
    pieces = []
    while nbytes and (piece := os.pread(fd, nbytes, offset)):
        pieces.append(piece)
        nbytes, offset = nbytes - len(piece), offset + len(piece)
    return b"".join(pieces)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in as many calls as needed."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def allocate(fd: int, nbytes: int) -> None:
    """Allocate disk space for a file, so that a full disk is detected before anything is written."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except (AttributeError, OSError) as error:  # no such call on this platform, or for this file system
        if getattr(error, "errno", errno.ENOSYS) not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def fsync(fd: int, data_only: bool = False) -> None:
    """Make an open file, or the names in an open folder, durable."""
    (getattr(os, "fdatasync", os.fsync) if data_only else os.fsync)(fd)  # macOS has no fdatasync
