"""The backend that keeps a store's objects in one SQLite file. Its contract is tested with that of all backends."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys

import pytest
from families import build, prompt

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.observed import Pace
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.backends.sqlite import SQLiteBackend, _check
from hf_tiered_cache.store.backends.values import HEAD, Range

NAME, CONTENT = "segments/" + "a" * 32 + ".kv", bytes(range(256)) * 20_000  # of several parts

WRITES_AND_DIES = """
import os, sys
from hf_tiered_cache.store.backends.sqlite import SQLiteBackend
class Dying(SQLiteBackend):
    def set_value(self, key, content, replace):
        if "#" not in key:  # the parts are written
            os._exit(7)
        return super().set_value(key, content, replace)
Dying(sys.argv[1]).put_object("segments/b.kv", bytes(4 << 20), False)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "prompts.db"


def content_of(remote, name=NAME):
    metadata = remote.find_object(name)
    return None if metadata is None else remote.get_object(name, metadata.version, 0, metadata.size)


def test_all_objects_are_in_one_file(path):
    with_file = open_remote(f"sqlite://{path}")
    assert not path.exists()  # nothing is created to read
    assert with_file.list_objects("segments") == {}
    with_file.put_object(NAME, CONTENT, replace=False)
    with_file.close()
    assert os.listdir(path.parent) == [path.name]
    assert content_of(open_remote(f"sqlite://{path}")) == CONTENT


def test_the_address_may_be_relative(path, monkeypatch):
    monkeypatch.chdir(path.parent.parent)
    open_remote("sqlite://folder/prompts.db").put_object(NAME, CONTENT, replace=False)
    assert path.exists()


def test_a_deleted_object_makes_the_file_smaller(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    before = path.stat().st_size
    assert remote.delete_object(NAME)
    assert path.stat().st_size < before - len(CONTENT) // 2


@pytest.mark.parametrize("kind", ["text", "database", "folder"])
def test_what_is_no_file_of_the_library_is_refused_and_left_alone(path, kind):
    path.parent.mkdir()
    if kind == "text":
        path.write_text("notes of mine, long enough to be no empty file\n" * 100)
    elif kind == "database":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE parts (key TEXT, content BLOB)")
        connection.close()
    else:
        path.mkdir()
    before = None if kind == "folder" else path.read_bytes()
    with pytest.raises(ConfigError, match=f"sqlite://{path} cannot be used"):
        open_remote(f"sqlite://{path}")
    assert before is None or path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("address", ["sqlite://", "sqlite:///", "sqlite:///a%00.db"])
def test_an_address_without_a_file_is_refused(address):
    with pytest.raises(ConfigError, match="is not the address of a file"):
        open_remote(address)


def test_a_path_that_is_too_long_for_sqlite_is_refused(tmp_path):
    file = tmp_path / ("x" * 200) / ("x" * 200)
    file /= "x" * (503 - len(os.fsencode(file)))
    remote = open_remote(f"sqlite://{file}")
    remote.put_object(NAME, CONTENT, False)
    assert content_of(remote) == CONTENT
    remote.close()
    with pytest.raises(ConfigError, match="its path has more than 504 bytes; choose a shorter one"):
        SQLiteBackend(f"sqlite://{file}x")


def test_a_process_killed_while_writing_leaves_nothing(path):
    open_remote(f"sqlite://{path}").put_object(NAME, CONTENT, replace=False)
    before = path.stat().st_size
    assert subprocess.run([sys.executable, "-c", WRITES_AND_DIES, f"sqlite://{path}"], check=False).returncode == 7
    remote = open_remote(f"sqlite://{path}")
    assert list(remote.list_objects("segments")) == [NAME.removeprefix("segments/")]
    assert content_of(remote) == CONTENT
    assert path.stat().st_size == before


def test_a_file_that_another_process_writes_to_is_an_error_after_a_while(path, monkeypatch):
    monkeypatch.setattr("hf_tiered_cache.store.backends.sqlite._BUSY_SECONDS", 0.05)
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OSError, match="locked"):
        remote.put_object(NAME, b"", replace=True)
    connection.execute("COMMIT")
    connection.close()
    assert content_of(remote) == CONTENT


