"""Observed times of passes: how long a prompt takes to compute, and corrections of calibrated costs.

A calibration measures an idle machine once. On a busy one, computing takes longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ..errors import StoreError
from ..restore.plan import Plan, RecomputePlan
from ..stats import TIERS, RequestStats
from .calibrations import CostFactors, PrefixCosts, change_cost_factors
from .storage import Storage

_STEP = 1.25  # maximum change of a factor per return: one return may have been disturbed
_NEAR = 1.02  # ratio of observed to predicted times below which nothing is corrected, and its inverse
_MOST = 8.0  # maximum factor, and the inverse of the minimum
_LEAST_READ = 1 << 20  # number of bytes read below which the latency of single reads may dominate
_MIN_TOKENS, _MIN_PACE_TOKENS = 128, 64
"""Number of computed tokens below which the fixed costs of a pass may dominate, for corrections and for `Pace`."""


class Pace:
    """Seconds per token of passes that compute everything, by fingerprint. Reading them never waits for a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._running: list[tuple[str, int, Callable[[], float | None]]] = []  # its time is None until a pass has ended

    @contextmanager
    def measuring(self, device: torch.device, fingerprint: str, tokens: int) -> Iterator[None]:
        """Measure a pass of `tokens` tokens, which the body starts. On a GPU, it may end later."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            took = time.perf_counter() - began
            self._add(fingerprint, tokens, lambda: took)
            return
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin_event.record(stream)
        yield
        end_event.record(stream)
        self._add(fingerprint, tokens, lambda: begin_event.elapsed_time(end_event) / 1e3 if end_event.query() else None)

    def per_token(self, fingerprint: str) -> float | None:
        """Return the seconds to compute a token, or None if no long pass of the model has ended yet."""
        with self._lock:
            for number in reversed(range(len(self._running))):
                name, tokens, elapsed = self._running[number]
                if (seconds := elapsed()) is not None:
                    del self._running[number]
                    mean = self._seconds.get(name, seconds / tokens)
                    self._seconds[name] = (seconds / tokens + mean) / 2
            return self._seconds.get(fingerprint)

    def _add(self, fingerprint: str, tokens: int, elapsed: Callable[[], float | None]) -> None:
        if tokens >= _MIN_PACE_TOKENS:
            with self._lock:
                self._running = [*self._running[-15:], (fingerprint, tokens, elapsed)]


class Work(NamedTuple):
    """Work of a cache until a moment, or between two moments. `seconds` is the moment, by `time.perf_counter`."""

    restored: float  # tokens that were restored and not computed
    computed: float
    restoring: float  # seconds of lookups and of assembling restored KV
    waiting: float  # seconds in which the model waited for KV
    reading: float  # seconds in which the disk was read
    nbytes: float
    seconds: float

    @classmethod
    def of(cls, stats: RequestStats) -> Work:
        """Return the work until now."""
        details, recomputed = stats.details, stats.tokens_recomputed
        tokens = stats.tokens_restored - recomputed, stats.tokens_computed + recomputed
        restoring = details.match_seconds + details.assemble_seconds
        return cls(*tokens, restoring, stats.stall_seconds, details.io_seconds, stats.bytes_read, time.perf_counter())

    def until(self, stats: RequestStats) -> Work:
        """Return the work after this moment, until now."""
        return Work(*(now - earlier for now, earlier in zip(Work.of(stats), self, strict=True)))

    def saved(self, tokens: int, seconds: float | None, device: torch.device) -> float:
        """Estimate `seconds_saved` of a prompt of `tokens` tokens; `seconds` to compute it, None if not known."""
        if seconds is not None:
            per_token = seconds / tokens
        elif self.computed >= _MIN_PACE_TOKENS and device.type == "cpu":
            per_token = (self.seconds - self.restoring) / self.computed
        else:
            return 0.0
        return self.restored * per_token - self.restoring


def observed_ratios(plan: Plan | None, tokens: int, costs: PrefixCosts, work: Work) -> dict[str, float]:
    """Compare the work of a pass with the costs for `tokens` tokens: the restored prefix or, without a plan, all.

    Returns:
        Observed time relative to the predicted one, by field of `CostFactors`, as far as the pass shows it.
    """
    ratios: dict[str, float] = {}
    if plan is None:  # short prompts show only fixed costs
        predicted = float(costs.computing(tokens))  # 0 if the measurement was disturbed
        return {"compute": work.seconds / predicted} if tokens >= _MIN_TOKENS and predicted else ratios
    if isinstance(plan, RecomputePlan):
        lengths = np.array(plan.recompute_lengths)
        recomputing = float(costs.computing(lengths).mean())
        suffix = max(costs.overhead, float(costs.computing(plan.num_positions - tokens)))
        predicted = recomputing + suffix + costs.placing(TIERS[-1]) * (tokens - float(lengths.mean()))
        if recomputing > predicted / 2:
            ratios["compute"] = (work.seconds - work.waiting) / predicted
    token_bytes = plan.readers[0].shape.token_bytes
    predicted = work.nbytes / token_bytes * costs.loading(TIERS[-1]) if token_bytes else 0.0
    if work.nbytes >= _LEAST_READ and predicted:
        ratios["load"] = work.reading / predicted
    return ratios


def renew_costs(storage: Storage, fingerprint: str, device: torch.device, ratios: dict[str, float]) -> None:
    """Move the factors of the calibrated costs towards the `observed_ratios`, by a bounded step.

    Times that are near the predicted ones change nothing, and neither does a store that cannot be written.
    """
    steps = {
        name: np.clip(ratio**0.5, 1 / _STEP, _STEP)
        for name, ratio in ratios.items()
        if ratio > 0 and not 1 / _NEAR < ratio < _NEAR
    }

    def renewed(factors: CostFactors) -> CostFactors:
        values = {name: float(np.clip(getattr(factors, name) * step, 1 / _MOST, _MOST)) for name, step in steps.items()}
        return replace(factors, **values)

    if steps and storage.disk.backend.writable:
        with suppress(StoreError, OSError):  # the next prompt shows the same
            change_cost_factors(storage, fingerprint, device, renewed)
