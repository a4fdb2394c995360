"""Interfaces of cache layers, one per model layer, which live as long as the cache, and of the pass they serve."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..errors import UnsupportedModelError
from ..patches.rope import PreRopeKV, RotaryTap
from ..patches.scope import Attended, AttentionCall
from ..restore.plan import Plan
from ..restore.prefetch import Prefetch
from ..selection.decode import DecodeSelection, DecodeSelector
from ..selection.prompt import SelectiveRestore
from ..selection.streamed import StreamedPrefix
from ..store.geometry import LayerKV

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

    plan: Plan
    prefetch: Prefetch
    selection: SelectiveRestore | None
    """Selection of the restored tokens that layers hold; None if no tokens are selected."""
    streamed: StreamedPrefix | None
    """All restored tokens, for layers that attend to them without holding them; None if not streamed."""

    def columns(self, layer: int, first: int, device: torch.device) -> torch.Tensor:
        """Return the positions that a layer computes, int64 `[n]` or `[batch, n]`, counted from `first`.

        Layers that compute the same positions share one tensor.
        """

    def cannot_select(self) -> UnsupportedModelError:
        """Return the error for a model with attention that cannot be observed."""

    def take_filled(self, layer: int) -> dict[str, Any] | None:
        """Remove and return the kept state of a layer's buffer with its restored KV, or None."""

    def is_previewing(self, layer: int) -> bool:
        """Return whether the layer runs only up to its attention now."""

    def keep_filled(self, layer: int, filled: dict[str, Any]) -> None:
        """Keep the state of a previewed layer's filled buffer until the layer is computed (see `take_filled`)."""

    def compares(self, layer: int) -> bool:
        """Return whether to compare the stored and computed KV of a layer now."""

    def compare(self, layer: int, stored: LayerTensors, computed: LayerTensors) -> None:
        """Compare stored and computed KV, `[batch, heads, n, dim]` each, to decide what later layers compute."""


class KVSource(Protocol):
    """Cache layer with keys and values that are computed, restored, or selected from restored ones.

    A pass that restores begins with `begin_pass`. Every pass calls `append`, from the cache's `update`, and `attend`,
    from the registered attention function. `end_pass` ends a pass that restores. The other methods are those of
    transformers' `CacheLayerMixin`.
    """

    window: int
    """Sliding window in tokens; 0 for full attention."""

    decode_selector: DecodeSelector | None
    """Decode selection of a layer that reselects in later passes, or None."""

    def offload(self) -> None:
        """Offload older computed KV, if the layer reselects. Called before a pass, which has announced nothing yet."""

    def begin_pass(self, restoring: RestoringPass) -> None:
        """Begin a pass that restores, so that masks match what the layer is going to hold."""

    def append(
        self, kind: LayerKV, pre_rope: PreRopeKV, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values that the layer has computed.

        Args:
            kind: Layout of the tensors that the model passes to the cache for this layer.
            pre_rope: Keys and values as stored, before rotation.
            keys: `[batch, kv_heads, n, dim]`, rotated.
            values: `[batch, kv_heads, n, dim]`.

        Returns:
            Keys and values for the model's attention: all that the queries may see, unless `attend` replaces them.
        """

    def attend(self, forward_pass: Pass, call: AttentionCall) -> Attended:
        """Return what queries attend to, or the attention output if it is already computed."""

    def end_pass(self) -> None:
        """End the pass, successful or not. `rollback` undoes a failed pass."""
