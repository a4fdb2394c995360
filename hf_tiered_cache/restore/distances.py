"""Gathers, while a model runs, how alike its layers' attention is (Krul, Section 5: the token-wise estimator).

Attention runs in fused kernels, which give no weights. So queries of sampled columns are kept, the same in every
layer, and their rows of attention made again from the keys that the cache holds anyway.

- The row of a decoded token is added up behind its pass, and dropped.
- Of a prompt, the queries are kept. Where somebody runs it behind the requests (`later`; for models on a GPU), they are
  reduced on the host while the model decodes. A model on the CPU would be kept from decoding: there they wait until
  `result` is asked for, as at suspend.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from ..select.attention_sums import QueryRows, attention_sums
from ..select.sharing import LayerDistances
from ..tiers.streams import DoneEvent, Event, copy_stream
from ..transfers import to_device
from .observe import ComputedColumns, KeysOfLayer, Later
from .stretches import Stretch, Stretches, reordered

logger = logging.getLogger("hf_tiered_cache")

_ROWS_AT_ONCE = 8
"""Rows of a prompt that make a stretch."""


class AttentionDistances:
    """Distances of the attention of layers, over all that a cache's passes compute (see `CacheObserver`).

    Args:
        layers: those with full attention that are compared; None for all.
        every: of so many decoded tokens one is sampled; likewise in passes of no more columns than that.
        prompt_every: in longer passes, of at least so many columns one is sampled,
        prompt_rows: and of a pass at most so many.
        later: runs the reduction of prompts; None for `result` to do it.
    """

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        *,
        every: int = 16,
        prompt_every: int = 4,
        prompt_rows: int = 128,
        later: Later | None = None,
    ) -> None:
        self.every, self.prompt_every, self.prompt_rows = every, prompt_every, prompt_rows
        self._compared = None if layers is None else tuple(layers)
        self._later = later
        self._sources: Sequence[KeysOfLayer] = ()
        self._missing = ""
        self._layers: tuple[int, ...] = ()
        self._lock = threading.Lock()  # of these two
        self._counted = Stretches()
        self._waiting: list[_Waiting] = []

    # --- passes (see `CacheObserver`)

    def begin(self, sources: Sequence[KeysOfLayer], computed: ComputedColumns) -> _SampledPass | None:
        """See `CacheObserver`."""
        stride, columns = self._sampled(computed)
        if self._missing or not len(columns):
            return None
        with self._lock:  # what is computed once more is not counted twice
            seen = max([self._counted.stop, *(waiting.stop for waiting in self._waiting)])
        columns = columns[columns >= seen]
        self._follow(sources)
        return _SampledPass(self, self._sources, computed, columns, stride) if len(columns) else None

    def cannot_see(self, why: str) -> None:
        """See `CacheObserver`."""
        self._missing = why

    def crop(self, columns: int) -> None:
        """See `CacheObserver`."""
        with self._lock:
            self._counted.crop(columns)
            for waiting in self._waiting:
                waiting.limit = min(waiting.limit, columns)

    def select(self, rows: torch.Tensor) -> None:
        """See `CacheObserver`."""
        with self._lock:
            self._counted.select(rows)
            for waiting in self._waiting:
                waiting.order = reordered(waiting.order, rows)

    def fork(self, sources: Sequence[KeysOfLayer]) -> AttentionDistances:
        """See `CacheObserver`."""
        twin: AttentionDistances = object.__new__(AttentionDistances)
        twin.__dict__.update(self.__dict__)
        twin._lock = threading.Lock()
        twin._follow(sources)
        with self._lock:
            twin._counted = self._counted.copy()
            twin._waiting = [replace(each, taken=False, done=threading.Event()) for each in self._waiting]
        return twin

    # --- what comes of them

    def result(self, row: int = 0) -> LayerDistances:
        """The distances so far, of one row of the batch. What waits to be reduced is reduced first."""
        self._reduce_all()
        with self._lock:
            total = self._counted.total()
        if self._missing or total is None:
            return LayerDistances.none(self._missing or "no attention has been seen")
        sums = total.sums.select(torch.tensor([row])).to(torch.device("cpu"))
        if not float(sums.rows):
            return LayerDistances.none("the attention that has been seen is of padding")
        return LayerDistances.of(self._layers, sums, total.sampled)

    # --- what is sampled

    def _follow(self, sources: Sequence[KeysOfLayer]) -> None:
        compared = self._compared
        self._sources = [
            source for source in sources if not source.window and (compared is None or source.index in compared)
        ]

    def _sampled(self, computed: ComputedColumns) -> tuple[int, np.ndarray]:
        """How many columns each sampled one of a pass stands for, and which these are."""
        fewest, first, stop = computed.fewest, computed.first, computed.stop
        count = stop - first if fewest is None else len(fewest)
        short = count <= self.every
        stride = self.every if short else max(self.prompt_every, -(-count // self.prompt_rows))
        if fewest is not None:
            return stride, fewest[fewest % stride == stride // 2] if short else fewest[stride // 2 :: stride]
        return stride, np.arange(first + (stride // 2 - first) % stride, stop, stride)

    # --- what is counted

    def take(self, rows: QueryRows, layers: tuple[int, ...], keys: list[torch.Tensor], weight: int) -> None:
        """Count rows of a pass that is whole.

        Args:
            layers: whose queries they are.
            keys: of these, `[batch, kv_heads, columns, dim]`.
            weight: how many columns each stands for.
        """
        device = keys[0].device
        with self._lock:
            self._layers = layers
            self._counted.to(device)
        if len(rows.columns) == 1:
            self._add(_reduced(rows, weight, keys, device))
            return
        later = self._later
        waiting = _Waiting(rows, weight, int(rows.columns[-1]) + 1)
        if later is not None:
            waiting.keys, waiting.computed = keys, copy_stream(device).computed()
        with self._lock:
            self._waiting.append(waiting)
        if later is not None:
            later(partial(_reduce_later, weakref.ref(self), weakref.ref(waiting)))

    def _reduce_all(self) -> None:
        for waiting in list(self._waiting):
            self.reduce(waiting)
            waiting.done.wait()

    def reduce(self, waiting: _Waiting) -> None:
        """Count rows that wait, unless somebody is at it."""
        with self._lock:
            if waiting.taken:
                return
            waiting.taken = True
            rows, order = waiting.rows.first(int((waiting.rows.columns < waiting.limit).sum())), waiting.order
        try:
            if not len(rows.columns):
                return
            if waiting.keys is None:  # in the cache's own thread: nothing changes meanwhile
                rows = rows if order is None else rows.select(order)
                found = _reduced(rows, waiting.weight, *_held(self._sources))
                waiting.order = None
            else:
                stream = copy_stream(waiting.keys[0].device)
                stream.await_computation(waiting.computed)
                with stream.copying():
                    found = _reduced(rows, waiting.weight, waiting.keys, torch.device("cpu"))
            self._add(found, waiting)
        except Exception as error:  # nobody's request depends on it
            logger.warning("the attention of a prompt is not counted: %s: %s", type(error).__name__, error)
        finally:
            with self._lock:
                self._waiting = [each for each in self._waiting if each is not waiting]
            waiting.done.set()

    def _add(self, found: list[Stretch], waiting: _Waiting | None = None) -> None:
        with self._lock:
            if waiting is not None:  # what has happened to the cache since
                found = [stretch for stretch in found if stretch.stop <= waiting.limit]
                if waiting.order is not None:
                    found = [stretch.select(waiting.order) for stretch in found]
                if self._sources and (keys := self._sources[0].keys) is not None:
                    found = [stretch.to(keys.device) for stretch in found]
            self._counted.add(found)


@dataclass(eq=False)
class _Waiting:
    """Rows of a prompt that are not reduced yet.

    Args:
        rows: the queries, with the batch as it was in the pass.
        weight: how many columns each stands for.
        limit: from this column on they have been taken back.
        keys: of each layer, as of the end of the pass, for whoever reduces in another thread. Later passes write behind
            what these rows see, or elsewhere. None to take what the sources hold when it is wanted.
        computed: the point from which on they are there.
        order: which of the batch's rows each row of today was; None for the same.
        taken: whether somebody reduces them.
        done: opens when nobody does any more.
    """

    rows: QueryRows
    weight: int
    limit: int
    keys: Sequence[torch.Tensor] | None = None
    computed: Event = field(default_factory=DoneEvent)
    order: torch.Tensor | None = None
    taken: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def stop(self) -> int:
        """The column behind the last one that counts."""
        return min(self.limit, int(self.rows.columns[-1]) + 1)


class _SampledPass:
    """See `PassObserver`.

    Args:
        owner: who counts it.
        sources: of the layers that are compared.
        computed: what the pass computes.
        columns: int64 `[n]`, those that are sampled.
        weight: how many each stands for.
    """

    def __init__(
        self,
        owner: AttentionDistances,
        sources: Sequence[KeysOfLayer],
        computed: ComputedColumns,
        columns: np.ndarray,
        weight: int,
    ) -> None:
        self._owner, self._sources, self._computed = owner, sources, computed
        self._columns, self._weight = columns, weight
        self._layers = {source.index for source in sources}
        self._seen: dict[int, tuple[torch.Tensor, float | None]] = {}
        self._places: dict[torch.device, torch.Tensor] = {}

    def observe(self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float | None) -> None:
        """See `QueryObserver`."""
        if layer not in self._layers:
            return
        computed, device = self._computed, query.device
        columns = None if computed.of_layer is None else computed.of_layer(layer)
        if query.shape[2] != (computed.stop - computed.first if columns is None else len(columns)):
            return  # of other tokens, which `end` finds missing
        if query.shape[2] > 1:
            if columns is not None:
                places = to_device(np.searchsorted(columns, self._columns), device)
            else:  # the same in all layers
                if device not in self._places:
                    self._places[device] = to_device(self._columns - computed.first, device)
                places = self._places[device]
            query = query.index_select(2, places)
        self._seen[layer] = query, scaling

    def undo(self) -> None:
        """See `PassObserver`."""
        self._owner.crop(int(self._columns[0]))

    def end(self) -> None:
        """See `PassObserver`."""
        layers = tuple(source.index for source in self._sources)
        if len(layers) < 2:
            return self._owner.cannot_see("fewer than two layers attend to all of their context")
        if unseen := [layer for layer in layers if layer not in self._seen]:
            return self._owner.cannot_see(f"the attention of layers {unseen} is not by queries and keys alone")
        if any(source.held < source.columns for source in self._sources):
            return self._owner.cannot_see("layers hold a part of their keys")
        queries, scalings = zip(*(self._seen[layer] for layer in layers), strict=True)
        keys, _ = _held(self._sources)
        if not _fit(queries, keys):
            return self._owner.cannot_see("the keys that layers hold are not those that their queries attend to")
        rows = QueryRows(self._columns, self._computed.pads, queries, scalings)
        try:
            return self._owner.take(rows, layers, keys, self._weight)
        except Exception as error:  # no request depends on it
            logger.warning("attention is not compared any more: %s: %s", type(error).__name__, error)
            return self._owner.cannot_see(f"comparing attention has failed: {error}")


def _fit(queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> bool:
    """Whether these are queries of the same heads in all layers, and keys of theirs."""
    heads, kv_heads = queries[0].shape[1], keys[0].shape[1]
    return heads % kv_heads == 0 and all(
        query.shape[1] == heads and key.shape[1] == kv_heads and query.shape[::3] == key.shape[::3]
        for query, key in zip(queries, keys, strict=True)
    )


def _held(sources: Sequence[KeysOfLayer]) -> tuple[list[torch.Tensor], torch.device]:
    """The keys of sources that hold something, and where the first ones lie."""
    keys = [source.keys for source in sources if source.keys is not None]
    return keys, keys[0].device


@torch.no_grad()
def _reduced(rows: QueryRows, weight: int, keys: Sequence[torch.Tensor], device: torch.device) -> list[Stretch]:
    """The sums of rows, by stretches; computed on `device`."""
    stretches = []
    for number, sums in enumerate(attention_sums(rows, keys, device, _ROWS_AT_ONCE)):
        columns = rows.columns[number * _ROWS_AT_ONCE :][:_ROWS_AT_ONCE]
        stretches.append(Stretch(int(columns[-1]) + 1, len(columns), 1, sums.times(weight)))
    return stretches


def _reduce_later(owner: weakref.ref[AttentionDistances], waiting: weakref.ref[_Waiting]) -> None:
    """Reduce rows that wait, if somebody still wants them."""
    observer, rows = owner(), waiting()
    if observer is not None and rows is not None:
        observer.reduce(rows)
