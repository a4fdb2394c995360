"""Conversations of a store: a small record of each, and the lock of the process that uses it. Independent of KV.

<root>/conversations/<name>.json   segments of a conversation, and its metadata
<root>/conversations/<name>.lock   locked (flock) by the process that continues it; holds its process id and start time

The name is a hash of the id. A record can be lost or outdated without harm: segments are found by their tokens.
"""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ..errors import ConfigError, ConversationInUseError, FormatError, reason_of
from .catalogue import SegmentRow
from .faults import LOGGER
from .kinds import CONVERSATION, CONVERSATION_LOCK, LOCK_SUFFIX, RECORD_SUFFIX, FileKind, name_of, record_name, seconds
from .records import Record, RecordFiles, Records, check_name
from .threads import PerProcess

_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})
_ATTEMPTS, _PAUSE_SECONDS, _PATIENCE_SECONDS = 5, 0.01, 1.0
"""Retries of a lock. Listing conversations and `gc` hold it for a moment, without being owners."""


def conversation_name(conversation_id: str) -> str:
    """Return 32 hexadecimal digits that identify a conversation's id. Raises ConfigError if the id is invalid."""
    check_name(conversation_id, "conversation's id", most=200)
    return name_of(conversation_id)


@dataclass(frozen=True)
class ConversationRecord(Record):
    """Stored record of a suspended conversation. For fields that it has in common with its entry see there."""

    kind: ClassVar[FileKind] = CONVERSATION
    subject: ClassVar[str] = "a conversation"

    id: str
    fingerprint: str
    provenance: str
    """Provenance of its KV: its segments are found only under this one."""
    method: str
    """Textual description of the method, as `make_method` takes it."""
    segments: tuple[str, ...]
    tokens: int
    turns: int
    created: float
    suspended: float
    """Time of the last suspension, in Unix seconds."""
    nbytes: int
    """Bytes of its segments on disk at that time."""
    model: Mapping[str, str] = field(default_factory=dict)
    merging: str = ""
    refused_tokens: int = 0
    """Number of tokens at which a replay last refused pairs of layers; 0 if none did."""


@dataclass(frozen=True)
class ConversationInfo:
    """Listing entry of a conversation of a store."""

    id: str
    model: dict[str, str]
    """Human-readable description of the model that computed it."""
    fingerprint: str
    method: str
    provenance: str
    turns: int
    tokens: int
    """Number of tokens that were stored when it was suspended."""
    tokens_there: int
    """Number of these tokens that are still stored."""
    bytes: int
    """Bytes that its segments take on disk now."""
    segments: list[str]
    """Ids of its segments, in order."""
    evicted: list[str]
    """Ids of its segments that are no longer stored."""
    created: float
    used: float
    """Time when it was last suspended or resumed."""
    in_use_by: int | None
    """Id of the process that continues it; 0 if unknown, None if there is none."""
    in_use_since: float | None
    merging: str = ""
    """Decision about layers that share KV, with its reason, at the last suspension; "" if there was none."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serializable dict."""
        return asdict(self)


