"""The folder of a store and its subfolders, read through descriptors.

Every access is relative to a descriptor. Links are not followed.
Only missing subfolders are made here: `root.py` writes files.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from ..errors import FormatError
from .files import open_regular, read_all
from .kinds import CATALOGUE, CATALOGUE_NAME, DATABASE_FILES, FOLDERS, SEGMENT, FileKind, kind_of
from .process import has_database

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderTree:
    """A folder and its subfolders, whether or not it is a store.

    Args:
        path: resolved path of the folder. It is opened when it is first needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []  # closed together, since any thread may be using one
        self._folders: dict[str, tuple[tuple[int, int], int]] = {}
        self._opening = threading.Lock()
        self._closing = weakref.finalize(self, _close, self._descriptors)
        self._closing.atexit = False

    def close(self) -> None:
        """Close the folders."""
        self._folders.clear()
        self._closing()

    # --- folders

    @property
    def root_descriptor(self) -> int:
        """Descriptor of the folder. Raises OSError: it is closed, or cannot be opened."""
        if not self._closing.alive:
            raise OSError(errno.EBADF, "the store is closed", str(self.path))
        if not self._descriptors:
            with self._opening:
                if not self._descriptors:
                    self._descriptors.extend(map(os.open, [self.path], [_FOLDER_FLAGS]))  # in C: no Ctrl-C loses it
        return self._descriptors[0]

    def folder_descriptor(self, name: str, make: bool = False) -> int:
        """Return the descriptor of a subfolder, "" for the root. One that was replaced is opened anew.

        Raises:
            NotADirectoryError: it is a link, or no folder. OSError: it is missing, or cannot be opened.
        """
        if not name:
            return self.root_descriptor
        try:
            status = os.stat(name, dir_fd=self.root_descriptor, follow_symlinks=False)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.root_descriptor)
            status = os.stat(name, dir_fd=self.root_descriptor, follow_symlinks=False)
        identity = status.st_dev, status.st_ino
        known = self._folders.get(name)
        if known is not None and known[0] == identity:
            return known[1]
        if not S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, or no folder", str(self.path / name))
        root = self.root_descriptor
        with self._opening:
            self._descriptors.extend(map(partial(os.open, dir_fd=root), [name], [_FOLDER_FLAGS]))
            opened = self._descriptors[-1]
        status = os.fstat(opened)
        self._folders[name] = (status.st_dev, status.st_ino), opened
        return opened

    def list_names(self, folder: str) -> set[str]:
        return set(os.listdir(self.folder_descriptor(folder)))

    def is_reachable(self) -> bool:
        """Return whether the folder is where it was, so that what is not found in it is gone."""
        with suppress(OSError):
            is_here = os.path.samestat(os.stat(self.path), os.fstat(self.root_descriptor))
            return is_here and self.folder_descriptor(SEGMENT.folder) >= 0
        return False

    # --- looking

    def where(self, kind: FileKind, name: str) -> Path:
        """Return the path of a file, for messages."""
        return self.path / kind.folder / name

    def names(self, kind: FileKind) -> list[str]:
        """Return the names of this kind, whatever their content, sorted.

        Raises:
            OSError: they cannot all be listed. FileNotFoundError: the subfolder is missing.
        """
        return sorted(filter(kind.names.fullmatch, self.list_names(kind.folder)))

    def find(self, kind: FileKind, name: str) -> os.stat_result | None:
        """Return the status of what has this name, without following a link; None if there is nothing."""
        try:
            return os.stat(name, dir_fd=self.folder_descriptor(kind.folder), follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(
        self, kind: FileKind, name: str, flags: int = os.O_RDONLY
    ) -> AbstractContextManager[tuple[int, os.stat_result]]:
        """Open a regular file. See `open_regular`."""
        return open_regular(name, flags, self.folder_descriptor(kind.folder))

    def read(self, kind: FileKind, name: str) -> bytes:
        """Read the beginning of a file, which is all of a record. Raises OSError or FormatError."""
        with self.open(kind, name) as (fd, status):
            if kind.is_record and status.st_size > kind.most_bytes:
                raise FormatError(f"a record of {status.st_size} bytes")
            return read_all(fd, min(status.st_size, kind.most_bytes), 0)

    def is_own(self, kind: FileKind, name: str) -> bool:
        """Return whether there is a file that the library wrote. Raises OSError: that cannot be found out."""
        try:
            return kind.names.fullmatch(name) is not None and kind.is_own(name, self.read(kind, name))
        except (FormatError, FileNotFoundError):
            return False

    def unknown(self, is_known: Callable[[FileKind, str], bool] = lambda kind, name: False) -> list[str]:
        """Return what the library did not write, relative to the folder, sorted. It is never changed.

        Args:
            is_known: says which files need not be read.

        Raises:
            OSError: a folder cannot be listed.
        """
        unknown, is_open = [], has_database(self.where(CATALOGUE, CATALOGUE_NAME))
        for folder in ("", *FOLDERS):
            with suppress(FileNotFoundError):
                for name in self.list_names(folder) - (set(FOLDERS) if not folder else set()):
                    kind = kind_of(folder, name)
                    if kind is not None and (is_known(kind, name) or (is_open and name in DATABASE_FILES)):
                        continue
                    with suppress(OSError):  # nothing can be said of it now
                        if kind is None or not (self.is_own(kind, name) or self.find(kind, name) is None):
                            unknown.append(os.path.join(folder, name))
        return sorted(unknown)

    def nbytes(self, *kinds: FileKind) -> int:
        """Return the room that all files of these kinds take. Raises OSError."""
        total = 0
        for folder in {kind.folder for kind in kinds}:
            with suppress(FileNotFoundError):
                for name in self.list_names(folder):
                    kind = kind_of(folder, name)
                    if kind is not None and kind in kinds and (status := self.find(kind, name)) is not None:
                        total += nbytes_of(status)
        return total


def nbytes_of(status: os.stat_result) -> int:
    """Return the size on disk of a regular file in bytes, 0 for anything else."""
    return status.st_blocks * 512 if S_ISREG(status.st_mode) else 0


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
