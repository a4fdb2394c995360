"""The folder of segments: publishing, finding, forgetting, and what survives of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import struct
import sys
import threading
import time

import processes
import pytest
import torch
from segments import hashes, open_store, read_back, segment, written_at_once
from threads import run_in_threads

from hf_tiered_cache.errors import IntegrityError, NotOursError, StoreBusyError, StoreError
from hf_tiered_cache.store import folder, maintain
from hf_tiered_cache.store.catalogue import Catalogue, SegmentRow
from hf_tiered_cache.store.kinds import PAGE_BYTES, PIN, SCHEMA_MARK
from hf_tiered_cache.store.quota import Limits
from hf_tiered_cache.store.root import StoreRoot
from hf_tiered_cache.store.segment import SegmentReader
from hf_tiered_cache.store.tree import nbytes_of


def orphan_in(root):
    """Return the path of a temporary file of a process that has died: its lock file exists, and is free."""
    (root / "tmp" / "1-2-3.lock").touch()
    return root / "tmp" / "1-2-3"


def publish(store, count=4, seed="a", **changes):
    header, chain, blocks = segment(hashes(count, seed), **changes)
    assert store.publish(header, chain, blocks)
    return header


def du(root) -> int:
    """Return the bytes that the store's files take on disk, as `du` counts them."""
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:  # gone while it was looked at
            continue
    return total


# --- publishing and finding


@pytest.mark.parametrize("count", [20, 300])
def test_threads_that_list_a_folder_at_once_each_see_all_files(tmp_path, count):
    """They share the folder's descriptor, but must not share its position in the list."""
    store = open_store(tmp_path)
    for number in range(count):
        store.backend.pin(f"{number:032x}", True)

    def look(_):
        for _ in range(50):
            assert len(store.backend.pinned()) == len(store.backend.files.sizes(PIN)) == count

    run_in_threads(look, range(4))


