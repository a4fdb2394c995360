"""What a remote is expected to take, and when it is left alone."""

from __future__ import annotations

import pytest
from faulty_remote import FaultyRemote

from hf_tiered_cache.remote import link
from hf_tiered_cache.remote.link import Breaker, Estimate, Link, LookUps


@pytest.fixture
def clock(monkeypatch):
    """Stop the clock, and return a function that sets it forward."""
    now = [1000.0]
    monkeypatch.setattr(link.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_an_estimate_follows_what_is_measured_and_outlives_it(clock):
    estimate = Estimate()
    assert estimate.value is None
    assert estimate.is_old
    estimate.add(1.0)
    assert (estimate.value, estimate.is_old) == (1.0, False)
    estimate.add(3.0)
    assert estimate.value == 2.0
    clock(link._MEASURED_SECONDS)
    assert (estimate.value, estimate.is_old) == (2.0, True)  # nobody waits to find out again
    estimate.add(5.0)
    assert (estimate.value, estimate.is_old) == (5.0, False)  # not mixed with what was long ago


def test_a_remote_of_unknown_bandwidth_is_tried():
    link = Link()
    assert link.fetch_seconds(1 << 40) == 0
    link.bandwidth.add(1000.0)
    assert link.fetch_seconds(2000) == 2.0


def test_fetches_at_the_same_time_share_a_bandwidth(clock):
    link = Link()
    with link.fetching() as first:
        clock(1.0)
        with link.fetching() as second:
            clock(1.0)
            second(3000)
        assert link.bandwidth.value is None
        first(1000)
    assert link.bandwidth.value == 2000.0
    with pytest.raises(OSError), link.fetching():  # what fails shows nothing
        clock(1.0)
        raise OSError
    assert link.bandwidth.value == 2000.0


def test_a_breaker_opens_after_failures_in_a_row(clock):
    breaker = Breaker()
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert not breaker.is_open
    for _ in range(link._FAILURES):
        assert not breaker.is_open
        breaker.failed()
    assert breaker.is_open


def test_an_open_breaker_lets_one_probe_through_and_waits_longer_after_each(clock):
    breaker, waits = Breaker(), []
    for _ in range(link._FAILURES):
        breaker.failed()
    for _ in range(6):
        waited = 0
        while not breaker.wants_probe():
            clock(1.0)
            waited += 1
        assert not breaker.wants_probe()  # one at a time
        waits.append(waited)
        breaker.failed()
        assert breaker.is_open
    assert waits == [5, 10, 20, 40, 60, 60]
    clock(60)
    assert breaker.wants_probe()
    breaker.succeeded()
    assert not breaker.is_open
    for _ in range(link._FAILURES):
        breaker.failed()
    clock(link._OPEN_SECONDS)
    assert breaker.wants_probe()  # the wait begins anew


def test_a_probe_that_is_never_reported_is_followed_by_another(clock):
    breaker = Breaker()
    for _ in range(link._FAILURES):
        breaker.failed()
    clock(link._OPEN_SECONDS)
    assert breaker.wants_probe()
    clock(link._MOST_OPEN_SECONDS)
    assert breaker.wants_probe()


def test_a_store_that_is_closed_meanwhile_is_no_error_of_a_prompt(clock):
    look_ups = LookUps(FaultyRemote({}), lambda breaker, error: None)
    for _ in range(3):
        look_ups.breaker.failed()
    clock(60.0)
    look_ups.close()
    assert look_ups.find(["0" * 32], 1.0) == link.UNAVAILABLE
    look_ups.breaker.succeeded()
    look_ups.seconds.add(5.0)
    clock(60.0)
    assert look_ups.find(["0" * 32], 1.0) == link.SLOW
