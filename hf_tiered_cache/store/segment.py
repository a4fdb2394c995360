"""Readers of a segment: its header, tables and file, verified reads of its blocks, and its first tokens in memory."""

from __future__ import annotations

import resource
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import EvictedError, FormatError, IntegrityError, NotOursError
from .backend import HeadLength, SegmentBackend
from .cipher import Plain
from .container import Guard, check_not_sparse, check_tag, content_of
from .engines import EngineFile, ReadOp
from .format import HEADER_BYTES, PREFIX, SegmentHeader, decode_header, decode_tables
from .geometry import HASH_TOKENS
from .lazy import torch
from .shape import SegmentShape
from .threads import PerProcess
from .tree import Stored

_NO_KEY = Plain()
BlockRun: TypeAlias = "tuple[int, torch.Tensor]"
"""First chunk of a run, and the destination of its blocks: uint8 `[n, block_bytes]`, contiguous."""


class Head(NamedTuple):
    """Content of a segment file before its blocks."""

    header: SegmentHeader
    chain: bytes
    """Concatenated prefix hashes."""
    digests: tuple[np.ndarray, ...]
    """Digests of each KV cache group's blocks, `DIGEST_DTYPE` `[chunks]`."""
    nbytes: int
    """Size of the segment on disk in bytes."""
    version: Hashable
    """Version of the file that was read (see `Stored`)."""
    guard: Guard | None
    """Guard of the blocks, or None if no cipher was given."""
    file: EngineFile | None = None
    """The open file, if it was opened to read blocks."""


def read_head(read: Callable[[Any, HeadLength], tuple[Any, ...]], segment_id: Any, cipher: Plain | None = None) -> Head:
    """Read and check all content before the blocks, with a backend's `head` or `open`, or with `head_of_file`.

    Without the store's cipher, the authenticity of the head is not checked. Raises OtherKeyError if only one of segment
    and store has a key, or both differ, FormatError if the segment is damaged or truncated, or OSError.
    """
    decoded: list[tuple[SegmentHeader, int, Guard | None]] = []

    def length(stored: Stored, page: bytes) -> int:
        header, num_hashes = decode_header(page)
        decoded.append((header, num_hashes, None if cipher is None else cipher.guard(header.seal)))
        if stored.size < header.file_bytes:
            reporter = type(owner).__name__ if (owner := getattr(read, "__self__", None)) else "the file system"
            raise FormatError(f"it is truncated: {reporter} reports {stored.size} of {header.file_bytes} bytes")
        check_not_sparse(header.blocks.offset - HEADER_BYTES, stored)
        return header.blocks.offset

    stored, head, *opened = read(segment_id, length)
    header, num_hashes, guard = decoded[-1]
    if guard is not None and header.seal is not None:
        check_tag(PREFIX, head, HEADER_BYTES, guard)
    header, chain, digests = decode_tables(header, num_hashes, head[HEADER_BYTES:])
    return Head(header, chain, digests, stored.nbytes, stored.version, guard, *opened)


def is_damaged(
    read: Callable[[str, HeadLength], tuple[Any, ...]], segment_id: str, cipher: Plain | None = None
) -> bool:
    """Return whether what has the name of a segment is damaged, or another segment. See `read_head`. Raises OSError."""
    try:
        return read_head(read, segment_id, cipher).header.id != segment_id
    except FormatError as error:
        return not isinstance(error, NotOursError)


class SegmentReader:
    """Segment opened for reading. It stays readable even if another process deletes it. Raises as `read_head`.

    Without `verify`, the checksums of blocks are not verified, unless they are encrypted.
    """

    def __init__(self, backend: SegmentBackend, segment_id: str, verify: bool, cipher: Plain = _NO_KEY) -> None:
        head = read_head(backend.open, segment_id, cipher)
        assert head.file is not None
        self.header, self.chain, self.digests = head.header, head.chain, head.digests
        self.id, self.shape = self.header.id, self.header.shape
        if self.id != segment_id:
            raise FormatError(f"the header of {segment_id} belongs to segment {self.id}")
        self.backend, self._file, self._version = backend, head.file, head.version
        self._guard = head.guard if verify or self.header.seal is not None else None
        self.owners = tuple((self.id, number, content_of(table)) for number, table in enumerate(self.digests))
        """Keys of each KV cache group's blocks in memory. They include a content hash, not only the id."""
        self.gone = False
        """True if the store has dropped the segment. It stays readable, but is not found again."""

    @cached_property
    def held(self) -> np.ndarray:
        """Tokens of each layer that can be read, bool `[layers, tokens]`."""
        return self.shape.held

    def caused(self, error: BaseException) -> bool:
        """Return whether an error was raised by reading or verifying blocks of this segment."""
        if isinstance(error, IntegrityError):
            return error.version == self._version
        return isinstance(error, OSError) and error.filename == self._file.path

    def is_current(self) -> bool:
        """Return whether the backend still stores this version of the segment."""
        try:
            stored = self.backend.find(self.id)
        except OSError:
            return False
        return stored is not None and stored.version == self._version

    def ops(self, block_group: int, runs: Sequence[BlockRun]) -> list[ReadOp]:
        """Return the read operations for runs of blocks of one KV cache group."""
        block_bytes = self.shape.block_groups[block_group].block_bytes
        start = self.header.blocks.offset + self.shape.group_offsets[block_group]
        return [ReadOp(self._file, start + first * block_bytes, blocks.view(-1)) for first, blocks in runs]

    @property
    def verifies(self) -> bool:
        """True if blocks are compared with their digests."""
        return self._guard is not None

    def damaged(self, block_group: int, chunk: int) -> IntegrityError:
        """Return the error to raise for a damaged block."""
        return IntegrityError(
            f"segment {self.id}, KV cache group {block_group}, chunk {chunk}: the block fails its checksum",
            valid_hashes=self.shape.first_token(self.shape.block_groups[block_group], chunk) // HASH_TOKENS,
            version=self._version,
        )

    def open_blocks(self, block_group: int, runs: Sequence[BlockRun]) -> None:
        """Verify blocks that were read, and decrypt them in place. Raises IntegrityError, which names a bad chunk."""
        if self._guard is None:
            return
        for first, blocks in runs:
            expected = self.digests[block_group][first : first + blocks.shape[0]]
            bad = self._guard.open(self.shape.first_blocks[block_group] + first, blocks, expected)
            if bad is not None:
                raise self.damaged(block_group, first + bad)

    def read(self, block_group: int, runs: Sequence[BlockRun]) -> Future[int]:
        """Read runs of blocks of one KV cache group, and verify every block. See `read_batch`."""
        return read_batch([(self, block_group, runs)])

    def blocks(self, block_group: int) -> torch.Tensor:
        """Read all blocks of one KV cache group, uint8 `[chunks, block_bytes]`. Raises IntegrityError or OSError."""
        blocks = self.shape.room_for(self.shape.block_groups[block_group])
        self.read(block_group, [(0, blocks)]).result()
        return blocks


