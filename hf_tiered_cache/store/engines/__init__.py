"""I/O engines, which read bytes from files into memory: their interface, the read planner, and engines with preadv.

One engine with preadv bypasses the page cache, and one reads through it: all processes of a machine then share one copy
of frequently read data. Eight persistent threads reach the throughput of io_uring at depth 32 on a virtio disk. One
future per thread, instead of one per read, reduces the work of the interpreter.

A new engine needs one module here and one entry in `folder.ENGINES`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

from ...errors import StoreClosedError
from ..geometry import ALIGNMENT, BLOCK_ALIGNMENT, aligned
from ..lazy import torch
from ..threads import DaemonPool
from ..tree import open_file

MAX_CALL_BYTES = 1 << 20
"""Larger reads are split, adjacent smaller ones merged up to this: with 8 threads, 1 MiB saturates an NVMe disk."""
MAX_IOVECS = 1024
READ_THROUGH_BYTES = 16 << 10
"""Gaps up to this are read and discarded: one call costs more than 16 KiB of transfer. They count as read."""
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
"""Errors that mean that direct I/O is impossible. A file system without it reports them on opening, or only on reading.
Disks cannot write to some memory that a driver has mapped."""
_Read = TypeVar("_Read")


class EngineFile:
    """An open, immutable file. It is closed when its last reference is dropped."""

    path: str


class ReadOp(NamedTuple):
    """A read from `file` at `offset` into `dest`, contiguous uint8 `[bytes]`; aligned to 512 bytes for direct I/O."""

    file: EngineFile
    offset: int
    dest: torch.Tensor


class ReadReport(NamedTuple):
    """Cost of a batch of reads: bytes read from the files, gaps included, and seconds from submission to completion."""

    nbytes: int
    seconds: float


class Engine(ABC):
    """Asynchronous reader of batches of byte ranges."""

    name: str
    """Name in `KVStore(engine=...)`."""
    reads_device: bool = False
    """True if `dest` may be device memory, filled without passing through the host."""

    @abstractmethod
    def open(self, path: str) -> EngineFile:
        """Open `path` for reading. Raises OSError."""

    @abstractmethod
    def submit(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        """Start a batch of reads.

        The future keeps the destinations alive. It resolves only when no part of the batch accesses them any more,
        whether the batch succeeded or not. A short or failing read is an OSError.
        """

    def register(self, memory: torch.Tensor) -> None:  # noqa: B027  # most engines need nothing
        """Register device memory for repeated reads, for the lifetime of this tensor object."""

    @abstractmethod
    def close(self) -> None:
        """Wait for pending reads, and release the threads."""

    def describe(self) -> str:
        return self.name


@dataclass
class Call:
    """One vectored read: consecutive bytes of a file into several tensors. An integer is a gap of so many bytes."""

    file: EngineFile
    offset: int
    pieces: list[torch.Tensor | int] = field(default_factory=list)
    nbytes: int = 0


def coalesce(ops: Sequence[ReadOp]) -> list[Call]:
    """Sort a batch by file and offset, merge adjacent reads, read through small gaps, and split large reads."""
    calls: list[Call] = []
    order = sorted(ops, key=lambda op: (id(op.file), op.offset))
    for op in order:
        start, size = 0, op.dest.numel()
        while start < size:
            call = calls[-1] if calls else None
            offset = op.offset + start
            gap = offset - (call.offset + call.nbytes) if call is not None and call.file is op.file else -1
            room = MAX_CALL_BYTES - call.nbytes - gap if call is not None else 0
            fits = 0 <= gap <= READ_THROUGH_BYTES and room > 0
            if call is None or not fits or len(call.pieces) + 2 > MAX_IOVECS:
                call = Call(op.file, offset)
                calls.append(call)
                gap, room = 0, MAX_CALL_BYTES
            if gap:
                call.pieces.append(gap)
            take = min(size - start, room)
            call.pieces.append(op.dest[start : start + take])
            call.nbytes += gap + take
            start += take
    return calls


_CLOSED = "the store was closed during this operation; open it again"


class Batch:
    """Future of a batch that several workers share. It resolves when the last worker is done."""

    def __init__(self, workers: int) -> None:
        self.future: Future[ReadReport] = Future()
        self.future.set_running_or_notify_cancel()
        self._left = self._undropped = workers
        self._nbytes = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._started = time.perf_counter()

    def run(self, work: Callable[[], int]) -> None:
        """Run one worker's share, which returns the number of bytes read, and add its result to the batch."""
        error: BaseException | None = None
        nbytes = 0
        try:
            nbytes = work()
        except BaseException as caught:
            error = caught.with_traceback(None)  # its frames would keep the destinations alive
        with self._lock:
            self._nbytes += nbytes
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            if not self._undropped:
                self.future.set_exception(StoreClosedError(_CLOSED))
            elif self._error is not None:
                self.future.set_exception(self._error)
            else:
                self.future.set_result(ReadReport(self._nbytes, time.perf_counter() - self._started))

    def drop(self) -> None:
        """Count a worker that the closed pool does not run. Those that have begun read everything."""
        with self._lock:
            self._undropped -= 1
        self.run(lambda: 0)


