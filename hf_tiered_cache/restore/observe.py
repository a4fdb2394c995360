"""The interface of what watches the queries of a cache's passes, as long as the cache lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..patches.scope import QueryObserver

if TYPE_CHECKING:
    from typing_extensions import Self

Later = Callable[[Callable[[], object]], object]
"""Runs something behind the requests, in another thread."""


class KeysOfLayer(Protocol):
    """A layer's keys, as its source holds them."""

    index: int
    window: int

    @property
    def keys(self) -> torch.Tensor | None:
        """`[batch, kv_heads, held, dim]`, rotated."""

    @property
    def columns(self) -> int:
        """Columns of the sequence so far, held or not."""

    @property
    def held(self) -> int:
        """Columns that are held."""


@dataclass(frozen=True, eq=False)
class ComputedColumns:
    """Which columns of a sequence a pass computes.

    Args:
        first, stop: the range that the pass adds and every layer computes, if `of_layer` is None.
        pads: columns of left padding of each row of the batch.
        of_layer: gives those of a layer, int64 `[n]`, ascending; never more than the layer before computes. None where
            all layers compute the range.
        fewest: those that every layer computes, likewise.
    """

    first: int
    stop: int
    pads: Sequence[int]
    of_layer: Callable[[int], np.ndarray] | None = None
    fewest: np.ndarray | None = None


class PassObserver(QueryObserver, Protocol):
    """Watches one pass."""

    def end(self) -> None:
        """The pass is whole: what it has computed is held, and counts."""

    def undo(self) -> None:
        """The pass has failed, perhaps when it had ended already: nothing of it counts."""


class CacheObserver(Protocol):
    """Watches a cache."""

    def begin(self, sources: Sequence[KeysOfLayer], computed: ComputedColumns) -> PassObserver | None:
        """A pass begins; None if nothing of it is to be seen, which costs it nothing.

        Args:
            sources: of the cache's layers.
        """

    def cannot_see(self, why: str) -> None:
        """The model's attention is not told."""

    def crop(self, columns: int) -> None:
        """The cache holds no more than its first `columns` columns."""

    def select(self, rows: torch.Tensor) -> None:
        """Row i of the batch becomes what row `rows[i]` was."""

    def fork(self, sources: Sequence[KeysOfLayer]) -> Self:
        """One that goes on alone, with the cache of these sources."""
