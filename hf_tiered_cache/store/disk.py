"""Segments of a store: publish, find, open, delete. Disk faults end here as counted misses.

`SegmentStore` combines catalogue (`index.py`), quota (`quota.py`) and verification (`segment.py`) over a backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..errors import (
    FormatError,
    IntegrityError,
    KVRefusedError,
    NotOursError,
    QuotaError,
    RestoreError,
    StoreBusyError,
    as_store_error,
    reason_of,
)
from .backend import SegmentBackend, Upload
from .catalogue import SegmentRow
from .cipher import Plain
from .container import Group, PackedBlocks, content_of, write_blocks
from .faults import figure_of, is_of_the_process, out_of_descriptors
from .format import SegmentHeader, encode_head, lay_out
from .lazy import torch
from .quota import Limits, Space
from .segment import SegmentReader, is_damaged, read_head

_PAUSE_SECONDS = 1.0  # seconds for which a segment is not used after a read error. Each further error doubles them
_FAILING_SECONDS = 60.0
"""Maximum of these seconds. For as long after them, the segment may be replaced, and an error is a further one."""

Written: TypeAlias = "Callable[[tuple[str, int, int], torch.Tensor], None]"
"""Callback for a written KV cache group: its key in memory (see `SegmentReader.owners`), and its blocks, uint8
`[chunks, block_bytes]`."""


class SegmentStore(Space):
    """Segments in one place, shared by any number of processes. The place is closed with the store.

    With `verify`, the checksum of every block that is read is compared. The cipher encrypts the blocks, if the store
    has a key: segments written with another key, or without one, are neither used nor changed.
    """

    def __init__(self, backend: SegmentBackend, *, verify: bool, limits: Limits, cipher: Plain) -> None:
        super().__init__(backend, limits, cipher)
        self._verify = verify
        self._failures: dict[str, tuple[float, float]] = {}  # time of the last failure, and seconds of disuse after it
        self._unopened = set[str]()  # segments that could not be opened because of the process, such as its permissions
        self._keys = self.index.keys() - {""}  # of the segments present when the store was opened

    def path(self, segment_id: str) -> Path:
        """Return the path of a segment's file, for tools that inspect it."""
        return Path(self.backend.where(segment_id))

    # --- finding and reading

    def find(self, prefix_hashes: Sequence[bytes]) -> list[SegmentRow]:
        """Return the usable segments whose chain begins with one of `prefix_hashes`; none if the catalogue fails."""
        return [row for row in self.index.beginning_with(prefix_hashes) if not self.is_hidden(row.id)]

    def is_hidden(self, segment_id: str) -> bool:
        """Return whether the segment is not used for now, because this process failed to read it."""
        return self._hidden_until(segment_id) > time.monotonic()

    def _hidden_until(self, segment_id: str) -> float:
        """Return the time (`time.monotonic`) from which the segment is used again; -inf if it was always used."""
        failed_at, pause = self._failures.get(segment_id, (-inf, 0.0))
        return failed_at + pause

    def _is_failing(self, segment_id: str) -> bool:
        """Return whether this process recently failed to read the segment, so that it may be replaced."""
        return self._hidden_until(segment_id) + _FAILING_SECONDS > time.monotonic()

    def _hide(self, segment_id: str, for_good: bool) -> None:
        """Stop using a segment: `for_good`, or for a while that doubles with each failure of the same segment."""
        _, pause = self._failures.get(segment_id, (-inf, 0.0))
        pause = min(2 * pause, _FAILING_SECONDS) if self._is_failing(segment_id) else _PAUSE_SECONDS
        self._failures[segment_id] = time.monotonic(), inf if for_good else pause

    def hid_any(self, prefix_hashes: Sequence[bytes], since: float) -> bool:
        """Return whether a segment that begins with one of `prefix_hashes` was hidden `since`, or cannot be opened."""
        if not (self._failures or self._unopened):
            return False
        rows = self.index.beginning_with(prefix_hashes)
        return any(row.id in self._unopened or self._hidden_until(row.id) > since for row in rows)

    def reader(self, segment_id: str) -> SegmentReader | None:
        """Return an open segment, or None (counted and logged) if it cannot be used."""
        (reader,) = self.readers.get(segment_id)
        return reader if reader is not None and reader.is_current() else self._open_again(segment_id, reader)

    def found(self, rows: Sequence[SegmentRow]) -> list[SegmentReader | None]:
        """Open the segments of rows; None (counted) for one that cannot be used or does not match its row.

        The segment file is authoritative: a wrong row would serve the KV of other tokens. It is read again.
        """
        ids = [row.id for row in rows]  # a passage may occur twice
        open_readers = dict(zip(ids, self.readers.get(*ids), strict=True))
        readers = []
        for row in rows:
            reader = open_readers[row.id]
            if reader is None or not reader.is_current():
                reader = open_readers[row.id] = self._open_again(row.id, reader)
            if reader is not None and not row.fits(reader.header, reader.chain):
                self.index.read_again(row.id)
                reader = None
            readers.append(reader)
        return readers

    def _open_again(self, segment_id: str, outdated: SegmentReader | None) -> SegmentReader | None:
        """Open a segment that is not open, or replaced since. See `reader`."""
        if outdated is not None:
            self.forget([segment_id])
        try:
            reader = self._open(segment_id)
        except (FormatError, OSError, MemoryError) as error:
            if is_of_the_process(error):
                self._unopened.add(segment_id)
            self.report(segment_id, error)
            return None
        self._unopened.discard(segment_id)
        self.readers.keep(segment_id, reader)
        return reader

    def _open(self, segment_id: str) -> SegmentReader:
        try:
            return SegmentReader(self.backend, segment_id, self._verify, self.cipher)
        except OSError as error:
            if not out_of_descriptors(error):
                raise
            self.readers.close_others()
            return SegmentReader(self.backend, segment_id, self._verify, self.cipher)

    def report(self, segment_id: str, error: BaseException) -> None:
        """Handle a segment that could not be used. From now on only its part before the fault is offered.

        A segment without an intact first block is deleted, so that it can be stored again. A read error, or an invalid
        header, may be temporary, so it hides the segment from this process only, and for a limited time. Errors that
        are not caused by the file have no consequence for it. A segment that was deleted is forgotten, and is no error.
        """
        if isinstance(error, FileNotFoundError):
            if segment_id in self._removed:
                return  # it was deleted, or replaced, since it was looked up
            if self.backend.is_reachable():  # another process deleted it
                self.forget([segment_id])
                self.index.remove([segment_id])
                return
        if not isinstance(error, OSError | FormatError | IntegrityError | RestoreError):
            self.warn(f"{type(error).__name__} {error}", f"segment {segment_id} was not restored: {error!r}")
            return
        figure = figure_of(error)
        message = f"segment {segment_id} cannot be used: {reason_of(error)}; its tokens are computed again"
        self.counters.note(figure, segment_id, message)
        self.readers.drop(segment_id)
        if figure == "verification_failures":
            self._handle_damage(segment_id, error)
        elif not is_of_the_process(error):
            self._hide(segment_id, for_good=not isinstance(error, OSError))

    def _handle_damage(self, segment_id: str, error: BaseException) -> None:
        """Limit, hide or delete a damaged segment, unless another process has replaced it by an intact one."""
        valid_hashes = error.valid_hashes if isinstance(error, IntegrityError) else 0
        try:
            if not self._is_damaged(segment_id, error):
                return
            if valid_hashes:
                self.index.limit(segment_id, valid_hashes)
                return
            if isinstance(error, FormatError):  # perhaps incomplete: another program copies it from a backup
                self._hide(segment_id, for_good=False)
                return
            self._hide(segment_id, for_good=True)
            if self.backend.writable:
                self.remove([segment_id])
                self._failures.pop(segment_id, None)
        except OSError:  # a disk that has become read-only, or no descriptor is left to look
            if not self.is_hidden(segment_id):
                self._hide(segment_id, for_good=False)

    def _is_damaged(self, segment_id: str, error: BaseException) -> bool:
        """Return whether the stored segment is still the one that was found damaged."""
        if isinstance(error, IntegrityError):
            if error.version is None:
                return True
            entry = self.backend.find(segment_id)
            return entry is not None and entry.version == error.version
        return is_damaged(self.backend.head, segment_id, self.cipher)

    def other_key(self) -> str | None:
        """Return the id of a key of the encrypted segments, if this store has a key and none of them uses it."""
        other_keys = self._keys - {self.cipher.key_id}
        return min(other_keys) if self.cipher.key_id and other_keys == self._keys != set() else None

    # --- writing

    def publish(
        self,
        header: SegmentHeader,
        prefix_hashes: list[bytes],
        block_groups: Iterable[Group],
        ancestors: Iterable[str] = (),
        written: Written = lambda owner, blocks: None,
        is_new: bool = True,
    ) -> bool:
        """Write a segment and make it visible atomically. Returns whether it is stored now.

        A full disk, the quota, an unwritable folder or an unavailable lock drop it, which is counted and logged once.

        Args:
            header: Header without its sections.
            prefix_hashes: Prefix hashes of the segment.
            block_groups: Blocks of each KV cache group, `[chunks, block_bytes]`; each is consumed before the next.
            ancestors: Segments that it continues. Their use is recorded with it, so that it is evicted before them.
            written: Callback for each KV cache group that was written. The segment may still be dropped.
            is_new: False for a segment from the remote, which `on_kept` is not told of.
        """
        header = lay_out(replace(header, seal=self.cipher.new_seal()), len(prefix_hashes))
        if not self.backend.writable:
            self.counters.add("dropped_writes")
            return False
        self.index.catch_up()
        if not self.cipher.key_id and self._keys:
            self.warn(
                "mixture",
                f"{self.place} was opened without a key, so new KV is stored without encryption, although other KV in "
                "it is encrypted",
            )
        try:
            nbytes, replaced = self._write(header, prefix_hashes, block_groups, written)
        except FileExistsError:
            self.counters.add("duplicate_writes")
            self.index.confirm(header.id)
        except (OSError, NotOursError, QuotaError, StoreBusyError, KVRefusedError) as error:
            message = f"a segment of {header.file_bytes} bytes was not stored: {reason_of(error)}"
            self.counters.note("dropped_writes", type(error).__name__, message)
            if out_of_descriptors(error):
                self.readers.close_others()  # so that the next segment can be stored
            return False
        else:
            self.counters.add("segments_written")
            self.counters.add("bytes_written", nbytes)
            if replaced:
                self.sidecars.remove([header.id])
                self.forget([header.id])
            self._failures.pop(header.id, None)
            with suppress(ValueError):
                self._removed.remove(header.id)
            if is_new:
                self.notify_stored([header.id])
        self.index.touch([*ancestors, header.id])
        return True

    def _write(
        self, header: SegmentHeader, prefix_hashes: list[bytes], block_groups: Iterable[Group], written: Written
    ) -> tuple[int, bool]:
        """Write and publish a segment. Returns its size in bytes, and whether it replaced another one.

        Raises FileExistsError if it exists and is not to be replaced, QuotaError, StoreBusyError or OSError.
        """
        guard, replaces = self.cipher.guard(header.seal), self._is_replaceable(header.id)
        if not self.index.is_shared():
            raise StoreBusyError("the catalogue cannot be opened, so the segment could not be found")
        with self.reserved(header.id, header.file_bytes) as upload:
            digests = []
            offset = header.blocks.offset
            for block_group, group in enumerate(block_groups):
                blocks, linear = group if isinstance(group, PackedBlocks) else (group, None)
                first = header.shape.first_blocks[block_group]
                digests.append(write_blocks(upload, offset, guard, first, blocks, linear))
                written((header.id, block_group, content_of(digests[-1])), blocks)
                offset += blocks.numel()
            upload.write(memoryview(encode_head(header, prefix_hashes, np.concatenate(digests), guard)), 0)
            row = SegmentRow.of(header, b"".join(prefix_hashes), upload.nbytes())
            # before the upload's context ends, so that its bytes stay counted
            self._publish(header, row, upload, replaces)
        return row.nbytes, replaces

    def _publish(self, header: SegmentHeader, row: SegmentRow, upload: Upload, replaces: bool) -> None:
        """Publish the file and its catalogue row together. If the row cannot be added, a new file is deleted again."""
        is_published = is_listed = False

        def publish() -> None:
            nonlocal is_published
            if not is_published:  # it may be called again, after the catalogue was replaced
                upload.publish(replaces)
                is_published = True

        try:
            is_listed = self.index.add([(row, header.model)], publish)
        finally:  # Ctrl-C interrupts before or after the row is added
            if is_published and not is_listed and not replaces and self.index.row(header.id) is None:
                self.backend.delete(header.id)
        if not is_listed:
            raise StoreBusyError("the segment cannot be added to the catalogue; end the process that keeps it locked")

    def _is_replaceable(self, segment_id: str) -> bool:
        """Return whether an existing segment is to be replaced, because it is damaged, expired or failing.

        Raises FileExistsError if it is usable, NotOursError if it has another key or format, or OSError.
        """
        listed_row = self.index.row(segment_id)
        try:
            header = read_head(self.backend.head, segment_id, self.cipher).header
        except FileNotFoundError:
            return False
        except NotOursError:  # before its base class, of damaged files
            raise
        except FormatError:
            return True
        except OSError:
            if self._is_failing(segment_id):
                return True
            raise
        # the row corrects clocks that were ahead
        expires = header.expires if listed_row is None else listed_row.expires
        if self._is_failing(segment_id) or (listed_row is not None and not listed_row.valid_hashes):
            return True
        if expires is not None and expires <= time.time():
            return True
        raise FileExistsError(segment_id)

    def sync(self) -> None:
        """Make what was published durable. Raises StoreError."""
        with as_store_error(f"{self.place} cannot be synchronized to disk"):
            self.backend.sync()

    def close(self) -> None:
        self.readers.clear()
        self.index.close()
        self.backend.close()
