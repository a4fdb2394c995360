"""Memory for slabs that is made before it is needed: page-locking 64 MiB takes longer than reading them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..geometry import ALIGNMENT

NO_MEMORY = (RuntimeError, MemoryError, OSError)
"""What CUDA, page-locking and mmap raise."""


class SlabStock:
    """Memory that one tier has got and not used yet, uint8 `[nbytes]` each."""

    def __init__(self) -> None:
        self._ready: list[torch.Tensor] = []
        self.is_ordered = False
        """Whether more is being made."""

    @property
    def nbytes(self) -> int:
        """What it takes, alignment included."""
        return sum(memory.numel() + ALIGNMENT for memory in self._ready)

    def put(self, memory: torch.Tensor) -> None:
        """Keep memory until it is needed."""
        self._ready.append(memory)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory of just this size, if there is any."""
        for number, memory in enumerate(self._ready):
            if memory.numel() == nbytes:
                return self._ready.pop(number)
        return None

    def lacks(self, wanted: Iterable[int]) -> list[int]:
        """Which of these sizes are not here."""
        sizes, lacking = [memory.numel() for memory in self._ready], []
        for nbytes in wanted:
            if nbytes in sizes:
                sizes.remove(nbytes)
            else:
                lacking.append(nbytes)
        return lacking

    def clear(self) -> None:
        """Give it back."""
        self._ready.clear()
