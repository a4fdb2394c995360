"""Interface of all engines, and the read planner that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

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

    def fill(self, source: np.ndarray) -> None:
        """Copy the bytes that were read, uint8 `[nbytes or more]`, to the tensors."""
        at = 0
        for piece in self.pieces:
            nbytes = piece if isinstance(piece, int) else piece.numel()
            if not isinstance(piece, int):
                piece.numpy()[...] = source[at : at + nbytes]
            at += nbytes


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


def in_threads(
    pool: ThreadPoolExecutor | DaemonPool, threads: int, reads: Sequence[_Read], run: Callable[[_Read], int]
) -> Future[int]:
    """Run reads, each of which returns its bytes, in up to `threads` threads of a pool. Raises StoreClosedError.

    The future resolves when the last thread is done. A worker that a closed pool does not run leaves its reads to those
    that have begun; if there are none, the future fails with StoreClosedError.
    """
    queue = iter(reads)  # shared: next() on a list iterator is atomic, so fast workers take more
    workers: list[Future[int]] = []
    try:
        for _ in range(max(1, min(threads, len(reads)))):
            workers.append(pool.submit(lambda: sum(map(run, queue))))
    except RuntimeError as error:
        if not workers:
            raise StoreClosedError(_CLOSED) from error
    batch: Future[int] = Future()
    batch.set_running_or_notify_cancel()
    numbers, last = count(1), len(workers)

    def end(_: Future[int]) -> None:
        if next(numbers) < last:  # atomic, and no lock that an interrupt could leave taken
            return
        ended = [worker for worker in workers if not worker.cancelled()]
        workers.clear()  # they refer to this function
        errors = [error for worker in ended if (error := worker.exception()) is not None]
        for error in errors:
            error.with_traceback(None)  # its frames would keep the destinations alive
        if not ended:
            batch.set_exception(StoreClosedError(_CLOSED))
        elif errors:
            batch.set_exception(errors[0])
        else:
            batch.set_result(sum(worker.result() for worker in ended))

    for worker in list(workers):
        worker.add_done_callback(end)
    return batch
