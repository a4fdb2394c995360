"""Segments that are stored again while they are deleted: their catalogue rows stay."""

from __future__ import annotations

import pytest
from memory_backend import MemoryBackend
from segments import hashes, open_store, segment, store_over

SEGMENT = segment(hashes(4))
NAME = SEGMENT[0].id


@pytest.fixture(params=["another process", "this process", "in memory"])
def stores(request, tmp_path):
    """Return a store that deletes, and one that stores the segment again."""
    store = store_over(MemoryBackend()) if request.param == "in memory" else open_store(tmp_path)
    other_store = open_store(tmp_path) if request.param == "another process" else store
    assert store.publish(*SEGMENT)
    assert store.publish(*segment(hashes(4, "other")))
    return store, other_store


def check_listed(stores):
    for store in stores:
        assert set(store.backend.names()) == {row.id for row in store.index.rows()}
        assert [row.id for row in store.find(SEGMENT[1])] == [NAME]


def once(store):
    """Return a function that stores the segment when it is first called."""
    remaining_segments = [SEGMENT]
    return lambda *_: remaining_segments and store.publish(*remaining_segments.pop())


def test_after_its_file_was_deleted(stores):
    store, other_store = stores
    store.on_gone.append(once(other_store))
    assert store.remove([NAME]) == 1
    check_listed(stores)


def test_after_its_file_was_found_missing(stores, monkeypatch):
    store, other_store = stores
    store_again, is_own = once(other_store), store.backend.is_own

    def look(name):
        result = is_own(name)
        store_again()
        return result

    monkeypatch.setattr(store.backend, "is_own", look)
    assert store.remove([NAME]) == 1
    check_listed(stores)


def test_while_the_catalogue_is_compared_with_the_files(stores, monkeypatch):
    store, other_store = stores
    store_again, names = once(other_store), store.backend.names

    def listed():
        listing = names()
        store_again()
        return listing

    store.backend.delete(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(store.backend, "names", listed)
        store.index.scan()
    check_listed(stores)


def test_after_it_could_not_be_opened(stores, monkeypatch):
    store, other_store = stores
    store_again = once(other_store)
    store.backend.delete(NAME)
    monkeypatch.setattr(store.backend, "is_reachable", lambda: store_again() or True)
    assert store.reader(NAME) is None
    check_listed(stores)
