"""What is no fault of the stored files has no consequence for them, and nobody waits for ever."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from sqlite3 import DatabaseError, OperationalError, connect
from types import SimpleNamespace

import processes
import pytest
import torch
from drawn_faults import path_of
from segments import hashes, open_store, read_back, segment

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import IntegrityError, QuotaError, StoreBusyError, StoreError
from hf_tiered_cache.store import database, disk, folder, index, maintain, quota, writer
from hf_tiered_cache.store import segment as segment_module
from hf_tiered_cache.store.conversations import Ownership, conversation_name
from hf_tiered_cache.store.kinds import CONVERSATION_LOCK, LOCK_SUFFIX
from hf_tiered_cache.store.memory import aligned_bytes
from hf_tiered_cache.store.root import StoreRoot
from hf_tiered_cache.store.writer import PendingSegment, Writer

OF_THE_PROCESS = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EACCES, errno.EAGAIN]


def publish(store, count=4, seed="a", **changes):
    header, chain, blocks = segment(hashes(count, seed), **changes)
    assert store.publish(header, chain, blocks)
    return header


@contextmanager
def failing(name, error, fragment):
    """Let a system call fail in the body for paths that contain `fragment`."""
    real = getattr(os, name)

    def call(path, *args, **options):
        if fragment in str(path_of(path, options)):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


# --- faults of the process


@pytest.mark.parametrize("error", OF_THE_PROCESS)
def test_a_segment_that_could_not_be_opened_is_neither_hidden_nor_replaced(tmp_path, error):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(4))
    assert store.publish(header, chain, blocks)
    inode = store.path(header.id).stat().st_ino
    with failing("open", error, ".kv"):
        assert store.reader(header.id) is None
        assert not store.publish(header, chain, blocks)
    assert store.path(header.id).stat().st_ino == inode
    assert [row.id for row in store.find(hashes(4))] == [header.id]
    assert read_back(store, header.id)
    assert store.counters.snapshot().read_errors == 1


def test_a_failing_segment_stays_until_another_takes_its_place(tmp_path):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(4))
    assert store.publish(header, chain, blocks)
    store.report(header.id, OSError(errno.EIO, "a bad sector"))
    with failing("rename", errno.ENOSPC, str(tmp_path)):
        assert not store.publish(header, chain, blocks)
    assert store.path(header.id).exists()
    assert store.publish(header, chain, blocks)
    assert read_back(store, header.id)


def test_each_read_error_hides_a_segment_for_twice_as_long(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    store = open_store(tmp_path)
    header = publish(store)
    pauses = []
    for _ in range(8):
        store.report(header.id, OSError(errno.EIO, "a cable"))
        failed_at = clock[0]
        while not store.find(hashes(4)):
            assert store.hid_any(hashes(4), since=clock[0])
            clock[0] += 1
        pauses.append(clock[0] - failed_at)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    clock[0] += 121
    store.report(header.id, OSError(errno.EIO, "a cable"))
    clock[0] += 1
    assert [row.id for row in store.find(hashes(4))] == [header.id]


def test_a_whole_segment_that_took_the_place_of_a_damaged_one_is_kept(tmp_path):
    """Another process has replaced a segment that this process has open and finds damaged."""
    store, other_store = open_store(tmp_path), open_store(tmp_path)
    header, chain, blocks = segment(hashes(4))
    assert store.publish(header, chain, blocks)
    damaged = store.reader(header.id)
    offset = damaged.header.blocks.offset
    with open(store.path(header.id), "r+b") as file:
        file.seek(offset)
        file.write(b"\x55" * 100)
    other_store.report(header.id, OSError(errno.EIO, "a bad sector"))
    assert other_store.publish(header, chain, blocks)
    chunk = aligned_bytes(damaged.shape.block_groups[0].block_bytes).view(1, -1)
    with pytest.raises(IntegrityError, match="checksum") as error:
        damaged.read(0, [(0, chunk)]).result()
    store.report(header.id, error.value)
    assert read_back(store, header.id)


def test_files_that_could_not_be_read_at_opening_are_entered_later(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_SCANNING_SECONDS", 0.0)
    store = open_store(tmp_path)
    header = publish(store)
    store.close()
    (tmp_path / "catalogue.sqlite").unlink()
    with failing("open", errno.EMFILE, ".kv"):
        store = open_store(tmp_path)
    assert store.find(hashes(4)) == []
    publish(store, seed="another")
    assert [row.id for row in store.find(hashes(4))] == [header.id]


def test_open_segments_are_bounded_by_process_and_descriptors(tmp_path, monkeypatch):
    stores = [open_store(tmp_path / str(i)) for i in range(3)]
    segment_ids = [[publish(store, 1, seed=f"s{i}").id for i in range(20)] for store in stores]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(os.listdir("/proc/self/fd"))
    limit = 4 * open_files // 3 + 40  # a quarter fits beside what the process holds, and 30 are over
    monkeypatch.setattr(segment_module, "_MOST_OPEN_SEGMENTS", 40)  # fewer than there are, however many it holds
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        for _ in range(2):
            for store, names in zip(stores, segment_ids, strict=True):
                assert all(store.reader(name) is not None for name in names)
        assert sum(len(list(store.readers)) for store in stores) <= segment_module.most_open_segments() < limit
        publish(stores[0], seed="room is left to write")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not any(store.counters.snapshot().read_errors for store in stores)


def test_readers_of_a_closed_store_are_closed(tmp_path):
    for _ in range(3):
        store = open_store(tmp_path)
        read_back(store, publish(store).id)
        store.close()
    gc.collect()
    paths = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [path for path in paths if path.startswith(str(tmp_path))]


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, error):
    store = open_store(tmp_path, quota=10_000_000)
    headers = {publish(store, seed=seed).id for seed in "abc"}
    with failing("listdir", error, "segments"):
        other_store = open_store(tmp_path)
        maintain.gc(other_store)
        with pytest.raises(StoreError, match="cannot be listed"):
            maintain.verify(other_store)
    assert store.index.catalogue.ids() == headers
    with failing("listdir", error, "pins"), pytest.raises(StoreError, match="pins cannot be listed"):
        maintain.gc(store)


def test_what_is_pinned_stays_when_pins_cannot_be_listed(tmp_path):
    store = open_store(tmp_path, quota=1_000_000)
    header = publish(store, seed="pinned")
    store.pin([header.id])
    with failing("listdir", errno.EIO, "pins"):
        for i in range(20):
            store.publish(*segment(hashes(4, f"s{i}")))
    assert store.path(header.id).exists()


# --- the catalogue


def test_nothing_opens_a_database_that_is_open(tmp_path, monkeypatch):
    first = open_store(tmp_path)
    publish(first)
    opened_paths, real = [], os.open

    def noting(path, flags, *args, **options):
        if "catalogue.sqlite" in str(path) and not str(path).endswith(".lock"):
            opened_paths.append((str(path), flags))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", noting)
    with KVStore(tmp_path) as second:
        second.gc()
        second.verify()
        repr(second.stats)
    assert opened_paths == []  # of a new one the first is the only one that makes it
    assert first.find(hashes(4))


def test_stores_of_one_folder_share_a_connection_that_the_last_one_closes(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "store")
    (tmp_path / "store").mkdir()
    stores = [open_store(tmp_path / "store"), open_store(tmp_path / "link"), open_store(tmp_path / "store")]
    (tmp_path / "store").rename(tmp_path / "moved")
    stores.append(open_store(tmp_path / "moved"))
    assert len({id(store.index.catalogue) for store in stores}) == 1
    keys = [key for key, shared in database._databases.get().items() if shared is stores[0].index.catalogue]
    assert len(keys) == 1
    for store in stores[:3]:
        store.close()
    assert stores[3].index.ids() == set()
    assert stores[0].index.ids() is None
    stores[3].close()
    assert keys[0] not in database._databases.get()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_store_shares_nothing_with_an_open_one_whose_path_it_has_taken(tmp_path, is_deleted):
    root, lock = tmp_path / "store", (CONVERSATION_LOCK, conversation_name("alice") + LOCK_SUFFIX)
    old = open_store(root)
    publish(old, seed="old")
    owners = [Ownership("alice", old.backend.files)]
    owners[0].take(over=False)
    shutil.rmtree(root) if is_deleted else root.rename(tmp_path / "moved")
    new = open_store(root)
    new_header = publish(new, seed="new")
    old.index.scan()
    assert new.index.catalogue.ids() == {new_header.id}
    owners.append(Ownership("alice", new.backend.files))
    owners[1].take(over=False)
    assert new.backend.files.is_locked(*lock) and all(owner.held for owner in owners)
    owners[0].release()
    old.close()
    assert new.backend.files.is_locked(*lock)
    assert [row.id for row in new.find(hashes(4, "new"))] == [new_header.id]
    owners[1].release()
    new.close()


def test_a_file_is_unknown_though_an_open_store_had_a_catalogue_at_its_path(tmp_path):
    root = tmp_path / "store"
    with KVStore(root):
        root.rename(tmp_path / "moved")
        StoreRoot(root).close()
        (root / "catalogue.sqlite").write_bytes(b"precious")
        with KVStore(root) as store:
            assert store.verify().unknown == ["catalogue.sqlite"]


def test_no_catalogue_is_created_in_a_folder_that_has_taken_the_path(tmp_path):
    root, new_root = tmp_path / "store", tmp_path / "moved"
    store = open_store(root)
    publish(store)
    root.rename(new_root)
    root.mkdir()
    for path in new_root.glob("catalogue.sqlite*"):
        path.unlink()
    assert not store.publish(*segment(hashes(4, "b")))
    assert list(root.iterdir()) == []
    store.close()


OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from segments import *
for i in range(int(sys.argv[3])):
    store = open_store(Path(sys.argv[2]), quota=int(sys.argv[4]))
    assert store.publish(*segment(hashes(4, f"theirs{i}")))
    store.close()
"""