def test_a_full_disk_is_an_error_and_loses_nothing(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    (pages,) = remote._connection.execute("PRAGMA page_count").fetchone()
    remote._connection.execute(f"PRAGMA max_page_count = {pages + 10}")
    with pytest.raises(OSError, match="full") as error:
        remote.put_object("segments/b.kv", CONTENT, replace=False)
    assert error.value.errno == errno.ENOSPC
    assert content_of(remote) == CONTENT
    assert remote.find_object("segments/b.kv") is None


@pytest.mark.parametrize("replace", [True, False])
def test_a_write_that_a_client_repeats_is_stored(path, replace, monkeypatch):
    """A client repeats a call if the connection was closed before the answer: then the value is there already."""
    remote, set_value = open_remote(f"sqlite://{path}"), SQLiteBackend.set_value

    def repeated(self, key, content, replace):
        if not replace:
            set_value(self, key, content, replace)
        return set_value(self, key, content, replace)

    monkeypatch.setattr(SQLiteBackend, "set_value", repeated)
    remote.put_object(NAME, CONTENT, replace)
    assert content_of(remote) == CONTENT


@pytest.mark.parametrize("replace", [True, False])
def test_a_value_of_another_program_is_left_alone(path, replace):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=True)
    remote.put_object(NAME, CONTENT[1:], replace=True)
    assert content_of(remote) == CONTENT[1:]
    key = f"{remote.keys}calibrations.json"
    remote.set_value(key, b"mine", replace=False)
    with pytest.raises(FileExistsError):
        remote.put_object("calibrations.json", CONTENT, replace)
    assert not remote.delete_object("calibrations.json")
    assert remote.list_keys(key) == [key] and remote.read_values([Range(key, 0, 9)]) == [b"mine"]


@pytest.mark.parametrize("content", ["text", 1, 1.5])
def test_a_part_that_is_not_bytes_is_lost(path, content):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=True)
    metadata = remote.find_object(NAME)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE parts SET content = ? WHERE key LIKE '%#1'", [content])
    with pytest.raises(FileNotFoundError):
        remote.get_object(NAME, metadata.version, 0, metadata.size)
    remote.put_object(NAME, CONTENT, replace=True)
    assert content_of(remote) == CONTENT


def lose_a_part(path):
    """Delete the last part of the longest object, as a server does whose memory is full."""
    with sqlite3.connect(path) as connection:
        (key,) = connection.execute("SELECT max(key) FROM parts WHERE key LIKE '%.kv#%'").fetchone()
        connection.execute("DELETE FROM parts WHERE key = ?", (key,))
    connection.close()


