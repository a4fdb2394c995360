"""Migration of cached blocks, indexes and scores from a segment to the one that replaces it with reordered tokens."""

from __future__ import annotations

import logging

import numpy as np
import torch

from ..stats import StatsCollector
from ..store.segment import SegmentReader
from .lease import BlockRequest
from .residency import Residency

logger = logging.getLogger("hf_tiered_cache")


class Handover:
    """Migration from a segment to its replacement: indexes, number of cached chunks, and scores of all chunks.

    Create it before the old segment is deleted.

    Args:
        residency: the tiers.
        old: the segment that is replaced.
    """

    def __init__(self, residency: Residency, old: SegmentReader) -> None:
        self._residency, self._old = residency, old
        self._held: dict[int, int] = {}
        self._known: dict[int, np.ndarray] = {}  # float64 [2, chunks]
        devices = list(residency.devices) or [torch.device("cpu")]
        for group in old.shape.block_groups:
            owner, every = old.owner(group.index), np.arange(old.shape.chunks_in(group))
            on_devices = sum(residency.where(owner, every, device).get("device", 0) for device in devices)
            self._held[group.index] = on_devices + residency.where(owner, every, devices[0])["host"]
            self._known[group.index] = residency.scores.of(owner, every)

    def give_indexes_to(self, new: SegmentReader) -> None:
        """Assign the cached indexes to `new`, which has the same keys.

        Call this as soon as look-ups can find `new`.
        """
        self._residency.resident.rename(self._old.id, lambda owner: new.key_owner(owner[1], owner[3]))

    def give_to(self, new: SegmentReader) -> None:
        """Fetch as many chunks of `new` to the host as were cached of the old segment, within the host budget.

        The first chunks of each KV cache group are fetched, since they hold the most important tokens. The scores of a
        chunk are the mean of its tokens' old scores. Read errors are logged and otherwise ignored.

        Args:
            new: the replacement, with the same tokens in the same geometry. The old segment is already deleted.
        """
        shape, wanted = new.shape, list[BlockRequest]()
        for group in shape.block_groups:
            step, tokens = shape.geometry.chunk_tokens, np.arange(shape.tokens)
            was, now = (one.shape.slot_of_token(group, tokens) // step for one in (self._old, new))
            count, known = shape.chunks_in(group), self._known[group.index]
            if known.any():
                sums = np.stack([np.bincount(now, row[was], count) for row in known])
                self._residency.scores.put(new.owner(group.index), sums / np.bincount(now, minlength=count))
            if held := min(self._held[group.index], count):
                wanted.append(BlockRequest(new, group.index, np.arange(held)))
        for request in wanted:
            lease = self._residency.fetch([request], torch.device("cpu"), StatsCollector(), ahead=True)
            try:
                lease.wait()
            except Exception as error:
                logger.debug("blocks of %s do not come to memory: %r", new.id, error)
            finally:
                lease.release()
