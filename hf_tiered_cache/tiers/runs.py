"""Runs of blocks: neighbours in a segment that lie side by side in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

BlockRun = tuple[int, torch.Tensor]
"""A run of neighbouring chunks: the first one's number, and the blocks, uint8 `[n, block_bytes]`."""


def spans(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Half-open ranges of indices in which ascending `numbers` follow one another without a gap."""
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()]
    return ((start, stop) for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True) if stop > start)


def some_of(runs: list[BlockRun], chunks: np.ndarray) -> Iterator[BlockRun]:
    """The parts of runs that hold ascending `chunks`."""
    for first, blocks in runs:
        mine = chunks[np.searchsorted(chunks, first) : np.searchsorted(chunks, first + len(blocks))]
        for start, stop in spans(mine):
            yield int(mine[start]), blocks[mine[start] - first : mine[stop - 1] - first + 1]


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
