"""Holds on slots, and the leases that requests have of them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..latch import Latch
from .pool import SlotPool, Tier
from .runs import BlockRun
from .streams import CopyStream, DoneEvent, Event

if TYPE_CHECKING:
    from .residency import Residency


@dataclass(eq=False)
class Hold:
    """Slots that may not be evicted. The residency keeps every one until nothing reads or writes them any more."""

    stream: CopyStream | None
    """The side stream of the device, or None where the host tier is the device tier."""
    lease: weakref.ref[Lease] | None = None
    """Whose it is: with the lease the hold ends, also where nobody came to release it. None: no request's."""
    slots: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    copied: Event = field(default_factory=DoneEvent)
    """After the copies to and from them."""
    over: Event | None = None
    """Once it is released: after what the device was given to do with them before."""
    reading: bool = False
    """Whether a read from disk may be writing to them."""
    moves_down: bool = False
    """Whether evicted blocks are being copied to them."""


class Lease:
    """Blocks of one lane on their way to a device, and a hold on the slots they lie in until `release`."""

    def __init__(self, residency: Residency, block_bytes: int, stream: CopyStream | None, chunks: np.ndarray) -> None:
        self.residency, self.block_bytes = residency, block_bytes
        self.hold = Hold(stream, weakref.ref(self))
        self.runs: list[BlockRun] = []
        """The blocks by ascending chunk, on the device that asked, once `wait` has returned."""
        self.chunks = chunks
        """What it brings."""
        self.from_disk = np.empty(0, np.int64)
        """Chunks that are read from disk for this lease."""
        self.arrived = Latch()
        self.owns_memory = False
        """Whether `runs` lie in device memory of the lease's own, allocated on the side stream."""

    def wait(self) -> None:
        """Wait until the blocks are there, or raise what kept them: IntegrityError, OSError, or what CUDA raises."""
        self.arrived.wait()
        if self.hold.stream is not None:
            self.hold.stream.await_copies(self.hold.copied)

    def release(self) -> None:
        """Let the slots go. Call after the last use of `runs`, and also for a lease that failed."""
        self.residency.retire(self)
