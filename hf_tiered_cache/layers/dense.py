"""Cache layers that hold all KV a layer's queries may see, and the interfaces of the pass that they serve.

There is one for each layer of the model, with full attention or a sliding window. They live as long as the cache.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedModelError
from ..patches.rope import picked
from ..patches.scope import Attended, AttentionCall
from ..patches.tap import PreRopeKV, RotaryTap
from ..restore.plan import PassagesPlan, Plan, RecomputePlan
from ..restore.prefetch import JoinedLayers, Prefetch, check_fit, restore_layer
from ..selection.decode import DecodeSelection, DecodeSelector
from ..selection.prompt import SelectiveRestore
from ..selection.streamed import StreamedPrefix
from ..store.geometry import LayerKV
from .buffer import Announced, KVBuffer, empty_buffer

LayerTensors = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer."""


class Pass(Protocol):
    """State that the cache layers share in one forward pass."""

    tap: RotaryTap

    def mask_without(self, call: AttentionCall, unused: tuple[int, ...], width: int) -> torch.Tensor | None:
        """Return the mask of a call for `width` entries, which also hides the first `unused` entries of each row.

        Layers with the same mask of the model share the result.
        """

    def decode_selection(self, decode_selector: DecodeSelector) -> DecodeSelection:
        """Return the decode selections of the pass, for cache layers that reselect."""


class RestoringPass(Pass, Protocol):
    """Forward pass that restores stored KV."""

    prefetch: Prefetch
    selection: SelectiveRestore | None
    """Selection of the restored tokens that layers hold; None if no tokens are selected."""
    streamed: StreamedPrefix | None
    """All restored tokens, for layers that attend to them without holding them; None if not streamed."""

    @property
    def plan(self) -> Plan:
        """Plan that the pass follows."""

    def computed_positions(self, layer: int, first: int, device: torch.device) -> torch.Tensor:
        """Return the positions that a layer computes, int64 `[n]` or `[batch, n]`, counted from `first`.

        Layers that compute the same positions share one tensor.
        """

    def cannot_select(self) -> UnsupportedModelError:
        """Return the error for a model with attention that cannot be observed."""


class RefiningPass(RestoringPass, Protocol):
    """Forward pass that follows a `PassagesPlan`, and compares stored and computed KV."""

    def compare(self, layer: int, stored: LayerTensors, computed: LayerTensors) -> None:
        """Compare stored and computed KV, `[batch, heads, n, dim]` each, to decide what later layers compute."""


