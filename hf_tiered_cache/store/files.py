"""Calls of the file system that differ between platforms, or need to be made with care."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from filelock import FileLock

from ..errors import FormatError

LOCK_SUFFIX = ".lock"
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_OF_THE_PROCESS = _NO_DESCRIPTORS | {
    *(errno.ENOMEM, errno.ENOBUFS, errno.EINTR, errno.EAGAIN, errno.EACCES, errno.EPERM, errno.ETIMEDOUT),
    errno.EFAULT,  # it is the memory that cannot be read into
}


def out_of_descriptors(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS


def is_of_the_process(error: BaseException) -> bool:
    """Whether a fault is this process's, or this moment's, and says nothing of the file that was to be read."""
    if isinstance(error, OSError):
        return error.errno in _OF_THE_PROCESS
    return isinstance(error, MemoryError | RuntimeError)


def open_file(path: str | os.PathLike[str], flags: int) -> FileIO:
    """Open a file, no folder, new ones for their owner only. It is closed when the last reference goes, if not before.

    In one call of C code: a Ctrl-C between `os.open` and what keeps its result would lose the descriptor.
    """
    return next(map(FileIO, map(os.open, [path], [flags | os.O_CLOEXEC], [0o600])))


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file's descriptor and status. Pipes and devices are not opened, since that may wait or do something.

    Raises:
        FormatError: it is no regular file. OSError: it cannot be opened.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FormatError(f"{path.name} is no regular file")
    with open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        yield file.fileno(), os.fstat(file.fileno())


def read_all(fd: int, nbytes: int, offset: int) -> bytes:
    """`nbytes`, in as many calls as it takes; fewer only where the file ends."""
    pieces = []
    while nbytes and (piece := os.pread(fd, nbytes, offset)):
        pieces.append(piece)
        nbytes, offset = nbytes - len(piece), offset + len(piece)
    return b"".join(pieces)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, in as many calls as it takes."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def allocate(fd: int, nbytes: int) -> None:
    """Take the room now, so that a full disk is seen before anything is written."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except (AttributeError, OSError) as error:  # no such call on this platform, or for this file system
        if getattr(error, "errno", errno.ENOSYS) not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def lock_beside(path: Path) -> FileLock:
    """The lock of whoever writes `path`: a file of its own, for its owner only. It ends with its holder's life."""
    return FileLock(f"{path}{LOCK_SUFFIX}", mode=0o600)


def publish_name(tmp: Path, final: Path, replace: bool = False) -> None:
    """Give a file its name. Unlike a rename, a link never goes over one that is there: the first writer wins.

    Args:
        replace: whether what is there is of no use, and gives way in the same moment.
    """
    if not replace:
        try:
            return os.link(tmp, final)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.rename(tmp, final)  # or a file system without hard links


def fsync(path: Path, data_only: bool = False) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (getattr(os, "fdatasync", os.fsync) if data_only else os.fsync)(fd)  # macOS has but the one
    finally:
        os.close(fd)
