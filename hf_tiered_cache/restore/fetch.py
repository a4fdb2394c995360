"""Fetcher of a pass: fetches blocks in batches, ahead of need or on demand, and accounts for their I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..errors import EvictedError, IntegrityError, RestoreError
from ..store.geometry import BlockGroup, FieldSlot, Part
from ..store.segment import SegmentReader
from ..tiers.collector import StatsCollector
from ..tiers.handles import BlockHandle, BlockRequest, FetchedBlocks
from ..tiers.residency import Residency
from ..tiers.slabs import NO_BLOCKS, Blocks

no_chunks = partial(np.empty, 0, np.int64)


@dataclass(eq=False)
class FetchUnit:
    """Blocks of one KV cache group of a segment, fetched in one or more batches."""

    reader: SegmentReader
    block_group: BlockGroup
    identifies: bool = False
    """True if a selection reads keys from these blocks."""
    held: np.ndarray = field(default_factory=no_chunks)
    """int64, ascending: chunks that have arrived or are being fetched."""
    attended: np.ndarray = field(default_factory=no_chunks)
    """int64, ascending: chunks requested for attention."""
    fetched: list[FetchedBlocks] = field(default_factory=list)
    handles: list[BlockHandle] = field(default_factory=list)
    used: dict[int, list[Sequence[np.ndarray]]] = field(default_factory=dict)
    """For each layer, the sets of segment tokens that attention uses, as passed to `use`."""
    from_disk: bool = False
    """True if any block was read from disk for this unit."""
    blocks: Blocks = NO_BLOCKS
    """Blocks that have arrived, as of the last `Fetcher.wait_for`."""

    def chunk_of_each(self, tokens: np.ndarray) -> np.ndarray:
        """Return the chunk of each of `tokens`, all of which the KV cache group must hold."""
        shape = self.reader.shape
        return shape.slot_of_token(self.block_group, tokens) // shape.geometry.chunk_tokens

    def use(self, layers: Iterable[int], sets: Sequence[np.ndarray]) -> None:
        """Record that `layers` attend to tokens, int64 `[n]` per set: one set for all heads, or one for each."""
        for layer in layers:
            self.used.setdefault(layer, []).append(sets)

    def tokens_used(self) -> np.ndarray:
        """Return the tokens that any head of any layer attends to, int64, ascending."""
        token_sets = [tokens for uses in self.used.values() for sets in uses for tokens in sets]
        return np.unique(np.concatenate(token_sets)) if token_sets else np.empty(0, np.int64)

    def bytes_used(self, chunks: np.ndarray) -> int:
        """Return the bytes in `chunks` of the tokens, heads and layers that attention used."""
        shape, total = self.reader.shape, 0
        sharing: dict[FieldSlot, list[Part]] = {}  # merged layers share a field, which counts once
        for part in self.block_group.parts:
            for slot in part.fields:
                sharing.setdefault(slot, []).append(part)
        for slot, parts in sharing.items():
            part, uses = parts[0], [sets for part in parts for sets in self.used.get(part.layer, [])]
            shared_sets = [sets[0] for sets in uses if len(sets) == 1]
            head_sets = [sets for sets in uses if len(sets) > 1]
            heads = range(part.first_head, part.first_head + part.heads) if head_sets else range(1)
            sets_of = ([*shared_sets, *(sets[head] for sets in head_sets)] for head in heads)
            token_heads = sum(self._count_in(chunks, sets) for sets in sets_of) * (1 if head_sets else part.heads)
            total += token_heads * slot.nbytes // (part.heads * shape.geometry.chunk_tokens)
        return total

    def _count_in(self, chunks: np.ndarray, sets: Sequence[np.ndarray]) -> int:
        """Return the number of distinct tokens of some sets that are in `chunks`."""
        if not sets:
            return 0
        tokens = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        return int(np.isin(self.chunk_of_each(tokens), chunks).sum())


@dataclass(eq=False)
class Fetcher:
    """Block fetcher of one pass.

    Args:
        device_of: Returns the device of a layer.
        ahead_bytes: Maximum number of prefetched bytes not waited for yet.
    """

    residency: Residency
    collector: StatsCollector
    device_of: Callable[[int], torch.device]
    ahead_bytes: int = 0
    _ahead: dict[FetchUnit, int] = field(default_factory=dict)  # bytes fetched ahead, until the unit is waited for
    _users: dict[BlockHandle, int] = field(default_factory=dict)  # number of units that use it
    _unconfirmed: dict[BlockHandle, None] = field(default_factory=dict)  # used before they were verified

    def fetch(
        self,
        requests_by_unit: Sequence[tuple[FetchUnit, np.ndarray]],
        ahead: bool = False,
        attends: bool = True,
        later: Sequence[tuple[FetchUnit, np.ndarray]] = (),
    ) -> None:
        """Start to fetch the chunks that units lack, in one batch per device. Raises RestoreError if that fails.

        Args:
            requests_by_unit: Units with their requested chunks, int64, ascending.
            ahead: Whether this is a prefetch, limited to the memory budgets and `ahead_bytes`.
            attends: Whether attention uses all of these chunks; False for selection inputs.
            later: Units and chunks that this pass requests later. Reads do not evict them.
        """
        chunks_of_unit: dict[FetchUnit, np.ndarray] = {}
        for unit, chunks in requests_by_unit:  # rows may request the same chunks
            chunks_of_unit[unit] = np.union1d(chunks_of_unit[unit], chunks) if unit in chunks_of_unit else chunks
        batches: dict[torch.device, list[tuple[FetchUnit, np.ndarray]]] = {}
        for unit, chunks in chunks_of_unit.items():
            if attends:
                unit.attended = np.union1d(unit.attended, chunks) if len(unit.attended) else chunks
            missing = np.setdiff1d(chunks, unit.held, assume_unique=True) if len(unit.held) else chunks
            if ahead:  # take the leading chunks that there is room for
                size = unit.block_group.block_bytes
                missing = missing[: max(0, self.ahead_bytes - sum(self._ahead.values())) // size]
                self._ahead[unit] = self._ahead.get(unit, 0) + len(missing) * size
            if len(missing):
                batches.setdefault(self.device_of(unit.block_group.layers[0]), []).append((unit, missing))
        for device, batch in batches.items():
            try:
                handle = self.residency.fetch(list(_requests(batch)), device, self.collector, ahead, _requests(later))
            except Exception as error:
                raise self._failure(batch[0][0].reader, error) from error
            self._users[handle] = len(batch)
            for (unit, _), blocks in zip(batch, handle.fetched, strict=True):
                unit.handles.append(handle)
                unit.fetched.append(blocks)
                unit.from_disk |= len(blocks.from_disk) > 0
                unit.held = np.union1d(unit.held, blocks.chunks) if len(unit.held) else blocks.chunks

    def wait_for(self, units: Collection[FetchUnit]) -> None:
        """Wait until the blocks of `units` have arrived. Raises RestoreError if one could not be fetched."""
        handles = dict.fromkeys(handle for unit in units for handle in unit.handles)  # a batch serves several units
        for handle in handles:
            try:
                with nullcontext() if handle.has_arrived else self.collector.timing("stall_seconds"):
                    handle.wait()
            except Exception as error:
                raise self._failure(handle.failed or handle.fetched[0].request.reader, error) from error
            if not handle.is_confirmed:
                self._unconfirmed[handle] = None
        for unit in units:
            self._ahead.pop(unit, None)
            unit.blocks = Blocks.join([part for fetched in unit.fetched for part in fetched.parts])

    def _failure(self, reader: SegmentReader, error: Exception) -> RestoreError:
        """Count a failed fetch and return it as a RestoreError.

        Any cause is recoverable, such as lack of memory, a closed store or a bad disk: the request runs without the
        block.
        """
        if not isinstance(error, EvictedError):
            failure = "verification_failures" if isinstance(error, IntegrityError) else "read_errors"
            self.collector.add(**{failure: 1})
        return RestoreError(reader.id, str(error))

    def confirm(self) -> None:
        """Wait until all blocks waited for so far are verified. Raises RestoreError if one is damaged.

        Call this before any result of these blocks outlives the pass, also after `finish` and `cancel`.
        """
        while self._unconfirmed:
            handle, _ = self._unconfirmed.popitem()
            try:
                self.residency.confirm(handle)
            except Exception as error:
                raise self._failure(handle.failed or handle.fetched[0].request.reader, error) from error

    def finish(self, units: Iterable[FetchUnit]) -> None:
        """Record the I/O of `units` and what it was used for, and release their blocks."""
        bytes_delivered, bytes_identifying = 0, 0
        for unit in units:
            size, num_chunks = unit.block_group.block_bytes, sum(len(blocks.chunks) for blocks in unit.fetched)
            bytes_delivered += num_chunks * size
            if unit.identifies:
                bytes_identifying += max(0, num_chunks - len(unit.attended)) * size
            if unit.from_disk:
                chunks_read = np.concatenate([blocks.from_disk for blocks in unit.fetched])
                chunks_used = unit.reader.shape.chunks_of(unit.block_group, unit.tokens_used())
                unused = int((~np.isin(chunks_read, chunks_used)).sum()) * size
                figure = "bytes_identifying" if unit.identifies else "bytes_superseded"
                self.collector.add(bytes_used=unit.bytes_used(chunks_read), **{figure: unused})
            self._ahead.pop(unit, None)
            for handle in unit.handles:
                self._users[handle] -= 1
                if not self._users[handle]:
                    del self._users[handle]
                    self.residency.release(handle)
            unit.handles.clear()
            unit.fetched.clear()
            unit.from_disk, unit.blocks = False, NO_BLOCKS  # releases the memory
        if bytes_delivered:
            self.collector.add(bytes_delivered=bytes_delivered, bytes_delivered_identifying=bytes_identifying)

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""
        self.collector.forget_reads()
        while self._users:
            handle, _ = self._users.popitem()
            self.residency.release(handle)


def _requests(chunks_by_unit: Iterable[tuple[FetchUnit, np.ndarray]]) -> Iterator[BlockRequest]:
    return (BlockRequest(unit.reader, unit.block_group.index, chunks) for unit, chunks in chunks_by_unit)
