"""Connection to the catalogue's database: one per process. It reconnects when the file was replaced.

POSIX drops all locks that a process holds on a file when it closes any descriptor of that file. While the database is
open, only SQLite may therefore open its files in this process. Other code may only call `stat` on them.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from stat import S_ISREG
from typing import Any, TypeVar

from ..errors import reason_of
from .faults import LOGGER
from .kinds import CATALOGUE, CATALOGUE_LOCK, CATALOGUE_LOG, CATALOGUE_NAME, DATABASE_FILES, LOCK_SUFFIX, not_own
from .root import StoreRoot
from .threads import PerProcess, fork_lock

SCHEMA_VERSION = 7
SQLITE_PATH_BYTES = 512 - len("-journal")
"""Maximum number of bytes in the path of a database: SQLite opens no longer path of its journal."""
_SCHEMA = (
    "DROP TABLE IF EXISTS segments",
    "DROP TABLE IF EXISTS scores",
    "DROP TABLE IF EXISTS models",
    "CREATE TABLE models (fingerprint TEXT PRIMARY KEY, facts TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE scores (segment TEXT, lane INTEGER, row BLOB NOT NULL, PRIMARY KEY (segment, lane)) WITHOUT ROWID",
    """CREATE TABLE segments (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
        fingerprint TEXT NOT NULL, provenance TEXT NOT NULL,
        first BLOB NOT NULL, usable_links INTEGER NOT NULL,
        tokens INTEGER NOT NULL, position INTEGER NOT NULL, nbytes INTEGER NOT NULL,
        created REAL NOT NULL, expires REAL, used REAL NOT NULL, uses INTEGER NOT NULL, label TEXT NOT NULL,
        key TEXT NOT NULL, scan BLOB NOT NULL,
        chain BLOB NOT NULL  -- last: it is long, and what asks for other columns does not read it then
    )""",
    "CREATE INDEX by_first ON segments(first)",
    "CREATE INDEX by_use ON segments(used, position DESC)",
    "CREATE INDEX scanned ON segments(number) WHERE length(scan) > 0",
    "CREATE INDEX by_kind ON segments(fingerprint, provenance, key)",
    f"PRAGMA user_version={SCHEMA_VERSION}",
)
_BUSY_SECONDS = 10.0
_BUSY_SECONDS_AFTERWARDS = 0.2
"""Seconds to wait for a lock: `_BUSY_SECONDS` at first, and this value from a timeout until the next success."""
_CHECKED_BYTES = 32 << 20  # databases up to this size are checked when opened; damage of larger ones fails a query
_WAL_PAGES = 32  # small, since the log counts against the quota
_LOG_BYTES = _WAL_PAGES * 4096
_MOST_TRIES = 4
_NO_DAMAGE = (
    *("locked", "locking protocol", "full", "readonly", "I/O error", "unable to open", "permission denied"),
    "interrupted",
)
"""Parts of SQLite's messages that say nothing about the content of the file."""
_T = TypeVar("_T")
_D = TypeVar("_D", bound="Database")
_File = Hashable | None


