"""A source within a budget: its queries attend to chosen ones of the restored columns, and to what was computed."""

from __future__ import annotations

import numpy as np
import torch

from ..geometry import LayerKV
from ..patches.rotary import Unrotated
from ..restore.assemble import check_fit
from .base import RestoringPass
from .dense import DenseSource


class SelectedSource(DenseSource):
    """A layer with full attention that holds as many restored columns of each row as the budget buys.

    Which ones is known when the layer's queries are. So `append` hands computed keys and values back, and `attend`,
    which the registered attention function asks, puts the chosen ones before them.
    """

    selects = True

    def __init__(self, index: int) -> None:
        self._num_selected = 0  # columns in front that were chosen from among more
        super().__init__(index)

    def begin_pass(self, restoring: RestoringPass) -> None:
        """See `KVSource`."""
        super().begin_pass(restoring)
        if restoring.selection is not None:
            plan = restoring.plan
            self._restored, self._scattered, self._skipped = plan.suffix or 0, plan.columns, plan.unattended

    def end_pass(self) -> None:
        """See `KVSource`."""
        super().end_pass()
        self._parked: tuple[Unrotated, torch.Tensor] | None = None

    def _restore(
        self,
        restoring: RestoringPass,
        kind: LayerKV,
        pre_rope: Unrotated,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if restoring.selection is None:
            return super()._restore(restoring, kind, pre_rope, key_states, value_states)
        check_fit(restoring.plan, self.index, kind, pre_rope.keys.dtype)
        if pre_rope.rotated == "value":
            raise restoring.cannot_select()
        restoring.park(self.index)
        self._parked = pre_rope, key_states
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVSource`."""
        restoring = self._pass
        if restoring is None or restoring.selection is None:
            return keys, values
        if self._parked is None or self._parked[1] is not keys:
            raise restoring.cannot_select()
        (pre_rope, _), self._parked = self._parked, None
        restoring.unpark()
        plan, selection = restoring.plan, restoring.selection
        with restoring.account.timing("assemble_seconds"):
            self._num_selected = plan.num_selected
            all_keys, all_values = self.extend(keys, values, plan.columns, plan.unattended)
            selected = slice(0, self._num_selected)

            def rotate_(tensor: torch.Tensor, positions: np.ndarray) -> None:
                restoring.tap.rotate_at_(pre_rope, tensor, torch.from_numpy(positions))

            chosen = all_keys[:, :, selected], all_values[:, :, selected]
            selection.fill(self.index, query, keys, chosen[0], chosen[1], pre_rope.rotated, rotate_, scaling)
            all_keys[:, :, self._num_selected :] = keys
            all_values[:, :, self._num_selected :] = values
            return self._visible(keys.shape[2])

    def _take_back(self, columns: int) -> None:
        if self._num_selected and self.held - columns < self._num_selected:
            raise RuntimeError(
                "a cache that holds a part of its prompt, within a budget, cannot take back tokens of that prompt; "
                "make a new cache"
            )
        super()._take_back(columns)

    def reset(self) -> None:
        self._num_selected = 0
        super().reset()