def test_an_object_that_has_lost_a_part_is_gone_and_can_be_stored_again(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    lose_a_part(path)
    for remote.writable in (False, True):  # who only reads deletes nothing
        assert remote.find_object(NAME) is not None
        with pytest.raises(FileNotFoundError, match="dropped a part"):
            content_of(remote)
    assert remote.find_object(NAME) is None and not remote.list_keys("")
    remote.put_object(NAME, CONTENT, replace=False)
    assert content_of(remote) == CONTENT


def test_a_segment_that_has_lost_a_part_is_sent_again(path, tmp_path, monkeypatch):
    monkeypatch.setattr(SQLiteBackend, "first_bytes", 64 << 10)
    monkeypatch.setattr(SQLiteBackend, "part_bytes", 64 << 10)
    monkeypatch.setattr(Pace, "per_token", lambda self, fingerprint: 10.0)
    model, ids = build("llama"), prompt(200)

    def restored(name):
        """Return the tokens that a new machine restores."""
        with KVStore(tmp_path / name, remote=f"sqlite://{path}") as store:
            cache = TieredCache(model, store)
            model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
            return cache.stats.tokens_restored

    assert [restored("a"), restored("b")] == [0, 192]
    lose_a_part(path)
    assert [restored("c"), restored("d")] == [0, 192]


def test_an_impossible_size_of_an_object_is_not_believed(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    with sqlite3.connect(path) as connection:
        key = f"{remote.keys}{NAME}"
        (value,) = connection.execute("SELECT content FROM parts WHERE key = ?", (key,)).fetchone()
        value = value[: HEAD.size - 1] + bytes([value[HEAD.size - 1] ^ 4]) + value[HEAD.size :]
        connection.execute("UPDATE parts SET content = ? WHERE key = ?", (value, key))
    connection.close()
    metadata = remote.find_object(NAME)
    assert metadata.size > 1 << 57 and metadata.nbytes < 1 << 10
    assert remote.get_object(NAME, metadata.version, 0, len(CONTENT)) == CONTENT
    assert remote.delete_object(NAME) and remote.find_object(NAME) is None


def test_a_text_in_place_of_an_object_is_left_alone(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE parts SET content = 'HFTCRD' || char(13, 10) || hex(content)")
    connection.close()
    assert remote.find_object(NAME) is None and remote.list_objects("segments") == {}
    assert not remote.delete_object(NAME)
    with pytest.raises(FileExistsError):
        remote.put_object(NAME, CONTENT, replace=False)


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_neighbor_that_sqlite_would_delete_is_refused(path, suffix, is_new):
    path.parent.mkdir()
    if not is_new:
        remote = open_remote(f"sqlite://{path}")
        remote.put_object(NAME, CONTENT, replace=False)
        remote.close()
    path.with_name(path.name + suffix).write_bytes(b"precious notes\n" * 1000)
    before = files_of(path.parent)
    with pytest.raises(ConfigError, match=f"{suffix} is next to it"):
        open_remote(f"sqlite://{path}")
    assert files_of(path.parent) == before


KILLED = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.executescript(sys.argv[2])
os._exit(0)
"""
IN_A_TRANSACTION = """PRAGMA cache_size = 2; CREATE TABLE t (a); INSERT INTO t VALUES (randomblob(99999));
BEGIN; UPDATE t SET a = randomblob(99999); INSERT INTO t VALUES (randomblob(99999));"""


def kill_program(path, script):
    """Run SQL in a database, and leave its files as a killed program does."""
    subprocess.run([sys.executable, "-c", KILLED, str(path), script], check=True)


@pytest.mark.parametrize("script", ["PRAGMA journal_mode = WAL; CREATE TABLE t (a); INSERT INTO t VALUES (1)",
                                    IN_A_TRANSACTION])  # fmt: skip
def test_a_database_of_a_killed_program_does_not_change(path, script):
    path.parent.mkdir()
    kill_program(path, script)
    before = files_of(path.parent)
    assert len(before) > 1
    with pytest.raises(ConfigError, match="cannot be used"):
        open_remote(f"sqlite://{path}")
    assert files_of(path.parent) == before


def test_a_transaction_of_a_killed_process_is_undone(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    remote.close()
    script = "PRAGMA cache_size = 2; BEGIN; DELETE FROM parts; CREATE TABLE t AS SELECT randomblob(99999);"
    kill_program(path, script)
    assert len(files_of(path.parent)) == 2
    assert content_of(open_remote(f"sqlite://{path}")) == CONTENT


def test_a_file_that_another_process_is_writing_is_opened(path):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    path.with_name(path.name + "-journal").write_bytes(bytes(12) + b"\1" * 500)  # a journal that is not synced yet
    assert content_of(open_remote(f"sqlite://{path}")) == CONTENT
    remote.close()
    os.truncate(path, path.stat().st_size - 4096)  # the pages at the end are not written yet
    assert not _check(path)


def test_a_pipe_is_refused_and_a_link_is_followed(path):
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        open_remote(f"sqlite://{path}")
    link = path.with_name("link.db")
    link.symlink_to(path.with_name("target.db"))
    open_remote(f"sqlite://{link}").put_object(NAME, CONTENT, replace=False)
    assert link.is_symlink() and content_of(open_remote(f"sqlite://{link}")) == CONTENT


@pytest.mark.parametrize("place", ["nothing", "own", "other", "journal"])
def test_a_file_that_was_replaced_is_checked_and_opened_again(path, tmp_path, place):
    remote = open_remote(f"sqlite://{path}")
    remote.put_object(NAME, CONTENT, replace=False)
    path.unlink()
    if place == "own":
        other_remote = open_remote(f"sqlite://{tmp_path}/other.db")
        other_remote.put_object(NAME, b"other", replace=False)
        other_remote.close()
        (tmp_path / "other.db").rename(path)
    elif place != "nothing":
        kill_program(path, IN_A_TRANSACTION if place == "journal" else "CREATE TABLE t (a)")
    before = files_of(path.parent)
    if place in ("other", "journal"):
        # no FileExistsError, as of a stored object
        for action in (content_of, lambda db: db.put_object(NAME, b"", False), lambda db: db.delete_object(NAME)):
            with pytest.raises(PermissionError, match="choose another name"):
                action(remote)
        assert files_of(path.parent) == before
        for file in path.parent.iterdir():
            file.unlink()
    assert content_of(remote) == (b"other" if place == "own" else None)
    remote.put_object(NAME, CONTENT, replace=True)
    assert content_of(remote) == content_of(open_remote(f"sqlite://{path}")) == CONTENT


def test_a_file_with_a_second_name_is_refused_until_it_has_one(path):
    remote, backup = open_remote(f"sqlite://{path}"), path.with_name("backup.db")
    remote.put_object(NAME, CONTENT, replace=False)
    os.link(path, backup)
    before = backup.read_bytes()
    for action in (lambda: remote.put_object(NAME, b"", replace=True), lambda: content_of(remote)):
        with pytest.raises(PermissionError, match="second name"):
            action()
    with pytest.raises(ConfigError, match=r"second name.*copy it"):
        open_remote(f"sqlite://{path}")
    assert backup.read_bytes() == before
    backup.unlink()
    assert content_of(remote) == CONTENT