class Conversations(Records[ConversationRecord]):
    """Conversations of a store."""

    record = ConversationRecord

    def release_all(self) -> None:
        """Release all ownership locks of this store, when it is closed."""
        with _owners.locked() as owners:
            for owner in list(owners.values()):
                if owner.files is self.files:
                    owner.release()

    def holder(self, conversation_id: str) -> Holder | None:
        """Return the process that continues a conversation, or None."""
        name = conversation_name(conversation_id) + LOCK_SUFFIX
        return _read_holder(self.files, name) if self.files.is_locked(CONVERSATION_LOCK, name) else None

    # --- records

    def all(self) -> list[ConversationRecord]:
        """Return all readable records, most recently suspended last. Raises OSError if they cannot be listed."""
        return sorted(super().all(), key=lambda record: record.suspended)

    def listed(self, rows: Iterable[SegmentRow]) -> list[ConversationInfo]:
        """Return the entries of all conversations, most recently used last, given the rows of all stored segments."""
        stored_rows = {row.id: row for row in rows}
        infos = [_describe(record, stored_rows, self.holder(record.id)) for record in self.all()]
        return sorted(infos, key=lambda info: info.used)

    def segments_of(self, ids: Collection[str], rows: Iterable[SegmentRow]) -> list[SegmentRow]:
        """Return those of all stored segments that only these conversations have.

        Segments that no record names are included: of an edited history, or of a process that was killed.

        Raises ConfigError if a conversation does not exist; OSError or FormatError if the record of another one
        cannot be read.
        """
        provenances, own_segments = set[str](), set[str]()
        for conversation_id in ids:
            name, record = conversation_name(conversation_id), self.read(conversation_id)
            if record is None:
                raise ConfigError(
                    f"conversation {conversation_id!r} does not exist; store.conversations() lists all conversations"
                )
            if name in record.provenance:
                provenances.add(record.provenance)
            own_segments.update(record.segments)
        for record in self.naming(own_segments.copy(), but=set(map(record_name, ids))):
            own_segments.difference_update(record.segments)
        return [row for row in rows if row.id in own_segments or row.provenance in provenances]

    def remove(self, ids: Collection[str]) -> None:
        """Delete the records of conversations, but not their segments. Raises ConversationInUseError or OSError."""
        with ExitStack() as stack:
            for conversation_id in ids:
                owned = Ownership(conversation_id, self.files)
                owned.take(over=False)
                stack.callback(owned.release)
            for conversation_id in ids:
                self.delete(conversation_id)

    def rename_segment(self, old: str, new: str) -> None:
        """Replace a segment in all records that name it. The caller holds the store's lock.

        Raises OSError or FormatError if a record cannot be read or written.
        """
        self.write(
            [
                replace(record, segments=tuple(new if name == old else name for name in record.segments))
                for record in self.naming([old])
            ]
        )

    def sweep(self, stored_ids: Collection[str], dry_run: bool = False) -> list[str]:
        """Delete records that are blank or have no stored segment left, and locks of dead processes. See `_sweep`."""

        def is_needed(name: str, record: ConversationRecord | None) -> bool:
            if record is not None and any(segment in stored_ids for segment in record.segments):
                return True
            return self.files.is_locked(CONVERSATION_LOCK, name.removesuffix(RECORD_SUFFIX) + LOCK_SUFFIX)

        removed_paths = self._sweep(is_needed, dry_run)
        if not dry_run:
            with suppress(OSError):
                for name in filter(partial(self.files.is_own, CONVERSATION_LOCK), self.files.names(CONVERSATION_LOCK)):
                    with suppress(OSError):
                        if (lock := self.files.lock(CONVERSATION_LOCK, name)) is not None:  # its process has ended
                            with lock:
                                self.files.delete(CONVERSATION_LOCK, name)
        return removed_paths


def _describe(
    record: ConversationRecord, stored_rows: Mapping[str, SegmentRow], holder: Holder | None
) -> ConversationInfo:
    tokens = 0
    for segment in record.segments:
        row = stored_rows.get(segment)
        if row is None or row.position > tokens or row.is_expired:
            break
        tokens = row.position + row.usable_tokens
    last_use = record.suspended if holder is None or holder.since is None else holder.since
    return ConversationInfo(
        id=record.id,
        model=dict(record.model),
        fingerprint=record.fingerprint,
        method=record.method,
        provenance=record.provenance,
        turns=record.turns,
        tokens=record.tokens,
        tokens_there=min(tokens, record.tokens),
        bytes=sum(stored_rows[segment].nbytes for segment in record.segments if segment in stored_rows),
        segments=list(record.segments),
        evicted=[segment for segment in record.segments if segment not in stored_rows],
        created=record.created,
        used=last_use,
        in_use_by=None if holder is None else holder.pid or 0,
        in_use_since=None if holder is None else holder.since,
        merging=record.merging,
    )


