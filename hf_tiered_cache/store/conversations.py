"""Conversations of a store: a small record of each, and the lock of the process that uses it. Independent of KV.

<root>/conversations/<name>.json   segments of a conversation, and its metadata
<root>/conversations/<name>.lock   locked (flock) by the process that continues it; holds its process id and start time

The name is a hash of the id. A record can be lost or outdated without harm: segments are found by their tokens.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ConfigError, FormatError
from .catalogue import SegmentRow
from .kinds import CONVERSATION, CONVERSATION_LOCK, LOCK_SUFFIX, RECORD_SUFFIX, encode_record, name_of
from .ownership import Holder, Ownership, holder_of, lock_patiently
from .records import RecordFiles, Records, Room, are_times, decoded

FORMAT_VERSION = 1
MOST_LETTERS = 200
"""Maximum length of an id in characters."""
_NAME = re.compile("[0-9a-f]{32}")


def conversation_name(conversation_id: str) -> str:
    """Return 32 hexadecimal digits that identify a conversation's id. Raises ConfigError if the id is invalid."""
    letters = len(conversation_id) if isinstance(conversation_id, str) else 0
    if not 0 < letters <= MOST_LETTERS:
        raise ConfigError(
            f"a conversation's id must be a str of 1 to {MOST_LETTERS} characters, not {conversation_id!r:.80}"
        )
    try:
        return name_of(conversation_id)
    except UnicodeEncodeError:
        raise ConfigError(f"the conversation's id {conversation_id!r} is not valid Unicode") from None


