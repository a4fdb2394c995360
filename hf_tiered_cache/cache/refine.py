"""Forward pass over passages with a deferred plan, refined during the pass by KV deviation and a query probe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ..layers import LayerTensors
from ..methods import Method, Passages
from ..passages.recompute import ProbeAttentionSum
from ..patches.attention import can_select, shows_queries
from ..patches.scope import Attended, AttentionCall
from ..restore.plan import PassagesPlan, Plan
from ..store.memory import to_host
from .forward_pass import RestoringForward
from .storage import Storage


class RefiningForward(RestoringForward):
    """Pass that follows a `PassagesPlan`, and narrows at one layer what the later ones compute.

    The layer that compares runs twice: up to its attention (the preview), on the positions that the previous layer
    computed, and then completely, on the positions selected by the comparison. The KV that it restores for the preview
    is kept, so its blocks are read and rotated once. If the model does not allow a preview, the layer runs once, and
    the next layer computes fewer tokens.

    The attention of the query probe (the question) is summed over the layers up to the comparison.
    """

    method: Passages

    def __init__(self, *arguments: Any, plan: Plan, store: Storage, method: Method) -> None:
        super().__init__(*arguments, plan=plan, store=store, method=method)
        assert isinstance(plan, PassagesPlan) and isinstance(method, Passages)
        self._first_narrowed = 1
        self._choice = plan.choice
        self.selects = can_select(self.attachment.config) and shows_queries(self.attachment.model)  # `attend` runs
        self._compares = True  # until the comparison
        self._previewed_layer: int | None = None  # layer that runs up to its attention (preview)
        self._kv_deviation: torch.Tensor | None = None  # float32 [batch, n], KV deviation at the comparing layer
        self._attention: ProbeAttentionSum | None = None
        # positions of the sum include those in the cache, positions of a plan do not
        if self.selects and not plan.base and self._choice.question_tokens:
            self._attention = ProbeAttentionSum(self._choice.question_tokens)

    def attend(self, layer: int, call: AttentionCall) -> Attended:
        if self._attention is not None and not self.layers[layer].window:
            with self.collector.timing("select_seconds"):
                self._attention.note(call)
        if self._previewed_layer == layer:
            self._narrow(layer, first=layer)
            raise _Previewed
        return super().attend(layer, call)

    def should_preview(self, layer: int) -> bool:
        return self.selects and self._compares and layer == self._choice.compare_layer

    def preview(self, layer: int, run: Callable[[], object]) -> None:
        self._previewed_layer = layer
        try:
            with suppress(_Previewed):
                run()
        finally:
            self._previewed_layer, self._last_layer = None, layer - 1

    def _narrow(self, layer: int, first: int) -> None:
        """Select the positions computed from layer `first` on, by the KV deviation measured at `layer`."""
        plan = self.plan
        assert self._kv_deviation is not None
        with self.collector.timing("select_seconds"):
            attention = None if self._attention is None else self._attention.result()
            (kv_deviation,) = to_host(self._kv_deviation)
            positions = self.method.narrow(self._choice, plan.computed[layer], kv_deviation, attention)
        plan = replace(plan, computed=plan.computed[:first] + (positions,) * (len(plan.computed) - first))
        self.plan = self.prefetch.plan = plan
        self._columns.clear()  # keyed by arrays of the old plan
        self._drop_with_depth(plan)
        self._compares, self._attention = False, None

    def compare(self, layer: int, stored: LayerTensors, computed: LayerTensors) -> None:
        """See `layers.dense.RefiningPass`."""
        self._kv_deviation = self.method.kv_deviation(stored, computed)
        if self._previewed_layer != layer:
            self._narrow(layer, first=layer + 1)


class _Previewed(Exception):
    """Signal that a preview has reached the attention of its layer."""
