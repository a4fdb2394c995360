"""An open segment: its header, tables and file, and checked reads of its blocks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from ..errors import FormatError, IntegrityError
from ..geometry import HASH_TOKENS
from .backend import HeadLength, SegmentBackend, Stored
from .cipher import Plain
from .digest import Guard, content_of, is_tagged
from .engines import EngineFile, ReadOp, ReadReport
from .format import HEADER_BYTES, SegmentHeader, decode_header, decode_tables, tagged
from .memory import aligned_bytes

_LARGE_TABLES, _MOST_HOLES = 16 << 20, 16
"""Of tables above this size a sixteenth must lie on disk: a sparse file of a few KiB could take all memory."""
_NO_KEY = Plain()
BlockRun = tuple[int, torch.Tensor]
"""First chunk of a run, and where its blocks go: uint8 `[n, block_bytes]`, contiguous."""


class Head(NamedTuple):
    """What stands before a segment's blocks."""

    header: SegmentHeader
    chain: bytes
    """Its prefix hashes side by side."""
    digests: tuple[np.ndarray, ...]
    """Of each block group `DIGEST_DTYPE` `[chunks]`."""
    nbytes: int
    """What the segment takes on disk."""
    version: Hashable
    """Which bytes they were that have been read (see `Stored`)."""
    guard: Guard | None
    """Of the blocks, if these are to be read."""


def read_head(fetch: Callable[[HeadLength], tuple[Stored, bytes]], cipher: Plain | None = None) -> Head:
    """Read and check everything before the blocks.

    Args:
        fetch: reads a segment's beginning: a backend's `head`, of one segment.
        cipher: the store's, if the blocks are to be read, too. Without it the head is believed to whoever wrote it.

    Raises:
        OtherKeyError: it is another key's. FormatError: it is damaged or cut short. OSError: it cannot be read.
    """
    decoded: list[tuple[SegmentHeader, int, Guard | None]] = []

    def length(stored: Stored, page: bytes) -> int:
        header, num_hashes = decode_header(page)
        decoded.append((header, num_hashes, None if cipher is None else cipher.guard(header.seal)))
        if stored.size < header.file_bytes:
            raise FormatError(f"it is cut short: {stored.size} of {header.file_bytes} bytes")
        tables = header.blocks.offset - HEADER_BYTES
        if tables > _LARGE_TABLES and tables > _MOST_HOLES * stored.nbytes:  # some places reckon late: no proof
            raise OSError(errno.EFBIG, f"tables of {tables} bytes in a file that takes {stored.nbytes}")
        return header.blocks.offset

    stored, head = fetch(length)
    header, num_hashes, guard = decoded[-1]
    page, tables = head[:HEADER_BYTES], head[HEADER_BYTES:]
    if guard is not None and header.seal is not None and not is_tagged(guard, *tagged(header, page, tables)):
        raise FormatError("what stands before the blocks was not written with the store's key")
    header, chain, digests = decode_tables(header, num_hashes, tables)
    return Head(header, chain, digests, stored.nbytes, stored.version, guard)


