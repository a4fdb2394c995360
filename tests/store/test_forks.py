"""Forks of a process that uses a store: children share its open files and SQLite's memory, and keep nothing locked."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from families import build, prompt
from segments import hashes, open_store, segment

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import LostKVError
from hf_tiered_cache.store import database
from hf_tiered_cache.store import root as root_module
from hf_tiered_cache.store.backends import sqlite
from hf_tiered_cache.store.conversations import Ownership, conversation_name
from hf_tiered_cache.store.kinds import CONVERSATION_LOCK, LOCK, LOCK_SUFFIX
from hf_tiered_cache.store.root import StoreRoot

OWNERS_LOCK = CONVERSATION_LOCK, conversation_name("alice-42") + LOCK_SUFFIX


@contextmanager
def idle_child():
    """Fork a child that uses nothing, and ends with the body."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def copied_files(monkeypatch):
    """Copy the file of each lock that is taken, as a child has it that is forked before it can close it."""
    copies, flock = [], root_module.fcntl.flock

    def copying(file, operation):
        flock(file, operation)
        if not operation & fcntl.LOCK_UN:
            copies.append(os.dup(file if isinstance(file, int) else file.fileno()))

    with monkeypatch.context() as patch:
        patch.setattr(root_module.fcntl, "flock", copying)
        yield
    for descriptor in copies:
        os.close(descriptor)


def held(lock_kind, folder):
    """Take a lock by itself, for a temporary file or as the owner of a conversation. Return what releases it."""
    if lock_kind == "owner":
        owner = Ownership("alice-42", StoreRoot(folder))
        owner.take(over=False)
        return owner.release
    if lock_kind == "store":
        lock = StoreRoot(folder).locked(LOCK, "lock", 1)
    else:
        lock = open_store(folder).reserved("0" * 32, 100_000)
    lock.__enter__()
    return lambda: lock.__exit__(None, None, None)


def is_free(lock_kind, folder):
    """Return whether another user of the folder gets the lock."""
    if lock_kind == "temporary":
        open_store(folder).clean_up()
        return not os.listdir(folder / "tmp")
    lock = StoreRoot(folder).lock(*((LOCK, "lock") if lock_kind == "store" else OWNERS_LOCK))
    if lock is not None:
        lock.close()
    return lock is not None


WHATS = ["store", "temporary", "owner"]


@pytest.mark.parametrize("lock_kind", WHATS)
def test_a_lock_that_is_released_is_free_though_a_child_was_forked_meanwhile(tmp_path, lock_kind):
    release = held(lock_kind, tmp_path)
    with idle_child():
        assert not is_free(lock_kind, tmp_path)
        release()
        assert is_free(lock_kind, tmp_path)


@pytest.mark.parametrize("lock_kind", WHATS)
def test_a_lock_that_is_released_is_free_though_a_child_has_not_closed_its_copy(tmp_path, lock_kind, monkeypatch):
    with copied_files(monkeypatch):
        release = held(lock_kind, tmp_path)
        assert not is_free(lock_kind, tmp_path)
        release()
        assert is_free(lock_kind, tmp_path)


@pytest.mark.parametrize("lock_kind", WHATS)
def test_the_locks_of_a_killed_process_are_free_though_its_child_lives(tmp_path, lock_kind):
    StoreRoot(tmp_path).close()
    reading, writing = os.pipe()
    holder = os.fork()
    if not holder:
        release = held(lock_kind, tmp_path)  # noqa: F841  # not collected
        if not os.fork():
            os.write(writing, str(os.getpid()).encode())
        signal.pause()
        os._exit(0)
    child = int(os.read(reading, 20))
    try:
        assert not is_free(lock_kind, tmp_path)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert is_free(lock_kind, tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_looking_at_a_lock_leaves_it_free_though_a_child_was_forked_meanwhile(tmp_path, monkeypatch):
    files = StoreRoot(tmp_path)
    files.lock(*OWNERS_LOCK).close()
    with copied_files(monkeypatch):
        assert not files.is_locked(*OWNERS_LOCK)
        assert is_free("owner", tmp_path)


def exit_status(work):
    """Fork a child that does this work, and return its exit status: 0 if the work returned something true."""
    pid = os.fork()
    if not pid:
        signal.alarm(10)  # ends it if it hangs
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def during(call):
    """Run the body while another thread is inside a call, which is given a function that takes a while."""
    inside = threading.Event()

    def linger(*_):
        inside.set()
        time.sleep(0.3)

    thread = threading.Thread(target=call, args=(linger,))
    thread.start()
    assert inside.wait(10)
    yield
    thread.join()


def test_a_child_that_was_forked_during_a_transaction_writes_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.5)
    store = open_store(tmp_path)

    def write(linger):
        def enter(db):
            with database.transaction(db):
                linger()

        store.index.catalogue.run(enter)

    with during(write):
        assert exit_status(lambda: open_store(tmp_path).publish(*segment(hashes(4)))) == 0
    assert store.find(hashes(4))
    assert store.publish(*segment(hashes(4, "b")))


def test_a_child_that_was_forked_while_the_catalogue_is_opened_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.5)
    set_up = database._set_up

    def opened(linger):
        def lingering(db):
            set_up(db)
            if db.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                with database.transaction(db):
                    linger()

        with monkeypatch.context() as patch:
            patch.setattr(database, "_set_up", lingering)
            open_store(tmp_path)

    with during(opened):
        monkeypatch.setattr(database, "_set_up", set_up)
        assert exit_status(lambda: open_store(tmp_path).publish(*segment(hashes(4)))) == 0


def test_a_child_that_was_forked_during_a_write_to_an_sqlite_remote_writes_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.5)
    address = f"sqlite://{tmp_path}/prompts.db"
    remote = sqlite.SQLiteBackend(address)
    remote.put_object("segments/a", b"a", False)

    def write(linger):
        with remote._transaction(write=True):
            linger()

    def put():
        sqlite.SQLiteBackend(address).put_object("segments/b", b"b", False)
        return True

    with during(write):
        assert exit_status(put) == 0
    assert remote.find_object("segments/b") is not None


def test_threads_that_fork_at_once_do_not_wait_for_each_other(tmp_path):
    stores = [open_store(tmp_path / name) for name in "ab"]
    started = time.monotonic()
    threads = [threading.Thread(target=exit_status, args=(lambda: True,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 5
    assert all(store.publish(*segment(hashes(4))) for store in stores)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_decodes_with_its_parents_cache_waits_for_no_thread_of_the_parent(tmp_path):
    model, method = build("llama"), "kv_drive:budget=0.25"
    with KVStore(tmp_path, host_memory=0) as store:
        store.precompute(model, prompt(160), method=method, progress=False)
        cache = TieredCache(model, store, method=method)
        model.generate(prompt(167), past_key_values=cache, do_sample=False, max_new_tokens=2)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # which ends it
            with suppress(LostKVError):
                for seed in range(8):
                    model(input_ids=prompt(1, seed=seed), past_key_values=cache)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model(input_ids=prompt(1), past_key_values=cache)


def test_statistics_in_a_child_blame_no_file(tmp_path, caplog):
    with KVStore(tmp_path) as store:
        assert exit_status(lambda: store.stats.segments is None and not caplog.messages) == 0
        assert store.stats.segments == 0
