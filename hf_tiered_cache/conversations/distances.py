"""Online measurement of how similar the layers' attention is (Krul, Section 5: the token-wise estimator).

Fused attention kernels return no weights. So the queries of sampled positions are kept, the same positions in every
layer, and their attention rows are recomputed from the keys in the cache.

- The attention row of a decoded token is reduced after its pass and dropped.
- The sampled queries of a prompt are kept. With a background runner (`later`; for models on a GPU), they are reduced
  on the host while the model decodes. For a model on the CPU this would slow down decoding, so they are reduced when
  `result` is called, for example at suspend.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ..store.memory import to_device
from ..tiers.device import DoneEvent, Event, copy_stream
from .attention_sums import QueryRows, SampledWindow, SampledWindows, attention_sums, reordered
from .sharing import LayerDistances

logger = logging.getLogger("hf_tiered_cache")

_ROWS_AT_ONCE = 8
"""Attention rows of a prompt per sampled window."""

Later = Callable[[Callable[[], object]], object]
"""Function that runs a callable in another thread, after the requests."""


class KeysOfLayer(Protocol):
    """Keys of one layer, as held by its cache layer."""

    index: int
    window: int

    @property
    def keys(self) -> torch.Tensor | None:
        """Rotated keys, `[batch, kv_heads, held, dim]`; None if the layer holds none."""

    @property
    def columns(self) -> int:
        """Number of positions of the sequence so far, held or not."""

    @property
    def held(self) -> int:
        """Number of positions that are held."""


@dataclass(frozen=True, eq=False)
class ComputedPositions:
    """Positions of a sequence that a pass computes.

    Args:
        first, stop: Half-open range that the pass adds; every layer computes all of it if `of_layer` is None.
        pads: Number of left padding positions of each batch row.
        of_layer: Returns the positions that a layer computes, int64 `[n]`, ascending; no layer computes more than the
            layer before. None if all layers compute the range.
        fewest: Positions that every layer computes, int64 `[n]`, ascending. None if all layers compute the range.
    """

    first: int
    stop: int
    pads: Sequence[int]
    of_layer: Callable[[int], np.ndarray] | None = None
    fewest: np.ndarray | None = None


class AttentionDistances:
    """Distances between the attention of layers, sampled over all passes of a cache, for its lifetime.

    Args:
        layers: Layers with full attention to compare; None for all.
        interval: Sampling interval, in positions, for decoded tokens and passes of at most this many positions.
        prompt_interval: Minimum sampling interval for longer passes.
        prompt_rows: Maximum number of sampled positions of a longer pass.
        later: Runs the reduction of prompts in the background; None to reduce them in `result`.
    """

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        *,
        interval: int = 16,
        prompt_interval: int = 4,
        prompt_rows: int = 128,
        later: Later | None = None,
    ) -> None:
        self.interval, self.prompt_interval, self.prompt_rows = interval, prompt_interval, prompt_rows
        self._compared = None if layers is None else tuple(layers)
        self._later = later
        self._sources: Sequence[KeysOfLayer] = ()
        self._missing = ""
        self._layers: tuple[int, ...] = ()
        self._lock = threading.Lock()  # guards the next two attributes
        self._windows = SampledWindows()
        self._pending: list[_PendingQueries] = []

    # --- passes

    def begin(self, sources: Sequence[KeysOfLayer], computed: ComputedPositions) -> SampledPass | None:
        """Begin a pass. Return its observer, or None to observe nothing of it, at no cost to the pass.

        Args:
            sources: Keys of the cache's layers.
            computed: Positions that the pass computes.
        """
        stride, positions = self._sampled(computed)
        if self._missing or not len(positions):
            return None
        with self._lock:  # positions that are computed again are not counted twice
            counted_stop = max([self._windows.stop, *(pending.stop for pending in self._pending)])
        positions = positions[positions >= counted_stop]
        self._follow(sources)
        return SampledPass(self, self._sources, computed, positions, stride) if len(positions) else None

    def cannot_see(self, why: str) -> None:
        """Note that the model's attention cannot be observed, for the reason `why`."""
        self._missing = why

    def crop(self, num_positions: int) -> None:
        """Keep only the first `num_positions` positions, like the cache."""
        with self._lock:
            self._windows.crop(num_positions)
            for pending in self._pending:
                pending.limit = min(pending.limit, num_positions)

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i of the batch by the former row `rows[i]`."""
        with self._lock:
            self._windows.select(rows)
            for pending in self._pending:
                pending.order = reordered(pending.order, rows)

    def fork(self, sources: Sequence[KeysOfLayer]) -> AttentionDistances:
        """Return an independent copy for the cache that owns `sources`."""
        twin: AttentionDistances = object.__new__(AttentionDistances)
        twin.__dict__.update(self.__dict__)
        twin._lock = threading.Lock()
        twin._follow(sources)
        with self._lock:
            twin._windows = self._windows.copy()
            twin._pending = [
                replace(pending, is_taken=False, done_event=threading.Event()) for pending in self._pending
            ]
        return twin

    # --- result

    def result(self, row: int = 0) -> LayerDistances:
        """Return the distances so far for one row of the batch, after reducing all pending queries."""
        self._reduce_all()
        with self._lock:
            total = self._windows.total()
        if self._missing or total is None:
            return LayerDistances.none(self._missing or "no attention was observed")
        sums = total.sums.select(torch.tensor([row])).to(torch.device("cpu"))
        if not float(sums.rows):
            return LayerDistances.none("the observed attention is of padding only")
        return LayerDistances.of(self._layers, sums, total.sampled, self._sources[0].columns)

    # --- sampling

    def _follow(self, sources: Sequence[KeysOfLayer]) -> None:
        compared = self._compared
        self._sources = [
            source for source in sources if not source.window and (compared is None or source.index in compared)
        ]

    def _sampled(self, computed: ComputedPositions) -> tuple[int, np.ndarray]:
        """Return the number of positions that each sample of a pass represents, and the sampled positions, int64."""
        fewest, first, stop = computed.fewest, computed.first, computed.stop
        count = stop - first if fewest is None else len(fewest)
        is_short = count <= self.interval
        stride = self.interval if is_short else max(self.prompt_interval, -(-count // self.prompt_rows))
        if fewest is not None:
            return stride, fewest[fewest % stride == stride // 2] if is_short else fewest[stride // 2 :: stride]
        return stride, np.arange(first + (stride // 2 - first) % stride, stop, stride)

    # --- reduction

    def take(self, rows: QueryRows, layers: tuple[int, ...], keys: list[torch.Tensor], weight: int) -> None:
        """Count the sampled queries of a complete pass: reduce them now, or queue them if there are several.

        Args:
            rows: Sampled queries of the pass.
            layers: Layers of the queries.
            keys: Keys of each of these layers, `[batch, kv_heads, positions, dim]`, rotated.
            weight: Number of positions that each sample represents.
        """
        device = keys[0].device
        with self._lock:
            self._layers = layers
            self._windows.to(device)
        if len(rows.positions) == 1:
            self._add(_reduce_queries(rows, weight, keys, device))
            return
        later = self._later
        pending = _PendingQueries(rows, weight, int(rows.positions[-1]) + 1)
        if later is not None:
            pending.keys, pending.computed = keys, copy_stream(device).computed()
        with self._lock:
            self._pending.append(pending)
        if later is not None:
            later(partial(_reduce_later, weakref.ref(self), weakref.ref(pending)))

    def _reduce_all(self) -> None:
        for pending in list(self._pending):
            self.reduce(pending)
            pending.done_event.wait()

    def reduce(self, pending: _PendingQueries) -> None:
        """Reduce and count pending queries, unless another thread has taken them. Failures are logged, not raised."""
        with self._lock:
            if pending.is_taken:
                return
            pending.is_taken = True
            rows, order = pending.rows.first(int((pending.rows.positions < pending.limit).sum())), pending.order
        try:
            if not len(rows.positions):
                return
            if pending.keys is None:  # runs in the cache's own thread, so the cache does not change
                rows = rows if order is None else rows.select(order)
                windows = _reduce_queries(rows, pending.weight, *_keys_of(self._sources))
                pending.order = None
            else:
                stream = copy_stream(pending.keys[0].device)
                stream.await_computation(pending.computed)
                with stream.copying():
                    windows = _reduce_queries(rows, pending.weight, pending.keys, torch.device("cpu"))
            self._add(windows, pending)
        except Exception as error:  # no request depends on it
            logger.warning("the attention of a prompt is not counted: %s: %s", type(error).__name__, error)
        finally:
            with self._lock:
                self._pending = [other_pending for other_pending in self._pending if other_pending is not pending]
            pending.done_event.set()

    def _add(self, windows: list[SampledWindow], pending: _PendingQueries | None = None) -> None:
        with self._lock:
            if pending is not None:  # apply crops and reordering since the pass
                windows = [window for window in windows if window.stop <= pending.limit]
                if pending.order is not None:
                    windows = [window.select(pending.order) for window in windows]
                if self._sources and (keys := self._sources[0].keys) is not None:
                    windows = [window.to(keys.device) for window in windows]
            self._windows.add(windows)


@dataclass(eq=False)
class _PendingQueries:
    """Sampled queries of a prompt that are not reduced yet.

    Args:
        rows: Queries, with the batch rows in the order of the pass.
        weight: Number of positions that each sample represents.
        limit: First cropped position; samples from there on do not count.
        keys: Keys of each layer at the end of the pass, for a reduction in another thread. Later passes write after the
            positions that these queries see, or to other buffers. None to use the sources' keys at the reduction.
        computed: Event after which `keys` are valid.
        order: Row of the pass that each current batch row comes from; None if unchanged.
        is_taken: Whether a thread is reducing the queries, or has done so.
        done_event: Set when the reduction has ended.
    """

    rows: QueryRows
    weight: int
    limit: int
    keys: Sequence[torch.Tensor] | None = None
    computed: Event = field(default_factory=DoneEvent)
    order: torch.Tensor | None = None
    is_taken: bool = False
    done_event: threading.Event = field(default_factory=threading.Event)

    @property
    def stop(self) -> int:
        """Position after the last one that counts."""
        return min(self.limit, int(self.rows.positions[-1]) + 1)


class SampledPass:
    """Observer of one pass that keeps the queries of sampled positions.

    Args:
        owner: `AttentionDistances` that counts the pass.
        sources: Keys of the compared layers.
        computed: Positions that the pass computes.
        positions: int64 `[n]`, sampled positions.
        weight: Number of positions that each sample represents.
    """

    def __init__(
        self,
        owner: AttentionDistances,
        sources: Sequence[KeysOfLayer],
        computed: ComputedPositions,
        positions: np.ndarray,
        weight: int,
    ) -> None:
        self._owner, self._sources, self._computed = owner, sources, computed
        self._positions, self._weight = positions, weight
        self._layers = {source.index for source in sources}
        self._queries: dict[int, tuple[torch.Tensor, float | None]] = {}
        self._places: dict[torch.device, torch.Tensor] = {}

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float | None) -> None:
        """See `QueryObserver`."""
        if layer not in self._layers:
            return
        computed, device = self._computed, query.device
        positions = None if computed.of_layer is None else computed.of_layer(layer)
        if query.shape[2] != (computed.stop - computed.first if positions is None else len(positions)):
            return  # queries of other tokens; `end` reports the layer as unseen
        if query.shape[2] > 1:
            if positions is not None:
                places = to_device(np.searchsorted(positions, self._positions), device)
            else:  # the same positions in all layers
                if device not in self._places:
                    self._places[device] = to_device(self._positions - computed.first, device)
                places = self._places[device]
            query = query.index_select(2, places)
        self._queries[layer] = query, scaling

    def undo(self) -> None:
        """Discard the pass. Called when it has failed, possibly after `end`."""
        self._owner.crop(int(self._positions[0]))

    def end(self) -> None:
        """Count the pass. Called when it is complete and the cache holds what it computed."""
        layers = tuple(source.index for source in self._sources)
        if len(layers) < 2:
            return self._owner.cannot_see("fewer than two layers attend to their whole context")
        if missing_layers := [layer for layer in layers if layer not in self._queries]:
            return self._owner.cannot_see(
                f"the attention of layers {missing_layers} is not computed from queries and keys alone"
            )
        if any(source.held < source.columns for source in self._sources):
            return self._owner.cannot_see("layers hold only a part of their keys")
        queries, scalings = zip(*(self._queries[layer] for layer in layers), strict=True)
        keys, _ = _keys_of(self._sources)
        if not _fit(queries, keys):
            return self._owner.cannot_see("the keys that layers hold are not the keys that their queries attend to")
        rows = QueryRows(self._positions, self._computed.pads, queries, scalings)
        try:
            return self._owner.take(rows, layers, keys, self._weight)
        except Exception as error:  # no request depends on it
            logger.warning("attention is no longer compared: %s: %s", type(error).__name__, error)
            return self._owner.cannot_see(f"comparing attention failed: {error}")


def _fit(queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> bool:
    """Return whether all layers have the same numbers of query and kv heads, and keys match queries in shape."""
    heads, kv_heads = queries[0].shape[1], keys[0].shape[1]
    return heads % kv_heads == 0 and all(
        query.shape[1] == heads and key.shape[1] == kv_heads and query.shape[::3] == key.shape[::3]
        for query, key in zip(queries, keys, strict=True)
    )


def _keys_of(sources: Sequence[KeysOfLayer]) -> tuple[list[torch.Tensor], torch.device]:
    """Return the keys of the sources that are not empty, and the device of the first ones."""
    keys = [source.keys for source in sources if source.keys is not None]
    return keys, keys[0].device


@torch.no_grad()
def _reduce_queries(
    rows: QueryRows, weight: int, keys: Sequence[torch.Tensor], device: torch.device
) -> list[SampledWindow]:
    """Return the attention sums of sampled queries, one per sampled window, computed on `device`."""
    windows = []
    for number, sums in enumerate(attention_sums(rows, keys, device, _ROWS_AT_ONCE)):
        positions = rows.positions[number * _ROWS_AT_ONCE :][:_ROWS_AT_ONCE]
        windows.append(SampledWindow(int(positions[-1]) + 1, len(positions), 1, sums.times(weight)))
    return windows


def _reduce_later(owner: weakref.ref[AttentionDistances], pending: weakref.ref[_PendingQueries]) -> None:
    """Reduce pending queries if their owner and the queries still exist."""
    distances, queries = owner(), pending()
    if distances is not None and queries is not None:
        distances.reduce(queries)
