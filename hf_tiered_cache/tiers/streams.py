"""Copies between host and device that run beside the computation: a side stream on CUDA, nothing to do on the CPU."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the work before it is done."""

    def synchronize(self) -> None:
        """Wait in this thread until it is."""


class DoneEvent:
    """The event of a device that computes synchronously."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CopyStream:
    """The one stream on which blocks move to and from a device. The base class is the CPU's, where copies are done
    when they return."""

    on_host = True
    """Whether the device's memory is the host's."""

    def copying(self) -> AbstractContextManager:
        """Within this, copies go to the side stream."""
        return nullcontext()

    def copied(self) -> Event:
        """The point after all copies so far."""
        return DoneEvent()

    def await_computation(self, event: Event) -> None:
        """Let the copies that follow wait for `event`."""

    def await_copies(self, event: Event) -> None:
        """Let the computation that this thread starts next wait for `event`, without stopping the thread."""

    def computed(self) -> Event:
        """The point after all computation that this thread has started so far."""
        return DoneEvent()


class CudaCopyStream(CopyStream):
    """A side stream of one GPU."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager:
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
    """The stream for copies to and from `device`: one for all stores and caches of the process."""
    if device.type != "cuda":
        return CopyStream()
    with _making:  # `cache` alone would let two threads make two
        return _cuda_stream(torch.cuda.current_device() if device.index is None else device.index)


_making = threading.Lock()


@cache
def _cuda_stream(index: int) -> CudaCopyStream:
    return CudaCopyStream(torch.device("cuda", index))
