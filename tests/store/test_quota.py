"""The arithmetic of room: what must go, what should, and who."""

from __future__ import annotations

import pytest

from hf_tiered_cache.store.quota import Limits, victims


@pytest.mark.parametrize(
    ("limits", "nbytes", "used_bytes", "free", "expected"),
    [
        (Limits(floor=0), 100, 10**9, None, (0, 0)),  # no bound at all
        (Limits(floor=50), 100, 0, 150, (0, 0)),
        (Limits(floor=50), 100, 0, 149, (1, 101)),  # as much again, so that not every write evicts
        (Limits(1000, 0.9, 0.5, 0), 100, 800, None, (0, 0)),
        (Limits(1000, 0.9, 0.5, 0), 100, 801, None, (0, 401)),  # above the high mark: down to the low one
        (Limits(1000, 0.9, 0.5, 0), 100, 950, None, (50, 550)),
        (Limits(1000, 1.0, 1.0, 0), 100, 950, None, (50, 50)),
        (Limits(1000, 0.9, 0.5, 60), 100, 950, 100, (60, 550)),  # the floor needs more than the quota
    ],
)
def test_what_must_go_and_what_should(limits, nbytes, used_bytes, free, expected):
    required_bytes, desired_bytes = limits.shortfall(nbytes, used_bytes, free)
    assert (max(required_bytes, 0), max(desired_bytes, 0)) == expected


@pytest.mark.parametrize(("used_bytes", "expected"), [(0, 0), (900, 0), (901, 401), (2000, 1500)])
def test_what_is_over_the_quota(used_bytes, expected):
    assert Limits(1000, 0.9, 0.5, 0).overflow(used_bytes) == expected
    assert Limits(None, 0.9, 0.5, 0).overflow(used_bytes) == 0


USES = [("old", 10, None), ("expired", 20, 5.0), ("new", 30, 15.0)]


@pytest.mark.parametrize(
    ("nbytes", "spared", "expected"),
    [
        (0, (), []),
        (1, (), ["expired"]),
        (20, (), ["expired"]),
        (21, (), ["expired", "old"]),
        (1000, (), ["expired", "old", "new"]),
        (21, ("old",), ["expired", "new"]),
    ],
)
def test_expired_ones_go_first_then_the_least_recently_used(nbytes, spared, expected):
    assert [name for name, _ in victims(USES, nbytes, spared, now=10.0)] == expected
