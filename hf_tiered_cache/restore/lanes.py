"""Chosen tokens of one lane: the blocks they lie in, and how they come to stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..geometry import Lane, Part, SegmentShape
from ..select.chunks import ChunkMap
from ..stats import Account
from ..store.segment import SegmentReader
from ..tiers.residency import Lease, Residency
from ..tiers.runs import spans
from .assemble import copy_places, copy_tokens
from .plan import Piece, RowGroup
from .prefetch import restore_error

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
                blocks = shape.decoded(memory, part)[:, within]
                start = first * blocks.shape[2]
                if shape.ordered(self.lane):
                    copy_places(target[heads, column : column + len(places)], blocks, start, places)
                else:
                    _gather(target[heads], blocks, start, tokens, column)


@dataclass(frozen=True)
class RowPrefix:
    """The restored tokens of one group of rows, of the positions `[0, tokens)`, and the chunks they lie in."""

    group: RowGroup
    tokens: int

    def pieces(self) -> Iterator[Piece]:
        """The pieces that hold them."""
        return (piece for piece in self.group.pieces if piece.at < self.tokens)

    @cached_property
    def chunks(self) -> ChunkMap:
        starts = []
        for piece in self.pieces():
            step = piece.reader.shape.geometry.chunk_tokens
            stop = piece.first + min(piece.count, self.tokens - piece.at)
            firsts = np.arange(piece.first - piece.first % step, stop, step)
            starts.append(np.maximum(firsts, piece.first) - piece.first + piece.at)
        return ChunkMap(np.concatenate(starts), self.tokens)

    def inside(self, piece: Piece, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """Which of ascending `tokens` of the row `piece` holds: the first one's index, and their numbers in it."""
        low, high = np.searchsorted(tokens, (piece.at, piece.at + piece.count))
        return int(low), tokens[low:high] - piece.at + piece.first


class LaneFetches:
    """Brings blocks of lanes for one pass, and counts what they were read for.

    Args:
        residency: the tiers.
        account: counts what happens.
        device_of: the device of each layer.
    """

    def __init__(self, residency: Residency, account: Account, device_of: Callable[[int], torch.device]) -> None:
        self._residency, self._account, self._device_of = residency, account, device_of

    def bring(self, fetch: LaneFetch, tokens: np.ndarray, ahead: bool = False) -> None:
        """Start to fetch the blocks of `tokens` that are not held: those ahead of their need within the budgets.

        Raises:
            RestoreError: a fetch could not begin.
        """
        missing = np.setdiff1d(fetch.chunks_of(tokens), fetch.held, assume_unique=True)
        if not len(missing):
            return
        device = self._device_of(fetch.lane.layers[0])
        try:
            lease = self._residency.fetch(fetch.reader, fetch.lane.index, missing, device, self._account, ahead)
        except Exception as error:
            raise restore_error(self._account, fetch.reader, error) from error
        fetch.leases.append(lease)
        fetch.held = np.union1d(fetch.held, lease.chunks)

    def wait_for(self, fetches: Iterable[LaneFetch]) -> None:
        """Wait until their blocks have arrived.

        Raises:
            RestoreError: a block did not.
        """
        for fetch in fetches:
            for lease in fetch.leases:
                try:
                    with self._account.timing("stall_seconds"):
                        lease.wait()
                except Exception as error:
                    raise restore_error(self._account, fetch.reader, error) from error

    def finish(self, fetch: LaneFetch) -> None:
        """Nobody needs it any more: count what came from disk and what for, and let it go."""
        read = np.concatenate([lease.from_disk for lease in fetch.leases]) if fetch.leases else np.empty(0, np.int64)
        used = fetch.reader.shape.bytes_of(fetch.lane, fetch.used, read)
        rest = int((~np.isin(read, fetch.chunks_of(fetch.used))).sum()) * fetch.lane.block_bytes
        self._account.add(bytes_used=used, **{"bytes_identifying" if fetch.identifies else "bytes_guessed": rest})
        fetch.release()


def copy_chosen(
    fetches: Iterable[LaneFetch], row: RowPrefix, chosen: np.ndarray, layer: int, name: str, target: torch.Tensor
) -> None:
    """Copy chosen tokens of a row, int64 `[sets, tokens]`, each ascending, side by side to `[heads, tokens, dim]`.

    Args:
        name: "key" or "value".
    """
    for piece in row.pieces():
        for fetch in fetches:
            if fetch.reader is not piece.reader:
                continue
            for part in fetch.parts(layer, name):
                for heads, tokens in sets_of(chosen, target.shape[0], part.first_head, part.heads):
                    first, inside = row.inside(piece, tokens)
                    fetch.copy(part, heads, inside, target, first)


def sets_of(
    chosen: np.ndarray, heads: int, first: int = 0, count: int | None = None
) -> Iterator[tuple[slice, np.ndarray]]:
    """Heads that share a set of tokens, among the `count` heads from `first` on, and the set."""
    stop = min(heads, first + (heads if count is None else count))
    if len(chosen) == 1:
        if first < stop:
            yield slice(first, stop), chosen[0]
        return
    for head in range(first, stop):
        yield slice(head, head + 1), chosen[head]


def restoring_lanes(shape: SegmentShape, layers: Collection[int]) -> list[Lane]:
    """The lanes of a segment that these layers restore from."""
    return [lane for lane in shape.lanes if not lane.identifies and not set(lane.layers).isdisjoint(layers)]


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
