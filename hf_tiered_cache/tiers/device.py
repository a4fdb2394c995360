"""Devices: streams for copies between host and device, staging memory, and the memory of one GPU for blocks.

A side stream runs the copies concurrently with computation on CUDA. On the CPU they are synchronous.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeAlias

from ..store.container import PackedBlocks, lin64
from ..store.lazy import torch
from ..store.memory import aligned_bytes, page_locked, to_device
from .pool import DIRECT_SLAB_BYTES, LEAST_SLAB_BYTES, Tier
from .scores import EvictionPolicy, Owner, ScoreTable, Usage
from .slabs import BlockRun, Blocks, overlaps

STAGING_BYTES = 128 << 20
"""Default size of the staging area of a GPU, equal to the default prefetch distance of the methods."""
_FEW_COPIES = 4
_SHORT_RUN_BYTES = 128 << 10
"""About as many bytes as a thread copies in host memory in the time that it needs to start a copy to a GPU."""
_MOST_COLLECTED_BYTES = 16 << 20  # limit for the memory in which short runs are collected. It is in no budget
_MOST_PINNED_BYTES = 256 << 20
"""Limit for page-locked memory; larger KV cache groups use pageable memory, since PyTorch caches page-locked memory."""


class DoneEvent:
    """Event of a device that computes synchronously."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""
        return True

    def synchronize(self) -> None:
        """Wait in this thread until the work before the event is done."""


Event: TypeAlias = "DoneEvent | torch.cuda.Event"
"""Point in the work of a stream."""


