"""The recorder: what a cache has computed becomes segments, behind the request."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from .caught import LayerBuffer, compact, cut_end, last_columns, packer, tokens_from
from .errors import StoreClosedError
from .geometry import HASH_TOKENS, Geometry, KVLayout, LayerKV, block_groups
from .reasons import NO_ROOM, ODD_MASK, WEIGHTS_CHANGED
from .request import DecodingCheck
from .restore.history import History
from .shape import SegmentShape, TokenTables
from .stats import StatsCollector
from .store.format import EXACT, SegmentHeader, end_of_chain, segment_id
from .store.writer import KeptOnDevice, PendingSegment, Writer
from .tiers.interrupts import Step
from .tiers.streams import CopyStream, Event, copy_stream

Rank = Callable[[int, Iterator[tuple[torch.Tensor, torch.Tensor]]], np.ndarray]
"""Given a row and its layers' keys and values, how much each token matters, float32 `[tokens]`."""

Submit = Callable[[PendingSegment, bool], None]
"""Takes a segment to be written, and whether to wait for room in the queue."""

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True)
class Names:
    """The names that people give to what is stored.

    Args:
        model: plain facts of the model (see `Identity.facts`).
        label: the user's.
        labels: the same of each row, where rows have their own.
    """

    model: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    labels: tuple[str, ...] = ()

    def of_row(self, row: int) -> str:
        """Its label."""
        return self.labels[row] if self.labels else self.label


