"""A single SQLite file, to carry prompts to another machine or to archive them. Needs only Python."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from ...errors import ConfigError, FormatError
from ..database import SQLITE_PATH_BYTES
from ..kinds import CATALOGUE_JOURNAL
from ..settings import path_in
from ..threads import fork_lock
from ..tree import open_regular, read_all
from .values import Range, ValueBackend

_APPLICATION = 0x48465443  # "HFTC", in the header of the file
_BUSY_SECONDS = 30.0  # seconds to wait while another process writes to the file

_ERRORS = {
    "is full": errno.ENOSPC,
    "is locked": errno.EBUSY,
    "readonly": errno.EROFS,
    "not a database": errno.EPERM,
}
"""Error numbers by a part of SQLite's message."""


class SQLiteBackend(ValueBackend):
    """Backend with the objects of a store as rows of one SQLite file.

    The file is created with the first object. Each object is written in one transaction, so a process that is killed
    leaves nothing unfinished. Several processes of one machine can use the file; a lock holds within one process. A
    file on a network share is for one writer at a time, as SQLite's documentation explains. If another file takes its
    place, the next transaction checks and opens that one.

    An address is "sqlite:///absolute/path" or "sqlite://relative/path". Raises ConfigError if it is not valid, or the
    file was not written by this library.
    """

    first_bytes = 256 << 10
    part_bytes = 1 << 20

    def __init__(self, address: str) -> None:
        path = path_in(address)
        if path is None:
            raise ConfigError(f"{address} is not the address of a file, such as sqlite:///data/prompts.db")
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int, int] | None = None  # of the file that is open
        self._using = fork_lock()
        super().__init__(address, "")
        try:
            with self._transaction() as connection:
                if connection is None:
                    _check(self.path)
        except OSError as error:
            raise ConfigError(f"{address} cannot be used: {error.strerror}") from error

    def read_values(self, ranges: Sequence[Range]) -> list[bytes]:
        with self._transaction() as connection:
            if connection is None:
                return [b""] * len(ranges)
            query = "SELECT substr(content, ?, ?) FROM parts WHERE key = ? AND typeof(content) = 'blob'"  # or damaged
            rows = [connection.execute(query, (start + 1, stop - start, key)) for key, start, stop in ranges]
            return [next(row, (b"",))[0] for row in rows]

    def set_value(self, key: str, content: bytes, replace: bool) -> bool:
        with self._transaction(write=True) as connection:
            assert connection is not None
            command = f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO parts VALUES (?, ?)"
            return connection.execute(command, (key, content)).rowcount > 0

    def delete_values(self, keys: Sequence[str]) -> bool:
        with self._transaction(write=self.path.exists()) as connection:
            if connection is None:
                return False
            return connection.executemany("DELETE FROM parts WHERE key = ?", [(key,) for key in keys]).rowcount > 0

    def list_keys(self, beginning: str) -> list[str]:
        with self._transaction() as connection:
            if connection is None:
                return []
            query = "SELECT key FROM parts WHERE substr(key, 1, ?) = ?"
            return [key for (key,) in connection.execute(query, (len(beginning), beginning))]

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        with self._transaction(write=True):
            super().put_object(name, content, replace)

    def delete_object(self, name: str) -> bool:
        with self._transaction(write=self.path.exists()):
            return super().delete_object(name)

    def free(self) -> int | None:
        folder = next(folder for folder in self.path.parents if folder.exists())
        return shutil.disk_usage(folder).free

    def close(self) -> None:
        super().close()
        with self._using:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[sqlite3.Connection | None]:
        """Run a transaction, or join that of this thread. Yields None if there is no file to read. Raises OSError."""
        with self._using:
            try:
                connection = self._connect(write)
                if connection is None or connection.in_transaction:
                    yield connection
                    return
                with connection:
                    connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                    yield connection
            except sqlite3.Error as error:
                number = next((number for text, number in _ERRORS.items() if text in str(error)), errno.EIO)
                raise OSError(number, str(error), str(self.path)) from error

    def _connect(self, write: bool) -> sqlite3.Connection | None:
        """Return the connection, opened again if the file was replaced. Returns None if there is no file to read."""
        if self._connection is None or not self._connection.in_transaction:
            identity = _identify(self.path)
            if self._connection is not None and identity != self._identity:
                self._connection.close()
                self._connection = None
            if self._connection is None and (write or identity is not None):
                self._connection = _open(self.path)
                self._identity = identity or _identify(self.path)
        return self._connection


def _identify(path: Path) -> tuple[int, int, int] | None:
    """Return device, inode and number of names of a file, or None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_nlink


def _open(path: Path) -> sqlite3.Connection:
    """Open a file of this library, or an empty or new one. Raises OSError for files of others."""
    is_new = _check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        if is_new:
            connection.execute("PRAGMA journal_mode = MEMORY")  # see `_check`
            connection.execute("BEGIN")
            connection.execute("PRAGMA auto_vacuum = FULL")  # what is deleted makes the file smaller
            connection.execute("CREATE TABLE IF NOT EXISTS parts (key TEXT PRIMARY KEY, content BLOB NOT NULL)")
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = DELETE")
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: Path) -> bool:
    """Return whether the file is new or empty. Raises OSError if SQLite cannot open it or would change others.

    SQLite deletes or applies what has the name of a journal, next to a new file, too. Only SQLite opens the file: to
    close another descriptor of it would release the locks that this process has.
    """
    if len(os.fsencode(path)) > SQLITE_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"its path has more than {SQLITE_PATH_BYTES} bytes; choose a shorter one")
    size, neighbors = 0, [path.with_name(path.name + suffix) for suffix in ("-journal", "-wal", "-shm")]
    neighbors = [neighbor for neighbor in neighbors if os.path.lexists(neighbor)]  # first: creation has no journal
    with suppress(FileNotFoundError):
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise PermissionError(errno.EPERM, "it is not a regular file; choose another name", str(path))
        if status.st_nlink > 1:
            reason = "it has a second name (hard link), under which it would change, too; copy it, and use the copy"
            raise PermissionError(errno.EPERM, reason, str(path))
        size = status.st_size
    if size:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.execute("PRAGMA writable_schema = ON")  # accept that a process is making the file longer
            if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
                raise PermissionError(errno.EPERM, "it is another program's file; choose another name", str(path))
    for neighbor in neighbors:
        if not (size and neighbor.name.endswith("-journal") and _is_journal(neighbor)):
            reason = f"{neighbor.name} is next to it, and was not written by this library; choose another name"
            raise PermissionError(errno.EPERM, reason, str(path))
    return not size


def _is_journal(path: Path) -> bool:
    try:
        with open_regular(path) as (fd, _):
            return CATALOGUE_JOURNAL.is_own(path.name, read_all(fd, 8, 0))  # zeros until it is synced
    except FileNotFoundError:  # its transaction has ended
        return True
    except FormatError:
        return False
