"""Base of backends that keep whole objects under names, such as a dict, a database or an object store.

A subclass reads, writes, lists and deletes objects. The base does everything else that `SegmentBackend` promises. The
names are those of the files of a store in a folder, such as `segments/<id>.kv`.

Processes that share a place see each other's segments when they open the store. Locks, and so the ownership of
conversations, hold within one process: a subclass that is used by several overrides `locked` and `records`.
"""

from __future__ import annotations

import errno
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from ..errors import StoreBusyError
from .backend import HeadLength, SegmentBackend, check_answers, file_of
from .engines import EngineFile, ReadOp
from .engines.base import Call, coalesce, in_threads
from .format import HEADER_BYTES
from .hedged import HedgedReads
from .kinds import ALL_FOLDERS, ENTRY, PIN, SEGMENT, SEGMENT_SUFFIX, SIDECAR, FileKind, kind_of, not_own
from .lazy import torch
from .root import StoreRoot
from .threads import DaemonPool
from .tree import Stored

_LOCK_SECONDS = 30.0  # seconds to wait for the lock of the place
_CLOSE_SECONDS = 5.0
"""Seconds to wait for pending reads at the end: a server that does not answer keeps no process alive."""
_ATTEMPTS = 100  # maximum number of attempts to read an object that is replaced between two reads each time
_HEAD_BYTES = 64 << 10
"""Bytes of a segment that are read first: for most segments, all before the blocks, in one request."""
_T = TypeVar("_T")
_COUNTED_FOLDERS = ("", "conversations", "documents", ENTRY.folder)


