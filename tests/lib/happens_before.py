"""Finds accesses to memory that nothing orders: a host thread, a device's two streams and the disk, by vector clocks.

On the CPU every copy is done when it returns, so a missing synchronisation shows in no bit. Here each access is noted
with who made it and with how far, at that moment, its actor was known to be behind all the others. Two accesses to the
same bytes, one of them a write, race if neither actor knew of the other's.
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
"""Actors: the thread, the side stream, the stream of the model. Each read from disk is one more."""

Clock = dict[int, int]
"""For each actor how many of its accesses are known to be over."""


def join(clock: Clock, other: Clock) -> None:
    """What `other` knows is known here, too."""
    for actor, ticks in other.items():
        if clock.get(actor, 0) < ticks:
            clock[actor] = ticks


class Race(NamedTuple):
    """Two accesses that nothing orders, and who made them."""

    earlier: str
    earlier_actor: int
    later: str
    later_actor: int


class World:
    """All actors, and every access so far.

    Args:
        random: says how long a device takes to come to an event.
    """

    def __init__(self, random: random.Random) -> None:
        self.random, self.now = random, 0
        self.clocks: list[Clock] = [{}, {}, {}]
        self.actor = HOST
        """Who does what is called now."""
        self.races: list[Race] = []
        self._count = 0
        self._accesses = np.zeros((1024, 5), np.int64)  # first byte, end, whether a write, actor, its tick
        self._names: list[str] = []

    def new_actor(self) -> int:
        """One that begins now: a read from disk."""
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
        """An actor reads and writes memory.

        Args:
            launched: whether the host starts it now, so that it comes behind all that the host knows.
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
        known = np.zeros(len(self.clocks), np.int64)
        known[list(clock)] = list(clock.values())
        past = self._accesses[: self._count]
        conflict = (past[:, 0] < end) & (past[:, 1] > first) & ((past[:, 2] | write) != 0)
        for at in np.flatnonzero(conflict & (known[past[:, 3]] < past[:, 4])):
            self.races.append(Race(self._names[at], int(past[at, 3]), name, actor))
        if self._count == len(self._accesses):
            self._accesses = np.concatenate([self._accesses, np.zeros_like(self._accesses)])
        self._accesses[self._count] = first, end, write, actor, clock[actor]
        self._names.append(name)
        self._count += 1


class WorkEvent:
    """A point in the work of an actor."""

    def __init__(self, world: World, *actors: int) -> None:
        self.world, self.clock, self.done_at = world, Clock(), world.now + world.random.randint(0, 12)
        for actor in actors:
            join(self.clock, world.clocks[actor])

    def query(self) -> bool:
        """Whether the device is that far. To have seen it is to know it."""
        if self.world.now < self.done_at:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.done_at = self.world.now
        join(self.world.clocks[HOST], self.clock)


class CopiesEvent(WorkEvent):
    """A point in the work of the side stream."""


class ComputationEvent(WorkEvent):
    """A point in the work of the model's stream."""


class WatchedStream(CopyStream):
    """A side stream in such a world."""

    def __init__(self, world: World) -> None:
        self.world = world

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self.world.actor = self.world.actor, COPIES
        try:
            yield
        finally:
            self.world.actor = before

    def copied(self) -> WorkEvent:
        return CopiesEvent(self.world, HOST, COPIES)

    def await_computation(self, event: WorkEvent) -> None:
        join(self.world.clocks[COPIES], getattr(event, "clock", {}))

    def await_copies(self, event: WorkEvent) -> None:
        join(self.world.clocks[COMPUTATION], getattr(event, "clock", {}))

    def computed(self) -> WorkEvent:
        return ComputationEvent(self.world, HOST, COMPUTATION)


class Watch(TorchDispatchMode):
    """Notes what operations of PyTorch read and write, for whoever acts now."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        if not any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns):  # no view
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            reads, writes = [], []
            for argument in schema.arguments:
                value = given.get(argument.name)
                if isinstance(value, torch.Tensor):
                    written = argument.alias_info is not None and argument.alias_info.is_write
                    (writes if written else reads).append(value)
            self.world.act(self.world.actor, reads, writes, schema.name)
        return result


class Memory:
    """An allocator as careless as PyTorch's: what is freed on the device is given away again at once.

    That is right for work of one stream, which comes one after the other, and a trap for two. Host memory is never
    given away again: PyTorch does so after its own events.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._host: list[torch.Tensor] = []

    def allocate(self, nbytes: int, *, pin: bool = False, device: torch.device | None = None) -> torch.Tensor:
        """In place of `aligned_bytes`."""
        if device is None:
            self._host.append(torch.empty(nbytes, dtype=torch.uint8))
            return self._host[-1]
        assert self.world.actor == COPIES, "device memory is allocated on the stream that fills it"
        free = self._free[nbytes]
        base = free.pop() if free else np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -base.ctypes.data % ALIGNMENT
        view = base[start : start + nbytes].view()
        weakref.finalize(view, free.append, base)
        return torch.from_numpy(view)
