"""A segment that is stored again after the user deleted it is in the remote, too."""

from __future__ import annotations

import threading

from faulty_remote import FaultyRemote
from segments import hashes, segment

from hf_tiered_cache import KVStore
from hf_tiered_cache.kvstore import storage_of

FIRST, AGAIN = segment(hashes(4, "first")), segment(hashes(4, "again"))


class GatedRemote(FaultyRemote):
    """Remote that stores nothing until `go` is set."""

    def __init__(self):
        super().__init__({})
        self.go = threading.Event()

    def put_object(self, name, content, replace):
        assert self.go.wait(10)
        super().put_object(name, content, replace)


def assert_is_in_both(store, remote):
    remote.go.set()
    store.flush()
    name = AGAIN[0].id
    assert name in {row.id for row in store.segments()}
    assert any(name in stored for stored in remote.segments())
    assert remote.entries()


def test_a_segment_that_is_deleted_and_stored_again_while_it_waits(tmp_path):
    remote = GatedRemote()
    with KVStore(tmp_path, remote=remote) as store:
        disk = storage_of(store).disk
        disk.publish(*FIRST)  # keeps the remote busy
        for _ in range(2):
            disk.publish(*AGAIN)
            store.remove([AGAIN[0].id])
        disk.publish(*AGAIN)
        assert_is_in_both(store, remote)
        assert store.stats.remote.queued_writes == 0


def test_a_segment_that_another_thread_stores_again_during_the_deletion(tmp_path, monkeypatch):
    remote = GatedRemote()
    remote.go.set()
    with KVStore(tmp_path, remote=remote) as store:
        disk = storage_of(store).disk
        disk.publish(*AGAIN)
        store.flush()
        remove = disk.remove

        def remove_and_store_again(names):
            num_removed = remove(names)
            disk.publish(*AGAIN)  # in another thread
            return num_removed

        monkeypatch.setattr(disk, "remove", remove_and_store_again)
        store.remove([AGAIN[0].id])
        assert_is_in_both(store, remote)


def test_a_segment_that_waits_and_is_deleted_is_not_sent(tmp_path):
    remote = GatedRemote()
    with KVStore(tmp_path, remote=remote) as store:
        disk = storage_of(store).disk
        disk.publish(*FIRST)
        disk.publish(*AGAIN)
        store.remove([AGAIN[0].id])
        remote.go.set()
        store.flush()
        assert [FIRST[0].id in name for name in remote.segments()] == [True]
        assert store.stats.remote.dropped_writes == 0
