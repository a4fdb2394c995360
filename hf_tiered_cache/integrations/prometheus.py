"""Metrics of a store and of the requests that use it, for Prometheus.

`MetricsOf(store, requests)` is a collector of prometheus-client. `hf-tiered-cache serve` answers `/metrics` with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from ..kvstore import KVStore
from ..stats import StatsCollector
from .metrics import metrics_of


class MetricsOf(Collector):
    """Collector of the figures of a store, and of the sums over its requests.

    Examples are `hf_tiered_cache_store_segments`, `hf_tiered_cache_requests_tokens_restored_total`, and
    `hf_tiered_cache_requests_tier_bytes_total{tier="host"}`.
    """

    def __init__(self, store: KVStore, requests: StatsCollector) -> None:
        self._store, self._requests = store, requests

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each figure."""
        for path, text, is_gauge, label, values in metrics_of(self._store, self._requests):
            kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
            metric = kind("_".join(path), text, labels=[label] if label else [])
            for name, value in values.items():
                metric.add_metric([name] if label else [], value)
            yield metric

    def answer(self) -> Response:
        """Return an HTTP response with all metrics, in the text format of Prometheus."""
        registry = CollectorRegistry()
        registry.register(self)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
