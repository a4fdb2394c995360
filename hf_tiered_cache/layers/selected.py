"""Cache layer with a token budget: its queries attend to selected restored positions and to computed ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..errors import CacheMismatchError, LostKVError, RestoreError
from ..patches.scope import Attended, AttentionCall
from ..patches.tap import PreRopeKV
from ..restore.plan import BudgetPlan
from ..restore.prefetch import check_fit
from ..selection.decode import DecodeSelector
from ..selection.fetched import Rotate
from ..selection.streamed import attention
from ..selection.window import WindowDecodeSelector
from ..store.geometry import LayerKV
from ..store.memory import to_device
from .buffer import Announced
from .dense import DenseSource, Pass, RestoringPass

logger = logging.getLogger("hf_tiered_cache")


class SelectedSource(DenseSource):
    """Cache layer with full attention that holds at most a budget of restored positions of each row.

    The selection needs the layer's queries. So `append` returns the computed keys and values, and `attend`, called by
    the registered attention function, puts the selected positions before them.
    """

    selects = True

    def __init__(self, index: int) -> None:
        self._begin()
        super().__init__(index)

    def _begin(self) -> None:
        self._own: list[int] = []  # index of the first computed entry of each row; [] without a selection
        self._empty: tuple[int, ...] = ()  # number of leading entries of each row that hold nothing
        self.unused = ()  # the same, if the mask of the model does not hide all of them
        self.decode_selector = None
        self._rows: Sequence[Any] = []  # last selection of each row
        self._appended: tuple[PreRopeKV, torch.Tensor] | None = None  # with the rotated keys, until `attend`

    @property
    def _num_selected(self) -> int:
        """Number of leading entries that hold restored tokens in some row, or nothing."""
        return max(self._own, default=0)

    def append(
        self, kind: LayerKV, pre_rope: PreRopeKV, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._appended, restoring = (pre_rope, keys), self._pass
        if restoring is None or not isinstance(restoring.plan, BudgetPlan):
            return super().append(kind, pre_rope, keys, values)
        check_fit(restoring.plan, self.index, kind, pre_rope.keys.dtype)
        if pre_rope.rotated == "value":
            raise restoring.cannot_select()
        return keys, values

    def _assign(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        if self.unused or self.decode_selector is not None:
            raise CacheMismatchError(
                "the keys and values of a layer that attends to a part of its prompt cannot be replaced; use the exact "
                "method"
            )
        super()._assign(keys, values)

    def begin_pass(self, restoring: RestoringPass) -> None:
        plan = restoring.plan
        if not isinstance(plan, BudgetPlan):
            return super().begin_pass(restoring)
        skipped = plan.restored_until if plan.streams_all else plan.num_skipped
        self._pass, self._announced = restoring, Announced(plan.suffix or 0, plan.num_positions, skipped)
        return None

    def attend(self, forward_pass: Pass, call: AttentionCall) -> Attended:
        restoring, (query, keys, values, _, scaling, *_) = self._pass, call
        appended, self._appended = self._appended, None
        if restoring is None:
            if self.decode_selector is not None and appended is not None:
                self._reselect(self.decode_selector, appended[0], forward_pass, query, scaling)
            if not self.unused:
                return call
            return call._replace(mask=forward_pass.mask_without(call, self.unused, keys.shape[2]))
        plan = restoring.plan
        if not isinstance(plan, BudgetPlan):
            return call
        if appended is None or appended[1] is not keys or not call.is_plain:
            raise restoring.cannot_select()
        selection, rotate_ = restoring.selection, _rotation(restoring, appended[0])
        output: torch.Tensor | None = None
        if restoring.streamed is not None:
            all_keys_to_index = selection.keys_to_index(self.index, keys) if selection is not None else ()
            count = keys.shape[2]
            repeats = tuple(count - budget.computed for budget in plan.row_budgets)
            own_call = call._replace(mask=restoring.mask_without(call, repeats, count))
            output = restoring.streamed.attend(self.index, own_call, rotate_, all_keys_to_index)
            if selection is None:  # a piece of a long prompt, which is stored and dropped
                return output
            selection.index(self.index, all_keys_to_index)
        assert selection is not None, "layers hold a part of what the plan restores"
        all_keys, all_values = self._hold(plan, keys, values)
        if (reselection := selection.restore(self.index, call, all_keys, all_values, rotate_)) is not None:
            self.decode_selector, self._rows = reselection
        if output is not None and plan.streams_all:
            return output
        mask = restoring.mask_without(call, self.unused, all_keys.shape[2])
        attended = call._replace(keys=all_keys, values=all_values, mask=mask)
        return attended if output is None else _merged(attended, output, plan)

    def _hold(self, plan: BudgetPlan, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the entries of a prompt, of which only the computed ones, the last, are filled.

        Return keys and values of all entries, `[batch, kv_heads, entries, dim]` each.
        """
        most, skipped, budgets = plan.num_entries, plan.num_skipped, plan.row_budgets
        all_keys, all_values = self.extend(keys, values, plan.num_positions, skipped)
        for target, computed_kv in ((all_keys, keys), (all_values, values)):
            target[:, :, most - keys.shape[2] :] = computed_kv
        self._own = [most - budget.computed for budget in budgets]
        self._empty = tuple(most - budget.entries for budget in budgets)
        # the model's mask hides padding, and what a row with all of its tokens lacks is padding
        is_hidden = self._empty == tuple(max(0, budget.group.pad - skipped) for budget in budgets)
        self.unused = () if is_hidden else self._empty
        return all_keys, all_values

    def _reselect(
        self,
        decode_selector: DecodeSelector,
        pre_rope: PreRopeKV,
        forward_pass: Pass,
        query: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Reselect for these queries: newly selected tokens replace deselected ones in place."""
        keys, values = self._views()
        rotate_ = _rotation(forward_pass, pre_rope)
        try:
            selection = forward_pass.decode_selection(decode_selector)
            selection.reselect(self.index, self._rows, query, keys, values, rotate_, scaling)
        except RestoreError as error:  # the last selection is still held
            if not decode_selector.may_stay:
                raise LostKVError(error.segment, str(error)) from error
            logger.warning("%s; the current selection is kept from now on", error)
            self.decode_selector = None

    def offload(self) -> None:
        """See `DenseSource`. Offloaded positions are then selected like restored ones."""
        if not isinstance(self.decode_selector, WindowDecodeSelector):
            return
        selector, num_held = self.decode_selector, self.held
        counts = [selector.num_to_offload(row, num_held - own) for row, own in zip(self._rows, self._own, strict=True)]
        if not any(counts):
            return
        rows, (keys, values) = list(self._rows), self._views()
        for row, (own, count) in enumerate(zip(self._own, counts, strict=True)):
            if count:
                offloaded = keys[row, :, own : own + count], values[row, :, own : own + count]
                rows[row] = selector.offload(rows[row], *offloaded)
        # rows stay aligned at the end, so the entries before the offloaded ones move
        empty = [before + count for before, count in zip(self._empty, counts, strict=True)]
        fewest = min(empty)
        own_entries = [own + count - fewest for own, count in zip(self._own, counts, strict=True)]
        for row, (own, new_own) in enumerate(zip(self._own, own_entries, strict=True)):
            if rows[row] is not None:
                rows[row] = replace(rows[row], first=rows[row].first + new_own - own)
        state = self._without(self._own, counts, fewest)
        unused = tuple(count - fewest for count in empty)
        # one atomic update, so that a Ctrl-C cannot leave positions held twice or not at all
        self.__dict__.update(state, _rows=rows, _own=own_entries, _empty=unused, unused=unused if any(unused) else ())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        rows = indices.tolist()
        self._own = [self._own[row] for row in rows] if self._own else []
        self._empty = tuple(self._empty[row] for row in rows) if self._empty else ()
        self.unused = self._empty if self.unused else ()
        if self.decode_selector is not None:
            self._rows = _forked([self._rows[row] for row in rows])

    def _take_back(self, num_positions: int) -> None:
        if self._num_selected and self.held - num_positions < self._num_selected:
            raise RuntimeError(
                "a cache that holds a selection of its prompt, within a budget, cannot remove tokens of that prompt; "
                "create a new cache"
            )
        super()._take_back(num_positions)

    def fork(self) -> DenseSource:
        twin = super().fork()
        assert isinstance(twin, SelectedSource)
        twin._rows = _forked(self._rows)
        return twin

    def rollback(self, snapshot: dict[str, Any]) -> None:
        """See `KVBuffer`. Keeps later selections and their buffers, because these overwrote positions in place."""
        now = self.__dict__.copy()
        super().rollback(snapshot)
        if self.decode_selector is not None:
            num_held = self.held
            self.__dict__.update({name: now[name] for name in ("_keys", "_values", "_start", "_shared", "_rows")})
            self._stop = self._start + num_held
            self.note_content()

    def reset(self) -> None:
        self._begin()
        super().reset()


def _merged(call: AttentionCall, output: torch.Tensor, plan: BudgetPlan) -> torch.Tensor:
    """Return the attention output of streamed rows, `[batch, heads, n, dim]`, with that of the other rows by `call`."""
    rows = [row for row, budget in enumerate(plan.row_budgets) if not budget.streamed]
    query, keys, values, mask = (
        tensor if tensor is None or len(tensor) == 1 else tensor[rows]
        for tensor in (call.query, call.keys, call.values, call.mask)
    )
    assert query is not None and keys is not None and values is not None
    partial = attention(query, keys, values, call.scaling, mask, softcap=call.softcap)
    output[rows] = partial.with_sinks(call.sinks).to(output.dtype)
    return output


def _forked(rows: Sequence[Any]) -> list[Any]:
    """Return an independent copy of the state of each row."""
    return [row and row.fork() for row in rows]


def _rotation(forward_pass: Pass, pre_rope: PreRopeKV) -> Rotate:
    """Return a function that rotates stored keys as the layer's own keys were rotated."""

    def rotate_(tensor: torch.Tensor, positions: np.ndarray, stop: int) -> None:
        if pre_rope.rotated:
            forward_pass.tap.rotate_at_(pre_rope, tensor, to_device(positions, tensor.device), stop)

    return rotate_
