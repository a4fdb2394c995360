"""Interfaces for observers of the queries of a cache's passes, kept for the lifetime of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..patches.scope import QueryObserver

if TYPE_CHECKING:
    from typing_extensions import Self


class KeysOfLayer(Protocol):
    """Keys of one layer, as held by its cache layer."""

    index: int
    window: int

    @property
    def keys(self) -> torch.Tensor | None:
        """Rotated keys, `[batch, kv_heads, held, dim]`; None if the layer holds none."""

    @property
    def columns(self) -> int:
        """Number of positions of the sequence so far, held or not."""

    @property
    def held(self) -> int:
        """Number of positions that are held."""


@dataclass(frozen=True, eq=False)
class ComputedPositions:
    """Positions of a sequence that a pass computes.

    Args:
        first, stop: Half-open range that the pass adds; every layer computes all of it if `of_layer` is None.
        pads: Number of left padding positions of each batch row.
        of_layer: Returns the positions that a layer computes, int64 `[n]`, ascending; no layer computes more than the
            layer before. None if all layers compute the range.
        fewest: Positions that every layer computes, int64 `[n]`, ascending. None if all layers compute the range.
    """

    first: int
    stop: int
    pads: Sequence[int]
    of_layer: Callable[[int], np.ndarray] | None = None
    fewest: np.ndarray | None = None


class PassObserver(QueryObserver, Protocol):
    """Observer of one pass."""

    def end(self) -> None:
        """Count the pass. Called when it is complete and the cache holds what it computed."""

    def undo(self) -> None:
        """Discard the pass. Called when it has failed, possibly after `end`."""


class CacheObserver(Protocol):
    """Observer of a cache."""

    def begin(self, sources: Sequence[KeysOfLayer], computed: ComputedPositions) -> PassObserver | None:
        """Begin a pass. Return its observer, or None to observe nothing of it, at no cost to the pass.

        Args:
            sources: Keys of the cache's layers.
            computed: Positions that the pass computes.
        """

    def cannot_see(self, why: str) -> None:
        """Note that the model's attention cannot be observed, for the reason `why`."""

    def crop(self, num_positions: int) -> None:
        """Keep only the first `num_positions` positions, like the cache."""

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i of the batch by the former row `rows[i]`."""

    def fork(self, sources: Sequence[KeysOfLayer]) -> Self:
        """Return an independent copy for the cache that owns `sources`."""
