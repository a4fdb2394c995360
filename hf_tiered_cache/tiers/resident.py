"""What choices are made from stays in memory, and is not read again: indexes of keys."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

KeyOwner = tuple[str, int, int, str]
"""Segment id, layer, a checksum of what the segment contains, and what is made of the layer's keys."""


class Resident(Protocol):
    """What is made of a segment's keys at one layer."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class ResidentKeys:
    """Indexes of the keys of segments, by segment and layer, within a budget; the least recently used go first.

    Args:
        budget: bytes, on all devices together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocated = 0
        self.evicted = 0
        """How many went, or found no room."""
        self._keys: OrderedDict[tuple[KeyOwner, torch.device], Resident] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: KeyOwner, device: torch.device) -> Any:
        """What is there of `owner` on `device`, or None."""
        with self._lock:
            if (found := self._keys.get((owner, device))) is not None:
                self._keys.move_to_end((owner, device))
            return found

    def admit(self, owner: KeyOwner, keys: Resident) -> None:
        """Keep `keys` if they fit."""
        name = owner, keys.device
        with self._lock:
            if name in self._keys:
                return
            if keys.nbytes > self.budget:
                self.evicted += 1
                return
            self._keys[name] = keys
            self.allocated += keys.nbytes
            while self.allocated > self.budget:
                self.allocated -= self._keys.popitem(last=False)[1].nbytes
                self.evicted += 1

    def rename(self, segment: str, named: Callable[[KeyOwner], KeyOwner]) -> None:
        """Move what there is of a segment to another: `named` gives the new owner of each."""
        with self._lock:
            for owner, device in [name for name in self._keys if name[0][0] == segment]:
                self._keys[named(owner), device] = self._keys.pop((owner, device))

    def forget(self, segments: Collection[str]) -> None:
        """These segments are gone."""
        with self._lock:
            for name in [name for name in self._keys if name[0][0] in segments]:
                self.allocated -= self._keys.pop(name).nbytes

    def segments(self) -> set[str]:
        """Those of which it holds keys."""
        with self._lock:
            return {owner[0] for owner, _ in self._keys}

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._keys.clear()
            self.allocated = 0
