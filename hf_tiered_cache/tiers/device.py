"""Memory of one GPU for blocks: those that stay, and those on their way to a request."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..store.memory import aligned_bytes
from .blocks import Blocks, overlaps
from .policy import EvictionPolicy, Usage
from .pool import Tier
from .scores import Owner, ScoreTable
from .streams import CopyStream

STAGING_BYTES = 128 << 20
"""As far as methods fetch ahead, by default."""


class DeviceMemory:
    """A tier, a staging area, and the stream on which both are filled.

    Slots of the staging area belong to the lease that brings blocks through them. So what is fetched ahead reaches the
    GPU also where it keeps nothing, and GPUDirect Storage reads into memory that is registered with it once.

    Args:
        device: the GPU.
        stream: for copies to and from it.
        budget: bytes for blocks that stay.
        staging: bytes for those on their way.
        policy: who goes when the tier is full.
        scores: what selectors have told of chunks.
        on_evict: see `Tier`.
        added: told of each new slab.
    """

    def __init__(
        self,
        device: torch.device,
        stream: CopyStream,
        budget: int,
        staging: int,
        policy: EvictionPolicy,
        scores: ScoreTable,
        on_evict: Callable[[Owner, int, Blocks, Usage], None],
        added: Callable[[torch.Tensor], None] | None,
    ) -> None:
        def allocate(nbytes: int) -> torch.Tensor:
            # on the side stream, which fills it: what the allocator has for the computing stream may still be in
            # use by kernels that are queued there
            with stream.copying():
                return aligned_bytes(nbytes, device=device)

        self.device, self.stream = device, stream
        self.tier = Tier("device", budget, policy, allocate, on_evict, scores, added=added)
        self.staging = Tier("staging", staging, policy, allocate, scores=scores, added=added)

    def copy(self, sources: Blocks, targets: Blocks) -> None:
        """Copy blocks of the same chunks, to or from the GPU, on the side stream."""
        with self.stream.copying():
            for source, target in overlaps(sources.runs(), targets.runs()):
                target.copy_(source, non_blocking=True)

    def room(self, block_bytes: int) -> int:
        """How many blocks of that size could come in now."""
        return self.tier.room(block_bytes) + self.staging.room(block_bytes)
