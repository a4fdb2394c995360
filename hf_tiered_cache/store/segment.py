"""An open segment: its header, tables and file, and checked reads of its blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..errors import FormatError, IntegrityError
from ..geometry import LINK_TOKENS
from .digest import lin64, rows, xxh3
from .engines import Engine, EngineFile, ReadOp, ReadReport
from .format import HEADER_BYTES, SegmentHeader, decode_header, decode_tables

BlockRun = tuple[int, torch.Tensor]
"""First chunk of a run, and where its blocks go: uint8 `[n, block_bytes]`, contiguous."""


def read_head(path: Path) -> tuple[SegmentHeader, bytes, np.ndarray, int]:
    """Read and check everything before the blocks.

    Returns:
        Header, chain (its links side by side), digests `[lanes, chunks]`, and the bytes the file takes on disk.

    Raises:
        FormatError: the file is damaged or cut short. OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        header, links = decode_header(os.pread(fd, HEADER_BYTES, 0))
        if stat.st_size < header.file_bytes:
            raise FormatError(f"{path.name} is cut short: {stat.st_size} of {header.file_bytes} bytes")
        tables = os.pread(fd, header.blocks.offset - HEADER_BYTES, HEADER_BYTES)
    finally:
        os.close(fd)
    chain, digests, order = decode_tables(header, links, tables)
    header = replace(header, shape=replace(header.shape, order=order))
    return header, chain, digests, stat.st_blocks * 512


class SegmentReader:
    """A segment opened for reading. The open file stays whole even when another process unlinks it."""

    def __init__(self, path: Path, engine: Engine, verify: bool) -> None:
        self.header, self.chain, self.digests, _ = read_head(path)
        self.id = self.header.id
        self.shape = self.header.shape
        self._engine = engine
        self._file: EngineFile = engine.open(str(path))
        self._verify = verify

    def read(self, lane: int, runs: Sequence[BlockRun]) -> Future[ReadReport]:
        """Read runs of blocks of one lane, and check every block.

        The future fails with IntegrityError or OSError, and not before nothing writes to the destinations any more.
        """
        block_bytes = self.shape.lanes[lane].block_bytes
        start = self.header.blocks.offset + self.shape.lane_offsets[lane]
        ops = [ReadOp(self._file, start + first * block_bytes, blocks.view(-1)) for first, blocks in runs]
        checked: Future[ReadReport] = Future()
        checked.set_running_or_notify_cancel()

        def check(done: Future[ReadReport]) -> None:
            try:
                report = done.result()
                if self._verify:
                    for first, blocks in runs:
                        self.check(lane, first, blocks)
            except BaseException as error:
                checked.set_exception(error)
            else:
                checked.set_result(report)

        self._engine.submit(ops).add_done_callback(check)
        return checked

    def check(self, lane: int, first: int, blocks: torch.Tensor) -> None:
        """Compare blocks with their digests. Raises IntegrityError naming the first bad chunk."""
        expected = self.digests[lane, first : first + blocks.shape[0]]
        if blocks.device.type == "cpu":
            found = np.fromiter((xxh3(row) for row in rows(blocks)), np.uint64, blocks.shape[0])
            bad = np.flatnonzero(found != expected["xxh3"])
        else:
            bad = np.flatnonzero(lin64(blocks).cpu().numpy().view(np.uint64) != expected["lin64"])
        if len(bad):
            chunk = first + int(bad[0])
            raise IntegrityError(
                f"segment {self.id}, lane {lane}, chunk {chunk}: the block fails its checksum",
                whole_links=self.shape.first_token(self.shape.lanes[lane], chunk) // LINK_TOKENS,
            )
