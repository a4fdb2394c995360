"""Memory for slabs, allocated in advance: page-locking 64 MiB takes longer than reading them from disk."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..geometry import ALIGNMENT

NO_MEMORY = (RuntimeError, MemoryError, OSError)
"""Errors that CUDA, page-locking and mmap raise if an allocation fails."""


class SlabStock:
    """Stock of memory that one tier has allocated and not used yet, uint8 `[nbytes]` each."""

    def __init__(self) -> None:
        self._ready: list[torch.Tensor] = []
        self.is_ordered = False
        """True if another slab is being allocated."""

    @property
    def nbytes(self) -> int:
        """Bytes in stock, alignment included."""
        return sum(memory.numel() + ALIGNMENT for memory in self._ready)

    def put(self, memory: torch.Tensor) -> None:
        """Add memory to the stock."""
        self._ready.append(memory)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Remove and return memory of exactly this size, or return None."""
        for number, memory in enumerate(self._ready):
            if memory.numel() == nbytes:
                return self._ready.pop(number)
        return None

    def lacks(self, wanted: Iterable[int]) -> list[int]:
        """Return the sizes that are not in stock; each memory in stock satisfies one size."""
        sizes, lacking = [memory.numel() for memory in self._ready], []
        for nbytes in wanted:
            if nbytes in sizes:
                sizes.remove(nbytes)
            else:
                lacking.append(nbytes)
        return lacking

    def clear(self) -> None:
        """Free all memory in stock."""
        self._ready.clear()
