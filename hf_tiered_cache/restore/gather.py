"""Copy from blocks to positions: tokens are indexed by slab, buffer slot and block offset, in one step per slab."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ..store.geometry import BlockGroup, JoinedParts, Part
from ..store.memory import to_device
from ..store.shape import SegmentShape
from ..tiers.slabs import Blocks

_NOT_FETCHED = "cannot gather tokens from blocks that were not fetched"
_FEW_RUNS = 4
"""Maximum number of block runs that are copied one by one, which is faster for few runs; else tokens are indexed."""

_ViewsOf = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Function that returns views of the fields in memory: `[slots, ..., chunk_tokens, field's dim]` each."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Run of tokens that are consecutive in memory and in their positions."""

    memory: torch.Tensor  # uint8 [n, block_bytes]
    inside: int  # block offset of the first token
    count: int
    position: int


@dataclass(frozen=True, eq=False)
class _Picked:
    """Scattered tokens of one slab: buffer slot, block offset and position of each, and its head where heads differ."""

    slab: torch.Tensor  # uint8 [slots, block_bytes]
    slot: torch.Tensor  # int64 [n] on the slab's device, like the next fields
    inside: torch.Tensor
    position: torch.Tensor | slice
    head: torch.Tensor | None


class _Copy(NamedTuple):
    """Copy of one part, or of joined parts, to `[..., heads, positions, dim]`, and to all heads of the layer."""

    part: Part
    views_of: _ViewsOf
    target: torch.Tensor
    all_heads: torch.Tensor


