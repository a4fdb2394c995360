"""Holds on slots, and the leases that requests have of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import IntegrityError
from ..latch import Latch
from ..store.segment import SegmentReader
from .blocks import Blocks
from .late_check import LateCheck
from .pool import Tier
from .slots import SlotPool
from .streams import CopyStream, DoneEvent, Event

if TYPE_CHECKING:
    from .residency import Residency


class BlockRequest(NamedTuple):
    """Blocks of one block group of a segment: `chunks` is int64, ascending."""

    reader: SegmentReader
    block_group: int
    chunks: np.ndarray


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
    check: LateCheck | None = None
    """Of what was read to the device, past the host."""
    when_whole: list[Callable[[], None]] = field(default_factory=list)
    """What is done once that has found it whole: until then nobody else finds it."""

    def keep_checked(self) -> None:
        """The device has checked a batch: keep it, unless a block is damaged, which goes with the lease."""
        keep, self.when_whole = self.when_whole, []
        for action in keep if self.check is not None and self.check.found_whole() else ():
            action()

    def is_over(self) -> bool:
        """Whether nothing reads or writes its slots any more."""
        return self.over is not None and not self.reading and self.over.query() and self.copied.query()

    def end(self) -> Event:
        """It is over when the device has done what it was given before now: the event that says so."""
        self.over = self.stream.computed() if self.stream else DoneEvent()
        return self.over


class Holds:
    """All of a residency, which guards them."""

    def __init__(self) -> None:
        self._holds: set[Hold] = set()

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, hold: Hold) -> None:
        self._holds.add(hold)

    def in_tier(self, tier: Tier) -> list[tuple[SlotPool, np.ndarray]]:
        """The slots of a tier that are held."""
        return [(pool, slots) for hold in self._holds for holder, pool, slots in hold.slots if holder is tier]

    def await_moves_down(self, stream: CopyStream | None) -> None:
        """Blocks on their way down are found on the host at once; only their own stream keeps the order by itself."""
        for hold in self._holds:
            if hold.moves_down and hold.stream is not stream:
                hold.copied.synchronize()

    def reap(self, unpin: Callable[[Tier, SlotPool, np.ndarray], None]) -> None:
        """Let go of the slots that nothing reads or writes any more."""
        for hold in list(self._holds):
            if hold.over is None and hold.lease is not None and hold.lease() is None:  # interrupted, and lost
                hold.end()
            if hold.is_over() or (hold.check is not None and hold.check.is_done()):  # before the end of copies
                hold.keep_checked()
        for hold in list(self._holds):  # with those that keeping has made
            if hold.is_over() and not hold.when_whole:
                for tier, pool, slots in hold.slots:
                    unpin(tier, pool, slots)
                self._holds.discard(hold)


@dataclass(eq=False)
class LeasedBlocks:
    """What a lease brings of one request."""

    request: BlockRequest
    chunks: np.ndarray
    """int64, ascending: of those that were asked for, what it brings."""
    from_disk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Chunks that are read from disk for it."""
    blocks: Blocks | None = None
    """Where they lie, on the device that asked, once they have arrived."""

    @property
    def arrived(self) -> Blocks:
        """The blocks, of a lease that was waited for."""
        assert self.blocks is not None
        return self.blocks


class Lease:
    """A batch of blocks on their way to a device, and a hold on the slots they lie in until `release`.

    Args:
        residency: the tiers.
        requests: what it brings.
    """

    def __init__(self, residency: Residency, requests: Sequence[BlockRequest]) -> None:
        self.residency = residency
        self.hold = Hold(None, weakref.ref(self))
        self.leased = [LeasedBlocks(request, request.chunks) for request in requests]
        self.latch = Latch()
        self.failed: SegmentReader | None = None
        """The segment that kept it from arriving, where it is known."""
        self.owns_memory = False
        """Whether blocks lie in device memory of the lease's own, allocated on the side stream."""

    @property
    def has_arrived(self) -> bool:
        """Whether nobody need wait in this thread; it may have failed."""
        return self.latch.is_open

    def wait(self) -> None:
        """Wait until the blocks are there, or raise what kept them: IntegrityError, OSError, or what CUDA raises.

        Of some it may still be open whether they are what was written: see `confirm`.
        """
        self.latch.wait()
        if self.hold.stream is not None:
            self.hold.stream.await_copies(self.hold.copied)

    @property
    def is_confirmed(self) -> bool:
        """Whether `confirm` has nothing to wait for, and nothing to raise. Of a lease that was waited for."""
        return self.hold.check is None or self.hold.check.is_confirmed

    def confirm(self) -> None:
        """Wait until the device has checked what it was given, also after `release`. Raises IntegrityError."""
        if self.is_confirmed:
            return
        try:
            self.residency.confirm(self.hold)
        except IntegrityError as error:
            self.failed = next(leased.request.reader for leased in self.leased if leased.request.reader.caused(error))
            raise

    def release(self) -> None:
        """Let the slots go. Call after the last use of the blocks, and also for a lease that failed."""
        self.residency.retire(self)
