"""kvikio: GPUDirect Storage where the machine has it, kvikio's own threads (compat mode) where it has not.

Without a CUDA driver every kvikio call fails and opening a file can hang for ever, so none is made before CUDA is
known to work.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, cast

import torch

from ...errors import EngineUnavailableError
from .base import Batch, Engine, EngineFile, ReadOp, ReadReport

TASK_BYTES = 1 << 20
"""kvikio splits a read into tasks of this size, one a thread; its default of 4 MiB leaves threads idle."""


class KvikioFile(EngineFile):
    """An open CuFile."""

    def __init__(self, kvikio: Any, path: str) -> None:
        self.path = path
        os.stat(path)  # a plain OSError for a missing file, whatever kvikio would raise
        try:
            self.cufile = kvikio.CuFile(path, "r")
        except Exception as error:  # kvikio raises RuntimeError for what is an I/O error
            raise OSError(errno.EIO, f"kvikio: {error}", path) from error

    def __del__(self) -> None:
        cufile = self.__dict__.get("cufile")
        if cufile is not None:
            cufile.close()


class KvikioEngine(Engine):
    """Reads through kvikio into device memory (GPUDirect Storage) or pinned host memory (compat mode).

    Args:
        threads: kvikio's I/O threads; its default is 1, which reaches a third of a disk.
    """

    name: ClassVar[str] = "kvikio"

    def __init__(self, threads: int = 8) -> None:
        self._kvikio = _import_kvikio()
        defaults = self._kvikio.defaults
        self.reads_device = bool(_gds_available())
        try:
            if not self.reads_device:
                defaults.set("compat_mode", self._kvikio.CompatMode.ON)
            defaults.set({"num_threads": threads, "task_size": TASK_BYTES, "auto_direct_io_read": True})
        except Exception as error:  # an older kvikio does not know a setting
            raise EngineUnavailableError(f"kvikio cannot be set up ({error}); it must be 26.8 or newer") from error
        self.threads = threads
        # a future of kvikio's has no callback: these threads wait in its place
        self._waiters = ThreadPoolExecutor(4, thread_name_prefix="hf-tiered-kvikio")

    def open(self, path: str) -> KvikioFile:
        return KvikioFile(self._kvikio, path)

    def submit(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        batch = Batch(1)
        started: list[tuple[ReadOp, Any]] = []
        try:
            for op in ops:
                buffer = op.dest if op.dest.is_cuda else op.dest.numpy()
                cufile = cast(KvikioFile, op.file).cufile
                started.append((op, cufile.pread(buffer, op.dest.numel(), op.offset, TASK_BYTES)))
            batch.run_in(self._waiters, lambda: _finish(started))
        except Exception:
            with suppress(OSError):
                _finish(started)  # the caller takes the destinations back: nothing may write to them any more
            raise
        return batch.future

    def close(self) -> None:
        self._waiters.shutdown(wait=True)

    def describe(self) -> str:
        return f"kvikio ({'GPUDirect Storage' if self.reads_device else 'compat mode'}, {self.threads} threads)"


def _finish(started: list[tuple[ReadOp, Any]]) -> int:
    """Wait for every read, also after one has failed: kvikio does not keep the destinations alive."""
    total, first_error = 0, None
    for op, future in started:
        try:
            got = future.get()
            if got != op.dest.numel():
                raise OSError(errno.EIO, "file ends before the block", op.file.path)
            total += got
        except Exception as error:  # kvikio raises RuntimeError for what is an I/O error
            first_error = first_error or OSError(errno.EIO, f"kvikio: {error}", op.file.path)
    if first_error is not None:
        raise first_error
    return total


def _import_kvikio() -> Any:
    if not torch.cuda.is_available():
        raise EngineUnavailableError("the kvikio engine needs CUDA, and torch.cuda.is_available() is False")
    try:
        import kvikio
        import kvikio.defaults
    except Exception as error:  # a missing libcufile is a RuntimeError, a driver that does not fit may be anything
        raise EngineUnavailableError(f"kvikio does not import ({error}); pip install 'hf-tiered-cache[gds]'") from error
    return kvikio


def _gds_available() -> bool:
    try:
        import kvikio.cufile_driver

        return bool(kvikio.cufile_driver.get("is_gds_available"))
    except Exception:  # no driver, no GDS: compat mode serves
        return False