@dataclass(frozen=True)
class ConversationRecord:
    """Stored record of a suspended conversation."""

    id: str
    fingerprint: str
    """Fingerprint of the model that computed it."""
    provenance: str
    """Provenance of its KV: its segments are found only under this one."""
    method: str
    """Textual description of the method, as `make_method` takes it."""
    segments: tuple[str, ...]
    """Ids of its segments, in order."""
    tokens: int
    """Number of stored tokens."""
    turns: int
    created: float
    suspended: float
    """Time of the last suspension, in Unix seconds."""
    nbytes: int
    """Bytes of its segments on disk at that time."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Human-readable description of the model."""

    def encode(self) -> bytes:
        """Return the content of the record's file."""
        facts = asdict(self) | {"format": FORMAT_VERSION, "segments": list(self.segments), "model": dict(self.model)}
        return encode_record(facts)

    @classmethod
    def decode(cls, data: bytes) -> ConversationRecord:
        """Decode the content of a file. Raises FormatError."""
        with decoded(data, FORMAT_VERSION, "a conversation") as facts:
            record = cls(**{name: facts[name] for name in cls.__dataclass_fields__})
            record = replace(record, segments=tuple(record.segments), model=dict(record.model))
            texts = [record.id, record.fingerprint, record.provenance, record.method, *record.segments]
            texts += [*record.model, *record.model.values()]
            counts = record.tokens, record.turns, record.nbytes
            sound = all(isinstance(text, str) for text in texts) and all(map(_NAME.fullmatch, record.segments))
            sound &= all(type(number) is int and 0 <= number < 1 << 63 for number in counts)
            sound &= are_times(record.created, record.suspended)
        if not sound:
            raise FormatError("not a valid record of a conversation")
        return record


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
    evicted: list[str]
    """Ids of its segments that are no longer stored."""
    created: float
    used: float
    """Time when it was last suspended or resumed."""
    in_use_by: int | None
    """Id of the process that continues it; 0 if unknown, None if there is none."""
    in_use_since: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serializable dict."""
        return asdict(self)


class Conversations:
    """Conversations of a store.

    Args:
        files: small files of the store.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._records = Records(
            files,
            CONVERSATION,
            ConversationRecord.encode,
            ConversationRecord.decode,
            lambda record: _file_name(record.id),
        )
        self._owned: weakref.WeakSet[Ownership] = weakref.WeakSet()

    def ownership(self, conversation_id: str) -> Ownership:
        """Return an unacquired ownership lock. Raises ConfigError if the id is invalid."""
        ownership = Ownership(conversation_id, self._files, conversation_name(conversation_id) + LOCK_SUFFIX)
        self._owned.add(ownership)
        return ownership

    def release_all(self) -> None:
        """Release all ownership locks of this store, when it is closed."""
        for ownership in list(self._owned):
            ownership.release()

    def holder(self, conversation_id: str) -> Holder | None:
        """Return the process that continues a conversation, or None."""
        return holder_of(self._files, conversation_name(conversation_id) + LOCK_SUFFIX)

    # --- records

    def read(self, conversation_id: str) -> ConversationRecord | None:
        """Return the record of a conversation, or None if there is no readable one."""
        return self._records.get(_file_name(conversation_id))

    def all(self) -> list[ConversationRecord]:
        """Return all readable records, most recently suspended last."""
        return sorted(self._records.all(), key=lambda record: record.suspended)

    def listed(self, rows: Iterable[SegmentRow]) -> list[ConversationInfo]:
        """Return the listing entries of all conversations, most recently used last.

        Args:
            rows: rows of all stored segments.
        """
        stored_rows = {row.id: row for row in rows}
        infos = [_describe(record, stored_rows, self.holder(record.id)) for record in self.all()]
        return sorted(infos, key=lambda info: info.used)

    def only_of(self, ids: Collection[str]) -> set[str]:
        """Return the segments that belong to these conversations and to no other one."""
        own_segments, other_segments = set[str](), set[str]()
        for record in self.all():
            (own_segments if record.id in ids else other_segments).update(record.segments)
        return own_segments - other_segments

    def write(self, record: ConversationRecord, room: Room) -> None:
        """Write a record in place of the previous one (see `Records.write`). The caller owns the conversation."""
        self._records.write([record], room)

    def remove(self, ids: Iterable[str]) -> None:
        """Delete the records of conversations; their segments stay.

        Raises:
            ConversationInUseError: one is in use; then no record is deleted. OSError: a record could not be deleted.
        """
        with ExitStack() as stack:
            for conversation_id in ids:
                owned = self.ownership(conversation_id)
                owned.take(over=False)
                stack.callback(owned.release)
            for conversation_id in ids:
                self._records.delete(_file_name(conversation_id))

    def sweep(self, stored_ids: Collection[str], dry_run: bool = False) -> list[str]:
        """Delete records that are damaged or have no segment left, and the locks of dead processes.

        Args:
            stored_ids: ids of all stored segments.
            dry_run: whether to delete nothing.

        Returns:
            Paths of the deleted records, or with `dry_run` of those to be deleted. Conversations in use are kept.
        """
        removed = self._records.sweep(
            lambda record: any(segment in stored_ids for segment in record.segments),
            lambda name: self._files.is_locked(CONVERSATION_LOCK, name.removesuffix(RECORD_SUFFIX) + LOCK_SUFFIX),
            dry_run,
        )
        if not dry_run:
            with suppress(OSError):
                for name in self._files.names(CONVERSATION_LOCK):
                    self._remove_free_lock(name)
        return removed

    def _remove_free_lock(self, name: str) -> None:
        if self._files.is_locked(CONVERSATION_LOCK, name) or not self._files.is_own(CONVERSATION_LOCK, name):
            return
        with suppress(OSError):
            lock = lock_patiently(self._files, name)
            if lock is not None:
                with lock:
                    self._files.delete(CONVERSATION_LOCK, name)


def _file_name(conversation_id: str) -> str:
    """Return the name of a record's file. Raises ConfigError if the id is invalid."""
    return conversation_name(conversation_id) + RECORD_SUFFIX


def _describe(
    record: ConversationRecord, stored_rows: Mapping[str, SegmentRow], holder: Holder | None
) -> ConversationInfo:
    tokens = 0
    for segment in record.segments:
        row = stored_rows.get(segment)
        if row is None or row.position > tokens or (row.expires is not None and row.expires <= time.time()):
            break
        tokens = row.position + row.tokens * row.valid_hashes // (len(row.chain) // len(row.first))
    used = record.suspended if holder is None or holder.since is None else holder.since
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
        used=used,
        in_use_by=None if holder is None else holder.pid or 0,
        in_use_since=None if holder is None else holder.since,
    )
