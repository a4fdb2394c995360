"""The lock of a conversation: one cache of one process goes on with it. It ends with its holder's life.

No `filelock`, since the file says who has it: older versions of that package empty a file that another holds, and in a
forked child free its parent's lock. Here closing is all that frees, and a child that closes its copy frees nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from ..errors import ConversationInUseError
from .files import open_file, write_all
from .process import ownerships

logger = logging.getLogger("hf_tiered_cache")

_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})
_ATTEMPTS, _PAUSE_SECONDS, _PATIENCE_SECONDS = 5, 0.01, 1.0
"""Who lists conversations shares a lock for a moment, and `gc` has it for one: that is no owner."""


class Holder(NamedTuple):
    """The process that goes on with a conversation, and since when, in Unix seconds; None where it did not say."""

    pid: int | None
    since: float | None


class Ownership:
    """The right to go on with a conversation, of which there is one among all processes.

    It lasts until `release`, until another of this process takes it over, or as long as this object and the process.

    Args:
        conversation_id: which one.
        path: of its lock.
    """

    def __init__(self, conversation_id: str, path: Path) -> None:
        self._id, self._path = conversation_id, path
        self.held = False
        self.since = 0.0
        self._file: FileIO | None = None  # closing it frees the lock; None where files cannot be locked
        self._pid = os.getpid()

    def take(self, over: bool) -> None:
        """Have it from now on.

        Args:
            over: whether it is taken from another one of this process.

        Raises:
            ConversationInUseError: another one has it.
        """
        with ownerships() as known:
            current: Ownership | None = known.get(self._path)
            if current is not None and current.held and current is not self:
                if not over:
                    raise ConversationInUseError(self._id, os.getpid(), current.since)
                self._file, current._file, current.held = current._file, None, False
            elif not self.held:
                self._file = self._lock()
            known[self._path] = self
            self.held, self.since, self._pid = True, time.time(), os.getpid()

    def release(self) -> None:
        """Let it go. A forked child's does nothing to its parent's."""
        with ownerships() as known:
            if not self.held:
                return
            self.held, file, self._file = False, self._file, None
            if self._pid == os.getpid():
                known.pop(self._path, None)
                if file is not None:
                    with suppress(OSError):  # else it lies about until the next one takes it, or `gc`
                        self._path.unlink()
            if file is not None:
                file.close()

    def _lock(self) -> FileIO | None:
        try:
            file = lock_file(self._path)
        except OSError as error:  # a folder that cannot be written stores nothing, so nothing can be lost
            if error.errno not in _NOT_WRITABLE:
                logger.warning("%s cannot be locked, so another process may go on with it, too: %s", self._path, error)
            return None
        if file is None:
            holder = _read_holder(self._path)
            raise ConversationInUseError(self._id, holder.pid, holder.since)
        with suppress(OSError):  # then it does not say who has it
            said = json.dumps({"pid": os.getpid(), "since": time.time()}).encode()
            os.ftruncate(file.fileno(), 0)
            write_all(file.fileno(), memoryview(said), 0)
        return file


def lock_file(path: Path) -> FileIO | None:
    """A file, locked for as long as it is open; None if another has the lock. Raises OSError: it cannot be locked."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    refused, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
    while refused < _ATTEMPTS and time.monotonic() < deadline:
        with ExitStack() as stack:
            file = stack.enter_context(open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            if not _flock(file, fcntl.LOCK_EX):
                refused += not _flock(file, fcntl.LOCK_SH)
            elif _has_name(file, path):  # else whoever had it has deleted the file
                stack.pop_all()
                return file
        time.sleep(_PAUSE_SECONDS)
    return None


def _flock(file: FileIO, kind: int) -> bool:
    """Whether the lock is to be had now. Raises OSError: there are none."""
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _has_name(file: FileIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def holder_of(path: Path) -> Holder | None:
    """Who has the lock of a file, if anybody."""
    try:
        with open_file(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            return None if _flock(file, fcntl.LOCK_SH) else _read_holder(path)
    except OSError:
        return None


def _read_holder(path: Path) -> Holder:
    try:
        said = json.loads(path.read_bytes())
        pid, since = said["pid"], said["since"]
    except (OSError, LookupError, TypeError, ValueError):
        return Holder(None, None)
    known = type(pid) is int and type(since) in (int, float) and 0 <= since < 1e12
    return Holder(pid, since) if known else Holder(None, None)