class Confirmation:
    """The question whether KV may be stored, and the answer.

    Args:
        ask: gives the answer.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self.denied = False

    def __call__(self) -> bool:
        """Return whether it may."""
        self.denied = not self._ask()
        return not self.denied


def _refused(collector: StatsCollector, tokens: int, confirmed: Confirmation) -> None:
    collector.add(tokens_stored=-tokens)
    collector.explain(WEIGHTS_CHANGED if confirmed.denied else NO_ROOM)


class Recorder:
    """Collects the KV of computed tokens until `seal` makes segments of it.

    Only runs of columns are recorded that every layer has computed, exactly, one after the other. A recorder belongs
    to the thread that runs the passes, but others may seal it between two of them.

    Args:
        history: the tokens of the cache.
        fingerprint: of the model.
        geometry: how segments are cut.
        submit: takes the segments to be written.
        ttl: seconds a segment lives, or None.
        provenance: how the KV is computed.
        enabled: whether anything is recorded; if not, only the history is kept.
        collector: counts the tokens that are stored.
        names: the facts of the model, and the user's labels, for the headers of segments.
        check: knows whether passes of one token were plain; what was caught beside one that was not is dropped.
        weights_held: see `Identity.weights_held`.
        rank: given each layer's unrotated keys and values of a row's new segment, `[heads, tokens, dim]`, says how much
            each token matters; those that matter most lie in front. None leaves them in order.
    """

    def __init__(
        self,
        history: History,
        fingerprint: str,
        geometry: Geometry,
        submit: Submit,
        ttl: float | None,
        provenance: str = EXACT,
        enabled: bool = True,
        rank: Rank | None = None,
        collector: StatsCollector | None = None,
        names: Names = Names(),
        check: DecodingCheck | None = None,
        weights_held: Callable[[float], bool] = lambda moment: True,
    ) -> None:
        self.history = history
        self.fingerprint = fingerprint
        self.geometry = geometry
        self.provenance = provenance
        self.enabled = enabled
        self.rank = rank
        self.collector = collector or StatsCollector()
        self._names = names
        self._check = check or DecodingCheck()
        self._submit = submit
        self._weights_held = weights_held
        self._ttl = ttl
        self._lock = threading.RLock()
        self._step = Step(self._mend)
        self._layers: dict[int, LayerBuffer] = {}
        self._reordered: list[tuple[int, torch.Tensor]] = []  # rows selected, and how many passes were caught before
        self._first = 0  # column of the first caught token
        self._count = 0  # caught columns
        self._revocable = 0  # columns at the end that the next crop may take back
        self._sealed = [0] * history.rows  # prefix hashes of each row up to which segments were made
        self._found = [0] * history.rows  # and up to which the last look-up found them stored
        self._ancestors: list[tuple[str, ...]] = [()] * history.rows
        self._catching = False
        self._in_pass = False
        self._left = False  # whether the cache is gone
        self._streams: dict[torch.device, CopyStream] = {}
        self._computed: dict[torch.device, Event] = {}  # after all that was done to the caught tensors

    # --- during a pass

    def begin(self, first: int) -> None:
        """A pass begins to compute every column from `first` on; what was caught before a gap is sealed."""
        if not self.enabled:
            return
        with self._lock:
            self._come_after()
            if first != self._first + self._count:
                self.seal()
            with self._step:
                if first != self._first + self._count:
                    self._forget()
                    self._first = first
                self._in_pass = self._catching = True

    def catch(self, layer: int, kind: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Layer `layer` computed `[batch, heads, n, dim]` keys and values, rotation taken out."""
        if not self._catching:
            return
        caught = self._layers.get(layer)
        if caught is None:
            caught = self._layers[layer] = LayerBuffer(kind, keys.device)
        if caught.kind != kind or keys.dtype != values.dtype:  # a segment stores a layer in one way only
            self._catching = False
            return
        caught.keys.append(compact(keys))
        caught.values.append(compact(values))

    def end(self, ids: torch.Tensor | np.ndarray, computed: int, revocable: int = 0) -> None:
        """The pass added `ids`, int `[rows, columns]`, to the cache, and computed the last `computed` columns.

        Args:
            revocable: columns at the end that the next crop may take back.
        """
        with self._lock, self._step:
            self.history.append(ids)
            self._count += computed
            self._revocable = revocable
            if not self._catching:
                self._forget()
                self._first = self.history.columns
            self._in_pass = self._catching = False
            self._mark()

    def abandon(self) -> None:
        """The pass failed midway: forget what it left."""
        with self._lock, self._step:
            for tensors in self._tensors():
                cut_end(tensors, sum(t.shape[2] for t in tensors) - self._count)
            self._in_pass = self._catching = False

    # --- what generate() does to a cache

    def crop(self, columns: int) -> None:
        """The cache forgets its last `columns` columns."""
        with self._lock, self._step:
            self.history.crop(columns)
            self._follow_rows()
            gone = min(columns, self._count)
            for tensors in self._tensors():
                cut_end(tensors, gone)
            self._count -= gone
            self._first = min(self._first, self.history.columns)
            self._revocable = 0
            for row, pad in enumerate(self.history.pads):
                whole = max(0, self.history.columns - pad) // HASH_TOKENS
                self._sealed[row] = min(self._sealed[row], whole)
                self._found[row] = min(self._found[row], whole)

    def select(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was. Beam search does this at every token, so tensors follow later."""
        with self._lock, self._step:
            order = rows.tolist()
            self.history.select(order)
            if self._layers:
                self._reordered.append((len(next(self._tensors())), rows))
            self._sealed = [self._sealed[row] for row in order]
            self._found = [self._found[row] for row in order]
            self._ancestors = [self._ancestors[row] for row in order]

    def found(self, row: int, held: int, num_hashes: int, segments: tuple[str, ...]) -> None:
        """Note that a row's prefix hashes from `held` on, which the cache lacks, are stored up to `num_hashes`."""
        self._found[row] = num_hashes if num_hashes > held else min(self._found[row], held)
        before = [segment for segment in self._ancestors[row] if segment not in segments] if held else []
        self._ancestors[row] = (*before, *segments)

    def begins_with(self, prefix_hash: bytes) -> bool:
        """Whether a row's first prefix hash is this one."""
        with self._lock:
            return any(self.history.prefix_hashes(row)[:1] == [prefix_hash] for row in range(self.history.rows))

    # --- making segments

    @property
    def unsealed(self) -> int:
        """Caught columns that no segment holds yet."""
        return self._count

    def seal(self, wait: bool = True) -> int:
        """Hand all tokens in multiples of 16 that are caught and not stored to the writer, unless a pass is under way.

        Args:
            wait: whether to wait while the writer's queue is full.

        Returns:
            How many tokens these are.
        """
        with self._lock, self._step:
            pending_segments = self._take_unsealed()
        for pending in pending_segments:  # without the lock where it can be: there may be no room for long
            self._submit(pending, wait)
            self.collector.add(tokens_stored=pending.header.shape.tokens)
        return sum(pending.header.shape.tokens for pending in pending_segments)

    def _take_unsealed(self) -> list[PendingSegment]:
        """What is caught and not stored, as segments that count as sealed from now on."""
        if self._left:
            self._in_pass, self._revocable = False, 0
        if self._in_pass or not self._count or not self._layers:
            return []
        if self._check.odd():
            self._drop_odd()
            return []
        self._come_after()
        self._follow_rows()
        layout = self._layout()
        end = self._first + self._count - self._revocable
        pending_segments: list[PendingSegment] = []
        kept = self._kept_on_device()
        made: dict[bytes, str] = {}  # what is sealed here, by prefix hash: rows may share a beginning
        for row, pad in enumerate(self.history.pads):
            prefix_hashes = self.history.prefix_hashes(row)[: max(0, end - pad) // HASH_TOKENS]
            first = max(self._sealed[row], self._found[row])
            while first < len(prefix_hashes) and (segment := made.get(prefix_hashes[first])):
                first += 1
                if segment not in self._ancestors[row]:
                    self._ancestors[row] = (*self._ancestors[row], segment)
            self._sealed[row] = first
            if first >= len(prefix_hashes) or first * HASH_TOKENS < self._first - pad:
                continue  # nothing new, or a gap before it: nothing would lead to such a segment
            pending = self._pending_segment(row, first, prefix_hashes, layout, kept)
            pending_segments.append(pending)
            made |= dict.fromkeys(pending.prefix_hashes, pending.header.id)
            self._ancestors[row] = (*self._ancestors[row], pending.header.id)
            self._sealed[row] = len(prefix_hashes)
        starts = [pad + n * HASH_TOKENS for pad, n in zip(self.history.pads, self._sealed, strict=True)]
        self._keep_from(min((start for start in starts if start >= self._first), default=self.history.columns))
        self._mark()
        return pending_segments

    def _drop_odd(self) -> None:
        """Among what was caught is a pass that was not plain: from there on this cache's KV is of another kind."""
        self._forget()
        self._first = self.history.columns
        self.enabled = False
        self.collector.explain(ODD_MASK)

    def segments(self, row: int) -> tuple[str, ...]:
        """The segments that hold a row's stored tokens, in order."""
        return self._ancestors[row]

    def fork(self, collector: StatsCollector, check: DecodingCheck) -> Recorder:
        """A recorder that goes on from here on its own; what is caught so far is sealed or shared.

        Args:
            collector, check: the other cache's.
        """
        with self._lock:
            self.seal()
            twin = copy.copy(self)
            twin.collector, twin._check = collector, check
            twin._lock, twin._left = threading.RLock(), False
            twin._step = Step(twin._mend)
            twin.history = self.history.fork()
            twin._reordered = list(self._reordered)
            twin._layers = {
                i: LayerBuffer(c.kind, c.device, list(c.keys), list(c.values)) for i, c in self._layers.items()
            }
            twin._sealed, twin._found = list(self._sealed), list(self._found)
            twin._ancestors = list(self._ancestors)
            twin._streams, twin._computed = dict(self._streams), dict(self._computed)
            return twin

    def leave_to(self, writer: Writer) -> None:
        """The cache is gone: let the writer store what is left. A finalizer: it takes no lock, and never waits."""
        self._left = True
        writer.soon(self.finish)

    def finish(self) -> bool:
        """Store what is left. Returns False, at once, while another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._left = True
            self.seal(wait=False)
        except StoreClosedError:
            logger.debug("the store was closed first")
        finally:
            self._lock.release()
        return True

    def _mark(self) -> None:
        """Passes and seals may come from threads with streams of their own: note how far this one's are."""
        for device in {caught.device for caught in self._layers.values()}:
            if device not in self._streams:
                self._streams[device] = copy_stream(device)
            self._computed[device] = self._streams[device].computed()

    def _come_after(self) -> None:
        """Let what this thread's streams do next come after what any thread's did to the caught tensors."""
        for device, event in self._computed.items():
            self._streams[device].await_copies(event)

    def _follow_rows(self) -> None:
        """Bring the caught tensors to the order of rows that later selections gave."""
        if not self._reordered:
            return
        for tensors in self._tensors():
            order: torch.Tensor | None = None
            later = list(self._reordered)
            for index in range(len(tensors) - 1, -1, -1):
                while later and later[-1][0] > index:
                    rows = later.pop()[1]
                    order = rows if order is None else rows[order.to(rows.device)]
                if order is not None:
                    tensors[index] = tensors[index].index_select(0, order.to(tensors[index].device))
        self._reordered.clear()

    def _tensors(self) -> Iterator[list[torch.Tensor]]:
        for caught in self._layers.values():
            yield caught.keys
            yield caught.values

    def _kept_on_device(self) -> KeptOnDevice | None:
        """What the caught tensors keep alive of memory that is not the host's."""
        storages = (t.untyped_storage() for tensors in self._tensors() for t in tensors if not self._on_host(t.device))
        nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return KeptOnDevice(nbytes) if nbytes else None

    def _on_host(self, device: torch.device) -> bool:
        return self._streams[device].on_host

    def _layout(self) -> KVLayout:
        last = max(self._layers)
        kinds = tuple(self._layers[i].kind if i in self._layers else None for i in range(last + 1))
        return KVLayout(kinds, next(iter(self._layers.values())).keys[0].dtype)

    def _pending_segment(
        self, row: int, first: int, prefix_hashes: list[bytes], layout: KVLayout, kept: KeptOnDevice | None
    ) -> PendingSegment:
        mine = prefix_hashes[first:]
        parent = prefix_hashes[first - 1] if first else self.history.hasher.root
        tokens = len(mine) * HASH_TOKENS
        start = first * HASH_TOKENS + self.history.pads[row] - self._first
        sources = {i: (list(caught.keys), list(caught.values)) for i, caught in self._layers.items()}
        shape = SegmentShape(layout, self.geometry, tokens, self._tables(row, start, tokens, layout))
        now = time.time()
        ids = self.history.ids()[row, self.history.pads[row] + first * HASH_TOKENS :][:tokens]
        header = SegmentHeader(
            id=segment_id(parent, end_of_chain(mine, self.provenance), shape, self.provenance),
            fingerprint=self.fingerprint,
            shape=shape,
            parent=parent,
            position=first * HASH_TOKENS,
            created=now,
            expires=None if self._ttl is None else now + self._ttl,
            provenance=self.provenance,
            model=self._names.model,
            label=self._names.of_row(row),
            scan_hashes=self.history.hasher.scan_hashes(ids),
        )
        self._mark()
        block_groups = packer(shape, sources, row, start, dict(self._streams), list(self._computed.values()))
        confirmed = Confirmation(partial(self._weights_held, time.monotonic()))
        refused = partial(_refused, self.collector, tokens, confirmed)
        return PendingSegment(
            header, mine, block_groups, self._ancestors[row], refused, on_device=kept, confirmed=confirmed
        )

    def _tables(self, row: int, start: int, tokens: int, layout: KVLayout) -> TokenTables | None:
        if self.rank is None:
            return None
        importance = self.rank(row, self._pairs(row, start, tokens))
        return TokenTables.by_importance(importance[None, None], block_groups(layout, self.geometry))

    def _pairs(self, row: int, start: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's caught keys and values of a row, `[heads, tokens, dim]` each, from a caught column on."""
        every = slice(None)
        for caught in self._layers.values():
            keys, values = (tokens_from(tensors, row, every, start, tokens) for tensors in (caught.keys, caught.values))
            yield keys.cpu(), values.cpu()

    def _keep_from(self, column: int) -> None:
        """Hold on to the columns from `column` on, and to no more memory than these take."""
        end = self._first + self._count
        keep = max(0, end - column)
        for tensors in self._tensors():
            tensors[:] = [last_columns(tensors, keep)] if keep else []
        self._first, self._count = end - keep, keep

    def _mend(self) -> None:
        """A change was interrupted halfway: let go of what is caught, which may be of other columns than it seems."""
        self._forget()
        self._first, self._revocable = self.history.columns, 0
        self._in_pass = self._catching = False

    def _forget(self) -> None:
        self._layers.clear()
        self._reordered.clear()
        self._count = 0
