"""Interfaces for reselection while decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..select.selector import Selector
from ..stats import StatsCollector

Rotate = Callable[[torch.Tensor, np.ndarray, int], None]
"""Function that rotates `[heads, n, dim]` in place to positions, int64 `[sets, n]`: one set for all heads, or one for
each. All positions are below the third argument."""


class Choices(Protocol):
    """Decode selections of one pass."""

    def follow(
        self,
        layer: int,
        rows: Sequence[Any],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> Sequence[Any]:
        """Select for a layer's queries and replace deselected tokens by newly selected ones, in place.

        Args:
            layer: Index of a layer with full attention.
            rows: What the layer holds of each row, as returned by `Live.row`; None for a row that holds all of its
                restored tokens or has none.
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, all keys that the layer holds, restored ones first.
            values: Like `keys`.
            rotate_: Rotates stored keys.
            scaling: Scale of the logits; None for dim ** -0.5.

        Returns:
            What the layer holds of each row now.

        Raises:
            RestoreError: A block did not arrive; nothing has changed.
        """

    def cancel(self) -> None:
        """Release all block handles, wherever the pass has stopped."""


class Live(Protocol):
    """Decode selector of a cache, kept for the lifetime of the cache."""

    @property
    def selector(self) -> Selector:
        """The selector."""

    @property
    def may_stay(self) -> bool:
        """True if the last selection may be kept if blocks of the next one cannot be read."""

    def row(self, layer: int, prefix: int, chosen: np.ndarray) -> Any:
        """Return the state of what a layer holds of a row, or None if the row never reselects.

        The state has a method `fork()` that returns an independent copy, because rows may be copied.

        Args:
            layer: Layer index.
            prefix: Number of the row's prefix.
            chosen: int64 `[sets, columns]`, tokens at the layer's restored positions.
        """

    def leaving(self, rows: Sequence[Any], computed: int) -> int:
        """Return the number of leading computed positions to offload now, which are selected from afterwards.

        Args:
            rows: What a layer holds, as returned by `row`; None for rows that do not select.
            computed: Number of computed positions that the layer holds after the restored ones.
        """

    def grown(self, rows: Sequence[Any], keys: torch.Tensor, values: torch.Tensor) -> list[Any]:
        """Offload rotated keys and values, `[batch, kv_heads, n, dim]`, of a layer, and return its new row states."""

    def begin(self, collector: StatsCollector) -> Choices:
        """Begin the decode selections of a pass."""
