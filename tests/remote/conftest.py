"""What the tests of remotes share."""

from __future__ import annotations

import pytest
from families import build

from hf_tiered_cache.cache.pace import Pace


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(autouse=True)
def pace(monkeypatch):
    """Seconds to compute a token, by which the remote is waited for: long, also on a busy machine. A test sets it."""
    seconds = [10.0]
    monkeypatch.setattr(Pace, "per_token", lambda self, fingerprint: seconds[0])
    return seconds
