"""Ownership lock of a conversation: only one cache of one process may continue it. The lock ends with its process.

Only closing the file releases the lock. A forked child that closes its copy of the file does not release it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import ConversationInUseError, FormatError
from .kinds import CONVERSATION_LOCK
from .process import ownerships
from .records import RecordFiles

logger = logging.getLogger("hf_tiered_cache")

_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})
_ATTEMPTS, _PAUSE_SECONDS, _PATIENCE_SECONDS = 5, 0.01, 1.0
"""Retries of a lock. Listing conversations and `gc` hold it for a moment, without being owners."""


class Holder(NamedTuple):
    """Process that owns a conversation, and since when, in Unix seconds. None if the lock file does not state it."""

    pid: int | None
    since: float | None


class Ownership:
    """Exclusive right, among all processes, to continue a conversation.

    Ownership lasts until `release`, until another object of this process takes it over, or until this object is garbage
    collected or the process ends.

    Args:
        conversation_id: id of the conversation.
        files: small files of the store.
        name: file name of the conversation's lock.
    """

    def __init__(self, conversation_id: str, files: RecordFiles, name: str) -> None:
        self._id, self._files, self._name = conversation_id, files, name
        self._path = files.where(CONVERSATION_LOCK, name)
        self.held = False
        self.since = 0.0
        self._file: Any = None  # closing the file releases the lock; None if files cannot be locked
        self._pid = os.getpid()

    def take(self, over: bool) -> None:
        """Acquire ownership of the conversation.

        Args:
            over: whether to take it over from another owner in this process.

        Raises:
            ConversationInUseError: another owner has it.
        """
        with ownerships() as owners:
            current: Ownership | None = owners.get(self._path)
            if current is not None and current.held and current is not self:
                if not over:
                    raise ConversationInUseError(self._id, os.getpid(), current.since)
                self._file, current._file, current.held = current._file, None, False
            elif not self.held:
                self._file = self._lock()
            owners[self._path] = self
            self.held, self.since, self._pid = True, time.time(), os.getpid()

    def release(self) -> None:
        """Release ownership. In a forked child, this does not affect the parent's ownership."""
        with ownerships() as owners:
            if not self.held:
                return
            self.held, file, self._file = False, self._file, None
            if self._pid == os.getpid():
                owners.pop(self._path, None)
                if file is not None:
                    with suppress(OSError):  # then the file remains until the next owner or `gc` deletes it
                        self._files.delete(CONVERSATION_LOCK, self._name)
            if file is not None:
                file.close()

    def _lock(self) -> Any:
        try:
            file = lock_patiently(self._files, self._name)
        except OSError as error:  # nothing is stored in a read-only folder, so nothing can be lost
            if error.errno not in _NOT_WRITABLE:
                logger.warning(
                    "%s cannot be locked, so another process may continue with it, too: %s", self._path, error
                )
            return None
        if file is None:
            holder = _read_holder(self._files, self._name)
            raise ConversationInUseError(self._id, holder.pid, holder.since)
        try:
            content = json.dumps({"pid": os.getpid(), "since": time.time()}).encode()
            self._files.rewrite(file, CONVERSATION_LOCK, self._name, content)
        except OSError as error:  # then the lock file does not state its owner
            logger.warning("%s is locked, but does not name the process that holds it: %s", self._path, error)
        return file


def lock_patiently(files: RecordFiles, name: str) -> Any:
    """Lock a conversation until the file is closed. Retries, since listing conversations also locks it for a moment.

    Returns:
        The locked file, or None if another process or thread has the lock.

    Raises:
        OSError: the file cannot be locked.
    """
    refused, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
    while refused < _ATTEMPTS and time.monotonic() < deadline:
        file = files.lock(CONVERSATION_LOCK, name)
        if file is not None:
            return file
        refused += files.is_locked(CONVERSATION_LOCK, name)
        time.sleep(_PAUSE_SECONDS)
    return None


def holder_of(files: RecordFiles, name: str) -> Holder | None:
    """Return the holder of a lock, or None if it is free."""
    return _read_holder(files, name) if files.is_locked(CONVERSATION_LOCK, name) else None


def _read_holder(files: RecordFiles, name: str) -> Holder:
    try:
        holder = json.loads(files.read(CONVERSATION_LOCK, name))
        pid, since = holder["pid"], holder["since"]
    except (OSError, FormatError, LookupError, TypeError, ValueError):
        return Holder(None, None)
    is_valid = type(pid) is int and type(since) in (int, float) and 0 <= since < 1e12
    return Holder(pid, since) if is_valid else Holder(None, None)
