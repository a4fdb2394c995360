"""Buffer slots: memory for blocks of one size, allocated in slabs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .blocks import Blocks
from .policy import Usage

FREE, RESERVED, GONE, ORPHANED = -1, -2, -3, -4
"""States of a slot without a block: free, being filled, memory freed, or block forgotten while the slot is pinned."""


@dataclass
class SlotPool:
    """Pool of buffer slots for blocks of `block_bytes`, with metadata in arrays to avoid a loop over blocks.

    A slot is free, holds a block, or is reserved while a block is loaded. While `pins` > 0 it may not be evicted. Slot
    numbers never change, even when a slab is freed, so that pins on other slabs stay valid.
    """

    block_bytes: int
    slabs: list[torch.Tensor | None] = field(default_factory=list)  # uint8 [slots, block_bytes] each
    starts: list[int] = field(default_factory=lambda: [0])  # first slot of each slab, and the total
    owner: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # number of an owner, or a state above
    chunk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    last_used: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    uses: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    importance: np.ndarray = field(default_factory=lambda: np.empty(0, np.float64))
    accesses: np.ndarray = field(default_factory=lambda: np.empty(0, np.float64))
    pins: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return int((self.owner != GONE).sum())

    def add_slab(self, memory: torch.Tensor) -> None:
        """Add `memory`, uint8 `[slots, block_bytes]`, as free slots.

        The numbers of a freed slab of the same size are reused.
        """
        count = memory.shape[0]
        for index, slab in enumerate(self.slabs):
            if slab is None and self.starts[index + 1] - self.starts[index] == count:
                self.slabs[index] = memory
                self.owner[self.starts[index] : self.starts[index + 1]] = FREE
                return
        grown: dict[str, Any] = {
            "slabs": [*self.slabs, memory],
            "starts": [*self.starts, self.starts[-1] + count],
            "owner": np.concatenate([self.owner, np.full(count, FREE, np.int64)]),
        }
        for name in ("chunk", "last_used", "uses", "importance", "accesses", "pins"):
            known = getattr(self, name)
            grown[name] = np.concatenate([known, np.zeros(count, known.dtype)])
        self.__dict__.update(grown)  # atomic: after an interrupt all arrays have the same length

    def drop_slab(self, index: int) -> None:
        """Free the memory of a slab, where all slots must be free."""
        self.slabs[index] = None
        self.owner[self.starts[index] : self.starts[index + 1]] = GONE

    def free_slots(self, count: int) -> np.ndarray:
        """Return up to `count` free slots, ascending, so that runs of blocks stay contiguous in memory."""
        return np.flatnonzero(self.owner == FREE)[:count]

    def evictable(self) -> np.ndarray:
        return np.flatnonzero((self.owner >= 0) & (self.pins == 0))

    def usage(self, slots: np.ndarray) -> Usage:
        return Usage(self.last_used[slots], self.uses[slots], self.importance[slots], self.accesses[slots])

    def blocks(self, slots: np.ndarray, chunks: np.ndarray) -> Blocks:
        """Return the blocks of ascending `chunks`, stored in `slots`."""
        every = np.searchsorted(self.starts, slots, side="right") - 1
        touched, slab = np.unique(every, return_inverse=True)
        starts = np.asarray(self.starts)[every]
        return Blocks(chunks, tuple(self._slab(index) for index in touched.tolist()), slab, slots - starts)

    def _slab(self, index: int) -> torch.Tensor:
        memory = self.slabs[index]
        assert memory is not None  # a slab that holds blocks is not freed
        return memory
