"""Partitions between a machine and a real server: connections stay open, and no byte arrives in either direction."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import pytest
import torch
from families import prompt
from servers import make_bucket, redis_server, s3_environment, s3_server
from shared_prompts import PROMPTS, check, share
from tcp_proxy import proxied

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.remote import link
from hf_tiered_cache.store.backends import open_remote

_REQUESTS = 7
"""Number of requests after the breaker has opened."""


@pytest.fixture(scope="module", params=["redis", "s3"])
def server(request, tmp_path_factory):
    """Run a server of each kind, and return the kind and the server."""
    run = {"redis": redis_server, "s3": s3_server}[request.param]
    with run(tmp_path_factory.mktemp(request.param)) as started:
        yield request.param, started


@pytest.fixture
def place(server, monkeypatch):
    """Return the address of an empty place on a server, and the proxy before it."""
    kind, started = server
    with proxied(started.port) as proxy:
        name = f"bucket{proxy.port}"
        if kind == "redis":
            monkeypatch.setattr("hf_tiered_cache.store.backends.redis._SECONDS", 1.0)
            yield f"redis://127.0.0.1:{proxy.port}/0/{name}", proxy
        else:
            timeouts = {"connect_timeout": "1s", "timeout": "1s"}
            monkeypatch.setattr("hf_tiered_cache.store.backends.object_store._CLIENT", timeouts)
            make_bucket(started, name)
            for variable, value in s3_environment(started).items():
                monkeypatch.setenv(variable, value)
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
            yield f"s3://{name}/x", proxy


@torch.no_grad()
def seconds_of(model, store, ids):
    """Return the seconds that a request waits for the remote, and those of everything else in it."""
    before, began = store.stats.remote.waiting_seconds, time.perf_counter()
    model(input_ids=ids, past_key_values=TieredCache(model, store, record=False), logits_to_keep=1)
    took, waited = time.perf_counter() - began, store.stats.remote.waiting_seconds - before
    return waited, took - waited


def restore_in_time(model, store, ids):
    """Ask for a prompt until the remote is used again, and restore it from there."""
    deadline = time.monotonic() + 60
    while not check(model, store, ids):
        assert time.monotonic() < deadline, store.stats.remote
        time.sleep(0.05)


@pytest.mark.parametrize("during", ["lookup", "fetch"])
@pytest.mark.thin(2)
def test_a_partition_costs_counted_misses_and_heals(model, tmp_path, pace, monkeypatch, place, during):
    for name in ("_OPEN_SECONDS", "_MOST_OPEN_SECONDS"):
        monkeypatch.setattr(link, name, 1.0)
    address, proxy = place
    with ExitStack() as stack:
        writer = stack.enter_context(KVStore(tmp_path / "a", remote=address))
        share(model, writer, *PROMPTS)
        assert writer.stats.remote.segments_written == len(PROMPTS)
        remote = open_remote(address)
        reader = stack.enter_context(KVStore(tmp_path / "b", remote=remote))
        stack.callback(proxy.heal)  # so that closing waits for nothing
        check(model, reader, PROMPTS[0], tokens_restored=96)
        get, cuts = remote.get_object, [during == "fetch"]
        monkeypatch.setattr(remote, "get_object", lambda *a: (cuts and cuts.pop() and proxy.cut(), get(*a))[1])
        if during == "lookup":
            proxy.cut()
        pace[0] = 0.05  # 4.8 s to compute a prompt
        count = link._FAILURES + (during == "fetch")
        for ids in PROMPTS[1 : 1 + count]:
            check(model, reader, ids, tokens_restored=0)
        before = reader.stats.remote
        assert set(before.misses) <= {link.LATE, link.UNAVAILABLE}  # a hanging call also fails in the end
        assert before.misses[link.LATE] >= 2
        assert before.waiting_seconds < 1.2 * count  # a fifth of the time to compute a prompt at most
        # from then on nobody waits: the request takes as long as computing it
        waited, computing_seconds = zip(*[seconds_of(model, reader, PROMPTS[5]) for _ in range(_REQUESTS)], strict=True)
        assert statistics.median(waited) < 0.2 * statistics.median(computing_seconds)
        misses = reader.stats.remote.misses
        assert misses == before.misses | {link.UNAVAILABLE: before.misses.get(link.UNAVAILABLE, 0) + _REQUESTS}
        # nothing is lost: both store what they compute, and restore it
        for store, ids in ((reader, prompt(100, seed=50)), (writer, prompt(100, seed=51))):
            share(model, store, ids)
            check(model, store, ids, tokens_restored=96)
        assert reader.stats.remote.damaged == writer.stats.remote.damaged == 0
        proxy.heal()
        pace[0] = 10.0
        for ids in PROMPTS[6:]:
            restore_in_time(model, reader, ids)
        tier = storage_of(reader).remote
        assert not tier.look_ups.breaker.is_open
        assert not tier.fetch_breaker.is_open
        segments_sent = writer.stats.remote.segments_written
        share(model, writer, prompt(100, seed=52))
        assert writer.stats.remote.segments_written > segments_sent
        check(model, reader, prompt(100, seed=52), tokens_restored=96)
