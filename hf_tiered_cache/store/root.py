"""Folder of a store. All access to its files is through this module.

A folder is a store if it has a marker. Every access is relative to descriptors of the folder and its subfolders
(`tree.py`). Links are not followed. Only files of a known kind (see `kinds.py`), by both name and content, are deleted
or replaced. All other files in the folder are left unchanged, and are listed by `unknown`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG

from ..errors import FormatError, StoreError
from .faults import LOGGER
from .kinds import (
    ALL_FOLDERS,
    FIXED_FILES,
    FOLDERS,
    LOCK_SUFFIX,
    MARKER,
    MARKER_FORMAT,
    MARKER_NAME,
    MARKER_VERSION,
    TEMPORARY,
    TEMPORARY_LOCK,
    FileKind,
    encode_record,
    is_blank,
    json_object,
    kind_of,
    not_own,
)
from .tree import FolderTree, LockFile, allocate, nbytes_of, open_file, read_all, try_flock, write_all

_MARKER_CONTENT = encode_record({"format": MARKER_FORMAT, "version": MARKER_VERSION})
_ATTEMPTS = 100
_POLL_SECONDS = 0.005
_HAS_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_FILE_IN_PLACE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


class Temporary:
    """Temporary file that is being written, and then gets its name: the `Upload` of a folder."""

    def __init__(self, files: StoreRoot, file: FileIO, temporary_name: str, kind: FileKind, name: str) -> None:
        self.path, self.published = files.where(TEMPORARY, temporary_name), False
        self.file, self._files, self._kind, self._name = file, files, kind, name

    def write(self, data: memoryview, offset: int) -> None:
        write_all(self.file.fileno(), data, offset)

    def nbytes(self) -> int:
        return nbytes_of(os.fstat(self.file.fileno()))

    def publish(self, replace: bool) -> None:
        files, kind, name, temporary_name = self._files, self._kind, self._name, self.path.name
        source, target = files.folder_descriptor(TEMPORARY.folder), files.folder_descriptor(kind.folder, make=True)
        if not replace:  # unlike a rename, a link never replaces a file: the first writer wins
            try:
                os.link(temporary_name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                self.published = True
                return
            except OSError as error:
                if error.errno not in _HAS_NO_LINKS:
                    raise
        if files.find(kind, name) is not None:
            if not replace:
                raise FileExistsError(errno.EEXIST, f"{files.where(kind, name)} already exists")
            if not files.is_own(kind, name):
                raise FileExistsError(errno.EEXIST, not_own(files.where(kind, name)))
        os.rename(temporary_name, name, src_dir_fd=source, dst_dir_fd=target)
        self.published = True


class StoreRoot(FolderTree):
    """Folder of a store. The path may be a link, and is resolved once.

    With `make`, a missing or empty folder becomes a store; without, nothing in it is changed. Raises StoreError if it
    is no store, and cannot or must not become one, or a part of it is a link.
    """

    def __init__(self, path: str | os.PathLike[str], make: bool = True) -> None:
        super().__init__(Path(path).resolve())
        try:
            self.writable = _claim(self, make)
        except BaseException:
            self.close()
            raise

    def again(self) -> StoreRoot:
        """Open the folder again, with separate descriptors. Raises OSError, also if another folder has replaced it."""
        reopened = StoreRoot.__new__(StoreRoot)
        FolderTree.__init__(reopened, self.path)
        reopened.writable = self.writable
        if not os.path.samestat(os.fstat(reopened.root_descriptor), os.fstat(self.root_descriptor)):
            reopened.close()
            raise OSError(errno.ESTALE, "it was replaced by another folder", str(self.path))
        return reopened

    # --- writing

    @contextmanager
    def temporary(self, kind: FileKind, final_name: str, nbytes: int) -> Iterator[Temporary]:
        """Create a temporary file of the given size. It is deleted at the end, unless it was published. Raises OSError.

        It has a lock file, which is locked in the meantime. If the lock is free, its process has died.
        """
        name = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        folder = self.folder_descriptor(TEMPORARY.folder, make=True)
        with ExitStack() as stack:
            lock = self.lock(TEMPORARY_LOCK, name + LOCK_SUFFIX)
            if lock is None:
                raise OSError(errno.EAGAIN, "it is locked", str(self.where(TEMPORARY_LOCK, name + LOCK_SUFFIX)))
            stack.enter_context(lock)
            stack.callback(_forget_lock, folder, name, lock)
            file = stack.enter_context(open_file(name, _NEW_FILE, folder))
            stack.callback(_forget, folder, name, file)
            allocate(file.fileno(), nbytes)
            yield Temporary(self, file, name, kind, final_name)

    def write(self, kind: FileKind, name: str, content: bytes, replace: bool = True) -> None:
        """Write or `replace` a file atomically. Its data is durable; call `sync` to make its name durable."""
        with self.temporary(kind, name, len(content)) as temporary:
            temporary.write(memoryview(content), 0)
            os.fsync(temporary.file.fileno())
            temporary.publish(replace)

    def make_empty(self, kind: FileKind, name: str) -> None:
        """Create an empty file, unless the store has it. Raises OSError, FileExistsError if it is not the library's."""
        try:
            folder = self.folder_descriptor(kind.folder, make=True)
            open_file(name, _NEW_FILE, folder).close()
        except FileExistsError:
            if not self.is_own(kind, name):
                raise FileExistsError(errno.EEXIST, not_own(self.where(kind, name))) from None

    def delete(self, kind: FileKind, name: str, is_checked: bool = False) -> bool:
        """Delete a file of the library (known to be one: `is_checked`). Returns whether it existed. Raises OSError."""
        if not (is_checked or self.is_own(kind, name)):
            return False
        try:
            os.unlink(name, dir_fd=self.folder_descriptor(kind.folder))
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Delete all files of the library, and the folder. Raises OSError if other files are left in it."""
        for folder in (*ALL_FOLDERS, ""):
            with suppress(FileNotFoundError):
                for name in sorted(self.list_names(folder)):  # a temporary file before its lock
                    if (kind := kind_of(folder, name)) is not None:
                        self.delete(kind, name)
                os.rmdir(self.path / folder)

    def sync(self, kind: FileKind, name: str | None = None) -> None:
        """Make a file's data durable, or without `name` the names of all files of this kind. Raises OSError."""
        if name is None:
            os.fsync(self.folder_descriptor(kind.folder))
        else:
            with self.open(kind, name) as (fd, _):
                os.fdatasync(fd)

    # --- locks

    def lock(self, kind: FileKind, name: str) -> LockFile | None:
        """Lock a file until it is closed. A missing file is created; existing content is not changed.

        Returns None if another process or thread has the lock. Raises OSError if the file cannot be locked. All that
        changes a store locks something, so this writes the marker again if somebody has emptied the open folder.
        """
        self.check_in_place()
        if self.find(MARKER, MARKER_NAME) is None:
            _mark(self)
        folder = self.folder_descriptor(kind.folder, make=True)
        for _ in range(_ATTEMPTS):
            status = self.find(kind, name)
            if status is not None and not S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is a link, or not a regular file", str(self.where(kind, name)))
            with ExitStack() as stack:
                file = stack.enter_context(open_file(name, _FILE_IN_PLACE, folder, LockFile))
                assert isinstance(file, LockFile)
                if not file.lock():
                    return None
                if _has_name(file, folder, name):  # otherwise the previous holder of the lock has deleted the file
                    stack.pop_all()
                    return file
        return None

    @contextmanager
    def locked(self, kind: FileKind, name: str, seconds: float) -> Iterator[None]:
        """Hold a lock while the body runs. Raises TimeoutError if it is not free within `seconds`, or OSError."""
        deadline = time.monotonic() + seconds
        while (file := self.lock(kind, name)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "it was not released in time", str(self.where(kind, name)))
            time.sleep(_POLL_SECONDS)
        with file:
            yield

    def is_locked(self, kind: FileKind, name: str) -> bool:
        """Return whether the lock is held. A missing lock file is not created."""
        try:
            with self.open(kind, name) as (fd, _):
                is_free = try_flock(fd, fcntl.LOCK_SH)
                if is_free:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy of the file
                return not is_free
        except (OSError, FormatError):
            return False

    def rewrite(self, lock: FileIO, kind: FileKind, name: str, content: bytes) -> None:
        """Replace the content of a locked file of the library in place. Raises OSError, also for a second link."""
        fd = lock.fileno()
        if os.fstat(fd).st_nlink != 1 or not kind.is_own(name, read_all(fd, kind.most_bytes, 0)):
            raise FileExistsError(errno.EEXIST, not_own(self.where(kind, name)))
        os.ftruncate(fd, 0)
        write_all(fd, memoryview(content), 0)

    # --- temporary files of dead processes

    def remove_orphans(self, dry_run: bool) -> tuple[dict[str, int], bool]:
        """Delete the temporary files of dead processes. See `SegmentBackend.clean_up`."""
        try:
            names = set(self.names(TEMPORARY))
            names.update(name.removesuffix(LOCK_SUFFIX) for name in self.names(TEMPORARY_LOCK))
        except OSError:
            return {}, False
        orphans: dict[str, int] = {}
        published = False
        for name in sorted(names):
            with suppress(OSError):
                published |= self._remove_orphan(name, dry_run, orphans)
        return orphans, published

    def _remove_orphan(self, name: str, dry_run: bool, orphans: dict[str, int]) -> bool:
        """Delete a temporary file if its lock is free. Returns whether it was also published; that name is kept."""
        lock_name, status = name + LOCK_SUFFIX, self.find(TEMPORARY, name)
        if self.is_locked(TEMPORARY_LOCK, lock_name) or (status is not None and not self.is_own(TEMPORARY, name)):
            return False
        is_published = status is not None and status.st_nlink > 1
        if not dry_run:
            lock = self.lock(TEMPORARY_LOCK, lock_name)
            if lock is None:
                return False
            with lock:
                self.delete(TEMPORARY, name)
                self.delete(TEMPORARY_LOCK, lock_name)
        if status is not None:
            orphans[str(self.where(TEMPORARY, name))] = 0 if is_published else nbytes_of(status)
        return is_published


