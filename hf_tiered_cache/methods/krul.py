"""Krul: idle conversations are stored in less space, and restored by loading and recomputing at once (its paper)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ..conversations.distances import AttentionDistances
from ..conversations.sharing import (
    MARGIN,
    MIN_TOKENS,
    MOST_CHANGE,
    Pairs,
    Replay,
    accepted_pairs,
    calibrated_gamma,
    first_rewritten,
    first_stored_tokens,
    merge_changes,
    nearest_pairs,
    share_layers,
    target_pairs,
)
from ..errors import ConfigError, unknown_name
from ..restore.schedule import recompute_lengths
from ..store.codecs import RAW, coded_provenance, merged_codec
from ..store.geometry import HASH_TOKENS, Geometry, KVLayout, block_groups
from ..store.pairs import TOWARD, merge_layers
from ..store.relayout import merge_segments, tokens_of
from ..store.shape import SegmentShape
from .base import is_number, require, with_few_layers
from .exact import PrefixMethod

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..conversations.distances import LayerDistances
    from ..store.disk import SegmentStore, Written
    from ..store.relayout import BlocksOf
    from ..store.segment import SegmentReader

logger = logging.getLogger("hf_tiered_cache")


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
        recompute_share: Function that returns the share of the conversation to recompute when it is restored. Its
            argument is the size of the stored KV, as a share of the unmerged size.
        attention: Distances between the layers' attention; None if it was not observed.
        replay: Replay of the last tokens over changed KV; None if they cannot be replayed.
        decision: Takes the decision about shared layers.
    """

    disk: SegmentStore
    readers: Sequence[SegmentReader]
    blocks_of: BlocksOf
    admit: Written
    recompute_share: Callable[[float], float]
    attention: LayerDistances | None = None
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
    def observer(self) -> AttentionDistances | None:
        """Return an observer of the queries of a cache's passes, for the lifetime of the cache, or None."""


_NO_REPLAY = "the cache does not hold its last tokens and the KV before them"


