"""Slab allocation outside the lock that all requests share, since page-locking takes milliseconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial

from .interrupts import Apart, Step
from .pool import Tier, slab_slots
from .slabs import NO_MEMORY

Needs = Counter[tuple[Tier, int]]
"""Number of slots that will be acquired, by tier and block size in bytes."""


class SlabMaker:
    """Allocator that fills the slab stocks of a residency's tiers.

    Args:
        lock: guards the tiers; it is not held during allocation.
        step: repair guard of the residency.
        host: the host tier.
        ahead: whether a worker thread allocates one slab of the host tier in advance.
    """

    def __init__(self, lock: threading.Lock, step: Step, host: Tier, ahead: bool) -> None:
        self._lock, self._step, self._host = lock, step, host
        self._apart = Apart() if ahead else None

    def lacking(self, needs: Needs) -> list[tuple[Tier, int]]:
        """Return the tier and size in bytes of each slab that is needed and not allocated yet, within the budgets.

        This may also order a slab in advance. The caller holds the lock.
        """
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
        """Allocate slabs and put them in stock. The caller does not hold the lock.

        If an allocation fails, its tier stops growing.
        """
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
