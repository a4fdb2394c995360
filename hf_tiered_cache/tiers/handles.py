"""Block handles, which requests wait for, and the pins on buffer slots that they keep.

Blocks that were read to a device without passing through the CPU are verified there, asynchronously.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..store.container import lin64
from ..store.lazy import torch
from ..store.memory import to_device
from ..store.segment import Asked, SegmentReader
from ..store.threads import OneShotEvent
from .device import CopyStream, DeviceMemory, DoneEvent, Event
from .pool import Tier
from .slabs import NO_BLOCKS, BlockRun, Blocks, SlotPool


class LateCheck:
    """Comparison of a batch of blocks with their digests on the side stream.

    No thread waits for the result before `confirm`. A pass may use the blocks before that, but its results may not
    outlive the pass until `confirm` succeeds. `batches` are segments that verify their blocks, with runs of blocks.
    """

    def __init__(self, stream: CopyStream, batches: Sequence[Asked]) -> None:
        runs = [
            (reader, number, first, blocks) for reader, number, batch_runs in batches for first, blocks in batch_runs
        ]
        self._runs = [(reader, number, first, len(blocks)) for reader, number, first, blocks in runs]
        expected = np.concatenate(
            [reader.digests[number]["lin64"][first : first + count] for reader, number, first, count in self._runs]
        ).view(np.int64)
        with stream.copying():
            digests = torch.cat([lin64(blocks) for *_, blocks in runs])  # int64 [blocks]
            # copied to pinned memory without waiting
            mismatches = digests != to_device(expected, digests.device)  # bool [blocks]
            self._mismatches = mismatches.to("cpu", non_blocking=True)
            self._done_event = stream.copied()
        self._intact: bool | None = None

    def is_done(self) -> bool:
        """Return whether the result is available without waiting."""
        return self._intact is not None or self._done_event.query()

    def is_intact(self) -> bool:
        """Wait for the result, and return whether every block matches its digest."""
        if self._intact is None:
            if not self._done_event.query():
                self._done_event.synchronize()
            self._intact = not bool(self._mismatches.numpy().any())
        return self._intact

    @property
    def is_confirmed(self) -> bool:
        """True if it is already known that every block matches its digest."""
        return self._intact is True

    def confirm(self) -> None:
        """Wait in this thread for the result. Raises IntegrityError, which names the first damaged block, if any."""
        if not self.is_intact():
            at = int(np.flatnonzero(self._mismatches.numpy())[0])
            for reader, block_group, first, count in self._runs:
                if at < count:
                    raise reader.damaged(block_group, first + at)
                at -= count


class BlockRequest(NamedTuple):
    """Request for blocks of one KV cache group of a segment; `chunks` is int64, ascending."""

    reader: SegmentReader
    block_group: int
    chunks: np.ndarray


@dataclass(eq=False)
class Pin:
    """Pin on buffer slots, which may not be evicted.

    The residency keeps each pin until nothing reads or writes its slots.
    """

    stream: CopyStream | None
    """Side stream of the device, or None if the host tier is the device tier."""
    handle: weakref.ref[BlockHandle] | None = None
    """Block handle that owns the pin, or None. The pin ends when the handle is deleted, even without a release."""
    slots: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    copied: Event = field(default_factory=DoneEvent)
    """Event after the copies to and from the slots."""
    release_event: Event | None = None
    """Event after the device work that was queued before the release, or None before the release."""
    reading: bool = False
    """True if a read from disk may be writing to the slots."""
    moves_down: bool = False
    """True if blocks evicted from a device are being copied to the slots."""
    check: LateCheck | None = None
    """Verification of blocks that were read from disk directly to the device."""
    on_verified: list[Callable[[], None]] = field(default_factory=list)
    """Actions to run when `check` succeeds. They make the blocks visible to other requests."""

    def keep_checked(self) -> None:
        """Run the actions in `on_verified` if `check` succeeded, and drop them in any case."""
        actions, self.on_verified = self.on_verified, []
        for action in actions if self.check is not None and self.check.is_intact() else ():
            action()

    def is_released(self) -> bool:
        """Return whether the pin was released and nothing reads or writes its slots."""
        if self.release_event is None or self.reading:
            return False
        return self.stream is None or (self.release_event.query() and self.copied.query())

    def end(self) -> Event:
        """Release the pin after the device work queued so far, and return the event for that point."""
        self.release_event = self.stream.computed() if self.stream else DoneEvent()
        return self.release_event


class Pins(set[Pin]):
    """All pins of a residency. The lock of the residency guards them."""

    def await_moves_down(self, stream: CopyStream | None) -> None:
        """Wait for copies of evicted blocks to the host on streams other than `stream`.

        Lookups find these blocks as soon as the copy is queued. Only work on the same stream is ordered after it.
        """
        for pin in self:
            if pin.moves_down and pin.stream is not stream:
                pin.copied.synchronize()

    def are_moving_down(self) -> bool:
        """Return whether queued copies from a device may still write to blocks that lookups find on the host."""
        return any(pin.moves_down and not pin.copied.query() for pin in self)

    def order_work(self) -> None:
        """Prepare to free the slots that are still pinned, after the copies and computation queued so far.

        Wait for the copies, which may be to host memory. Device memory belongs to the side stream, so a later use of it
        comes after the computation that the stream waits for.
        """
        for pin in self:
            pin.copied.synchronize()
            if pin.stream is not None and pin.release_event is not None:
                pin.stream.await_computation(pin.release_event)

    def reap(self) -> list[tuple[Tier, SlotPool, np.ndarray]]:
        """Unpin the slots of all pins that are over, and return those that have no pin left."""
        for pin in list(self):
            if pin.release_event is None and pin.handle is not None and pin.handle() is None:
                pin.end()  # an interrupt lost the handle
            is_done = pin.check is not None and pin.check.is_done()  # maybe before the copies end
            if pin.on_verified and (is_done or pin.is_released()):
                pin.keep_checked()
        over = [pin for pin in self if pin.is_released() and not pin.on_verified]  # also of those that this has added
        self.difference_update(over)
        return [(tier, pool, pool.unpin(slots)) for pin in over for tier, pool, slots in pin.slots]


@dataclass(eq=False)
class FetchedBlocks:
    """Blocks that a handle fetches for one request: found in memory, read from disk and copied."""

    request: BlockRequest
    chunks: np.ndarray
    """Chunks to fetch, int64, ascending: all requested chunks, or those within the budgets."""
    from_disk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Chunks that are read from disk, int64, ascending."""
    parts: Sequence[Blocks] = ()
    """Locations of the blocks on the requested device; empty before they have arrived, and after the release."""

    # until the blocks have arrived
    device_blocks: list[Blocks] = field(default_factory=list)
    host_blocks: list[Blocks] = field(default_factory=list)
    host_runs: list[BlockRun] = field(default_factory=list)
    """Runs of blocks that are read from disk to the host."""
    direct_runs: list[BlockRun] = field(default_factory=list)
    """Runs of blocks that are read from disk directly to the device."""
    staged_blocks: Blocks = NO_BLOCKS
    """Direct reads into the staging area, which would be lost when the block handle is released."""
    reserved_slots: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    moved: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Chunks that the device tier takes over from the host, int64, ascending."""

    def __post_init__(self) -> None:
        reader, number, _ = self.request
        self.owner, self.block_bytes = reader.owners[number], reader.shape.block_groups[number].block_bytes

    @property
    def num_chunks(self) -> int:
        """Number of all chunks of the KV cache group."""
        shape = self.request.reader.shape
        return shape.chunks_in(shape.block_groups[self.request.block_group])

    @property
    def arrived(self) -> Blocks:
        """Blocks of a handle after `wait`."""
        return Blocks.join(self.parts)

    def locate(self, parts: Sequence[Blocks]) -> None:
        """Set the locations of the blocks, and drop all references to other memory."""
        self.parts, self.staged_blocks = parts, NO_BLOCKS
        self.device_blocks, self.host_blocks, self.host_runs, self.direct_runs = [], [], [], []


class BlockHandle:
    """Block handle: a batch of blocks that is fetched to a device, and the pin on their slots.

    The pin lasts until `Residency.release`. `Residency.confirm` waits until the blocks are verified.
    """

    def __init__(self, requests: Sequence[BlockRequest]) -> None:
        self.pin = Pin(None, weakref.ref(self))
        self.fetched = [FetchedBlocks(request, request.chunks) for request in requests]
        self.event = OneShotEvent()
        self.gpu: DeviceMemory | None = None
        """Memory of the device where attention runs; None if that is the host."""
        self.failed: SegmentReader | None = None
        """Segment that made the fetch or its verification fail, if known."""
        self.owns_memory = False
        """True if some blocks are in device memory of the handle's own, allocated on the side stream."""

    @property
    def has_arrived(self) -> bool:
        """True if the fetch has completed or failed, so that `wait` does not block the thread."""
        return self.event.is_set

    def wait(self) -> None:
        """Wait until the blocks have arrived. Some may not be verified yet: see `Residency.confirm`.

        Raises IntegrityError if one is damaged, OSError if a read failed, or any other error of the fetch, as of CUDA.
        """
        if not self.event.is_set or self.event.error is not None:
            self.event.wait()
        if self.pin.stream is not None:
            self.pin.stream.await_copies(self.pin.copied)

    @property
    def is_confirmed(self) -> bool:
        """True if `Residency.confirm` neither waits nor raises. Valid after `wait`."""
        return self.pin.check is None or self.pin.check.is_confirmed
