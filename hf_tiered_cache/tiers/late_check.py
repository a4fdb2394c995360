"""Asynchronous verification on the device of blocks that were read there without passing through the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..store.digest import lin64
from ..store.segment import Asked
from ..transfers import to_device
from .streams import CopyStream


class LateCheck:
    """Comparison of a batch of blocks with their digests on the side stream.

    No thread waits for the result before `confirm`. A pass may use the blocks before that, but its results may not
    outlive the pass until `confirm` succeeds.

    Args:
        stream: the side stream of the device.
        asked: segments that verify their blocks, with runs of blocks that were read into device memory.
    """

    def __init__(self, stream: CopyStream, asked: Sequence[Asked]) -> None:
        runs = [(reader, number, first, blocks) for reader, number, some in asked for first, blocks in some]
        self._runs = [(reader, number, first, len(blocks)) for reader, number, first, blocks in runs]
        expected = np.concatenate(
            [reader.digests[number]["lin64"][first : first + count] for reader, number, first, count in self._runs]
        ).view(np.int64)
        with stream.copying():
            found = torch.cat([lin64(blocks) for *_, blocks in runs])  # int64 [blocks]
            # copy to pinned memory without waiting
            self._bad = (found != to_device(expected, found.device)).to("cpu", non_blocking=True)  # bool [blocks]
            self._done = stream.copied()
        self._whole: bool | None = None

    def is_done(self) -> bool:
        """Return whether the result is available without waiting."""
        return self._whole is not None or self._done.query()

    def found_whole(self) -> bool:
        """Wait for the result, and return whether every block matches its digest."""
        if self._whole is None:
            if not self._done.query():
                self._done.synchronize()
            self._whole = not bool(self._bad.numpy().any())
        return self._whole

    @property
    def is_confirmed(self) -> bool:
        """True if it is already known that every block matches its digest."""
        return self._whole is True

    def confirm(self) -> None:
        """Wait in this thread for the result.

        Raises:
            IntegrityError: a block does not match its digest; the error names the first such block.
        """
        if not self.found_whole():
            at = int(np.flatnonzero(self._bad.numpy())[0])
            for reader, block_group, first, count in self._runs:
                if at < count:
                    raise reader.damaged(block_group, first + at)
                at -= count
