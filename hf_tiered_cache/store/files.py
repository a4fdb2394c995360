"""Calls of the file system that differ between platforms, or need to be made with care."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from filelock import FileLock

LOCK_SUFFIX = ".lock"


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


def publish_name(tmp: Path, final: Path) -> None:
    """Unlike a rename, a link never goes over a segment that is there: the first writer wins."""
    try:
        os.link(tmp, final)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.rename(tmp, final)  # a file system without hard links


def fsync(path: Path, data_only: bool = False) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (getattr(os, "fdatasync", os.fsync) if data_only else os.fsync)(fd)  # macOS has but the one
    finally:
        os.close(fd)
