"""Processes that are killed at a chosen step: a call of one of the functions that change files.

Imported by the code of such a process.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_CALLS = ["open", "pwrite", "link", "rename", "replace", "unlink", "fsync", "fdatasync", "posix_fallocate"]
steps = 0
"""How many were taken."""
last = 0
"""The one at which this process dies; 0: none."""


def _dying(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    return call


def count(owner: Any, *names: str) -> None:
    """From now on, each call of these is a step."""
    for name in names:
        setattr(owner, name, _dying(getattr(owner, name)))


def count_writes(catalogue: type, *names: str) -> None:
    """From now on, steps are what changes files, takes locks, and calls these methods of the catalogue."""
    count(os, *FILE_CALLS)
    count(fcntl, "flock")
    count(catalogue, *names)


def kill_at_steps(root: Path, action: Callable[[Path], object], draws: int, end: int) -> int:
    """Run `action` on copies of `root / "first"`: once to its end, in `whole`, and killed in `killed-0`, …

    Args:
        draws: so many drawn steps to be killed at.
        end: and so many at the end.

    Returns:
        The steps of the whole action.
    """
    most = _run(root, action, root / "whole", 0)
    end = min(end, most - 1)
    drawn = random.Random(7).sample(range(1, most - end), min(draws, most - end - 1))
    for number, step in enumerate([*drawn, *range(most - end, most)]):
        _run(root, action, root / f"killed-{number}", step)
    return most


def _run(root: Path, action: Callable[[Path], object], folder: Path, step: int) -> int:
    """How many steps were taken, by a process that dies at `step`."""
    global last
    shutil.copytree(root / "first", folder)
    last = step
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        if step and status == signal.SIGKILL:
            return step
        taken = int((root / "steps").read_text())
        # fewer than when it was whole, if the writer was quicker than the first time
        assert status == 0 and (not step or taken < step), (step, status)
        return taken
    action(folder)
    (root / "steps").write_text(str(steps))
    os._exit(0)
