"""Suspending a conversation: all its KV is stored, compacted by its method, and recorded.

A replay of the conversation's last tokens shows what merged layers would cost (see `conversations.sharing`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .. import reasons
from ..conversations.sharing import REPLAYED_TOKENS
from ..errors import StoreClosedError, StoreError, TieredCacheError, reason_of
from ..layers import DenseSource, LayeredCache, LayerTensors
from ..methods import ForConversation, IdleConversation, MergeDecision, PrefixMethod
from ..patches.scope import Scope, enter, leave_to
from ..patches.tap import PreRopeKV, RotaryTap
from ..store.catalogue import SegmentRow
from ..store.geometry import HASH_TOKENS
from ..store.segment import SegmentReader
from .cost_model import calibration_for, idle_recompute_ratio
from .executor import Executor
from .sequence import SequenceState
from .storage import Storage
from .suitability import can_recompute_prefix

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True)
class Suspended:
    """Result of `TieredCache.suspend`.

    Args:
        tokens: Number of the conversation's tokens that are stored. The next turn restores them.
        unstored: Number of the cache's tokens that are not stored. The next turn computes them. Below 16, unless
            `reason` says why.
        bytes: Size on disk of the segments with the stored tokens.
        seconds: Duration of the call.
        reason: What could not be stored, and why, or "".
        merging: Decision about layers that share KV, with its reason (`Krul`), or "".
    """

    tokens: int
    unstored: int
    bytes: int
    seconds: float
    reason: str = ""
    merging: str = ""


def suspend_cache(executor: Executor, cache: LayeredCache, started: float) -> Suspended:
    """Store all KV that a cache has computed, let its method compact the segments, and save its conversation.

    The suspension began at `started`, by `time.perf_counter`. Raises StoreClosedError if the store was closed.
    """
    storage, conversation = executor.store, executor.conversation
    num_positions, decision = cache.get_seq_length(), MergeDecision()
    storage.check_open()
    sequence = executor.sequence or executor.ended
    if sequence is None:
        return Suspended(0, num_positions, 0, time.perf_counter() - started, executor.bypass)
    reason = ""
    sequence.recorder.crop(0)  # the last positions of a pass can no longer be taken back
    try:
        executor.store_now()
        storage.writer.flush()
    except StoreClosedError:
        raise
    except StoreError as error:
        reason = str(error)
    rows, tokens = _stored(storage, sequence)
    compacted: str | None = None
    replaced: list[SegmentRow] = []
    readers: list[SegmentReader] = []
    try:
        if rows and executor.options.record:
            readers = [reader for row in rows if (reader := storage.disk.reader(row.id)) is not None]
            if len(readers) < len(rows):
                raise StoreError("a segment of the conversation cannot be read")
            method = sequence.method
            if conversation is not None and isinstance(method, ForConversation):  # a fork has the method, but no name
                record = conversation.record
                if record is not None and record.fingerprint == sequence.identity.fingerprint:
                    decision.refused_tokens = record.refused_tokens
                idle = _idle(executor, sequence, readers, tokens)
                compacted = method.compact(replace(idle, replay=_replay(executor, cache), decision=decision))
    except (TieredCacheError, OSError, ValueError) as error:
        reason, decision.text = reason or f"the conversation could not be rewritten: {reason_of(error)}", ""
    if compacted is not None and (new_row := storage.disk.index.row(compacted)) is not None:
        replaced = [row for row in rows if row.position >= new_row.position]
        rows = [*rows[: len(rows) - len(replaced)], new_row]
    unstored = max(0, num_positions - sequence.history.pads[0] - tokens)
    if unstored >= HASH_TOKENS:
        reason = reason or _why_left(executor, sequence)
    if conversation is not None and executor.options.record:
        reason = conversation.keep(sequence, rows, tokens, decision.text, decision.refused_tokens) or reason
        if replaced and conversation.record is not None and compacted in conversation.record.segments:
            _keep_unstored(storage, rows[-1], readers)
            try:  # delete old segments only after the record names the new one
                _replace(storage, [row.id for row in replaced], rows[-1].id)
            except (StoreError, OSError) as error:
                reason = reason or f"a segment that was replaced by a new one could not be deleted: {reason_of(error)}"
    storage.note_uses()
    storage.warn_of(reason)
    nbytes, seconds = sum(row.nbytes for row in rows), time.perf_counter() - started
    return Suspended(tokens, unstored, nbytes, seconds, reason, decision.text)


def _replace(storage: Storage, old: Sequence[str], new: str) -> None:
    """Delete segments that another one replaces, which takes over a pin set meanwhile. Raise StoreError or OSError."""
    disk = storage.disk
    with disk.backend.locked():
        if not disk.backend.pinned().isdisjoint(old):
            disk.backend.pin(new, True)
        disk.remove(old)


def _keep_unstored(storage: Storage, row: SegmentRow, readers: Sequence[SegmentReader]) -> None:
    """Keep the tokens in memory that a new segment lacks. `readers` are those of the old segments of the chain."""
    segment = storage.disk.reader(row.id)
    if segment is None:
        return
    try:
        storage.unstored.keep(segment, [reader for reader in readers if reader.header.position >= row.position])
    except (RuntimeError, OSError, TieredCacheError) as error:  # no memory: the next turn computes these tokens
        logger.debug("the first tokens of segment %s are not kept in memory: %r", row.id, error)


def _idle(executor: Executor, sequence: SequenceState, readers: list[SegmentReader], tokens: int) -> IdleConversation:
    """Return the input of `ForConversation.compact` for these segments."""
    storage, observer, method = executor.store, executor.observer, sequence.method
    attention = None if observer is None else observer.result()

    def recompute_share(stored: float) -> float:
        share = method.recompute if isinstance(method, PrefixMethod) else 0.0
        calibration = calibration_for(storage, sequence.identity.fingerprint, executor.attachment, method)
        costs = calibration.at(tokens)
        if not can_recompute_prefix(executor.attachment) or (share == "auto" and costs is None):
            return 0.0
        if share != "auto":
            return share
        assert costs is not None
        return idle_recompute_ratio(tokens, executor.attachment.depth, costs, stored, method.geometry.chunk_tokens)

    admit = storage.residency.admit
    return IdleConversation(storage.disk, readers, storage.blocks_of, admit, recompute_share, attention)


def _replay(executor: Executor, cache: LayeredCache) -> CacheReplay | None:
    """Return a replay of the cache's last tokens, or None if that is not possible."""
    sequence, attachment = executor.sequence, executor.attachment
    if sequence is None or sequence.approximate or any(sequence.history.pads):
        return None

    def run(ids: torch.Tensor, replayed: Cache, tap: RotaryTap) -> torch.Tensor:
        ids = ids.to(attachment.device)
        positions = executor.arguments.positions(ids, replayed.get_seq_length())
        token = enter(Scope(replayed, tap))
        try:
            with attachment.running_eagerly():
                logits: torch.Tensor = attachment.forward(ids, replayed, return_dict=True, **positions).logits
        finally:
            leave_to(token)
        return logits

    try:
        ids = torch.from_numpy(sequence.history.ids()[:1])
        return CacheReplay(run, cache.layers, ids, RotaryTap(sequence.tables))
    except ValueError:
        return None


