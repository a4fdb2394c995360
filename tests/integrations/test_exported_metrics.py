"""Metrics for Prometheus and OpenTelemetry: every figure of a store and its requests has one, with its value."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch
from families import build, prompt

pytest.importorskip("prometheus_client", reason="install the extra serve: pip install 'hf-tiered-cache[serve]'")

from prometheus_client.parser import text_string_to_metric_families

from hf_tiered_cache import KVStore, TieredCache, tiered
from hf_tiered_cache.integrations.metrics import MetricsOf, export_to_opentelemetry
from hf_tiered_cache.tiers.collector import StatsCollector


def read(metrics):
    """Return kind and samples of each metric, as Prometheus parses them."""
    families = text_string_to_metric_families(metrics.answer().body.decode())
    return {
        family.name: (family.type, {tuple(sample.labels.values()): sample.value for sample in family.samples})
        for family in families
    }


@pytest.fixture
def served(root):
    """Return metrics after two prompts of a session and one cache, and the statistics behind them."""
    model, requests = build("qwen2"), StatsCollector()
    with KVStore(root, engine="posix") as store:
        with tiered(model, store) as session:
            session.count_into(requests)
            for _ in range(2):
                model.generate(prompt(100), max_new_tokens=4, do_sample=False)
        cache = TieredCache(model, store)
        cache.count_into(requests)
        with torch.no_grad():
            model(input_ids=prompt(100), past_key_values=cache)
        store.flush()
        yield MetricsOf(store, requests), store, requests.stats


def test_figures_have_their_values(served):
    metrics, store, requests = served
    values = read(metrics)
    assert requests.requests == 3 and requests.tokens_restored > 0
    assert values["hf_tiered_cache_requests_requests"] == ("counter", {(): 3})
    assert values["hf_tiered_cache_requests_tokens_restored"] == ("counter", {(): requests.tokens_restored})
    assert values["hf_tiered_cache_store_segments"] == ("gauge", {(): store.stats.segments})
    kind, tiers = values["hf_tiered_cache_requests_tier_bytes"]
    assert kind == "counter" and tiers == {(name,): use.bytes for name, use in requests.tiers.items()}
    kind, tiers = values["hf_tiered_cache_store_tier_bytes"]
    assert kind == "gauge" and tiers[("disk",)] == store.stats.disk.bytes > 0


def test_every_number_has_a_metric(served):
    metrics, store, requests = served
    values = read(metrics)

    def check(prefix, figures):
        for field in fields(figures):
            value = getattr(figures, field.name)
            if isinstance(value, int | float):
                assert values[f"{prefix}_{field.name}"][1][()] == value
            elif is_dataclass(value):
                check(prefix if field.name == "details" else f"{prefix}_{field.name}", value)

    check("hf_tiered_cache_store", store.stats)
    check("hf_tiered_cache_requests", requests)


def test_reasons_are_labels(served):
    metrics, _, requests = served
    requests.reasons.clear()
    requests.reasons.update({f"reason {number}": number for number in range(200)})
    samples = read(metrics)["hf_tiered_cache_requests_reasons"][1]
    assert samples[("reason 101",)] == 101 and len(samples) == 100


def test_a_limit_that_does_not_exist_is_left_out(served):
    metrics, store, _ = served
    assert store.stats.disk.budget is None
    assert ("disk",) not in read(metrics)["hf_tiered_cache_store_tier_budget"][1]


def test_opentelemetry_gets_the_same_metrics(served):
    pytest.importorskip("opentelemetry.sdk", reason="install opentelemetry-sdk: pip install opentelemetry-sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader

    metrics, store, _ = served
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
    export_to_opentelemetry(store, metrics._requests, meter)
    data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    exported = {
        metric.name.replace(".", "_"): (
            "gauge" if isinstance(metric.data, Gauge) else "counter",
            {tuple(point.attributes.values()): point.value for point in metric.data.data_points},
        )
        for metric in data
    }
    expected = {name: (kind, samples) for name, (kind, samples) in read(metrics).items() if samples}
    assert exported == expected and len(expected) > 50
