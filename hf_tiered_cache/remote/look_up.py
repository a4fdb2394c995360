"""Look-ups of prompts in a remote: one call for all prefix hashes, in a thread, and answers kept for seconds."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from ..store.objects import ObjectBackend
from ..store.threads import DaemonPool
from .entries import Entry, find_entries
from .link import Breaker, Estimate

_ABSENT_SECONDS, _PRESENT_SECONDS = 3.0, 60.0
"""Seconds for which the result of a look-up counts, for a prefix hash that was not found, and for one that was."""
_MOST_ABSENT, _MOST_PRESENT = 1 << 16, 1 << 10
"""Maximum numbers of results that are kept. Those that were found take up to 64 KiB each."""
_THREADS = 8
"""Number of look-ups at a time."""

SLOW = "a look-up takes longer than it can save"
LATE = "the remote did not answer in time"
FAILED = "the remote failed"
UNAVAILABLE = "the remote is not used for a while, after several failures"


class LookUps:
    """Look-ups of entries in a remote.

    Args:
        remote: The remote.
        failed: Receives the breaker and the error of each look-up that failed or took too long.
    """

    def __init__(self, remote: ObjectBackend, failed: Callable[[Breaker, object], None]) -> None:
        self._remote, self._failed = remote, failed
        self.breaker, self.seconds = Breaker(), Estimate()
        self._lock = threading.Lock()
        self._absent: OrderedDict[str, float] = OrderedDict()  # time of expiry by name
        self._present: OrderedDict[str, tuple[float, Entry]] = OrderedDict()
        self._threads = DaemonPool(_THREADS, "hf-tiered-look-up")

    def find(self, names: Sequence[str], limit: float) -> list[Entry] | str:
        """Return the entries of prefix hashes, each once, or the reason why they are not known in time.

        Args:
            names: Prefix hashes, in hexadecimal digits.
            limit: Seconds to wait.
        """
        known, unknown = self._known(names)
        if unknown:
            look_up = partial(self._look_up, unknown)
            if self.breaker.is_open:
                if self.breaker.wants_probe():
                    self._threads.submit(look_up)  # nothing waits for it
                return UNAVAILABLE
            if (self.seconds.value or 0.0) > limit:
                if self.seconds.wants_measurement():
                    self._threads.submit(look_up)  # nothing waits for it
                return SLOW
            try:
                known |= self._threads.submit(look_up).result(limit)
            except (FutureTimeoutError, CancelledError):
                self._failed(self.breaker, f"no answer within {limit:.3g} s")
                return LATE
            except Exception:  # whatever a client library raises; it is counted
                return FAILED
        return list({entry.row.id: entry for entry in known.values()}.values())

    def forget(self, names: Sequence[str]) -> None:
        """Look up these prefix hashes again."""
        with self._lock:
            for name in names:
                self._absent.pop(name, None)
                self._present.pop(name, None)

    def close(self) -> None:
        """Drop the look-ups that wait, and release the threads."""
        self._threads.close(0.0)

    def _known(self, names: Sequence[str]) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries that are known to exist, and the names that are to be looked up."""
        now, known, unknown = time.monotonic(), dict[str, Entry](), list[str]()
        with self._lock:
            for name in names:
                expires, entry = self._present.get(name, (0.0, None))
                if entry is not None and expires > now and not entry.row.is_expired:
                    known[name] = entry
                elif self._absent.get(name, 0.0) <= now:
                    unknown.append(name)
        return known, unknown

    def _look_up(self, names: list[str]) -> dict[str, Entry]:
        """Ask the remote for entries, and note the results and how long it took. Raises what the client raises."""
        began = time.monotonic()
        try:
            entries = find_entries(self._remote, names)
        except Exception as error:
            self._failed(self.breaker, error)
            raise
        now = time.monotonic()
        self.seconds.add(now - began)
        self.breaker.succeeded()
        shared = {entry.row.id: entry for entry in entries.values()}  # a segment has several entries
        entries = {name: shared[entry.row.id] for name, entry in entries.items()}
        self.forget(names)
        with self._lock:
            self._present.update((name, (now + _PRESENT_SECONDS, entry)) for name, entry in entries.items())
            self._absent.update((name, now + _ABSENT_SECONDS) for name in names if name not in entries)
            for results, most in (self._present, _MOST_PRESENT), (self._absent, _MOST_ABSENT):
                while len(results) > most:
                    results.popitem(last=False)
        return entries
