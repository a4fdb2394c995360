"""Randomly drawn faults of system calls, and the disk usage of a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sqlite3
import time
from contextlib import contextmanager

import pytest

from hf_tiered_cache.store import database, folder, index, writer

ERRORS = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EACCES, errno.ENOMEM]
BY_PATH = ["open", "scandir", "listdir", "rename", "link", "unlink", "mkdir"]
BY_DESCRIPTOR = ["pread", "preadv", "pwrite", "posix_fallocate", "fsync", "fdatasync"]


class Faults:
    """Wrapper of the system calls of Python code that concern one folder, and of SQLite."""

    def __init__(self, root, seed, share):
        self.root, self.random, self.share = str(root), random.Random(seed), share
        self.resting, self.struck = False, 0
        self.calls = self.random.sample(BY_PATH + BY_DESCRIPTOR + ["flock", "catalogue"], 6)

    def strikes(self, name, target):
        if self.resting or name not in self.calls or self.random.random() >= self.share:
            return False
        hit = not isinstance(target, str) or target.startswith(self.root)
        self.struck += hit
        return hit

    def wrap(self, name, real):
        def call(target, *args, **options):
            place = path_of(target, options) if name in BY_PATH else target
            if args == (fcntl.LOCK_UN,) or not self.strikes(name, place):  # that never fails
                return real(target, *args, **options)
            kind = self.random.choice([*ERRORS, "delay", "in parts"])
            if kind == "delay":
                time.sleep(0.002)
            elif kind == "in parts" and name == "pread":
                return real(target, max(1, args[0] // 2), *args[1:])
            elif kind == "in parts" and name == "pwrite":
                return real(target, bytes(args[0])[: max(1, len(args[0]) // 2)], *args[1:])
            elif kind != "in parts":
                raise OSError(kind, os.strerror(kind), place if isinstance(place, str) else None)
            return real(target, *args, **options)

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
        """Delete the catalogue at random, as a user might."""
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
            patch.setattr(folder, "_LOCK_SECONDS", 0.05)
            patch.setattr(folder, "_LOCK_SECONDS_AFTERWARDS", 0.05)
            patch.setattr(index, "_SCANNING_SECONDS", 0.0)
            patch.setattr(index, "_REPAIR_SECONDS", 0.0)
            patch.setattr(writer, "_PATIENCE_SECONDS", 1.0)
            yield


def path_of(target, options):
    """Return the path of a system call that gets a descriptor, or a path relative to one."""
    folder = options.get("dir_fd", options.get("src_dir_fd"))
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    return os.fspath(target) if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), target)


def du(root):
    """Return the bytes that the files of a folder take on disk; files with two names count once."""
    bytes_by_inode = {}
    for path in root.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        bytes_by_inode[stat.st_ino] = stat.st_blocks * 512 if path.is_file() else 0
    return sum(bytes_by_inode.values())
