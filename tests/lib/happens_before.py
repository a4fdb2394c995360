"""Detection of unordered memory accesses by a host thread, two device streams and the disk, with vector clocks.

On the CPU, every copy is complete when it returns, so a missing synchronization changes no bit. Here, each access is
recorded with its actor and the actor's vector clock. Two accesses to the same bytes, one of them a write, race if
neither actor knew of the other's access.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_tiered_cache.store.geometry import ALIGNMENT
from hf_tiered_cache.tiers.device import CopyStream

HOST, COPIES, COMPUTATION = 0, 1, 2
"""Actors: the thread, the side stream, the model's stream. Each read from disk is another actor."""

Clock = dict[int, int]
"""Number of accesses that are known to be complete, by actor."""


def join(clock: Clock, source: Clock) -> None:
    """Merge another clock into a clock."""
    for actor, ticks in source.items():
        if clock.get(actor, 0) < ticks:
            clock[actor] = ticks


class Race(NamedTuple):
    """Two unordered accesses, with their actors."""

    earlier_access: str
    earlier_actor: int
    later_access: str
    later_actor: int


class World:
    """All actors, and every access so far.

    Args:
        random: Generator that draws how long a device takes to reach an event.
    """

    def __init__(self, random: random.Random) -> None:
        self.random, self.now = random, 0
        self.clocks: list[Clock] = [{}, {}, {}]
        self.actor = HOST
        """Actor of the current calls."""
        self.races: list[Race] = []
        self._count = 0
        self._accesses = np.zeros((1024, 5), np.int64)  # first byte, end, whether a write, actor, its tick
        self._names: list[str] = []

    def new_actor(self) -> int:
        """Create an actor that begins now: a read from disk."""
        self.clocks.append(dict(self.clocks[HOST]))
        return len(self.clocks) - 1

    def act(
        self,
        actor: int,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        name: str,
        launched: bool = True,
    ) -> None:
        """Record an actor's reads and writes of memory.

        Args:
            actor: Number of the actor.
            reads: Tensors that it reads.
            writes: Tensors that it writes.
            name: Name of the operation.
            launched: Whether the host starts it now, so that it follows everything that the host knows.
        """
        clock = self.clocks[actor]
        if launched and actor != HOST:
            join(clock, self.clocks[HOST])
        clock[actor] = clock.get(actor, 0) + 1
        for tensors, write in ((reads, 0), (writes, 1)):
            for tensor in tensors:
                if tensor.numel():
                    self._access(actor, clock, tensor, write, name)

    def _access(self, actor: int, clock: Clock, tensor: torch.Tensor, write: int, name: str) -> None:
        first = tensor.data_ptr()
        end = first + tensor.numel() * tensor.element_size()
        known_ticks = np.zeros(len(self.clocks), np.int64)
        known_ticks[list(clock)] = list(clock.values())
        past = self._accesses[: self._count]
        conflict = (past[:, 0] < end) & (past[:, 1] > first) & ((past[:, 2] | write) != 0)
        for at in np.flatnonzero(conflict & (known_ticks[past[:, 3]] < past[:, 4])):
            self.races.append(Race(self._names[at], int(past[at, 3]), name, actor))
        if self._count == len(self._accesses):
            self._accesses = np.concatenate([self._accesses, np.zeros_like(self._accesses)])
        self._accesses[self._count] = first, end, write, actor, clock[actor]
        self._names.append(name)
        self._count += 1


class WorkEvent:
    """Event in the work of an actor."""

    def __init__(self, world: World, *actors: int) -> None:
        self.world, self.clock, self.done_at = world, Clock(), world.now + world.random.randint(0, 12)
        for actor in actors:
            join(self.clock, world.clocks[actor])

    def query(self) -> bool:
        """Return whether the device has reached the event; if so, the host knows it."""
        if self.world.now < self.done_at:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.done_at = self.world.now
        join(self.world.clocks[HOST], self.clock)


class CopiesEvent(WorkEvent):
    """Event in the work of the side stream."""


class ComputationEvent(WorkEvent):
    """Event in the work of the model's stream."""


class WatchedStream(CopyStream):
    """Side stream in a `World`."""

    def __init__(self, world: World) -> None:
        self.world = world

    @contextmanager
    def copying(self) -> Iterator[None]:
        previous, self.world.actor = self.world.actor, COPIES
        try:
            yield
        finally:
            self.world.actor = previous

    def copied(self) -> WorkEvent:
        return CopiesEvent(self.world, HOST, COPIES)

    def await_computation(self, event: WorkEvent) -> None:
        join(self.world.clocks[COPIES], getattr(event, "clock", {}))

    def await_copies(self, event: WorkEvent) -> None:
        join(self.world.clocks[COMPUTATION], getattr(event, "clock", {}))

    def computed(self) -> WorkEvent:
        return ComputationEvent(self.world, HOST, COMPUTATION)


class Watch(TorchDispatchMode):
    """Dispatch mode that records the reads and writes of PyTorch's operations for the current actor.

    Of a tensor that is indexed by rows, only these rows are accessed.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self._temporary: list[torch.Tensor] = []  # kept: PyTorch reuses their memory after the work that uses them

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        if not any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns):  # no view
            values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            reads, writes = [], []
            for argument in schema.arguments:
                value = values.get(argument.name)
                if isinstance(value, torch.Tensor):
                    is_written = argument.alias_info is not None and argument.alias_info.is_write
                    rows = [value]
                    if argument.name == "self" and schema.name in ("aten::index_select", "aten::index_copy_"):
                        self._temporary += [values["index"], values.get("source", value)]
                        rows = [value[row] for row in values["index"].tolist()]
                    (writes if is_written else reads).extend(rows)
            self.world.act(self.world.actor, reads, writes, schema.name)
        return result


class Memory:
    """Allocator that, like PyTorch's, reuses freed device memory immediately.

    This is correct for one stream, whose work is sequential, and a race for two. Host memory is never reused, since
    PyTorch reuses it only after its own events.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._host: list[torch.Tensor] = []

    def allocate(self, nbytes: int, *, pin: bool = False, device: torch.device | None = None) -> torch.Tensor:
        """Allocate memory; replaces `aligned_bytes`."""
        if device is None:
            self._host.append(torch.empty(nbytes, dtype=torch.uint8))
            return self._host[-1]
        assert self.world.actor == COPIES, "device memory is allocated on the stream that fills it"
        free_buffers = self._free[nbytes]
        base = free_buffers.pop() if free_buffers else np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -base.ctypes.data % ALIGNMENT
        view = base[start : start + nbytes].view()
        weakref.finalize(view, free_buffers.append, base)
        return torch.from_numpy(view)
