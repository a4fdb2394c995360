"""Gets the memory that tiers grow by without the lock that all requests share: page-locking takes milliseconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial

from .interrupts import Apart, Step
from .pool import Tier, slab_slots
from .slabs import NO_MEMORY

Needs = Counter[tuple[Tier, int]]
"""Slots that are going to be taken of each tier, for blocks of each size."""


class SlabMaker:
    """Fills the stocks of a residency's tiers.

    Args:
        lock: guards the tiers; it is not held while memory is made.
        step: of the residency.
        host: its tier on the host.
        ahead: whether a thread makes one slab of that tier before it is needed.
    """

    def __init__(self, lock: threading.Lock, step: Step, host: Tier, ahead: bool) -> None:
        self._lock, self._step, self._host = lock, step, host
        self._apart = Apart() if ahead else None

    def lacking(self, needs: Needs) -> list[tuple[Tier, int]]:
        """Which slabs these take that are not made yet, as far as the budgets go. The caller holds the lock."""
        lacking: list[tuple[Tier, int]] = []
        for (tier, size), count in needs.items():
            now = tier.wants(size, count)
            lacking.extend((tier, nbytes) for nbytes in now)
            if tier is self._host and self._apart is not None and not tier.stock.is_ordered:
                soon = tier.wants(size, count + slab_slots(size, tier.budget) // 2)[len(now) :]
                if soon:
                    tier.stock.is_ordered = True
                    self._apart.do(partial(self._make_ahead, soon[0]))
        return lacking

    def make(self, lacking: Iterable[tuple[Tier, int]]) -> None:
        """Make slabs, and put them in stock. Without the lock: what cannot be made leaves a tier as it is."""
        for tier, nbytes in lacking:
            try:
                memory = tier.allocate(nbytes)
            except NO_MEMORY as error:
                with self._lock, self._step:
                    tier.stay(error)
            else:
                with self._lock, self._step:
                    tier.put_in_stock(memory)

    def _make_ahead(self, nbytes: int) -> None:
        try:
            self.make([(self._host, nbytes)])
        finally:
            self._host.stock.is_ordered = False
