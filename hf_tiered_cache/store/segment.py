"""An open segment: its header, tables and file, and checked reads of its blocks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..errors import FormatError, IntegrityError
from ..geometry import LINK_TOKENS
from .cipher import Plain
from .digest import Guard, content_of, is_tagged
from .engines import Engine, EngineFile, ReadOp, ReadReport
from .files import open_regular, read_all
from .format import HEADER_BYTES, SegmentHeader, decode_header, decode_tables, tagged

_LARGE_TABLES, _MOST_HOLES = 16 << 20, 16
"""Of tables above this size a sixteenth must lie on disk: a sparse file of a few KiB could take all memory."""
_OPENINGS = 3
_NO_KEY = Plain()
BlockRun = tuple[int, torch.Tensor]
"""First chunk of a run, and where its blocks go: uint8 `[n, block_bytes]`, contiguous."""


class Head(NamedTuple):
    """What stands before a segment's blocks."""

    header: SegmentHeader
    chain: bytes
    """Its links side by side."""
    digests: np.ndarray
    """`DIGEST_DTYPE` `[lanes, chunks]`."""
    nbytes: int
    """What the file takes on disk."""
    file: tuple[int, int]
    """Device and inode: which file it was that has been read."""
    guard: Guard | None
    """Of the blocks, if these are to be read."""


def read_head(path: Path, cipher: Plain | None = None) -> Head:
    """Read and check everything before the blocks.

    Args:
        cipher: the store's, if the blocks are to be read, too. Without it the head is believed to whoever wrote it.

    Raises:
        OtherKeyError: it is another key's. FormatError: the file is damaged or cut short. OSError: it cannot be read.
    """
    with open_regular(path) as (fd, stat):
        page = read_all(fd, HEADER_BYTES, 0)
        header, links = decode_header(page)
        guard = None if cipher is None else cipher.guard(header.seal)
        if stat.st_size < header.file_bytes:
            raise FormatError(f"{path.name} is cut short: {stat.st_size} of {header.file_bytes} bytes")
        wanted, on_disk = header.blocks.offset - HEADER_BYTES, stat.st_blocks * 512
        if wanted > _LARGE_TABLES and wanted > _MOST_HOLES * on_disk:  # some file systems reckon late: no proof
            raise OSError(errno.EFBIG, f"tables of {wanted} bytes in a file that takes {on_disk}", str(path))
        tables = read_all(fd, wanted, HEADER_BYTES)
    if guard is not None and header.seal is not None and not is_tagged(guard, *tagged(header, page, tables)):
        raise FormatError("what stands before the blocks was not written with the store's key")
    chain, digests, order = decode_tables(header, links, tables)
    header = replace(header, shape=replace(header.shape, order=order))
    return Head(header, chain, digests, on_disk, (stat.st_dev, stat.st_ino), guard)


def is_there(path: Path, file: tuple[int, int]) -> bool:
    """Whether the file at `path` is this one, by device and inode."""
    try:
        stat = os.lstat(path)
    except FileNotFoundError:
        return False
    return (stat.st_dev, stat.st_ino) == file


class SegmentReader:
    """A segment opened for reading. The open file stays whole even when another process unlinks it.

    Args:
        path: of its file.
        engine: reads the blocks.
        verify: whether their checksums are compared. Those of encrypted ones always are.
        cipher: the store's.

    Raises:
        OtherKeyError: it is another key's. FormatError: the file is damaged or cut short. OSError: it cannot be read.
    """

    def __init__(self, path: Path, engine: Engine, verify: bool, cipher: Plain = _NO_KEY) -> None:
        for _ in range(_OPENINGS):
            self.header, self.chain, self.digests, _, self._inode, guard = read_head(path, cipher)
            self._file: EngineFile = engine.open(str(path))
            if is_there(path, self._inode):  # else head and blocks may be of two files
                break
        else:
            raise OSError(errno.EAGAIN, "it is replaced again and again", str(path))
        self.id = self.header.id
        self.shape = self.header.shape
        self._engine = engine
        self._guard = guard if verify or self.header.seal is not None else None
        self._contents = [content_of(table) for table in self.digests]  # of each lane
        self.gone = False
        """Whether the store has let it go: it can be read to the end, and nobody will find it again."""

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is still the one that is open here."""
        try:
            return is_there(path, self._inode)
        except OSError:
            return False

    def owner(self, lane: int) -> tuple[str, int, int]:
        """Under which name memory keeps blocks of a lane: with what they contain, whatever is stored under the id."""
        return self.id, lane, self._contents[lane]

    def key_owner(self, layer: int) -> tuple[str, int, int]:
        """The same for the keys of a layer, in whichever lanes they lie."""
        return self.id, layer, self.header.digests.digest

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
                for first, blocks in runs:
                    self._open(lane, first, blocks)
            except BaseException as error:
                checked.set_exception(error)
            else:
                checked.set_result(report)

        self._engine.submit(ops).add_done_callback(check)
        return checked

    def _open(self, lane: int, first: int, blocks: torch.Tensor) -> None:
        """Check blocks, and decrypt them where they are. Raises IntegrityError naming the first bad chunk."""
        if self._guard is None:
            return
        expected = self.digests[lane, first : first + blocks.shape[0]]
        bad = self._guard.open(lane * self.shape.chunks + first, blocks, expected)
        if bad is not None:
            chunk = first + bad
            raise IntegrityError(
                f"segment {self.id}, lane {lane}, chunk {chunk}: the block fails its checksum",
                whole_links=self.shape.first_token(self.shape.lanes[lane], chunk) // LINK_TOKENS,
                file=self._inode,
            )
