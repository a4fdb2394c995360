"""Segments of a store: publish, find, open, delete. Disk faults end here as counted misses.

`SegmentStore` combines catalogue (`index.py`), quota (`quota.py`) and verification (`segment.py`) over a backend.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from ..errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    ModelChangedError,
    NotOursError,
    QuotaError,
    RestoreError,
    StoreBusyError,
    StoreError,
)
from ..stats import Counters
from . import publish as quota
from .backend import SegmentBackend
from .catalogue import Catalogue, SegmentRow
from .cipher import Plain
from .digest import Group
from .faults import Faults, figure_of, is_of_the_process, out_of_descriptors
from .format import SegmentHeader, lay_out
from .index import Index
from .process import OpenSegments
from .publish import Publisher, Written
from .segment import SegmentReader, read_head
from .sidecars import Sidecars

_HIDDEN_SECONDS = 60.0
"""Seconds for which a segment is not used after a read error."""


class SegmentStore:
    """Segments in one place, shared by any number of processes.

    Args:
        backend: the place; closed with the store.
        verify: whether to compare the checksum of every block that is read.
        limits: quota, watermarks and free-space floor.
        counters: counts faults and traffic.
        cipher: encrypts the blocks, if the store has a key. Segments written with another key, or without one, are
            neither used nor changed.
    """

    def __init__(
        self,
        backend: SegmentBackend,
        *,
        verify: bool,
        limits: quota.Limits,
        counters: Counters,
        cipher: Plain | None = None,
    ) -> None:
        self.backend, self.place = backend, backend.place
        self.limits, self.counters, self.cipher = limits, counters, cipher or Plain()
        self.readers: OpenSegments[SegmentReader] = OpenSegments()
        self.on_gone: list[Callable[[Collection[str]], None]] = []
        """Callbacks that receive the ids of deleted or replaced segments."""
        self._verify = verify
        self._faults = Faults(counters)
        self._hidden: dict[str, float] = {}  # segments that failed in this process, and until when they are not used
        self.index = Index(backend, self._faults)
        self._removed: deque[str] = deque(maxlen=1024)  # segments that this process deleted recently
        self._publisher = Publisher(backend, self.index, self.cipher, self.make_room, self.is_hidden)
        self.sidecars = Sidecars(backend, self.cipher, self._faults, self._publisher.reserved)
        self._keys = self.index.keys() - {""}  # of the segments present when the store was opened

    def path(self, segment_id: str) -> Path:
        """Return the path of a segment's file, for tools that inspect it."""
        return Path(self.backend.where(segment_id))

    def warn(self, topic: str, message: str) -> None:
        """Log a warning the first time that its topic occurs; later occurrences are only counted."""
        self._faults.warn(topic, message)

    # --- finding and reading

    def find(self, prefix_hashes: Sequence[bytes]) -> list[SegmentRow]:
        """Return the usable segments whose chain begins with one of `prefix_hashes`; none if the catalogue fails."""
        return [row for row in self.index.beginning_with(prefix_hashes) if not self.is_hidden(row.id)]

    def is_hidden(self, segment_id: str) -> bool:
        """Return whether this process recently failed to read the segment."""
        return self._hidden.get(segment_id, 0.0) > time.monotonic()

    def reader(self, segment_id: str) -> SegmentReader | None:
        """Return an open segment, or None (counted and logged) if it cannot be used."""
        reader = self.readers.get(segment_id)
        if reader is not None and not reader.is_current():
            self.let_go([segment_id])
            reader = None
        if reader is None:
            try:
                reader = self._open(segment_id)
            except (FormatError, OSError, MemoryError) as error:
                self.report(segment_id, error)
                return None
            self.readers.keep(reader)
        return reader

    def found(self, row: SegmentRow) -> SegmentReader | None:
        """Open the segment of a row. Returns None (counted) if it cannot be used or does not match the row.

        The segment file is authoritative: a wrong row would serve the KV of other tokens. It is read again.
        """
        reader = self.reader(row.id)
        if reader is None or row.fits(reader.header, reader.chain):
            return reader
        message = f"the catalogue entry of segment {row.id} differs from its file, and is replaced"
        self._faults.note("catalogue_errors", "row", message)
        self.index.adopt([row.id])
        return None

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

        A segment without an intact beginning is deleted, so that it can be stored again. A read error may be temporary,
        so it hides the segment from this process only, and for a limited time. Errors that are not caused by the file
        have no consequence for it.
        """
        if isinstance(error, FileNotFoundError) and segment_id in self._removed:
            return  # it was deleted, or replaced, since it was looked up
        if not isinstance(error, OSError | FormatError | IntegrityError | RestoreError):
            self.warn(f"{type(error).__name__} {error}", f"segment {segment_id} was not restored: {error!r}")
            return
        figure = figure_of(error)
        self._faults.note(
            figure, segment_id, f"segment {segment_id} cannot be used: {error}; its tokens are computed again"
        )
        self.readers.drop(segment_id)
        if figure == "verification_failures":
            self._judge(segment_id, error)
        elif isinstance(error, FileNotFoundError):
            if self.backend.is_reachable():
                self.let_go([segment_id])
                self.index.remove([segment_id])
        elif not is_of_the_process(error):
            self._hidden[segment_id] = time.monotonic() + _HIDDEN_SECONDS if isinstance(error, OSError) else inf

    def _judge(self, segment_id: str, error: BaseException) -> None:
        """Limit or delete a damaged segment, unless another process has replaced it by an intact one."""
        valid_hashes = error.valid_hashes if isinstance(error, IntegrityError) else 0
        try:
            if not self._is_damaged(segment_id, error):
                return
            if valid_hashes:
                self.index.ask(lambda c: c.limit(segment_id, valid_hashes), None)
                return
            self._hidden[segment_id] = inf
            if self.backend.writable:
                self.remove([segment_id])
                self._hidden.pop(segment_id, None)
        except OSError:  # a disk that has become read-only, or no descriptor is left to look
            self._hidden.setdefault(segment_id, time.monotonic() + _HIDDEN_SECONDS)

    def _is_damaged(self, segment_id: str, error: BaseException) -> bool:
        """Return whether the stored segment is still the one that was found damaged."""
        if isinstance(error, IntegrityError):
            if error.version is None:
                return True
            entry = self.backend.find(segment_id)
            return entry is not None and entry.version == error.version
        try:
            return read_head(partial(self.backend.head, segment_id), self.cipher).header.id != segment_id
        except NotOursError:
            return False
        except FormatError:
            return True

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
        written: Written = lambda block_group, blocks, content: None,
    ) -> bool:
        """Write a segment and make it visible atomically.

        Args:
            header: header without its sections.
            prefix_hashes: prefix hashes of the segment.
            block_groups: blocks of each KV cache group, `[chunks, block_bytes]`; each is consumed before the next.
            ancestors: segments that it continues. Their use is recorded with it, so that it is evicted before them.
            written: callback for each KV cache group that was written. The segment may still be dropped.

        Returns:
            Whether the segment is stored now. A full disk, the quota, an unwritable folder or an unavailable lock drop
            the write, which is counted and logged once.
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
            nbytes, replaced = self._publisher.write(header, prefix_hashes, block_groups, written)
        except FileExistsError:
            self.counters.add("duplicate_writes")
            if self.index.row(header.id) is None:
                self.index.adopt([header.id])
        except (OSError, NotOursError, QuotaError, StoreBusyError, ModelChangedError) as error:
            message = f"a segment of {header.file_bytes} bytes was not stored: {error}"
            self._faults.note("dropped_writes", type(error).__name__, message)
            if out_of_descriptors(error):
                self.readers.close_others()  # so that the next segment can be stored
            return False
        else:
            self.counters.add("segments_written")
            self.counters.add("bytes_written", nbytes)
            if replaced:
                self.sidecars.remove([header.id])
                self.let_go([header.id])
            self._hidden.pop(header.id, None)
            with suppress(ValueError):
                self._removed.remove(header.id)
        self.index.touch([*ancestors, header.id])
        return True

    def sync(self) -> None:
        """Make what was published durable. Raises StoreError."""
        try:
            self.backend.sync()
        except OSError as error:
            raise StoreError(
                f"{self.place} cannot be synchronized to disk ({error.strerror}); check the disk and call flush() again"
            ) from error

    # --- space

    def used_bytes(self) -> int:
        """Return the bytes that the store takes on disk (segments, sidecars, catalogue), plus catalogue growth.

        Raises:
            OSError: the size cannot be determined.
        """
        written = self.backend.usage()  # first: a file that is published meanwhile must count twice rather than never
        segment_bytes = self.index.listed_bytes()
        if segment_bytes is None:  # no shared catalogue, or a new one, which may lack segments of other processes
            total = sum(map(self.nbytes_of, self.backend.names()))
        else:
            total = segment_bytes + sum(map(self.nbytes_of, self.index.unlisted))
        return total + quota.CATALOGUE_GROWTH + written + sum(self.backend.sidecars().values())

    def nbytes_of(self, segment_id: str) -> int:
        """Return the bytes that a segment takes on disk; 0 if it is gone. Raises OSError."""
        stored = self.backend.find(segment_id)
        return 0 if stored is None else stored.nbytes

    def make_room(self, nbytes: int, spared: Collection[str] = ()) -> None:
        """Evict segments until `nbytes` more fit. The caller holds the backend's lock.

        Args:
            nbytes: bytes to be written.
            spared: ids of segments to keep, in addition to pinned ones.

        Raises:
            QuotaError: evicting all permitted segments would not free enough; then no segment is evicted.
            OSError: the sizes cannot be determined, or a segment cannot be deleted.
        """
        self.clean_up()
        self.forget_lost_readers()
        used = 0 if self.limits.quota is None else self.used_bytes()
        needed, desired = self.limits.shortfall(nbytes, used, self.backend.free())
        if desired <= 0:
            return
        swept = sum(self.sidecars.sweep().values())
        needed, desired = needed - swept, desired - swept
        candidates = self.victims(desired, spared)
        if sum(nbytes for _, nbytes in candidates) < needed:
            raise QuotaError(
                f"no room for {nbytes} bytes; raise disk_quota, lower free_space_floor, or free space on the disk"
            )
        self.evict(candidates)

    def victims(self, nbytes: int, but: Collection[str] = ()) -> list[tuple[str, int]]:
        """Select the segments to evict until `nbytes` are freed, except pinned ones and `but`.

        Returns:
            Ids, and bytes including sidecars.
        """
        sidecars = self.sidecars.by_segment()
        uses = [
            (name, size + sidecars.get(name, 0), expires)
            for name, size, expires in self.index.ask(Catalogue.by_use, [])
        ]
        return quota.victims(uses, nbytes, self.backend.pinned().union(but), time.time())

    def evict(self, segments: list[tuple[str, int]]) -> None:
        """Delete segments as returned by `victims`. Raises OSError if one could not be deleted."""
        removed, failed = self._remove([segment_id for segment_id, _ in segments])
        self.counters.add("evicted_segments", removed)
        if failed is not None:
            raise failed

    def clean_up(self, dry_run: bool = False) -> dict[str, int]:
        """Delete unfinished files of dead processes. The caller holds the backend's lock.

        Returns:
            Bytes of each deleted file, or with `dry_run` of each file to be deleted.
        """
        removed, published = self.backend.clean_up(dry_run)
        if published and not dry_run:  # killed after the file was published, and before its row was added
            self.index.scan()
        return removed

    def check_writable(self) -> None:
        """Raise StoreError if the store cannot be written."""
        if not self.backend.writable:
            raise StoreError(f"{self.place} is not writable, so nothing in it can be changed; check its permissions")

    # --- deletion

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments and their sidecars. Returns the number of deleted segments.

        Raises:
            StoreError: the store is not writable. OSError: a segment could not be deleted; the others were.
        """
        self.check_writable()
        removed, failed = self._remove(list(ids))
        if failed is not None:
            raise failed
        return removed

    def _remove(self, ids: Collection[str]) -> tuple[int, OSError | None]:
        removed_ids, removed, failed = [], 0, None
        self._removed.extend(ids)
        self.sidecars.remove(ids)  # first, so that no sidecar remains without its segment
        for segment_id in ids:
            try:
                removed += self.backend.delete(segment_id)
                removed_ids.append(segment_id)
                self.backend.pin(segment_id, False)
            except OSError as error:
                failed = error
        self.let_go(removed_ids)
        self.index.remove(removed_ids)
        return removed, failed

    def let_go(self, ids: Collection[str]) -> None:
        """Drop everything that this process holds of deleted or replaced segments."""
        for segment_id in ids:
            if (reader := self.readers.get(segment_id)) is not None:
                reader.gone = True
                self.readers.drop(segment_id)
        for tell in self.on_gone:
            tell(ids)

    def forget_lost_readers(self) -> None:
        """Close segments that other processes deleted or replaced: an open file still takes disk space."""
        opened = [(segment_id, self.readers.get(segment_id)) for segment_id in self.readers]
        lost = [name for name, reader in opened if reader is not None and not reader.is_current()]
        if lost:
            self.let_go(lost)

    def forget_deleted(self, ids: Iterable[str]) -> None:
        """Drop the given segments that other processes deleted."""
        with suppress(OSError):  # an error proves nothing
            if lost := [segment_id for segment_id in ids if self.backend.find(segment_id) is None]:
                self.let_go(lost)

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Pin segments, which protects them from eviction, or unpin them (`pinned=False`).

        Raises:
            ConfigError: an id to pin is unknown. StoreError: the store is not writable.
        """
        self.check_writable()
        ids = list(ids)
        unknown = set(ids) - self.index.ask(Catalogue.ids, set(ids))
        if pinned and unknown:
            raise ConfigError(
                f"segment {min(map(str, unknown))!r} does not exist; store.segments() lists all segments, and "
                "store.precompute(model, input_ids, pin=True) pins a prompt"
            )
        for segment_id in ids:
            self.backend.pin(segment_id, pinned)

    def close(self) -> None:
        self.readers.clear()
        self.index.close()
        self.backend.close()