def other_process(root, rounds, limit=10**9):
    arguments = [sys.executable, "-c", OTHER, os.path.dirname(processes.__file__), str(root), str(rounds), str(limit)]
    return processes.Popen(arguments)


def test_a_process_that_opens_and_closes_leaves_the_log_of_others_alone(tmp_path):
    store, second_store = open_store(tmp_path), open_store(tmp_path)
    publish(store)
    log = (tmp_path / "catalogue.sqlite-wal").stat().st_ino
    second_store.close()
    assert other_process(tmp_path, 2).wait(timeout=60) == 0
    assert (tmp_path / "catalogue.sqlite-wal").stat().st_ino == log
    assert len(store.index.catalogue.ids()) == 3
    assert store.counters.snapshot().catalogue_errors == 0


def test_a_forked_child_has_a_connection_of_its_own_and_leaves_its_parents_alone(tmp_path):
    store = open_store(tmp_path)
    publish(store)
    pid = os.fork()
    if not pid:
        try:
            code = 0 if store.index.ids() is None else 1  # the parent's is not used
            child = open_store(tmp_path)
            code += 2 * (len(child.index.catalogue.ids()) != 1)
            child.close()
            store.close()
        except BaseException:
            code = 9
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    publish(store, seed="b")
    assert len(store.index.catalogue.ids()) == 2
    assert store.counters.snapshot().catalogue_errors == 0


