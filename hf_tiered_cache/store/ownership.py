"""The lock of a conversation: one cache of one process goes on with it. It ends with its holder's life.

Closing the file is all that frees the lock, and a forked child that closes its copy frees nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from contextlib import suppress
from io import FileIO
from typing import NamedTuple

from ..errors import ConversationInUseError, FormatError
from .kinds import CONVERSATION_LOCK
from .process import ownerships
from .root import StoreRoot

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
        files: the store's folder.
        name: of its lock.
    """

    def __init__(self, conversation_id: str, files: StoreRoot, name: str) -> None:
        self._id, self._files, self._name = conversation_id, files, name
        self._path = files.where(CONVERSATION_LOCK, name)
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
                        self._files.delete(CONVERSATION_LOCK, self._name)
            if file is not None:
                file.close()

    def _lock(self) -> FileIO | None:
        try:
            file = lock_patiently(self._files, self._name)
        except OSError as error:  # a folder that cannot be written stores nothing, so nothing can be lost
            if error.errno not in _NOT_WRITABLE:
                logger.warning("%s cannot be locked, so another process may go on with it, too: %s", self._path, error)
            return None
        if file is None:
            holder = _read_holder(self._files, self._name)
            raise ConversationInUseError(self._id, holder.pid, holder.since)
        try:
            said = json.dumps({"pid": os.getpid(), "since": time.time()}).encode()
            self._files.rewrite(file, CONVERSATION_LOCK, self._name, said)
        except OSError as error:  # then it does not say who has it
            logger.warning("%s is locked, and does not say by whom: %s", self._path, error)
        return file


def lock_patiently(files: StoreRoot, name: str) -> FileIO | None:
    """Lock a conversation for as long as the file is open. Whoever only looks at the lock holds it for a moment.

    Returns:
        The file, or None if another has the lock.

    Raises:
        OSError: it cannot be locked.
    """
    refused, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
    while refused < _ATTEMPTS and time.monotonic() < deadline:
        file = files.lock(CONVERSATION_LOCK, name)
        if file is not None:
            return file
        refused += files.is_locked(CONVERSATION_LOCK, name)
        time.sleep(_PAUSE_SECONDS)
    return None


def holder_of(files: StoreRoot, name: str) -> Holder | None:
    """Return who has a lock, if anybody."""
    return _read_holder(files, name) if files.is_locked(CONVERSATION_LOCK, name) else None


def _read_holder(files: StoreRoot, name: str) -> Holder:
    try:
        said = json.loads(files.read(CONVERSATION_LOCK, name))
        pid, since = said["pid"], said["since"]
    except (OSError, FormatError, LookupError, TypeError, ValueError):
        return Holder(None, None)
    known = type(pid) is int and type(since) in (int, float) and 0 <= since < 1e12
    return Holder(pid, since) if known else Holder(None, None)
