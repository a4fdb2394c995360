"""A catalogue that fails or is wrong deletes nothing: the files are asked first."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from unittest.mock import Mock

import pytest
from memory_backend import MemoryBackend
from segments import hashes, open_store, segment, store_over

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import StoreError
from hf_tiered_cache.integrations.metrics import metrics_of
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store import maintain
from hf_tiered_cache.store.catalogue import Catalogue
from hf_tiered_cache.store.conversations import ConversationRecord, Conversations
from hf_tiered_cache.store.database import UnavailableError, is_damage
from hf_tiered_cache.tiers.collector import StatsCollector


def publish(store, seed="a", **changes):
    header, chain, blocks = segment(hashes(4, seed), **changes)
    assert store.publish(header, chain, blocks)
    return header.id


def filled(root, change="", seeds="abc"):
    """Store segments, the first one pinned, change their rows, and return their ids."""
    store = open_store(root)
    ids = [publish(store, seed, expires=4e9 if seed == "b" else None) for seed in seeds]
    store.pin(ids[:1])
    store.close()
    with closing(sqlite3.connect(root / "catalogue.sqlite")) as database, database:
        database.execute(f"UPDATE segments SET {change or 'uses = 0'}")
    return ids


# --- nothing is deleted because of what is not known


@pytest.mark.parametrize("fault", ["listing", "catalogue"])
def test_segments_that_are_not_known_are_not_gone(monkeypatch, fault):
    backend = MemoryBackend()
    segment_id = publish(store_over(backend))
    texts = dict.fromkeys(("fingerprint", "provenance", "method"), "x")
    numbers = {"tokens": 64, "turns": 1, "created": 1.0, "suspended": 1.0, "nbytes": 1}
    record = ConversationRecord(id="alice", segments=(segment_id,), **texts, **numbers)
    Conversations(backend.records).write([record])
    listed = backend.list_objects

    def listing(folder):
        if folder == "segments":
            raise OSError(5, "the network is down")
        return listed(folder)

    def failing(catalogue):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        if fault == "listing":
            patch.setattr(backend, "list_objects", listing)
        else:
            patch.setattr(Catalogue, "all", failing)
        store = KVStore(backend=backend, remote=None)
        for action in (
            store.gc,
            store.segments,
            store.models,
            store.conversations,
            store.documents,
            partial(store.clear, disk=True),
            partial(store.remove_conversation, "alice"),
        ):
            with pytest.raises(StoreError, match=r"not all known: .*(cannot be listed|failed) .*; check"):
                action()
    assert store.gc().conversations == 0
    assert [info.segments for info in store.conversations()] == [[segment_id]]
    assert store.remove_conversation("alice") == 1
    store.close()


def test_a_segment_that_cannot_be_read_now_keeps_its_conversation(monkeypatch):
    backend = MemoryBackend()
    publish(store_over(backend))
    get_object = backend.get_object

    def failing(name, *args):
        if name.startswith("segments/"):
            raise OSError(5, "the network is down")
        return get_object(name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "get_object", failing)
        store = KVStore(backend=backend, remote=None)
        with pytest.raises(StoreError, match=r"segments/.*\.kv cannot be read .*the network is down"):
            store.clear(disk=True)
        report = store.gc()
        assert "cannot be read (the network is down)" in report.unreadable[0] and not report.deleted
    assert store.gc().unreadable == [] and len(store.segments()) == 1
    store.close()


def test_what_a_failing_catalogue_does_not_say_is_not_reported_as_nothing(monkeypatch, tmp_path):
    filled(tmp_path)
    with KVStore(tmp_path) as store:
        bytes_on_disk = store.stats.disk.bytes
        for name in ("models", "counts"):
            monkeypatch.setattr(Catalogue, name, Mock(side_effect=sqlite3.OperationalError("disk I/O error")))
        with pytest.raises(StoreError, match=r"not all known: the catalogue failed \(disk I/O error\); check"):
            store.models()
        stats = store.stats
        assert stats.segments is stats.tokens is stats.encrypted_segments is stats.disk.bytes is None
        assert stats.catalogue_errors and "unknown" in str(stats)
        assert not [metric for metric in metrics_of(store, StatsCollector()) if metric.path[-1] == "segments"]
        monkeypatch.undo()
        assert (store.stats.segments, store.stats.disk.bytes) == (3, bytes_on_disk) and bytes_on_disk > 0


# --- numbers


@pytest.mark.parametrize(
    "change",
    ["nbytes = nbytes | (1 << 40)", "nbytes = 1", "usable_links = 0", "expires = 1", "created = 1, expires = 2"],
)
def test_gc_deletes_no_segment_because_of_a_number_in_the_catalogue(tmp_path, change):
    ids = filled(tmp_path, change)
    store = open_store(tmp_path, quota=64 << 20)
    for dry_run in (True, False):
        report = maintain.gc(store, dry_run=dry_run)
        assert (report.expired, report.damaged, report.evicted, report.deleted) == (0, 0, 0, {})
    assert {segment_id for seed in "abc" for segment_id in [row.id for row in store.find(hashes(4, seed))]} == set(ids)
    assert [row.nbytes for row in store.index.rows()] == [store.nbytes_of(row.id) for row in store.index.rows()]
    store.close()


def test_a_wrong_size_neither_refuses_a_write_nor_evicts(tmp_path):
    ids = filled(tmp_path, "nbytes = nbytes | (1 << 40)")
    store = open_store(tmp_path, quota=64 << 20)
    assert sorted([*ids, publish(store, "new")]) == sorted(store.backend.names())
    store.close()


def test_gc_deletes_a_segment_whose_beginning_is_damaged(tmp_path):
    damaged, intact_id = filled(tmp_path, "usable_links = 0", "ac")
    store = open_store(tmp_path)
    with open(store.path(damaged), "r+b") as file:
        file.seek(store.reader(damaged).header.blocks.offset)
        file.write(b"\x55" * 64)
    assert maintain.gc(store).damaged == 1
    assert store.backend.names() == [intact_id] and store.find(hashes(4, "c"))
    store.close()


# --- rows


@pytest.mark.parametrize("column", ["first", "chain"])
@pytest.mark.parametrize("action", ["write", "verify"])
def test_a_segment_that_its_row_hides_is_found_again(tmp_path, column, action):
    (segment_id,) = filled(tmp_path, f"{column} = X'{'78' * 16}'", "a")
    store = open_store(tmp_path)
    if action == "write":
        publish(store)
    else:
        maintain.verify(store)
    (row,) = store.find(hashes(4))
    assert row.id == segment_id and store.found([row])[0] is not None
    assert store.counters.snapshot().catalogue_errors == 1
    store.close()


# --- damage


@pytest.mark.parametrize("schema", [b"tokens INTEGER", b"label TEXT", b"first BLOB", b"number INTEGER PRIMARY"])
def test_a_catalogue_with_a_flipped_bit_in_its_schema_is_rebuilt(tmp_path, schema):
    (segment_id,) = filled(tmp_path, seeds="a")
    path = tmp_path / "catalogue.sqlite"
    content = bytearray(path.read_bytes())
    content[content.find(schema)] ^= 1
    path.write_bytes(content)
    store = open_store(tmp_path)
    assert [row.id for row in store.find(hashes(4))] == [segment_id]
    publish(store, "b")
    assert len(store.index.complete_rows()) == 2
    store.close()


@pytest.mark.parametrize("column", ["provenance", "fingerprint", "label", "id"])
def test_a_catalogue_with_a_text_that_is_none_is_rebuilt(tmp_path, column):
    """SQLite quotes the text, here one that could be taken for the cause of the failure."""
    (segment_id,) = filled(tmp_path, f"{column} = CAST(X'{b'is locked'.hex()}E1' AS TEXT)", "a")
    with KVStore(tmp_path) as store:
        assert [row.id for row in store.segments()] == [segment_id]
        assert store.gc().deleted == {}
        assert storage_of(store).disk.find(hashes(4))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (sqlite3.OperationalError("no such column: tokens"), True),
        (sqlite3.OperationalError("Could not decode to UTF-8 column 'id' with text 'full\ufffd'"), True),
        (sqlite3.DatabaseError("database disk image is malformed"), True),
        (sqlite3.IntegrityError("NOT NULL constraint failed"), True),
        *(
            (sqlite3.OperationalError(message), False)
            for message in (
                "database is locked",
                "database table is locked",
                "database or disk is full",
                "attempt to write a readonly database",
                "disk I/O error",
                "unable to open database file",
            )
        ),
        (UnavailableError("the database was opened before this process was forked"), False),
    ],
)
def test_an_error_without_another_cause_is_damage(error, expected):
    assert is_damage(error) == expected