class UnavailableError(sqlite3.OperationalError):
    """Database that this process cannot use, whatever its content."""


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the content of the file causes an error, as every error does that has no other known cause."""
    if isinstance(error, UnavailableError | sqlite3.ProgrammingError):
        return False
    message = str(error).partition(" column ")[0]  # "Could not decode to UTF-8 column" precedes what is stored there
    return not any(part in message for part in _NO_DAMAGE)


class Database:
    """A connection that all stores and threads of a process share. Its methods raise sqlite3.Error.

    Without `files`, the folder, it is in memory. With `read_only`, nothing is created or repaired; faults are errors.
    """

    def __init__(self, files: StoreRoot | None, read_only: bool = False) -> None:
        self._files = None if read_only else files
        self._pid = os.getpid()
        self._lock = fork_lock()  # finalizers enter it too
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[_File, _File] | None = None
        self._waits = True
        self._closed = False
        self.is_shared = self._files is not None
        self.users = 0
        self.generation = 0
        """Number of times it was reopened. After each, rows that this process wrote may be missing."""
        with self._lock:
            if files is not None and read_only:
                self._db = _connect_read_only(files)
            else:
                self._open()

    @classmethod
    def shared(cls: type[_D], files: StoreRoot) -> _D:
        """Return the process's connection to the database of a folder. Its users call `release`."""
        folder = files.identity
        with _databases.locked() as databases:
            if folder not in databases:
                databases[folder] = cls(files.again())
            database: _D = databases[folder]
            database.users += 1
            return database

    def release(self) -> None:
        """Close the database, if it is not shared, or by its last user."""
        if not self.is_shared:
            return self.close()
        with _databases.locked() as databases:
            self.users -= 1
            own_folders = [folder for folder, database in databases.items() if database is self]
            if own_folders and not self.users:  # otherwise it is the parent's
                del databases[own_folders[0]]
                self.close()

    def run(self, action: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `action`, and again if the file was replaced meanwhile: it must be repeatable. Raises sqlite3.Error."""
        if os.getpid() != self._pid:
            raise UnavailableError("the database was opened before this process was forked")
        with self._lock:
            for _ in range(_MOST_TRIES):
                if self._closed:
                    raise UnavailableError("the database is closed")
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
            raise UnavailableError("the database is replaced repeatedly")

    def execute(self, query: str, *args: Any) -> list[Any]:
        """Run one statement, and return all rows of its result. See `run`."""
        return self.run(lambda db: db.execute(query, args).fetchall())

    def is_log_long(self) -> bool:
        """Return whether the log grows because another reader uses an old state. Optional writes can then wait."""
        with suppress(OSError):
            log = None if self._files is None else self._files.find(CATALOGUE_LOG, f"{CATALOGUE_NAME}-wal")
            return log is not None and log.st_size > 3 * _LOG_BYTES // 2
        return False

    def rebuild(self, generation: int) -> None:
        """Replace the database by an empty one, unless that was done since `generation`."""
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
        """Connect or reconnect. SQLite does not delete a file that has replaced the old one."""
        if self._db is not None:
            self.generation += 1
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None
        if self._files is None:
            self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            _set_up(self._db)
            return self._db
        try:
            with self._files.locked(CATALOGUE_LOCK, f"{CATALOGUE_NAME}{LOCK_SUFFIX}", _BUSY_SECONDS):
                self._check(self._files)
                if discard or self._log_is_lost():
                    self._discard(self._files)
                try:
                    self._db = self._connect(self._files)
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    LOGGER.warning("the catalogue of %s is damaged (%s); rebuilding it", self._files.path, error)
                    self._discard(self._files)
                    self._db = self._connect(self._files)
                self._identity = self._identify()
                return self._db
        except OSError as error:
            raise UnavailableError(f"the database cannot be opened: {reason_of(error)}") from error

    def _check(self, files: StoreRoot) -> None:
        """Make sure that SQLite opens only the library's own files. It would follow a link and overwrite any content.

        A file that was opened here before counts as own, whatever its content is now. If a file has a second name, such
        as from a hard-link backup, a new database is created. Raises UnavailableError.
        """
        opened_file = None if self._identity is None else self._identity[0]
        linked = False
        for name, kind in DATABASE_FILES.items():
            status = files.find(kind, name)
            if status is None:
                continue
            is_opened = opened_file is not None and self._identify()[0] == opened_file
            if not S_ISREG(status.st_mode) or not (is_opened or files.is_own(kind, name)):
                message = not_own(files.where(kind, name))
                # SQLite deletes a log without its database
                raise UnavailableError(f"{message}, with {name}-*" if kind is CATALOGUE else message)
            linked |= status.st_nlink > 1
        if linked:
            self._discard(files)

    def _connect(self, files: StoreRoot) -> sqlite3.Connection:
        if files.find(CATALOGUE, CATALOGUE_NAME) is None:  # with mode 0600, which SQLite gives its other files too
            files.make_empty(CATALOGUE, CATALOGUE_NAME)
        db = _open_file(files, "rw")
        self._waits = True
        try:
            size = os.stat(files.where(CATALOGUE, CATALOGUE_NAME)).st_size
            if not size:  # first write the first page: it identifies a catalogue
                db.execute("PRAGMA synchronous=OFF")
                _set_up(db)
            _enter_wal_mode(db)
            if 0 < size <= _CHECKED_BYTES and db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
            _set_up(db)
        except BaseException:
            db.close()
            raise
        return db

    def _discard(self, files: StoreRoot) -> None:
        """Delete the files of the database. `_check` has verified that they are the library's own."""
        for name, kind in DATABASE_FILES.items():
            files.delete(kind, name, is_checked=True)

    # --- state of the files

    def _identify(self) -> tuple[_File, _File]:
        """Return device and inode of the database, and of its log."""
        assert self._files is not None
        files = (CATALOGUE, CATALOGUE_NAME), (CATALOGUE_LOG, f"{CATALOGUE_NAME}-wal")
        database, log = (self._files.find(*file) for file in files)
        return database and (database.st_dev, database.st_ino), log and (log.st_dev, log.st_ino)

    def _in_place(self) -> bool:
        """Return whether the open files are still the ones at the path, which other processes open."""
        if self._files is None or self._identity is None:
            return True
        with suppress(OSError):  # an error proves nothing
            identity = self._identify()
            if self._identity[1] is None:  # there was no log before
                self._identity = self._identity[0], identity[1]
            return identity == self._identity
        return True

    def _log_is_lost(self) -> bool:
        """Return whether only the log was deleted or replaced. The database can then no longer be trusted."""
        if self._identity is None or self._identity[1] is None:
            return False
        database, log = self._identify()
        return database == self._identity[0] and log != self._identity[1]

    def _wait_for_locks(self, waits: bool) -> None:
        if waits != self._waits and self._db is not None:
            seconds = _BUSY_SECONDS if waits else min(_BUSY_SECONDS, _BUSY_SECONDS_AFTERWARDS)
            self._db.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")
            self._waits = waits


_databases: PerProcess[dict[Hashable, Any]] = PerProcess(dict)
"""Shared databases by the identity of their folder, which stays open with them."""


def has_database(files: StoreRoot) -> bool:
    """Return whether this process has opened the database of a folder. If so, only SQLite may open its files."""
    return files.identity in _databases.get()


def _open_file(files: StoreRoot, mode: str) -> sqlite3.Connection:
    """Connect to an existing file. SQLite opens it by path, so nothing is read or written if that leads elsewhere."""
    path, status = files.where(CATALOGUE, CATALOGUE_NAME), files.find(CATALOGUE, CATALOGUE_NAME)
    uri = f"{path.as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
    with suppress(OSError):
        if status is not None and os.path.samestat(status, os.stat(path, follow_symlinks=False)):
            return db
    db.close()
    raise UnavailableError(f"{path} was replaced")


def _connect_read_only(files: StoreRoot) -> sqlite3.Connection:
    """Connect to an existing database. Raises sqlite3.Error if it has another version, or is not the library's."""
    if not has_database(files):
        for name, kind in DATABASE_FILES.items():
            if files.find(kind, name) is not None and not files.is_own(kind, name):
                raise sqlite3.DatabaseError(not_own(files.where(kind, name)))
    db = _open_file(files, "ro")
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            raise sqlite3.DatabaseError("the catalogue has another version")
    except BaseException:
        db.close()
        raise
    return db


def _set_up(db: sqlite3.Connection) -> None:
    """Create the tables if they are missing."""
    if db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
        return
    with transaction(db):  # another process may have been faster
        if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            for statement in _SCHEMA:
                db.execute(statement)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the body as one transaction: all of it takes effect, or nothing."""
    try:
        db.execute("BEGIN IMMEDIATE")  # inside `try`: a Ctrl-C right after it must not leave the transaction open
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _enter_wal_mode(db: sqlite3.Connection) -> None:
    """Enter WAL mode. Retry if it is `locked`: SQLite does not wait when two processes open a new database at once."""
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
