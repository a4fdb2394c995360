"""Conversation of a cache: holds its ownership lock and its record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import reasons
from ..errors import ConfigError, ConversationInUseError, StoreClosedError, StoreError, reason_of
from ..store.catalogue import SegmentRow
from ..store.conversations import ConversationRecord, Ownership
from ..store.geometry import ALIGNMENT, aligned
from ..store.lazy import torch
from .storage import Storage

if TYPE_CHECKING:
    from ..identity import Identity
    from ..methods import Method
    from .sequence import SequenceState


class Conversation:
    """Conversation of a cache. Creating it takes the conversation over from an older cache of this process.

    Raises:
        ConfigError: The id is invalid.
        ConversationInUseError: Another process uses the conversation.
    """

    def __init__(self, storage: Storage, conversation_id: str) -> None:
        self.id = conversation_id
        self.turns = 0
        """Number of prompts since the conversation was last resumed."""
        self.record: ConversationRecord | None = None
        """Record as of the last acquisition or save; None if there is none."""
        self._storage = storage
        self._ownership = Ownership(conversation_id, storage.conversations.files)
        self.claim(over=True)

    def claim(self, over: bool = False) -> None:
        """Acquire the conversation's lock and reload its record, unless this cache holds the lock already.

        Raises ConversationInUseError if another process uses the conversation or, unless this one takes it `over`,
        another cache.
        """
        if not self._ownership.held and self._storage.usable:
            self._ownership.take(over)
            self.record = self._storage.conversations.read(self.id)

    def begin_pass(self, is_prompt: bool, is_empty: bool, ids: torch.Tensor | None) -> None:
        """Claim the conversation for a pass, unless the pass continues an answer, which is finished in any case.

        `is_empty` tells whether the cache holds nothing yet, and `ids`, int `[rows, positions]` or None, the tokens.

        Raises:
            ConfigError: The rows of the first pass differ, so that they are several conversations.
            ConversationInUseError: See `claim`.
        """
        if is_prompt or is_empty:
            self.claim()
        if is_empty and ids is not None and ids.ndim == 2 and len(ids) > 1 and not bool((ids == ids[:1]).all()):
            raise ConfigError(
                f"a cache with a conversation continues one prompt, not a batch of {len(ids)}; create a TieredCache "
                "with its own conversation id for each prompt, and call generate() for each"
            )

    def release(self) -> None:
        """Release the conversation's lock."""
        self.turns = 0
        self._ownership.release()

    def why_nothing(self, identity: Identity, method: Method) -> str:
        """Return the reason why no stored prefix of the conversation matches the prompt; "" if it is not stored."""
        record = self.record
        if record is None:
            return ""
        if record.fingerprint != identity.fingerprint:
            from ..identity import differing_facts  # a store alone needs no transformers

            return reasons.of_another_model(differing_facts(identity.facts, record.model))
        if record.provenance != method.provenance:
            return reasons.of_another_method(record.method)
        first_rows = map(self._storage.disk.index.row, record.segments[:1])
        is_stored = any(row is not None and not row.is_expired for row in first_rows)
        return reasons.OTHER_HISTORY if is_stored else reasons.EVICTED

    def why_less(self, restored: int) -> str:
        """Return the reason why a prompt restores only `restored` tokens of the conversation, or ""."""
        record, row_of = self.record, self._storage.disk.index.row
        if record is None or restored >= record.tokens:
            return ""
        rows = map(row_of, record.segments)
        is_lost = any(row is None or row.is_expired or row.usable_tokens < row.tokens for row in rows)
        return reasons.EVICTED_IN_PART if is_lost else ""

    def keep(
        self, sequence: SequenceState, rows: list[SegmentRow], tokens: int, merging: str = "", refused_tokens: int = 0
    ) -> str:
        """Save the conversation's record. Return the reason why it was not saved, or "".

        Without stored tokens or new prompts, the record is left unchanged.
        """
        from ..methods import describe_method  # a store alone needs no torch

        if not tokens or not self.turns:
            return ""
        try:
            self.claim()  # only the newest cache may save the record
        except ConversationInUseError as error:
            return str(error)
        before, now = self.record, time.time()
        record = ConversationRecord(
            id=self.id,
            fingerprint=sequence.identity.fingerprint,
            provenance=sequence.method.provenance,
            method=describe_method(sequence.method),
            segments=tuple(row.id for row in rows),
            tokens=tokens,
            turns=self.turns + (0 if before is None else before.turns),
            created=now if before is None else before.created,
            suspended=now,
            nbytes=sum(row.nbytes for row in rows),
            model=sequence.identity.facts,
            merging=merging,
            refused_tokens=refused_tokens,
        )
        disk = self._storage.disk
        try:
            self._storage.check_open()
            disk.check_writable()
            with disk.backend.locked():
                disk.make_room(aligned(len(record.encode()), ALIGNMENT), record.segments)  # evicts none of its own
                self._storage.conversations.write([record])
        except StoreClosedError:
            raise
        except (StoreError, OSError) as error:
            return f"the conversation's record could not be written: {reason_of(error)}"
        self.record = record
        return ""


def segments_of_conversations(storage: Storage, ids: Sequence[str]) -> list[SegmentRow]:
    """Return the segments that only these conversations use, without pinned ones. Raises ConfigError."""
    pinned = storage.disk.backend.pinned()
    rows = storage.conversations.segments_of(ids, storage.disk.index.complete_rows())
    return [row for row in rows if row.id not in pinned]


def remove_conversations(storage: Storage, ids: Sequence[str]) -> int:
    """Delete conversations and their `segments_of_conversations`, and return the number of deleted segments."""
    storage.disk.check_writable()
    with storage.disk.backend.locked():  # else a segment could be deleted that was just pinned
        rows = segments_of_conversations(storage, ids)
        storage.conversations.remove(ids)
        return storage.remove(row.id for row in rows)
