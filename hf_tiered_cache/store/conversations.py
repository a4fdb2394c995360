"""Conversations of a store: a small record of each, and the lock of whoever goes on with one. Knows no KV.

<root>/conversations/<name>.json   which segments a conversation lies in, and what else is known of it
<root>/conversations/<name>.lock   held (flock) by the process that goes on with it; says which, and since when

The name is a hash of the id. A record can be lost, or be out of date, without harm: segments are found by their tokens.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ConfigError, FormatError, NewerFormatError
from .catalogue import SegmentRow
from .kinds import CONVERSATION, CONVERSATION_LOCK, LOCK_SUFFIX, RECORD_SUFFIX, encode_record, name_of
from .ownership import Holder, Ownership, holder_of, lock_patiently
from .records import are_moments, understood
from .root import StoreRoot

FORMAT_VERSION = 1
MOST_LETTERS = 200
"""Of an id."""
_NAME = re.compile("[0-9a-f]{32}")


def conversation_name(conversation_id: str) -> str:
    """32 hexadecimal digits that stand for a conversation's id. Raises ConfigError: it can be none."""
    letters = len(conversation_id) if isinstance(conversation_id, str) else 0
    if not 0 < letters <= MOST_LETTERS:
        raise ConfigError(f"a conversation's id is a text of 1 to {MOST_LETTERS} letters, not {conversation_id!r:.80}")
    try:
        return name_of(conversation_id)
    except UnicodeEncodeError:
        raise ConfigError(f"the conversation's id {conversation_id!r} is not valid Unicode") from None


@dataclass(frozen=True)
class ConversationRecord:
    """What is kept of a conversation when it is suspended."""

    id: str
    fingerprint: str
    """Of the model that computed it."""
    provenance: str
    """How: its segments are found under this one alone."""
    method: str
    """In words, as `make_method` takes it."""
    segments: tuple[str, ...]
    """In which it lies, in order."""
    tokens: int
    """That are stored."""
    turns: int
    created: float
    suspended: float
    """When it was last, in Unix seconds."""
    nbytes: int
    """Of its segments on disk, then."""
    model: Mapping[str, str] = field(default_factory=dict)
    """What is known of the model, in words."""

    def encode(self) -> bytes:
        """The file."""
        facts = asdict(self) | {"format": FORMAT_VERSION, "segments": list(self.segments), "model": dict(self.model)}
        return encode_record(facts)

    @classmethod
    def decode(cls, data: bytes) -> ConversationRecord:
        """What a file says. Raises FormatError."""
        with understood(data, FORMAT_VERSION, "a conversation") as facts:
            found = cls(**{name: facts[name] for name in cls.__dataclass_fields__})
            found = replace(found, segments=tuple(found.segments), model=dict(found.model))
            texts = [found.id, found.fingerprint, found.provenance, found.method, *found.segments]
            texts += [*found.model, *found.model.values()]
            whole = found.tokens, found.turns, found.nbytes
            sound = all(isinstance(text, str) for text in texts) and all(map(_NAME.fullmatch, found.segments))
            sound &= all(type(number) is int and 0 <= number < 1 << 63 for number in whole)
            sound &= are_moments(found.created, found.suspended)
        if not sound:
            raise FormatError("it is no record of a conversation")
        return found


@dataclass(frozen=True)
class ConversationInfo:
    """A conversation of a store, as listings show it."""

    id: str
    model: dict[str, str]
    """What is known of the model that computed it."""
    fingerprint: str
    method: str
    provenance: str
    turns: int
    tokens: int
    """That were stored when it was suspended."""
    tokens_there: int
    """Of these, those that still are."""
    bytes: int
    """That its segments take on disk now."""
    segments: list[str]
    evicted: list[str]
    """Of its segments, those that are gone."""
    created: float
    used: float
    """When it was last suspended, or taken up."""
    in_use_by: int | None
    """The process that goes on with it; 0 where that is not known, None for nobody."""
    in_use_since: float | None

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)


