"""Hedged reads: a read that takes longer than most is requested a second time, and the first answer counts.

Of the requests to an object store, a few take many times as long as the others, and a prompt waits for the slowest of
its reads (Dean and Barroso, "The Tail at Scale"). Objects that are never changed can be requested twice.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, as_completed, wait
from contextlib import suppress
from functools import partial
from typing import TypeVar

from .threads import DaemonPool

_RECENT, _LEAST = 200, 20
"""Number of recent reads that count, at most and at least: with fewer, no read is requested twice."""
_QUANTILE, _TIMES_MEDIAN, _LEAST_SECONDS = 0.95, 2.0, 0.01
"""A read is requested again after this quantile of recent times, but not before this multiple of their median, which
most reads exceed only because of the load, and not before so many seconds.
"""
_SHARE, _MOST_AT_ONCE = 0.05, 8  # maximum number of second requests, as a share of the reads; and in a row
_T = TypeVar("_T")


class HedgedReads:
    """Reads of one kind, which usually take about as long as each other."""

    def __init__(self, threads: int, name: str) -> None:
        self.hedged = 0
        """Number of reads that were requested a second time."""
        self.won = 0
        """Number of these whose second request was answered first."""
        self._first, self._second = DaemonPool(threads, name), DaemonPool(_MOST_AT_ONCE, name)
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._allowed = 0.0  # number of second requests, by now
        self._lock = threading.Lock()

    def submit(self, request: Callable[[], _T]) -> Callable[[], _T]:
        """Begin a read, and return a function that waits for its result. Both raise OSError if the reads are closed."""
        start_times: list[float] = []

        def timed() -> _T:
            start_times.append(time.monotonic())
            result = request()
            with self._lock:
                self._seconds.append(time.monotonic() - start_times[0])
            return result

        with self._lock:
            self._allowed = min(self._allowed + _SHARE, _MOST_AT_ONCE)
        try:
            first = self._first.submit(timed)
        except RuntimeError:
            raise OSError(errno.ESHUTDOWN, "the store is closed") from None
        return partial(self._result, first, start_times, request)

    def close(self) -> None:
        """Drop the requests that have not begun, and release the threads."""
        self._first.close(0.0)
        self._second.close(0.0)

    def _result(self, first: Future[_T], start_times: Sequence[float], request: Callable[[], _T]) -> _T:
        while not first.done():
            with self._lock:
                limit = self._limit()
                seconds_left = limit + (start_times[0] - time.monotonic() if start_times else 0.0)
                is_hedged = seconds_left <= 0 and self._allowed >= 1
                self._allowed -= is_hedged
                self.hedged += is_hedged
            if is_hedged:
                futures = [first]
                with suppress(RuntimeError):  # closed meanwhile
                    futures.append(self._second.submit(request))
                answers = (future for future in as_completed(futures) if not future.cancelled())
                answer = next((future for future in answers if future.exception() is None), first)
                with self._lock:
                    self.won += answer is not first
                return _result_of(answer)
            wait([first], seconds_left if 0 < seconds_left < math.inf else None)
        return _result_of(first)

    def _limit(self) -> float:
        """Return the seconds after which a read is requested again."""
        if len(self._seconds) < _LEAST:
            return math.inf
        ordered = sorted(self._seconds)
        most, median = ordered[int(_QUANTILE * len(ordered))], ordered[len(ordered) // 2]
        return max(most, _TIMES_MEDIAN * median, _LEAST_SECONDS)


def _result_of(future: Future[_T]) -> _T:
    try:
        return future.result()
    except CancelledError:
        raise OSError(errno.ESHUTDOWN, "the store is closed") from None
