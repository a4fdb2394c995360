"""Stores as they are deployed: in images, on full and small file systems, moved, emptied and shared by users."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from unittest.mock import Mock

import pytest
import torch
from drawn_faults import path_of
from families import prompt
from mounts import run_with_mounts

from hf_tiered_cache import KVStore, TieredCache, reasons
from hf_tiered_cache.errors import StoreError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store import index
from hf_tiered_cache.store.catalogue import Catalogue

IDS = [prompt(60, seed=seed) for seed in range(8)]
GREEDY = {"do_sample": False, "max_new_tokens": 3}


def ask(model, store, number, record=True):
    """Generate, compare the tokens with those of transformers, and return the statistics."""
    cache = TieredCache(model, store, record=record)
    output = model.generate(IDS[number], past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(IDS[number], **GREEDY))
    return cache.stats


def files_in(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


ASKING = """
import os, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from families import build
from test_deployed import *
model, root = build("llama"), Path(sys.argv[1])
"""


def run_asking(code, root):
    """Run code with mounts, a model and `ask`. Returns what it printed, and what it logged."""
    done = run_with_mounts(ASKING + code, root, os.path.dirname(__file__))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], done.stderr.split("\n")[:-1]


# --- read-only images


@pytest.mark.parametrize("state", ["whole", "no catalogue", "empty catalogue", "catalogue in use", "no locks"])
def test_a_store_in_a_read_only_image_is_served_with_one_warning(model, tmp_path, state):
    root = tmp_path / "store"
    with KVStore(root) as store:
        ask(model, store, 0)
        with TieredCache(model, store, conversation="alice") as cache:
            model.generate(IDS[1], past_key_values=cache, **GREEDY)
        store.flush()
        if state == "catalogue in use":
            root = shutil.copytree(root, tmp_path / "copy")
            (root / "catalogue.sqlite-shm").unlink()
    if "catalogue" in state and state != "catalogue in use":
        for path in root.glob("catalogue.*"):
            path.unlink()
    if state == "empty catalogue":
        (root / "catalogue.sqlite").touch()
    if state == "no locks":
        for path in [*root.glob("*lock"), *root.glob("*/*.lock")]:
            path.unlink()
        for name in ("tmp", "pins", "documents"):
            (root / name).rmdir()
    code = """
from hf_tiered_cache import cli
mount("--bind", root, root)
mount("-o", "remount,bind,ro", root)
with KVStore(root) as store:
    print([ask(model, store, number).tokens_restored for number in (0, 2, 0, 2)])
    cache = TieredCache(model, store, conversation="alice")
    model.generate(IDS[1], past_key_values=cache, **GREEDY)
    print(cache.stats.tokens_restored)
    store.flush()
    print(store.verify().ok, len(store.segments()))
statuses = []
for words in (["ls"], ["verify"], ["gc", "--dry-run"], ["conversations"], ["gc"], ["rm", "--all", "--yes"]):
    sys.argv[1:] = [words[0], str(root), *words[1:]]
    try:
        cli.main()
    except SystemExit as end:
        statuses.append(end.code or 0)
print(statuses)
"""
    before = {name: (root / name).read_bytes() for name in files_in(root)}
    printed, logged = run_asking(code, root)
    assert printed[:3] == ["[48, 0, 48, 0]", "48", "True 2"]
    assert printed[-1] == "[0, 0, 0, 0, 2, 2]"
    warning = f"[hf_tiered_cache] {root} is not writable (Read-only file system), so no new KV is stored"
    assert logged[0] == warning
    assert {line for line in logged if line.startswith(("[hf", "hf-t"))} == {
        warning,
        f"hf-tiered-cache: {root} is not writable, so nothing in it can be changed; check its permissions",
    }
    assert {name: (root / name).read_bytes() for name in files_in(root)} == before


# --- small, full and layered file systems


@pytest.mark.parametrize("limits", ["size=4k", "size=60k", "size=150k", "nr_inodes=3", "nr_inodes=11", "nr_inodes=14"])
def test_a_file_system_without_room_costs_misses_and_leaves_nothing_behind(tmp_path, limits):
    code = """
mount("-t", "tmpfs", "-o", LIMITS, "tmpfs", root)
with KVStore(root, free_space_floor=0) as store:
    for number in (0, 1, 0):
        stats = ask(model, store, number)
        assert stats.tokens_restored or stats.reason
    store.flush()
    written = store.stats.segments_written
    assert written or store.stats.dropped_writes
with KVStore(root, free_space_floor=0) as store:
    assert store.verify().ok
