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
    ours = store_over(MemoryBackend()) if request.param == "in memory" else open_store(tmp_path)
    theirs = open_store(tmp_path) if request.param == "another process" else ours
    assert ours.publish(*SEGMENT)
    assert ours.publish(*segment(hashes(4, "other")))
    return ours, theirs


def check_listed(stores):
    for store in stores:
        assert set(store.backend.names()) == {row.id for row in store.index.rows()}
        assert [row.id for row in store.find(SEGMENT[1])] == [NAME]


def once(store):
    """Return a function that stores the segment when it is first called."""
    left = [SEGMENT]
    return lambda *_: left and store.publish(*left.pop())


def test_after_its_file_was_deleted(stores):
    ours, theirs = stores
    ours.on_gone.append(once(theirs))
    assert ours.remove([NAME]) == 1
    check_listed(stores)


def test_after_its_file_was_found_missing(stores, monkeypatch):
    ours, theirs = stores
    again, is_own = once(theirs), ours.backend.is_own

    def look(name):
        found = is_own(name)
        again()
        return found

    monkeypatch.setattr(ours.backend, "is_own", look)
    assert ours.remove([NAME]) == 1
    check_listed(stores)


def test_while_the_catalogue_is_compared_with_the_files(stores, monkeypatch):
    ours, theirs = stores
    again, names = once(theirs), ours.backend.names

    def listed():
        found = names()
        again()
        return found

    ours.backend.delete(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(ours.backend, "names", listed)
        ours.index.scan()
    check_listed(stores)


def test_after_it_could_not_be_opened(stores, monkeypatch):
    ours, theirs = stores
    again = once(theirs)
    ours.backend.delete(NAME)
    monkeypatch.setattr(ours.backend, "is_reachable", lambda: again() or True)
    assert ours.reader(NAME) is None
    check_listed(stores)
