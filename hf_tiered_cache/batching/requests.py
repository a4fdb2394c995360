"""Requests of continuous batching, with restored KV for their pages, and computed KV that is not stored yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import reasons
from ..cache.captured import SegmentTable
from ..cache.executor import Executor
from ..cache.request import Request
from ..cache.sequence import SequenceState
from ..layers import DenseSource
from .engine import PagedKV, last_computed, tokens_of
from .packed import PackedKV, Piece, gather, split

logger = logging.getLogger("hf_tiered_cache")

PATIENCE_SECONDS = 10.0
"""Seconds that a request waits in line for its lookup and restore. Then it is computed."""


class EmptyCache:
    """Cache that holds nothing, for lookups."""

    def __init__(self, layers: int) -> None:
        self.kv_sources: list[DenseSource] = []
        self.layers: Sequence[Any] = range(layers)

    def get_seq_length(self) -> int:
        """Return the number of cached positions."""
        return 0


@dataclass(frozen=True)
class Restored:
    """Restored KV of a request, from position `first` to `stop` (exclusive).

    Layers with a sliding window have what the token at `stop` sees of it.
    """

    first: int
    stop: int
    kv: PagedKV

    def since(self, first: int) -> PagedKV:
        """Return the KV of the positions from `first` on."""
        last = slice(first - self.stop, None)
        return {layer: (keys[:, :, last], values[:, :, last]) for layer, (keys, values) in self.kv.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the KV."""
        return sum(tensor.nbytes for pair in self.kv.values() for tensor in pair)


class BatchedRequest:
    """Request of continuous batching. The executor looks its prompt up, and has the recorder of its KV."""

    def __init__(self, state: Any, executor: Executor) -> None:
        self.state, self.executor = state, executor
        self.cache = EmptyCache(executor.attachment.depth)
        self.id, self.prompt = state.request_id, tokens_of(state)
        self.reported = False
        """True if the request was counted."""
        self.admitted: tuple[Request, SequenceState] | None = None
        """Parsed prompt, and the state of its tokens; None if its KV can be neither stored nor restored."""
        self.lookup: Future[None] | None = None
        """Lookup of the prompt; None before it was started."""
        self.restored: Restored | None = None
        """Restored KV that is not written to pages yet."""
        self.reason = ""
        """Reason why nothing was restored; the first one holds."""
        self.held = 0
        """Number of leading tokens that were in shared pages when the lookup was started."""
        self.matched = 0
        """Number of leading tokens that the pages held when the request was scheduled."""
        self.deadline = time.monotonic() + PATIENCE_SECONDS
        """Time at which the request no longer waits."""
        self.leader: BatchedRequest | None = None
        """Request that restores the next tokens of this prompt, too; this request waits for it."""
        self.decided = False
        """True if the request no longer waits for a restore."""
        self.gone = False
        """True if the engine has finished or cancelled the request, which is then decided, too."""
        self.placed = False
        """True if restored KV was written to its pages."""
        self.recording = True
        """True while the KV of passes is captured."""
        self._first: int | None = None  # position of the first captured token
        self._end = 0  # position after the last captured token
        self._stop = 0  # position after the last computed token
        self._pieces: list[Piece] = []
        self._computed = 0  # number of computed tokens that were not counted yet

    @property
    def is_looked_up(self) -> bool:
        """True if the lookup has ended."""
        return self.lookup is not None and self.lookup.done()

    @property
    def num_captured(self) -> int:
        """Number of tokens that are captured and not stored."""
        return 0 if self._first is None else self._end - self._first

    @property
    def prompt_is_computed(self) -> bool:
        """True if the pages hold the whole prompt."""
        return self._stop >= len(self.prompt)

    def admit(self) -> None:
        """Identify the model, between two passes: parts of it change while a pass runs."""
        arguments = {"input_ids": torch.tensor([self.prompt]), "logits_to_keep": last_computed(self.state)}
        self.admitted = self.executor.admit(self.cache, arguments)

    def fork(self, state: Any, executor: Executor) -> BatchedRequest:
        """Return a request that continues independently from the same tokens."""
        twin = BatchedRequest(state, executor)
        twin.recording, twin.decided, twin.placed, twin.reason = self.recording, True, self.placed, self.reason
        twin.note_match(self.matched)
        twin._first, twin._end, twin._stop = self._first, self._end, self._stop
        twin._pieces = list(self._pieces)
        return twin

    def note_match(self, tokens: int) -> None:
        """Count the tokens that the pages hold at the begin of the request, before any of its answer is delivered."""
        self.executor.collector.add(tokens_kept=tokens - self.matched)
        self.matched = tokens

    def note_reason(self, reason: str) -> None:
        """Note why nothing is restored, unless a reason is known."""
        self.reason = self.reason or reason

    def note_pass(self, packed: PackedKV | None, row: int, first: int, count: int) -> None:
        """Note that a pass has computed `count` tokens from position `first` on, as tokens `row` and following.

        After a pass without captured KV (`packed`), nothing more is captured: it would come after a gap.
        """
        self._computed += count
        self._stop = first + count
        if packed is None or not self.recording or (self._first is not None and first > self._end):
            self.recording = False
            return
        if self._first is None:
            self._first = first
        elif first < self._first:
            self.stop_recording()
            return
        elif first < self._end:
            self._pieces, _ = split(self._pieces, first - self._first)
        self._pieces.append(Piece(packed, row, count))
        self._end = first + count

    def stop_recording(self) -> None:
        """Discard the captured KV, and capture no more."""
        self.recording = False
        self._first, self._pieces = None, []

    def report(self) -> None:
        """Count what was computed, and once the request."""
        collector = self.executor.collector
        if self._computed:
            collector.add(tokens_computed=self._computed)
            self._computed = 0
        if not self.reported:
            self.reported = True
            collector.add(requests=1)
            reason = "" if self.placed or self.matched else self.reason or (reasons.NOT_IN_TIME if self._stop else "")
            if reason:
                self.executor.explain(reason)
            logger.info(
                "%d tokens restored, %d shared in pages, %d computed%s",
                collector.stats.tokens_restored,
                collector.stats.details.tokens_kept,
                collector.stats.tokens_computed,
                reason and f"; {reason}",
            )

    def store(self, table: SegmentTable) -> None:
        """Submit the captured KV to the store, in multiples of 16 tokens, without waiting for room in its queue."""
        sequence, tokens = self.executor.sequence, tokens_of(self.state)
        first, count = self._first, min(self._end, len(tokens)) - (self._first or 0)
        if sequence is None or first is None:
            self.stop_recording()
            return
        if count <= 0:
            return
        pieces, remaining_pieces = split(self._pieces, count)
        if any(piece.source.fingerprint != sequence.identity.fingerprint for piece in pieces):
            self.stop_recording()
            return
        recorder = sequence.recorder
        recorder.shared_segments = table
        num_held = recorder.history.num_positions
        if num_held < first:
            recorder.end(np.array([tokens[num_held:first]], np.int64), 0)
        recorder.begin(first)
        for layer, (kind, keys, values) in gather(pieces).items():
            recorder.capture(layer, kind, keys, values)
        recorder.end(np.array([tokens[first : first + count]], np.int64), count)
        recorder.seal(wait=False)
        self._pieces, self._first = remaining_pieces, first + count
