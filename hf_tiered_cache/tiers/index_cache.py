"""Index cache: indexes of keys that stay in memory, so that selection does not read them again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from ..store.lazy import torch

KeyOwner = tuple[str, int, int, str]
"""Segment id, layer, a checksum of the segment's content, and the kind of index made from the layer's keys."""

IndexKey = tuple[tuple[KeyOwner, int, int], ...]
"""Slices of segments that an index covers, in order: owner, first token, and number of tokens."""


class CachedIndex(Protocol):
    """Index made from a layer's keys, of a segment or of several."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class IndexCache:
    """Index cache by segment slices and layer.

    It keeps indexes for later requests, within a budget of bytes on all devices together, with LRU eviction. It also
    finds indexes that caches still use although the budget has no room for them, so that all caches share one index.
    These take memory in addition to the budget: `unbudgeted`.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocated = 0
        self.evicted = 0
        """Number of indexes that were evicted or did not fit."""
        self._keys: OrderedDict[tuple[IndexKey, torch.device], CachedIndex] = OrderedDict()
        self._in_use: WeakValueDictionary[Hashable, CachedIndex] = WeakValueDictionary()  # all that exist
        self._lock = threading.Lock()

    def get(self, key: IndexKey, device: torch.device) -> Any:
        """Return the index of `key` on `device`, or None."""
        name = key, device
        with self._lock:
            if name in self._keys:
                self._keys.move_to_end(name)
            elif (index := self._in_use.get(name)) is not None and index.nbytes <= self.budget:
                self._keep(name, index)
            return self._in_use.get(name)

    def admit(self, key: IndexKey, index: CachedIndex, replaced: Collection[IndexKey] = ()) -> Any:
        """Insert an index if it is new, evicting others as necessary, and drop the `replaced` ones.

        Return the index to use: `index`, or an equal one that other caches share.
        """
        name = key, index.device
        with self._lock:
            for old in replaced:
                self._drop((old, index.device))
            shared = self._in_use.setdefault(name, index)
            if name not in self._keys:
                self._keep(name, shared)
            return shared

    def track(self, index: CachedIndex) -> None:
        """Count an index that only one cache can use, as long as it exists."""
        with self._lock:
            self._in_use[object()] = index

    @property
    def unbudgeted(self) -> int:
        """Bytes of indexes that caches use and that are not kept within the budget."""
        with self._lock:
            return sum(index.nbytes for name, index in self._in_use.items() if name not in self._keys)

    def rename(self, segment: str, new_owner: Callable[[KeyOwner], KeyOwner]) -> None:
        """Assign the indexes of a segment to new owners."""
        with self._lock:
            for key, device in self._names({segment}):
                if (index := self._in_use.pop((key, device), None)) is None:  # its last user has just ended
                    continue
                new_key = tuple((new_owner(part[0]) if part[0][0] == segment else part[0], *part[1:]) for part in key)
                self._in_use[new_key, device] = index
                self._drop((new_key, device))
                if (key, device) in self._keys:
                    self._keys[new_key, device] = self._keys.pop((key, device))

    def forget(self, segments: Collection[str] | None = None) -> None:
        """Remove the indexes of deleted segments, or all. Those in use are still counted."""
        with self._lock:
            for name in self._names(segments):
                if (index := self._in_use.pop(name, None)) is not None:  # else its last user has just ended
                    self._in_use[object()] = index
                self._drop(name)

    def segments(self) -> set[str]:
        """Return the ids of segments with an index in the cache."""
        with self._lock:
            return {owner[0] for key, _ in self._keys for owner, *_ in key}

    # --- under the lock

    def _keep(self, name: tuple[IndexKey, torch.device], index: CachedIndex) -> None:
        """Keep an index within the budget, if it is not larger."""
        if index.nbytes > self.budget:
            self.evicted += 1
            return
        self._keys[name] = index
        self.allocated += index.nbytes
        while self.allocated > self.budget:
            self._drop(next(iter(self._keys)))
            self.evicted += 1

    def _drop(self, name: tuple[IndexKey, torch.device]) -> None:
        if (index := self._keys.pop(name, None)) is not None:
            self.allocated -= index.nbytes

    def _names(self, segments: Collection[str] | None) -> list[Any]:
        """Return the names of all indexes that cover a part of these segments; None for all segments."""
        names = [name for name in self._in_use if isinstance(name, tuple)]
        return [name for name in names if segments is None or any(owner[0] in segments for owner, *_ in name[0])]