class DenseSource(KVBuffer, CacheLayerMixin):
    """Cache layer with full attention that holds all computed and restored positions.

    A pass that restores begins with `begin_pass`. Every pass calls `append`, from the cache's `update`, and `attend`,
    from the registered attention function. `end_pass` ends a pass that restores.
    """

    is_sliding = False
    is_croppable = True
    window = 0
    """Sliding window in tokens; 0 for full attention."""
    _pass: RestoringPass | None
    selects = False
    """True if the layer's queries may select the tokens they attend to."""
    decode_selector: DecodeSelector | None = None
    """Decode selection of a layer that reselects in later passes, or None."""
    unused: tuple[int, ...] = ()
    """Number of leading entries of each row that hold nothing and must be masked; () if the model's mask is enough."""

    def __init__(self, index: int) -> None:
        self.index = index
        super().__init__()
        self.end_pass()

    # --- interface of a pass

    def begin_pass(self, restoring: RestoringPass) -> None:
        """Begin a pass that restores, so that masks match what the layer is going to hold."""
        plan, self._pass = restoring.plan, restoring
        if plan.suffix is not None:
            self._announced = Announced(restored=plan.suffix)
        else:
            skipped = max(0, plan.first_position(self.window)) if self.window else 0
            self._announced = Announced(scattered=plan.num_positions, skipped=skipped)

    def end_pass(self) -> None:
        """End the pass, successful or not. `rollback` undoes a failed pass."""
        self._pass = None
        self._announced = Announced()

    def offload(self) -> None:
        """Offload older computed KV, if the layer reselects. Called before a pass, which has announced nothing yet."""

    def append(
        self, kind: LayerKV, pre_rope: PreRopeKV, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rotated keys and the values that the layer has computed, `[batch, kv_heads, n, dim]` each.

        The model passes tensors of the layout `kind`; `pre_rope` has them as stored, before rotation.

        Returns:
            Keys and values for the model's attention: all that the queries may see, unless `attend` replaces them.
        """
        if self._pass is None:
            return self.update(keys, values)
        return self._restore(self._pass, kind, pre_rope, keys, values)

    def attend(self, forward_pass: Pass, call: AttentionCall) -> Attended:
        """Return what queries attend to, or the attention output if it is already computed."""
        return call

    def _restore(
        self,
        restoring: RestoringPass,
        kind: LayerKV,
        pre_rope: PreRopeKV,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine restored and computed positions, and return the keys and values that queries may see."""
        plan = restoring.plan
        first = max(0, plan.first_position(self.window)) if self.window else 0
        may_preview = isinstance(plan, PassagesPlan) and plan.compare_layer == self.index
        is_filled = may_preview and not self._announced.scattered  # by the preview
        if is_filled:
            keys, values = (tensor[:, :, tensor.shape[2] - (plan.num_positions - first) :] for tensor in self._views())
        else:
            keys, values = self._fill(restoring, kind, pre_rope, key_states, value_states, first)
        if (suffix := plan.suffix) is not None:
            for target, computed_kv in ((keys, key_states), (values, value_states)):
                target.narrow(2, suffix - first, computed_kv.shape[2]).copy_(computed_kv)
            return self._visible(key_states.shape[2])
        if isinstance(plan, RecomputePlan):
            recomputed = plan.recompute_lengths[self.index]
            for target, computed_kv in ((keys, key_states), (values, value_states)):
                target[:, :, :recomputed] = computed_kv[:, :, :recomputed]
                target[:, :, plan.restored_until :] = computed_kv[:, :, recomputed:]
            return self._visible(None)
        positions = restoring.computed_positions(self.index, first, keys.device)
        if may_preview and not is_filled:
            stored = picked(keys, positions, 2), picked(values, positions, 2)
            cast(RefiningPass, restoring).compare(self.index, stored, (key_states, value_states))
        for target, computed_kv in ((keys, key_states), (values, value_states)):
            _put(target, positions, computed_kv)
        return self._views() if may_preview else self._visible(None)  # a preview forgets nothing

    def _fill(
        self,
        restoring: RestoringPass,
        kind: LayerKV,
        pre_rope: PreRopeKV,
        like_keys: torch.Tensor,
        like_values: torch.Tensor,
        first: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the positions of the pass from `first` on, and restore and rotate those that are stored.

        The first layer of a KV cache group restores the others together with it, where that is possible.

        Returns:
            Views of these positions, `[batch, heads, positions - first, dim]` each.
        """
        plan, prefetch, dtype = restoring.plan, restoring.prefetch, pre_rope.keys.dtype
        is_new = self._keys is None and len(like_keys) == 1 and like_keys.dtype == like_values.dtype
        joined = self._joined(restoring, kind, pre_rope, like_keys) if is_new else None
        if joined is not None and pre_rope.rotates_like(joined.like):
            check_fit(plan, self.index, kind, dtype)
            prefetch.done(self.index)
            return self.adopt(*joined.of(self.index), plan.num_positions)
        keys, values = self.extend(like_keys, like_values, plan.num_positions, first)
        rotate_ = partial(restoring.tap.rotate_, pre_rope)
        restore_layer(prefetch, self.index, kind, dtype, keys, values, first, rotate_)
        return keys, values

    def _joined(
        self, restoring: RestoringPass, kind: LayerKV, pre_rope: PreRopeKV, like_keys: torch.Tensor
    ) -> JoinedLayers | None:
        """Return this layer with the others of its KV cache group, restored and rotated; None if that is impossible."""
        plan, prefetch = restoring.plan, restoring.prefetch
        if (joined_before := prefetch.joined.pop(self.index, None)) is not None:
            return joined_before
        joined = prefetch.join(self.index, kind, pre_rope, partial(empty_buffer, like_keys))
        if joined is not None and kind.rotated:
            spans = [plan.restored_span(layer, 0) or (0, plan.num_positions) for layer in joined.layers]
            low, end = min(spans)  # what a layer computes of it is overwritten
            like = restoring.tap.joined(pre_rope, joined.layers)
            restoring.tap.rotate_(like, joined.tensors(kind.rotated)[:, :, low:end], low)
        return joined

    # --- transformers' interface of a cache layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: buffers are allocated for the first positions."""

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """True if buffers are allocated."""
        return self._keys is not None

    def _visible(self, queries: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the KV that the last `queries` positions see, as sized by `get_mask_sizes`; None if scattered."""
        return self._views()

    def get_max_length(self) -> int:
        return -1

    # --- cache operations of generate()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` positions. A positive number (as in 5.17) is the number to keep."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.num_positions)
        if self.is_initialized:
            self._take_back(-tokens_to_remove)

    def _take_back(self, num_positions: int) -> None:
        self._stop = max(self._start, self._stop - num_positions)
        if not self.num_positions:
            self._drop()  # the next prompt may have another number of rows

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._keys is not None:
            rows = torch.arange(self._keys.shape[0], device=self._keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self._drop()
        self.end_pass()

    def fork(self) -> DenseSource:
        """Return a copy that shares the buffers of this cache layer until one of the two writes."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        self._shared = twin._shared = self._keys is not None
        return twin


class SlidingSource(DenseSource):
    """Cache layer with sliding window attention: queries see the last `window` tokens, including their own."""

    is_sliding = True

    def __init__(self, index: int, window: int) -> None:
        super().__init__(index)
        self.window = self.sliding_window = window
        self.record_past = False

    def get_max_length(self) -> int:
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._announced.scattered:
            return super().get_mask_sizes(query_length)
        past = min(self.get_seq_length(), self.window - 1)
        return past + query_length, self.get_seq_length() - past

    def end_pass(self) -> None:
        super().end_pass()
        if self.is_initialized and not self.record_past:
            self._forget_unseen()  # which a layer with a preview has not done

    def activate_past_recording(self) -> None:
        """Keep all positions until the next `crop`, which may remove tokens (assisted decoding)."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, `[batch, heads, n, dim]`, and return all that the new queries may see."""
        super().update(key_states, value_states)
        return self._visible(key_states.shape[2])

    def _visible(self, queries: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._views()
        if queries is not None:
            past = min(self.num_positions - queries, self.window - 1)
            keys, values = keys[:, :, -(past + queries) :], values[:, :, -(past + queries) :]
        if not self.record_past:
            self._forget_unseen()
        return keys, values

    def _forget_unseen(self) -> None:
        """Drop positions that no later query sees; shrink the buffers if mostly unused, as after a long prompt."""
        unseen = self.held - min(self.num_positions, self.window - 1)
        if unseen > 0:
            self._start, self._first = self._start + unseen, self._first + unseen
        if self._start > 4 * self.window and self._keys is not None and self._values is not None:
            self._reallocate(self._keys, self._values, 0)

    def _take_back(self, num_positions: int) -> None:
        super()._take_back(num_positions)
        if self.held < min(self.num_positions, self.window - 1):
            raise RuntimeError(
                "a sliding-window layer cannot remove tokens, because it no longer holds the window before them; "
                "call `activate_past_recording` on the cache first"
            )
        self._forget_unseen()


def _put(target: torch.Tensor, positions: torch.Tensor, computed_kv: torch.Tensor) -> None:
    """Write computed keys or values, `[batch, heads, n, dim]`, to some positions of `target`.

    Rows have the same positions, int64 `[n]`, or their own, `[batch, n]`. A repeated position gets the same values.
    """
    if positions.ndim == 1:
        target.index_copy_(2, positions, computed_kv)
    else:
        rows = torch.arange(len(positions), device=positions.device).unsqueeze(1)
        target[rows, :, positions] = computed_kv.transpose(1, 2)
