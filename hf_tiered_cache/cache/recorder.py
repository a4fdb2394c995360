"""The recorder, which turns computed KV into segments after the request."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..errors import StoreClosedError
from ..reasons import NOT_STORED, ODD_MASK, WEIGHTS_CHANGED
from ..restore.hashes import History
from ..store import EXACT
from ..store.format import SegmentHeader, end_of_chain, segment_id
from ..store.geometry import HASH_TOKENS, Geometry, LayerKV, block_groups
from ..store.shape import SegmentShape, TokenTables
from ..store.threads import RepairGuard
from ..store.writer import KeptOnDevice, PendingSegment
from ..tiers.collector import StatsCollector
from .captured import CapturedKV, SegmentTable
from .request import DecodingCheck

Rank = Callable[[int, Iterator[tuple[torch.Tensor, torch.Tensor]]], np.ndarray]
"""Function that scores tokens by importance, float32 `[tokens]`, given a row and its layers' keys and values."""

Submit = Callable[[PendingSegment, bool], None]
"""Function that queues a segment for writing; its flag says whether to wait for room in the queue."""

logger = logging.getLogger("hf_tiered_cache")


def _refused(collector: StatsCollector, table: SegmentTable, pending: PendingSegment) -> None:
    table.forget([pending.header.id])
    collector.add(tokens_stored=-pending.header.shape.tokens)
    collector.explain(pending.refusal or NOT_STORED)


