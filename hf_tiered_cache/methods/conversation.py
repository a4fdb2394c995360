"""Interface of methods that compact a conversation when it is suspended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..restore.observe import CacheObserver

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..conversations.distances import LayerDistances
    from ..conversations.sharing import Replay
    from ..store.disk import SegmentStore
    from ..store.relayout import Admit, BlocksOf
    from ..store.segment import SegmentReader


@dataclass(eq=False)
class MergeDecision:
    """Decision about the layers of a conversation that share KV.

    Args:
        text: Decision and its reason; "" if there was nothing to decide.
        refused_tokens: Number of tokens at which a replay last refused pairs, in this turn or an earlier one; 0 if none
            did.
    """

    text: str = ""
    refused_tokens: int = 0


@dataclass(frozen=True, eq=False)
class IdleConversation:
    """Conversation that is being suspended, with the information needed to compact it.

    Args:
        disk: Store of its segments.
        readers: Readers of its segments, in order.
        blocks_of: Function that returns the blocks of a segment, from memory if they are there.
        admit: Function that puts blocks into memory.
        front: Function that returns the share of the conversation to recompute when it is restored. Its argument is the
            size of the stored KV, as a share of the unmerged size.
        attention: Distances between the layers' attention; None if it was not observed.
        initial_recent: `LayerDistances.initial_recent` of conversations of this model, including this one.
        replay: Replay of the last tokens over changed KV; None if they cannot be replayed.
        decision: Takes the decision about shared layers.
    """

    disk: SegmentStore
    readers: Sequence[SegmentReader]
    blocks_of: BlocksOf
    admit: Admit
    front: Callable[[float], float]
    attention: LayerDistances | None = None
    initial_recent: Sequence[np.ndarray] = ()
    replay: Replay | None = None
    decision: MergeDecision = field(default_factory=MergeDecision)


class ForConversation(ABC):
    """Interface of a method that compacts the conversation of a cache: `class Krul(PrefixMethod, ForConversation)`."""

    @abstractmethod
    def for_conversation(self, name: str) -> Self:
        """Return this method for one conversation. If its KV must not be shared, the provenance names the conversation.

        Args:
            name: Name of the conversation, 32 hexadecimal digits (see `conversation_name`).
        """

    @abstractmethod
    def compact(self, idle: IdleConversation) -> str | None:
        """Write the last segments of a suspended conversation as one segment, in the form that is to be restored.

        As few segments as possible are rewritten: each turn appends one. The old segments are kept, since the process
        may be killed at any moment.

        Returns:
            Id of the new segment, which replaces those that begin at its position or after it. None if the old ones
            remain as they are.
        """

    @abstractmethod
    def observer(self) -> CacheObserver | None:
        """Return an observer of the queries of a cache's passes, for the lifetime of the cache, or None."""
