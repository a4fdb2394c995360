"""Faults drawn at random, in every call that the store makes: the right tokens, nothing lost, the quota kept."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sqlite3
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import StoreError
from hf_tiered_cache.store import database, disk, folder, writer

ERRORS = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EACCES, errno.ENOMEM]
BY_PATH = ["open", "scandir", "listdir", "rename", "link", "unlink", "mkdir"]
BY_DESCRIPTOR = ["pread", "preadv", "pwrite", "posix_fallocate", "fsync", "fdatasync"]
IN_PARTS = {"pread": 1, "pwrite": 1}
QUOTA = 1_400_000  # for four of the prompts below
PROMPTS = [prompt(100, seed=seed) for seed in range(8)]
STORED = 3  # of the prompts, before anything fails
GREEDY = {"do_sample": False, "max_new_tokens": 4}


class Faults:
    """Wraps the system calls of Python code that concern one folder, and SQLite as a whole."""

    def __init__(self, root, seed, share):
        self.root, self.random, self.share = str(root), random.Random(seed), share
        self.resting = False
        self.calls = self.random.sample(BY_PATH + BY_DESCRIPTOR + ["flock", "catalogue"], 6)

    def strikes(self, name, target):
        if self.resting or name not in self.calls or self.random.random() >= self.share:
            return False
        return not isinstance(target, str | os.PathLike) or str(target).startswith(self.root)

    def wrap(self, name, real):
        def call(target, *rest, **options):
            if rest == (fcntl.LOCK_UN,) or not self.strikes(name, target):  # that never fails
                return real(target, *rest, **options)
            kind = self.random.choice([*ERRORS, "delay", "in parts"])
            if kind == "delay":
                time.sleep(0.002)
            elif kind == "in parts" and name == "pread":
                return real(target, max(1, rest[0] // 2), *rest[1:])
            elif kind == "in parts" and name == "pwrite":
                return real(target, bytes(rest[0])[: max(1, len(rest[0]) // 2)], *rest[1:])
            elif kind != "in parts":
                raise OSError(kind, os.strerror(kind), target if isinstance(target, str) else None)
            return real(target, *rest, **options)

        return call

    def wrap_catalogue(self, real):
        def run(catalogue, action):
            if self.strikes("catalogue", None):
                raise self.random.choice([sqlite3.OperationalError("database is locked"), sqlite3.DatabaseError("bad")])
            return real(catalogue, action)

        return run

    @contextmanager
    def rest(self):
        self.resting = True
        yield
        self.resting = False

    def lose_catalogue(self):
        """As when somebody tidies up."""
        if "catalogue" in self.calls and self.random.random() < 0.2:
            for suffix in ("", "-wal", "-shm"):
                if os.path.exists(f"{self.root}/catalogue.sqlite{suffix}"):
                    os.unlink(f"{self.root}/catalogue.sqlite{suffix}")

    @contextmanager
    def under_way(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in BY_PATH + BY_DESCRIPTOR:
                patch.setattr(os, name, self.wrap(name, getattr(os, name)))
            patch.setattr(fcntl, "flock", self.wrap("flock", fcntl.flock))
            patch.setattr(database.Database, "run", self.wrap_catalogue(database.Database.run))
            patch.setattr(database, "_BUSY_SECONDS", 0.05)
            patch.setattr(disk, "_LOCK_SECONDS", 0.05)
            patch.setattr(disk, "_LOCK_SECONDS_AFTERWARDS", 0.05)
            patch.setattr(folder, "_SCANNING_SECONDS", 0.0)
            patch.setattr(folder, "_MENDING_SECONDS", 0.0)
            patch.setattr(writer, "_PATIENCE_SECONDS", 1.0)
            yield


def du(root):
    """Bytes that the files of a folder take on disk, those with two names once."""
    found = {}
    for path in root.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        found[stat.st_ino] = stat.st_blocks * 512 if path.is_file() else 0
    return sum(found.values())


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def expected(model):
    return [model.generate(ids, **GREEDY) for ids in PROMPTS]


@settings(max_examples=settings.default.max_examples // 3)
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.02, 0.1, 0.4, 1.0]), quota=st.sampled_from([None, QUOTA]))
def test_whatever_fails_tokens_are_right_and_what_was_whole_stays(
    model, expected, tmp_path_factory, seed, share, quota
):
    root = tmp_path_factory.mktemp("faults") / "store"
    limits = {"disk_quota": quota, "free_space_floor": 0}
    with KVStore(root, **limits) as store:
        store.precompute(model, [ids[0] for ids in PROMPTS[:STORED]], progress=False)
        whole = {row.id for row in store.segments()}
    faults = Faults(root, seed, share)
    with faults.under_way():
        store = KVStore(root, host_memory=0, **limits)
        for number in faults.random.choices(range(len(PROMPTS)), k=6):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(PROMPTS[number], past_key_values=cache, **GREEDY), expected[number])
            with faults.rest():
                assert quota is None or du(root) <= quota
                faults.lose_catalogue()
        with suppress(StoreError):  # what could not be made durable is said
            store.flush()
        evicted = store.stats.evicted_segments
        store.close()
    with KVStore(root, **limits) as store:
        assert store.verify().ok
        left = {row.id for row in store.segments()}
        assert left == {path.stem for path in (root / "segments").iterdir()}
        assert len(whole - left) <= evicted
        for number in range(STORED if whole <= left else 0):
            cache = TieredCache(model, store, record=False)
            assert torch.equal(model.generate(PROMPTS[number], past_key_values=cache, **GREEDY), expected[number])
            assert cache.stats.tokens_restored == 96
        store.precompute(model, prompt(100, seed=99), progress=False)  # and goes on
        assert quota is None or du(root) <= quota
        assert not list((root / "tmp").iterdir())
