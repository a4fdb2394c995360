"""Segments as files in a folder of a POSIX file system: the first backend.

<root>/segments/<id>.kv   immutable segment files        <root>/pins/<id>       segments never to evict
<root>/beside/<id>.<kind> arrays that belong to these    <root>/catalogue.sqlite  rebuilt from headers if lost
<root>/tmp/               files being written        <root>/conversations/   see conversations.py
<root>/documents/         see documents.py
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from filelock import FileLock, Timeout

from ..errors import StoreBusyError, StoreError
from . import conversations, documents
from .backend import HeadLength, Stored
from .engines import Engine, EngineFile, ReadOp, ReadReport
from .files import LOCK_SUFFIX, allocate, fsync, lock_beside, open_file, open_regular, publish_name, read_all, write_all
from .format import HEADER_BYTES

logger = logging.getLogger("hf_tiered_cache")

SUFFIX = ".kv"
_LOCK_SECONDS = 30.0
"""How long to wait for the store's lock, which nobody needs for more than a moment; once in vain, then no longer than
`_LOCK_SECONDS_AFTERWARDS` until it was had again."""
_LOCK_SECONDS_AFTERWARDS = 1.0
_LOCK_POLL_SECONDS = 0.005
_OPENINGS = 100
"""Of a file that is replaced each time between two calls."""
_MOST_UNSYNCED = 1000
"""Files that may wait to be made durable."""


class FolderBackend:
    """See `SegmentBackend`.

    Args:
        root: the folder; made, for its owner only, if missing.
        engine: reads blocks; closed with the backend.

    Raises:
        StoreError: `root` is not a folder and cannot become one.
    """

    def __init__(self, root: Path, engine: Engine) -> None:
        self.root = root = Path(root).resolve()  # whatever the working directory becomes
        self.segments_dir, self.beside_dir = root / "segments", root / "beside"
        self.tmp_dir, self.pins_dir = root / "tmp", root / "pins"
        self.conversations_dir, self.documents_dir = root / conversations.FOLDER, root / documents.FOLDER
        self.place = str(root)
        self.catalogue: Path | None = root / "catalogue.sqlite"
        self.engine, self.reads_with = engine, engine.describe()
        self._lock_path = root / "lock"
        self._lock_seconds = _LOCK_SECONDS
        self._lock = threading.RLock()  # of what is still to be made durable
        self._unsynced: dict[str, None] = {}
        self.writable = self._make_folders()

    def _make_folders(self) -> bool:
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is a file; give KVStore the path of a folder")
        try:
            mine = self.segments_dir, self.beside_dir, self.tmp_dir, self.pins_dir
            for folder in (self.root, *mine, self.conversations_dir, self.documents_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            return True
        except OSError as error:
            if not self.root.is_dir():
                raise StoreError(f"{self.root} cannot be made ({error.strerror}); choose another folder") from error
            logger.warning("%s cannot be written (%s): nothing new is stored", self.root, error.strerror)
            return False

    def path(self, segment_id: str) -> Path:
        """The file of a segment, or of what lies beside one."""
        return self.beside_dir / segment_id if "." in segment_id else self.segments_dir / f"{segment_id}{SUFFIX}"

    def where(self, segment_id: str) -> str:
        return str(self.path(segment_id))

    def is_reachable(self) -> bool:
        return self.segments_dir.is_dir()

    # --- reading

    def names(self) -> list[str]:
        with os.scandir(self.segments_dir) as entries:
            return [entry.name.removesuffix(SUFFIX) for entry in entries if entry.name.endswith(SUFFIX)]

    def beside(self) -> dict[str, int]:
        found = {}
        try:
            with os.scandir(self.beside_dir) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        if "." in entry.name and not entry.is_dir(follow_symlinks=False):
                            found[entry.name] = _stored(entry.stat(follow_symlinks=False)).nbytes
        except FileNotFoundError:  # a store of an older version that cannot be written
            pass
        return found

    def find(self, segment_id: str) -> Stored | None:
        return _find(self.path(segment_id))

    def head(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes]:
        return head_of_file(self.path(segment_id), length)

    def open(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes, EngineFile]:
        path = self.path(segment_id)
        for _ in range(_OPENINGS):
            with open_regular(path) as (fd, stat):  # while it is open, no other file takes its inode
                stored, head = _head(fd, stat, length)
                file, found = self.engine.open(str(path)), _find(path)
                if found is not None and found.version == stored.version:
                    return stored, head, file
        raise OSError(errno.EAGAIN, "it is replaced again and again", str(path))

    def read(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        return self.engine.submit(ops)

    # --- writing

    @contextmanager
    def write(self, segment_id: str, nbytes: int) -> Iterator[FolderUpload]:
        """See `SegmentBackend`.

        The lock beside the temporary file is held while it is written: one whose lock can be had belongs to a process
        that has died.
        """
        tmp = self.tmp_dir / f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        lock = lock_beside(tmp)
        with ExitStack() as stack:
            stack.callback(_forget, Path(lock.lock_file))
            stack.enter_context(lock.acquire(timeout=0))
            fd = stack.enter_context(open_file(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL)).fileno()
            stack.callback(_forget, tmp)
            allocate(fd, nbytes)
            upload = FolderUpload(fd, tmp, self.path(segment_id))
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
        try:
            self.path(segment_id).unlink()
        except FileNotFoundError:
            return False
        return True

    def sync(self) -> None:
        """See `SegmentBackend`. Data first, then the names."""
        with self._lock:
            waiting, self._unsynced = list(self._unsynced), {}
        folders, done = {self.path(name).parent: name for name in waiting}, 0
        try:
            for name in waiting:
                with suppress(FileNotFoundError):  # evicted meanwhile
                    fsync(self.path(name), data_only=True)
                done += 1
            for folder in folders:
                fsync(folder)
        except OSError:
            with self._lock:
                # a folder's own is asked for with any of its files
                self._unsynced = dict.fromkeys([*waiting[done:], *folders.values()]) | self._unsynced
            raise

    def pin(self, segment_id: str, pinned: bool) -> None:
        pin = self.pins_dir / segment_id
        if pinned:
            pin.touch(mode=0o600)
        else:
            pin.unlink(missing_ok=True)

    def pinned(self) -> set[str]:
        try:
            return set(os.listdir(self.pins_dir))
        except FileNotFoundError:
            return set()

    # --- room

    def usage(self) -> int:
        records = [folder for folder in (self.conversations_dir, self.documents_dir) if folder.is_dir()]
        folders = [self.root, self.tmp_dir, *records]
        return sum(_disk_bytes(path) for folder in folders for path in folder.iterdir())

    def free(self) -> int | None:
        return shutil.disk_usage(self.root).free

    def clean_up(self, dry_run: bool = False) -> tuple[int, bool]:
        try:
            names = {name.removesuffix(LOCK_SUFFIX) for name in os.listdir(self.tmp_dir)}
        except OSError:
            return 0, False
        orphans = [_remove_if_orphan(self.tmp_dir / name, dry_run) for name in names]
        return sum(nbytes for nbytes, _ in orphans), any(named for _, named in orphans)

    @contextmanager
    def locked(self) -> Iterator[None]:
        lock = FileLock(self._lock_path, mode=0o600)
        try:
            lock.acquire(timeout=self._lock_seconds, poll_interval=_LOCK_POLL_SECONDS)
        except Timeout:
            waited, self._lock_seconds = self._lock_seconds, _LOCK_SECONDS_AFTERWARDS
            raise StoreBusyError(
                f"{self._lock_path} was not free within {waited:g} s; end the process that hangs with this store open"
            ) from None
        self._lock_seconds = _LOCK_SECONDS
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        self.engine.close()


class FolderUpload:
    """See `Upload`. A temporary file, open for writing."""

    def __init__(self, fd: int, path: Path, final: Path) -> None:
        self.path, self.published = path, False
        self._fd, self._final = fd, final

    def write(self, data: memoryview, offset: int) -> None:
        write_all(self._fd, data, offset)

    def nbytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def publish(self, replace: bool) -> None:
        publish_name(self.path, self._final, replace)
        self.published = True


def head_of_file(path: Path, length: HeadLength) -> tuple[Stored, bytes]:
    """See `SegmentBackend.head`, of a file anywhere."""
    with open_regular(path) as (fd, stat):
        return _head(fd, stat, length)


def _head(fd: int, stat: os.stat_result, length: HeadLength) -> tuple[Stored, bytes]:
    stored, page = _stored(stat), read_all(fd, HEADER_BYTES, 0)
    return stored, page + read_all(fd, max(0, length(stored, page) - HEADER_BYTES), HEADER_BYTES)


def _find(path: Path) -> Stored | None:
    try:
        stat = os.lstat(path)
    except FileNotFoundError:
        return None
    return None if S_ISDIR(stat.st_mode) else _stored(stat)  # a folder is not of our making


def _stored(stat: os.stat_result) -> Stored:
    """What is no file takes no room that is ours to reckon."""
    nbytes = stat.st_blocks * 512 if S_ISREG(stat.st_mode) else 0
    return Stored((stat.st_dev, stat.st_ino), stat.st_size, nbytes)


def _disk_bytes(path: Path) -> int:
    found = _find(path)
    return 0 if found is None else found.nbytes


def _remove_if_orphan(path: Path, dry_run: bool) -> tuple[int, bool]:
    """Bytes that it took, and whether it has the name of a segment, too, under which it stays."""
    lock = lock_beside(path)
    try:
        with lock.acquire(timeout=0):
            Path(lock.lock_file).unlink(missing_ok=True)
            nbytes, named = _disk_bytes(path), path.exists() and path.stat().st_nlink > 1
            if not dry_run:
                path.unlink(missing_ok=True)
            return 0 if named else nbytes, named
    except OSError:  # locked: it is being written
        return 0, False


def _forget(path: Path) -> None:
    """Delete a temporary file, or leave it to the next who cleans up."""
    with suppress(OSError):
        path.unlink()