def _stored(storage: Storage, sequence: SequenceState) -> tuple[list[SegmentRow], int]:
    """Return the segments that a later lookup finds for the first row, and the number of tokens in them."""
    prefix_hashes, usable = sequence.history.prefix_hashes(0), sequence.method.usable_hashes
    runs = [run for run, _ in storage.match(prefix_hashes, 0, usable, sequence.recorder)]
    return [run.row for run in runs], sum(run.num_hashes for run in runs) * HASH_TOKENS


def _why_left(executor: Executor, sequence: SequenceState) -> str:
    """Return the reason why tokens that could be stored were not."""
    if not executor.options.record:
        return reasons.NOT_RECORDED
    if executor.bypass:
        return executor.bypass
    if sequence.recorder.enabled:
        return reasons.NOT_STORED
    return reasons.APPROXIMATE if sequence.approximate else executor.collector.stats.reason or reasons.NOT_STORED


class CacheReplay:
    """Replay of the last `count` tokens of one sequence, int `[1, tokens]`.

    `run` runs the model on token ids, int `[1, n]`, and a cache, and returns logits `[1, n, vocabulary]`. The tap sees
    its rotations. The cache layers hold the whole sequence or a window of it. Raises ValueError if one lacks the KV
    before the replayed tokens.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor, Cache, RotaryTap], torch.Tensor],
        layers: Sequence[Any],
        ids: torch.Tensor,
        tap: RotaryTap,
        count: int = REPLAYED_TOKENS,
    ) -> None:
        self._run, self._ids, self._tap, self._layers = run, ids[:, -count:], tap, list[_FixedLayer]()
        for index, layer in enumerate(layers):
            if not isinstance(layer, DenseSource) or layer.selects or layer.num_positions != ids.shape[1]:
                raise ValueError("a layer does not hold the KV of the conversation")
            if layer.held <= count or layer.keys is None or layer.values is None:
                raise ValueError(f"a layer holds only the last {layer.held} tokens")
            stored_span = slice(0, layer.held - count)
            keys, values = (tensor[:1, :, stored_span] for tensor in (layer.keys, layer.values))
            first = layer.num_positions - layer.held
            self._layers.append(_FixedLayer(keys, values, first, layer.is_sliding, partial(tap.take, index)))

    def kv(self, layer: int) -> LayerTensors:
        """See `conversations.sharing.Replay`."""
        fixed = self._layers[layer]
        bias = self._rotated_bias(layer)
        return fixed.fixed_keys if bias is None else fixed.fixed_keys - bias, fixed.fixed_values

    def loss(self, changed: Mapping[int, LayerTensors]) -> float:
        """See `conversations.sharing.Replay`; NaN if a prediction is not finite."""
        expected, log_probs = self._expected_log_probs, self._log_probs(changed)
        divergence = (expected.exp() * (expected - log_probs)).sum(-1)  # [tokens]
        return float(divergence.mean())

    @cached_property
    def _expected_log_probs(self) -> torch.Tensor:
        """Predictions over the cache's own KV, float32 `[tokens, vocabulary]`."""
        return self._log_probs({})

    @torch.no_grad()
    def _rotated_bias(self, layer: int) -> torch.Tensor | None:
        """Return what the stored keys of a layer lack, at each position: `[1, heads, n, dim]`. None for nothing."""
        _ = self._expected_log_probs  # in this pass, the tap sees how the layer rotates
        fixed, like = self._layers[layer], self._layers[layer].like
        if like is None or like.bias is None:
            return None
        bias = torch.zeros_like(fixed.fixed_keys)
        self._tap.rotate_(like, bias, fixed.first)
        return bias

    @torch.no_grad()
    def _log_probs(self, changed: Mapping[int, LayerTensors]) -> torch.Tensor:
        """Return the predictions over changed KV, float32 `[tokens, vocabulary]`."""
        layers = list[Any](self._layers)
        for index, (keys, values) in changed.items():
            bias = self._rotated_bias(index)
            keys = keys if bias is None else keys + bias
            layers[index] = _FixedLayer(keys, values, layers[index].first, layers[index].is_sliding)
        return self._run(self._ids, Cache(layers=layers), self._tap)[0].float().log_softmax(-1)


class _FixedLayer(CacheLayerMixin):
    """Cache layer whose KV never grows: a pass sees it, followed by the pass's own KV.

    Rotated keys and values, `[1, heads, n, dim]`, begin at position `first`. `take` returns the unrotated KV of the
    pass (see `RotaryTap.take`), of which `like` keeps the last.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        is_sliding: bool,
        take: Callable[[torch.Tensor, torch.Tensor], PreRopeKV] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed_keys, self.fixed_values, self._take = keys, values, take
        self.like: PreRopeKV | None = None
        self.first, self.is_sliding, self.is_initialized = first, is_sliding, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer is initialized."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._take is not None:
            self.like = self._take(key_states, value_states)
        keys = torch.cat([self.fixed_keys, key_states], dim=2)
        return keys, torch.cat([self.fixed_values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fixed_keys.shape[2] + query_length, self.first

    def get_seq_length(self) -> int:
        return self.first + self.fixed_keys.shape[2]

    def get_max_length(self) -> int:
        return -1
