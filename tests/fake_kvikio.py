"""A stand-in for kvikio with its interface and its manners: futures with get(), process-wide settings, errors that
are RuntimeErrors. It reads files with plain POSIX calls, into what stands for device memory too."""

from __future__ import annotations

import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import numpy as np


class CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


def install(monkeypatch, *, gds: bool) -> types.ModuleType:
    """Make `import kvikio` find the stand-in, and torch say that CUDA is there."""
    kvikio = types.ModuleType("kvikio")
    kvikio.CompatMode = CompatMode
    kvikio.settings = {
        "num_threads": 1,
        "task_size": 4 << 20,
        "auto_direct_io_read": False,
        "compat_mode": CompatMode.AUTO,
    }
    kvikio.opened_under = []
    pool = ThreadPoolExecutor(2)

    class IOFuture:
        def __init__(self, future):
            self.future = future

        def get(self):
            return self.future.result()

    class CuFile:
        def __init__(self, path, flags):
            assert flags == "r"
            kvikio.opened_under.append(dict(kvikio.settings))
            self.fd = os.open(path, os.O_RDONLY)

        def pread(self, buf, size=None, file_offset=0, task_size=None):
            array = np.asarray(buf)
            assert array.dtype == np.uint8 and array.flags["C_CONTIGUOUS"]

            def read():
                data = os.pread(self.fd, size, file_offset)
                if len(data) < size:
                    raise RuntimeError("cannot read past the end of the file")
                array[:] = np.frombuffer(data, np.uint8)
                return len(data)

            return IOFuture(pool.submit(read))

        def close(self):
            os.close(self.fd)

    kvikio.CuFile = CuFile
    defaults = types.ModuleType("kvikio.defaults")

    def set_(config, value=None):
        kvikio.settings.update(config if isinstance(config, dict) else {config: value})

    defaults.set = set_
    defaults.get = kvikio.settings.get
    driver = types.ModuleType("kvikio.cufile_driver")
    driver.get = lambda name: {"is_gds_available": gds}[name]
    kvikio.defaults, kvikio.cufile_driver = defaults, driver
    for module in (kvikio, defaults, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return kvikio