@dataclass(frozen=True, kw_only=True)
class Krul(PrefixMethod, ForConversation):
    """Krul: a suspended conversation is stored with KV shared between similar layers, and without its first tokens.

    KV is stored in eight bits. Pairs of layers that share their KV are proposed for each conversation: those that a
    merge moves least or, as published, those with the most similar attention (Section 4). They share only if a replay
    of the last tokens shows that this is harmless. The first tokens, more of them in early layers than in late ones,
    are recomputed when the conversation is restored, while the rest is loaded (Section 6). Without
    `TieredCache(conversation=)` nothing is suspended, and nothing is merged. `Krul.paper()` has the paper's settings.

    Args:
        layers_shared: Share of the full-attention layers to pair, in [0, 1]. Fewer are paired if fewer are similar.
        recompute: Share of a conversation that is not stored but recomputed when it is restored. "auto" is the fastest
            share that `KVStore.calibrate_prefix` measured for this model and device; 0 without a calibration.
        pairs_by: Distance of layers by which pairs are proposed. "kv": change of their keys and values by a merge,
            computed at `suspend()`. "attention": distance of their attention (the paper's), for which an observer
            samples rows in each pass.
        gamma: Minimum share of attention that a layer pays to the first and last tenth of the sequence to be a
            candidate for sharing (Section 4.2), with `pairs_by="attention"`. "auto" makes three quarters of the layers
            candidates.
        toward: Direction that two layers share, between that of the first layer (0) and that of the deeper one (1).
            MiniCache and the paper use 0.6. Ours is 0.4: with 0.6, information that the first layer looks up is lost
            sooner.
        retained: Share of the tokens that a pair keeps unmerged: those that differ most between its layers (MiniCache).
        quality: Maximum mean loss per token, as KL divergence from unmerged KV, in nats. At `suspend()`, the last 32
            tokens are replayed over the merged KV. The pairs share if they lose at most a quarter of this, else half of
            them are tried, and so on. Below 128 tokens, no new pair is proposed. After a refusal, new pairs are
            proposed when the conversation has twice the length. None merges all proposed pairs without a replay, as
            published.
        change: Maximum relative distance by which a merge may move the keys and values of a pair, from 0 to 1. Pairs
            above it are not merged, unless attention proposes them and `quality` is None.
        codec: See `Method`.
    """

    geometry: Geometry = Geometry(64)
    codec: str | None = "int8"
    layers_shared: float = field(default=0.5, kw_only=False)
    pairs_by: Literal["kv", "attention"] = "kv"
    gamma: float | Literal["auto"] = "auto"
    toward: float = 0.4
    retained: float = 0.05
    quality: float | None = 0.01
    change: float = MOST_CHANGE
    conversation: str = field(default="", repr=False)
    """Name of the conversation, see `for_conversation`."""

    kind: ClassVar[str] = "krul"
    """Beginning of the provenance."""
    min_tokens: ClassVar[int] = MIN_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers_shared", "toward", "retained", "change"):
            value = getattr(self, name)
            require(is_number(value, 0, 1), name, "a float between 0 and 1", value)
        is_loss = self.quality is None or is_number(self.quality, 0)
        require(is_loss, "quality", "a loss in nats, at least 0, or None", self.quality)
        if self.pairs_by not in ("kv", "attention"):
            raise ConfigError(unknown_name("pairs_by", self.pairs_by, ["kv", "attention"]))
        is_gamma = self.gamma == "auto" or is_number(self.gamma, 0, 1)
        require(is_gamma, "gamma", 'a share of attention, a float between 0 and 1, or "auto"', self.gamma)

    @classmethod
    def paper(cls, layers_shared: float = 0.5, **settings: Any) -> Krul:
        """Return the paper's settings: the nearest layers share, whatever that loses, with MiniCache's directions."""
        published: dict[str, Any] = {"toward": TOWARD, "pairs_by": "attention", "quality": None, "codec": RAW}
        return cls(layers_shared, **(published | settings))

    @cached_property
    def provenance(self) -> str:
        return coded_provenance(f"{self.kind} {self.conversation}".rstrip(), self.geometry.codec)

    def for_conversation(self, name: str) -> Self:
        return replace(self, conversation=name)

    def usable_hashes(self, shape: SegmentShape) -> int:
        return shape.tokens // HASH_TOKENS

    def observer(self) -> AttentionDistances | None:
        return AttentionDistances() if self.layers_shared and self.pairs_by == "attention" else None

    def compact(self, idle: IdleConversation) -> str | None:
        if not self.conversation:
            return None
        layout = idle.readers[0].shape.layout
        shared = next((pairs for reader in idle.readers[::-1] if (pairs := reader.shape.geometry.pairs)), ())
        pairs = self.accepted(idle, shared)
        merged = replace(self.geometry, layers_per_block=1, pairs=pairs)
        recomputed = idle.recompute_share(share_of_bytes(layout, merged, self.retained))
        unmerged = (with_few_layers(self, len(layout.layers)) if recomputed else self).geometry
        geometry = merged if pairs else unmerged
        step = self.geometry.chunk_tokens
        stored_from = recompute_lengths(tokens_of(idle.readers), recomputed, len(layout.layers), step=step)
        stored_from = np.maximum(stored_from, first_stored_tokens(idle.readers))
        first = first_rewritten(idle.readers, geometry, stored_from, self.retained)
        if first is None:
            return None
        rewritten = idle.readers[first:]
        start = rewritten[0].header.position - idle.readers[0].header.position
        first_tokens = np.maximum(stored_from - start, 0).tolist()
        merge_options = self.retained, self.toward, idle.blocks_of, idle.admit
        return merge_segments(idle.disk, rewritten, geometry, first_tokens, *merge_options)

    def accepted(self, idle: IdleConversation, shared: Pairs) -> Pairs:
        """Return the proposed pairs that lose at most the limit in a replay; all of them if `quality` is None."""
        if self.quality is None:
            return self.pairs(idle, shared)
        decision, tokens, replay = idle.decision, tokens_of(idle.readers), idle.replay
        is_due = tokens >= max(self.min_tokens, 2 * decision.refused_tokens)
        codec, max_loss = merged_codec(self.geometry.codec), self.quality / MARGIN
        merge = partial(merge_layers, codec=codec, toward=self.toward, share=self.retained)
        try:
            proposed = self.pairs(idle, shared) if is_due else shared
            if not proposed:
                return ()
            if replay is None:
                raise ValueError(_NO_REPLAY)
            result = accepted_pairs(replay, proposed, merge, max_loss, self.change)
        except Exception as error:  # then nothing is merged, and the conversation is stored all the same
            decision.text = f"no layers share KV: the last tokens cannot be replayed: {error}"
            logger.warning("conversation %s: %s", self.conversation, decision.text)
            return ()
        decision.text = f"{len(result.pairs)} of {len(proposed)} pairs of layers share KV"
        decision.text += f", with a loss of {result.loss:.2g} nats per token" if result.pairs else ""
        if result.refused_loss:
            decision.text += f"; more would lose {result.refused_loss:.2g} nats, and the limit is {max_loss:g}"
        if result.refused_change:
            decision.text += f"; the KV of others would move by {result.refused_change:.2g}, limit {self.change:g}"
        if len(result.pairs) < len(proposed):
            decision.refused_tokens = tokens
        logger.info("conversation %s: %s", self.conversation, decision.text)
        return result.pairs

    def pairs(self, idle: IdleConversation, shared: Pairs) -> Pairs:
        """Return the pairs that are proposed: those that share already, and the nearest other layers."""
        if not self.layers_shared:
            return shared
        if self.pairs_by == "attention":
            attention = idle.attention
            if attention is None or attention.missing:
                return shared
            gamma = self.gamma if self.gamma != "auto" else calibrated_gamma([attention.initial_recent])
            return share_layers(attention, gamma, self.layers_shared, shared)
        if idle.replay is None:
            idle.decision.text = f"no layers share KV: {_NO_REPLAY}"
            return shared
        layout = idle.readers[0].shape.layout
        layers = mergeable_layers(layout)
        changes = self.changes(idle.replay, layout, layers)
        pairs = nearest_pairs(layers, changes, target_pairs(len(layers), self.layers_shared), shared, self.change)
        if not pairs:
            idle.decision.refused_tokens = tokens_of(idle.readers)
            least_change = min(changes.flat, default=np.inf)
            idle.decision.text = f"no layers share KV: a merge moves that of any two by {least_change:.2g} or more, "
            idle.decision.text += f"and the limit is {self.change:g}"
        return pairs

    def changes(self, replay: Replay, layout: KVLayout, layers: Sequence[int]) -> np.ndarray:
        """Return by how much a merge would move the keys and values of any two layers: see `merge_changes`."""
        kv, kinds = [replay.kv(layer) for layer in layers], [layout.layers[layer] for layer in layers]
        return merge_changes(kv, kinds, self.toward, self.retained)


def mergeable_layers(layout: KVLayout) -> list[int]:
    """Return the layers of a model that keep keys and values of the whole context, ascending."""
    layers = enumerate(layout.layers)
    return [layer for layer, kv in layers if kv is not None and not kv.window and kv.key_dim and kv.value_dim]


def share_of_bytes(layout: KVLayout, geometry: Geometry, retained: float) -> float:
    """Return the mean size of a token's KV, as a share of its unmerged size."""
    groups = block_groups(layout, geometry)
    block_bytes = {group.layers[0]: group.block_bytes for group in groups if not group.merged}
    saved_bytes = sum(
        sum(block_bytes[layer] for layer in group.layers) - group.block_bytes for group in groups if group.merged
    )
    return 1 - (1 - retained) * saved_bytes / sum(block_bytes.values())
