"""State of a pending fetch: the blocks of one request of a block handle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .blocks import BlockRun, Blocks
from .device import DeviceMemory
from .lease import LeasedBlocks
from .pool import Tier
from .scores import Owner
from .slab_maker import Needs
from .slots import SlotPool


@dataclass(eq=False)
class Arrival:
    """Pending fetch of one block request: blocks that are found in memory, read from disk and copied."""

    leased: LeasedBlocks
    gpu: DeviceMemory | None
    """Memory of the device where attention runs; None if that is the host."""
    on_device: list[Blocks] = field(default_factory=list)
    on_host: list[Blocks] = field(default_factory=list)
    to_read: list[BlockRun] = field(default_factory=list)
    """Runs of blocks that are read from disk to the host."""
    direct: list[BlockRun] = field(default_factory=list)
    """Runs of blocks that are read from disk directly to the device."""
    staged: Blocks = field(default_factory=Blocks.none)
    """Direct reads into the staging area, which would be lost when the block handle is released."""
    reserved: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    owner: Owner = field(init=False)
    block_bytes: int = field(init=False)
    count: int = field(init=False)
    """Number of chunks of the KV cache group."""

    def __post_init__(self) -> None:
        reader, block_group, _ = self.leased.request
        group = reader.shape.block_groups[block_group]
        self.owner, self.block_bytes = reader.owner(block_group), group.block_bytes
        self.count = reader.shape.chunks_in(group)

    def needs(self, host: Tier, direct: bool) -> Needs:
        """Return how many buffer slots the fetch may take from each tier, after blocks in memory are pinned.

        Args:
            host: the tier on the host.
            direct: whether the engine reads from disk directly to device memory.
        """
        needs: Needs = Counter()
        if self.leased.request.reader.gone:  # no tier keeps blocks of a deleted segment
            return needs
        missing, size, gpu = len(self.leased.from_disk), self.block_bytes, self.gpu
        up = missing + sum(map(len, self.on_host))
        if gpu is not None and up:
            room, vacant = gpu.tier.room(size), gpu.tier.vacant(size)
            needs[gpu.tier, size] = up
            needs[gpu.staging, size] = max(0, up - room)
            needs[host, size] = max(0, min(up, room) - vacant)  # for blocks that the device evicts
            missing = max(0, missing - room) if direct else missing
        needs[host, size] += missing
        return needs
