"""Chosen tokens of one lane: the blocks they lie in, and how they come to stand side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ..geometry import Lane, Part, SegmentShape
from ..store.segment import SegmentReader
from ..tiers.residency import Lease
from ..tiers.runs import spans
from .assemble import copy_places, copy_tokens

_FEW = 2
"""Runs of tokens that are copied one by one: more are picked out all at once."""


@dataclass(eq=False)
class LaneFetch:
    """Blocks of one lane of a segment, brought in at one or several times."""

    reader: SegmentReader
    lane: Lane
    leases: list[Lease] = field(default_factory=list)
    held: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Chunks that are there or on their way, ascending."""
    used: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Tokens of the segment that are attended to, ascending."""
    identifies: bool = False
    """Whether a choice was made from it."""

    def chunks_of(self, tokens: np.ndarray) -> np.ndarray:
        return self.reader.shape.chunks_of(self.lane, tokens)

    def release(self) -> None:
        for lease in self.leases:
            lease.release()

    def parts(self, layer: int, name: str) -> Iterator[Part]:
        return (part for part in self.lane.parts if part.layer == layer and part.tensor == name)

    def copy(self, part: Part, heads: slice, tokens: np.ndarray, target: torch.Tensor, column: int) -> None:
        """Copy ascending `tokens` of the segment, of some heads, side by side to `target` from `column` on.

        Args:
            part: a tensor of the lane.
            heads: counted in the layer, within those of `part`.
            tokens: int64.
            target: `[heads, columns, dim]`, of all heads of the layer.
        """
        within = slice(heads.start - part.first_head, heads.stop - part.first_head)
        shape = self.reader.shape
        places = shape.places(self.lane, tokens)
        for lease in self.leases:
            for first, memory in lease.runs:
                blocks = shape.part_view(memory, part)[:, within]
                start = first * blocks.shape[2]
                if shape.ordered(self.lane):
                    copy_places(target[heads, column : column + len(places)], blocks, start, places)
                else:
                    _gather(target[heads], blocks, start, tokens, column)


def key_lanes(shape: SegmentShape, layer: int, heads: int | None) -> list[Lane]:
    """The lanes that hold a layer's keys, of its first `heads` heads or of all, and as little else as can be."""
    kind = shape.layout.layers[layer]
    wanted = kind.key_heads if heads is None else min(heads, kind.key_heads)
    apart, among = [], []
    for lane in shape.lanes:
        mine = [p for p in lane.parts if p.layer == layer and p.tensor == "key" and p.first_head < wanted]
        if mine and lane.identifies:
            apart.append((sum(p.heads for p in mine), lane))
        elif mine:
            among.append(lane)
    whole = [lane for count, lane in apart if count >= wanted]
    return whole[:1] or among


def _gather(target: torch.Tensor, blocks: torch.Tensor, start: int, tokens: np.ndarray, column: int) -> None:
    """Copy tokens of a segment side by side to `target`, as far as `blocks` holds them.

    Args:
        target: `[heads, columns, dim]`.
        blocks: `[n, heads, chunk_tokens, dim]`.
        start: number, in the segment, of the token that stands first in `blocks`.
        tokens: int64, ascending, numbers in the segment.
        column: of the first of `tokens`.
    """
    chunk_tokens = blocks.shape[2]
    low, high = np.searchsorted(tokens, (start, start + blocks.shape[0] * chunk_tokens)).tolist()
    mine = tokens[low:high]
    runs = list(spans(mine))
    if len(runs) <= _FEW:
        for first, stop in runs:
            token = int(mine[first])
            copy_tokens(target, blocks, start, token, token + stop - first, column + low + first - token)
        return
    chunk, inside = (torch.from_numpy(index).to(blocks.device) for index in divmod(mine - start, chunk_tokens))
    target[:, column + low : column + high] = blocks.transpose(1, 2)[chunk, inside].transpose(0, 1)
