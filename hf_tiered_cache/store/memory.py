"""Memory that direct I/O can write to."""

from __future__ import annotations

import torch

from ..geometry import ALIGNMENT


def aligned_bytes(nbytes: int, *, pin: bool = False, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised memory, uint8 `[nbytes]`, that begins on a 4 KiB boundary.

    Args:
        nbytes: how many.
        pin: whether to page-lock host memory, so that a GPU can copy from it asynchronously.
        device: where.
    """
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=pin, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]
