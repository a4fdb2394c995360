"""The folder of a store: the one way to its files.

Every access is relative to descriptors of the store's folder and its subfolders (`tree.py`). Links are not followed.
What is deleted or replaced has to be a file of a kind (see `kinds.py`): by its name, and by its content. Whatever else
is in the folder is left as it is, and listed by `unknown`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from ..errors import FormatError
from .claim import claim
from .files import allocate, fsync, open_file, read_all, write_all
from .kinds import LOCK, LOCK_SUFFIX, TEMPORARY, TEMPORARY_LOCK, FileKind
from .tree import FolderTree

_ATTEMPTS = 100
_POLL_SECONDS = 0.005
_HAS_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Temporary(NamedTuple):
    """A file that is being written."""

    file: FileIO
    name: str


class StoreRoot(FolderTree):
    """The folder of a store.

    Args:
        path: of the folder. It may be a link, and is resolved once.
        make: whether the folder becomes a store if it is missing or empty. Else nothing in it is changed.

    Raises:
        StoreError: it is no store, and cannot or must not become one; or a part of it is a link.
    """

    def __init__(self, path: str | os.PathLike[str], make: bool = True) -> None:
        super().__init__(Path(path).resolve())
        try:
            self.writable = claim(self, make)
        except BaseException:
            self.close()
            raise

    def again(self) -> StoreRoot:
        """Open the folder once more, with descriptors of its own. Raises OSError."""
        other = StoreRoot.__new__(StoreRoot)
        FolderTree.__init__(other, self.path)
        other.writable = self.writable
        if not os.path.samestat(os.fstat(other.root_descriptor), os.fstat(self.root_descriptor)):
            other.close()
            raise OSError(errno.ESTALE, "another folder has its place", str(self.path))
        return other

    # --- writing

    @contextmanager
    def temporary(self, nbytes: int) -> Iterator[Temporary]:
        """Make a file of this size that has no name of its kind yet. It is gone in the end, unless it was published.

        A lock next to it is held meanwhile: a temporary file whose lock is free belongs to a process that has died.
        Raises OSError.
        """
        name = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        folder = self.folder_descriptor(TEMPORARY.folder, make=True)
        with ExitStack() as stack:
            lock = self.lock(TEMPORARY_LOCK, name + LOCK_SUFFIX)
            if lock is None:
                raise OSError(errno.EAGAIN, "it is locked", str(self.where(TEMPORARY_LOCK, name + LOCK_SUFFIX)))
            stack.enter_context(lock)
            stack.callback(_forget, folder, name + LOCK_SUFFIX, lock)
            file = stack.enter_context(open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, folder))
            stack.callback(_forget, folder, name, file)
            allocate(file.fileno(), nbytes)
            yield Temporary(file, name)

    def publish(self, temporary: str, kind: FileKind, name: str, replace: bool) -> None:
        """Give a temporary file its name, in one moment.

        Args:
            temporary: the name that it has.
            kind, name: what it becomes.
            replace: whether an own file of this name gives way.

        Raises:
            FileExistsError: there is a file that does not give way. OSError: nothing has changed.
        """
        source, target = self.folder_descriptor(TEMPORARY.folder), self.folder_descriptor(kind.folder, make=True)
        if not replace:  # unlike a rename, a link never takes the place of a file: the first writer wins
            try:
                return os.link(temporary, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _HAS_NO_LINKS:
                    raise
        if self.find(kind, name) is not None and not (replace and self.is_own(kind, name)):
            what = f"{self.where(kind, name)} is there"
            if replace:
                what += " and was not written by this library; move it elsewhere"
            raise FileExistsError(errno.EEXIST, what)
        os.rename(temporary, name, src_dir_fd=source, dst_dir_fd=target)

    def write(
        self,
        kind: FileKind,
        name: str,
        content: bytes,
        room: Callable[[int], AbstractContextManager[object]] | None = None,
    ) -> None:
        """Write a small file, whole or not at all, in place of the one before. Durable but for its name (see `sync`).

        Args:
            room: takes care of room for so many bytes, as long as the room is not taken by the file itself.

        Raises:
            OSError: it cannot be written. What `room` raises comes through.
        """
        with ExitStack() as stack:
            with ExitStack() as reserved:
                if room is not None:
                    reserved.enter_context(room(len(content)))
                temporary = stack.enter_context(self.temporary(len(content)))
            write_all(temporary.file.fileno(), memoryview(content), 0)
            os.fsync(temporary.file.fileno())
            self.publish(temporary.name, kind, name, replace=True)

    def make_empty(self, kind: FileKind, name: str) -> None:
        """Make an empty file, unless there is one of our own. Raises OSError."""
        try:
            folder = self.folder_descriptor(kind.folder, make=True)
            open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, folder).close()
        except FileExistsError:
            if not self.is_own(kind, name):
                raise

    def delete(self, kind: FileKind, name: str, is_checked: bool = False) -> bool:
        """Delete a file that the library wrote.

        Args:
            is_checked: whether the caller knows that the library wrote it.

        Returns:
            Whether there was one.

        Raises:
            OSError: it is still there.
        """
        if not (is_checked or self.is_own(kind, name)):
            return False
        try:
            os.unlink(name, dir_fd=self.folder_descriptor(kind.folder))
        except FileNotFoundError:
            return False
        return True

    def sync(self, kind: FileKind, name: str | None = None) -> None:
        """Make a file's data durable, or without a name the names of all files of a kind. Raises OSError."""
        if name is None:
            fsync(self.folder_descriptor(kind.folder))
        else:
            with self.open(kind, name) as (fd, _):
                fsync(fd, data_only=True)

    # --- locks

    def lock(self, kind: FileKind, name: str) -> FileIO | None:
        """Lock a file, made if missing, for as long as it is open. Its content is left as it is.

        Returns:
            The file, or None if another process or thread has the lock.

        Raises:
            OSError: it cannot be locked, or is no regular file.
        """
        folder = self.folder_descriptor(kind.folder, make=True)
        for _ in range(_ATTEMPTS):
            status = self.find(kind, name)
            if status is not None and not S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is a link, or no regular file", str(self.where(kind, name)))
            with ExitStack() as stack:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                file = stack.enter_context(open_file(name, flags, folder))
                if not try_flock(file, fcntl.LOCK_EX):
                    return None
                if _has_name(file, folder, name):  # else whoever had the lock has deleted the file
                    stack.pop_all()
                    return file
        return None

    @contextmanager
    def locked(self, kind: FileKind, name: str, seconds: float) -> Iterator[None]:
        """Hold a lock, waiting for it so long. Raises TimeoutError: it was not free. OSError: it cannot be locked."""
        deadline = time.monotonic() + seconds
        while (file := self.lock(kind, name)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "it was not free", str(self.where(kind, name)))
            time.sleep(_POLL_SECONDS)
        with file:
            yield

    def is_locked(self, kind: FileKind, name: str) -> bool:
        """Return whether somebody has the lock. Nothing is made."""
        try:
            with self.open(kind, name) as (fd, _):
                return not try_flock(fd, fcntl.LOCK_SH)
        except (OSError, FormatError):
            return False

    def rewrite(self, file: FileIO, kind: FileKind, name: str, content: bytes) -> None:
        """Write to a locked file in place. Raises OSError: it cannot be, or it is not the library's alone."""
        fd = file.fileno()
        if os.fstat(fd).st_nlink != 1 or not kind.is_own(name, read_all(fd, kind.most_bytes, 0)):
            raise FileExistsError(errno.EEXIST, "this library did not write it", str(self.where(kind, name)))
        os.ftruncate(fd, 0)
        write_all(fd, memoryview(content), 0)

    @property
    def lock_path(self) -> Path:
        """Path of the store's lock, for messages."""
        return self.where(LOCK, "lock")


def try_flock(file: FileIO | int, kind: int) -> bool:
    """Lock an open file, if the lock is free. Raises OSError: there are no locks."""
    try:
        fcntl.flock(file if isinstance(file, int) else file.fileno(), kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _has_name(file: FileIO, folder: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name, dir_fd=folder, follow_symlinks=False))
    return False


def _forget(folder: int, name: str, file: FileIO) -> None:
    """Delete a file that is open here, or leave it to the next who cleans up."""
    with suppress(OSError):
        if _has_name(file, folder, name):
            os.unlink(name, dir_fd=folder)