def _has_name(file: FileIO, folder: int, name: str) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name, dir_fd=folder, follow_symlinks=False))
    return False


def _forget(folder: int, name: str, file: FileIO) -> None:
    """Delete an open file, if it still has this name. Errors are ignored: a later clean-up deletes it."""
    with suppress(OSError):
        if _has_name(file, folder, name):
            os.unlink(name, dir_fd=folder)


def _forget_lock(folder: int, name: str, lock: FileIO) -> None:
    """Delete the lock of a temporary file, unless that file is left: only with its lock is it cleaned up later."""
    with suppress(OSError):
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            _forget(folder, name + LOCK_SUFFIX, lock)


# --- recognition and creation


def _claim(tree: FolderTree, make: bool) -> bool:
    """Mark the folder as a store, and create the parts that it lacks. See `StoreRoot`.

    If the folder is refused, or if it cannot be determined whether it is a store, nothing in it is changed. Returns
    whether the store can be written; False without `make`.
    """
    if make:
        _make_root(tree.path)
    try:
        _check_is_store(tree, make)
        if not make:
            return False
        _mark(tree)
        folders = [tree.root_descriptor, *(tree.folder_descriptor(name, make=True) for name in FOLDERS)]
        open_file("lock", _FILE_IN_PLACE, tree.root_descriptor).close()
        if all(os.access(".", os.W_OK, dir_fd=folder) for folder in folders):
            return True
        reason = os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
        if not make and isinstance(error, FileNotFoundError):
            raise StoreError(f"there is no store at {tree.path}") from error
        if not make:
            raise StoreError(f"{tree.path} cannot be read ({reason}); check the disk and its permissions") from error
    LOGGER.warning("%s is not writable (%s), so no new KV is stored", tree.path, reason)
    return False


