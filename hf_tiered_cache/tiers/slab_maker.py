"""Gets the memory that tiers grow by without the lock that all requests share: page-locking takes milliseconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from .interrupts import Apart, Step
from .pool import Tier, slab_slots
from .slabs import NO_MEMORY

Needs = Counter[tuple[Tier, int]]
"""Slots that are going to be taken of each tier, for blocks of each size."""


class SlabMaker:
    """Fills the stocks of a residency's tiers.

    Args:
        lock: guards the tiers, and is taken for as long as nothing is made.
        step: of the residency.
        host: its tier on the host.
        ahead: whether a thread makes the slab after the next of that tier, too.
    """

    def __init__(self, lock: threading.Lock, step: Step, host: Tier, ahead: bool) -> None:
        self._lock, self._step, self._host = lock, step, host
        self._apart = Apart() if ahead else None

    def make(self, ask: Callable[[], Needs]) -> None:
        """Make what slots are going to be missing for, as far as the budgets go. `ask` is called with the lock."""
        with self._lock, self._step:
            needs = ask()
            wanted = [(tier, nbytes) for (tier, size), count in needs.items() for nbytes in tier.wants(size, count)]
        self._stock(wanted)
        if self._apart is not None and not self._host.stock.is_ordered:
            with self._lock, self._step:
                nbytes = self._soon(needs)
                self._host.stock.is_ordered = nbytes > 0
            if nbytes:
                self._apart.do(partial(self._make_ahead, nbytes))

    def _soon(self, needs: Needs) -> int:
        """Bytes of the slab that is wanted when half of another's slots are taken beyond these; 0 for none."""
        for (tier, size), count in needs.items():
            if tier is self._host:
                wanted = tier.wants(size, count + slab_slots(size, tier.budget) // 2)
                if wanted:
                    return wanted[-1]
        return 0

    def _stock(self, wanted: Iterable[tuple[Tier, int]]) -> None:
        for tier, nbytes in wanted:
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
            self._stock([(self._host, nbytes)])
        finally:
            self._host.stock.is_ordered = False
