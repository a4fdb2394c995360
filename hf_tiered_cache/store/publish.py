"""Publication of segments: atomic, within the quota, and together with the catalogue row.

The quota has watermarks, a free-space floor and an eviction order. `disk.py` measures usage and deletes segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from ..errors import ConfigError, FormatError, NotOursError, StoreBusyError
from .backend import SegmentBackend, Upload
from .catalogue import Catalogue, SegmentRow
from .cipher import Plain
from .container import write_blocks
from .digest import Group, PackedBlocks, content_of
from .format import SegmentHeader, encode_head
from .index import Index
from .segment import read_head

CATALOGUE_GROWTH = 256 << 10
"""Bytes reserved within the quota for growth of the catalogue and its log until usage is measured again."""
Use = tuple[str, int, float | None]
"""Id of a segment, its size in bytes, and its expiry in Unix seconds, or None."""


@dataclass(frozen=True)
class Limits:
    """Limits of the disk space that a store may use.

    Args:
        quota: maximum size of the store's folder in bytes, or None for no quota.
        high: share of the quota above which eviction starts.
        low: share of the quota down to which it evicts.
        floor: bytes that always stay free on the file system.
    """

    quota: int | None = None
    high: float = 0.95
    low: float = 0.85
    floor: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(f"watermarks must satisfy 0 < low <= high <= 1, not low={self.low}, high={self.high}")
        if self.quota is not None and self.quota < 0:
            raise ConfigError(f"disk_quota must not be negative: {self.quota}")

    def shortfall(self, nbytes: int, used: int, free: int | None) -> tuple[int, int]:
        """Return the number of bytes to evict before `nbytes` more are written.

        Args:
            nbytes: bytes to write.
            used: bytes that the store uses; ignored without a quota.
            free: free bytes on the disk, or None if unlimited.

        Returns:
            Bytes that must be evicted, and bytes that should be. Values that are not positive mean no eviction.
        """
        needed = 0 if free is None else nbytes + self.floor - free
        desired = needed + nbytes if needed > 0 else needed  # room for two such writes, so that not every write evicts
        if self.quota is not None:
            needed = max(needed, used + nbytes - self.quota)
            if used + nbytes > self.quota * self.high:
                desired = max(desired, needed, used + nbytes - int(self.quota * self.low))
        return needed, desired

    def overflow(self, used: int) -> int:
        """Return the bytes to evict to get down to the low watermark; 0 if `used` is not above the high watermark."""
        over = self.quota is not None and used > self.quota * self.high
        return used - int(self.quota * self.low) if self.quota is not None and over else 0


def victims(uses: Sequence[Use], nbytes: int, spared: Collection[str], now: float) -> list[tuple[str, int]]:
    """Select segments to evict until `nbytes` are freed: expired ones first, then the least recently used.

    Args:
        uses: all segments, most recently used last; with equal times, the segment at the larger position first.
        nbytes: bytes to free.
        spared: ids of segments that are not evicted.
        now: current time in Unix seconds.

    Returns:
        Ids and sizes in bytes of the selected segments.
    """
    rows = [row for row in uses if row[0] not in spared]
    rows.sort(key=lambda row: row[2] is None or row[2] > now)  # a stable sort: the order of use is kept
    freed = accumulate((size for _, size, _ in rows), initial=0)
    return [(segment_id, size) for (segment_id, size, _), before in zip(rows, freed, strict=False) if before < nbytes]


Written = Callable[[int, torch.Tensor, int], None]
"""Callback for a written KV cache group: its number, its blocks, and the content hash in `SegmentReader.owner`."""


class Publisher:
    """Writer of segments to a backend and its index.

    Args:
        backend: backend to write to.
        index: index that lists each segment as it is published.
        cipher: cipher of the blocks; `Plain` does not encrypt them.
        make_room: function that evicts segments until the given number of bytes fit, except the given segments. It is
            called with the backend's lock held, and raises QuotaError.
        is_hidden: function that returns whether a segment recently failed in this process, so that it may be replaced.
    """

    def __init__(
        self,
        backend: SegmentBackend,
        index: Index,
        cipher: Plain,
        make_room: Callable[[int, Collection[str]], None],
        is_hidden: Callable[[str], bool],
    ) -> None:
        self._backend, self._index, self._cipher = backend, index, cipher
        self._make_room, self._is_hidden = make_room, is_hidden

    def write(
        self, header: SegmentHeader, prefix_hashes: list[bytes], block_groups: Iterable[Group], written: Written
    ) -> tuple[int, bool]:
        """Write a segment and publish it atomically.

        Args:
            header: header with its sections (see `lay_out`).
            prefix_hashes: prefix hashes of the segment.
            block_groups: blocks of each KV cache group, uint8 `[chunks, block_bytes]`. Each item is fully written
                before the next one is requested.
            written: callback for each KV cache group. The segment may still fail to be stored.

        Returns:
            Size of the segment in bytes, and whether it replaced another segment.

        Raises:
            FileExistsError: a segment with this id exists, and is not to be replaced.
            QuotaError: there is no room within the quota or on the disk.
            StoreBusyError: the store or its catalogue is locked by another process, or the catalogue cannot be opened.
            OSError: the segment cannot be written.
        """
        guard, replaces = self._cipher.guard(header.seal), self._makes_way(header.id)
        if not self._index.is_shared():
            raise StoreBusyError("the catalogue cannot be opened, so the segment could not be found")
        with self.reserved(header.id, header.file_bytes) as upload:
            digests = []
            offset = header.blocks.offset
            for block_group, group in enumerate(block_groups):
                blocks, linear = group if isinstance(group, PackedBlocks) else (group, None)
                first = header.shape.first_block(block_group)
                digests.append(write_blocks(upload, offset, guard, first, blocks, linear))
                written(block_group, blocks, content_of(digests[-1]))
                offset += blocks.numel()
            upload.write(memoryview(encode_head(header, prefix_hashes, np.concatenate(digests), guard)), 0)
            row = SegmentRow.of(header, b"".join(prefix_hashes), upload.nbytes())
            # before the upload's context ends, so that its bytes stay counted
            self._publish(header, row, upload, replaces)
        return row.nbytes, replaces

    @contextmanager
    def reserved(self, name: str, nbytes: int, spared: Collection[str] = ()) -> Iterator[Upload]:
        """Reserve room, within the quota and on the backend, and yield the upload to write to.

        Args:
            name: name to publish under.
            nbytes: bytes to reserve.
            spared: segments that are not evicted.
        """
        with ExitStack() as stack:
            with self._backend.locked():
                self._make_room(nbytes, spared)
                upload = stack.enter_context(self._backend.write(name, nbytes))
            yield upload

    def _publish(self, header: SegmentHeader, row: SegmentRow, upload: Upload, replaces: bool) -> None:
        """Publish the file and its catalogue row together. If the row cannot be added, a new file is deleted again."""
        is_published = False

        def publish() -> None:
            nonlocal is_published
            if not is_published:  # it may be called again, after the catalogue was replaced
                upload.publish(replaces)
                is_published = True

        def enter(catalogue: Catalogue) -> bool:
            catalogue.add(row, header.model, publish)
            return True

        is_listed = False
        try:
            is_listed = self._index.ask(enter, False)
        finally:  # Ctrl-C interrupts before or after the row is added
            if is_published and not is_listed and not replaces and self._index.row(header.id) is None:
                self._backend.delete(header.id)
        if not is_listed:
            raise StoreBusyError("the segment cannot be added to the catalogue; end the process that keeps it locked")

    def _makes_way(self, segment_id: str) -> bool:
        """Return whether an existing segment is to be replaced, because it is damaged, expired or failing.

        Raises:
            FileExistsError: the existing segment is usable.
            NotOursError: the existing segment has another key or a newer format.
            OSError: the existing segment cannot be read.
        """
        listed_row = self._index.row(segment_id)
        try:
            header = read_head(partial(self._backend.head, segment_id), self._cipher).header
        except FileNotFoundError:
            return False
        except NotOursError:  # before its base class, of damaged files
            raise
        except FormatError:
            return True
        except OSError:
            if self._is_hidden(segment_id):
                return True
            raise
        expires = (
            header.expires if listed_row is None else listed_row.expires
        )  # the row corrects clocks that were ahead
        if self._is_hidden(segment_id) or (listed_row is not None and not listed_row.valid_hashes):
            return True
        if expires is not None and expires <= time.time():
            return True
        raise FileExistsError(segment_id)
