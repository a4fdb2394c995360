"""File system calls, and read access to the folder of a store and its subfolders through descriptors.

Every access is relative to a descriptor. Links are not followed. This module creates missing subfolders, but no files:
`root.py` writes files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple

from ..errors import FormatError
from .kinds import ALL_FOLDERS, SEGMENT, FileKind, kind_of


class Stored(NamedTuple):
    """Metadata of the bytes stored under a name."""

    version: Hashable
    """Identifier of the content. It changes when other bytes take the name."""
    size: int
    """Number of bytes."""
    nbytes: int
    """Space that they take, in bytes, which the quota counts; less than `size` if the place compresses."""


READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to read a file that should be regular: a link is not followed, and a pipe does not wait for a writer."""


def open_file(
    path: str | os.PathLike[str], flags: int, folder: int | None = None, kind: type[FileIO] = FileIO
) -> FileIO:
    """Open a file with flags as for `os.open`, and mode 0600 if it is new. It is closed with its last reference.

    A Ctrl-C at any moment leaks no descriptor: `os.open` and the list that holds its result are one call of C code.
    FileIO reports that it takes the descriptor to audit hooks, which may be Python code (that of `filelock` is), so it
    closes the descriptor only if it has taken it. The path is absolute, or relative to the descriptor `folder`. The
    class of the file, `kind`, has no `__init__` of its own.
    """
    opening = os.open if folder is None else partial(os.open, dir_fd=folder)
    file, opened = kind.__new__(kind), list[int]()
    try:
        opened.extend(map(opening, [path], [flags | os.O_CLOEXEC], [0o600]))
        FileIO.__init__(file, opened[0])
    finally:
        if file.closed:
            for descriptor in opened:
                os.close(descriptor)
    return file


