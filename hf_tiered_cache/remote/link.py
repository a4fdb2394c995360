"""Condition of a remote: its measured bandwidth, and a circuit breaker for when it does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WEIGHT = 0.5
"""Weight of a new measurement in the mean."""
_MEASURED_SECONDS = 60.0
"""Seconds after which a measurement is repeated, whatever it showed."""
_FAILURES = 3
"""Consecutive failures that open the breaker."""
_OPEN_SECONDS, _MOST_OPEN_SECONDS = 5.0, 60.0
"""Seconds before an open breaker lets one call through, at first and at most."""


class Estimate:
    """Moving mean of a quantity. It is kept, so that nobody waits for what was slow before."""

    def __init__(self) -> None:
        self.value: float | None = None
        """Mean of the latest measurements; None if there are none."""
        self._measured = self._requested = float("-inf")

    def add(self, value: float) -> None:
        """Add a measurement. Measurements that are old do not count any more."""
        mixed = self.value is not None and not self.is_old
        self.value = _WEIGHT * value + (1 - _WEIGHT) * (self.value or 0.0) if mixed else value
        self._measured = time.monotonic()

    @property
    def is_old(self) -> bool:
        """True if the last measurement was long ago."""
        return time.monotonic() - self._measured >= _MEASURED_SECONDS

    def wants_measurement(self) -> bool:
        """Return whether the caller is to measure it again, in the background. Returns True once in a while."""
        now = time.monotonic()
        if not self.is_old or now - self._requested < _MEASURED_SECONDS:
            return False
        self._requested = now
        return True


class Link:
    """Measured bandwidth of a remote."""

    def __init__(self) -> None:
        self.bandwidth = Estimate()
        """Bytes per second of all segments that are fetched at the same time."""
        self._lock = threading.Lock()
        self._fetches, self._nbytes, self._began = 0, 0, 0.0

    def fetch_seconds(self, nbytes: int) -> float:
        """Return the seconds to fetch as many bytes; 0 if nothing was measured, so that it is tried."""
        bandwidth = self.bandwidth.value
        return nbytes / bandwidth if bandwidth else 0.0

    @contextmanager
    def fetching(self) -> Iterator[Callable[[int], None]]:
        """Measure a fetch, with those at the same time. Yields a function that takes the bytes of a segment."""
        with self._lock:
            if not self._fetches:
                self._nbytes, self._began = 0, time.monotonic()
            self._fetches += 1
        try:
            yield self._note
        finally:
            with self._lock:
                self._fetches -= 1
                took = time.monotonic() - self._began
                if not self._fetches and self._nbytes and took > 0:
                    self.bandwidth.add(self._nbytes / took)

    def _note(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes


class Breaker:
    """Circuit breaker: after several failures, calls are refused, except one from time to time, which is a probe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._seconds = _OPEN_SECONDS

    @property
    def is_open(self) -> bool:
        """True if calls are to be refused, except a probe."""
        return self._failures >= _FAILURES

    def wants_probe(self) -> bool:
        """Return whether it is time for a probe, and begin to wait for the next one, longer each time.

        A probe that is never reported, for example because its segment was evicted, does not keep the breaker open.
        """
        with self._lock:
            now = time.monotonic()
            if not self.is_open or now < self._until:
                return False
            self._seconds = min(2 * self._seconds, _MOST_OPEN_SECONDS)
            self._until = now + self._seconds
            return True

    def succeeded(self) -> None:
        """Report that the remote has answered, whatever it said."""
        with self._lock:
            self._failures, self._seconds = 0, _OPEN_SECONDS

    def failed(self) -> None:
        """Report a call that failed, or took too long."""
        with self._lock:
            self._failures += 1
            if self._failures == _FAILURES:
                self._until = time.monotonic() + self._seconds
