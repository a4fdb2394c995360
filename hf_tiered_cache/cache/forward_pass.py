"""Forward passes: computed KV is recorded, and other KV is restored from the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..conversations.distances import SampledPass
from ..errors import LayerOrderError, RestoreError, UnsupportedModelError
from ..layers import LayeredCache, LayerTensors
from ..methods import BudgetMethod, Method, Passages
from ..passages.recompute import ProbeAttentionSum
from ..patches.attach import Attachment
from ..patches.attention import can_scatter, can_select, shows_queries, without_first
from ..patches.layers import decoder_layers, dropping
from ..patches.rope import TableCache
from ..patches.scope import Attended, AttentionCall, Scope, enter, leave_to
from ..patches.tap import PreRopeKV, RotaryTap
from ..restore.fetch import Fetcher
from ..restore.plan import BudgetPlan, PassagesPlan, Plan, RecomputePlan
from ..restore.prefetch import Prefetch
from ..restore.rows import Positions, places
from ..selection.decode import DecodeSelection, DecodeSelector
from ..selection.indexes import IndexSidecars
from ..selection.prompt import SelectiveRestore
from ..selection.streamed import StreamedPrefix
from ..store.geometry import LayerKV
from ..store.memory import to_device, to_host
from ..tiers.collector import StatsCollector
from .recorder import Recorder
from .storage import Storage
from .suitability import cannot_select, needs_attention

_layer_kv = lru_cache(maxsize=256)(LayerKV)
"""Cached constructor of `LayerKV`: layers are described alike at every token, and often among themselves."""


def kind_of(pre_rope: PreRopeKV, keys: torch.Tensor, values: torch.Tensor, window: int) -> LayerKV:
    """Return the layout of the keys and values that a layer with this window passes to its cache (0: none)."""
    _, key_heads, _, key_dim = keys.shape
    _, value_heads, _, value_dim = values.shape
    rotation = pre_rope.rotated, pre_rope.dims, pre_rope.position_independent, pre_rope.bias is not None
    return _layer_kv(key_heads, key_dim, value_heads, value_dim, window, *rotation)


class ForwardPass(Scope):
    """Forward pass that computes all tokens it is given, which begin at position `first` of the sequence.

    The passes of the model in its current state share `tables`.
    """

    observer: SampledPass | None

    def __init__(
        self,
        cache: LayeredCache,
        attachment: Attachment,
        collector: StatsCollector,
        tables: TableCache | None = None,
        recorder: Recorder | None = None,
        first: int = 0,
    ) -> None:
        super().__init__(cache, RotaryTap() if tables is None else RotaryTap(tables))
        self._first = first
        self._stack = ExitStack()
        self.layers, self.kv_sources = cache.layers, cache.kv_sources
        self.attachment, self.collector, self.recorder = attachment, collector, recorder
        self.assemble_seconds = 0.0
        """Seconds that this thread spent on restored and selected KV, including waiting for it."""
        self._decode_selection: DecodeSelection | None = None
        self._masks: dict[tuple[tuple[int, ...], int, torch.device], torch.Tensor] = {}  # see `mask_without`
        self.selects = any(source.decode_selector is not None or source.unused for source in self.kv_sources)
        self.captures = recorder is not None or self.selects

    def run(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's `forward` with these arguments."""
        with self._stack as stack:
            self._begin(stack)
            self.tap.begin(kwargs.get("position_ids"))
            if self.attachment.compiled:
                stack.enter_context(self.attachment.running_eagerly())
            stack.callback(leave_to, enter(self))
            try:
                return forward(**kwargs)
            finally:
                if self.assemble_seconds:
                    self.collector.add(assemble_seconds=self.assemble_seconds)

    def close(self) -> None:
        """Release the resources of the pass, if an interrupt (Ctrl-C) has prevented that."""
        self._stack.close()

    def _begin(self, stack: ExitStack) -> None:
        """Set up the resources of the pass; `stack` releases them."""
        if self.recorder is not None:
            self.recorder.begin(self._first)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values, `[batch, heads, n, dim]`, and return those to attend to."""
        source = self.layers[layer]
        pre_rope = self.tap.take(layer, keys, values)
        kind = kind_of(pre_rope, keys, values, source.window)
        if self.recorder is not None:
            self._record(self.recorder, layer, kind, pre_rope.keys, pre_rope.values)
        return source.append(kind, pre_rope, keys, values)

    def _record(self, recorder: Recorder, layer: int, kind: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Record what a layer has computed, unrotated, `[batch, heads, n, dim]` each."""
        recorder.capture(layer, kind, keys, values)

    def attend(self, layer: int, call: AttentionCall) -> Attended:
        """See `Scope`. The cache layer decides."""
        started = time.perf_counter()
        try:
            attended: Attended = self.layers[layer].attend(self, call)
            return attended
        finally:
            self.assemble_seconds += time.perf_counter() - started

    def mask_without(self, call: AttentionCall, unused: tuple[int, ...], width: int) -> torch.Tensor | None:
        if not any(unused):
            return call.mask if call.mask is None else call.mask[..., -width:]
        key = unused, width, call.query.device
        if key not in self._masks:
            self._masks[key] = without_first(call.mask, to_device(np.array(unused), call.query.device), width)
        return self._masks[key]

    def decode_selection(self, decode_selector: DecodeSelector) -> DecodeSelection:
        if self._decode_selection is None:
            self._decode_selection = DecodeSelection(decode_selector, self.collector)
            self._stack.callback(self._decode_selection.fetcher.cancel)
        return self._decode_selection


