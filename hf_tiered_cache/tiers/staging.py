"""Host staging memory through which KV cache groups are copied from a device before they are written."""

from __future__ import annotations

import torch

from ..store.digest import PackedBlocks, lin64
from ..store.memory import aligned_bytes
from .streams import CopyStream

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
        down = self._memory[: blocks.numel()].view(blocks.shape)  # uint8 [n, block_bytes]
        with stream.copying():
            linear = lin64(blocks).to("cpu", non_blocking=True)  # int64 [n]
            down.copy_(blocks, non_blocking=True)
            copied = stream.copied()
        copied.synchronize()
        return PackedBlocks(down, linear.numpy())
