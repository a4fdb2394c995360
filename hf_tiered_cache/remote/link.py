"""Link to a remote: its measured bandwidth, a circuit breaker for when it does not answer, and lookups of prompts.

A lookup is one call for all prefix hashes, in a thread. Its answers are kept for seconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from functools import partial

from ..store.objects import ObjectBackend
from ..store.threads import DaemonPool
from .entries import Entry, find_entries

_WEIGHT = 0.5  # weight of a new measurement in the mean
_MEASURED_SECONDS = 60.0  # seconds after which a measurement is repeated, whatever it showed
_FAILURES = 3  # consecutive failures that open the breaker
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


_ABSENT_SECONDS, _PRESENT_SECONDS = 3.0, 60.0
"""Seconds for which the result of a lookup counts, for a prefix hash that was not found, and for one that was."""
_MOST_ABSENT, _MOST_PRESENT = 1 << 16, 1 << 10
"""Maximum numbers of results that are kept. Those that were found take up to 64 KiB each."""
_THREADS = 8  # number of lookups at a time

SLOW = "a lookup takes longer than it can save"
LATE = "the remote did not answer in time"
FAILED = "the remote failed"
UNAVAILABLE = "the remote is not used for a while, after several failures"


class LookUps:
    """Lookups of entries in a remote. `failed` receives breaker and error of each that failed or took too long."""

    def __init__(self, remote: ObjectBackend, failed: Callable[[Breaker, object], None]) -> None:
        self._remote, self._failed = remote, failed
        self.breaker, self.seconds = Breaker(), Estimate()
        self._lock = threading.Lock()
        self._absent: OrderedDict[str, float] = OrderedDict()  # time of expiry by name
        self._present: OrderedDict[str, tuple[float, Entry]] = OrderedDict()
        self._threads = DaemonPool(_THREADS, "hf-tiered-lookup")

    def find(self, names: Sequence[str], limit: float) -> list[Entry] | str:
        """Return the entries of prefix hashes, each once, or the reason why they are not known within `limit` seconds.

        Prefix hashes are given in hexadecimal digits.
        """
        entries, unknown = self._known(names)
        if unknown:
            look_up = partial(self._look_up, unknown)
            if self.breaker.is_open:
                if self.breaker.wants_probe():
                    self._begin(look_up)
                return UNAVAILABLE
            if (self.seconds.value or 0.0) > limit:
                if self.seconds.wants_measurement():
                    self._begin(look_up)
                return SLOW
            try:
                entries |= self._threads.submit(look_up).result(limit)
            except (FutureTimeoutError, CancelledError):
                self._failed(self.breaker, f"no answer within {limit:.3g} s")
                return LATE
            except Exception:  # whatever a client library raises; it is counted
                return FAILED
        return list({entry.row.id: entry for entry in entries.values()}.values())

    def forget(self, names: Sequence[str]) -> None:
        """Look up these prefix hashes again."""
        with self._lock:
            for name in names:
                self._absent.pop(name, None)
                self._present.pop(name, None)

    def close(self) -> None:
        """Drop the lookups that wait, and release the threads."""
        self._threads.close(0.0)

    def _begin(self, look_up: Callable[[], object]) -> None:
        """Begin a lookup that nothing waits for."""
        with suppress(RuntimeError):  # the store is being closed
            self._threads.submit(look_up)

    def _known(self, names: Sequence[str]) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries that are known to exist, and the names that are to be looked up."""
        now, entries, unknown = time.monotonic(), dict[str, Entry](), list[str]()
        with self._lock:
            for name in names:
                expires, entry = self._present.get(name, (0.0, None))
                if entry is not None and expires > now and not entry.row.is_expired:
                    entries[name] = entry
                elif self._absent.get(name, 0.0) <= now:
                    unknown.append(name)
        return entries, unknown

    def _look_up(self, names: list[str]) -> dict[str, Entry]:
        """Ask the remote for entries, and note the results and how long it took. Raises what the client raises."""
        start_time = time.monotonic()
        try:
            entries = find_entries(self._remote, names)
        except Exception as error:
            self._failed(self.breaker, error)
            raise
        now = time.monotonic()
        self.seconds.add(now - start_time)
        self.breaker.succeeded()
        entries_by_id = {entry.row.id: entry for entry in entries.values()}  # a segment has several entries
        entries = {name: entries_by_id[entry.row.id] for name, entry in entries.items()}
        self.forget(names)
        with self._lock:
            self._present.update((name, (now + _PRESENT_SECONDS, entry)) for name, entry in entries.items())
            self._absent.update((name, now + _ABSENT_SECONDS) for name in names if name not in entries)
            for results, most in (self._present, _MOST_PRESENT), (self._absent, _MOST_ABSENT):
                while len(results) > most:
                    results.popitem(last=False)
        return entries