@dataclass(eq=False)
class Recorder:
    """Recorder that captures the KV of computed tokens until `seal` makes segments of it.

    It records only contiguous runs of positions that every layer has computed. A recorder belongs to the thread that
    runs the passes, but other threads may seal it between two passes.

    Args:
        submit: Takes the segments to be written.
        ttl: Lifetime of a segment in seconds, or None.
        enabled: Whether anything is recorded; if not, only the history is kept.
        model: Readable facts of the model (see `Identity.facts`), for the segment headers.
        labels: Label of the user for all rows, or for each row, also for these.
        check: Check of single-token passes; if one was not plain, the KV captured with it is dropped.
        weights_held: See `Identity.weights_held`.
        rank: Scores the tokens of a row's new segment by each layer's unrotated keys and values, `[heads, tokens,
            dim]`. Tokens with high scores are stored first. None keeps their order.
    """

    history: History
    fingerprint: str
    geometry: Geometry
    submit: Submit
    ttl: float | None
    provenance: str = EXACT
    enabled: bool = True
    rank: Rank | None = None
    collector: StatsCollector = field(default_factory=StatsCollector)
    model: Mapping[str, str] = field(default_factory=dict)
    labels: str | Sequence[str] = ""
    check: DecodingCheck = field(default_factory=DecodingCheck)
    weights_held: Callable[[float], bool] = lambda moment: True
    shared_segments: SegmentTable | None = None
    """Segments of other recorders, which record sequences of the same model at the same time, or None."""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._guard = RepairGuard(self._repair)
        self.captured = CapturedKV()
        self._first = 0  # position of the first captured token
        self.num_unsealed = 0
        """Number of captured positions, which no segment holds yet."""
        self._revocable = 0  # number of positions at the end that the next crop may remove
        rows = len(self.history.pads)
        self._sealed = [0] * rows  # number of prefix hashes of each row in segments
        self._stored = [0] * rows  # number of them that the last lookup found stored
        self._ancestors: list[tuple[str, ...]] = [()] * rows
        self._before_look_up: tuple[list[int], list[tuple[str, ...]]] | None = None
        """The last two as they were before the lookup of a pass that has not ended; None between passes."""
        self._excluded: set[int] = set()  # rows of the captured positions that are not stored
        self._set_aside: tuple[CapturedKV, int, int, set[int]] | None = None
        """Capture before a pass that begins elsewhere, with its positions; None between passes."""
        self._capturing = False
        self._in_pass = False
        self._is_collected = False  # whether the cache was garbage collected

    # --- during a pass

    def begin(self, first: int) -> None:
        """Start capturing a pass that computes all positions from `first` on, and seal first what ends elsewhere."""
        if not self.enabled:
            return
        with self._lock:
            if self.captured.on_gpu:
                self.captured.await_work()
            if first != self._first + self.num_unsealed:
                self.seal()
            with self._guard:
                if first != self._first + self.num_unsealed:
                    self._set_aside = self.captured, self._first, self.num_unsealed, self._excluded
                    self.captured, self._first, self.num_unsealed, self._excluded = CapturedKV(), first, 0, set()
                self._in_pass = self._capturing = True

    def capture(self, layer: int, kind: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Capture a layer's computed keys and values, unrotated, `[batch, heads, n, dim]` each."""
        if self._capturing:
            self._capturing = self.captured.add(layer, kind, keys, values)

    def end(self, ids: torch.Tensor | np.ndarray, num_computed: int, revocable: int = 0) -> None:
        """Finish a pass that added `ids`, int `[rows, positions]`, and append them to the history.

        The pass computed the last `num_computed` positions. The next crop may remove the last `revocable` ones.
        """
        with self._lock, self._guard:
            self.history.append(ids)
            self._revocable = revocable
            if self._capturing:
                self.num_unsealed += num_computed
                if self.captured.on_gpu:
                    self.captured.note_work()
            else:
                if self.captured.layers or self.num_unsealed:
                    self._clear()
                self._first = self.history.num_positions
            self._in_pass = self._capturing = False
            self._before_look_up = self._set_aside = None

    def abandon(self) -> None:
        """Discard what a failed pass has captured, and what was found stored of its tokens."""
        with self._lock, self._guard:
            if self._set_aside is not None:
                self.captured, self._first, self.num_unsealed, self._excluded = self._set_aside
                self._set_aside = None
            self.captured.cut_to(self.num_unsealed)
            self._in_pass = self._capturing = False
            if self._before_look_up is not None:
                self._stored, self._ancestors = self._before_look_up
                self._before_look_up = None

    def end_interrupted(self) -> None:
        """Abandon the last pass if it was interrupted where nothing else could. Call this between passes."""
        if self._in_pass or self._before_look_up is not None:
            self.abandon()

    # --- what generate() does to a cache

    def crop(self, count: int) -> None:
        """Remove the last `count` positions."""
        self.end_interrupted()
        with self._lock, self._guard:
            self.history.crop(count)
            self.captured.apply_row_order()
            self.num_unsealed = max(0, self.num_unsealed - count)
            self.captured.cut_to(self.num_unsealed)
            self._first = min(self._first, self.history.num_positions)
            self._revocable = 0
            for row, pad in enumerate(self.history.pads):
                num_hashes = max(0, self.history.num_positions - pad) // HASH_TOKENS
                self._sealed[row] = min(self._sealed[row], num_hashes)
                self._stored[row] = min(self._stored[row], num_hashes)

    def select(self, rows: torch.Tensor) -> None:
        """Reorder the rows: row i becomes the former row `rows[i]`."""
        self.end_interrupted()
        with self._lock, self._guard:
            order = rows.tolist()
            self.history.select(order)
            self.captured.select(rows)
            self._excluded = {row for row, source in enumerate(order) if source in self._excluded}
            self._sealed = [self._sealed[row] for row in order]
            self._stored = [self._stored[row] for row in order]
            self._ancestors = [self._ancestors[row] for row in order]

    def note_stored(self, row: int, cached_hashes: int, num_hashes: int, segments: tuple[str, ...]) -> None:
        """Note which segments store a row's prefix hashes up to `num_hashes`, after those that the cache holds.

        This is for a pass that may fail.
        """
        with self._lock:
            if self._before_look_up is None:
                self._before_look_up = list(self._stored), list(self._ancestors)
        self._stored[row] = num_hashes if num_hashes > cached_hashes else min(self._stored[row], cached_hashes)
        before = [segment for segment in self._ancestors[row] if segment not in segments] if cached_hashes else []
        self._ancestors[row] = (*before, *segments)

    def exclude(self, rows: Iterable[int]) -> None:
        """Store nothing of what is captured of some rows: it is not exact."""
        self._excluded.update(rows)

    def begins_with(self, prefix_hash: bytes) -> bool:
        """Return whether `prefix_hash` is the first prefix hash of some row."""
        with self._lock:
            return any(self.history.prefix_hashes(row)[:1] == [prefix_hash] for row in range(self.history.rows))

    # --- making segments

    def seal(self, wait: bool = True) -> None:
        """Submit all captured tokens that are not stored, in multiples of 16; does nothing during a pass.

        With `wait`, this waits while the writer's queue is full.
        """
        with self._lock, self._guard:
            pending_segments = self._take_unsealed()
        for pending in pending_segments:  # outside the lock if possible: the queue may stay full for long
            self.submit(pending, wait)
            self.collector.add(tokens_stored=pending.header.shape.tokens)

    def _take_unsealed(self) -> list[PendingSegment]:
        """Return segments of what is captured and not stored, and mark it as sealed."""
        if self._is_collected:
            self._in_pass, self._revocable = False, 0
        if self._in_pass or not self.num_unsealed or not self.captured.layers:
            return []
        if self.check.odd():  # the captured KV includes a pass that was not plain
            self._clear()
            self._first, self.enabled = self.history.num_positions, False
            self.collector.explain(ODD_MASK)
            return []
        self.captured.await_work()
        self.captured.apply_row_order()
        self.captured.note_work()
        end = self._first + self.num_unsealed - self._revocable
        pending_segments: list[PendingSegment] = []
        on_device = self.captured.on_device()
        table = SegmentTable() if self.shared_segments is None else self.shared_segments  # rows may share a prefix
        for row, pad in enumerate(self.history.pads):
            prefix_hashes = self.history.prefix_hashes(row)[: max(0, end - pad) // HASH_TOKENS]
            if row in self._excluded:
                continue
            first = max(self._sealed[row], self._stored[row])
            while first < len(prefix_hashes) and (segment := table.get(prefix_hashes[first])):
                first += 1
                if segment not in self._ancestors[row]:
                    self._ancestors[row] = (*self._ancestors[row], segment)
            # not beyond what the history holds: the lookup of a pass that may fail has found more
            self._sealed[row] = max(self._sealed[row], min(first, len(prefix_hashes)))
            if first >= len(prefix_hashes) or first * HASH_TOKENS < self._first - pad:
                continue  # nothing new, or unreachable because of a gap before it
            pending = self._pending_segment(row, first, prefix_hashes, on_device, table)
            pending_segments.append(pending)
            table.add(pending.prefix_hashes, pending.header.id)
            self._ancestors[row] = (*self._ancestors[row], pending.header.id)
            self._sealed[row] = len(prefix_hashes)
        numbered = enumerate(zip(self.history.pads, self._sealed, strict=True))
        starts = [pad + n * HASH_TOKENS for row, (pad, n) in numbered if row not in self._excluded]
        kept_from = min((start for start in starts if start >= self._first), default=self.history.num_positions)
        end = self._first + self.num_unsealed
        self.num_unsealed = max(0, end - kept_from)
        self.captured.keep_last(self.num_unsealed)  # releases the memory of the others
        self._first = end - self.num_unsealed
        self.captured.note_work()
        return pending_segments

    def segments(self, row: int) -> tuple[str, ...]:
        """Return the ids of the segments that hold a row's stored tokens, in order."""
        return self._ancestors[row]

    def fork(self, collector: StatsCollector) -> Recorder:
        """Return a recorder that continues independently; what is captured so far is sealed or shared."""
        with self._lock:
            self.end_interrupted()
            self.seal()
            twin = copy.copy(self)
            twin.collector, twin.check = collector, self.check.fork()
            twin._lock, twin._is_collected = threading.RLock(), False
            twin._guard = RepairGuard(twin._repair)
            twin.history = self.history.fork()
            twin.captured, twin._excluded = self.captured.fork(), set(self._excluded)
            twin._before_look_up = twin._set_aside = None
            twin._sealed, twin._stored = list(self._sealed), list(self._stored)
            twin._ancestors = list(self._ancestors)
            return twin

    def finish(self) -> bool:
        """Store what is left, without waiting, after the cache was collected or the store is closed.

        Returns False, at once, while another thread uses the recorder.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._is_collected = True
            self.seal(wait=False)
        except StoreClosedError:
            logger.debug("the store was closed before the computed KV was queued")
        finally:
            self._lock.release()
        return True

    def _pending_segment(
        self, row: int, first: int, prefix_hashes: list[bytes], on_device: KeptOnDevice | None, table: SegmentTable
    ) -> PendingSegment:
        new_hashes = prefix_hashes[first:]
        parent = prefix_hashes[first - 1] if first else self.history.hasher.root
        tokens = len(new_hashes) * HASH_TOKENS
        start = first * HASH_TOKENS + self.history.pads[row] - self._first
        layout, tables = self.captured.layout, None
        if self.rank is not None:
            importance = self.rank(row, self.captured.pairs(row, start, tokens))
            tables = TokenTables.by_importance(importance[None, None], block_groups(layout, self.geometry))
        shape = SegmentShape(layout, self.geometry, tokens, tables)
        now, computed_at, weights_held = time.time(), time.monotonic(), self.weights_held
        ids = self.history.ids()[row, self.history.pads[row] + first * HASH_TOKENS :][:tokens]
        header = SegmentHeader(
            id=segment_id(parent, end_of_chain(new_hashes, self.provenance), shape, self.provenance),
            fingerprint=self.fingerprint,
            shape=shape,
            parent=parent,
            position=first * HASH_TOKENS,
            created=now,
            expires=None if self.ttl is None else now + self.ttl,
            provenance=self.provenance,
            model=self.model,
            label=self.labels if isinstance(self.labels, str) else self.labels[row],
            scan_hashes=self.history.hasher.scan_hashes(ids),
        )
        return PendingSegment(
            header,
            new_hashes,
            self.captured.packer(shape, row, start),
            self._ancestors[row],
            partial(_refused, self.collector, table),
            on_device=on_device,
            objection=lambda: "" if weights_held(computed_at) else WEIGHTS_CHANGED,
        )

    def _repair(self) -> None:
        """Discard the captured KV after an interrupted change: it may belong to other positions than noted."""
        self._clear()
        self._first, self._revocable = self.history.num_positions, 0
        self._in_pass = self._capturing = False

    def _clear(self) -> None:
        self._set_aside = None
        self.captured.clear()
        self._excluded.clear()
        self.num_unsealed = 0