class Gather:
    """Copy plan from segment tokens to positions. Its indexes are computed once for all tensors and layers.

    Args:
        shape: Shape of the segments, which share layout and geometry.
        block_group: KV cache group of the blocks. Tokens of single heads may be in other groups with like parts.
    """

    def __init__(self, shape: SegmentShape, block_group: BlockGroup) -> None:
        self._shape, self._block_group = shape, block_group
        self._runs: list[_Run] = []
        self._added: list[tuple[Blocks, np.ndarray, np.ndarray, int]] = []
        self._picked: list[_Picked] | None = None

    def add(
        self,
        shape: SegmentShape,
        blocks: Blocks,
        tokens: np.ndarray,
        positions: np.ndarray,
        head: int = -1,
        block_group: BlockGroup | None = None,
    ) -> None:
        """Add tokens of a segment, int64 `[n]`, ascending, to copy to positions, int64 `[n]`, ascending.

        They are for one head of the layer, or for all heads (-1). The `block_group` of the blocks may be another one,
        for a single head. Raises LookupError if `blocks` lacks a token.
        """
        if not len(tokens):
            return
        chunk_tokens = shape.geometry.chunk_tokens
        slots = tokens if shape.tables is None else shape.slot_of_token(block_group or self._block_group, tokens)
        is_run = _spans(slots) and (shape.tables is None or bool((np.diff(slots) == 1).all()))
        if head < 0 and is_run and _spans(positions):
            low, high = int(slots[0]), int(slots[-1]) + 1
            ends = low // chunk_tokens, (high - 1) // chunk_tokens + 1
            first, last = np.searchsorted(blocks.chunks, ends)
            if last - first != ends[1] - ends[0]:
                raise LookupError(_NOT_FETCHED)
            runs = blocks[slice(first, last)].runs()
            if len(runs) <= _FEW_RUNS:
                for chunk, memory in runs:
                    start = max(low, chunk * chunk_tokens)
                    count = min(high, (chunk + len(memory)) * chunk_tokens) - start
                    self._runs.append(
                        _Run(memory, start - chunk * chunk_tokens, count, int(positions[0]) + start - low)
                    )
                return
        self._added.append((blocks, slots, positions, head))

    def copy(self, targets: Iterable[tuple[Part, torch.Tensor]]) -> None:
        """Copy parts (each one tensor of one layer, or some of its heads) to their positions.

        The target of a part, `[heads, positions, dim]`, has all heads of the layer or its first ones, and is filled in
        place. Raises LookupError if the added blocks lack a token.
        """
        copies: list[_Copy] = []
        for part, target in targets:
            heads = target[part.first_head : part.first_head + part.heads]
            views_of = partial(self._shape.field_views, part=part, heads=len(heads))
            copies.append(_Copy(part, views_of, heads, target))
        self._copy(copies)

    def copy_joined(self, joined: JoinedParts, target: torch.Tensor) -> None:
        """Copy several parts to their positions, `[parts, heads, positions, dim]`. See `copy`."""
        self._copy([_Copy(joined.first, partial(self._shape.joined_views, joined=joined), target, target)])

    def _copy(self, copies: Sequence[_Copy]) -> None:
        """Copy all runs, and the scattered tokens."""
        self._copy_runs(copies)
        if self._picked is None:
            self._picked = list(self._pick())
        for picked, (part, views_of, target, all_heads) in itertools.product(self._picked, copies):
            views = views_of(picked.slab)  # [slots, ..., heads, chunk_tokens, field's dim] each
            if picked.head is not None:
                head = picked.head - part.first_head if part.heads > 1 else 0  # in the block
                fields = tuple(view[picked.slot, head, picked.inside] for view in views)
                values = self._shape.decode(self._block_group, part, fields)  # [n, dim]
                all_heads[picked.head, picked.position] = values
                continue
            fields = tuple(view.movedim(0, -3)[..., picked.slot, picked.inside, :] for view in views)
            values = self._shape.decode(self._block_group, part, fields)  # [..., n, dim]
            if isinstance(picked.position, slice):
                target[..., picked.position, :] = values
            else:
                target.index_copy_(target.ndim - 2, picked.position, values)

    def _copy_runs(self, copies: Sequence[_Copy]) -> None:
        """Copy all runs: the whole blocks of each in one strided copy, and partial blocks at its ends separately."""
        chunk = self._shape.geometry.chunk_tokens
        for run, (part, views_of, target, _) in itertools.product(self._runs, copies):
            at, stop, position, views = run.inside, run.inside + run.count, run.position, views_of(run.memory)
            while at < stop:
                index, inside = divmod(at, chunk)
                num_blocks = (stop - at) // chunk if inside == 0 else 0
                if num_blocks:
                    count = num_blocks * chunk
                    view = target.narrow(-2, position, count).unflatten(-2, (num_blocks, chunk))
                    fields = tuple(view[index : index + num_blocks].movedim(0, -3) for view in views)
                else:
                    count = min(chunk - inside, stop - at)
                    view = target.narrow(-2, position, count)
                    fields = tuple(view[index].narrow(-2, inside, count) for view in views)
                view.copy_(self._shape.decode(self._block_group, part, fields))
                at, position = at + count, position + count

    def _pick(self) -> Iterator[_Picked]:
        """Yield the scattered tokens that were added, grouped by slab."""
        chunk_tokens = self._shape.geometry.chunk_tokens
        slabs: dict[int, tuple[int, torch.Tensor]] = {}
        rows: list[np.ndarray] = []  # int64 [5, n]: slab, slot, inside, position, head
        for blocks, token_slots, positions, head in self._added:
            chunk, inside = np.divmod(token_slots, chunk_tokens)
            at = np.searchsorted(blocks.chunks, chunk)
            if (blocks.chunks.take(at, mode="clip") != chunk).any():  # otherwise wrong blocks would be read
                raise LookupError(_NOT_FETCHED)
            numbers = np.array([slabs.setdefault(id(slab), (len(slabs), slab))[0] for slab in blocks.slabs], np.int64)
            row = numbers[blocks.slab[at]], blocks.slot[at], inside, positions, np.full(len(positions), head)
            rows.append(np.stack(row))
        if not rows:
            return
        table, per_head = np.concatenate(rows, axis=1), self._added[0][3] >= 0
        for number, slab in slabs.values():
            entries = table[1:, table[0] == number] if len(slabs) > 1 else table[1:]
            if not entries.shape[1]:
                continue
            slot, inside, position, head = to_device(np.ascontiguousarray(entries), slab.device)
            positions = entries[2]
            side_by_side = not per_head and bool((np.diff(positions) == 1).all())
            target_positions = slice(int(positions[0]), int(positions[-1]) + 1) if side_by_side else position
            yield _Picked(slab, slot, inside, target_positions, head if per_head else None)


def _spans(ascending: np.ndarray) -> bool:
    """Return whether distinct integers, ascending, are consecutive."""
    return int(ascending[-1]) - int(ascending[0]) + 1 == len(ascending)
