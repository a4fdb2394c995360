"""The folder of a store: the one way to its files.

Every access is relative to descriptors of the store's folder and its subfolders. Links are not followed. What is
deleted or replaced has to be a file of a kind (see `kinds.py`): by its name, and by its content. Whatever else is in
the folder is left as it is, and listed by `unknown`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import NamedTuple

from ..errors import FormatError, StoreError
from .files import allocate, fsync, open_file, open_regular, read_all, write_all
from .kinds import (
    CATALOGUE,
    CATALOGUE_NAME,
    DATABASE_FILES,
    FIXED_FILES,
    FOLDERS,
    LOCK,
    LOCK_SUFFIX,
    MARKER,
    MARKER_FORMAT,
    MARKER_NAME,
    MARKER_VERSION,
    SCHEMA_MARK,
    SEGMENT,
    TEMPORARY,
    TEMPORARY_LOCK,
    FileKind,
    encode_record,
    is_blank,
    json_object,
    kind_of,
)
from .process import has_database

logger = logging.getLogger("hf_tiered_cache")

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 100
_POLL_SECONDS = 0.005
_HAS_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_MARKER_CONTENT = encode_record({"format": MARKER_FORMAT, "version": MARKER_VERSION})


class Temporary(NamedTuple):
    """A file that is being written."""

    file: FileIO
    name: str


class StoreRoot:
    """The folder of a store.

    Args:
        path: of the folder. It may be a link, and is resolved once.
        make: whether the folder becomes a store if it is missing or empty. Else nothing in it is changed.

    Raises:
        StoreError: it is no store, and cannot or must not become one; or a part of it is a link.
    """

    def __init__(self, path: str | os.PathLike[str], make: bool = True) -> None:
        self._begin(Path(path).resolve())
        try:
            self._make_root(make)
            self.writable = self._claim(make)
        except BaseException:
            self.close()
            raise

    def _begin(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []  # closed together, since any thread may be using one
        self._folders: dict[str, tuple[tuple[int, int], int]] = {}
        self._opening = threading.Lock()
        self._closing = weakref.finalize(self, _close, self._descriptors)
        self._closing.atexit = False

    def again(self) -> StoreRoot:
        """Open the folder once more, with descriptors of its own. Raises OSError."""
        other = StoreRoot.__new__(StoreRoot)
        other._begin(self.path)
        other.writable = self.writable
        if not os.path.samestat(os.fstat(other._root), os.fstat(self._root)):
            other.close()
            raise OSError(errno.ESTALE, "another folder has its place", str(self.path))
        return other

    def close(self) -> None:
        """Close the folders."""
        self._folders.clear()
        self._closing()

    # --- opening

    def _make_root(self, make: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file; give KVStore the path of a folder")
        if not make and not self.path.is_dir():
            raise StoreError(f"there is no store at {self.path}")
        try:
            if make:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if not self.path.is_dir():
                raise StoreError(f"{self.path} cannot be made ({error.strerror}); choose another folder") from error

    def _claim(self, make: bool) -> bool:
        """Mark the folder as a store, and make what it lacks. Returns whether it can be written.

        Where that fails, or it cannot be found out whether the folder is a store, nothing in it is changed.
        """
        try:
            self._check_is_store(make)
            if not make:
                return False
            self._mark()
            folders = [self._root, *(self._folder(name, make=True) for name in FOLDERS)]
            open_file("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, self._root).close()
            if all(os.access(".", os.W_OK, dir_fd=folder) for folder in folders):
                return True
            reason = os.strerror(errno.EACCES)
        except OSError as error:
            reason = error.strerror or str(error)
            if not make:
                raise StoreError(f"{self.path} cannot be read ({reason}); check the disk") from error
        logger.warning("%s cannot be written (%s): nothing new is stored", self.path, reason)
        return False

    def _check_is_store(self, make: bool) -> None:
        """Raise StoreError if the folder is no store, nor to become one. Raises OSError: that cannot be found out."""
        names = self._list("")
        is_store = self._is_marked(names) or self._is_store_without_marker(names) or (make and not names)
        if not (is_store or self._is_marked({MARKER_NAME})):  # another process may have made the store meanwhile
            if not make:
                raise StoreError(f"there is no store at {self.path}")
            raise StoreError(
                f"{self.path} holds files and is no store; give KVStore the path of a new or an empty folder"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        """Raise StoreError if a part of the store is a link, or no file or folder as it should be."""
        for name in (*FOLDERS, *FIXED_FILES):
            with suppress(FileNotFoundError):
                mode = os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode
                if S_ISDIR(mode) if name in FOLDERS else S_ISREG(mode):
                    continue
                what = "a link" if S_ISLNK(mode) else f"no {'folder' if name in FOLDERS else 'regular file'}"
                raise StoreError(
                    f"{self.path / name} is {what}, which a store does not use; remove it, or choose another folder"
                )

    def _is_marked(self, names: Collection[str]) -> bool:
        """Return whether the marker is there and whole.

        Raises:
            StoreError: it is of a newer version, or another file has its name.
        """
        if MARKER_NAME not in names:
            return False
        try:
            content = self.read(MARKER, MARKER_NAME)
        except FileNotFoundError:
            return False
        except FormatError as error:
            raise StoreError(f"{self.path / MARKER_NAME} is a link, or no regular file; remove it") from error
        if is_blank(content):  # its writer was killed, or has just begun
            return False
        facts = json_object(content)
        if facts.get("format") != MARKER_FORMAT or type(version := facts.get("version")) is not int:
            raise StoreError(f"{self.path / MARKER_NAME} does not mark a store; choose another folder")
        if version > MARKER_VERSION:
            raise StoreError(f"{self.path} is a store of format {version}; upgrade hf-tiered-cache to open it")
        return True

    def _mark(self) -> None:
        """Write the marker. Several processes write the same bytes. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open_file(MARKER_NAME, flags, self._root) as file:
            if os.fstat(file.fileno()).st_nlink == 1 and is_blank(read_all(file.fileno(), len(_MARKER_CONTENT), 0)):
                write_all(file.fileno(), memoryview(_MARKER_CONTENT), 0)

    def _is_store_without_marker(self, names: Collection[str]) -> bool:
        """Return whether this is a store of a version without markers, or one whose writer was killed early.

        The first thing that was made is the marker, or before there were markers the folder of the segments. A store
        has a segment or a catalogue, or nothing but its own folders and files, which are empty. Raises OSError.
        """
        if set(names) == {MARKER_NAME}:
            return True
        if "segments" not in names:
            return False
        with suppress(FormatError, FileNotFoundError):
            if CATALOGUE_NAME in names and SCHEMA_MARK in self.read(CATALOGUE, CATALOGUE_NAME):
                return True
        with suppress(NotADirectoryError):
            for name in self.names(SEGMENT):
                with suppress(FormatError, FileNotFoundError):
                    content = self.read(SEGMENT, name)
                    if SEGMENT.is_own(name, content) and not is_blank(content):
                        return True
        return all(self._is_empty(name) for name in names)

    def _is_empty(self, name: str) -> bool:
        """Return whether this is an empty folder or file that a store has."""
        with suppress(OSError, FormatError):
            if name in FOLDERS:
                return not self._list(name)
            return name in FIXED_FILES and self.find(FIXED_FILES[name], name).st_size == 0  # type: ignore[union-attr]
        return False

    # --- folders

    @property
    def _root(self) -> int:
        """Descriptor of the folder. Raises OSError: it is closed, or cannot be opened."""
        if not self._closing.alive:
            raise OSError(errno.EBADF, "the store is closed", str(self.path))
        if not self._descriptors:
            with self._opening:
                if not self._descriptors:
                    self._descriptors.extend(map(os.open, [self.path], [_FOLDER_FLAGS]))  # in C: no Ctrl-C loses it
        return self._descriptors[0]

    def _folder(self, name: str, make: bool = False) -> int:
        """Return the descriptor of a subfolder, "" for the root. One that was replaced is opened anew.

        Raises:
            NotADirectoryError: it is a link, or no folder. OSError: it is missing, or cannot be opened.
        """
        if not name:
            return self._root
        try:
            status = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
            status = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        identity = status.st_dev, status.st_ino
        known = self._folders.get(name)
        if known is not None and known[0] == identity:
            return known[1]
        if not S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, or no folder", str(self.path / name))
        root = self._root
        with self._opening:
            self._descriptors.extend(map(partial(os.open, dir_fd=root), [name], [_FOLDER_FLAGS]))
            opened = self._descriptors[-1]
        status = os.fstat(opened)
        self._folders[name] = (status.st_dev, status.st_ino), opened
        return opened

    def _list(self, folder: str) -> set[str]:
        return set(os.listdir(self._folder(folder)))

    def is_reachable(self) -> bool:
        """Return whether the folder is where it was, so that what is not found in it is gone."""
        with suppress(OSError):
            is_here = os.path.samestat(os.stat(self.path), os.fstat(self._root))
            return is_here and self._folder(SEGMENT.folder) >= 0
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
        return sorted(filter(kind.names.fullmatch, self._list(kind.folder)))

    def find(self, kind: FileKind, name: str) -> os.stat_result | None:
        """Return the status of what has this name, without following a link; None if there is nothing."""
        try:
            return os.stat(name, dir_fd=self._folder(kind.folder), follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(
        self, kind: FileKind, name: str, flags: int = os.O_RDONLY
    ) -> AbstractContextManager[tuple[int, os.stat_result]]:
        """Open a regular file. See `open_regular`."""
        return open_regular(name, flags, self._folder(kind.folder))

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
                for name in self._list(folder) - (set(FOLDERS) if not folder else set()):
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
                for name in self._list(folder):
                    kind = kind_of(folder, name)
                    if kind is not None and kind in kinds and (status := self.find(kind, name)) is not None:
                        total += nbytes_of(status)
        return total

    # --- writing

    @contextmanager
    def temporary(self, nbytes: int) -> Iterator[Temporary]:
        """Make a file of this size that has no name of its kind yet. It is gone in the end, unless it was published.

        A lock next to it is held meanwhile: a temporary file whose lock is free belongs to a process that has died.
        Raises OSError.
        """
        name = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        folder = self._folder(TEMPORARY.folder, make=True)
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
        source, target = self._folder(TEMPORARY.folder), self._folder(kind.folder, make=True)
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
            folder = self._folder(kind.folder, make=True)
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
            os.unlink(name, dir_fd=self._folder(kind.folder))
        except FileNotFoundError:
            return False
        return True

    def sync(self, kind: FileKind, name: str | None = None) -> None:
        """Make a file's data durable, or without a name the names of all files of a kind. Raises OSError."""
        if name is None:
            fsync(self._folder(kind.folder))
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
        folder = self._folder(kind.folder, make=True)
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


def nbytes_of(status: os.stat_result) -> int:
    """Return the room that a regular file takes. What is no file takes none that is reckoned."""
    return status.st_blocks * 512 if S_ISREG(status.st_mode) else 0


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


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