print(written, {name for name in files_in(root) if not name.startswith(("segments", "catalogue", "hf_tiered", "lock"))})
"""
    (printed,), logged = run_asking(code.replace("LIMITS", repr(limits)), tmp_path)
    assert printed.endswith(" set()") and not any("Traceback" in line for line in logged)


# --- folders that change while they are open


@pytest.mark.parametrize("change", ["moved", "replaced", "deleted"])
def test_a_store_that_is_no_longer_at_its_path_says_so(model, tmp_path, caplog, change):
    root = tmp_path / "store"
    with KVStore(root, host_memory=0) as store:
        ask(model, store, 0)
        store.flush()
        if change == "deleted":
            shutil.rmtree(root)
        else:
            root.rename(tmp_path / "moved")
        if change == "replaced":
            KVStore(root).close()
            before = files_in(root)
        for number in (0, 1, 1):
            stats = ask(model, store, number)
        store.flush()
        assert stats.tokens_restored == 0 and store.stats.dropped_writes
        assert caplog.text.count("it was moved, deleted or replaced; open the store again") == 2  # read, and write
        with pytest.raises(StoreError, match="open the store again"):
            store.gc()
        if change != "deleted":
            report = store.verify()
            assert not report.ok and "open the store again" in next(iter(report.bad.values()))
        if change == "replaced":
            assert files_in(root) == before
    if change != "deleted":
        with KVStore(tmp_path / "moved") as store:
            assert ask(model, store, 0).tokens_restored == 48 and store.verify().ok


@pytest.mark.parametrize("left_out", [(), ("lock", "segments")])
def test_a_store_that_is_emptied_while_it_is_open_can_be_opened_again(model, tmp_path, left_out):
    with KVStore(tmp_path) as store:
        ask(model, store, 0)
        store.flush()
        for path in tmp_path.iterdir():
            if path.name not in left_out:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        ask(model, store, 1)
        ask(model, store, 1)
    with KVStore(tmp_path) as store:
        assert ask(model, store, 1).tokens_restored == 48
        assert store.verify().ok and not store.verify().unknown


# --- files of another user


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE])
def test_a_segment_that_this_process_may_not_open_is_the_reason_of_a_miss(model, tmp_path, monkeypatch, run, error):
    with KVStore(tmp_path) as store:
        ask(model, store, 0)
    real, refuses = os.open, True

    def refusing(path, *args, **options):
        if refuses and str(path_of(path, options)).endswith(".kv"):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *args, **options)

    with KVStore(tmp_path, host_memory=0) as store:
        monkeypatch.setattr(os, "open", refusing)
        for _ in range(2):
            stats = ask(model, store, 0)
            assert stats.tokens_restored == 0 and reasons.UNREADABLE in stats.reasons
        assert reasons.NOTHING in ask(model, store, 1, record=False).reasons
        status, out, _ = run("verify", tmp_path)
        assert status == 1 and "1 could not be read" in out and "--repair" not in out
        refuses = False
        assert ask(model, store, 0).tokens_restored == 48
        assert len(store.segments()) == 1 and store.verify().ok


# --- readers of a folder that others write


@pytest.mark.parametrize("cause", ["not writable", "no catalogue"])
def test_a_store_that_cannot_write_finds_what_others_store(model, tmp_path, monkeypatch, cause):
    monkeypatch.setattr(index, "_LOOKING_SECONDS", 0.0)
    with KVStore(tmp_path) as writer:
        ask(model, writer, 0)
        writer.flush()
        with monkeypatch.context() as patch:
            if cause == "not writable":
                patch.setattr(os, "access", lambda *_, dir_fd=None: False)
            else:
                patch.setattr(Catalogue, "shared", Mock(side_effect=sqlite3.OperationalError("disk I/O error")))
            reader = KVStore(tmp_path, host_memory=0)
        with reader:
            assert ask(model, reader, 0).tokens_restored == 48
            for number in (1, 2, 3):
                ask(model, writer, number)
                writer.flush()
                assert ask(model, reader, number).tokens_restored == 48
            assert len(reader.segments()) == 4
            writer.remove([row.id for row in writer.segments()])
            assert ask(model, reader, 0).tokens_restored == 0
            assert not reader.segments()


def test_a_store_that_cannot_write_lists_its_folder_only_after_a_change(model, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_LOOKING_SECONDS", 0.0)
    with KVStore(tmp_path) as store:
        ask(model, store, 0)
    os.utime(tmp_path / "segments", (1, 1))
    monkeypatch.setattr(os, "access", lambda *_, dir_fd=None: False)
    with KVStore(tmp_path, host_memory=0) as store:
        names = Mock(side_effect=storage_of(store).disk.backend.names)
        monkeypatch.setattr(storage_of(store).disk.backend, "names", names)
        for _ in range(3):
            assert ask(model, store, 0).tokens_restored == 48
        assert not names.called