class CopyStream:
    """Stream on which blocks are copied to and from a device.

    The base class is for the CPU, where copies are synchronous.
    """

    on_host = True
    """True if the device uses host memory."""

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context manager within which copies are queued on the side stream."""
        return nullcontext()

    def copied(self) -> Event:
        """Return an event after all copies so far."""
        return DoneEvent()

    def await_computation(self, event: Event) -> None:
        """Make later copies wait for `event`."""

    def await_copies(self, event: Event) -> None:
        """Make computation that this thread starts later wait for `event`, without blocking the thread."""

    def computed(self) -> Event:
        """Return an event after all computation that this thread has started so far."""
        return DoneEvent()


class CudaCopyStream(CopyStream):
    """Side stream of one GPU."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def copied(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def await_computation(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            self.stream.wait_event(event)

    def await_copies(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(event)

    def computed(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def copy_stream(device: torch.device) -> CopyStream:
    """Return the copy stream of `device`. On CUDA all stores and caches of the process share it."""
    if device.type != "cuda":
        return CopyStream()
    with _stream_lock:  # `cache` alone would let two threads create two streams
        return _cuda_stream(numbered(device).index)


def numbered(device: torch.device) -> torch.device:
    """Return `device` with its index: "cuda" is the current GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


_stream_lock = threading.Lock()


@cache
def _cuda_stream(index: int) -> CudaCopyStream:
    return CudaCopyStream(torch.device("cuda", index))


class HostMemory:
    """Allocator of the host tier. Memory is page-locked once a GPU is known that copies from and to it.

    CUDA is not initialized for models on the CPU, and page-locking initializes no other GPU than the model's.
    """

    def __init__(self) -> None:
        self.gpu: torch.device | None = None
        """First GPU on which a model has used the tier."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate a slab, uint8 `[nbytes]`."""
        return aligned_bytes(nbytes) if self.gpu is None else page_locked(nbytes, self.gpu)

    def allocate_own(self, nbytes: int) -> torch.Tensor:
        """Allocate memory of one request, uint8 `[nbytes]`. PyTorch's allocator waits for copies before reuse."""
        return aligned_bytes(nbytes, pin=self.gpu is not None)


class Staging:
    """Host memory for one KV cache group, page-locked if CUDA is available and the group is not too large."""

    def __init__(self, nbytes: int) -> None:
        pin = torch.cuda.is_available() and nbytes <= _MOST_PINNED_BYTES
        self._memory = aligned_bytes(nbytes, pin=pin)

    def bring_down(self, stream: CopyStream, blocks: torch.Tensor) -> PackedBlocks:
        """Copy blocks from a device, uint8 `[n, block_bytes]`, together with their lin64, computed on the device.

        The result is valid until the next call. This thread waits once, for the side stream only.
        """
        host_blocks = self._memory[: blocks.numel()].view(blocks.shape)  # uint8 [n, block_bytes]
        with stream.copying():
            linear = lin64(blocks).to("cpu", non_blocking=True)  # int64 [n]
            host_blocks.copy_(blocks, non_blocking=True)
            copy_event = stream.copied()
        copy_event.synchronize()
        return PackedBlocks(host_blocks, linear.numpy())


class DeviceMemory:
    """The tier of one GPU, its staging area, and the stream on which both are filled.

    Slots of the staging area belong to the block handle that fetches blocks through them. Prefetched blocks thus reach
    the GPU even if its tier keeps none, and GPUDirect Storage reads into memory that is registered once.

    Args:
        budget: Bytes for blocks that the tier keeps.
        staging: Bytes of the staging area.
        policy, scores, on_evict, added: See `Tier`.
        direct: Whether the engine reads from disk directly to the memory.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int,
        staging: int,
        policy: EvictionPolicy,
        scores: ScoreTable,
        on_evict: Callable[[Owner, int, Blocks, Usage], None],
        added: Callable[[torch.Tensor], None] | None,
        direct: bool = False,
    ) -> None:
        stream = copy_stream(device)

        def allocate(nbytes: int) -> torch.Tensor:
            # allocate on the side stream, which fills the memory: memory that the allocator keeps for the compute
            # stream may still be in use by kernels queued there
            with stream.copying():
                return aligned_bytes(nbytes, device=device)

        def tier(name: str, budget: int, on_evict: Any = None) -> Tier:
            # a small budget serves blocks of several sizes rather than direct reads
            least = DIRECT_SLAB_BYTES if direct and budget >= 8 * DIRECT_SLAB_BYTES else LEAST_SLAB_BYTES
            return Tier(name, budget, policy, allocate, on_evict, scores, added=added, least_slab=least)

        self.device, self.stream = device, stream
        self.tier, self.staging = tier("device", budget, on_evict), tier("staging", staging)

    def copy(self, sources: Blocks, targets: Blocks) -> None:
        """Copy blocks to or from the GPU on the side stream. Both have the same blocks in the same order."""
        self._copy_runs(sources.runs(), targets.runs())

    def upload(self, sources: Blocks, targets: Blocks) -> None:
        """Copy blocks as `copy` does, from host memory that no queued copy still writes to.

        Many short runs are first collected on the host, then copied together, and distributed on the GPU.
        """
        source_runs, target_runs = sources.runs(), targets.runs()
        count, num_runs = len(sources), max(len(source_runs), len(target_runs))
        nbytes = count * sources.block_bytes
        if num_runs <= _FEW_COPIES or nbytes > min(num_runs * _SHORT_RUN_BYTES, _MOST_COLLECTED_BYTES):
            self._copy_runs(source_runs, target_runs)
            return
        collected = aligned_bytes(nbytes, pin=not self.stream.on_host).view(count, -1)
        for slab, rows, places in sources.rows_by_slab():
            if len(rows) == count:
                torch.index_select(slab, 0, torch.from_numpy(rows), out=collected)
            else:
                collected.index_copy_(0, torch.from_numpy(places), slab.index_select(0, torch.from_numpy(rows)))
        if len(target_runs) <= _FEW_COPIES:
            self._copy_runs([(0, collected)], target_runs)
            return
        with self.stream.copying():
            uploaded = collected.to(self.device, non_blocking=True)
            for slab, rows, places in targets.rows_by_slab():
                part = uploaded if len(rows) == count else uploaded.index_select(0, to_device(places, self.device))
                slab.index_copy_(0, to_device(rows, self.device), part)

    def _copy_runs(self, sources: Sequence[BlockRun], targets: Sequence[BlockRun]) -> None:
        with self.stream.copying():
            for source, target in overlaps(sources, targets):
                target.copy_(source, non_blocking=True)
