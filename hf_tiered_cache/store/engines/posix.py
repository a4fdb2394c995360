"""Engines with threads and preadv: one that bypasses the page cache, and one that reads through it.

Eight persistent threads reach the throughput of io_uring at depth 32 on a virtio disk. One future per thread, instead
of one per read, reduces the work of the interpreter. Through the page cache, all processes of a machine share one copy
of frequently read data.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

from ..geometry import ALIGNMENT, BLOCK_ALIGNMENT, aligned
from ..lazy import torch
from ..tree import READ_FLAGS, open_file
from .base import READ_THROUGH_BYTES, Call, Engine, EngineFile, ReadOp, coalesce, in_threads

_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
"""Errors that mean that direct I/O is impossible. A file system without it reports them on opening, or only on reading.
Disks cannot write to some memory that a driver has mapped."""


class PosixFile(EngineFile):
    """A file descriptor, with O_DIRECT if the file system supports it."""

    def __init__(self, path: str, direct: bool) -> None:
        self.path = path
        self.direct = self.whole_pages = False
        if direct:
            try:
                self._file = open_file(path, READ_FLAGS | os.O_DIRECT)
                self.direct = True
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
        if not self.direct:
            self._file = open_file(path, READ_FLAGS)
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
        threads: Number of workers, each with one read in flight.
        direct: Whether to request O_DIRECT. If not, the kernel caches what was read, outside of the store's budgets:
            with `KVStore(engine="page_cache", host_memory=0)` no process keeps its own copy. Each request then copies
            its blocks out of the page cache and compares their checksums.
    """

    def __init__(self, threads: int = 8, direct: bool = True) -> None:
        self.name = "posix" if direct else "page_cache"
        self.threads, self.direct = threads, direct
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hf-tiered-read")

    def open(self, path: str) -> PosixFile:
        return PosixFile(path, self.direct)

    def submit(self, ops: Sequence[ReadOp]) -> Future[int]:
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
            num_read = os.preadv(file.fd, buffers, call.offset + bytes_read)
        except OSError as error:
            if not direct or error.errno not in _NOT_DIRECT:
                raise
            if not _is_page_aligned(call):
                file.whole_pages = True
                return _read_pages(call)
            file.read_through_page_cache()
            continue
        if num_read == 0:
            raise OSError(errno.EIO, "file ends before the block", file.path)
        bytes_read += num_read
        if bytes_read < call.nbytes and file.direct and bytes_read % BLOCK_ALIGNMENT:
            raise OSError(errno.EIO, "file ends inside a block", file.path)
        while num_read:  # drop filled buffers
            in_buffer = min(num_read, len(buffers[0]))
            buffers[0] = buffers[0][in_buffer:]
            num_read -= in_buffer
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
    bytes_read = _read_all(Call(call.file, begin, [pages], len(pages)))
    call.fill(pages.numpy()[call.offset - begin :])
    return bytes_read
