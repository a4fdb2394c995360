"""Mounts that only one process and its children see. No privileges are needed where users may create namespaces."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # flags of unshare(2)


def own_mounts() -> None:
    """Give this process, which must have one thread, its own mounts. Raises OSError if that is not allowed."""
    user, group, is_root = os.getuid(), os.getgid(), os.geteuid() == 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | (0 if is_root else _NEW_USER)):
        raise OSError(ctypes.get_errno(), "unshare")
    if not is_root:
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(content)
    mount("--make-rprivate", "/")


def mount(*arguments: str | Path) -> None:
    """Run `mount`. Raises OSError with its message."""
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def run_with_mounts(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process with its own mounts: `mount` is imported. Skips the test if mounts are not allowed."""
    if reason := _why_not():
        pytest.skip(f"this machine allows no mounts: {reason}")
    return _run(code, *arguments)


def _run(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path[:0] = [{os.path.dirname(__file__)!r}]\nfrom mounts import *\nown_mounts()\n"
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    return processes.run(command, capture_output=True, text=True, timeout=300)


@functools.cache
def _why_not() -> str:
    done = _run("mount('-t', 'tmpfs', 'tmpfs', '/mnt')")
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
