"""Memory of one GPU for blocks: the device tier and a staging area for transfers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..store.memory import aligned_bytes
from .policy import EvictionPolicy, Usage
from .pool import Tier
from .scores import Owner, ScoreTable
from .slabs import Blocks, overlaps
from .streams import CopyStream

STAGING_BYTES = 128 << 20
"""Default size of the staging area, equal to the default prefetch distance of the methods."""


class DeviceMemory:
    """The tier of one GPU, its staging area, and the stream on which both are filled.

    Slots of the staging area belong to the block handle that fetches blocks through them. Prefetched blocks thus reach
    the GPU even if its tier keeps none, and GPUDirect Storage reads into memory that is registered once.

    Args:
        device: the GPU.
        stream: stream for copies to and from the GPU.
        budget: bytes for blocks that the tier keeps.
        staging: bytes of the staging area.
        policy: eviction policy of the tier.
        scores: scores of chunks that selectors reported.
        on_evict: see `Tier`.
        added: called with each new slab.
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
            # allocate on the side stream, which fills the memory: memory that the allocator keeps for the compute
            # stream may still be in use by kernels queued there
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
        """Return how many blocks of `block_bytes` the tier and the staging area can take now."""
        return self.tier.room(block_bytes) + self.staging.room(block_bytes)
