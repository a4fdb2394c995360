"""Processes that are killed at a chosen step, which is a call of one of the functions that change files.

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
"""Number of steps so far."""
last = 0
"""Step at which this process dies; 0 for none."""


def _dying(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    return call


def count(owner: Any, *names: str) -> None:
    """Count each further call of these functions as a step."""
    for name in names:
        setattr(owner, name, _dying(getattr(owner, name)))


def count_writes(catalogue: type, *names: str) -> None:
    """Count calls that change files or take locks, and these methods of the catalogue, as steps."""
    count(os, *FILE_CALLS)
    count(fcntl, "flock")
    count(catalogue, *names)


def kill_at_steps(root: Path, action: Callable[[Path], object], draws: int, end: int) -> int:
    """Run `action` on copies of `root / "first"`: completely in `whole`, and killed in `killed-0` and so on.

    Args:
        root: Folder of the copies.
        action: Function that changes a copy.
        draws: Number of randomly drawn steps at which to kill.
        end: Number of last steps at which to kill.

    Returns:
        Number of steps of the complete action.
    """
    total = _run(root, action, root / "whole", 0)
    end = min(end, total - 1)
    drawn_steps = random.Random(7).sample(range(1, total - end), min(draws, total - end - 1))
    for number, step in enumerate([*drawn_steps, *range(total - end, total)]):
        _run(root, action, root / f"killed-{number}", step)
    return total


def _run(root: Path, action: Callable[[Path], object], folder: Path, step: int) -> int:
    """Run the action in a process that dies at `step`. Return the number of steps."""
    global last
    shutil.copytree(root / "first", folder)
    last = step
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        if step and status == signal.SIGKILL:
            return step
        step_count = int((root / "steps").read_text())
        # fewer than in the complete run, if the writer was faster than the first time
        assert status == 0 and (not step or step_count < step), (step, status)
        return step_count
    action(folder)
    (root / "steps").write_text(str(steps))
    os._exit(0)
