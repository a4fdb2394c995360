"""Copies between host and device, and the staging memory for writes.

A side stream runs them concurrently with computation on CUDA. On the CPU they are synchronous.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from ..store.digest import PackedBlocks, lin64
from ..store.memory import aligned_bytes


class Event(Protocol):
    """Point in the work of a stream."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def synchronize(self) -> None:
        """Wait in this thread until the work before the event is done."""


class DoneEvent:
    """Event of a device that computes synchronously."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


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
    with _making:  # `cache` alone would let two threads create two streams
        return _cuda_stream(torch.cuda.current_device() if device.index is None else device.index)


_making = threading.Lock()


@cache
def _cuda_stream(index: int) -> CudaCopyStream:
    return CudaCopyStream(torch.device("cuda", index))


_MOST_PINNED_BYTES = 256 << 20
"""Limit for page-locked memory; larger KV cache groups use pageable memory, since PyTorch caches page-locked memory."""


class Staging:
    """Host memory for one KV cache group, page-locked if CUDA is available and the group is not too large.

    Args:
        nbytes: bytes of the largest KV cache group.
    """

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