class Conversations:
    """The conversations of a store.

    Args:
        files: the store's folder.
    """

    def __init__(self, files: StoreRoot) -> None:
        self._files = files
        self._owned: weakref.WeakSet[Ownership] = weakref.WeakSet()

    def ownership(self, conversation_id: str) -> Ownership:
        """Return an unacquired ownership lock. Raises ConfigError: this can be no id."""
        ownership = Ownership(conversation_id, self._files, conversation_name(conversation_id) + LOCK_SUFFIX)
        self._owned.add(ownership)
        return ownership

    def release_all(self) -> None:
        """The store is closed: nobody goes on through it."""
        for ownership in list(self._owned):
            ownership.release()

    def holder(self, conversation_id: str) -> Holder | None:
        """Who goes on with a conversation, if anybody."""
        return holder_of(self._files, conversation_name(conversation_id) + LOCK_SUFFIX)

    # --- records

    def read(self, conversation_id: str) -> ConversationRecord | None:
        """A conversation's record, or None where there is none that can be read."""
        try:
            found = self._read(_record_name(conversation_id))
        except (OSError, FormatError):
            return None
        return found if found.id == conversation_id else None

    def all(self) -> list[ConversationRecord]:
        """Those that can be read, suspended last at the end."""
        found = []
        for name in self._names():
            with suppress(OSError, FormatError):
                record = self._read(name)
                if _record_name(record.id) == name:
                    found.append(record)
        return sorted(found, key=lambda record: record.suspended)

    def listed(self, rows: Iterable[SegmentRow]) -> list[ConversationInfo]:
        """What is to be said of each, last used last.

        Args:
            rows: of all segments that are stored.
        """
        there = {row.id: row for row in rows}
        found = [_describe(record, there, self.holder(record.id)) for record in self.all()]
        return sorted(found, key=lambda info: info.used)

    def only_of(self, ids: Collection[str]) -> set[str]:
        """The segments that these conversations lie in, and no other one."""
        mine, others = set[str](), set[str]()
        for record in self.all():
            (mine if record.id in ids else others).update(record.segments)
        return mine - others

    def write(self, record: ConversationRecord, room: Callable[[int], AbstractContextManager[object]]) -> None:
        """Keep a record in the place of the one before, whole or not at all. To be called by whoever owns it.

        Args:
            room: takes care of room for so many bytes, as long as the room is not taken by the file itself.

        Raises:
            OSError: it cannot be written. What `room` raises comes through.
        """
        self._files.write(CONVERSATION, _record_name(record.id), record.encode(), room)
        self._files.sync(CONVERSATION)

    def remove(self, ids: Iterable[str]) -> None:
        """Forget conversations; their segments stay.

        Raises:
            ConversationInUseError: somebody goes on with one; then none is. OSError: one is still there.
        """
        with ExitStack() as stack:
            for conversation_id in ids:
                owned = self.ownership(conversation_id)
                owned.take(over=False)
                stack.callback(owned.release)
            for conversation_id in ids:
                self._files.delete(CONVERSATION, _record_name(conversation_id))

    def sweep(self, there: Collection[str], dry_run: bool = False) -> list[str]:
        """Delete records that are damaged, or of which no segment is left, and the locks of dead processes.

        Args:
            there: the segments that are stored.
            dry_run: whether nothing is deleted.

        Returns:
            The files of the conversations that went, or would. One that is in use stays.
        """
        removed = []
        for name in self._names():
            lock_name = name.removesuffix(RECORD_SUFFIX) + LOCK_SUFFIX
            with suppress(OSError):
                if self._is_of_use(name, there) or self._files.is_locked(CONVERSATION_LOCK, lock_name):
                    continue
                if self._files.is_own(CONVERSATION, name) if dry_run else self._files.delete(CONVERSATION, name):
                    removed.append(str(self._files.where(CONVERSATION, name)))
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

    def _is_of_use(self, name: str, there: Collection[str]) -> bool:
        try:
            record = self._read(name)
        except (OSError, NewerFormatError):
            return True
        except FormatError:
            return False
        return any(segment in there for segment in record.segments)

    def _names(self) -> list[str]:
        try:
            return self._files.names(CONVERSATION)
        except OSError:
            return []

    def _read(self, name: str) -> ConversationRecord:
        """Read a record. Raises OSError or FormatError."""
        return ConversationRecord.decode(self._files.read(CONVERSATION, name))


def _record_name(conversation_id: str) -> str:
    """Return the name of a record's file. Raises ConfigError: this can be no id."""
    return conversation_name(conversation_id) + RECORD_SUFFIX


def _describe(record: ConversationRecord, there: Mapping[str, SegmentRow], holder: Holder | None) -> ConversationInfo:
    tokens = 0
    for segment in record.segments:
        row = there.get(segment)
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
        bytes=sum(there[segment].nbytes for segment in record.segments if segment in there),
        segments=list(record.segments),
        evicted=[segment for segment in record.segments if segment not in there],
        created=record.created,
        used=used,
        in_use_by=None if holder is None else holder.pid or 0,
        in_use_since=None if holder is None else holder.since,
    )
