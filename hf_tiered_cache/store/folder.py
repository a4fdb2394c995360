"""The store's folder and its catalogue, kept in line with each other whatever fails."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..errors import FormatError, NotOursError, StoreError
from ..stats import Counters
from .catalogue import Catalogue, SegmentRow
from .database import is_damage
from .segment import read_head

logger = logging.getLogger("hf_tiered_cache")

SUFFIX = ".kv"
_MENDING_SECONDS = 10.0
"""How long to do without a catalogue that is damaged again, or cannot be opened, before it is tried again."""
_SCANNING_SECONDS = 1.0
"""How long to leave files alone that could not be read or entered."""
_AT_ONCE = 256
"""Files that are entered in one transaction."""
_FAULTS = (sqlite3.Error, OverflowError, MemoryError)
_T = TypeVar("_T")
_Default = TypeVar("_Default")
_Row = tuple[SegmentRow, Mapping[str, str]]


class Folder:
    """The files of a store, and the catalogue that says what they are.

    Args:
        root: the folder; made, for its owner only, if missing.
        counters: where faults are counted.

    Raises:
        StoreError: `root` is not a folder and cannot become one.
    """

    def __init__(self, root: Path, counters: Counters) -> None:
        self.root = root = Path(root).resolve()  # whatever the working directory becomes
        self.segments_dir, self.tmp_dir, self.pins_dir = root / "segments", root / "tmp", root / "pins"
        self._lock_path = root / "lock"
        self.counters = counters
        self.unlisted: list[Path] = []
        """Files among the segments that are none (damaged, or of a newer format), or could not be read yet."""
        self._unread = False  # whether some of these may be whole
        self._untold = False  # and the catalogue could not be told
        self._scanned = 0.0
        self._warned: set[str] = set()
        self._mending = threading.Lock()
        self._mended = self._opened = -_MENDING_SECONDS
        self._in_line = 0  # the generation of the catalogue that the files were compared with
        self.writable = self._make_folders()
        self.catalogue = self._open_catalogue()
        try:
            with self._mending:
                self.scan()
        except BaseException:  # Ctrl-C: nobody is going to close it
            self.catalogue.close()
            raise

    def _make_folders(self) -> bool:
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is a file; give KVStore the path of a folder")
        try:
            for folder in (self.root, self.segments_dir, self.tmp_dir, self.pins_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            return True
        except OSError as error:
            if not self.root.is_dir():
                raise StoreError(f"{self.root} cannot be made ({error.strerror}); choose another folder") from error
            self.warn("unwritable", f"{self.root} cannot be written ({error.strerror}): nothing new is stored")
            return False

    def _open_catalogue(self) -> Catalogue:
        if self.writable:
            self._opened = time.monotonic()
            try:
                return Catalogue(self.root / "catalogue.sqlite")
            except (sqlite3.Error, OSError) as error:
                self.counters.add("catalogue_errors")
                self.warn("catalogue", f"the catalogue cannot be opened ({error}): nothing new is stored until it can")
        return Catalogue(None)

    def shares_catalogue(self) -> bool:
        """Whether others see what is entered. A catalogue that could not be opened is tried again now and then."""
        if self.catalogue.path is None and self.writable and time.monotonic() - self._opened >= _MENDING_SECONDS:
            found = self._open_catalogue()
            if found.path is not None:
                self.catalogue = found
                self._compare()
        return self.catalogue.path is not None

    def listed_bytes(self) -> int | None:
        """Bytes on disk of the segments that the catalogue lists; None where it may lack some, as a new one does."""
        before = self._in_line
        listed = self.ask(Catalogue.total_bytes, None)
        whole = self.catalogue.path is not None and before == self._in_line == self.catalogue.generation
        return listed if whole else None

    # --- files and rows

    def path(self, segment_id: str) -> Path:
        return self.segments_dir / f"{segment_id}{SUFFIX}"

    def segment_files(self) -> list[Path]:
        """All files that are named like segments. Raises OSError: a list that is not whole is none."""
        with os.scandir(self.segments_dir) as entries:
            return [Path(entry.path) for entry in entries if entry.name.endswith(SUFFIX)]

    def scan(self) -> None:
        """Bring the catalogue in line with the files: read headers it lacks, drop rows whose file is gone."""
        generation = self.catalogue.generation
        unknown: set[str] | None = None
        known = self.ask(Catalogue.ids, unknown)
        self._untold = known is None
        try:
            present = {path.stem: path for path in self.segment_files()}
            gone = [] if known is None else [i for i in known - present.keys() if not os.path.lexists(self.path(i))]
        except OSError as error:
            self.counters.add("read_errors")
            self.warn("listing", f"{self.segments_dir} cannot be listed ({error.strerror}); what was known of it stays")
            return
        if gone:
            self.ask(lambda c: c.remove(gone), None)
        self._unread, self._scanned = known is None, time.monotonic()
        unknown_files = [present[i] for i in present.keys() - (known or set())]
        self.unlisted = unknown_files if self._untold else self._adopt(unknown_files)
        self.ask(Catalogue.set_right_clocks, None)
        self._in_line = generation

    def catch_up(self) -> None:
        """Try again what could not be read, or not be entered."""
        if self._unread and time.monotonic() - self._scanned >= _SCANNING_SECONDS:
            with self._mending:
                self.scan()

    def _adopt(self, paths: Sequence[Path]) -> list[Path]:
        """Enter files that the catalogue does not know. Returns those that are no segments, or could not be entered."""
        left: list[Path] = []
        for first in range(0, len(paths), _AT_ONCE):
            some = {path: self._read(path) for path in paths[first : first + _AT_ONCE]}
            rows = [row for row in some.values() if row is not None]

            def enter(catalogue: Catalogue, rows: list[_Row] = rows) -> bool:
                catalogue.add_all(rows)
                return True

            if rows and not self.ask(enter, False):
                self._unread = self._untold = True
                return left + list(paths[first:])
            left += [path for path, row in some.items() if row is None]
        return [path for path in left if os.path.lexists(path)]

    def _read(self, path: Path) -> _Row | None:
        """The row of a file, or None (counted, and said) if it is no segment that can be read."""
        try:
            header, chain, _, nbytes, *_ = read_head(path)
            if header.id != path.stem:
                raise FormatError(f"{path.name} calls itself {header.id}")
        except NotOursError as error:
            self.counters.add("newer_files")
            self.warn("newer", f"{path.name}: {error}")
        except FormatError as error:
            self.counters.add("damaged_files")
            self.warn("damaged", f"{path.name} is no whole segment ({error}); `hf-tiered-cache gc` removes it")
        except FileNotFoundError:
            pass  # deleted meanwhile
        except (OSError, MemoryError) as error:
            self.counters.add("read_errors")
            self.warn("unreadable", f"{path.name} cannot be read ({error})")
            self._unread = True
        else:
            return SegmentRow.of(header, chain, nbytes), header.model
        return None

    # --- faults

    def ask(self, action: Callable[[Catalogue], _T], default: _Default) -> _T | _Default:
        """Run `action` on the catalogue; `default` if that fails. A damaged or lost one is rebuilt, once, on the way.

        SQLite's faults never come out of this, nor does it enter itself: what a scan asks is asked without a scan.
        """
        answer: _T | _Default = default
        for again in (True, False):
            catalogue = self.catalogue
            generation = catalogue.generation
            try:
                answer = action(catalogue)
                if catalogue.generation == self._in_line or not self._compare():
                    break
            except _FAULTS as error:
                self.counters.add("catalogue_errors")
                damaged = isinstance(error, sqlite3.Error) and is_damage(error)
                self.warn("catalogue", f"the catalogue {'is damaged' if damaged else 'failed'} ({error})")
                if not (again and damaged and self._rebuild(catalogue, generation)):
                    break
        return answer

    def _compare(self) -> bool:
        """The catalogue is another one than before: enter the files. Returns whether this thread has done it."""
        if not self._mending.acquire(blocking=False):
            return False
        try:
            self.scan()
        finally:
            self._mending.release()
        return True

    def _rebuild(self, catalogue: Catalogue, generation: int) -> bool:
        """The same for one that is damaged."""
        if time.monotonic() - self._mended < _MENDING_SECONDS or not self._mending.acquire(blocking=False):
            return False
        try:
            self._mended = time.monotonic()
            catalogue.rebuild(generation)
            self.scan()
        except sqlite3.Error:
            return False
        finally:
            self._mending.release()
        return True

    def warn(self, topic: str, message: str) -> None:
        """Say it the first time; later occurrences are only counted."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s", message)
