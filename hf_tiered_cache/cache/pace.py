"""Pace of a model in this process: how long prompts take to compute, observed in the passes that compute everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

_LEAST_TOKENS = 64
"""Number of tokens below which the fixed costs of a pass dominate."""
_WEIGHT = 0.5
"""Weight of a new pass in the mean."""
_Elapsed = Callable[[], float | None]
"""Function that returns the seconds that a pass took, or None while it runs."""


class Pace:
    """Seconds per computed token, by fingerprint. Reading them never waits for a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._running: list[tuple[str, int, _Elapsed]] = []

    def begin(self, device: torch.device) -> Callable[[str, int], None]:
        """Begin to measure a pass. The result is called when it has been started, with fingerprint and tokens."""
        if device.type == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(device)
            begun.record(stream)

            def end(fingerprint: str, tokens: int) -> None:
                ended.record(stream)
                self._add(fingerprint, tokens, lambda: begun.elapsed_time(ended) / 1e3 if ended.query() else None)

        else:
            began = time.perf_counter()

            def end(fingerprint: str, tokens: int) -> None:
                took = time.perf_counter() - began
                self._add(fingerprint, tokens, lambda: took)

        return end

    def per_token(self, fingerprint: str) -> float | None:
        """Return the seconds to compute a token, or None if no long pass of the model has ended yet."""
        with self._lock:
            for number in reversed(range(len(self._running))):
                name, tokens, elapsed = self._running[number]
                if (seconds := elapsed()) is not None:
                    del self._running[number]
                    mean = self._seconds.get(name, seconds / tokens)
                    self._seconds[name] = _WEIGHT * seconds / tokens + (1 - _WEIGHT) * mean
            return self._seconds.get(fingerprint)

    def _add(self, fingerprint: str, tokens: int, elapsed: _Elapsed) -> None:
        if tokens >= _LEAST_TOKENS:
            with self._lock:
                self._running = [*self._running[-15:], (fingerprint, tokens, elapsed)]
