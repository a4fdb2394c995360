"""Stands for a GPU on the CPU: a side stream whose work is done when somebody waits for it, and an engine that
writes past the host."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import torch

from hf_tiered_cache import KVStore
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.tiers import residency as residency_module
from hf_tiered_cache.tiers.device import CopyStream


class DirectEngine(PosixEngine):
    """Reads into what stands for device memory."""

    reads_device = True


class Point:
    """An event: done when it, or a later one of its stream, was waited for."""

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
    """A point that the device has not reached yet."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Computed:
    """The end of a computation, which is done when it was waited for."""

    def __init__(self, stream: SideStream) -> None:
        self.stream, self.done = stream, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.stream.computations[threading.current_thread().name] += 1
        self.done = True


class SideStream(CopyStream):
    """Counts who waits for it and for computations, by thread."""

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
    """A store whose tiers take the CPU for a GPU that the disk writes to directly, and its side stream."""
    stream = SideStream()
    monkeypatch.setattr(residency_module, "copy_stream", lambda device: stream)
    store = KVStore(path, engine=DirectEngine(), device_memory="16MiB", host_memory=0, **options)
    store._storage.residency._device_types = frozenset({torch.device("cpu").type})
    return store, stream
