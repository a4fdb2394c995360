"""Collector of the statistics of a request, filled by its thread and by the threads that read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from ..stats import RequestDetails, RequestStats

_DETAILS = frozenset(f.name for f in fields(RequestDetails))


class StatsCollector:
    """Thread-safe collector of a `RequestStats`, for the request's thread and the reading threads."""

    def __init__(self, total: StatsCollector | None = None) -> None:
        self.stats = RequestStats()
        self.total = total
        """Collector that also counts everything counted here, for a sum over requests; or None."""
        self.on_section: Callable[[str, float, float], None] | None = None
        """Called with the figure, begin and end of each timed section, by `time.perf_counter`; or None."""
        self._lock = threading.Lock()
        self._active_reads = 0
        self._reading_since = 0.0
        self._more_to_read = False
        self._idle_since: float | None = None  # set while no read is in progress and another one follows

    def add(self, **amounts: float) -> None:
        """Add amounts to the named figures."""
        with self._lock:
            for name, amount in amounts.items():
                figures = self.stats.details if name in _DETAILS else self.stats
                setattr(figures, name, getattr(figures, name) + amount)
        if self.total is not None:
            self.total.add(**amounts)

    def explain(self, reason: str) -> None:
        """Count a reason why a prompt was not restored, not stored, or read more than needed."""
        with self._lock:
            self.stats.reasons[reason] = self.stats.reasons.get(reason, 0) + 1
        if self.total is not None:
            self.total.explain(reason)

    def looked_up(self, tier: str, num_found: int, num_missing: int, nbytes: int) -> None:
        """Count the blocks that were looked up in `tier`: those found, which it delivers, and those missing."""
        with self._lock:
            counts = self.stats.tiers[tier]
            counts.hits += num_found
            counts.misses += num_missing
            counts.blocks += num_found
            counts.bytes += nbytes
        if self.total is not None:
            self.total.looked_up(tier, num_found, num_missing, nbytes)

    def read_started(self) -> None:
        if self.total is not None:
            self.total.read_started()
        idle = 0.0
        with self._lock:
            if self._active_reads == 0:
                self._reading_since = time.perf_counter()
                if self._idle_since is not None:
                    idle, self._idle_since = self._reading_since - self._idle_since, None
            self._active_reads += 1
        if idle:
            self.add(load_idle_seconds=idle)

    def expect_reads(self, has_more: bool) -> None:
        """Note whether the current pass still has reads to start."""
        with self._lock:
            self._more_to_read = has_more

    def forget_reads(self) -> None:
        """Note that the current pass has ended, and starts no more reads."""
        with self._lock:
            self._more_to_read, self._idle_since = False, None

    def read_done(self, nbytes: int) -> None:
        """Note that a read has ended and delivered `nbytes` bytes (0 if it failed)."""
        if self.total is not None:
            self.total.read_done(nbytes)
        with self._lock:
            self.stats.bytes_read += nbytes
            self._active_reads -= 1
            if self._active_reads == 0:
                now = time.perf_counter()
                self.stats.details.io_seconds += now - self._reading_since
                if self.on_section is not None:
                    self.on_section("io_seconds", self._reading_since, now)
                self._idle_since = now if self._more_to_read else None

    @contextmanager
    def timing(self, name: str, stalls: str = "") -> Iterator[None]:
        """Add the seconds of the body to the figure `name`, and those of waiting for KV in it to `stalls`, if given."""
        started, stalled = time.perf_counter(), self.stats.stall_seconds
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.add(**{name: ended - started}, **({stalls: self.stats.stall_seconds - stalled} if stalls else {}))
            if self.on_section is not None:
                self.on_section(name, started, ended)