def _make_root(path: Path) -> None:
    """Create the folder if it is missing. Raises StoreError if it is a file, or cannot be created."""
    if os.path.exists(path) and not os.path.isdir(path):  # unlike the methods, never raise an error
        raise StoreError(f"{path} is a file; pass the path of a folder to KVStore")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if not os.path.isdir(path):
            raise StoreError(f"{path} cannot be created ({error.strerror}); choose another folder") from error


def _check_is_store(tree: FolderTree, make: bool) -> None:
    """Raise StoreError if the folder is no store and must not become one, or OSError if that cannot be determined."""
    is_empty = not tree.list_names("")
    if not _is_marked(tree) and not (make and is_empty):
        if not make:
            raise StoreError(f"there is no store at {tree.path}")
        raise StoreError(
            f"{tree.path} contains files, but is not a store; pass the path of a new or an empty folder to KVStore"
        )
    _check_kinds(tree)


def _is_marked(tree: FolderTree) -> bool:
    """Return whether the marker exists. Raises StoreError if it is of a newer version, or not a marker.

    It is the first file of a store, and blank if its writer was killed. A blank one counts only if nothing else than
    files of a store is there.
    """
    try:
        content = tree.read(MARKER, MARKER_NAME)
    except FileNotFoundError:
        return False
    except FormatError as error:
        raise StoreError(f"{tree.path / MARKER_NAME} is a link, or not a regular file; remove it") from error
    if is_blank(content):
        with suppress(NotADirectoryError):  # `_check_kinds` refuses what is no folder
            return all(kind is not None for *_, kind in tree.entries())
        return True
    facts = json_object(content)
    if facts.get("format") != MARKER_FORMAT or type(version := facts.get("version")) is not int:
        raise StoreError(f"{tree.path / MARKER_NAME} is not the marker of a store; choose another folder")
    if version > MARKER_VERSION:
        raise StoreError(
            f"{tree.path} is a store of format {version}, which this version does not support; upgrade "
            "hf-tiered-cache to open it"
        )
    return True


def _check_kinds(tree: FolderTree) -> None:
    """Raise StoreError if a part of the store is a link, or is not the expected file or folder."""
    for name in (*ALL_FOLDERS, *FIXED_FILES):
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=tree.root_descriptor, follow_symlinks=False).st_mode
            if S_ISDIR(mode) if name in ALL_FOLDERS else S_ISREG(mode):
                continue
            kind = "a link" if S_ISLNK(mode) else f"not a {'folder' if name in ALL_FOLDERS else 'regular file'}"
            raise StoreError(
                f"{tree.path / name} is {kind}, so a store cannot use it; remove it, or choose another folder"
            )


def _mark(tree: FolderTree) -> None:
    with open_file(MARKER_NAME, _FILE_IN_PLACE, tree.root_descriptor) as file:
        if os.fstat(file.fileno()).st_nlink == 1 and is_blank(read_all(file.fileno(), len(_MARKER_CONTENT), 0)):
            write_all(file.fileno(), memoryview(_MARKER_CONTENT), 0)
            os.fsync(file.fileno())  # else a power failure may blank it