class RestoringForward(ForwardPass):
    """Forward pass that follows a plan (see `layers.dense`). The first arguments are those of `ForwardPass`."""

    def __init__(self, *arguments: Any, plan: Plan, store: Storage, method: Method) -> None:
        super().__init__(*arguments)
        self.method = method
        self.plan = plan
        """Plan that this pass follows. A deferred plan is replaced during the pass."""
        self._last_layer = -1
        self._first_narrowed: int | None = None
        self.captures = True
        self.unstored = store.unstored.to_compute(plan) if self.recorder is not None else None
        """First tokens that segments lack and this pass computes; None if there are none, or memory has no room."""
        self._positions_from: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        self._recompute_masks: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._deferred_layer: int | None = None  # its computed KV is appended, and its queries will select the rest
        self._devices = self.attachment.devices
        self.fetcher = Fetcher(store.residency, self.collector, self._devices.__getitem__, method.ahead_bytes)
        self.prefetch = Prefetch(plan, self.fetcher)
        self.selection: SelectiveRestore | None = None
        self.streamed: StreamedPrefix | None = None
        # layers that attend to images have no KV in a prompt without any; a layout ends with the last layer that has
        kinds = plan.readers[0].shape.layout.layers
        self._restored_sources = [
            source for source in self.kv_sources if source.index < len(kinds) and kinds[source.index] is not None
        ]
        selecting = [source.index for source in self._restored_sources if source.selects]
        if isinstance(plan, BudgetPlan) and any(budget.streamed for budget in plan.budgets):
            self.streamed = StreamedPrefix(plan, selecting, self.fetcher)
            self.selects = True
        if isinstance(plan, BudgetPlan) and any(budget.held for budget in plan.budgets):
            assert isinstance(method, BudgetMethod)
            if method.reorder:
                store.rewriter.recall({piece.reader for group in plan.groups for piece in group.pieces})
            self.selection = SelectiveRestore(
                plan,
                selecting,
                method.selector(),
                self.fetcher,
                IndexSidecars(store.disk, store.writer.later),
                method.prefetches,
                store.rewriter.importance if method.reorder else None,
                method.reselect,
                method.observed,
                type(method).__name__,
            )
            self.selects = True

    def run(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        try:
            output = super().run(forward, kwargs)
        except Exception as error:
            self.fetcher.confirm()  # report a damaged block first: it may have caused this error
            if self._deferred_layer is None or not isinstance(error, RuntimeError):
                raise
            raise self.cannot_select() from error
        if self._deferred_layer is not None:
            raise self.cannot_select()
        self.fetcher.confirm()  # wait for the side stream; a damaged block undoes the pass
        return output

    def _begin(self, stack: ExitStack) -> None:
        """Announce the restored KV to masks and sources, and start to fetch it."""
        super()._begin(stack)
        plan, config = self.plan, self.attachment.config
        for source in self._restored_sources:
            stack.callback(source.end_pass)
            source.begin_pass(self)
        if plan.suffix is None:
            if not can_scatter(config):
                raise needs_attention(self.method, self.attachment.model)
            # without a mask, only this implementation is causal
            is_sdpa = config._attn_implementation == "sdpa"
            if isinstance(plan, RecomputePlan) and is_sdpa and shows_queries(self.attachment.model, self.layers):
                self.recompute_lengths = plan.recompute_lengths
            length = self.recompute_lengths[0] if self.recompute_lengths else 0
            self.positions = to_device(plan.computed[0][length:] + plan.base, self._devices[0])
            self._drop_with_depth(plan)
            first = min(self.query_indexes, default=None) if self._first_narrowed is None else self._first_narrowed
            if first is not None:
                layers = decoder_layers(self.attachment.model, len(plan.computed))
                stack.enter_context(dropping(layers, first, self))
        stack.callback(self.fetcher.cancel)
        if (budgeted := self.streamed or self.selection) is not None:
            if not can_select(self.attachment.model):
                raise needs_attention(self.method, self.attachment.model)
            budgeted.start()
        self.prefetch.start()

    def _drop_with_depth(self, plan: Plan) -> None:
        """Set the hidden states that each layer keeps."""
        self.query_indexes.clear()
        self.hidden_indexes.clear()
        first, queries = plan.computed[0], None
        for layer, (before, positions) in enumerate(pairwise((first, *plan.computed))):
            device = self._devices[layer]
            if positions is not before or (queries is not None and queries.device != device):
                queries = _places_on(device, positions, first)
            hidden = queries if before is first else _places_on(device, positions, before)
            if queries is not None:
                self.query_indexes[layer] = queries
            if hidden is not None:
                self.hidden_indexes[layer] = hidden

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer <= self._last_layer:  # its blocks were released after that layer
            raise LayerOrderError(f"layer {layer} runs after layer {self._last_layer}")
        if keys.shape[2] != self.plan.computed[layer].shape[-1]:
            raise RestoreError(self.plan.readers[0].id, f"layer {layer} computes different tokens than its input")
        self._last_layer, started = layer, time.perf_counter()
        try:
            appended = super().append(layer, keys, values)
            if isinstance(self.plan, BudgetPlan) and self.layers[layer].selects:
                if self._deferred_layer is not None:
                    raise self.cannot_select()
                self._deferred_layer = layer
            return appended
        finally:
            self.assemble_seconds += time.perf_counter() - started

    def _record(self, recorder: Recorder, layer: int, kind: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `ForwardPass`. Only the positions after the restored ones are new to the store."""
        if self.unstored is not None:
            self.unstored.capture(layer, kind, keys, values)
        if self.plan.suffix is None:
            recorded = self.plan.num_positions - self.plan.restored_until
            keys, values = keys[:, :, -recorded:], values[:, :, -recorded:]
        recorder.capture(layer, kind, keys, values)

    def attend(self, layer: int, call: AttentionCall) -> Attended:
        if layer == self._deferred_layer:
            self._deferred_layer = None
        return super().attend(layer, call)

    def recompute_mask(self, layer: int, device: torch.device) -> torch.Tensor | None:
        window, length = self.layers[layer].window, self.recompute_lengths[layer]
        if not window or length <= window:
            return None
        key = window, device
        if key not in self._recompute_masks:
            positions = torch.arange(self.recompute_lengths[0], device=device)
            distance = positions.unsqueeze(1) - positions
            self._recompute_masks[key] = (distance >= 0) & (distance < window)  # bool [queries, positions]
        return self._recompute_masks[key][None, None, :length, :length]

    # --- called by sources (see `layers.dense`)

    def computed_positions(self, layer: int, first: int, device: torch.device) -> torch.Tensor:
        positions = self.plan.computed[layer]
        key = id(positions), first, device
        if key not in self._positions_from:
            self._positions_from[key] = to_device(positions - first, device)
        return self._positions_from[key]

    def cannot_select(self) -> UnsupportedModelError:
        return cannot_select(self.method, self.attachment.model)


def _places_on(device: torch.device, subset: Positions, superset: Positions) -> torch.Tensor | None:
    """Return `places` on a device."""
    indexes = places(subset, superset)
    return None if indexes is None else to_device(indexes, device)


class RefiningForward(RestoringForward):
    """Pass that follows a `PassagesPlan`, and narrows at one layer what the later ones compute.

    The layer that compares runs twice: up to its attention (the preview), on the positions that the previous layer
    computed, and then completely, on the positions selected by the comparison. The KV that it restores for the preview
    is kept, so its blocks are read and rotated once. If the model does not allow a preview, the layer runs once, and
    the next layer computes fewer tokens.

    The attention of the query probe (the question) is summed over the layers up to the comparison.
    """

    method: Passages
    plan: PassagesPlan

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        plan = self.plan
        assert isinstance(plan, PassagesPlan) and isinstance(self.method, Passages)
        self.plan = plan
        self._first_narrowed = 1
        model = self.attachment.model
        self.selects = can_select(model) and shows_queries(model, self.layers)  # `attend` runs
        self.preview_layer = plan.compare_layer if self.selects else None
        self._previews = False  # whether this layer runs up to its attention now
        self._kv_deviation: torch.Tensor | None = None  # float32 [batch, n], KV deviation at the comparing layer
        self._attention: ProbeAttentionSum | None = None
        # positions of the sum include those in the cache, positions of a plan do not
        if self.selects and not plan.base and plan.question_tokens:
            self._attention = ProbeAttentionSum(plan.question_tokens)

    def attend(self, layer: int, call: AttentionCall) -> Attended:
        if self._attention is not None or self._previews:
            with self.collector.timing("select_seconds"):
                if self._attention is not None and not self.layers[layer].window:
                    self._attention.note(call)
                if self._previews:
                    self._narrow(layer, first=layer)
                    raise _Previewed
        return super().attend(layer, call)

    def preview(self, layer: int, run: Callable[[], object]) -> None:
        self._previews = True
        try:
            with suppress(_Previewed):
                run()
        finally:
            self._previews, self._last_layer = False, layer - 1

    def _narrow(self, layer: int, first: int) -> None:
        """Select the positions computed from layer `first` on, by the KV deviation measured at `layer`."""
        plan = self.plan
        assert self._kv_deviation is not None
        attention = None if self._attention is None else self._attention.result()
        (kv_deviation,) = to_host(self._kv_deviation)
        positions = self.method.narrow(plan, plan.computed[layer], kv_deviation, attention)
        plan = replace(plan, computed=plan.computed[:first] + (positions,) * (len(plan.computed) - first))
        self.plan = self.prefetch.plan = plan
        self._positions_from.clear()  # keyed by arrays of the old plan
        self._drop_with_depth(plan)
        self.preview_layer = self._attention = None

    def compare(self, layer: int, stored: LayerTensors, computed: LayerTensors) -> None:
        self._kv_deviation = self.method.kv_deviation(stored, computed)
        if not self._previews:
            with self.collector.timing("select_seconds"):
                self._narrow(layer, first=layer + 1)


class _Previewed(Exception):
    """Signal that a preview has reached the attention of its layer."""