@contextmanager
def open_regular(path: str | os.PathLike[str], folder: int | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file for reading, with arguments as for `open_file`. Yields its descriptor and status.

    Links are not followed, and pipes and devices not opened. Raises FormatError for what is no regular file, or
    OSError.
    """
    if not S_ISREG(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
        raise FormatError(f"{os.path.basename(path)} is not a regular file")
    with open_file(path, READ_FLAGS, folder) as file:
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
        num_written = os.pwrite(fd, data, offset)
        data, offset = data[num_written:], offset + num_written


def allocate(fd: int, nbytes: int) -> None:
    """Allocate disk space for a file, so that a full disk is detected before anything is written."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:  # not supported by this file system
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


class LockFile(FileIO):
    """File that is locked until it is closed, or its last reference or its process is gone.

    A forked child shares the locks of its parent. It closes its copies at once, so that the locks end with the parent.
    """

    _pid = 0

    def lock(self) -> bool:
        """Lock the file without waiting. Returns False if the lock is not free. Raises OSError if it has no locks."""
        self._pid = os.getpid()
        _lock_files.add(self)
        return try_flock(self, fcntl.LOCK_EX)

    def close(self) -> None:
        if not self.closed and self._pid == os.getpid():  # a copy in a child must not unlock the parent's file
            with suppress(OSError):
                fcntl.flock(self.fileno(), fcntl.LOCK_UN)  # closing is not enough while a child still has a copy
        super().close()

    def __del__(self) -> None:
        self.close()  # without the warning of other files: a cache that is dropped ends its conversation


_lock_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_copies() -> None:
    for file in list(_lock_files):
        file.close()


os.register_at_fork(after_in_child=_close_copies)


def try_flock(file: FileIO | int, kind: int) -> bool:
    """Lock an open file without waiting. Returns False if the lock is not free. Raises OSError if it has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        reason = f"its file system cannot lock files ({error.strerror}); choose a folder of another one"
        raise OSError(error.errno, reason) from error
    return True


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderTree:
    """Folder at a resolved path, and its subfolders. It is opened on first use, and need not be a store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []  # all closed together, since other threads may be using them
        self._folders: dict[str, tuple[tuple[int, int], int]] = {}
        self._checked: dict[FileKind, dict[tuple[str, int, int], bool]] = {}
        """Results of `is_own` for each kind of files, by name, inode and time of the last change."""
        self._opening = threading.Lock()
        self._closing = weakref.finalize(self, _close, self._descriptors)
        self._closing.atexit = False

    def close(self) -> None:
        """Close all descriptors."""
        self._folders.clear()
        self._closing()

    # --- folders

    @property
    def root_descriptor(self) -> int:
        """Descriptor of the folder. Raises OSError if it is closed, or cannot be opened."""
        if not self._closing.alive:
            raise OSError(errno.EBADF, "the store is closed", str(self.path))
        if not self._descriptors:
            with self._opening:
                if not self._descriptors:
                    self._descriptors.extend(map(os.open, [self.path], [_FOLDER_FLAGS]))  # in C: Ctrl-C leaks none
        return self._descriptors[0]

    @property
    def identity(self) -> Hashable:
        """Identifier of the folder, or its path if it is not open. Another folder at the same path has another one."""
        with suppress(OSError):
            status = os.fstat(self.root_descriptor)
            return status.st_dev, status.st_ino
        return self.path

    def folder_descriptor(self, name: str, make: bool = False) -> int:
        """Return the descriptor of a subfolder, or the root (""), opened again if it was replaced. Raises OSError."""
        if not name:
            return self.root_descriptor
        try:
            status = os.stat(name, dir_fd=self.root_descriptor, follow_symlinks=False)
        except FileNotFoundError:
            if not make:
                reason = f"it has no folder {name!r}, which was deleted or could not be created"
                raise FileNotFoundError(errno.ENOENT, reason, str(self.path)) from None
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.root_descriptor)
            status = os.stat(name, dir_fd=self.root_descriptor, follow_symlinks=False)
        identity = status.st_dev, status.st_ino
        opened_folder = self._folders.get(name)
        if opened_folder is not None and opened_folder[0] == identity:
            return opened_folder[1]
        if not S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, or not a folder", str(self.path / name))
        root = self.root_descriptor
        with self._opening:
            self._descriptors.extend(map(partial(os.open, dir_fd=root), [name], [_FOLDER_FLAGS]))
            opened = self._descriptors[-1]
        status = os.fstat(opened)
        self._folders[name] = (status.st_dev, status.st_ino), opened
        return opened

    def list_names(self, folder: str) -> set[str]:
        with self._listing(folder) as descriptor:
            return set(os.listdir(descriptor))

    @contextmanager
    def _listing(self, folder: str) -> Iterator[int]:
        """Open a subfolder for one listing: threads and forked processes share a descriptor's position in the list."""
        opened: list[int] = []
        try:
            opened.extend(map(partial(os.open, dir_fd=self.folder_descriptor(folder)), ["."], [_FOLDER_FLAGS]))
            yield opened[0]
        finally:
            _close(opened)

    def check_in_place(self) -> None:
        """Raise OSError if the folder is no longer at its path, by which SQLite and the engines open its files."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.root_descriptor)):
                return
        raise OSError(errno.ESTALE, "it was moved, deleted or replaced; open the store again", str(self.path))

    def is_reachable(self) -> bool:
        """Return whether the folder is still at its path. If so, files that are not found in it were deleted."""
        with suppress(OSError):
            self.check_in_place()
            return self.folder_descriptor(SEGMENT.folder) >= 0
        return False

    # --- files

    def where(self, kind: FileKind, name: str) -> Path:
        """Return the path of a file, for messages."""
        return self.path / kind.folder / name

    def names(self, kind: FileKind) -> list[str]:
        """Return the sorted names of all files of a kind, regardless of their content. Raises OSError."""
        return sorted(filter(kind.names.fullmatch, self.list_names(kind.folder)))

    def find(self, kind: FileKind, name: str) -> os.stat_result | None:
        """Return the status of a file, without following a link, or None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.folder_descriptor(kind.folder), follow_symlinks=False)
        except FileNotFoundError:
            return None

    def stored(self, kind: FileKind, name: str) -> Stored | None:
        """Return the metadata of a file, without following a link, or None if it does not exist."""
        status = self.find(kind, name)
        return None if status is None or S_ISDIR(status.st_mode) else stored_in(status)

    def version(self, kind: FileKind, name: str) -> Hashable:
        """Return an identifier that changes when a file is replaced or changed, or None if it does not exist."""
        if (status := self.find(kind, name)) is None:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def open(self, kind: FileKind, name: str) -> AbstractContextManager[tuple[int, os.stat_result]]:
        """Open a regular file. See `open_regular`."""
        return open_regular(name, self.folder_descriptor(kind.folder))

    def read(self, kind: FileKind, name: str) -> bytes:
        """Read the first bytes of a file, or all of a record. Raises OSError, or FormatError if it cannot be one."""
        with self.open(kind, name) as (fd, status):
            return read_all(fd, kind.bytes_to_read(status.st_size), 0)

    def is_own(self, kind: FileKind, name: str) -> bool:
        """Return whether a file exists and was written by the library. Raises OSError if it cannot be read."""
        return kind.owns(name, self.read)

    def unknown(self, is_known: Callable[[FileKind, str], bool]) -> list[str]:
        """Return the sorted paths of files that the library did not write, but `is_known` ones. Raises OSError."""
        unknown = []
        for folder, name, kind in self.entries():
            if kind is None or not is_known(kind, name):
                with suppress(OSError):  # not readable now, so not listed
                    if kind is None or not (self.is_own(kind, name) or self.find(kind, name) is None):
                        unknown.append(os.path.join(folder, name))
        return sorted(unknown)

    def entries(self) -> Iterator[tuple[str, str, FileKind | None]]:
        """Yield the subfolder and name of each file, and the kind that both match, if any. Raises OSError."""
        for folder in ("", *ALL_FOLDERS):
            with suppress(FileNotFoundError):
                for name in self.list_names(folder).difference(() if folder else ALL_FOLDERS):
                    yield folder, name, kind_of(folder, name)

    def statuses(self, folder: str) -> dict[str, os.stat_result]:
        """Return the status of each file and folder in a subfolder, by name. Links are not followed. Raises OSError."""
        statuses: dict[str, os.stat_result] = {}
        with self._listing(folder) as descriptor, os.scandir(descriptor) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    statuses[entry.name] = entry.stat(follow_symlinks=False)
        return statuses

    def sizes(self, kind: FileKind, is_known: bool = False) -> dict[str, int]:
        """Return the bytes on disk of the library's files of a kind, by name; {} without the subfolder. Raises OSError.

        New and changed files are read to recognize them, unless all of this kind are known to be its own (`is_known`).
        A file that cannot be read counts: it may be one of them.
        """
        try:
            statuses = self.statuses(kind.folder)
        except FileNotFoundError:
            return {}
        sizes: dict[str, int] = {}
        before, checked = self._checked.get(kind, {}), dict[tuple[str, int, int], bool]()
        for name, status in statuses.items():
            if kind.names.fullmatch(name) and S_ISREG(status.st_mode):
                file = name, status.st_ino, status.st_ctime_ns
                with suppress(OSError):
                    checked[file] = is_known or (before[file] if file in before else self.is_own(kind, name))
                if checked.get(file, True):
                    sizes[name] = nbytes_of(status)
        self._checked[kind] = checked
        return sizes


def stored_in(status: os.stat_result) -> Stored:
    """Return the metadata of a file with this status."""
    version = status.st_dev, status.st_ino, status.st_mtime_ns  # other programs may write into a file
    return Stored(version, status.st_size, nbytes_of(status))


def nbytes_of(status: os.stat_result) -> int:
    """Return the size on disk of a regular file in bytes, 0 for anything else.

    It is the file's length if no blocks are reported: file systems may report them late (ZFS) or never (ramfs).
    """
    return status.st_blocks * 512 or status.st_size if S_ISREG(status.st_mode) else 0


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