def test_a_segment_is_found_under_its_first_prefix_hash_alone(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    assert [row.id for row in store.find(hashes(4)[:1])] == [header.id]
    assert store.find(hashes(4)[1:]) == []
    assert store.find(hashes(4, "other")) == []


def test_another_process_sees_it_at_once(tmp_path):
    store, other_store = open_store(tmp_path), open_store(tmp_path)
    header = publish(store)
    assert [row.id for row in other_store.find(hashes(4))] == [header.id]
    assert read_back(other_store, header.id)


def test_the_first_of_two_writers_wins_and_the_second_is_counted(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    header, chain, blocks = segment(hashes(3))
    assert first.publish(header, chain, blocks)
    inode = first.path(header.id).stat().st_ino
    assert second.publish(header, chain, [b + 1 for b in blocks])
    assert first.path(header.id).stat().st_ino == inode
    assert second.counters.snapshot().duplicate_writes == 1
    for written_blocks, read_blocks in zip(blocks, read_back(second, header.id), strict=True):
        assert torch.equal(written_blocks, read_blocks)


def test_a_file_of_another_key_or_a_newer_version_is_no_duplicate(tmp_path, monkeypatch):
    """What cannot be read here was not stored: nobody may delete what it was to replace."""
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(3))
    assert store.publish(header, chain, blocks)

    def not_ours(*_):
        raise NotOursError("a newer version has written it")

    monkeypatch.setattr("hf_tiered_cache.store.disk.read_head", not_ours)
    assert not store.publish(header, chain, [b + 1 for b in blocks])
    counts = store.counters.snapshot()
    assert (counts.duplicate_writes, counts.dropped_writes) == (0, 1)
    for written_blocks, read_blocks in zip(blocks, read_back(store, header.id), strict=True):
        assert torch.equal(written_blocks, read_blocks)


def test_two_writers_at_the_same_moment(tmp_path):
    stores = [open_store(tmp_path) for _ in range(4)]
    header, chain, blocks = segment(hashes(6))
    barrier = threading.Barrier(4)
    results = []

    def write(store):
        barrier.wait()
        results.append(store.publish(header, chain, blocks))

    run_in_threads(write, stores)
    assert results == [True] * 4
    assert len(list((tmp_path / "segments").iterdir())) == 1
    assert not list((tmp_path / "tmp").iterdir())
    assert sum(s.counters.snapshot().segments_written for s in stores) == 1
    assert read_back(stores[0], header.id)


def test_expired_segments_are_not_found(tmp_path):
    store = open_store(tmp_path)
    publish(store, seed="old", expires=time.time() - 1)
    publish(store, seed="new", expires=time.time() + 100)
    assert store.find(hashes(4, "old")) == []
    assert len(store.find(hashes(4, "new"))) == 1


def test_a_label_of_any_string_is_stored(tmp_path):
    """os.fsdecode() puts lone surrogates in place of bytes that are no UTF-8."""
    publish(open_store(tmp_path), label="report \udcff")
    (row,) = open_store(tmp_path).find(hashes(4))
    assert row.label == "report ?"


# --- the catalogue is never the truth


def catalogue_files(root):
    return [root / f"catalogue.sqlite{suffix}" for suffix in ("", "-wal", "-shm")]


def test_a_lost_catalogue_is_rebuilt_from_the_headers(tmp_path):
    store = open_store(tmp_path)
    expected = {publish(store, seed=s, label=f"text {s}", model={"name": "small"}).id for s in "abc"}
    store.close()
    for path in catalogue_files(tmp_path):
        path.unlink(missing_ok=True)
    second_store = open_store(tmp_path)
    assert second_store.index.catalogue.ids() == expected
    row = second_store.find(hashes(4, "b"))[0]
    assert (row.tokens, row.valid_hashes, row.position, row.label) == (64, 4, 0, "text b")
    assert second_store.index.catalogue.models() == {"model": {"name": "small"}}
    assert row.nbytes == second_store.path(row.id).stat().st_blocks * 512


@pytest.mark.parametrize("damage", [b"", b"not a database, but long enough to be taken for one" * 100, None])
def test_a_damaged_catalogue_is_rebuilt(tmp_path, damage):
    store = open_store(tmp_path)
    header = publish(store)
    store.close()
    path = tmp_path / "catalogue.sqlite"
    if damage is None:  # a page in the middle
        data = bytearray(path.read_bytes())
        data[4096 : 4096 + 2000] = b"\xff" * 2000
        damage = bytes(data)
    path.write_bytes(damage)
    second_store = open_store(tmp_path)
    assert [row.id for row in second_store.find(hashes(4))] == [header.id]


def test_a_catalogue_damaged_while_open_is_rebuilt_and_counted(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    store.index.catalogue.run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
    with open(tmp_path / "catalogue.sqlite", "r+b") as file:
        file.write(b"\xff" * 16384)
    store.index.catalogue.run(lambda db: db.execute("PRAGMA shrink_memory"))
    rows = store.find(hashes(4)[:1]) or store.find(hashes(4)[:1])
    assert [row.id for row in rows] == [header.id]
    assert store.counters.snapshot().catalogue_errors >= 1


def test_a_stale_catalogue_is_brought_in_line_with_the_files(tmp_path):
    store = open_store(tmp_path)
    kept_header, deleted_header = publish(store, seed="kept"), publish(store, seed="gone")
    other_store = open_store(tmp_path / "other")
    moved_header = publish(other_store, seed="moved")
    store.close()
    (tmp_path / "segments" / f"{deleted_header.id}.kv").unlink()
    os.rename(other_store.path(moved_header.id), tmp_path / "segments" / f"{moved_header.id}.kv")
    assert open_store(tmp_path).index.catalogue.ids() == {kept_header.id, moved_header.id}


def test_another_schema_is_replaced(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    store.close()
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    db.execute("DROP TABLE segments")
    db.execute("CREATE TABLE segments (something TEXT)")
    db.execute("PRAGMA user_version=99")
    db.commit()
    db.close()
    assert open_store(tmp_path).index.catalogue.ids() == {header.id}


def test_rows_survive_a_round_trip(tmp_path):
    catalogue = Catalogue(StoreRoot(tmp_path))
    row = SegmentRow("id", "fp", "exact", b"1" * 16, 2, 32, 16, 4096, 1.5, None, 2.5, 3, b"1" * 32)
    catalogue.add([(row, {})])
    assert catalogue.get("id") == row
    catalogue.touch(["id"], now=9.0)
    assert (catalogue.get("id").used, catalogue.get("id").uses) == (9.0, 4)
    catalogue.limit("id", 1)
    catalogue.limit("id", 5)
    assert catalogue.get("id").valid_hashes == 1


def catalogue_of_kinds(path):
    """Create a catalogue of segments of two models, several provenances and keys, and return the distinct ones."""
    catalogue, kinds = Catalogue(StoreRoot(path)), set()
    for number in range(60):
        kind = "ab"[number % 2], ("exact", "int8", "behind")[number % 3], ("", "key")[number % 5 == 0 and number % 2]
        row = SegmentRow(str(number), *kind[:2], b"1" * 16, 2, 32, 16, 4096, 1.5, None, 2.5, 3, b"1" * 32, key=kind[2])
        catalogue.add([(row, {})])
        kinds.add(kind)
    return catalogue, kinds


def check_kinds(catalogue, kinds):
    """Compare what the catalogue says of keys and provenances with a set."""
    assert catalogue.keys() == {key for _, _, key in kinds} == {"", "key"}
    for fingerprint in ("a", "b", "c", ""):
        assert catalogue.keys(fingerprint) == {key for model, _, key in kinds if model == fingerprint}
        assert catalogue.provenances(fingerprint) == sorted(
            {provenance for model, provenance, _ in kinds if model == fingerprint}
        )


def test_keys_and_provenances_are_the_distinct_ones_of_a_model(tmp_path):
    catalogue, kinds = catalogue_of_kinds(tmp_path)
    check_kinds(catalogue, kinds)
    catalogue.close()


def test_a_miss_reads_no_more_of_a_large_catalogue(tmp_path):
    """What a lookup that finds nothing asks takes as many steps of SQLite for 60 segments as for 2,060."""
    catalogue, _ = catalogue_of_kinds(tmp_path)

    def steps():
        calls = []
        catalogue.run(lambda db: db.set_progress_handler(lambda: calls.append(1), 1))
        catalogue.models(), catalogue.keys("a"), catalogue.provenances("a")
        catalogue.run(lambda db: db.set_progress_handler(None, 1))
        return len(calls)

    few = steps()
    rows = [
        SegmentRow(f"{number} more", "a", "exact", b"1" * 16, 2, 32, 16, 4096, 1.5, None, 2.5, 3, b"1" * 32)
        for number in range(2000)
    ]
    catalogue.add([(row, {"name": "a"}) for row in rows])
    assert steps() <= 2 * few
    catalogue.close()


def test_a_new_catalogue_has_its_schema_in_the_first_page(tmp_path):
    """The schema distinguishes a catalogue from a foreign database."""
    Catalogue(StoreRoot(tmp_path)).close()
    with open(tmp_path / "catalogue.sqlite", "rb") as file:
        page = file.read(PAGE_BYTES)
    assert SCHEMA_MARK in page and b"INDEX by_kind" in page


def test_the_catalogue_names_the_models_whose_segments_are_stored(tmp_path):
    store = open_store(tmp_path)
    kept_header = publish(store, fingerprint="aa", model={"name": "a"}, label="the report")
    deleted_header = publish(store, fingerprint="bb", model={"name": "b"})
    publish(store, fingerprint="cc")  # by an older version, say
    assert store.index.catalogue.models() == {"aa": {"name": "a"}, "bb": {"name": "b"}}
    assert store.index.catalogue.get(kept_header.id).label == "the report"
    store.remove([deleted_header.id])
    assert store.index.catalogue.models() == {"aa": {"name": "a"}}


def test_many_processes_may_open_a_new_store_at_once(tmp_path):
    code = (
        "import sys; sys.path[:0] = [sys.argv[2]]\n"
        "from pathlib import Path; from segments import *\n"
        "s = open_store(Path(sys.argv[1])); h, c, b = segment(hashes(2, sys.argv[3])); assert s.publish(h, c, b)\n"
    )
    lib_path = os.path.dirname(processes.__file__)
    arguments = [sys.executable, "-c", code, str(tmp_path / "new"), lib_path]
    started = [processes.Popen([*arguments, str(i)]) for i in range(4)]
    assert [process.wait(timeout=120) for process in started] == [0] * 4
    assert len(open_store(tmp_path / "new").index.catalogue.ids()) == 4


# --- faults of the folder


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="folder"):
        open_store(tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another"):
        open_store(tmp_path / "file" / "store")


def test_an_unwritable_folder_is_read_and_drops_are_counted(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    header = publish(store)
    store.close()
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    readonly = open_store(tmp_path)
    assert not readonly.backend.writable
    assert [row.id for row in readonly.find(hashes(4))] == [header.id]
    assert read_back(readonly, header.id)
    for seed in "xy":
        header, chain, blocks = segment(hashes(2, seed))
        assert not readonly.publish(header, chain, blocks)
    assert readonly.counters.snapshot().dropped_writes == 2
    assert sum("is not writable" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("step", ["allocate", "write", "link"])
def test_a_full_disk_drops_the_write_counts_it_and_warns_once(tmp_path, monkeypatch, caplog, step):
    store = open_store(tmp_path)
    kept_header = publish(store, seed="kept")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    name = {"allocate": "posix_fallocate", "write": "pwrite", "link": "link"}[step]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        for seed in "bc":
            header, chain, blocks = segment(hashes(2, seed))
            assert not store.publish(header, chain, blocks)
    assert store.counters.snapshot().dropped_writes == 2
    assert sum("was not stored" in r.message for r in caplog.records) == 1
    assert not list((tmp_path / "tmp").iterdir())
    assert store.index.catalogue.ids() == {kept_header.id}
    publish(store, seed="later")  # the disk has room again
    assert read_back(store, kept_header.id)


def test_an_interrupted_write_goes_on(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:5000], offset))
    header, chain, blocks = segment(hashes(3))
    assert store.publish(header, chain, blocks)
    for written_blocks, read_blocks in zip(blocks, read_back(store, header.id), strict=True):
        assert torch.equal(written_blocks, read_blocks)


def test_a_file_system_without_links_is_renamed_on(tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refusing)
    store = open_store(tmp_path)
    assert read_back(store, publish(store).id)


# --- kill -9

STEPS = ["reserved", "first block", "all blocks", "header", "linked", "catalogued"]


@pytest.mark.parametrize("step", STEPS)
def test_kill_9_at_each_step_of_a_write(tmp_path, step):
    """The store opens, serves whole records alone, and the orphan's room is taken back."""
    store = open_store(tmp_path)
    kept_header = publish(store, seed="kept")
    store.close()
    code = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(processes.__file__)!r})
from pathlib import Path
from segments import *
from hf_tiered_cache.store.catalogue import Catalogue
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
step = {step!r}
store = open_store(Path({str(tmp_path)!r}))
header, chain, blocks = segment(hashes(3, "new"))
writes, pwrite, link, add = 0, os.pwrite, os.link, Catalogue.add
def counting(fd, data, offset):
    global writes
    writes += 1
    if (step, writes) in (("reserved", 1),): die()
    if step == "first block" and writes == 1: pwrite(fd, bytes(data)[:5000], offset); die()
    done = pwrite(fd, data, offset)
    if step == "all blocks" and writes == len(blocks): die()
    if step == "header" and writes == len(blocks) + 1: die()
    return done
def linking(*paths, **folders):
    link(*paths, **folders)
    if step == "linked": die()
def adding(self, *row):
    add(self, *row)
    if step == "catalogued": die()
os.pwrite, os.link, Catalogue.add = counting, linking, adding
store.publish(header, chain, blocks)
"""
    process = processes.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == -9, process.stderr
    second_store = open_store(tmp_path)
    header, _chain, blocks = segment(hashes(3, "new"))
    is_stored = step in ("linked", "catalogued")
    assert second_store.index.catalogue.ids() == ({kept_header.id, header.id} if is_stored else {kept_header.id})
    assert read_back(second_store, kept_header.id)
    if is_stored:
        for written_blocks, read_blocks in zip(blocks, read_back(second_store, header.id), strict=True):
            assert torch.equal(written_blocks, read_blocks)
    assert len(list((tmp_path / "tmp").glob("*[0-9]"))) == 1  # the orphan
    assert second_store.publish(*segment(hashes(1, "next")))
    assert not list((tmp_path / "tmp").iterdir())
    assert maintain.verify(second_store).ok


def test_a_file_being_written_is_no_orphan(tmp_path):
    """Another process collects garbage while ours writes."""
    store, other_store = open_store(tmp_path), open_store(tmp_path)
    with store.reserved("0" * 32, 100_000) as upload:
        assert other_store.clean_up() == {}
        assert upload.path.exists()
    assert not list((tmp_path / "tmp").iterdir())


HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from segments import *
store = open_store(Path(sys.argv[2]))
with store.reserved("0" * 32, 100_000) if sys.argv[3] == "a temporary file" else store.backend.locked():
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Start another process that holds a lock, and wait until it does."""
    started = []

    def start(role):
        arguments = [sys.executable, "-c", HOLDER, os.path.dirname(processes.__file__), str(tmp_path), role]
        started.append(processes.Popen(arguments, stdout=processes.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_temporary_file_of_another_process_stays_as_long_as_that_lives(tmp_path, holder):
    store, holder_process = open_store(tmp_path), holder("a temporary file")
    assert store.clean_up() == {}
    assert len(list((tmp_path / "tmp").glob("*[0-9]"))) == 1
    holder_process.kill()
    holder_process.wait()
    assert sum(store.clean_up(dry_run=True).values()) >= 100_000
    assert len(list((tmp_path / "tmp").glob("*[0-9]"))) == 1
    assert sum(store.clean_up().values()) >= 100_000
    assert not list((tmp_path / "tmp").iterdir())


def test_a_lock_that_is_not_to_be_had_drops_the_write_counts_it_and_says_so(tmp_path, holder, caplog, monkeypatch):
    monkeypatch.setattr(folder, "_LOCK_SECONDS", 0.3)
    store, holder_process = open_store(tmp_path), holder("the store")
    started = time.monotonic()
    assert not store.publish(*segment(hashes(2)))
    assert 0.3 <= time.monotonic() - started < 10
    assert store.counters.snapshot().dropped_writes == 1
    assert sum("was not released within 0.3 s" in r.message for r in caplog.records) == 1
    with pytest.raises(StoreBusyError):
        maintain.gc(store)
    holder_process.kill()
    holder_process.wait()
    assert store.publish(*segment(hashes(2)))


def test_who_waited_in_vain_waits_less_until_the_lock_was_had_again(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_LOCK_SECONDS", 0.5)
    monkeypatch.setattr(folder, "_LOCK_SECONDS_AFTERWARDS", 0.01)
    store, other_store = open_store(tmp_path), open_store(tmp_path)
    waited = []
    release = threading.Event()
    lock_taken = threading.Event()

    def hold():
        with other_store.backend.locked():
            lock_taken.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    lock_taken.wait(60)
    for _ in range(2):
        with pytest.raises(StoreBusyError, match="not released within") as error, store.backend.locked():
            pass
        waited.append(str(error.value).split("within ")[1].split(";")[0])
    assert waited == ["0.5 s", "0.01 s"]
    release.set()
    thread.join()
    with store.backend.locked():
        pass
    assert store.backend._lock_seconds == 0.5


def test_locks_truncate_no_data(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    orphan = orphan_in(tmp_path)
    os.link(store.path(header.id), orphan)  # as a writer that died after publishing left it
    assert sum(store.clean_up().values()) == 0
    assert not orphan.exists()
    assert read_back(store, header.id)


def test_a_temporary_file_that_cannot_be_deleted_keeps_its_lock_until_it_is(tmp_path, monkeypatch):
    """Without the lock, no clean-up would take it for a file of the library."""
    store, unlink = open_store(tmp_path), os.unlink

    def unlink_locks(name, **options):
        if not name.endswith(".lock"):
            raise OSError(errno.EIO, "a cable")
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_locks)
        publish(store)
    assert len(list((tmp_path / "tmp").iterdir())) == 2
    assert len(store.clean_up()) == 1
    assert not list((tmp_path / "tmp").iterdir())


def test_a_segment_whose_writer_died_before_its_row_was_there_gets_one(tmp_path):
    """Otherwise, neither lookups nor the quota would know it."""
    store = open_store(tmp_path)
    header = publish(store)
    before = store.index.listed_bytes()
    store.index.catalogue.remove(store.index.catalogue.numbers([header.id]))
    assert store.index.listed_bytes() == 0
    os.link(store.path(header.id), orphan_in(tmp_path))
    store.make_room(4096)
    assert [row.id for row in store.index.catalogue.all()] == [header.id]
    assert store.index.listed_bytes() == before


# --- quota


def test_the_quota_is_never_exceeded_and_the_least_recently_used_go_first(tmp_path):
    size = du_of_one(tmp_path / "probe")
    limit = 12 * size + 500_000
    store = open_store(tmp_path / "store", quota=limit, high=1.0, low=0.7)
    segment_ids = []
    for i in range(20):
        segment_ids.append(publish(store, seed=f"s{i}").id)
        assert du(tmp_path / "store") <= limit
        store.index.touch([segment_ids[0]])  # in use all the time
    remaining_ids = store.index.catalogue.ids()
    assert segment_ids[0] in remaining_ids
    assert segment_ids[-1] in remaining_ids
    assert remaining_ids - {segment_ids[0]} == set(segment_ids[-(len(remaining_ids) - 1) :])
    assert store.counters.snapshot().evicted_segments == 20 - len(remaining_ids)


def du_of_one(root):
    store = open_store(root)
    return store.path(publish(store).id).stat().st_blocks * 512


def test_several_processes_share_one_quota(tmp_path):
    limit = 5 * du_of_one(tmp_path / "probe") + 500_000
    assert 0 < written_at_once(tmp_path / "store", limit, 3, "s.publish(*segment(hashes(4, n + str(i))))\n") <= limit


def test_a_segment_over_the_whole_quota_is_dropped_and_evicts_nothing(tmp_path):
    store = open_store(tmp_path, quota=1_000_000)
    kept_header = publish(store)
    header, chain, blocks = segment(hashes(100))
    assert not store.publish(header, chain, blocks)
    assert store.counters.snapshot().dropped_writes == 1
    assert store.index.catalogue.ids() == {kept_header.id}


def test_pinned_segments_stay_also_when_the_catalogue_is_lost(tmp_path):
    size = du_of_one(tmp_path / "probe")
    root = tmp_path / "store"
    store = open_store(root, quota=3 * size + 500_000)
    pinned = publish(store, seed="pinned").id
    store.pin([pinned])
    store.close()
    for path in catalogue_files(root):
        path.unlink(missing_ok=True)
    store = open_store(root, quota=3 * size + 500_000)
    for i in range(8):
        publish(store, seed=f"s{i}")
    assert pinned in store.index.catalogue.ids()
    store.pin([pinned], pinned=False)
    for i in range(8, 16):
        publish(store, seed=f"s{i}")
    assert pinned not in store.index.catalogue.ids()


def test_a_child_is_evicted_before_its_parent(tmp_path):
    size = du_of_one(tmp_path / "probe")
    store = open_store(tmp_path / "store", quota=100 * size)
    parent = publish(store, seed="parent", position=0)
    header, chain, blocks = segment(hashes(4, "child"), position=64)
    store.publish(header, chain, blocks, ancestors=[parent.id])
    store.remove(name for name, _ in store.victims(1))
    assert store.index.catalogue.ids() == {parent.id}


def test_expired_segments_make_room_before_others(tmp_path):
    size = du_of_one(tmp_path / "probe")
    store = open_store(tmp_path / "store", quota=100 * size)
    live = publish(store, seed="live")
    publish(store, seed="expired", expires=time.time() - 1)
    store.remove(name for name, _ in store.victims(1))
    assert store.index.catalogue.ids() == {live.id}


def test_the_free_space_floor_is_kept(tmp_path, monkeypatch):
    store = open_store(tmp_path, floor=1 << 30)
    kept_header = publish(store, seed="kept")
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=(1 << 30) - 200_000))
    header, chain, blocks = segment(hashes(4, "too much"))
    assert not store.publish(header, chain, blocks)
    assert store.counters.snapshot().dropped_writes == 1
    assert store.index.catalogue.ids() == {kept_header.id}  # giving it up would not have been enough
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=(1 << 30) - 100_000))
    assert not store.publish(*segment(hashes(1, "little")))


