"""Figures of a store and of the requests that use it, as metrics for OpenTelemetry and Prometheus.

They are named after the figures of docs/statistics.md. Their clients are imported when they are used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kvstore import KVStore
from ..stats import RemoteStats, RequestStats, StoreStats, TierUse
from ..tiers.collector import StatsCollector

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import Metric as PrometheusMetric
    from starlette.responses import Response

logger = logging.getLogger("hf_tiered_cache")

_CURRENT: dict[type, frozenset[str]] = {
    StoreStats: frozenset(
        {"segments", "encrypted_segments", "tokens", "unbudgeted_index_bytes", "queued_bytes", "queued_device_bytes"}
    ),
    TierUse: frozenset(field.name for field in fields(TierUse)),
    RemoteStats: frozenset({"queued_writes"}),
    RequestStats: frozenset({"seconds_saved"}),
}
"""Figures that can fall (gauges), by their class. All others only grow (counters)."""

_MOST_REASONS = 100  # maximum number of reasons that are reported as labels: a series is kept for each

_SNAPSHOT_SECONDS = 1.0  # seconds for which OpenTelemetry gets the same figures: each metric asks for itself


class Metric(NamedTuple):
    """A figure, or figures of the same kind with a label."""

    path: tuple[str, ...]
    """Parts of the name."""
    text: str
    is_gauge: bool
    """True if it can fall; otherwise it is a counter."""
    label: str
    """Name of the label, or an empty string."""
    values: Mapping[str, float]
    """Values by label; a single one has an empty label."""


def metrics_of(store: KVStore, requests: StatsCollector) -> Iterator[Metric]:
    """Yield a metric for each figure of a store, and for the sums over its requests."""
    yield from _metrics(("hf_tiered_cache", "store"), store.stats)
    yield from _metrics(("hf_tiered_cache", "requests"), requests.stats)


def export_to_opentelemetry(store: KVStore, requests: StatsCollector, meter: Meter | None = None) -> None:
    """Report all metrics to OpenTelemetry, as observable counters and gauges such as `hf_tiered_cache.store.segments`.

    Args:
        store: The store.
        requests: Sums over its requests.
        meter: Meter of the instruments; by default that of the global provider, which the program or
            `opentelemetry-instrument` sets.

    Raises:
        ImportError: Opentelemetry-api is not installed.
    """
    from opentelemetry.metrics import Observation, get_meter

    snapshot: dict[tuple[str, ...], Metric] = {}
    expires = 0.0

    def observe(path: tuple[str, ...], _: CallbackOptions) -> Iterator[Observation]:
        nonlocal snapshot, expires
        if (now := time.monotonic()) >= expires:
            snapshot, expires = {m.path: m for m in metrics_of(store, requests)}, now + _SNAPSHOT_SECONDS
        if (metric := snapshot.get(path)) is not None:
            for name, value in metric.values.items():
                yield Observation(value, {metric.label: name} if metric.label else None)

    meter = meter or get_meter("hf_tiered_cache")
    for metric in metrics_of(store, requests):
        create = meter.create_observable_gauge if metric.is_gauge else meter.create_observable_counter
        create(".".join(metric.path), [partial(observe, metric.path)], description=metric.text)


class MetricsOf:
    """Collector of prometheus-client for the figures of a store, and for the sums over its requests.

    Examples are `hf_tiered_cache_store_segments`, `hf_tiered_cache_requests_tokens_restored_total`, and
    `hf_tiered_cache_requests_tier_bytes_total{tier="host"}`.
    """

    def __init__(self, store: KVStore, requests: StatsCollector) -> None:
        self._store, self._requests = store, requests

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield a metric for each figure."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for path, text, is_gauge, label, values in metrics_of(self._store, self._requests):
            kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
            metric = kind("_".join(path), text, labels=[label] if label else [])
            for name, value in values.items():
                metric.add_metric([name] if label else [], value)
            yield metric

    def answer(self) -> Response:
        """Return an HTTP response with all metrics, in the text format of Prometheus."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from starlette.responses import Response

        registry = CollectorRegistry()
        registry.register(self)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def exported_metrics(store: KVStore, requests: StatsCollector) -> MetricsOf | None:
    """Report metrics to OpenTelemetry, and return those for Prometheus, each if its package is installed."""
    with suppress(ImportError):
        export_to_opentelemetry(store, requests)
    if find_spec("prometheus_client") is None:
        logger.info("/metrics is not served; install prometheus-client")
        return None
    return MetricsOf(store, requests)


def _metrics(path: tuple[str, ...], figures: Any) -> Iterator[Metric]:
    """Yield the metrics of a dataclass with figures."""
    for field in fields(figures):
        value, name = getattr(figures, field.name), (*path, field.name)
        if isinstance(value, int | float):
            yield _metric(figures, name, {"": value})
        elif is_dataclass(value):
            yield from _metrics(path if field.name == "details" else name, value)
        elif isinstance(value, Mapping) and field.name == "tiers":
            yield from _by_tier(path, value)
        elif isinstance(value, Mapping):
            yield _metric(figures, name, dict(islice(sorted(value.items()), _MOST_REASONS)), "reason")


def _by_tier(path: tuple[str, ...], tiers: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of each tier's figures, with the tier as label. A budget without a limit is left out."""
    for field in fields(next(iter(tiers.values()))):
        values = {tier: getattr(figures, field.name) for tier, figures in tiers.items()}
        known_values = {tier: value for tier, value in values.items() if value is not None}
        if known_values and all(isinstance(value, int | float) for value in known_values.values()):
            yield _metric(next(iter(tiers.values())), (*path, "tier", field.name), known_values, "tier")


def _metric(figures: Any, path: tuple[str, ...], values: Mapping[str, float], label: str = "") -> Metric:
    """Return the metric of a figure, the last part of `path`, with its values."""
    text = f"{path[-1].replace('_', ' ')} (see {type(figures).__name__})"
    return Metric(path, text, path[-1] in _CURRENT.get(type(figures), ()), label, values)
