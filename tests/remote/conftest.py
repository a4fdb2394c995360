"""What the tests of remotes share."""

from __future__ import annotations

import pytest
from faulty_remote import FaultyRemote

from hf_tiered_cache import KVStore
from hf_tiered_cache.cache.observed import Pace


@pytest.fixture(autouse=True)
def pace(monkeypatch):
    """Seconds to compute a token, by which the remote is waited for: long, also on a busy machine. A test sets it."""
    seconds = [10.0]
    monkeypatch.setattr(Pace, "per_token", lambda self, fingerprint: seconds[0])
    return seconds


@pytest.fixture
def machine(tmp_path):
    """Return a function that opens a store in a new folder, as on another machine, and its connection to the remote."""
    places, stores = {}, []

    def open_store(name, place="shared", capacity=None, **options):
        remote = FaultyRemote(places.setdefault(place, {}), capacity)
        store = KVStore(tmp_path / name, remote=remote, **options)
        stores.append((store, remote))
        return store, remote

    yield open_store
    for store, remote in stores:
        remote.errors, remote.delay = {}, 0.0
        store.close()
