"""Interface of all engines, and the read planner that they share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ...errors import StoreClosedError
from ..lazy import torch
from ..threads import DaemonPool

MAX_CALL_BYTES = 1 << 20
"""Larger reads are split, adjacent smaller ones merged up to this: with 8 threads, 1 MiB saturates an NVMe disk."""
MAX_IOVECS = 1024
READ_THROUGH_BYTES = 16 << 10
"""Gaps up to this are read and discarded: one call costs more than 16 KiB of transfer. They count as read."""
_Read = TypeVar("_Read")


class EngineFile:
    """An open, immutable file. It is closed when its last reference is dropped."""

    path: str


class ReadOp(NamedTuple):
    """A read from `file` at `offset` into `dest`, contiguous uint8 `[bytes]`; aligned to 512 bytes for direct I/O."""

    file: EngineFile
    offset: int
    dest: torch.Tensor


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
    def submit(self, ops: Sequence[ReadOp]) -> Future[int]:
        """Start a batch of reads. The future returns the number of bytes that were read from files, gaps included.

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
    """Future of the bytes of a batch that several workers read. It resolves when the last worker is done."""

    def __init__(self, workers: int) -> None:
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()
        self._left = self._undropped = workers
        self._nbytes = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

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
                self.future.set_result(self._nbytes)

    def drop(self) -> None:
        """Count a worker that the closed pool does not run. Those that have begun read everything."""
        with self._lock:
            self._undropped -= 1
        self.run(lambda: 0)


def in_threads(
    pool: ThreadPoolExecutor | DaemonPool, threads: int, reads: Sequence[_Read], run: Callable[[_Read], int]
) -> Future[int]:
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
