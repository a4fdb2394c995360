"""Engine with kvikio: GPUDirect Storage if the machine supports it, otherwise kvikio's own threads (compat mode).

Without a CUDA driver every kvikio call fails, and opening a file can hang forever. So no call is made before CUDA is
known to work. This module relies on the following behaviour in kvikio's public source:

- `CuFile.pread` splits reads that are larger than a task. The last task waits for the others. In versions that are
  still in use, an error of the last task, or of the first one that it waits for, is reported while others still write.
  A read of one task has one future. So reads are split here, and each piece is awaited separately.
- `pread` into device memory first synchronises the default stream, which PyTorch computes on: a prefetch would wait
  for the model. `raw_read_async` is ordered only by the stream that it is given. Without a configuration file of
  cuFile, which pip does not install, it silently becomes such a `pread`. An empty configuration is enough; it must be
  named before kvikio looks for it.
- `memory_register` registers the allocation that contains the memory; a read names its base and an offset.
  Unregistered memory is read through the driver's buffers. PyTorch allocates slabs of 10 MiB or more separately, so
  their base is that of the allocation (`tiers.pool.DIRECT_SLAB_BYTES`).
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

from ...errors import EngineUnavailableError
from ..faults import LOGGER
from ..lazy import torch
from .base import Engine, EngineFile, ReadOp, in_threads

TASK_BYTES = 1 << 20
"""Size of the tasks that reads are split into, one per thread; kvikio's default of 4 MiB leaves threads idle."""

_DRIVER = ("/proc/driver/nvidia-fs/version", "/dev/nvidia-fs0")
"""Files that show that the kernel driver of GPUDirect Storage is loaded."""
_CONFIG_VARIABLE, _SYSTEM_CONFIG = "CUFILE_ENV_PATH_JSON", Path("/etc/cufile.json")
_CONFIG = Path(__file__).with_name("cufile.json")
_PROBE = "import os, kvikio.cufile_driver as driver; os._exit(0 if driver.get('is_gds_available') else 1)"
_PROBE_SECONDS = 20.0


class KvikioFile(EngineFile):
    """An open CuFile."""

    def __init__(self, kvikio: Any, path: str) -> None:
        self.path = path
        os.stat(path)  # raises a plain OSError for a missing file, unlike kvikio
        try:
            self.cufile = kvikio.CuFile(path, "r")
        except Exception as error:  # kvikio raises RuntimeError for I/O errors
            raise OSError(errno.EIO, f"kvikio: {error}", path) from error

    def __del__(self) -> None:
        cufile = self.__dict__.get("cufile")
        if cufile is not None:
            cufile.close()