def test_a_file_system_that_reports_no_sizes_has_room_and_files_count_by_length(tmp_path, monkeypatch):
    store = open_store(tmp_path / "store", floor=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (0, 0, 0))  # ramfs
    publish(store, seed="stored")
    with open(tmp_path / "no blocks", "wb") as file:
        file.truncate(5000)
    assert nbytes_of(os.stat(tmp_path / "no blocks")) == 5000


# --- damage


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_of_a_damaged_segment_what_stands_before_the_damage_stays_usable(tmp_path):
    store = open_store(tmp_path)
    header = publish(store, count=6)
    reader = store.reader(header.id)
    block_group = reader.shape.block_groups[1]
    flip(
        store.path(header.id), reader.header.blocks.offset + reader.shape.group_offsets[1] + 3 * block_group.block_bytes
    )
    with pytest.raises(IntegrityError) as error:
        read_back(store, header.id)
    store.report(header.id, error.value)
    assert store.find(hashes(6))[0].valid_hashes == 3
    assert store.counters.snapshot().verification_failures == 1


@pytest.mark.parametrize("at", ["header", "first block", "last block"])
def test_verify_changes_nothing_and_repair_removes_what_is_damaged(tmp_path, at):
    store = open_store(tmp_path)
    intact_header, header = publish(store, seed="whole"), publish(store, count=6)
    offset = {"header": 100, "first block": store.reader(header.id).header.blocks.offset, "last block": -4096}[at]
    flip(store.path(header.id), offset)
    before = {name: store.path(name).read_bytes() for name in store.backend.names()}
    for _ in range(2):
        report = maintain.verify(store)
        assert (list(report.bad), report.removed, report.ok) == ([header.id], [], False)
        assert {name: store.path(name).read_bytes() for name in store.backend.names()} == before
        assert store.find(hashes(6))[0].valid_hashes == 6
    report = maintain.verify(store, repair=True)
    assert (list(report.bad), report.removed, report.ok) == ([header.id], [header.id], True)
    report = maintain.verify(store)
    assert (report.bad, report.segments) == ({}, 1)
    assert store.index.catalogue.ids() == {intact_header.id}


