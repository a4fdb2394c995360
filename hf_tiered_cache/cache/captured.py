"""Captured KV of forward passes, as lists of tensors per layer, and packing it into the blocks of a segment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..store.container import Group
from ..store.geometry import BlockGroup, LayerKV, Part
from ..store.shape import SegmentShape
from ..tiers.device import CopyStream, Event, Staging

Sources = dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Keys and values by layer: two lists of `[batch, heads, tokens, dim]` tensors, consecutive in tokens."""


@dataclass
class LayerBuffer:
    """Pre-RoPE KV of one layer, as lists of consecutive `[batch, heads, tokens, dim]` tensors."""

    kind: LayerKV
    device: torch.device
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append KV. A slice that keeps a larger storage alive (as of fused projections) is copied."""
        for tensors, tensor in ((self.keys, keys), (self.values, values)):
            is_slice = tensor.untyped_storage().nbytes() > 2 * tensor.nbytes
            tensors.append(tensor.clone() if is_slice else tensor)


class SegmentTable:
    """Segments by the prefix hashes that they store, for sequences that are recorded at the same time.

    Without it, a prefix of several sequences would be stored once for each. Thread-safe.
    """

    _MOST_HASHES = 1 << 16

    def __init__(self) -> None:
        self._segments: dict[bytes, str] = {}

    def get(self, prefix_hash: bytes) -> str | None:
        """Return the id of the segment that stores a prefix hash, or None."""
        return self._segments.get(prefix_hash)

    def add(self, prefix_hashes: Iterable[bytes], segment: str) -> None:
        """Note that a segment stores these prefix hashes."""
        if len(self._segments) > self._MOST_HASHES:
            self._segments.clear()
        self._segments.update(dict.fromkeys(prefix_hashes, segment))

    def forget(self, segments: Collection[str]) -> None:
        """Forget segments that are not stored, or no longer."""
        for prefix_hash in [key for key, segment in list(self._segments.items()) if segment in segments]:
            self._segments.pop(prefix_hash, None)


def packer(
    shape: SegmentShape,
    sources: Sources,
    row: int,
    start: int,
    streams: dict[torch.device, CopyStream],
    computed: list[Event],
    groups: Sequence[BlockGroup] | None = None,
) -> Callable[[], Iterator[Group]]:
    """Return a function that packs a segment's KV cache groups one by one from the sources.

    Each group is packed on its first layer's device, on the side stream, and copied to the host at once. A yielded
    group is valid until the next one is requested.

    Args:
        shape: shape of the segment.
        sources: captured keys and values.
        row: row of the batch.
        start: first position of the segment in the sources.
        streams: side stream of each device.
        computed: events after which the sources are computed.
        groups: KV cache groups to pack; None for all groups of the segment.
    """

    def block_groups() -> Iterator[Group]:
        for event in computed:
            event.synchronize()  # wait in the writer's thread, not on the side stream, which also uploads blocks
        staging: Staging | None = None
        for block_group in shape.block_groups if groups is None else groups:
            device = _tensors_of(sources, block_group.parts[0])[0].device
            stream = streams[device]
            device = torch.device("cpu") if stream.on_host else device
            with stream.copying():
                size = shape.chunks_in(block_group), block_group.block_bytes
                blocks = torch.zeros(size, dtype=torch.uint8, device=device)
                for part in block_group.parts:
                    heads = slice(part.first_head, part.first_head + part.heads)
                    tokens = tokens_from(_tensors_of(sources, part), row, heads, start, shape.tokens)
                    shape.pack(blocks, block_group, part, tokens.to(device))
            if stream.on_host:
                yield blocks
                continue
            staging = staging or Staging(int(np.diff(shape.group_offsets).max()))
            packed = staging.bring_down(stream, blocks)
            del blocks
            yield packed

    return block_groups


def _tensors_of(sources: Sources, part: Part) -> list[torch.Tensor]:
    """Return the tensors that a part is packed from."""
    return sources[part.layer][0 if part.tensor == "key" else 1]


def tokens_from(tensors: list[torch.Tensor], row: int, heads: slice, start: int, count: int) -> torch.Tensor:
    """Return `count` tokens, `[heads, count, dim]`, from position `start` of the concatenated tensors."""
    pieces = [t[row, heads] for t in tensors]
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return joined[:, start : start + count]


def last_positions(tensors: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return a copy of the last `count` positions of the concatenated tensors."""
    pieces: list[torch.Tensor] = []
    for tensor in reversed(tensors):
        pieces.insert(0, tensor[:, :, -count:])
        count -= pieces[0].shape[2]
        if not count:
            break
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0].clone()


def cut_end(tensors: list[torch.Tensor], count: int) -> None:
    """Remove the last `count` positions from the list of tensors, in place."""
    while count > 0 and tensors:
        last = tensors[-1]
        if last.shape[2] <= count:
            tensors.pop()
            count -= last.shape[2]
        else:
            tensors[-1] = last[:, :, :-count]
            count = 0
