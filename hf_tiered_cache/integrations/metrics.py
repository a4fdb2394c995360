"""Metrics of a store and of the requests that use it, for Prometheus.

`MetricsOf(store, requests)` is a collector of prometheus-client. `hf-tiered-cache serve` answers `/metrics` with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from ..kvstore import KVStore
from ..stats import RemoteStats, RequestStats, StatsCollector, StoreStats, TierUse

_CURRENT: dict[type, frozenset[str]] = {
    StoreStats: frozenset(
        {"segments", "encrypted_segments", "tokens", "unbudgeted_index_bytes", "queued_bytes", "queued_device_bytes"}
    ),
    TierUse: frozenset(field.name for field in fields(TierUse)),
    RemoteStats: frozenset({"queued_writes"}),
    RequestStats: frozenset({"seconds_saved"}),
}
"""Figures that can fall (gauges), by their class. All others only grow (counters)."""

_MOST_REASONS = 100
"""Maximum number of reasons that are reported as labels: Prometheus keeps a series for each."""

_LABELS = {"tiers": "tier", "reasons": "reason", "misses": "reason"}
"""Name of the label for figures by name."""


class MetricsOf(Collector):
    """Collector of the figures of a store, and of the sums over its requests.

    Metrics are named after the figures of docs/statistics.md: `hf_tiered_cache_store_segments`,
    `hf_tiered_cache_requests_tokens_restored_total`, `hf_tiered_cache_requests_tier_bytes_total{tier="host"}`.
    """

    def __init__(self, store: KVStore, requests: StatsCollector) -> None:
        self._store, self._requests = store, requests

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each figure."""
        yield from _metrics("hf_tiered_cache_store", self._store.stats)
        yield from _metrics("hf_tiered_cache_requests", self._requests.stats)

    def answer(self) -> Response:
        """Return an HTTP response with all metrics, in the text format of Prometheus."""
        registry = CollectorRegistry()
        registry.register(self)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _metrics(prefix: str, figures: Any) -> Iterator[Metric]:
    """Yield the metrics of a dataclass with figures."""
    for field in fields(figures):
        value, name = getattr(figures, field.name), f"{prefix}_{field.name}"
        if isinstance(value, int | float):
            yield _metric(figures, field.name, name, {"": value})
        elif is_dataclass(value):
            yield from _metrics(prefix if field.name == "details" else name, value)
        elif isinstance(value, Mapping) and field.name == "tiers":
            yield from _by_tier(prefix, value)
        elif isinstance(value, Mapping) and field.name in _LABELS:
            counts = dict(islice(sorted(value.items()), _MOST_REASONS))
            yield _metric(figures, field.name, name, counts, _LABELS[field.name])


def _by_tier(prefix: str, tiers: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of each tier's figures, with the tier as label. A budget without a limit is left out."""
    for field in fields(next(iter(tiers.values()))):
        values = {tier: getattr(figures, field.name) for tier, figures in tiers.items()}
        known = {tier: value for tier, value in values.items() if value is not None}
        if known and all(isinstance(value, int | float) for value in known.values()):
            yield _metric(next(iter(tiers.values())), field.name, f"{prefix}_tier_{field.name}", known, "tier")


def _metric(figures: Any, figure: str, name: str, values: Mapping[str, float], label: str = "") -> Metric:
    """Return one metric with its values by label, or a single value."""
    kind = GaugeMetricFamily if figure in _CURRENT.get(type(figures), ()) else CounterMetricFamily
    text = f"{figure.replace('_', ' ')} (see {type(figures).__name__})"
    metric = kind(name, text, labels=[label] if label else [])
    for label_value, value in values.items():
        metric.add_metric([label_value] if label else [], value)
    return metric
