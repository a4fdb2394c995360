"""A folder for several machines (`file://`). Its contract is tested with that of all backends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import ConfigError, StoreError
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.kinds import CALIBRATIONS, ENTRY, MARKER_NAME, SEGMENT, SEGMENT_MAGIC

A, B = "a" * 32, "b" * 32
NAME = f"segments/{A}.kv"
CONTENT = SEGMENT_MAGIC + bytes(5000)

WRITES_AND_DIES = """
import os, sys
from hf_tiered_cache.store import root
from hf_tiered_cache.store.backends import open_remote
root.Temporary.publish = lambda *_: os._exit(7)
open_remote(sys.argv[1]).put_object(sys.argv[2], b"HFTCKV\\r\\n" + bytes(5000), False)
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shared"


@pytest.fixture
def remote(folder):
    remote = open_remote(f"file://{folder}")
    remote.put_object(NAME, CONTENT, replace=False)
    yield remote
    remote.close()


def odd(kind, path):
    """Make an entry that no store contains."""
    make = {"loop": lambda: path.symlink_to(path.name), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    make.get(kind, lambda: path.symlink_to(kind))()


@pytest.mark.parametrize("kind", ["loop", "pipe", "folder", "/nowhere", "/dev/zero"])
def test_what_is_no_regular_file_is_not_read_replaced_or_deleted(remote, folder, kind):
    path = folder / "segments" / f"{B}.kv"
    odd(kind, path)
    odd(kind, folder / "conversations" / f"{B}.json")
    assert A in remote.names()
    assert not remote.is_own(B) and not remote.delete(B)
    with pytest.raises(FileNotFoundError):
        remote.head(B, lambda stored, page: len(page))
    for replace in (False, True):
        with pytest.raises(FileExistsError):
            remote.records.write(SEGMENT, path.name, CONTENT, replace)
    assert remote.get_beginnings([NAME, f"segments/{B}.kv"], 8) == {NAME: SEGMENT_MAGIC}
    assert (f"segments/{B}.kv" in remote.unknown()) == (kind != "folder")
    assert os.path.lexists(path) and os.listdir(folder / "tmp") == []
    with KVStore(f"file://{folder}") as store:
        assert not store.segments() and not store.conversations()
        store.gc()
    assert os.path.lexists(path)


def test_a_link_to_a_file_of_another_folder_is_left_alone(remote, folder, tmp_path):
    blob, link = tmp_path / "blob", folder / "segments" / f"{B}.kv"
    blob.write_bytes(CONTENT)
    link.symlink_to(blob)
    assert not remote.delete(B) and not remote.delete_object(f"segments/{B}.kv")
    assert link.is_symlink() and blob.read_bytes() == CONTENT


def test_a_linked_subfolder_is_refused(remote, folder, tmp_path):
    other_folder = tmp_path / "other"
    open_remote(f"file://{other_folder}").close()
    (other_folder / "segments").rmdir()
    (other_folder / "segments").symlink_to(folder / "segments")
    with pytest.raises(StoreError, match="segments is a link"):
        open_remote(f"file://{other_folder}")
    (folder / "segments").rename(tmp_path / "moved")  # replaced while it is open
    (folder / "segments").symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="link"):
        remote.delete(A)
    with pytest.raises(OSError, match="link"):
        remote.names()
    assert (tmp_path / "moved" / f"{A}.kv").read_bytes() == CONTENT


@pytest.mark.parametrize("name", [b"caf\xe9.kv", b"a\x01b", b"new\nline", b"#1", b"back\\slash", b"%"])
def test_a_foreign_name_hides_nothing(remote, folder, name):
    path = os.fsencode(folder / "segments") + b"/" + name
    with open(path, "wb") as file:
        file.write(b"precious")
    assert remote.names() == [A] and remote.is_reachable()
    assert remote.unknown() == [f"segments/{os.fsdecode(name)}"]


def test_a_process_killed_while_writing_leaves_a_file_that_is_cleaned_up(remote, folder):
    arguments = [f"file://{folder}", f"segments/{B}.kv"]
    assert subprocess.run([sys.executable, "-c", WRITES_AND_DIES, *arguments], check=False).returncode == 7
    assert remote.names() == [A] and remote.find(B) is None
    (unfinished,) = (path for path in (folder / "tmp").iterdir() if path.suffix != ".lock")
    (folder / "tmp" / "thesis.docx").write_text("precious")
    assert remote.clean_up(dry_run=True)[0].keys() == remote.clean_up()[0].keys() == {str(unfinished)}
    assert os.listdir(folder / "tmp") == ["thesis.docx"]


def test_a_folder_of_other_files_is_refused(folder):
    folder.mkdir()
    (folder / "thesis.docx").write_text("precious")
    with pytest.raises(StoreError, match="is not a store"):
        open_remote(f"file://{folder}")
    assert os.listdir(folder) == ["thesis.docx"]
    for address in ("file://", "file:///", "file://host/folder"):
        for make in (True, False):
            with pytest.raises(ConfigError, match="names no folder"):
                open_remote(address, make)


@pytest.mark.parametrize("exists", [False, True])
def test_a_store_that_only_reads_makes_no_remote(folder, tmp_path, exists):
    if exists:
        folder.mkdir()
    with pytest.raises(StoreError, match=f"there is no store at {folder}"):
        KVStore(tmp_path / "kv", remote=f"file://{folder}", remote_write="never")
    assert folder.exists() == exists and not (exists and os.listdir(folder))
    assert not (tmp_path / "kv").exists()


def test_files_of_others_do_not_count_in_the_quota(remote, folder):
    before, names = remote.usage(), ["backup.iso", "conversations/notes.txt", "documents/letter.json", "tmp/2024-01-15"]
    for name in names:
        (folder / name).write_bytes(b"precious" * 9999)
    assert remote.usage() == before > 0
    assert remote.unknown() == names


def test_look_up_entries_are_files_of_the_store(remote, folder):
    before, names = remote.usage(), [f"prefixes/{B}", "prefixes/notes.txt"]
    remote.records.write(ENTRY, A, CONTENT)
    assert remote.usage() - before == len(CONTENT)
    for name in names:
        (folder / name).write_text("precious")
    assert remote.unknown() == names
    with KVStore(folder) as store:
        assert store.verify().unknown == names
    (folder / names[1]).unlink()
    (folder / MARKER_NAME).write_bytes(b"")
    open_remote(f"file://{folder}").close()  # not refused
    assert (folder / MARKER_NAME).stat().st_size


def test_a_folder_that_is_gone_is_not_empty(remote, folder):
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        remote.records.names(SEGMENT)
    assert not remote.is_reachable()


def test_a_foreign_file_that_appears_before_a_record_is_written_is_not_replaced(remote, folder, monkeypatch):
    path, find_object = folder / "calibrations.json", type(remote).find_object

    def find(self, name):
        metadata = find_object(self, name)
        if not path.exists():
            path.write_text("precious")
        return metadata

    monkeypatch.setattr(type(remote), "find_object", find)
    with pytest.raises(FileExistsError, match="was not written by this library"):
        remote.records.write(CALIBRATIONS, path.name, b"{}")
    assert path.read_text() == "precious"