@pytest.mark.parametrize("how", ["all", "database", "log", "garbage", "another"])
@pytest.mark.thin(2)
def test_a_catalogue_lost_under_open_processes_heals_into_one(tmp_path, how):
    limit = 1_500_000
    store = open_store(tmp_path, quota=limit)
    before = publish(store, seed="before")
    path = tmp_path / "catalogue.sqlite"
    if how == "garbage":
        with open(path, "r+b") as file:
            file.write(b"\xff" * 100)
    elif how == "another":
        path.with_name("new").write_bytes(b"")
        os.replace(path.with_name("new"), path)
    else:
        for suffix in {"all": ("", "-wal", "-shm"), "database": ("",), "log": ("-wal",)}[how]:
            path.with_name(f"{path.name}{suffix}").unlink()
    process = other_process(tmp_path, 6, limit)
    for i in range(12):
        assert store.publish(*segment(hashes(4, f"ours{i}")))
        assert sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv")) <= limit
    assert process.wait(timeout=60) == 0
    with KVStore(tmp_path) as fresh:
        assert {row.id for row in fresh.segments()} == {p.stem for p in (tmp_path / "segments").iterdir()}
        assert store.index.catalogue.ids() == {row.id for row in fresh.segments()}
    assert store.find(hashes(4, "theirs5"))
    assert store.path(before.id).exists() == bool(store.find(hashes(4, "before")))


