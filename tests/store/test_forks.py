"""Forks of a process that uses a store: children share its open files and SQLite's memory, and keep nothing locked."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import contextmanager

import pytest
from segments import open_store

from hf_tiered_cache.store import root as root_module
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


def held(what, folder):
    """Take a lock by itself, for a temporary file or as the owner of a conversation. Return what releases it."""
    if what == "owner":
        owner = Ownership("alice-42", StoreRoot(folder))
        owner.take(over=False)
        return owner.release
    if what == "store":
        lock = StoreRoot(folder).locked(LOCK, "lock", 1)
    else:
        lock = open_store(folder).reserved("0" * 32, 100_000)
    lock.__enter__()
    return lambda: lock.__exit__(None, None, None)


def is_free(what, folder):
    """Return whether another user of the folder gets the lock."""
    if what == "temporary":
        open_store(folder).clean_up()
        return not os.listdir(folder / "tmp")
    lock = StoreRoot(folder).lock(*((LOCK, "lock") if what == "store" else OWNERS_LOCK))
    if lock is not None:
        lock.close()
    return lock is not None


WHATS = ["store", "temporary", "owner"]


@pytest.mark.parametrize("what", WHATS)
def test_a_lock_that_is_released_is_free_though_a_child_was_forked_meanwhile(tmp_path, what):
    release = held(what, tmp_path)
    with idle_child():
        assert not is_free(what, tmp_path)
        release()
        assert is_free(what, tmp_path)


@pytest.mark.parametrize("what", WHATS)
def test_a_lock_that_is_released_is_free_though_a_child_has_not_closed_its_copy(tmp_path, what, monkeypatch):
    with copied_files(monkeypatch):
        release = held(what, tmp_path)
        assert not is_free(what, tmp_path)
        release()
        assert is_free(what, tmp_path)


@pytest.mark.parametrize("what", WHATS)
def test_the_locks_of_a_killed_process_are_free_though_its_child_lives(tmp_path, what):
    StoreRoot(tmp_path).close()
    reading, writing = os.pipe()
    holder = os.fork()
    if not holder:
        release = held(what, tmp_path)  # noqa: F841  # not collected
        if not os.fork():
            os.write(writing, str(os.getpid()).encode())
        signal.pause()
        os._exit(0)
    child = int(os.read(reading, 20))
    try:
        assert not is_free(what, tmp_path)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert is_free(what, tmp_path)
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
