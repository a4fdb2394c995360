"""Stand-in for kvikio, with futures, process-wide settings, and RuntimeErrors.

It reads files with plain POSIX calls, also into memory that stands for device memory.
"""

from __future__ import annotations

import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import Enum

import numpy as np

ENGINE = "hf_tiered_cache.store.engines.kvikio"


class CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class Lane:
    """CUDA stream without work."""

    cuda_stream = 7


def install(monkeypatch, *, gds: bool, device: bool = False) -> types.ModuleType:
    """Make `import kvikio` find the stand-in, and torch report CUDA.

    With `gds`, GPUDirect Storage is also available; with `device`, all memory counts as a GPU's.
    """
    kvikio = types.ModuleType("kvikio")
    kvikio.CompatMode = CompatMode
    kvikio.settings = {
        "num_threads": 1,
        "task_size": 4 << 20,
        "auto_direct_io_read": False,
        "compat_mode": CompatMode.AUTO,
    }
    kvikio.opened_under = []
    kvikio.default_stream_synchronised = 0
    kvikio.registered, kvikio.reads_registered = {}, []
    pool = ThreadPoolExecutor(8)

    class IOFuture:
        """Future of a read in several tasks; raises the error of the first task that fails."""

        def __init__(self, tasks):
            self.tasks = tasks

        def get(self):
            return sum(task.result() for task in self.tasks)

    class StreamFuture:
        def __init__(self, task):
            self.task = task

        def check_bytes_done(self):
            return self.task.result()

    class CuFile:
        def __init__(self, path, flags):
            assert flags == "r"
            kvikio.opened_under.append(dict(kvikio.settings))
            self.fd = os.open(path, os.O_RDONLY)

        def pread(self, buf, size=None, file_offset=0, task_size=None):
            array, step = np.asarray(buf), task_size or kvikio.settings["task_size"]
            assert array.dtype == np.uint8 and array.flags["C_CONTIGUOUS"]
            if device:
                kvikio.default_stream_synchronised += 1
            starts = range(0, size, step)
            return IOFuture([self._start(array[at : min(size, at + step)], file_offset + at) for at in starts])

        def raw_read_async(self, buf, raw_stream, size=None, file_offset=0, dev_offset=0):
            assert raw_stream == Lane.cuda_stream
            array = np.asarray(buf)
            base = array.ctypes.data
            kvikio.reads_registered.append(kvikio.registered.get(base) == array.nbytes)
            return StreamFuture(self._start(array[dev_offset : dev_offset + size], file_offset))

        def _start(self, array, offset):
            def read():
                data = os.pread(self.fd, len(array), offset)
                if len(data) < len(array):
                    raise RuntimeError("cannot read past the end of the file")
                array[:] = np.frombuffer(data, np.uint8)
                return len(data)

            return pool.submit(read)

        def close(self):
            os.close(self.fd)

    def memory_register(buf):
        array = np.asarray(buf)
        if array.ctypes.data in kvikio.registered:
            raise RuntimeError("memory is already registered")
        kvikio.registered[array.ctypes.data] = array.nbytes

    def memory_deregister(buf):
        del kvikio.registered[np.asarray(buf).ctypes.data]

    kvikio.CuFile = CuFile
    defaults = types.ModuleType("kvikio.defaults")

    def set_(config, value=None):
        kvikio.settings.update(config if isinstance(config, dict) else {config: value})

    defaults.set = set_
    defaults.get = kvikio.settings.get
    kvikio.defaults = defaults
    kvikio.buffer = types.ModuleType("kvikio.buffer")
    kvikio.buffer.memory_register, kvikio.buffer.memory_deregister = memory_register, memory_deregister
    for module in (kvikio, defaults, kvikio.buffer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(f"{ENGINE}.has_gpudirect", lambda: gds)
    if device:
        monkeypatch.setattr(f"{ENGINE}._on_gpu", lambda memory: True)
        monkeypatch.setattr(f"{ENGINE}._lane", lambda device, number: Lane)
        monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    return kvikio
