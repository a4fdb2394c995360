"""Index of the store: the catalogue of stored segments, kept consistent with the backend despite failures."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import Concatenate, ParamSpec, TypeVar

from ..errors import FormatError, NotOursError, StoreError, reason_of
from .backend import SegmentBackend
from .catalogue import Catalogue, SegmentRow
from .database import is_damage
from .faults import Counters
from .kinds import SEGMENT
from .segment import read_head

_REPAIR_SECONDS = 10.0
"""Seconds between two attempts to rebuild a damaged catalogue, or to open one that could not be opened."""
_SCANNING_SECONDS = 1.0
"""Seconds before segments that could not be read or added are tried again; twice as long after each further failure."""
_MOST_SCANNING_SECONDS = 60.0
_LOOKING_SECONDS = 1.0
"""Seconds before an index of this process alone is compared again with a folder that others have changed."""
_UNSETTLED_NS = 1_000_000_000
"""Nanoseconds for which a folder may change again with the same time of change: clocks of files are coarse."""
_AT_ONCE = 256  # segments that are added in one transaction
_FAULTS = (sqlite3.Error, OverflowError, MemoryError)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Default = TypeVar("_Default")
_Row = tuple[SegmentRow, Mapping[str, str]]


def _query(
    query: Callable[Concatenate[Catalogue, _P], _T], default: Callable[[], _Default]
) -> Callable[Concatenate[Index, _P], _T | _Default]:
    """Return a method of the index that runs a query of the catalogue (see `Index._ask`)."""

    def ask(index: Index, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | _Default:
        return index._ask(methodcaller(query.__name__, *args, **kwargs), default())

    return ask


class Index:
    """Index of the stored segments and their metadata."""

    def __init__(self, backend: SegmentBackend, counters: Counters) -> None:
        self._backend, self._note = backend, counters.note
        self.unlisted: list[str] = []
        """Names in the backend without a catalogue row: damaged, of another format, or not readable yet."""
        self.unreadable: dict[str, str] = {}
        """Segments without a row that could not be read, and the reasons."""
        self._unread = ""  # why other stored segments may have no row
        self._is_complete = False  # whether the last scan that ended has added all that could be read
        self._failure = ""  # why the catalogue failed last, until the next scan
        self._scanned, self._failed_scans = 0.0, 0  # time of the last scan, and consecutive scans that were incomplete
        self._repair_lock = threading.Lock()
        self._repaired_at = self._opened = -_REPAIR_SECONDS
        self._scanned_generation = 0  # the catalogue generation that was last synchronized with the backend
        self._listed_at: int | None = None  # result of `_changed_at` before the last scan
        self._closed = False
        self.catalogue = self._open_catalogue()
        try:
            with self._repair_lock:
                self.scan()
        except BaseException:  # Ctrl-C: the caller gets no object to close
            self.close()
            raise

    def _open_catalogue(self) -> Catalogue:
        if self._backend.writable and self._backend.catalogue is not None:
            self._opened = time.monotonic()
            try:
                return Catalogue.shared(self._backend.catalogue)
            except (sqlite3.Error, OSError) as error:
                self._note(
                    "catalogue_errors",
                    "catalogue",
                    f"the catalogue cannot be opened ({reason_of(error)}), and no new KV is stored until it can be",
                )
        return Catalogue(None)

    def is_shared(self) -> bool:
        """Return whether other processes see added segments. Tries again to open a catalogue that was not opened."""
        if self._backend.catalogue is None:
            return True  # other processes list the backend themselves
        should_reopen = not self.catalogue.is_shared and self._backend.writable
        if should_reopen and time.monotonic() - self._opened >= _REPAIR_SECONDS:
            new_catalogue = self._open_catalogue()
            if new_catalogue.is_shared:
                self.catalogue = new_catalogue
                self._compare()
        return self.catalogue.is_shared

    def listed_bytes(self) -> int | None:
        """Return the bytes on disk of all listed segments, or None if the catalogue may be incomplete, e.g. new."""
        before = self._scanned_generation
        total = self._total_bytes()
        is_complete = self.catalogue.is_shared and before == self._scanned_generation == self.catalogue.generation
        return total if is_complete else None

    def close(self) -> None:
        """Release the catalogue. From now on it is not asked, though other stores may use it."""
        if not self._closed:
            self._closed = True
            self.catalogue.release()

    # --- queries, as in `Catalogue`; they return a default, such as None, if the catalogue fails

    row = _query(Catalogue.get, lambda: None)
    beginning_with = _query(Catalogue.beginning_with, list[SegmentRow])
    passages = _query(Catalogue.passages, lambda: None)
    models = _query(Catalogue.models, lambda: None)
    keys = _query(Catalogue.keys, set[str])
    provenances = _query(Catalogue.provenances, list[str])
    scores = _query(Catalogue.scores, list[tuple[str, int, bytes]])
    keep_scores = _query(Catalogue.keep_scores, lambda: None)
    add = _query(Catalogue.add, lambda: False)
    live = _query(Catalogue.live, lambda: None)
    ids = _query(Catalogue.ids, lambda: None)
    by_use = _query(Catalogue.by_use, list[tuple[str, int, float | None]])
    counts = _query(Catalogue.counts, lambda: None)
    set_sizes = _query(Catalogue.set_sizes, lambda: None)
    limit = _query(Catalogue.limit, lambda: None)
    _all = _query(Catalogue.all, lambda: None)
    _total_bytes = _query(Catalogue.total_bytes, lambda: None)
    _numbers = _query(Catalogue.numbers, dict[str, int])
    _remove = _query(Catalogue.remove, lambda: None)
    _touch = _query(Catalogue.touch, lambda: None)
    _set_right_clocks = _query(Catalogue.set_right_clocks, lambda: None)

    def rows(self) -> list[SegmentRow]:
        """Return all rows, most recently used last. Raises StoreError if the catalogue fails."""
        return self.known(self._all())

    def known(self, answer: _T | None) -> _T:
        """Return the answer of a query. Raises StoreError if it is None, since the catalogue failed."""
        if answer is None:
            raise StoreError(self._advice(f"the catalogue failed ({self._failure})"))
        return answer

    def complete_rows(self, but_unreadable: bool = False) -> list[SegmentRow]:
        """Return all rows, to delete what has none. Raises StoreError if a stored segment may lack one.

        With `but_unreadable`, those in `unreadable` may: the caller keeps what may belong to them.
        """
        for _ in range(2):  # again if the catalogue was replaced meanwhile
            if self._unread or self.unreadable or not self._is_complete:
                with self._repair_lock:
                    self.scan()
            before, rows = self._scanned_generation, self.rows()
            is_known = self._is_complete and not self._unread and (but_unreadable or not self.unreadable)
            if is_known and before == self._scanned_generation == self.catalogue.generation:
                return rows
        reasons = [self._unread, *self.unreadable.values(), "the catalogue is being filled"]
        raise StoreError(self._advice(next(filter(None, reasons))))

    def _advice(self, reason: str) -> str:
        place = self._backend.place
        return f"the segments of {place} are not all known: {reason}; check that they can be read, and try again"

    def touch(self, ids: Iterable[str]) -> None:
        """Record a use of the segments, for LRU eviction."""
        self._touch(ids)
        self.catch_up()

    # --- segments and rows

    def scan(self) -> None:
        """Synchronize the catalogue with the backend: add segments without a row, and remove rows without a segment."""
        self._failure = ""
        self._listed_at = self._changed_at()
        generation, listed = self.catalogue.generation, self.ids()
        try:
            present = set(self._backend.names())
        except OSError as error:
            self._unread, self._is_complete = f"they cannot be listed ({error.strerror})", False
            self._scanned = time.monotonic()
            self._note(
                "read_errors",
                "listing",
                f"the segments of {self._backend.place} cannot be listed ({error.strerror}); the segments known so "
                "far are kept",
            )
            return
        self._unread, self.unreadable, self._scanned = "", {}, time.monotonic()
        if listed is None:
            self._unread = f"the catalogue failed ({self._failure})"
            self.unlisted = list(present)
        else:
            self.remove(listed - present)
            self.unlisted = self.adopt(list(present - listed))
        self._set_right_clocks()
        self._scanned_generation, self._is_complete = generation, not self._unread

    def remove(self, ids: Iterable[str]) -> None:
        """Remove the rows of those segments that are not stored. Other threads may store them again meanwhile.

        Row and file are added together, so a missing file shows that a row is wrong only if the row was read before.
        """
        numbers = self._numbers(list(ids))
        self._remove({name: number for name, number in numbers.items() if not self.is_stored(name)})

    def is_stored(self, segment_id: str) -> bool:
        """Return whether the library's file of a segment exists, or may exist since it cannot be read."""
        try:
            return self._backend.is_own(segment_id)
        except OSError:
            return True

    @property
    def is_incomplete(self) -> bool:
        """True if stored segments could not be listed, read, added or looked up, so that they are not found."""
        return bool(self._unread or self.unreadable or self._failure)

    def catch_up(self) -> None:
        """Scan again if `is_incomplete`, and the last scan was long enough ago."""
        if not self.is_incomplete:
            self._failed_scans = 0
            return
        pause = min(_SCANNING_SECONDS * 2**self._failed_scans, _MOST_SCANNING_SECONDS)
        if time.monotonic() - self._scanned >= pause:
            with self._repair_lock:
                self.scan()
            self._failed_scans += 1

    def adopt(self, ids: Sequence[str]) -> list[str]:
        """Add segments that the catalogue does not list. Returns the ids that are invalid or could not be added."""
        rejected: list[str] = []
        for first in range(0, len(ids), _AT_ONCE):
            batch = {segment_id: self._read(segment_id) for segment_id in ids[first : first + _AT_ONCE]}
            rows = [row for row in batch.values() if row is not None]
            if rows and not self.add(rows):
                self._unread = f"the catalogue failed ({self._failure})"
                return rejected + list(ids[first:])
            rejected += [segment_id for segment_id, row in batch.items() if row is None]
        return list(filter(self.is_stored, rejected))

    def confirm(self, segment_id: str) -> None:
        """Make sure that a stored segment has a row, which agrees with its file."""
        with suppress(FormatError, OSError, MemoryError):
            head = read_head(self._backend.head, segment_id)
            if (row := self.row(segment_id)) is not None:
                if not row.fits(head.header, head.chain):
                    self.read_again(segment_id)
                return
        self.adopt([segment_id])

    def read_again(self, segment_id: str) -> None:
        """Count a row that differs from its file, and read it again from the file."""
        message = f"the catalogue entry of segment {segment_id} differs from its file, and is replaced"
        self._note("catalogue_errors", "row", message)
        self.adopt([segment_id])

    def _read(self, segment_id: str) -> _Row | None:
        """Read the row of a segment. Returns None, with a counter and a warning, if it is not readable."""
        place = self._backend.where(segment_id)
        try:
            head = read_head(self._backend.head, segment_id)
            if head.header.id != segment_id:
                raise FormatError(f"the header belongs to segment {head.header.id}")
        except NotOursError as error:
            self._note("newer_files", "newer", f"{place}: {error}")
        except FormatError as error:
            self._note(
                "damaged_files",
                "damaged",
                f"{place} is not a complete segment ({error}); run `hf-tiered-cache gc` for details",
            )
        except FileNotFoundError:
            pass  # deleted meanwhile
        except (OSError, MemoryError) as error:
            self.unreadable[segment_id] = f"{place} cannot be read ({reason_of(error, names_file=False)})"
            self._note("read_errors", "unreadable", self.unreadable[segment_id])
        else:
            return SegmentRow.of(head.header, head.chain, head.nbytes), head.header.model
        return None

    # --- faults

    def _ask(self, action: Callable[[Catalogue], _T], default: _Default) -> _T | _Default:
        """Run `action` on the catalogue, and return `default` if it fails.

        A damaged catalogue is rebuilt, and a replaced one is synchronized with the backend. Then `action` is run once
        more. SQLite errors are never raised. Calls made during a scan do not start another scan.
        """
        answer: _T | _Default = default
        for may_retry in () if self._closed else (True, False):
            catalogue = self.catalogue
            generation = catalogue.generation
            try:
                answer = action(catalogue)
                is_current = catalogue.generation == self._scanned_generation
                if (is_current and (catalogue.is_shared or not self._is_behind())) or not self._compare():
                    break
            except _FAULTS as error:
                damaged = isinstance(error, sqlite3.Error) and is_damage(error)
                self._failure = str(error)
                self._note(
                    "catalogue_errors", "catalogue", f"the catalogue {'is damaged' if damaged else 'failed'} ({error})"
                )
                if not (may_retry and damaged and self._rebuild(catalogue, generation)):
                    break
        return answer

    def _changed_at(self) -> int | None:
        """Return when the folder of segments was last changed; None if it may change unseen, 0 if it is unknown."""
        with suppress(OSError):
            if self._backend.catalogue is not None:
                changed_at = os.fstat(self._backend.catalogue.folder_descriptor(SEGMENT.folder)).st_mtime_ns
                return None if abs(time.time_ns() - changed_at) < _UNSETTLED_NS else changed_at
        return 0  # or cannot be read, so that looking again is of no use

    def _is_behind(self) -> bool:
        """Return whether others may have changed the folder since a scan, which only a shared catalogue shows."""
        if self._backend.catalogue is None:
            return False
        has_waited = time.monotonic() - self._scanned >= _LOOKING_SECONDS
        return has_waited and (self._listed_at is None or self._changed_at() != self._listed_at)

    def _compare(self) -> bool:
        """Scan after the catalogue was replaced, or the folder changed. Returns False if a scan is already running."""
        if not self._repair_lock.acquire(blocking=False):
            return False
        try:
            self.scan()
        finally:
            self._repair_lock.release()
        return True

    def _rebuild(self, catalogue: Catalogue, generation: int) -> bool:
        """Rebuild a damaged catalogue and scan. Returns False if that fails, or is under way, or was tried recently."""
        if time.monotonic() - self._repaired_at < _REPAIR_SECONDS or not self._repair_lock.acquire(blocking=False):
            return False
        try:
            self._repaired_at = time.monotonic()
            catalogue.rebuild(generation)
            self.scan()
        except sqlite3.Error:
            return False
        finally:
            self._repair_lock.release()
        return True
