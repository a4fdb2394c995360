"""Where blocks lie in memory: for each the slab and the slot, so that any number of them is picked by index at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

BlockRun = tuple[int, torch.Tensor]
"""A run of neighbouring chunks: the first one's number, and the blocks, uint8 `[n, block_bytes]`."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one block group of a segment.

    Args:
        chunks: int64 `[n]`, ascending: which they are.
        slabs: the memory they lie in, uint8 `[slots, block_bytes]` each.
        slab: int64 `[n]`, the number of each one's slab.
        slot: int64 `[n]`, its row there.
    """

    chunks: np.ndarray
    slabs: tuple[torch.Tensor, ...]
    slab: np.ndarray
    slot: np.ndarray

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, some: np.ndarray | slice) -> Blocks:
        """Some of them: a mask, ascending numbers, or a slice."""
        return Blocks(self.chunks[some], self.slabs, self.slab[some], self.slot[some])

    def runs(self) -> list[BlockRun]:
        """Neighbours in the segment that lie side by side in memory, in as few tensors as can be."""
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
        """Blocks of the same block group, each in one of `parts`."""
        parts = [part for part in parts if len(part)] or [cls.none()]
        if len(parts) == 1:
            return parts[0]
        numbers: dict[int, int] = {}  # a slab that several parts lie in is one
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
        """Of one; there must be one."""
        return self.slabs[0].shape[1]

    @classmethod
    def none(cls) -> Blocks:
        nothing = np.empty(0, np.int64)
        return cls(nothing, (), nothing, nothing)

    @classmethod
    def alone(cls, chunks: np.ndarray, memory: torch.Tensor) -> Blocks:
        """Blocks that fill a slab of their own, uint8 `[n, block_bytes]`."""
        return cls(chunks, (memory,), np.zeros(len(chunks), np.int64), np.arange(len(chunks)))


def overlaps(sources: Sequence[BlockRun], targets: Sequence[BlockRun]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equally long pieces of two coverings of the same ascending chunks."""
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
