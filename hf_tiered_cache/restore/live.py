"""The interface of what is chosen again while decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..select.selector import Selector
from ..stats import StatsCollector

Rotate = Callable[[torch.Tensor, np.ndarray, int], None]
"""Rotates, in place, `[heads, n, dim]` to positions, int64 `[sets, n]`, all below a third argument: one set for all
heads, or one for each."""


@dataclass(frozen=True, eq=False)
class LayerAhead:
    """A layer that is going to choose, and the queries that are predicted for it.

    Args:
        layer: with full attention.
        rows: what it holds, if anything: see `Choices.follow`.
        query: `[batch, heads, n, dim]`, rotated.
        own_keys: `[batch, kv_heads, n, dim]`, rotated: those that are predicted for the same tokens.
        scaling: of the logits, or None for dim ** -0.5.
    """

    layer: int
    rows: Sequence[Any]
    query: torch.Tensor
    own_keys: torch.Tensor
    scaling: float | None


class Choices(Protocol):
    """The choices of one pass."""

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
        """Put what is chosen for a layer's queries in the place of what is chosen no more.

        Args:
            layer: with full attention.
            rows: what it holds, as `Live.row` says; None for rows that hold all of what is restored, or had none.
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, all that it holds, the restored ones in front; values likewise.
            rotate_: rotates stored keys.
            scaling: of the logits, or None for dim ** -0.5.

        Returns:
            What it holds now.

        Raises:
            RestoreError: a block did not arrive; nothing has changed.
        """

    def prepare(self, ahead: LayerAhead) -> None:
        """Start to fetch what a layer will choose if its queries are those. It changes nothing that it holds."""

    def cancel(self) -> None:
        """Let everything go, at whatever point the pass has ended."""


class Live(Protocol):
    """What a cache chooses from as long as it lives."""

    @property
    def selector(self) -> Selector:
        """Who chooses."""

    @property
    def may_stay(self) -> bool:
        """Whether a choice will do for later tokens, where blocks of the next one cannot be read."""

    def row(self, layer: int, prefix: int, chosen: np.ndarray) -> Any:
        """What a layer holds of a row when `chosen`, int64 `[sets, columns]`, stand in its columns; None for never.

        It has a `fork()` that gives one which goes its own way: rows may become copies of one another.
        """

    def leaving(self, rows: Sequence[Any], computed: int) -> int:
        """How many of the first `computed` columns behind the restored ones are to be chosen from, too, from now on.

        Args:
            rows: what a layer holds, as `row` says; None for those that choose nothing.
        """

    def grown(self, rows: Sequence[Any], keys: torch.Tensor, values: torch.Tensor) -> list[Any]:
        """What it holds when columns `[batch, kv_heads, n, dim]` have left it to be chosen from; rotated keys."""

    def begin(self, collector: StatsCollector) -> Choices:
        """The choices of a pass."""
