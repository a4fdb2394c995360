"""What memory has of a segment whose tokens are laid out in another order passes on to the one that replaces it."""

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
    """Of a segment that goes: its indexes, how many chunks of each block group memory has, and what is known of all.

    To be made before the segment goes.

    Args:
        residency: the tiers.
        old: the segment.
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
        """Let `new` have the indexes: they are of the same keys. To be done as soon as it can be found."""
        self._residency.resident.rename(self._old.id, lambda owner: new.key_owner(owner[1], owner[3]))

    def give_to(self, new: SegmentReader) -> None:
        """Bring as many chunks of `new` to the host, the first ones of each block group, as far as it has room.

        Each chunk is as important as its tokens were, in the mean. Tokens that matter most lie in front. A chunk that
        cannot be read is left for who asks for it.

        Args:
            new: the same tokens in the same geometry. The old segment has gone.
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
