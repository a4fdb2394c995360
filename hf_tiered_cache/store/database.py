"""The catalogue's connection: one for each process, which finds its way back when the file was replaced.

POSIX drops all locks that a process holds on a file when it closes any descriptor of it. So while the database is open,
nothing in the process may open its files but SQLite; they are only looked at with `stat`.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from stat import S_ISREG
from typing import TypeVar

from .kinds import CATALOGUE, CATALOGUE_LOCK, CATALOGUE_LOG, CATALOGUE_NAME, DATABASE_FILES, LOCK_SUFFIX
from .process import has_database, release_database, shared_database
from .root import StoreRoot

logger = logging.getLogger("hf_tiered_cache")

_BUSY_SECONDS = 10.0
_BUSY_SECONDS_AFTERWARDS = 0.2
"""How long to wait for a lock that another process does not let go of: the first time, and until it was had again."""
_CHECKED_BYTES = 32 << 20  # databases up to this are checked when opened; of larger ones a failing query must tell
_WAL_PAGES = 32  # small, since the log counts against the quota
_LOG_BYTES = _WAL_PAGES * 4096
_MOST_TRIES = 4
_T = TypeVar("_T")
_SetUp = Callable[[sqlite3.Connection], None]
_File = tuple[int, int] | None


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite found the file to be wrong, rather than locked, full, or not to be read now."""
    return type(error) is sqlite3.DatabaseError or str(error).startswith("no such table")


