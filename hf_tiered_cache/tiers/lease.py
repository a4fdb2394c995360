"""Block handles, which requests wait for, and the pins on buffer slots that they keep."""

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
    """Request for blocks of one KV cache group of a segment; `chunks` is int64, ascending."""

    reader: SegmentReader
    block_group: int
    chunks: np.ndarray


@dataclass(eq=False)
class Hold:
    """Pin on buffer slots, which may not be evicted.

    The residency keeps each pin until nothing reads or writes its slots.
    """

    stream: CopyStream | None
    """Side stream of the device, or None if the host tier is the device tier."""
    lease: weakref.ref[Lease] | None = None
    """Block handle that owns the pin, or None. The pin ends when the handle is deleted, even without `release`."""
    slots: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    copied: Event = field(default_factory=DoneEvent)
    """Event after the copies to and from the slots."""
    over: Event | None = None
    """Event after the device work that was queued before the release, or None before the release."""
    reading: bool = False
    """True if a read from disk may be writing to the slots."""
    moves_down: bool = False
    """True if blocks evicted from a device are being copied to the slots."""
    check: LateCheck | None = None
    """Verification of blocks that were read from disk directly to the device."""
    when_whole: list[Callable[[], None]] = field(default_factory=list)
    """Actions to run when `check` succeeds. They make the blocks visible to other requests."""

    def keep_checked(self) -> None:
        """Run the actions in `when_whole` if `check` succeeded, and clear them in any case.

        Blocks of a damaged batch are dropped with the block handle.
        """
        keep, self.when_whole = self.when_whole, []
        for action in keep if self.check is not None and self.check.found_whole() else ():
            action()

    def is_over(self) -> bool:
        """Return whether the pin was released and nothing reads or writes its slots."""
        return self.over is not None and not self.reading and self.over.query() and self.copied.query()

    def end(self) -> Event:
        """Release the pin after the device work queued so far, and return the event for that point."""
        self.over = self.stream.computed() if self.stream else DoneEvent()
        return self.over


class Holds:
    """All pins of a residency. The lock of the residency guards them."""

    def __init__(self) -> None:
        self._holds: set[Hold] = set()

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, hold: Hold) -> None:
        self._holds.add(hold)

    def in_tier(self, tier: Tier) -> list[tuple[SlotPool, np.ndarray]]:
        """Return the pinned slots of a tier."""
        return [(pool, slots) for hold in self._holds for holder, pool, slots in hold.slots if holder is tier]

    def await_moves_down(self, stream: CopyStream | None) -> None:
        """Wait for copies of evicted blocks to the host on streams other than `stream`.

        Look-ups find these blocks as soon as the copy is queued. Only work on the same stream is ordered after it.
        """
        for hold in self._holds:
            if hold.moves_down and hold.stream is not stream:
                hold.copied.synchronize()

    def reap(self, unpin: Callable[[Tier, SlotPool, np.ndarray], None]) -> None:
        """Unpin the slots of all pins that are over."""
        for hold in list(self._holds):
            if hold.over is None and hold.lease is not None and hold.lease() is None:  # an interrupt lost the handle
                hold.end()
            if hold.is_over() or (hold.check is not None and hold.check.is_done()):  # maybe before the copies end
                hold.keep_checked()
        for hold in list(self._holds):  # including pins that `keep_checked` added
            if hold.is_over() and not hold.when_whole:
                for tier, pool, slots in hold.slots:
                    unpin(tier, pool, slots)
                self._holds.discard(hold)


@dataclass(eq=False)
class LeasedBlocks:
    """Blocks that a handle fetches for one request."""

    request: BlockRequest
    chunks: np.ndarray
    """Chunks to fetch, int64, ascending: all requested chunks, or those within the budgets."""
    from_disk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Chunks that are read from disk, int64, ascending."""
    blocks: Blocks | None = None
    """Locations of the blocks on the requested device, or None before they have arrived."""

    @property
    def arrived(self) -> Blocks:
        """Blocks of a handle after `wait`."""
        assert self.blocks is not None
        return self.blocks


class Lease:
    """Block handle: a batch of blocks that is fetched to a device, and the pin on their slots until `release`.

    Args:
        residency: the tiers.
        requests: the blocks to fetch.
    """

    def __init__(self, residency: Residency, requests: Sequence[BlockRequest]) -> None:
        self.residency = residency
        self.hold = Hold(None, weakref.ref(self))
        self.leased = [LeasedBlocks(request, request.chunks) for request in requests]
        self.latch = Latch()
        self.failed: SegmentReader | None = None
        """Segment that made the fetch or its verification fail, if known."""
        self.owns_memory = False
        """True if some blocks are in device memory of the handle's own, allocated on the side stream."""

    @property
    def has_arrived(self) -> bool:
        """True if the fetch has completed or failed, so that `wait` does not block the thread."""
        return self.latch.is_open

    def wait(self) -> None:
        """Wait until the blocks have arrived. Some may not be verified yet: see `confirm`.

        Raises:
            IntegrityError: a block is damaged.
            OSError: a read failed.
            Exception: any other error of the fetch, such as one raised by CUDA.
        """
        self.latch.wait()
        if self.hold.stream is not None:
            self.hold.stream.await_copies(self.hold.copied)

    @property
    def is_confirmed(self) -> bool:
        """True if `confirm` neither waits nor raises. Valid after `wait`."""
        return self.hold.check is None or self.hold.check.is_confirmed

    def confirm(self) -> None:
        """Wait until the device has verified its blocks. May be called after `release`.

        Raises:
            IntegrityError: a block is damaged.
        """
        if self.is_confirmed:
            return
        try:
            self.residency.confirm(self.hold)
        except IntegrityError as error:
            self.failed = next(leased.request.reader for leased in self.leased if leased.request.reader.caused(error))
            raise

    def release(self) -> None:
        """Release the slots. Call this after the last use of the blocks, and also if the fetch failed."""
        self.residency.retire(self)
