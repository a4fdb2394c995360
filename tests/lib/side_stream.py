"""Emulation of a GPU on the CPU: a side stream whose work completes when it is waited for, and a direct engine."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import torch

from hf_tiered_cache import KVStore
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers.device import CopyStream


class DirectEngine(PosixEngine):
    """Engine that reads into memory that stands for device memory."""

    reads_device = True


class Point:
    """Event that is complete when it, or a later one of its stream, was waited for."""

    def __init__(self, stream: SideStream) -> None:
        self.stream = stream
        stream.recorded += 1
        self.number = stream.recorded

    def query(self) -> bool:
        return self.number <= self.stream.done

    def synchronize(self) -> None:
        self.stream.waits[threading.current_thread().name] += 1
        self.stream.done = max(self.stream.done, self.number)


class Pending:
    """Event that the device has not reached yet."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Computed:
    """End of a computation, which is complete when it was waited for."""

    def __init__(self, stream: SideStream) -> None:
        self.stream, self.done = stream, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.stream.computations[threading.current_thread().name] += 1
        self.done = True


class SideStream(CopyStream):
    """Side stream that counts waits for itself and for computations, by thread."""

    on_host = False

    def __init__(self) -> None:
        self.recorded = self.done = self.depth = 0
        self.waits: Counter[str] = Counter()
        self.computations: Counter[str] = Counter()

    @contextmanager
    def copying(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def copied(self) -> Point:
        return Point(self)


def with_device(monkeypatch, path, **options) -> tuple[KVStore, SideStream]:
    """Open a store that treats the CPU as a GPU with direct reads, and return it with its side stream."""
    stream = SideStream()
    monkeypatch.setattr(device_module, "copy_stream", lambda device: stream)
    store = KVStore(path, engine=DirectEngine(), device_memory="16MiB", host_memory=0, **options)
    store._storage.residency._device_types = frozenset({torch.device("cpu").type})
    return store, stream