def test_the_log_does_not_outgrow_the_room_that_is_left_for_it(tmp_path):
    """Somebody who reads an old state (a process that was stopped) keeps it from beginning anew."""
    store = open_store(tmp_path)
    ids = [publish(store, seed=f"{number}").id for number in range(10)]
    reading = connect(tmp_path / "catalogue.sqlite", isolation_level=None)
    reading.execute("BEGIN")
    reading.execute("SELECT count(*) FROM segments").fetchall()
    log = tmp_path / "catalogue.sqlite-wal"
    before = log.stat().st_size
    for _ in range(300):
        store.index.touch(ids)
    assert log.stat().st_size - before <= quota.CATALOGUE_GROWTH
    reading.close()
    last_use = store.index.catalogue.get(ids[0]).used
    publish(store, seed="more")  # which begins the log anew
    publish(store, seed="and more")
    store.index.touch(ids)
    assert store.index.catalogue.get(ids[0]).used > last_use
    assert log.stat().st_size <= quota.CATALOGUE_GROWTH


def test_many_files_are_entered_in_a_short_log(tmp_path):
    store = open_store(tmp_path)
    for number in range(60):
        publish(store, seed=f"{number}")
    store.index.catalogue.remove(store.index.catalogue.numbers(list(store.index.catalogue.ids())))
    reading = connect(tmp_path / "catalogue.sqlite", isolation_level=None)
    reading.execute("BEGIN")
    reading.execute("SELECT count(*) FROM segments").fetchall()
    log = tmp_path / "catalogue.sqlite-wal"
    before = log.stat().st_size
    store.index.scan()
    assert len(store.index.catalogue.ids()) == 60
    assert log.stat().st_size - before <= quota.CATALOGUE_GROWTH
    reading.close()


def test_a_catalogue_that_is_still_being_filled_is_not_reckoned_with(tmp_path):
    """One thread enters the files into a new one; to others they are there all the same."""
    store = open_store(tmp_path, quota=10**9)
    for number in range(3):
        publish(store, seed=f"{number}")
    before = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv"))
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"catalogue.sqlite{suffix}").unlink()
    with store.index._repair_lock:  # as that thread
        assert store.used_bytes() >= before
    assert store.used_bytes() >= before
    assert len(store.index.catalogue.ids()) == 3


@pytest.mark.parametrize(
    "error", [DatabaseError("malformed"), OperationalError("disk I/O error"), OverflowError("big")]
)
def test_asking_never_raises_nor_recurses_and_rebuilds_at_most_once(tmp_path, monkeypatch, error):
    store = open_store(tmp_path)
    publish(store)
    actions, rebuilt, real = [], [], database.Database.rebuild

    def run(self, action):
        actions.append(action)
        raise error

    monkeypatch.setattr(database.Database, "run", run)
    monkeypatch.setattr(database.Database, "rebuild", lambda *a: (rebuilt.append(a), real(*a)))
    for _ in range(5):
        assert store.find(hashes(4)) == []
        store.index.touch(["x"])
        assert not store.publish(*segment(hashes(2, "new")))
    assert len(rebuilt) == isinstance(error, DatabaseError) - isinstance(error, OperationalError)
    assert len(actions) < 100
    monkeypatch.undo()
    store.index.scan()
    assert store.find(hashes(4))


