"""Emulation of a slow disk: reads take as long as they would on that disk."""

from __future__ import annotations

import threading
import time

from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.engines.base import Call


class SlowDisk:
    """Clock of an emulated disk: returns when each read would be done.

    Args:
        bytes_per_second: Bandwidth of all reads together.
        latency: Additional seconds of each call; those of several threads overlap.
    """

    def __init__(self, bytes_per_second: float, latency: float = 0.0) -> None:
        if bytes_per_second <= 0 or latency < 0:
            raise ConfigError("a disk has a bandwidth above 0 and a latency of 0 or more")
        self.bytes_per_second, self.latency = bytes_per_second, latency
        self._free_at = 0.0
        self._lock = threading.Lock()

    def begin(self, nbytes: int) -> float:
        """Begin a call of `nbytes`, and return the time of its end on `time.monotonic`'s clock."""
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + nbytes / self.bytes_per_second
            return self._free_at + self.latency


class SlowDiskEngine(PosixEngine):
    """Posix engine that is no faster than `disk`."""

    def __init__(self, disk: SlowDisk) -> None:
        super().__init__()
        self.disk = disk

    def read(self, call: Call) -> int:
        done_at = self.disk.begin(call.nbytes)
        nbytes = super().read(call)
        time.sleep(max(0.0, done_at - time.monotonic()))
        return nbytes

    def describe(self) -> str:
        return f"{super().describe()}, as a disk of {self.disk.bytes_per_second / 1e6:.0f} MB/s"