def in_threads(
    pool: ThreadPoolExecutor | DaemonPool, threads: int, reads: Sequence[_Read], run: Callable[[_Read], int]
) -> Future[ReadReport]:
    """Run reads, each of which returns its bytes, in up to `threads` threads of a pool. Raises StoreClosedError."""
    queue = iter(reads)  # shared: next() on a list iterator is atomic, so fast workers take more
    workers = max(1, min(threads, len(reads)))
    batch = Batch(workers)
    for number in range(workers):
        try:
            worker = pool.submit(batch.run, lambda: sum(map(run, queue)))
        except RuntimeError as error:
            if not number:
                raise StoreClosedError(_CLOSED) from error
            batch.drop()
        else:
            worker.add_done_callback(lambda ended: batch.drop() if ended.cancelled() else None)
    return batch.future


# --- engines with preadv


class PosixFile(EngineFile):
    """A file descriptor, with O_DIRECT if the file system supports it."""

    def __init__(self, path: str, direct: bool) -> None:
        self.path = path
        self.direct = self.whole_pages = False
        if direct:
            try:
                self._file = open_file(path, os.O_RDONLY | os.O_DIRECT)
                self.direct = True
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
        if not self.direct:
            self._file = open_file(path, os.O_RDONLY)
        self.fd = self._file.fileno()

    def read_through_page_cache(self) -> None:
        """Switch to buffered reads. The file is not reopened, since its name may belong to another file by now."""
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()  # otherwise it closes itself with a warning


class PosixEngine(Engine):
    """Engine that calls preadv from a pool of threads.

    Args:
        threads: number of workers, each with one read in flight.
        direct: whether to request O_DIRECT. If not, the kernel caches what was read, outside of the store's budgets:
            with `KVStore(engine="page_cache", host_memory=0)` no process keeps its own copy. Each request then copies
            its blocks out of the page cache and compares their checksums.
    """

    def __init__(self, threads: int = 8, direct: bool = True) -> None:
        self.name = "posix" if direct else "page_cache"
        self.threads, self.direct = threads, direct
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hf-tiered-read")

    def open(self, path: str) -> PosixFile:
        return PosixFile(path, self.direct)

    def submit(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        return in_threads(self._pool, self.threads, coalesce(ops), self.read)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def describe(self) -> str:
        if not self.direct:
            return f"{self.name} ({self.threads} threads, one copy for all processes)"
        return f"{self.name} ({self.threads} threads, O_DIRECT where possible)"

    def read(self, call: Call) -> int:
        """Run one vectored read in a worker's thread. Returns the number of bytes read."""
        try:
            return _read_all(call)
        except OSError as error:
            error.filename = call.file.path  # a batch may read from many files
            raise


def _read_all(call: Call) -> int:
    """Read until the call is complete: the kernel may return fewer bytes than requested."""
    file = cast(PosixFile, call.file)
    if file.whole_pages and not _is_page_aligned(call):
        return _read_pages(call)
    has_gaps = any(isinstance(piece, int) for piece in call.pieces)
    gap = memoryview(mmap.mmap(-1, READ_THROUGH_BYTES) if has_gaps else b"")  # O_DIRECT needs aligned destinations
    buffers = [gap[:piece] if isinstance(piece, int) else piece.numpy().data for piece in call.pieces]
    bytes_read = 0
    while bytes_read < call.nbytes:
        direct = file.direct
        try:
            got = os.preadv(file.fd, buffers, call.offset + bytes_read)
        except OSError as error:
            if not direct or error.errno not in _NOT_DIRECT:
                raise
            if not _is_page_aligned(call):
                file.whole_pages = True
                return _read_pages(call)
            file.read_through_page_cache()
            continue
        if got == 0:
            raise OSError(errno.EIO, "file ends before the block", file.path)
        bytes_read += got
        if bytes_read < call.nbytes and file.direct and bytes_read % BLOCK_ALIGNMENT:
            raise OSError(errno.EIO, "file ends inside a block", file.path)
        while got:  # drop filled buffers
            in_buffer = min(got, len(buffers[0]))
            buffers[0] = buffers[0][in_buffer:]
            got -= in_buffer
            if not len(buffers[0]):
                buffers.pop(0)
    return bytes_read


def _is_page_aligned(call: Call) -> bool:
    numbers = [call.offset]
    for piece in call.pieces:
        numbers += [piece] if isinstance(piece, int) else [piece.numel(), piece.data_ptr()]
    return not any(number % ALIGNMENT for number in numbers)


def _read_pages(call: Call) -> int:
    """Run a call by reading whole pages and copying: some disks and file systems have sectors of 4 KiB."""
    begin = call.offset // ALIGNMENT * ALIGNMENT
    pages = torch.frombuffer(mmap.mmap(-1, aligned(call.offset + call.nbytes) - begin), dtype=torch.uint8)
    bytes_read, at = _read_all(Call(call.file, begin, [pages], len(pages))), call.offset - begin
    for piece in call.pieces:
        if isinstance(piece, int):
            at += piece
        else:
            piece.copy_(pages[at : at + len(piece)])
            at += len(piece)
    return bytes_read