class SegmentReader:
    """A segment opened for reading. What is open stays whole even when another process deletes it.

    Args:
        backend: where it lies.
        segment_id: under which name.
        verify: whether the blocks' checksums are compared. Those of encrypted ones always are.
        cipher: the store's.

    Raises:
        OtherKeyError: it is another key's. FormatError: it is damaged, cut short, or another segment's. OSError: it
            cannot be read.
    """

    def __init__(self, backend: SegmentBackend, segment_id: str, verify: bool, cipher: Plain = _NO_KEY) -> None:
        opened: list[EngineFile] = []

        def fetch(length: HeadLength) -> tuple[Stored, bytes]:
            stored, data, file = backend.open(segment_id, length)
            opened.append(file)
            return stored, data

        head = read_head(fetch, cipher)
        self.header, self.chain, self.digests = head.header, head.chain, head.digests
        self.id, self.shape = self.header.id, self.header.shape
        if self.id != segment_id:
            raise FormatError(f"{segment_id} calls itself {self.id}")
        self.backend, self._file, self._version = backend, opened[0], head.version
        self._guard = head.guard if verify or self.header.seal is not None else None
        self._contents = [content_of(table) for table in self.digests]  # of each block group
        self.gone = False
        """Whether the store has let it go: it can be read to the end, and nobody will find it again."""

    def caused(self, error: BaseException) -> bool:
        """Whether this is the segment whose blocks could not be read, or failed their check."""
        if isinstance(error, IntegrityError):
            return error.version == self._version
        return isinstance(error, OSError) and error.filename == self._file.path

    def is_current(self) -> bool:
        """Whether what stands under its name is still what is open here."""
        try:
            found = self.backend.find(self.id)
        except OSError:
            return False
        return found is not None and found.version == self._version

    def owner(self, block_group: int) -> tuple[str, int, int]:
        """The name that memory keeps a block group's blocks under: with what they contain, not the id alone."""
        return self.id, block_group, self._contents[block_group]

    def key_owner(self, layer: int, made: str) -> tuple[str, int, int, str]:
        """The same for what is made of the keys of a layer, in whichever block groups they lie."""
        return self.id, layer, self.header.digests.digest, made

    def ops(self, block_group: int, runs: Sequence[BlockRun]) -> list[ReadOp]:
        """The reads that bring runs of blocks of one block group."""
        block_bytes = self.shape.block_groups[block_group].block_bytes
        start = self.header.blocks.offset + self.shape.group_offsets[block_group]
        return [ReadOp(self._file, start + first * block_bytes, blocks.view(-1)) for first, blocks in runs]

    @property
    def verifies(self) -> bool:
        """Whether blocks are compared with their digests."""
        return self._guard is not None

    def damaged(self, block_group: int, chunk: int) -> IntegrityError:
        """What to raise of a block that is not what was written."""
        return IntegrityError(
            f"segment {self.id}, block group {block_group}, chunk {chunk}: the block fails its checksum",
            valid_hashes=self.shape.first_token(self.shape.block_groups[block_group], chunk) // HASH_TOKENS,
            version=self._version,
        )

    def open_blocks(self, block_group: int, runs: Sequence[BlockRun]) -> None:
        """Check what was read, and decrypt it where it is. Raises IntegrityError."""
        for first, blocks in runs:
            self._open(block_group, first, blocks)

    def read(self, block_group: int, runs: Sequence[BlockRun]) -> Future[ReadReport]:
        """Read runs of blocks of one block group, and check every block. See `read_batch`."""
        return read_batch([(self, block_group, runs)])

    def blocks(self, block_group: int) -> torch.Tensor:
        """Read all blocks of one block group, uint8 `[chunks, block_bytes]`. Raises IntegrityError or OSError."""
        blocks = self.room_for(block_group)
        self.read(block_group, [(0, blocks)]).result()
        return blocks

    def room_for(self, block_group: int) -> torch.Tensor:
        """Memory for all blocks of one block group, uint8 `[chunks, block_bytes]`."""
        group = self.shape.block_groups[block_group]
        return aligned_bytes(self.shape.chunks_in(group) * group.block_bytes).view(-1, group.block_bytes)

    def _open(self, block_group: int, first: int, blocks: torch.Tensor) -> None:
        """Check blocks, and decrypt them where they are. Raises IntegrityError naming the first bad chunk."""
        if self._guard is None:
            return
        expected = self.digests[block_group][first : first + blocks.shape[0]]
        bad = self._guard.open(self.shape.first_block(block_group) + first, blocks, expected)
        if bad is not None:
            raise self.damaged(block_group, first + bad)


Asked = tuple[SegmentReader, int, Sequence[BlockRun]]
"""A segment, the number of a block group, and runs of its blocks."""


def read_batch(asked: Sequence[Asked], unseen: Sequence[Asked] = ()) -> Future[ReadReport]:
    """Read runs of blocks of block groups of segments, in one submission, and check every block that the CPU sees.

    Args:
        asked: segments of one store, each with the number of a block group, and the runs of its blocks.
        unseen: likewise, with runs in device memory: these are read too, and left to the caller to check.

    Returns:
        A future that fails with IntegrityError or OSError (see `SegmentReader.caused`), and not before nothing writes
        to the destinations any more.
    """
    checked: Future[ReadReport] = Future()
    checked.set_running_or_notify_cancel()

    def check(done: Future[ReadReport]) -> None:
        try:
            report = done.result()
            for reader, block_group, runs in asked:
                reader.open_blocks(block_group, runs)
        except BaseException as error:
            checked.set_exception(error.with_traceback(None))  # its frames hold the future, and what was read into
        else:
            checked.set_result(report)

    both = [*asked, *unseen]
    ops = [op for reader, block_group, runs in both for op in reader.ops(block_group, runs)]
    both[0][0].backend.read(ops).add_done_callback(check)
    return checked