class ObjectBackend(ABC, SegmentBackend):
    """Implementation of `SegmentBackend` over objects. Subclasses implement the five abstract methods.

    They may be called from any thread. Their faults are OSErrors, and end no request. Other exceptions, and answers of
    another type or length, become OSErrors that name the subclass. Exceptions are logged with their traceback.

    Args:
        place: Address of the place, for messages.
        threads: Number of reads in flight.
    """

    hedges: Sequence[HedgedReads] = ()
    """Reads of each kind that are requested twice if they take long; none if the client does not allow that."""

    def __init__(self, place: str, threads: int = 8) -> None:
        self.place, self.reads_with = place, f"{type(self).__name__} ({threads} threads)"
        self.writable, self.reads_device = True, False
        self.catalogue: StoreRoot | None = None
        self.records = ObjectRecords(self)
        self.__threads = threads
        self.__pool = DaemonPool(threads, "hf-tiered-read")
        self.is_closed = self.is_used = False
        self.__lock = threading.Lock()
        self.__uploads: set[ObjectUpload] = set()
        self.bytes_read = 0
        """Bytes of blocks that were read so far."""
        self.__counting = threading.Lock()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_answers(cls)

    # --- the objects

    @abstractmethod
    def find_object(self, name: str) -> Stored | None:
        """Return the metadata of an object, or None if there is none. Raises OSError."""

    @abstractmethod
    def list_objects(self, folder: str) -> dict[str, Stored]:
        """Return the objects of a folder by their names in it, or those of no folder (""). Raises OSError."""

    @abstractmethod
    def get_object(self, name: str, version: Any, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` from `offset` of one version (see `Stored`) of an object, which lie within its size.

        Raises FileNotFoundError if there is no such object, or another version of it, or OSError if it cannot be read.
        """

    def get_beginnings(self, names: Sequence[str], nbytes: int) -> dict[str, bytes]:
        """Return the first `nbytes`, or all, of those objects that exist, by name. Raises OSError if that is unknown.

        A place that answers for many objects in one round trip overrides this method: the default takes two round trips
        for each object, several at a time.
        """

        def beginning(name: str) -> bytes | None:
            stored = self.find_object(name)
            with suppress(FileNotFoundError):  # deleted or replaced meanwhile
                return None if stored is None else _range_of(self, name, stored, 0, nbytes)
            return None

        futures = {name: self.__pool.submit(beginning, name) for name in names}
        contents = {name: future.result() for name, future in futures.items()}
        return {name: content for name, content in contents.items() if content is not None}

    @abstractmethod
    def put_object(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write an object atomically, with a new version.

        Raises FileExistsError if the object exists and is not to be replaced, or OSError if it cannot be written.
        """

    @abstractmethod
    def delete_object(self, name: str) -> bool:
        """Delete an object. Returns whether it existed. Raises OSError if it remains."""

    # --- reading

    def is_reachable(self) -> bool:
        try:
            self.list_objects("")
        except OSError:
            return False
        return True

    def sidecars(self) -> dict[str, int]:
        objects = self.list_objects(SIDECAR.folder).items()
        return {name: stored.nbytes for name, stored in objects if SIDECAR.names.fullmatch(name)}

    def unknown(self, known: Collection[str] = ()) -> list[str]:
        unknown: list[str] = []
        checks: dict[str, Future[bool]] = {}  # several at a time: a remote has many entries
        for folder in ("", *ALL_FOLDERS):
            for name in self.list_objects(folder):
                kind, path = kind_of(folder, name), f"{folder}/{name}".lstrip("/")
                if kind is None:
                    unknown.append(path)
                elif kind is not SEGMENT or name.removesuffix(SEGMENT_SUFFIX) not in known:
                    checks[path] = self.__pool.submit(self.records.is_own, kind, name)
        for path, check in checks.items():
            with suppress(OSError):  # not readable now, so not listed
                if not check.result():
                    unknown.append(path)
        return sorted(unknown)

    def head(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes]:
        name = _object_name(*file_of(segment_id))

        def read(stored: Stored) -> tuple[Stored, bytes]:
            beginning = _range_of(self, name, stored, 0, _HEAD_BYTES)
            nbytes = max(length(stored, beginning[:HEADER_BYTES]), HEADER_BYTES)
            if nbytes > _HEAD_BYTES:
                beginning += _range_of(self, name, stored, _HEAD_BYTES, nbytes - _HEAD_BYTES)
            return stored, beginning[:nbytes]

        return _read_version(self, name, read)

    def open(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes, ObjectFile]:
        stored, head = self.head(segment_id, length)
        name = _object_name(*file_of(segment_id))
        return stored, head, ObjectFile(self.where(segment_id), name, stored.version)

    def read(self, ops: Sequence[ReadOp]) -> Future[int]:
        return in_threads(self.__pool, self.__threads, coalesce(ops), self.__read)

    def __read(self, call: Call) -> int:
        file = call.file
        assert isinstance(file, ObjectFile)
        try:
            content = _bytes_of(self, file.name, file.version, call.offset, call.nbytes)
        except OSError as error:
            error.filename = file.path  # a batch may read several objects
            raise
        with self.__counting:
            self.bytes_read += len(content)
        call.fill(np.frombuffer(content, np.uint8))
        return len(content)

    def register(self, memory: torch.Tensor) -> None:
        pass  # blocks reach a device through the host

    # --- writing

    @contextmanager
    def write(self, segment_id: str, nbytes: int) -> Iterator[ObjectUpload]:
        free = self.free()
        if free is not None and nbytes > free:
            raise OSError(errno.ENOSPC, "no space is left", self.place)
        upload = ObjectUpload(self.records, segment_id, nbytes)
        self.__uploads.add(upload)
        try:
            yield upload
        finally:
            self.__uploads.discard(upload)

    def sync(self) -> None:
        pass  # `put_object` returns when an object is stored

    def pinned(self) -> set[str]:
        objects = self.list_objects(PIN.folder).items()
        return {name for name, stored in objects if PIN.names.fullmatch(name) and not stored.size}

    # --- space

    def usage(self) -> int:
        records = [
            stored.nbytes
            for folder in _COUNTED_FOLDERS
            for name, stored in self.list_objects(folder).items()
            if kind_of(folder, name) is not None
        ]
        return sum(records) + sum(upload.nbytes() for upload in list(self.__uploads))

    def free(self) -> int | None:
        """Return the free bytes of the place, or None, as here, if it is unbounded. Raises OSError."""
        return None

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        return {}, False  # unfinished uploads are in the memory of their processes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the place exclusively, within this process. Raises StoreBusyError."""
        if not self.__lock.acquire(timeout=_LOCK_SECONDS):
            raise StoreBusyError(f"the lock of {self.place} was not released within {_LOCK_SECONDS:g} s; try again")
        try:
            yield
        finally:
            self.__lock.release()

    def close(self) -> None:
        """Wait for pending reads, but not for those that hang, and release the threads."""
        self.is_closed = True
        self.__pool.close(_CLOSE_SECONDS)


class ObjectFile(EngineFile):
    """An object that is open: one version of it. If another one takes its name, reads fail."""

    def __init__(self, path: str, name: str, version: Any) -> None:
        self.path, self.name, self.version = path, name, version


class ObjectUpload:
    """Implementation of `Upload` that collects the bytes in memory."""

    def __init__(self, records: ObjectRecords, segment_id: str, nbytes: int) -> None:
        self._records, self._id, self._content = records, segment_id, bytearray(nbytes)

    def write(self, data: memoryview, offset: int) -> None:
        self._content[offset : offset + len(data)] = data

    def nbytes(self) -> int:
        return len(self._content)

    def publish(self, replace: bool) -> None:
        self._records.write(*file_of(self._id), bytes(self._content), replace)


class ObjectRecords:
    """Implementation of `RecordFiles`. Only objects that the library wrote are replaced or deleted."""

    def __init__(self, backend: ObjectBackend) -> None:
        self._backend = backend
        self._locks: dict[str, bytes] = {}  # content of each locked file
        self._changing = threading.Lock()

    @property
    def identity(self) -> str:
        return self._backend.place

    def where(self, kind: FileKind, name: str) -> str:
        return f"{self._backend.place}/{_object_name(kind, name)}"

    def names(self, kind: FileKind) -> list[str]:
        return sorted(filter(kind.names.fullmatch, self._backend.list_objects(kind.folder)))

    def stored(self, kind: FileKind, name: str) -> Stored | None:
        return self._backend.find_object(_object_name(kind, name))

    def version(self, kind: FileKind, name: str) -> Hashable:
        stored = self.stored(kind, name)
        return None if stored is None else stored.version

    def read(self, kind: FileKind, name: str) -> bytes:
        path, backend = _object_name(kind, name), self._backend
        if path in self._locks:
            return self._locks[path]
        return _read_version(
            backend, path, lambda stored: _range_of(backend, path, stored, 0, kind.bytes_to_read(stored.size))
        )

    def is_own(self, kind: FileKind, name: str) -> bool:
        return kind.owns(name, self.read)

    def write(self, kind: FileKind, name: str, content: bytes, replace: bool = True) -> None:
        path = _object_name(kind, name)
        if not replace:
            return self._backend.put_object(path, content, replace=False)
        with suppress(FileExistsError):  # never replace what appears after this look
            if self._backend.find_object(path) is None:
                return self._backend.put_object(path, content, replace=False)
        if not self.is_own(kind, name):
            raise FileExistsError(errno.EEXIST, not_own(self.where(kind, name)))
        self._backend.put_object(path, content, replace=True)

    def make_empty(self, kind: FileKind, name: str) -> None:
        self.write(kind, name, b"")

    def delete(self, kind: FileKind, name: str) -> bool:
        return self.is_own(kind, name) and self._backend.delete_object(_object_name(kind, name))

    def sync(self, kind: FileKind) -> None:
        pass  # `put_object` returns when an object is stored

    def lock(self, kind: FileKind, name: str) -> ExitStack | None:
        """Lock a name within this process until the returned object is closed or garbage-collected."""
        path = _object_name(kind, name)
        with self._changing:
            if path in self._locks:
                return None
            self._locks[path] = b""
        lock = ExitStack()
        lock.callback(weakref.finalize(lock, self._locks.pop, path, None))
        return lock

    def is_locked(self, kind: FileKind, name: str) -> bool:
        return _object_name(kind, name) in self._locks

    def rewrite(self, lock: ExitStack, kind: FileKind, name: str, content: bytes) -> None:
        self._locks[_object_name(kind, name)] = content


def _object_name(kind: FileKind, name: str) -> str:
    return f"{kind.folder}/{name}" if kind.folder else name


def _range_of(backend: ObjectBackend, name: str, stored: Stored, offset: int, nbytes: int) -> bytes:
    """Return a range of an object, up to its end. Raises OSError."""
    nbytes = min(nbytes, stored.size - offset)
    return bytes(_bytes_of(backend, name, stored.version, offset, nbytes)) if nbytes > 0 else b""


def _bytes_of(backend: ObjectBackend, name: str, version: Any, offset: int, nbytes: int) -> bytes:
    """Return a range of one version of an object.

    Raises OSError if it has another length: a short answer of a place must not count as a damaged object.
    """
    content = backend.get_object(name, version, offset, nbytes)
    if len(content) != nbytes:
        fault = f"{type(backend).__name__}.get_object returned {len(content)} bytes, not {nbytes} from {offset}"
        raise OSError(errno.EIO, fault, f"{backend.place}/{name}")
    return content


def _read_version(backend: ObjectBackend, name: str, read_stored: Callable[[Stored], _T]) -> _T:
    """Return the result of `read_stored`, which reads one version of an object, again if it is replaced."""
    for _ in range(_ATTEMPTS):
        stored = backend.find_object(name)
        if stored is None:
            raise FileNotFoundError(errno.ENOENT, "it does not exist", f"{backend.place}/{name}")
        with suppress(FileNotFoundError):  # replaced or deleted meanwhile
            return read_stored(stored)
    raise OSError(errno.EAGAIN, "it is replaced repeatedly", f"{backend.place}/{name}")
