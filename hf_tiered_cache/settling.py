"""Forward pass over passages with a deferred plan, refined during the pass by a query probe and by KV deviation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .forward_pass import RestoringForward
from .methods import Method
from .patches.attach import Attachment
from .patches.attention import can_select, shows_queries
from .patches.layers import Stopped, decoder_layers, stopping
from .patches.rotary import RotaryTap
from .restore.asking import QuestionAttention
from .restore.columns import of_row, side_by_side
from .restore.plan import Plan, UnderWay
from .sources import LayerTensors
from .transfers import to_device, to_host


class SettlingForward(RestoringForward):
    """Pass that follows a deferred plan as far as it is known, and refines the rest (see `UnderWay`).

    1. The query probe (the question) runs through the first layers alone. The KV that these layers restore for it is
       kept and reused when they are computed, so the blocks of a layer are read and rotated once. The attention of the
       probe selects what is computed.
    2. A layer that compares runs twice: up to its attention, on the positions that the previous layer computed, and
       then completely, on the positions selected by the comparison. If the model does not allow that, the layer runs
       once, and the next layer computes fewer tokens.

    Args:
        plan, attachment, method, others: See `RestoringForward`.
    """

    def __init__(
        self, cache: object, sources: Any, attachment: Attachment, *others: Any, plan: Plan, method: Method, **more: Any
    ) -> None:
        self._sees = can_select(attachment.config) and shows_queries(attachment.model)
        if not self._sees or plan.base:  # the query probe cannot attend to tokens in the cache
            plan = _without_question(plan, method)
        super().__init__(cache, sources, attachment, *others, plan=plan, method=method, **more)
        self._filled: dict[int, dict[str, Any]] = {}  # buffer state of layers that are already restored
        self._to_compare = set(() if plan.under_way is None else plan.under_way.compare_layers)
        self._peeking: int | None = None  # layer that runs up to its attention (preview)
        self._moved: torch.Tensor | None = None  # float32 [batch, n], KV deviation at the comparing layer
        self._hidden: np.ndarray | None = None  # bool [rows, columns], while the query probe runs
        self._attention: QuestionAttention | None = None

    def _begin(self, stack: ExitStack) -> None:
        super()._begin(stack)
        self.selects = self._sees
        self._watch_question()

    def _watch_question(self) -> None:
        """Start to sum up the attention of the query probe."""
        under_way = self.plan.under_way
        if under_way is not None and under_way.questions:
            self._attention = QuestionAttention(under_way.asking_tokens)

    def _compute(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        under_way = self.plan.under_way
        if under_way is not None and under_way.asked_layers:
            self._ask(forward, under_way)
        return super()._compute(forward, kwargs)

    # --- query probe

    def _ask(self, forward: Callable[..., Any], under_way: UnderWay) -> None:
        """Run the query probe of each row through the first layers alone, and plan what is computed.

        The probe attends to itself, to what is restored, and to the first token of its row, which receives much of all
        attention.
        """
        plan, seen, asking = self.plan, self._attention, []
        assert seen is not None
        begins = {row: group.pad - plan.base for group in plan.groups for row in group.rows}
        self._hidden = np.zeros((len(begins), plan.columns), bool)
        for row, question in enumerate(under_way.questions):
            least = of_row(under_way.least, row)
            # a row without a query probe takes part with its last token
            asks = (least == begins[row]) | (least >= min(question, plan.columns - 1))
            self._hidden[row, least[~asks]] = True
            asking.append(least[asks])
        self.visible = to_device(~self._hidden, self.attachment.device_of(0))
        asked = side_by_side(asking)
        self._follow(replace(plan, computed=(asked,) * len(plan.computed)))
        layers = decoder_layers(self.attachment.model, len(plan.computed))
        with suppress(Stopped), stopping(layers, under_way.asked_layers):
            forward(**self._only(asked))
        self._hidden = self.visible = None
        self.tap = RotaryTap(self.attachment.kept_tables)
        with self.collector.timing("select_seconds"):
            computed = self.method.first_computed(under_way.context, seen.result())
        self._follow(replace(plan, computed=computed))
        self._watch_question()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """See `ForwardPass`."""
        if self._attention is not None and not self.sources[layer].window:
            with self.collector.timing("select_seconds"):
                self._attention.note(query, keys, mask, scaling)
        if self._peeking == layer:
            self._go_on(layer, first=layer)
            raise Stopped
        return super().attend(layer, query, keys, values, mask, scaling)

    def hidden(self, first: int, device: torch.device) -> torch.Tensor | None:
        return None if self._hidden is None else to_device(self._hidden[:, first:], device)

    # --- KV deviation

    def peeks_at(self, layer: int) -> bool:
        """See `Scope`."""
        return self._sees and self.compares(layer)

    def peek(self, layer: int, run: Callable[[], object]) -> None:
        """See `Scope`."""
        self._peeking = layer
        try:
            with suppress(Stopped):
                run()
        finally:
            self._peeking = None

    def compares(self, layer: int) -> bool:
        return self._hidden is None and layer in self._to_compare

    def compare(self, layer: int, stored: LayerTensors, computed: LayerTensors) -> None:
        self._moved = self.method.moved(stored, computed)
        if self._peeking != layer:
            self._go_on(layer, first=layer + 1)

    def _go_on(self, layer: int, first: int) -> None:
        """Select the positions computed from layer `first` on, by the KV deviation measured at `layer`."""
        plan = self.plan
        assert self._moved is not None and plan.under_way is not None
        with self.collector.timing("select_seconds"):
            attention = None if self._attention is None else self._attention.result()
            (moved,) = to_host(self._moved)
            chosen = self.method.go_on(plan.under_way, layer, plan.computed[layer], moved, attention)
        self._follow(replace(plan, computed=plan.computed[:first] + (chosen,) * (len(plan.computed) - first)))
        self._to_compare.remove(layer)
        if not self._to_compare:
            self._attention = None

    # --- shared by both steps

    def _follow(self, plan: Plan) -> None:
        """Replace the plan for the remaining layers."""
        self.plan = self.prefetch.plan = plan
        self._columns.clear()  # keyed by arrays of the old plan
        self._place(plan)

    def take_filled(self, layer: int) -> dict[str, Any] | None:
        return self._filled.pop(layer, None)

    def may_fill(self, layer: int, filled: dict[str, Any]) -> bool:
        if self._hidden is None and self._peeking != layer:
            return False
        self._filled[layer] = filled
        return True


def _without_question(plan: Plan, method: Method) -> Plan:
    """Return the plan without a query probe.

    For models that do not expose queries, and for passes after tokens that the cache holds already.
    """
    under_way = plan.under_way
    if under_way is None or not under_way.questions:
        return plan
    computed = method.first_computed(under_way.context, None)
    compares = replace(under_way, questions=(), asked_layers=0) if under_way.compare_layers else None
    return replace(plan, computed=computed, under_way=compares)
