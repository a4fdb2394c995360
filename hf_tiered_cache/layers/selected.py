"""Cache layer with a token budget: its queries attend to selected restored positions and to computed ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import LostKVError, RestoreError
from ..patches.rope import PreRopeKV
from ..patches.scope import Attended, AttentionCall
from ..restore.plan import BudgetPlan
from ..restore.prefetch import check_fit
from ..selection.decode import DecodeSelector
from ..selection.fetched import Rotate
from ..selection.window import WindowDecodeSelector
from ..store.geometry import LayerKV
from ..store.memory import to_device
from .base import Pass, RestoringPass
from .dense import DenseSource

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
        self._num_selected = 0  # number of leading positions that were selected
        self.spared = 0
        """Unused budget: mask width minus positions held."""
        self.padding = 0
        """Largest left padding of a row at the selection, in positions; the mask may begin after it."""
        self.decode_selector = None
        self._rows: Sequence[Any] = []  # last selection of each row
        self._pre_rope: PreRopeKV | None = None  # of the current pass
        self._deferred: tuple[PreRopeKV, torch.Tensor] | None = None  # until `attend` selects

    def append(
        self, kind: LayerKV, pre_rope: PreRopeKV, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVSource`."""
        self._pre_rope, restoring = pre_rope, self._pass
        if restoring is None or not isinstance(restoring.plan, BudgetPlan):
            return super().append(kind, pre_rope, keys, values)
        check_fit(restoring.plan, self.index, kind, pre_rope.keys.dtype)
        if pre_rope.rotated == "value":
            raise restoring.cannot_select()
        self._deferred = pre_rope, keys
        return keys, values

    def begin_pass(self, restoring: RestoringPass) -> None:
        """See `KVSource`."""
        plan = restoring.plan
        if not isinstance(plan, BudgetPlan):
            return super().begin_pass(restoring)
        self._pass, self._restored, self._scattered = restoring, plan.suffix or 0, plan.num_positions
        self._skipped = self._restored if plan.streamed else plan.num_skipped
        return None

    def end_pass(self) -> None:
        """See `KVSource`."""
        super().end_pass()
        self._pre_rope = self._deferred = None

    def attend(self, forward_pass: Pass, call: AttentionCall) -> Attended:
        """See `KVSource`."""
        restoring, (query, keys, values, _, scaling) = self._pass, call
        if restoring is None:
            if self.decode_selector is not None and self._pre_rope is not None:
                self._reselect(self.decode_selector, self._pre_rope, forward_pass, query, scaling)
            return keys, values
        plan = restoring.plan
        if not isinstance(plan, BudgetPlan):
            return keys, values
        if self._deferred is None or self._deferred[1] is not keys:
            raise restoring.cannot_select()
        (pre_rope, _), self._deferred = self._deferred, None
        selection, rotate_ = restoring.selection, _rotation(restoring, pre_rope)
        output: torch.Tensor | None = None
        if restoring.streamed is not None:
            all_keys_to_index = selection.keys_to_index(self.index, keys) if selection is not None else ()
            output = restoring.streamed.attend(self.index, call, rotate_, all_keys_to_index)
            if selection is not None:
                selection.index(self.index, all_keys_to_index)
            elif not plan.budget_tokens:  # a chunk of a long prompt, which is stored and dropped
                return output
        self._num_selected = plan.budget_tokens
        if selection is not None:
            asking = query if output is None else query[:, :, -selection.observed :]
            self._num_selected = selection.choose(self.index, asking, keys, rotate_, scaling)
        self.spared = plan.budget_tokens - self._num_selected
        self.padding = max(group.pad for group in plan.groups)
        all_keys, all_values = self.extend(keys, values, plan.num_positions, plan.num_skipped + self.spared)
        self._announced()
        if selection is not None:
            selected = all_keys[:, :, : self._num_selected], all_values[:, :, : self._num_selected]
            selection.fill(self.index, *selected, rotate_)
        all_keys[:, :, self._num_selected :] = keys
        all_values[:, :, self._num_selected :] = values
        if selection is not None and (reselection := selection.decode_selector(self.index, keys.shape[0])) is not None:
            self.decode_selector, self._rows = reselection
        return self._views() if output is None else output

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
        """See `KVSource`. Offloaded positions are then selected like restored ones."""
        if not isinstance(self.decode_selector, WindowDecodeSelector):
            return
        first = self._num_selected
        if count := self.decode_selector.num_to_offload(self._rows, self.held - first):
            keys, values = (tensor[:, :, first : first + count] for tensor in self._views())
            rows = self.decode_selector.offload(self._rows, keys, values)
            # one atomic update, so that a Ctrl-C cannot leave positions held twice or not at all
            self.__dict__.update(self._without(first, count), _rows=rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask size for the full budget, because all layers share one mask.

        `patches.attention` cuts off the positions that this layer does not hold.
        """
        columns, first = super().get_mask_sizes(query_length)
        return columns + self.spared, first - self.spared

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `DenseSource`."""
        super().batch_select_indices(indices)
        if self.decode_selector is not None:
            self._rows = _forked([self._rows[row] for row in indices.tolist()])

    def _take_back(self, columns: int) -> None:
        if self._num_selected and self.held - columns < self._num_selected:
            raise RuntimeError(
                "a cache that holds a selection of its prompt, within a budget, cannot remove tokens of that prompt; "
                "create a new cache"
            )
        super()._take_back(columns)

    def fork(self) -> DenseSource:
        """See `DenseSource`."""
        twin = super().fork()
        assert isinstance(twin, SelectedSource)
        twin._rows = _forked(self._rows)
        return twin

    def rollback(self, snapshot: dict[str, Any]) -> None:
        """See `KVBuffer`. Keeps later selections and their buffers, because these overwrote positions in place."""
        now = self.__dict__.copy()
        super().rollback(snapshot)
        if self.decode_selector is not None:
            held = self.held
            self.__dict__.update({name: now[name] for name in ("_keys", "_values", "_start", "_shared", "_rows")})
            self._stop = self._start + held

    def reset(self) -> None:
        self._begin()
        super().reset()


def _forked(rows: Sequence[Any]) -> list[Any]:
    """Return an independent copy of the state of each row."""
    return [row and row.fork() for row in rows]


def _rotation(forward_pass: Pass, pre_rope: PreRopeKV) -> Rotate:
    """Return a function that rotates stored keys as the layer's own keys were rotated."""

    def rotate_(tensor: torch.Tensor, positions: np.ndarray, stop: int) -> None:
        if pre_rope.rotated:
            forward_pass.tap.rotate_at_(pre_rope, tensor, to_device(positions, tensor.device), stop)

    return rotate_