def test_repair_leaves_what_only_failed_to_be_read(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    header = publish(store)

    def failing(*_, **__):
        raise OSError(errno.EIO, "a cable")

    with monkeypatch.context() as patch:
        patch.setattr(maintain, "SegmentReader", failing)
        report = maintain.verify(store, repair=True)
    assert (list(report.bad), report.removed, report.ok) == ([header.id], [], False)
    assert maintain.verify(store).ok


def test_verify_reads_every_block(tmp_path):
    store = open_store(tmp_path)
    headers = [publish(store, count=n, seed=str(n)) for n in (1, 3, 5)]
    report = maintain.verify(store)
    assert report.ok
    assert report.segments == 3
    assert report.blocks == sum(h.shape.first_blocks[-1] for h in headers)
    assert report.nbytes == sum(h.shape.blocks_bytes for h in headers)
    assert json.dumps(report.as_dict())


def test_gc_deletes_what_no_request_can_use_and_nothing_else(tmp_path):
    store = open_store(tmp_path)
    good = publish(store, seed="good")
    publish(store, seed="expired", expires=time.time() - 1)
    useless = publish(store, seed="useless")
    flip(store.path(useless.id), 100)
    newer = publish(store, seed="newer")
    page = bytearray(store.path(newer.id).read_bytes())
    struct.pack_into("<I", page, 8, 99)
    store.path(newer.id).write_bytes(page)
    store.close()
    (tmp_path / "catalogue.sqlite").unlink()
    store = open_store(tmp_path)
    orphan = orphan_in(tmp_path)
    orphan.write_bytes(bytes(5000))
    promised = maintain.gc(store, dry_run=True)
    assert len(store.backend.names()) == 4
    assert orphan.exists()
    before = du(tmp_path / "segments") + du(tmp_path / "tmp")
    report = maintain.gc(store)
    assert report == promised
    assert (report.expired, report.damaged) == (1, 1)
    assert report.freed_bytes == before - du(tmp_path / "segments") - du(tmp_path / "tmp")
    assert report.temporary_bytes > 0
    names = set(store.backend.names())
    assert names == {good.id, newer.id}  # a newer version's file is not ours to delete
    assert store.counters.snapshot().newer_files >= 1


def test_gc_brings_an_overfull_store_under_its_quota(tmp_path):
    store = open_store(tmp_path)
    for i in range(40):
        publish(store, seed=f"s{i}")
    store.close()
    limit = du(tmp_path) // 2
    store = open_store(tmp_path, quota=limit)
    promised, before = maintain.gc(store, dry_run=True), du(tmp_path / "segments")
    assert len(store.index.catalogue.ids()) == 40
    assert maintain.gc(store) == promised
    assert promised.evicted > 0
    assert promised.freed_bytes == before - du(tmp_path / "segments")
    assert du(tmp_path) <= limit


def test_gc_evicts_nothing_if_that_would_not_be_enough(tmp_path):
    store = open_store(tmp_path)
    pinned, other_header = publish(store, 40, "pinned"), publish(store, 40, "other")
    store.pin([pinned.id])
    least = store.used_bytes() - store.nbytes_of(other_header.id)
    for quota, evicted in ((least - 1, 0), (least + 100_000, 1)):
        store.limits = Limits(quota, floor=0)
        for report in (maintain.gc(store, dry_run=True), maintain.gc(store)):
            assert (report.evicted, "raise the quota" in report.not_evicted) == (evicted, not evicted)
        assert store.index.catalogue.ids() == ({pinned.id} if evicted else {pinned.id, other_header.id})


def test_a_segment_under_another_name_is_not_believed(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    other_path = store.path("0" * 32)
    os.rename(store.path(header.id), other_path)
    store.close()
    (tmp_path / "catalogue.sqlite").unlink()
    store = open_store(tmp_path)
    assert store.index.catalogue.ids() == set()
    assert store.counters.snapshot().damaged_files == 1


def test_removing_a_segment_takes_its_pin_along(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    store.pin([header.id])
    assert store.remove([header.id, "f" * 32]) == 1
    assert store.backend.pinned() == set()
    assert store.find(hashes(4)[:1]) == []


def test_sync_makes_data_durable_before_names(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    order = []
    fdatasync, fsync = os.fdatasync, os.fsync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (order.append("data"), fdatasync(fd)))
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("folder"), fsync(fd)))
    publish(store, seed="a")
    publish(store, seed="b")
    assert order == []  # an ordinary write waits for nothing: the checksum turns torn data into a miss
    store.sync()
    assert order == ["data", "data", "folder"]
    store.sync()
    assert order == ["data", "data", "folder"]


# --- a disk that fails, a life that ends


def test_an_expired_segment_is_written_anew(tmp_path):
    store = open_store(tmp_path)
    header = publish(store, expires=time.time() + 0.2)
    store.pin([header.id])
    time.sleep(0.3)
    assert store.find(hashes(4)) == []
    publish(store, expires=time.time() + 60)
    assert [row.id for row in store.find(hashes(4))] == [header.id]
    assert store.counters.snapshot().duplicate_writes == 0
    assert store.backend.pinned() == {header.id}


def test_a_segment_that_failed_to_read_is_written_anew(tmp_path):
    store = open_store(tmp_path)
    header = publish(store)
    store.report(header.id, OSError(errno.EIO, "a bad sector"))
    assert store.find(hashes(4)) == []
    publish(store)
    assert [row.id for row in store.find(hashes(4))] == [header.id]
    assert read_back(store, header.id)


def test_a_damaged_segment_on_a_disk_that_became_read_only_is_hidden(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    header = publish(store)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    flip(store.path(header.id), 100)
    assert store.reader(header.id) is None
    assert store.find(hashes(4)) == []


def test_without_a_shared_catalogue_the_quota_is_kept_by_looking_at_the_files(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    publish(store)
    used_bytes = store.used_bytes()
    monkeypatch.setattr(
        Catalogue, "total_bytes", lambda self: (_ for _ in ()).throw(sqlite3.OperationalError("locked"))
    )
    assert store.used_bytes() == used_bytes


def test_room_of_segments_that_others_deleted_is_given_back(tmp_path):
    store, other_store = open_store(tmp_path), open_store(tmp_path)
    header = publish(store)
    assert store.reader(header.id) is not None
    other_store.remove([header.id])
    publish(store, seed="b")
    assert header.id not in store.readers


def test_looking_for_deleted_segments_takes_little_of_the_time(tmp_path, monkeypatch):
    store, looks = open_store(tmp_path), []
    assert store.reader(publish(store).id) is not None

    def slowly(reader):
        looks.append(reader.id)
        time.sleep(0.2)
        return True

    monkeypatch.setattr(SegmentReader, "is_current", slowly)
    for seed in "bcd":
        publish(store, seed=seed)
    assert len(looks) == 1  # the next look is due after four seconds
    monkeypatch.setattr(store.backend, "free", lambda: 0)
    publish(store, seed="e")
    assert len(looks) == 2, "without room, deleted segments are looked for at once"


def test_what_could_not_be_made_durable_is_tried_again(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    publish(store)
    publish(store, seed="b")
    synced, broken = [], [True]

    def fsync(fd):
        if broken and len(synced) == 1:
            raise OSError(errno.EIO, "input/output error")
        synced.append(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fdatasync", fsync)
    with pytest.raises(StoreError, match="cannot be synchronized"):
        store.sync()
    broken.clear()
    store.sync()
    assert len(synced) == 3  # either file once, then the folder
    store.sync()
    assert len(synced) == 3


def test_a_segment_that_is_evicted_while_others_are_verified_is_not_damaged(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    deleted_header, stays = publish(store), publish(store, seed="b")
    names = store.backend.names()
    store.path(deleted_header.id).unlink()
    monkeypatch.setattr(store.backend, "names", lambda: names)
    report = maintain.verify(store)
    assert (report.ok, report.segments) == (True, 1)
    assert store.find(hashes(4, "b"))[0].id == stays.id
