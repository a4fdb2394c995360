"""Folders of a POSIX file system as places of stores: one for a machine's own store, one that machines share.

<root>/segments/<id>.kv   immutable segment files        <root>/pins/<id>          segments excluded from eviction
<root>/beside/<id>.<kind> sidecars of the segments       <root>/catalogue.sqlite   rebuilt from headers if lost
<root>/tmp/               files being written            <root>/conversations/     see conversations.py
<root>/documents/         see documents.py               <root>/hf_tiered_cache.json  marks the folder as a store
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from ..errors import ConfigError, FormatError, StoreBusyError, StoreError
from .backend import HeadLength, SegmentBackend, file_of
from .database import SQLITE_PATH_BYTES, has_database
from .engines import Engine, EngineFile, ReadOp
from .format import HEADER_BYTES
from .kinds import CATALOGUE_NAME, DATABASE_FILES, KINDS, LOCK, PIN, SEGMENT, SEGMENT_SUFFIX, SIDECAR, FileKind
from .lazy import torch
from .objects import ObjectBackend
from .records import RecordFiles
from .root import StoreRoot, Temporary
from .settings import path_in
from .tree import Stored, open_regular, read_all, stored_in

_LOCK_SECONDS = 30.0
"""Seconds to wait for the store's lock, which is normally held only briefly. After a timeout the limit is
`_LOCK_SECONDS_AFTERWARDS` until the lock is acquired again."""
_LOCK_SECONDS_AFTERWARDS = 1.0
_OPENINGS = 100  # maximum number of attempts to open a file that is replaced between two calls each time
_MOST_PATH_BYTES = SQLITE_PATH_BYTES - len(f"/{CATALOGUE_NAME}")
_MOST_UNSYNCED = 1000  # maximum number of files that wait to be made durable
_UNNAMED = tuple(kind for kind in KINDS if kind not in (SEGMENT, SIDECAR, PIN))
"""Kinds of files that take space and are neither segments nor sidecars. Pins are empty."""
_THREADS = 32  # reads in flight: a server of files answers each slowly, and many at once
_ANY = re.compile(".*", re.DOTALL)


class FolderBackend(SegmentBackend):
    """Implementation of `SegmentBackend` with a folder, and an engine that is closed with it. Raises StoreError."""

    def __init__(self, root: Path, engine: Engine) -> None:
        if (nbytes := len(os.fsencode(root))) > _MOST_PATH_BYTES:
            raise StoreError(
                f"the path of a store has at most {_MOST_PATH_BYTES} bytes, not {nbytes}; choose a shorter one: {root}"
            )
        self.files = StoreRoot(root)
        self.root, self.place, self.writable = self.files.path, str(self.files.path), self.files.writable
        self.catalogue: StoreRoot | None = self.files
        self.records: RecordFiles = self.files
        self.engine, self.reads_with, self.reads_device = engine, engine.describe(), engine.reads_device
        self._lock_seconds = _LOCK_SECONDS
        self._lock = threading.RLock()  # guards `_unsynced`, the files to be made durable
        self._unsynced: dict[str, None] = {}

    def is_reachable(self) -> bool:
        return self.files.is_reachable()

    # --- reading

    def sidecars(self) -> dict[str, int]:
        return self.files.sizes(SIDECAR)

    def unknown(self, known: Collection[str] = ()) -> list[str]:
        is_open = has_database(self.files)

        def is_known(kind: FileKind, name: str) -> bool:
            if kind is SEGMENT:
                return name.removesuffix(SEGMENT_SUFFIX) in known
            return is_open and name in DATABASE_FILES

        return self.files.unknown(is_known)

    def head(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes]:
        with self.files.open(*file_of(segment_id)) as (fd, status):
            return _head(fd, status, length)

    def open(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes, EngineFile]:
        path = self.where(segment_id)
        for _ in range(_OPENINGS):
            with self.files.open(*file_of(segment_id)) as (fd, status):  # its inode is not reused while it is open
                stored, head = _head(fd, status, length)
                with suppress(FileNotFoundError):  # engines open by path: check that it is the same file
                    file = self.engine.open(path)
                    if stored_in(os.stat(path, follow_symlinks=False)).version == stored.version:
                        return stored, head, file
            self.files.check_in_place()
        raise OSError(errno.EAGAIN, "it is replaced repeatedly", path)

    def read(self, ops: Sequence[ReadOp]) -> Future[int]:
        return self.engine.submit(ops)

    def register(self, memory: torch.Tensor) -> None:
        self.engine.register(memory)

    # --- writing

    @contextmanager
    def write(self, segment_id: str, nbytes: int) -> Iterator[Temporary]:
        with self.files.temporary(*file_of(segment_id), nbytes) as upload:
            try:
                yield upload
            finally:
                if upload.published:
                    with self._lock:
                        self._unsynced[segment_id] = None
        if len(self._unsynced) >= _MOST_UNSYNCED:
            with suppress(OSError):
                self.sync()

    def delete(self, segment_id: str) -> bool:
        with self._lock:
            self._unsynced.pop(segment_id, None)
        return super().delete(segment_id)

    def sync(self) -> None:
        """See `SegmentBackend`. Syncs file data first, then folders."""
        with self._lock:
            waiting, self._unsynced = list(self._unsynced), {}
        kinds, num_synced = {file_of(name)[0].folder: name for name in waiting}, 0
        try:
            for name in waiting:
                with suppress(FileNotFoundError):  # evicted meanwhile
                    self.files.sync(*file_of(name))
                num_synced += 1
            for name in kinds.values():
                self.files.sync(file_of(name)[0])
        except OSError:
            with self._lock:
                # retrying any file of a folder also syncs the folder
                self._unsynced = dict.fromkeys([*waiting[num_synced:], *kinds.values()]) | self._unsynced
            raise

    def pinned(self) -> set[str]:
        try:
            pins = {name: self.files.find(PIN, name) for name in self.files.names(PIN)}
        except FileNotFoundError:
            return set()
        return {name for name, pin in pins.items() if pin is not None and S_ISREG(pin.st_mode) and not pin.st_size}

    # --- space

    def usage(self) -> int:
        is_open = has_database(self.files)
        sizes = [self.files.sizes(kind, is_open and kind in DATABASE_FILES.values()) for kind in _UNNAMED]
        return sum(sum(by_name.values()) for by_name in sizes)

    def free(self) -> int | None:
        total, _, free = shutil.disk_usage(self.root)
        return free if total else None  # some file systems report no sizes, such as ramfs

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        return self.files.remove_orphans(dry_run)

    @contextmanager
    def locked(self) -> Iterator[None]:
        if not self.writable:  # nothing can be changed, so no lock is needed
            yield
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(self.files.locked(LOCK, "lock", self._lock_seconds))
            except TimeoutError:
                waited, self._lock_seconds = self._lock_seconds, _LOCK_SECONDS_AFTERWARDS
                raise StoreBusyError(
                    f"{self.files.where(LOCK, 'lock')} was not released within {waited:g} s; end the process that "
                    "hangs with this store open"
                ) from None
            self._lock_seconds = _LOCK_SECONDS
            yield

    def close(self) -> None:
        self.engine.close()
        self.files.close()


def head_of_file(path: Path, length: HeadLength) -> tuple[Stored, bytes]:
    """Read the beginning of a segment file at any path. See `SegmentBackend.head`."""
    with open_regular(path) as (fd, status):
        return _head(fd, status, length)


def _head(fd: int, status: os.stat_result, length: HeadLength) -> tuple[Stored, bytes]:
    stored, page = stored_in(status), read_all(fd, HEADER_BYTES, 0)
    return stored, page + read_all(fd, max(0, length(stored, page) - HEADER_BYTES), HEADER_BYTES)


# --- a folder that several machines share


class SharedFolderBackend(ObjectBackend):
    """Backend with the objects of a store as files of a folder, which is protected as that of any store.

    Unlike `FolderBackend`, machines share no database, and no lock but those of temporary files. An address is
    "file:///folder". Raises ConfigError if it is not valid, or StoreError if the folder is no store and not empty, or a
    part of it is a link.
    """

    def __init__(self, address: str) -> None:
        folder = _folder_in(address)
        super().__init__(address.rstrip("/"), threads=_THREADS)
        self.files = StoreRoot(folder)
        self.writable = self.files.writable

    def find_object(self, name: str) -> Stored | None:
        status = self.files.find(*_file_of(name))
        return None if status is None or not S_ISREG(status.st_mode) else _stored_in_shared(status)

    def list_objects(self, folder: str) -> dict[str, Stored]:
        try:
            statuses = self.files.statuses(folder).items()
        except FileNotFoundError:
            if not self.files.is_reachable():
                raise
            return {}
        # links and pipes, too: `unknown` lists them, and nothing reads them
        return {name: _stored_in_shared(status) for name, status in statuses if not S_ISDIR(status.st_mode)}

    def get_object(self, name: str, version: object, offset: int, nbytes: int) -> bytes:
        with suppress(FormatError), self.files.open(*_file_of(name)) as (fd, status):
            if _stored_in_shared(status).version == version:
                return read_all(fd, nbytes, offset)
        raise FileNotFoundError(errno.ENOENT, "it was replaced or deleted", name)

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        self.files.write(*_file_of(name), content, replace)

    def delete_object(self, name: str) -> bool:
        return self.find_object(name) is not None and self.files.delete(*_file_of(name), is_checked=True)

    def is_reachable(self) -> bool:
        return self.files.is_reachable()

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        return self.files.remove_orphans(dry_run)

    def close(self) -> None:
        super().close()
        self.files.close()


def check_store(address: str) -> None:
    """Raise StoreError if the folder that an address names is no store, instead of making it one."""
    StoreRoot(_folder_in(address), make=False).close()


def _folder_in(address: str) -> Path:
    """Return the path of the folder that an address names. Raises ConfigError if it names none."""
    path = path_in(address)
    if path is None or not address.partition("://")[2].startswith("/"):
        raise ConfigError(f"{address} names no folder; write file:///folder")
    return path


def _file_of(name: str) -> tuple[FileKind, str]:
    folder, file = os.path.split(name)
    return FileKind(folder, _ANY, lambda *_: True), file  # `ObjectRecords` replaces only what the library wrote


def _stored_in_shared(status: os.stat_result) -> Stored:
    """Return metadata with a version that differs for a file that gets the inode of a deleted one."""
    return Stored((status.st_ino, status.st_mtime_ns, status.st_size), status.st_size, status.st_size)
