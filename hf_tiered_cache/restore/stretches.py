"""Sums of attention by stretches of columns: the last columns can be taken back, and their sums with them.

A sum cannot be undone, since queries are gone. So sums are kept apart, small stretches at the end and large ones before
(as in an exponential histogram: Datar et al. 2002): few are held, and who takes columns back loses the sums of about
as many more.
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
    """Sums over sampled columns.

    Args:
        stop: the column behind the last one.
        sampled: how many.
        parts: how many stretches it was made of.
        sums: over these, each counted as often as it stands for columns.
    """

    stop: int
    sampled: int
    parts: int
    sums: AttentionSums

    def __add__(self, other: Stretch) -> Stretch:
        sampled, parts = self.sampled + other.sampled, self.parts + other.parts
        return Stretch(max(self.stop, other.stop), sampled, parts, self.sums + other.sums)

    def select(self, rows: torch.Tensor) -> Stretch:
        """Of other sequences: the i-th is what `rows[i]` was."""
        return replace(self, sums=self.sums.select(rows))

    def to(self, device: torch.device) -> Stretch:
        """On this device."""
        return replace(self, sums=self.sums.to(device))


class Stretches:
    """The sums of one cache's columns."""

    def __init__(self, stretches: Sequence[Stretch] = ()) -> None:
        self._stretches = list(stretches)  # ascending
        self._order: torch.Tensor | None = None  # which row each row of today was when these were added

    def __len__(self) -> int:
        return len(self._stretches)

    @property
    def stop(self) -> int:
        """The column behind the last one that was counted."""
        return max((stretch.stop for stretch in self._stretches), default=0)

    def add(self, new: Sequence[Stretch]) -> None:
        """Count these, too."""
        self._settle()
        every = sorted([*self._stretches, *new], key=lambda stretch: stretch.stop)
        kept, parts = list[Stretch](), 0  # from the end
        for stretch in reversed(every):
            if kept and kept[-1].parts + stretch.parts <= parts - kept[-1].parts:
                kept[-1] = stretch + kept[-1]
            else:
                kept.append(stretch)
            parts += stretch.parts
        self._stretches = kept[::-1]

    def crop(self, columns: int) -> None:
        """Keep what comes of the first `columns` columns alone."""
        self._stretches = [stretch for stretch in self._stretches if stretch.stop <= columns]

    def select(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was. Beam search does this at every token, so sums follow later."""
        self._order = reordered(self._order, rows)

    def to(self, device: torch.device) -> None:
        """Keep them there."""
        self._stretches = [stretch.to(device) for stretch in self._stretches]

    def total(self) -> Stretch | None:
        """All of them, if there are any."""
        self._settle()
        return reduce(add, self._stretches) if self._stretches else None

    def copy(self) -> Stretches:
        """The same, to go on alone."""
        self._settle()
        return Stretches(self._stretches)

    def _settle(self) -> None:
        if (order := self._order) is not None:
            self._stretches, self._order = [stretch.select(order) for stretch in self._stretches], None


def reordered(order: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """The order of rows `order` (None: as they were), reordered by `rows`."""
    return rows if order is None else order.index_select(0, rows.to(order.device))