Asked = tuple[SegmentReader, int, Sequence[BlockRun]]
"""A segment, the number of a KV cache group, and runs of its blocks."""


def read_batch(requests: Sequence[Asked], unseen: Sequence[Asked] = ()) -> Future[int]:
    """Read runs of blocks of several segments of a store in one submission, and verify all blocks read to CPU memory.

    Those of `unseen` are in device memory, and the caller verifies them. Returns a future that fails with
    IntegrityError or OSError (see `SegmentReader.caused`), and is resolved only when nothing writes to the destinations
    any more.
    """
    checked: Future[int] = Future()
    checked.set_running_or_notify_cancel()

    def check(future: Future[int]) -> None:
        try:
            report = future.result()
            for reader, block_group, runs in requests:
                reader.open_blocks(block_group, runs)
        except BaseException as error:
            checked.set_exception(error.with_traceback(None))  # its frames refer to the future and the destinations
        else:
            checked.set_result(report)

    all_requests = [*requests, *unseen]
    ops = [op for reader, block_group, runs in all_requests for op in reader.ops(block_group, runs)]
    all_requests[0][0].backend.read(ops).add_done_callback(check)
    return checked


class UnstoredPrefixReader(SegmentReader):
    """Reader of the tokens that a segment lacks, as far as memory holds them (`held`). No file contains them."""

    def __init__(self, segment: SegmentReader, shape: SegmentShape, is_held: np.ndarray) -> None:
        self.id, self.shape, self.chain, self.backend = segment.id, shape, segment.chain, segment.backend
        self.header = replace(segment.header, shape=shape)
        self.owners = owners_of_unstored(segment, shape)
        self.gone, self._guard, self.held = False, None, is_held

    def caused(self, error: BaseException) -> bool:
        return isinstance(error, EvictedError) and error.segment == self.id

    def ops(self, block_group: int, runs: Sequence[BlockRun]) -> list[ReadOp]:
        """Raise EvictedError: what is no longer in memory cannot be read."""
        raise EvictedError(self.id)


def owners_of_unstored(segment: SegmentReader, shape: SegmentShape) -> tuple[tuple[str, int, int], ...]:
    """Return the keys in memory of the blocks that a segment lacks. They are forgotten with the segment."""
    first = len(segment.owners)
    return tuple((segment.id, first + group.index, segment.header.digests.digest) for group in shape.block_groups)


# --- open segments

_MOST_OPEN_SEGMENTS = 256
_segments: PerProcess[OrderedDict[tuple[object, str], SegmentReader]] = PerProcess(OrderedDict)
"""Open segments of all stores, by store and id: file descriptors are limited per process."""


class OpenSegments:
    """Open segments of a store, of which the process holds a limited number: those used last."""

    def __init__(self) -> None:
        self._store = object()
        # no __del__: modules may already be unloaded when the interpreter exits
        weakref.finalize(self, _close_segments, self._store).atexit = False

    def __iter__(self) -> Iterator[str]:
        with _segments.locked() as segments:
            return iter([name for store, name in segments if store is self._store])

    def get(self, *segment_ids: str) -> list[SegmentReader | None]:
        """Return segments that are open, or None for each that is not."""
        with _segments.locked() as segments:
            keys = [(self._store, segment_id) for segment_id in segment_ids]
            for key in filter(segments.__contains__, keys):
                segments.move_to_end(key)
            return [segments.get(key) for key in keys]

    def keep(self, segment_id: str, reader: SegmentReader) -> None:
        with _segments.locked() as segments:
            segments[self._store, segment_id] = reader
        self.close_others(most_open_segments())

    def drop(self, segment_id: str) -> None:
        with _segments.locked() as segments:
            segments.pop((self._store, segment_id), None)

    def clear(self) -> None:
        _close_segments(self._store)

    def close_others(self, but: int = 0) -> None:
        """Close the segments of the process, except the `but` most recently used ones. Reads are finished first."""
        with _segments.locked() as segments:
            while len(segments) > but:
                segments.popitem(last=False)


def _close_segments(store: object) -> None:
    with _segments.locked() as segments:
        for key in [key for key in segments if key[0] is store]:
            del segments[key]


def most_open_segments() -> int:
    """Return the maximum number of open segments: at most a quarter of the process's file descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN_SEGMENTS if soft < 0 else max(1, min(_MOST_OPEN_SEGMENTS, soft // 4))
