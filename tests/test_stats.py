"""Statistics by tier are tables by name: another tier is another name, and nothing else."""

from __future__ import annotations

import json

import pytest

from hf_tiered_cache import stats
from hf_tiered_cache.stats import RequestStats, StoreStats
from hf_tiered_cache.store.faults import Counters
from hf_tiered_cache.tiers.collector import StatsCollector


def test_tiers_have_their_names():
    request, store = RequestStats(), StoreStats()
    for counters in (request, store):
        assert list(counters.tiers) == list(stats.TIERS) == ["device", "host", "disk"]
        assert (counters.device, counters.host, counters.disk) == tuple(counters.tiers.values())
    request.disk.hits = 3
    store.disk.budget = None
    assert request.as_dict()["disk"] == {"blocks": 0, "bytes": 0, "hits": 3, "misses": 0}
    assert store.as_dict()["disk"] == {"bytes": 0, "budget": None}
    store.index.bytes, store.index.budget = 3 << 20, 4 << 20
    assert store.as_dict()["index"] == {"bytes": 3 << 20, "budget": 4 << 20}
    assert "index, used / budget" in str(store) and "3.0 MiB / 4.0 MiB" in str(store)
    assert json.dumps(request.as_dict()) and json.dumps(store.as_dict())


def test_a_further_tier_is_a_further_name(monkeypatch):
    monkeypatch.setattr(stats, "TIERS", (*stats.TIERS, "remote"))
    collector, total = StatsCollector(), StatsCollector()
    collector.total = total
    collector.looked_up("disk", 1, 2, 100)
    assert collector.stats.tier == "disk"
    collector.looked_up("remote", 2, 1, 200)
    for request_stats in (collector.stats, total.stats):
        assert request_stats.tier == "remote"
        assert request_stats.as_dict()["remote"] == {"blocks": 2, "bytes": 200, "hits": 2, "misses": 1}
        assert request_stats.tiers["disk"].misses == 2
        assert "remote" in str(request_stats)
        assert "remote" in request_stats._repr_html_()
    assert "remote" in StoreStats().as_dict()
    assert "remote" in str(StoreStats())


def test_a_request_shows_first_what_was_restored_and_the_other_counters_as_details():
    collector, total = StatsCollector(), StatsCollector()
    collector.total = total
    collector.add(requests=1, tokens_restored=96, tokens_computed=5, bytes_read=4096, seconds_saved=1251.9)
    collector.add(bytes_used=2048, bytes_identifying=1024, select_seconds=0.25, verification_failures=2)
    collector.read_started()
    collector.read_done(0)
    for request_stats in (collector.stats, total.stats):
        assert (
            request_stats.tokens_restored,
            request_stats.details.bytes_used,
            request_stats.details.select_seconds,
        ) == (96, 2048, 0.25)
        assert request_stats.details.io_seconds > 0
        assert request_stats.read_amplification == (4096 - 1024) / 2048
        printed = str(request_stats)
        assert "96 / 5 / 0" in printed and "failed checks / read errors" in printed and "select" not in printed
        assert "1,251.9 s" in printed
        assert "250.0 ms" in str(request_stats.details) and "250.0 ms" in request_stats.details._repr_html_()
    figures = collector.stats.as_dict()
    assert figures["tokens_restored"] == 96 and figures["details"]["bytes_used"] == 2048
    assert not figures.keys() & figures["details"].keys()
    with pytest.raises(AttributeError):
        collector.add(tokens_unknown=1)


def test_a_snapshot_stays_as_it_is():
    counters = Counters()
    counters.add("segments_written")
    before = counters.snapshot()
    before.host.bytes = 7
    counters.add("segments_written")
    assert (before.segments_written, counters.snapshot().segments_written) == (1, 2)
    assert counters.snapshot().host.bytes == 0