class Database:
    """A connection that is used by any number of stores and threads of one process.

    Args:
        files: the folder that it is in, or None for a database in memory.
        set_up: makes the tables, if they are not there.

    Raises:
        sqlite3.Error: it cannot be opened.
    """

    def __init__(self, files: StoreRoot | None, set_up: _SetUp) -> None:
        self._files = files
        self._set_up = set_up
        self._pid = os.getpid()
        self._lock = threading.RLock()  # finalizers enter it too
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[_File, _File] | None = None
        self._waits = True
        self._closed = False
        self.users = 0
        self.generation = 0
        """How often it was opened anew; rows that this process wrote may be missing since."""
        self._open()

    @classmethod
    def shared(cls, files: StoreRoot, set_up: _SetUp) -> Database:
        """Return the process's connection to the catalogue of a folder, to be given back with `release`."""
        return shared_database(files.where(CATALOGUE, CATALOGUE_NAME), lambda: cls(files.again(), set_up))

    def release(self) -> None:
        release_database(self)

    def run(self, action: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `action`, and again if the file turns out to have been replaced under it. It must bear that.

        Raises:
            sqlite3.Error: it failed.
        """
        if os.getpid() != self._pid:
            raise sqlite3.OperationalError("it was opened before this process was forked")
        with self._lock:
            for _ in range(_MOST_TRIES):
                if self._closed:
                    raise sqlite3.ProgrammingError("it is closed")
                db = self._db or self._open()
                try:
                    result = action(db)
                    self._wait_for_locks(True)
                except sqlite3.Error as error:
                    if self._in_place():
                        if "locked" in str(error):
                            self._wait_for_locks(False)
                        raise
                else:
                    if self._in_place():
                        return result
                self._open()
            raise sqlite3.OperationalError("it is replaced again and again")

    def is_log_long(self) -> bool:
        """Whether the log grows because somebody is still reading an old state: what need not be written can wait."""
        with suppress(OSError):
            log = None if self._files is None else self._files.find(CATALOGUE_LOG, f"{CATALOGUE_NAME}-wal")
            return log is not None and log.st_size > 3 * _LOG_BYTES // 2
        return False

    def rebuild(self, generation: int) -> None:
        """Begin anew with an empty database, unless that was done since `generation`."""
        if os.getpid() != self._pid:
            raise sqlite3.OperationalError("it was opened before this process was forked")
        with self._lock:
            if not self._closed and self.generation == generation:
                self._open(discard=True)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._db is not None and os.getpid() == self._pid:
                self._db.close()
                self._db = None
            if self._files is not None:
                self._files.close()

    # --- opening

    def _open(self, discard: bool = False) -> sqlite3.Connection:
        """Connect, for the first time or anew. SQLite deletes no file that has taken the place of the old one."""
        if self._db is not None:
            self.generation += 1
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        if self._files is None:
            self._db = self._connect(":memory:")
            return self._db
        try:
            with self._files.locked(CATALOGUE_LOCK, f"{CATALOGUE_NAME}{LOCK_SUFFIX}", _BUSY_SECONDS):
                self._check(self._files)
                if discard or self._log_is_lost():
                    self._discard(self._files)
                try:
                    self._db = self._connect_file(self._files)
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    logger.warning("the catalogue of %s is damaged (%s); rebuilding it", self._files.path, error)
                    self._discard(self._files)
                    self._db = self._connect_file(self._files)
                self._identity = self._identify()
                return self._db
        except OSError as error:
            raise sqlite3.OperationalError(f"it cannot be opened: {error}") from error

    def _check(self, files: StoreRoot) -> None:
        """Make sure that SQLite gets the library's own files alone. It would follow a link, and overwrite any content.

        A file that was opened here before is own, whatever became of its content. One that has a second name, as a
        backup of hard links gives it, is left to that: a new catalogue is begun.

        Raises:
            sqlite3.OperationalError: a file is not own.
        """
        opened = None if self._identity is None else self._identity[0]
        linked = False
        for name, kind in DATABASE_FILES.items():
            status = files.find(kind, name)
            if status is None:
                continue
            is_opened = opened is not None and _identity_of(files.find(CATALOGUE, CATALOGUE_NAME)) == opened
            if not S_ISREG(status.st_mode) or not (is_opened or files.is_own(kind, name)):
                raise sqlite3.OperationalError(
                    f"{files.where(kind, name)} was not written by this library; move it elsewhere"
                )
            linked |= status.st_nlink > 1
        if linked:
            self._discard(files)

    def _connect_file(self, files: StoreRoot) -> sqlite3.Connection:
        path = files.where(CATALOGUE, CATALOGUE_NAME)
        if files.find(CATALOGUE, CATALOGUE_NAME) is None:  # for its owner only; SQLite gives the others the same mode
            files.make_empty(CATALOGUE, CATALOGUE_NAME)
        made = files.find(CATALOGUE, CATALOGUE_NAME)
        db = self._connect(str(path))
        if made is None or not os.path.samestat(made, os.stat(path, follow_symlinks=False)):  # SQLite opens by path
            db.close()
            raise sqlite3.OperationalError(f"{path} was replaced")
        return db

    def _connect(self, path: str) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        self._waits = True
        try:
            size = os.stat(path).st_size if self._files is not None else 0
            if self._files is not None and not size:  # the first page, by which a catalogue is recognised, comes first
                db.execute("PRAGMA synchronous=OFF")
                self._set_up(db)
            _enter_wal_mode(db)
            if 0 < size <= _CHECKED_BYTES and db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
            self._set_up(db)
        except BaseException:
            db.close()
            raise
        return db

    def _discard(self, files: StoreRoot) -> None:
        """Delete the files of the database, which `_check` has seen to be own."""
        for name, kind in DATABASE_FILES.items():
            files.delete(kind, name, is_checked=True)

    # --- what stands at the path

    def _identify(self) -> tuple[_File, _File]:
        """Device and inode of the database and its log."""
        assert self._files is not None
        files = self._files.find(CATALOGUE, CATALOGUE_NAME), self._files.find(CATALOGUE_LOG, f"{CATALOGUE_NAME}-wal")
        return _identity_of(files[0]), _identity_of(files[1])

    def _in_place(self) -> bool:
        """Whether the files that are open are still those that others open."""
        if self._files is None or self._identity is None:
            return True
        with suppress(OSError):  # which says nothing
            now = self._identify()
            if self._identity[1] is None:  # the log had not been begun
                self._identity = self._identity[0], now[1]
            return now == self._identity
        return True

    def _log_is_lost(self) -> bool:
        """Whether the log alone was deleted or replaced: then the database is not to be trusted any more."""
        if self._identity is None or self._identity[1] is None:
            return False
        database, log = self._identify()
        return database == self._identity[0] and log != self._identity[1]

    def _wait_for_locks(self, waits: bool) -> None:
        if waits != self._waits and self._db is not None:
            seconds = _BUSY_SECONDS if waits else min(_BUSY_SECONDS, _BUSY_SECONDS_AFTERWARDS)
            self._db.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")
            self._waits = waits


def _identity_of(status: os.stat_result | None) -> _File:
    return None if status is None else (status.st_dev, status.st_ino)


def _enter_wal_mode(db: sqlite3.Connection) -> None:
    """Two processes that open a new database at once can see `locked` here, without SQLite's own waiting."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
            db.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def connect_read_only(files: StoreRoot, version: int) -> sqlite3.Connection:
    """Connect without making or mending anything. Raises sqlite3.Error if the database is not of this version."""
    if not has_database(files.where(CATALOGUE, CATALOGUE_NAME)):
        for name, kind in DATABASE_FILES.items():
            if files.find(kind, name) is not None and not files.is_own(kind, name):
                raise sqlite3.DatabaseError(f"{files.where(kind, name)} was not written by this library")
    db = sqlite3.connect(
        f"{files.where(CATALOGUE, CATALOGUE_NAME).as_uri()}?mode=ro",
        uri=True,
        timeout=_BUSY_SECONDS,
        check_same_thread=False,
        isolation_level=None,
    )
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] != version:
            raise sqlite3.DatabaseError("the catalogue is of another version")
    except BaseException:
        db.close()
        raise
    return db
