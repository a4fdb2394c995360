"""Memory through which block groups come down from a device, to be written."""

from __future__ import annotations

import torch

from ..store.digest import PackedBlocks, lin64
from ..store.memory import aligned_bytes
from .streams import CopyStream

_MOST_PINNED_BYTES = 256 << 20
"""What is larger comes down into ordinary memory: PyTorch keeps for reuse what it has page-locked."""


class Staging:
    """Host memory for one block group, page-locked unless that is too much of it.

    Args:
        nbytes: of the largest block group.
    """

    def __init__(self, nbytes: int) -> None:
        pin = torch.cuda.is_available() and nbytes <= _MOST_PINNED_BYTES
        self._memory = aligned_bytes(nbytes, pin=pin)

    def bring_down(self, stream: CopyStream, blocks: torch.Tensor) -> PackedBlocks:
        """Blocks of a device, uint8 `[n, block_bytes]`, and their lin64, computed there; good until the next.

        This thread waits once, for the side stream alone.
        """
        down = self._memory[: blocks.numel()].view(blocks.shape)  # uint8 [n, block_bytes]
        with stream.copying():
            linear = lin64(blocks).to("cpu", non_blocking=True)  # int64 [n]
            down.copy_(blocks, non_blocking=True)
            copied = stream.copied()
        copied.synchronize()
        return PackedBlocks(down, linear.numpy())
