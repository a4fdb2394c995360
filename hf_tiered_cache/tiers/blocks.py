"""Locations of blocks in memory, as arrays of slabs and slots, so that many blocks are indexed at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

BlockRun = tuple[int, torch.Tensor]
"""A run of consecutive chunks: the number of the first chunk, and the blocks, uint8 `[n, block_bytes]`."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one KV cache group of a segment, and their locations in memory.

    Args:
        chunks: chunk numbers, int64 `[n]`, ascending.
        slabs: the slabs that hold the blocks, uint8 `[slots, block_bytes]` each.
        slab: index into `slabs` for each block, int64 `[n]`.
        slot: row of each block in its slab, int64 `[n]`.
    """

    chunks: np.ndarray
    slabs: tuple[torch.Tensor, ...]
    slab: np.ndarray
    slot: np.ndarray

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, some: np.ndarray | slice) -> Blocks:
        """Select blocks by a mask, ascending indices or a slice."""
        return Blocks(self.chunks[some], self.slabs, self.slab[some], self.slot[some])

    def runs(self) -> list[BlockRun]:
        """Return the blocks as the fewest runs that are contiguous in both the segment and memory."""
        if not len(self):
            return []
        breaks = np.flatnonzero((np.diff(self.chunks) != 1) | (np.diff(self.slab) != 0) | (np.diff(self.slot) != 1)) + 1
        bounds = [0, *breaks.tolist(), len(self)]
        return [
            (int(self.chunks[first]), self.slabs[self.slab[first]][self.slot[first] : self.slot[first] + stop - first])
            for first, stop in itertools.pairwise(bounds)
        ]

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """Join disjoint parts of the same KV cache group, sorted by chunk."""
        parts = [part for part in parts if len(part)] or [cls.none()]
        if len(parts) == 1:
            return parts[0]
        numbers: dict[int, int] = {}  # id of a slab -> its index: parts may share slabs
        slabs: list[torch.Tensor] = []
        for slab in (slab for part in parts for slab in part.slabs):
            if numbers.setdefault(id(slab), len(slabs)) == len(slabs):
                slabs.append(slab)
        chunks = np.concatenate([part.chunks for part in parts])
        slot = np.concatenate([part.slot for part in parts])
        slab_of = np.concatenate([np.array([numbers[id(slab)] for slab in part.slabs])[part.slab] for part in parts])
        order = np.argsort(chunks, kind="stable")
        return cls(chunks[order], tuple(slabs), slab_of[order], slot[order])

    @property
    def block_bytes(self) -> int:
        """Bytes per block. There must be at least one slab."""
        return self.slabs[0].shape[1]

    @classmethod
    def none(cls) -> Blocks:
        nothing = np.empty(0, np.int64)
        return cls(nothing, (), nothing, nothing)

    @classmethod
    def alone(cls, chunks: np.ndarray, memory: torch.Tensor) -> Blocks:
        """Create blocks that fill a slab of their own, uint8 `[n, block_bytes]`."""
        return cls(chunks, (memory,), np.zeros(len(chunks), np.int64), np.arange(len(chunks)))


def overlaps(sources: Sequence[BlockRun], targets: Sequence[BlockRun]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of source and target tensors of equal length.

    Both lists of runs cover the same chunks in ascending order.
    """
    at_source = at_target = used_source = used_target = 0
    while at_source < len(sources) and at_target < len(targets):
        source, target = sources[at_source][1], targets[at_target][1]
        count = min(len(source) - used_source, len(target) - used_target)
        yield source[used_source : used_source + count], target[used_target : used_target + count]
        used_source, used_target = used_source + count, used_target + count
        if used_source == len(source):
            at_source, used_source = at_source + 1, 0
        if used_target == len(target):
            at_target, used_target = at_target + 1, 0