def test_a_segment_that_the_catalogue_cannot_be_told_of_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.05)
    store = open_store(tmp_path)
    db = connect(tmp_path / "catalogue.sqlite", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    for i in range(5):
        assert not store.publish(*segment(hashes(4, f"s{i}")))
    assert store.backend.names() == []
    assert store.counters.snapshot().dropped_writes == 5
    db.execute("ROLLBACK")
    db.close()
    publish(store)
    assert len(store.find(hashes(4))) == 1


def test_a_catalogue_that_could_not_be_opened_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_REPAIR_SECONDS", 0.0)
    other_store = open_store(tmp_path)
    kept_header = publish(other_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database.Database, "shared", lambda *_: (_ for _ in ()).throw(OperationalError("locked")))
        store = open_store(tmp_path)
        assert [row.id for row in store.find(hashes(4))] == [kept_header.id]  # reading goes on
        assert not store.publish(*segment(hashes(2, "b")))
    new_header = publish(store, seed="c")
    assert other_store.index.catalogue.ids() == {kept_header.id, new_header.id}


# --- waiting, paths, clocks, memory


def pending(seed, refused=lambda _: None):
    header, chain, blocks = segment(hashes(4, seed))
    return PendingSegment(header, chain, lambda: iter(blocks), (), refused)


def test_nobody_waits_for_a_writer_that_is_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(writer, "_MOST_PATIENCE_SECONDS", 0.4)
    store, hang = open_store(tmp_path), threading.Event()
    monkeypatch.setattr(store, "publish", lambda *_: hang.wait(60))
    writing = Writer(store, queue_bytes=1)
    first, second, refused_segments = pending("a"), pending("b"), []
    writing.submit(first)
    started = time.monotonic()
    writing.wait_for(first.prefix_hashes)
    assert 0.15 < time.monotonic() - started < 5
    writing.submit(pending("b", lambda _: refused_segments.append(1)))  # no room, and none to be expected
    writing.wait_for(second.prefix_hashes)
    with pytest.raises(StoreBusyError, match="nothing is being written"):
        writing.flush()
    writing.close()
    assert time.monotonic() - started < 10
    assert refused_segments == [1]
    hang.set()


def test_who_waits_for_a_slow_writer_waits_as_long_as_it_gets_on(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PATIENCE_SECONDS", 0.4)
    store = open_store(tmp_path)
    writing = Writer(store, queue_bytes=1)
    real = store.publish
    monkeypatch.setattr(store, "publish", lambda *a: (time.sleep(0.25), real(*a))[1])
    for i in range(5):
        writing.submit(pending(f"s{i}"))
    writing.wait_for(hashes(4, "s4"))
    writing.close()
    assert len(store.index.catalogue.ids()) == 5
    assert store.counters.snapshot().dropped_writes == 0


def test_what_cannot_wait_and_has_no_room_in_the_queue_is_dropped_and_counted(tmp_path, monkeypatch):
    store, hang, refused_segments = open_store(tmp_path), threading.Event(), []
    real = store.publish
    monkeypatch.setattr(store, "publish", lambda *a: (hang.wait(60), real(*a))[1])
    bound = 3 * pending("x").nbytes
    writing = Writer(store, queue_bytes=bound)
    for i in range(10):
        writing.submit(pending(f"s{i}", lambda _: refused_segments.append(1)), wait=False)
        assert writing.queued_bytes <= bound
    hang.set()
    writing.close()
    assert len(refused_segments) == store.counters.snapshot().dropped_writes == 7
    assert len(store.index.catalogue.ids()) == 3


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with KVStore("store") as store:
        header = publish(store._storage.disk)
        store._storage.disk.readers.clear()
        monkeypatch.chdir(tmp_path / "b")
        assert read_back(store._storage.disk, header.id)
        publish(store._storage.disk, seed="b")
        assert store.stats.segments == 2
    assert not os.listdir(tmp_path / "b")


def test_what_a_clock_that_was_ahead_has_stored_expires_in_time_and_can_be_stored_again(tmp_path):
    now, ahead = time.time(), time.time() + 1e8
    store = open_store(tmp_path, quota=1_400_000)
    publish(store, seed="future", created=ahead, expires=ahead + 100)
    assert now + 90 < store.find(hashes(4, "future"))[0].expires < now + 130
    row = store.find(hashes(4, "future"))[0]
    assert row.created <= time.time() >= row.used
    store.index.catalogue.run(lambda db: db.execute("UPDATE segments SET expires = 1"))
    publish(store, seed="future", expires=now + 1000)
    assert store.find(hashes(4, "future"))[0].expires == now + 1000
    for i in range(20):
        publish(store, seed=f"s{i}")
    assert store.find(hashes(4, "future")) == []  # and makes room when it is its turn


def test_paths_to_be_made_durable_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_MOST_UNSYNCED", 5)
    store = open_store(tmp_path)
    for i in range(20):
        publish(store, 1, seed=f"s{i}")
        assert len(store.backend._unsynced) <= 5
    store.remove(list(store.index.catalogue.ids()))
    assert not store.backend._unsynced


def test_a_quota_that_cannot_be_reckoned_lets_nothing_in(tmp_path):
    store = open_store(tmp_path, quota=10**9)
    with failing("scandir", errno.EIO, "tmp"), pytest.raises((OSError, QuotaError)):
        store.used_bytes()
    assert torch.is_tensor(read_back(store, publish(store).id)[0])


def test_an_intact_copy_that_is_written_over_an_open_segment_is_served(tmp_path):
    """As by `cp` or `rsync --inplace` from the store of another machine, with the same tokens and other bits."""
    store, other_store = open_store(tmp_path / "ours"), open_store(tmp_path / "others")
    header, chain, blocks = segment(hashes(4))
    assert store.publish(header, chain, blocks)
    assert other_store.publish(header, chain, [block ^ 1 for block in segment(hashes(4))[2]])
    reader = store.reader(header.id)
    with open(store.path(header.id), "r+b") as file:
        file.write(other_store.path(header.id).read_bytes())
    with pytest.raises(IntegrityError) as caught:
        reader.read(0, [(0, aligned_bytes(reader.shape.block_groups[0].block_bytes).view(1, -1))]).result()
    store.report(header.id, caught.value)
    assert [row.id for row in store.find(hashes(4))] == [header.id]
    assert all(map(torch.equal, read_back(store, header.id), read_back(other_store, header.id)))


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open"])
@pytest.mark.parametrize("written", [0, 100, 4096, 20_000, -1])
def test_a_copy_of_a_segment_that_stalls_is_completed_and_served(tmp_path, written, is_open):
    """Such as a backup that is copied into the folder of a store that is in use."""
    store = open_store(tmp_path)
    header = publish(store)
    path = store.path(header.id)
    content = path.read_bytes()
    if is_open:
        read_back(store, header.id)
    with open(path, "wb") as copy:
        copy.write(content[:written])
        copy.flush()
        for _ in range(3):
            assert store.reader(header.id) is None
        assert store.find(hashes(4)) == []
        copy.write(content[written:])
    store._failures.clear()  # as a second later
    assert [row.id for row in store.find(hashes(4))] == [header.id]
    assert read_back(store, header.id)


def test_a_copy_that_is_never_completed_is_stored_again(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    os.truncate(store.path(header.id), 5000)
    assert store.reader(header.id) is None
    assert publish(store).id == header.id and read_back(store, header.id)
