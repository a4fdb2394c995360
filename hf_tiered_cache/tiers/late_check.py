"""Checks blocks that only the device has seen: there, beside the computation, with an answer that comes by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..store.digest import lin64
from ..store.segment import Asked
from ..transfers import to_device
from .streams import CopyStream


class LateCheck:
    """Compares blocks with their digests on the side stream, all of a batch at once.

    No thread waits for it before `confirm`: a pass may use the blocks meanwhile, and nothing that it makes of them may
    outlive the pass before that.

    Args:
        stream: the side stream of the device.
        asked: segments whose blocks are verified, and runs of blocks that have been read into the device's memory.
    """

    def __init__(self, stream: CopyStream, asked: Sequence[Asked]) -> None:
        runs = [(reader, number, first, blocks) for reader, number, some in asked for first, blocks in some]
        self._runs = [(reader, number, first, len(blocks)) for reader, number, first, blocks in runs]
        expected = np.concatenate(
            [reader.digests[number]["lin64"][first : first + count] for reader, number, first, count in self._runs]
        ).view(np.int64)
        with stream.copying():
            found = torch.cat([lin64(blocks) for *_, blocks in runs])  # int64 [blocks]
            # to pinned memory, without a wait
            self._bad = (found != to_device(expected, found.device)).to("cpu", non_blocking=True)  # bool [blocks]
            self._done = stream.copied()
        self._whole: bool | None = None

    def is_done(self) -> bool:
        """Whether nobody need wait for the answer."""
        return self._whole is not None or self._done.query()

    def found_whole(self) -> bool:
        """Whether every block is what was written. This thread waits for the answer."""
        if self._whole is None:
            if not self._done.query():
                self._done.synchronize()
            self._whole = not bool(self._bad.numpy().any())
        return self._whole

    @property
    def is_confirmed(self) -> bool:
        """Whether it is known already that every block is what was written."""
        return self._whole is True

    def confirm(self) -> None:
        """Wait in this thread for the answer. Raises IntegrityError, which names the first bad block."""
        if not self.found_whole():
            at = int(np.flatnonzero(self._bad.numpy())[0])
            for reader, block_group, first, count in self._runs:
                if at < count:
                    raise reader.damaged(block_group, first + at)
                at -= count
