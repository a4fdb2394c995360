"""Attention sums in sampled windows of positions, so that the last positions can be cropped with their sums.

A sum cannot be undone, since queries are not kept. So sums are kept separately, in small windows at the end and large
ones before (as in an exponential histogram: Datar et al. 2002). Few sums are held, and cropping loses the sums of about
as many more positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch

from ..select.attention_sums import AttentionSums


@dataclass(frozen=True, eq=False)
class Stretch:
    """Attention sums of one sampled window.

    Args:
        stop: Position after the last sampled one.
        sampled: Number of sampled positions.
        parts: Number of windows that it was merged from.
        sums: Sums over the sampled positions, each weighted by the number of positions that it represents.
    """

    stop: int
    sampled: int
    parts: int
    sums: AttentionSums

    def __add__(self, other: Stretch) -> Stretch:
        sampled, parts = self.sampled + other.sampled, self.parts + other.parts
        return Stretch(max(self.stop, other.stop), sampled, parts, self.sums + other.sums)

    def select(self, rows: torch.Tensor) -> Stretch:
        """Return the window with reordered rows: row i is the former row `rows[i]`."""
        return replace(self, sums=self.sums.select(rows))

    def to(self, device: torch.device) -> Stretch:
        """Return the window on `device`."""
        return replace(self, sums=self.sums.to(device))


class Stretches:
    """Attention sums of one cache, in sampled windows."""

    def __init__(self, stretches: Sequence[Stretch] = ()) -> None:
        self._stretches = list(stretches)  # ascending
        self._order: torch.Tensor | None = None  # former row of each current row, not applied yet

    def __len__(self) -> int:
        return len(self._stretches)

    @property
    def stop(self) -> int:
        """Position after the last one that was counted."""
        return max((stretch.stop for stretch in self._stretches), default=0)

    def add(self, new: Sequence[Stretch]) -> None:
        """Add windows, and merge older ones."""
        self._settle()
        every = sorted([*self._stretches, *new], key=lambda stretch: stretch.stop)
        kept, parts = list[Stretch](), 0  # from the last one back
        for stretch in reversed(every):
            if kept and kept[-1].parts + stretch.parts <= parts - kept[-1].parts:
                kept[-1] = stretch + kept[-1]
            else:
                kept.append(stretch)
            parts += stretch.parts
        self._stretches = kept[::-1]

    def crop(self, columns: int) -> None:
        """Keep only windows within the first `columns` positions."""
        self._stretches = [stretch for stretch in self._stretches if stretch.stop <= columns]

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i by the former row `rows[i]`. Sums follow later, since beam search does this at every token."""
        self._order = reordered(self._order, rows)

    def to(self, device: torch.device) -> None:
        """Move the sums to `device`."""
        self._stretches = [stretch.to(device) for stretch in self._stretches]

    def total(self) -> Stretch | None:
        """Return the sum of all windows, or None if there are none."""
        self._settle()
        return reduce(add, self._stretches) if self._stretches else None

    def copy(self) -> Stretches:
        """Return an independent copy."""
        self._settle()
        return Stretches(self._stretches)

    def _settle(self) -> None:
        if (order := self._order) is not None:
            self._stretches, self._order = [stretch.select(order) for stretch in self._stretches], None


def reordered(order: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the row order `order` (None: unchanged) followed by the reordering `rows`."""
    return rows if order is None else order.index_select(0, rows.to(order.device))