class KvikioEngine(Engine):
    """Engine that reads through kvikio into device memory (GPUDirect Storage) or pinned host memory (compat mode).

    Args:
        threads: Number of threads of this engine, each with one task in flight, and of kvikio, whose default is 1.
        compat: Whether compat mode is acceptable. It is no faster than the posix engine.
    """

    name = "kvikio"

    def __init__(self, threads: int = 8, compat: bool = True) -> None:
        self.reads_device = has_gpudirect()
        if not self.reads_device and not compat:  # checked first: it does not initialize CUDA
            raise EngineUnavailableError("GPUDirect Storage is not available to kvikio on this machine")
        if not torch.cuda.is_available():
            raise EngineUnavailableError("the kvikio engine requires CUDA, but torch.cuda.is_available() is False")
        self.reads_asynchronously = self.reads_device and _has_config()
        self._kvikio = _import_kvikio()
        defaults = self._kvikio.defaults
        try:
            if not self.reads_device:
                defaults.set("compat_mode", self._kvikio.CompatMode.ON)
            defaults.set({"num_threads": threads, "task_size": TASK_BYTES, "auto_direct_io_read": True})
        except Exception as error:  # an older kvikio does not know a setting
            raise EngineUnavailableError(
                f"kvikio cannot be initialized ({error}); version 26.8 or newer is required"
            ) from error
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hf-tiered-kvikio")
        self._numbers, self._thread = itertools.count(), threading.local()
        self._registered: list[weakref.finalize[Any, Any]] = []
        self._gone: deque[torch.Tensor] = deque()  # registered memory after its tensor was freed

    def open(self, path: str) -> KvikioFile:
        return KvikioFile(self._kvikio, path)

    def submit(self, ops: Sequence[ReadOp]) -> Future[int]:
        self._deregister_gone()
        tasks = [
            ReadOp(op.file, op.offset + start, op.dest[start : start + TASK_BYTES])
            for op in ops
            for start in range(0, op.dest.numel(), TASK_BYTES)
        ]
        return in_threads(self._pool, self.threads, tasks, self._read)

    def _read(self, task: ReadOp) -> int:
        """Run one task in a thread of the pool, until nothing writes to its destination any more."""
        try:
            num_read = self._read_device(task) if _on_gpu(task.dest) else _read_host(task)
        except OSError as error:
            error.filename = task.file.path
            raise
        except RuntimeError as error:  # kvikio's, for all faults; a CUDA memory error is no fault of the file
            number = errno.EFAULT if "CUDA" in str(error) else errno.EIO
            raise OSError(number, f"kvikio: {error}", task.file.path) from error
        if num_read != task.dest.numel():
            raise OSError(errno.EIO, "file ends before the block", task.file.path)
        return num_read

    def _read_device(self, task: ReadOp) -> int:
        dest, cufile = task.dest, cast(KvikioFile, task.file).cufile
        storage = _whole(dest)
        lane = _lane(dest.device, self._number())
        with torch.cuda.stream(lane):
            offset = dest.data_ptr() - storage.data_ptr()
            future = cufile.raw_read_async(storage, lane.cuda_stream, dest.numel(), task.offset, offset)
            return future.check_bytes_done()  # waits for this stream only

    def _number(self) -> int:
        if not hasattr(self._thread, "number"):
            self._thread.number = next(self._numbers)
        return self._thread.number

    def register(self, memory: torch.Tensor) -> None:
        self._deregister_gone()
        if not self.reads_device or not _on_gpu(memory):
            return
        storage = _whole(memory)
        try:
            self._kvikio.buffer.memory_register(storage)
        except Exception as error:  # e.g. two slabs share one allocation: reads use the driver's buffers
            LOGGER.debug("%d bytes could not be registered with cuFile: %s", memory.nbytes, error)
            return
        # the finalizer only queues the memory; `whole` keeps it alive until it is deregistered
        self._registered = [registration for registration in self._registered if registration.alive]
        self._registered.append(weakref.finalize(memory, self._gone.append, storage))
        self._registered[-1].atexit = False

    def _deregister_gone(self) -> None:
        with suppress(IndexError):
            while True:
                self._deregister(self._gone.popleft())

    def _deregister(self, memory: torch.Tensor) -> None:
        with suppress(Exception):  # another slab of the same allocation was freed before
            self._kvikio.buffer.memory_deregister(memory)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for registration in self._registered:
            if (memory := registration.detach()) is not None:
                self._deregister(memory[2][0])
        self._registered.clear()
        self._deregister_gone()

    def describe(self) -> str:
        mode = "GPUDirect Storage" if self.reads_device else "compat mode"
        if self.reads_device and not self.reads_asynchronously:
            mode += ", synchronous: no cufile.json"
        return f"kvikio ({mode}, {self.threads} threads)"


def _read_host(task: ReadOp) -> int:
    dest = task.dest
    return cast(KvikioFile, task.file).cufile.pread(dest.numpy(), dest.numel(), task.offset, TASK_BYTES).get()


def _on_gpu(memory: torch.Tensor) -> bool:
    return memory.is_cuda


def _whole(memory: torch.Tensor) -> torch.Tensor:
    """Return the whole storage that contains `memory`, uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())


@cache
def _lane(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return the stream for the reads of one thread number. All engines of the process share it."""
    return torch.cuda.Stream(device)


@cache
def has_gpudirect() -> bool:
    """Return whether GPUDirect Storage works. A separate process checks it: a broken driver can hang its caller."""
    if not any(map(os.path.exists, _DRIVER)):
        return False
    try:
        probe = subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, TypeError):  # no interpreter executable, as in embedded Python
        return False
    try:
        return probe.wait(_PROBE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        LOGGER.warning("GPUDirect Storage did not respond within %g s, and is not used", _PROBE_SECONDS)
        return False
    finally:
        probe.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel does not end
            probe.wait(1.0)


def _has_config() -> bool:
    """Name a configuration file of cuFile, unless there is one. Return whether there is one now."""
    if not _SYSTEM_CONFIG.exists() and _CONFIG.exists():
        os.environ.setdefault(_CONFIG_VARIABLE, str(_CONFIG))
    return _SYSTEM_CONFIG.exists() or Path(os.environ.get(_CONFIG_VARIABLE, "")).is_file()


def _import_kvikio() -> Any:
    try:
        import kvikio
        import kvikio.buffer
        import kvikio.defaults
    except Exception as error:  # a missing libcufile raises RuntimeError, a wrong driver may raise anything
        raise EngineUnavailableError(
            f"kvikio cannot be imported ({error}); pip install 'hf-tiered-cache[gds-cu13]', or gds-cu12 for CUDA 12"
        ) from error
    return kvikio