# --- ownership


class Holder(NamedTuple):
    """Process that owns a conversation, and since when, in Unix seconds. None if the lock file does not state it."""

    pid: int | None
    since: float | None


class Ownership:
    """Exclusive right, among all processes, to continue a conversation: only one cache of one process has it.

    Ownership lasts until `release`, until another object of this process takes it over, or until this object is garbage
    collected or the process ends. A forked child neither has it nor releases it (see `LockFile`).
    """

    def __init__(self, conversation_id: str, files: RecordFiles) -> None:
        self._id, self.files, self._name = conversation_id, files, conversation_name(conversation_id) + LOCK_SUFFIX
        self._path = files.where(CONVERSATION_LOCK, self._name)
        self._key = files.identity, self._name
        self.held = False
        self.since = 0.0
        self._file: Any = None  # closing the file releases the lock; None if files cannot be locked
        self._pid = os.getpid()

    def take(self, over: bool) -> None:
        """Acquire ownership, with `over` also from another owner in this process. Raises ConversationInUseError."""
        with _owners.locked() as owners:
            current = owners.get(self._key)
            if current is not None and current.held and current is not self:
                if not over:
                    raise ConversationInUseError(self._id, os.getpid(), current.since)
                self._file, current._file, current.held = current._file, None, False
            elif not self.held:
                self._file = self._lock()
            owners[self._key] = self
            self.held, self.since, self._pid = True, time.time(), os.getpid()

    def release(self) -> None:
        """Release ownership. In a forked child, this does not affect the parent's ownership."""
        with _owners.locked() as owners:
            if not self.held:
                return
            self.held, file, self._file = False, self._file, None
            if self._pid == os.getpid():
                owners.pop(self._key, None)
                if file is not None:
                    with suppress(OSError):  # then the file remains until the next owner or `gc` deletes it
                        self.files.delete(CONVERSATION_LOCK, self._name)
            if file is not None:
                file.close()

    def _lock(self) -> Any:
        """Lock the file, and write its holder. Returns None if it cannot be locked. Raises ConversationInUseError."""
        num_refused, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
        try:
            while (file := self.files.lock(CONVERSATION_LOCK, self._name)) is None:
                num_refused += self.files.is_locked(CONVERSATION_LOCK, self._name)
                if num_refused >= _ATTEMPTS or time.monotonic() >= deadline:
                    raise ConversationInUseError(self._id, *_read_holder(self.files, self._name))
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:  # nothing is stored in a read-only folder, so nothing can be lost
            if error.errno not in _NOT_WRITABLE:
                reason = reason_of(error)
                LOGGER.warning(
                    "%s cannot be locked, so another process may continue with it, too: %s", self._path, reason
                )
            return None
        try:
            content = json.dumps({"pid": os.getpid(), "since": time.time()}).encode()
            self.files.rewrite(file, CONVERSATION_LOCK, self._name, content)
        except OSError as error:  # then the lock file does not state its owner
            reason = reason_of(error)
            LOGGER.warning("%s is locked, but does not name the process that holds it: %s", self._path, reason)
        return file


_owners: PerProcess[weakref.WeakValueDictionary[tuple[Hashable, str], Ownership]] = PerProcess(
    weakref.WeakValueDictionary
)
"""Conversations that this process owns, by the identity of the place and the name of their lock."""


def _read_holder(files: RecordFiles, name: str) -> Holder:
    try:
        holder = json.loads(files.read(CONVERSATION_LOCK, name))
        pid, since = holder["pid"], seconds(holder["since"])
    except (OSError, FormatError, LookupError, TypeError, ValueError):
        return Holder(None, None)
    return Holder(pid, since) if type(pid) is int else Holder(None, None)
