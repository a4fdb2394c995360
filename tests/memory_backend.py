"""A backend in memory: the second one, so that the interface is more than the first one's outline."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from hf_tiered_cache.errors import StoreBusyError, StoreClosedError
from hf_tiered_cache.store.backend import HeadLength, Stored
from hf_tiered_cache.store.engines import EngineFile, ReadOp, ReadReport
from hf_tiered_cache.store.format import HEADER_BYTES
from hf_tiered_cache.store.root import StoreRoot

_versions = itertools.count()


class MemoryBackend:
    """See `SegmentBackend`. With `capacity`, so many bytes fit."""

    def __init__(self, capacity: int | None = None) -> None:
        self.place, self.writable, self.reads_with = "memory", True, "memory"
        self.catalogue: StoreRoot | None = None
        self._capacity = capacity
        self._segments: dict[str, tuple[int, bytes]] = {}
        self._uploads: list[MemoryUpload] = []
        self._pins: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def where(self, segment_id: str) -> str:
        return f"memory:{segment_id}"

    def is_reachable(self) -> bool:
        return True

    def names(self) -> list[str]:
        return [name for name in self._segments if "." not in name]

    def sidecars(self) -> dict[str, int]:
        return {name: len(data) for name, (_, data) in list(self._segments.items()) if "." in name}

    def find(self, segment_id: str) -> Stored | None:
        if segment_id not in self._segments:
            return None
        version, data = self._segments[segment_id]
        return Stored(version, len(data), len(data))

    def is_own(self, segment_id: str) -> bool:
        return segment_id in self._segments

    def unknown(self, known: Collection[str] = ()) -> list[str]:
        return []  # nobody else writes here

    def head(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes]:
        return self.open(segment_id, length)[:2]

    def open(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes, MemoryFile]:
        try:
            version, data = self._segments[segment_id]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such segment", segment_id) from None
        stored = Stored(version, len(data), len(data))
        head = data[: max(HEADER_BYTES, length(stored, data[:HEADER_BYTES]))]
        return stored, head, MemoryFile(self.where(segment_id), data)

    def read(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        if self._closed:
            raise StoreClosedError("it is closed")
        done: Future[ReadReport] = Future()
        for file, offset, dest in ops:
            assert isinstance(file, MemoryFile)
            found = file.data[offset : offset + dest.numel()]
            if len(found) < dest.numel():
                done.set_exception(OSError(errno.EIO, "the segment ends before the block", file.path))
                return done
            dest.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        done.set_result(ReadReport(sum(op.dest.numel() for op in ops), 0.0))
        return done

    @contextmanager
    def write(self, segment_id: str, nbytes: int) -> Iterator[MemoryUpload]:
        free = self.free()
        if free is not None and nbytes > free:
            raise OSError(errno.ENOSPC, "memory is full")
        upload = MemoryUpload(self._segments, segment_id, bytearray(nbytes))
        self._uploads.append(upload)
        try:
            yield upload
        finally:
            self._uploads.remove(upload)

    def delete(self, segment_id: str) -> bool:
        return self._segments.pop(segment_id, None) is not None

    def sync(self) -> None:
        pass

    def pin(self, segment_id: str, pinned: bool) -> None:
        (self._pins.add if pinned else self._pins.discard)(segment_id)

    def pinned(self) -> set[str]:
        return set(self._pins)

    def usage(self) -> int:
        return sum(upload.nbytes() for upload in self._uploads)

    def free(self) -> int | None:
        if self._capacity is None:
            return None
        return self._capacity - self.usage() - sum(len(data) for _, data in self._segments.values())

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        return {}, False  # what is unfinished dies with its process

    @contextmanager
    def locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=1):
            raise StoreBusyError("memory is locked")
        try:
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        self._closed = True


class MemoryFile(EngineFile):
    """A segment that is open."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data


class MemoryUpload:
    """See `Upload`."""

    def __init__(self, segments: dict[str, tuple[int, bytes]], segment_id: str, data: bytearray) -> None:
        self._segments, self._id, self._data = segments, segment_id, data

    def write(self, data: memoryview, offset: int) -> None:
        self._data[offset : offset + len(data)] = data

    def nbytes(self) -> int:
        return len(self._data)

    def publish(self, replace: bool) -> None:
        new = next(_versions), bytes(self._data)
        if replace:
            self._segments[self._id] = new
        elif self._segments.setdefault(self._id, new) is not new:
            raise FileExistsError(errno.EEXIST, "it is there", self._id)
