"""Index cache: indexes of keys that stay in memory, so that selection does not read them again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

KeyOwner = tuple[str, int, int, str]
"""Segment id, layer, a checksum of the segment's content, and the kind of index made from the layer's keys."""


class CachedIndex(Protocol):
    """Index made from a segment's keys at one layer."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class IndexCache:
    """Index cache by segment and layer, within a byte budget, with LRU eviction.

    Args:
        budget: bytes on all devices together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocated = 0
        self.evicted = 0
        """Number of indexes that were evicted or did not fit."""
        self._keys: OrderedDict[tuple[KeyOwner, torch.device], CachedIndex] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: KeyOwner, device: torch.device) -> Any:
        """Return the index of `owner` on `device`, or None."""
        with self._lock:
            if (index := self._keys.get((owner, device))) is not None:
                self._keys.move_to_end((owner, device))
            return index

    def admit(self, owner: KeyOwner, index: CachedIndex) -> None:
        """Insert an index if it is new and fits in the budget, evicting others as necessary."""
        name = owner, index.device
        with self._lock:
            if name in self._keys:
                return
            if index.nbytes > self.budget:
                self.evicted += 1
                return
            self._keys[name] = index
            self.allocated += index.nbytes
            while self.allocated > self.budget:
                self.allocated -= self._keys.popitem(last=False)[1].nbytes
                self.evicted += 1

    def rename(self, segment: str, new_owner: Callable[[KeyOwner], KeyOwner]) -> None:
        """Assign the indexes of a segment to new owners.

        Args:
            segment: id of the segment.
            new_owner: returns the new owner for an owner.
        """
        with self._lock:
            for owner, device in [name for name in self._keys if name[0][0] == segment]:
                self._keys[new_owner(owner), device] = self._keys.pop((owner, device))

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments."""
        with self._lock:
            for name in [name for name in self._keys if name[0][0] in segments]:
                self.allocated -= self._keys.pop(name).nbytes

    def segments(self) -> set[str]:
        """Return the ids of segments with an index in the cache."""
        with self._lock:
            return {owner[0] for owner, _ in self._keys}

    def clear(self) -> None:
        """Remove all indexes."""
        with self._lock:
            self._keys.clear()
            self.allocated = 0
