"""What is under way for one request of a lease."""

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
    """Blocks that are found, read and moved for one request."""

    leased: LeasedBlocks
    gpu: DeviceMemory | None
    """Where attention runs; None where that is the host."""
    on_device: list[Blocks] = field(default_factory=list)
    on_host: list[Blocks] = field(default_factory=list)
    to_read: list[BlockRun] = field(default_factory=list)
    """What is read to the host."""
    direct: list[BlockRun] = field(default_factory=list)
    """What is read to the device without passing through the host."""
    staged: Blocks = field(default_factory=Blocks.none)
    """What of that goes to the staging area, and would be nowhere when the lease is over."""
    reserved: list[tuple[Tier, SlotPool, np.ndarray]] = field(default_factory=list)
    owner: Owner = field(init=False)
    block_bytes: int = field(init=False)
    count: int = field(init=False)
    """Chunks of the block group."""

    def __post_init__(self) -> None:
        reader, block_group, _ = self.leased.request
        group = reader.shape.block_groups[block_group]
        self.owner, self.block_bytes = reader.owner(block_group), group.block_bytes
        self.count = reader.shape.chunks_in(group)

    def needs(self, host: Tier, direct: bool) -> Needs:
        """How many slots it may take of each tier, once what memory has is held.

        Args:
            host: the tier on the host.
            direct: whether the disk fills device memory.
        """
        needs: Needs = Counter()
        if self.leased.request.reader.gone:  # no tier keeps it
            return needs
        missing, size, gpu = len(self.leased.from_disk), self.block_bytes, self.gpu
        up = missing + sum(map(len, self.on_host))
        if gpu is not None and up:
            room, vacant = gpu.tier.room(size), gpu.tier.vacant(size)
            needs[gpu.tier, size] = up
            needs[gpu.staging, size] = max(0, up - room)
            needs[host, size] = max(0, min(up, room) - vacant)  # what is evicted
            missing = max(0, missing - room) if direct else missing
        needs[host, size] += missing
        return needs
