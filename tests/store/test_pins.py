"""Pins that are set while segments are deleted: either the segment stays, or the call says that it is gone."""

from __future__ import annotations

import re
import threading

import pytest
from memory_backend import MemoryBackend
from segments import hashes, open_store, segment, store_over

from hf_tiered_cache.errors import ConfigError, StoreError
from hf_tiered_cache.store import maintain

SEGMENTS = [segment(hashes(4, name)) for name in "abc"]
OLDEST = SEGMENTS[0][0].id


@pytest.fixture(params=["another process", "this process", "in memory"])
def stores(request, tmp_path):
    """Return a store that deletes, and one that pins."""
    store = store_over(MemoryBackend()) if request.param == "in memory" else open_store(tmp_path)
    for stored_segment in SEGMENTS[:2]:
        assert store.publish(*stored_segment)
    return store, open_store(tmp_path) if request.param == "another process" else store


@pytest.mark.parametrize("evict", ["write", "gc"])
def test_a_segment_that_is_being_evicted_cannot_be_pinned(stores, monkeypatch, evict):
    store, other_store = stores
    pinned, outcomes = store.backend.pinned, []

    def pin():
        try:
            other_store.pin([OLDEST])
        except ConfigError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=pin)

    def listed():
        pinned_names = pinned()
        if not thread.ident:
            thread.start()
            thread.join(0.2)  # it waits until the eviction has ended
        return pinned_names

    size = store.used_bytes()
    monkeypatch.setattr(store, "limits", type(store.limits)(size if evict == "write" else size - 1, 1.0, 0.95, 0))
    with monkeypatch.context() as patch:
        patch.setattr(store.backend, "pinned", listed)
        if evict == "write":
            assert store.publish(*SEGMENTS[2])
        else:
            assert maintain.gc(store).evicted
    thread.join()
    assert OLDEST not in store.backend.names()
    assert store.backend.pinned() == set()
    assert len(outcomes) == 1 and f"segment '{OLDEST}' does not exist" in outcomes[0]


def test_no_pin_of_a_segment_stays_that_is_deleted_meanwhile(stores, monkeypatch):
    store, other_store = stores
    pin = other_store.backend.pin

    def late(name, pinned):
        if pinned:
            store.remove([name])
        pin(name, pinned)

    with monkeypatch.context() as patch:
        patch.setattr(other_store.backend, "pin", late)
        with pytest.raises(ConfigError, match="does not exist"):
            other_store.pin([OLDEST])
    assert store.backend.pinned() == set()
    assert store.publish(*SEGMENTS[0])
    other_store.pin([OLDEST])
    assert store.backend.pinned() == {OLDEST}


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_of_others_in_place_of_a_pin_is_named(tmp_path, kind):
    store, path = open_store(tmp_path), tmp_path / "pins" / OLDEST
    assert store.publish(*SEGMENTS[0])
    {"file": lambda: path.write_text("x"), "folder": path.mkdir, "link": lambda: path.symlink_to("x")}[kind]()
    with pytest.raises(StoreError, match=rf"{re.escape(str(path))} .*; move it elsewhere"):
        store.pin([OLDEST])
    assert path.exists() or path.is_symlink()
    store.close()
