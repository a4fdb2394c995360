"""First tokens of a segment that are not stored, but still in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import EvictedError
from .engines import ReadOp
from .segment import BlockRun, SegmentReader
from .shape import SegmentShape


class FrontReader(SegmentReader):
    """Reader of the tokens that a segment lacks, as far as memory holds them. No file contains them.

    Args:
        segment: the segment.
        shape: shape of the tokens that it lacks, counted as in the segment.
        held: tokens of each layer that are in memory, bool `[layers, tokens]`.
    """

    def __init__(self, segment: SegmentReader, shape: SegmentShape, held: np.ndarray) -> None:
        self.id, self.shape, self.chain, self.backend = segment.id, shape, segment.chain, segment.backend
        self.header = replace(segment.header, shape=shape)
        self.owners = owners_of_front(segment, shape)
        self.gone, self._guard, self._held = False, None, held

    @property
    def held(self) -> np.ndarray:
        """See `SegmentReader`."""
        return self._held

    def caused(self, error: BaseException) -> bool:
        """See `SegmentReader`."""
        return isinstance(error, EvictedError) and error.segment == self.id

    def ops(self, block_group: int, runs: Sequence[BlockRun]) -> list[ReadOp]:
        """Raise EvictedError: what is no longer in memory cannot be read."""
        raise EvictedError(self.id)


def owners_of_front(segment: SegmentReader, shape: SegmentShape) -> tuple[tuple[str, int, int], ...]:
    """Return the keys in memory of the blocks that a segment lacks. They are forgotten with the segment."""
    first = len(segment.owners)
    return tuple((segment.id, first + group.index, segment.header.digests.digest) for group in shape.block_groups)
