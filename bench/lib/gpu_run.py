"""Stages of a run on a rented machine: separate processes, rows on disk, and a deadline.

Each stage is a child process: a stage that crashes, hangs or runs out of memory costs its own time only. A row is one
line of JSON, written and flushed immediately, so an interrupted run keeps its results.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROWS, LOG, TESTS, TRACE, REPORT = "rows.jsonl", "log.txt", "gpu-tests.txt", "trace.json.gz", "report.md"
FILES = (ROWS, LOG, TESTS, TRACE, REPORT)
"""All files that a run leaves."""
_MARK = "hf_tiered_cache_bench"
"""File in the folder of the stores of a run."""
LOG_BYTES = 512 << 10
_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


class OutOfTimeError(Exception):
    """Error raised when a stage has used its time."""


@dataclass(frozen=True)
class Run:
    """Settings of a stage.

    Args:
        out: Folder for results.
        folder: Parent folder of the stores, emptied after each stage.
        began: Begin of the run, on `time.monotonic`'s clock.
        until: Deadline of this stage, on the same clock.
        shapes: Shapes of the models. The first one is used for everything that is measured once.
        dtype: Name of the models' data type.
        device: "cuda", "cpu", or "auto".
        prefixes: Prefix lengths in tokens.
        turns: Number of measurements of each time.
        disk_bytes: Maximum disk space of stores and files.
        stage: Name of the stage.
    """

    out: Path
    folder: Path
    began: float
    until: float
    shapes: tuple[str, ...]
    dtype: str
    device: str
    prefixes: tuple[int, ...]
    turns: int
    disk_bytes: int
    stage: str = ""

    def row(self, label: str, **figures: Any) -> None:
        """Write a row with a measurement."""
        line = {"stage": self.stage, "what": label, "at": round(time.monotonic() - self.began, 2)} | figures
        with open(self.out / ROWS, "a") as file:  # one write of one line: a kill tears none but the last
            file.write(json.dumps(line) + "\n")

    def skip(self, label: str, reason: str, **figures: Any) -> None:
        """Write a row with the reason why something was not measured."""
        self.row(label, skipped=reason, **figures)

    def left(self) -> float:
        """Return the remaining seconds of the stage."""
        return self.until - time.monotonic()

    def check(self) -> None:
        """Check the deadline.

        Raises:
            OutOfTimeError: The stage has used its time.
        """
        if self.left() <= 0:
            raise OutOfTimeError

    def fits(self, label: str, nbytes: int, **figures: Any) -> bool:
        """Return whether so many bytes fit on the disk; if not, write a row that says so."""
        room = min(self.disk_bytes, shutil.disk_usage(self.folder).free - (1 << 30))
        if nbytes > room:
            self.skip(
                label, f"it takes {nbytes / 2**30:.1f} GiB of disk, and {room / 2**30:.1f} may be used", **figures
            )
        return nbytes <= room


@dataclass(frozen=True)
class Stage:
    """Part of the run.

    Args:
        name: Name of the stage.
        seconds: Share of ten minutes. The unused time of earlier stages is added.
        measure: Function of the stage, which runs in a separate process.
    """

    name: str
    seconds: float
    measure: Callable[[Run], None]


def measure(module: str, function: str, run: Run, **settings: Any) -> None:
    """Call a function of `lib`, imported only now: a missing package then costs only the stages that use it."""
    getattr(import_module(f"lib.{module}"), function)(run, **settings)


def stages_of(shapes: tuple[str, ...]) -> list[Stage]:
    """Return all stages, the most informative first, with their share of 540 seconds."""
    share = 180 / len(shapes)
    stages = {"tests": (100, "gpu_tests"), "decode": (45, "decoding"), "syncs": (30, "syncs"), "trace": (25, "trace"),
              "selective": (55, "selective"), "kvikio": (40, "kvikio"), "passages": (45, "passages")}  # fmt: skip
    tests, *more_stages = (Stage(name, took, partial(measure, "gpu_stages", do)) for name, (took, do) in stages.items())
    prefixes = (
        Stage(f"prefix {shape}", share, partial(measure, "gpu_stages", "prefixes", shape=shape)) for shape in shapes
    )
    return [Stage("probe", 20, partial(measure, "gpu_probe", "probe")), tests, *prefixes, *more_stages]


def run_all(run: Run, stages: list[Stage], seconds: float) -> None:
    """Run the stages in order, each until its share of the time is used."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders are removed on the way out
    sweep(run.folder.parent)
    run.folder.mkdir(parents=True)
    lock = mark(run.folder)
    try:
        context = _context()
        total = sum(stage.seconds for stage in stages)
        first, allotted = time.monotonic(), 0.0  # importing has taken some already
        for stage in stages:
            allotted += stage.seconds
            until = first + (run.began + seconds - first) * allotted / total
            _run(replace(run, folder=run.folder / "stage", stage=stage.name, until=until), stage, context)
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)
        lock.close()


def mark(folder: Path) -> IO[str]:
    """Mark the folder of a run, and return the mark, which is locked until it is closed."""
    unmarked = folder / f".{_MARK}"
    lock = unmarked.open("w")
    with suppress(OSError):  # without locks, nobody takes the run for killed either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unmarked.rename(folder / _MARK)
    return lock


def sweep(folder: Path) -> None:
    """Remove folders of runs that were killed: those with a mark that no process, on whatever machine, has locked."""
    for leftover in folder.glob(f"on-gpu-*/{_MARK}"):
        with suppress(OSError), leftover.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover.parent, ignore_errors=True)


def _context() -> Any:
    """Return the multiprocessing context: fork, which saves imports, or spawn if CUDA fails in a forked process."""
    fork = multiprocessing.get_context("fork")
    if Path("/dev/nvidiactl").exists():
        child = fork.Process(target=_check_cuda)
        child.start()
        child.join(30)
        child.kill()
        if child.exitcode:
            return multiprocessing.get_context("spawn")
    return fork


def _check_cuda() -> None:
    import torch

    sys.exit(0 if torch.cuda.is_available() and torch.zeros(1, device="cuda").item() == 0 else 1)


def _run(run: Run, stage: Stage, context: Any) -> None:
    if run.left() <= 0:
        run.skip("all of it", "no time was left")
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    child = context.Process(target=_in_child, args=(run, stage, os.getpid()))
    try:
        child.start()
        child.join(run.left() + _GRACE_S)
        if child.is_alive():
            child.kill()
            child.join()
            run.skip("the rest", "killed: it did not stop when its time was over")
        elif child.exitcode:
            run.skip("the rest", f"the process died (exit status {child.exitcode})")
    finally:
        if child.is_alive():  # this process was told to stop
            child.kill()
            child.join()
        shutil.rmtree(run.folder, ignore_errors=True)
        _shorten(run.out / LOG)


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends, so that a killed run leaves no processes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _in_child(run: Run, stage: Stage, parent: int) -> None:
    """Run one stage, and contain all of its exceptions."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(run.out / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"--- {stage.name}", flush=True)
    try:
        stage.measure(run)
        run.row("done", seconds_left=round(run.left(), 1))
    except OutOfTimeError:
        run.skip("the rest", "its time was over")
    except ImportError as error:
        run.skip("the rest", f"{error.name or error} is not installed")
        traceback.print_exc()
    except BaseException as error:
        run.skip("the rest", f"{type(error).__name__}: {error}"[:500])
        traceback.print_exc()


def _shorten(log: Path) -> None:
    """Truncate a log to its end."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run, complete or killed; an incomplete last line is left out."""
    rows = []
    for line in (folder / ROWS).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def described(run: Run) -> dict[str, Any]:
    """Return the settings, JSON-ready."""
    return {name: value for name, value in asdict(run).items() if name not in ("out", "folder", "began", "until")}


def foreign_file(folder: Path) -> Path | None:
    """Return a file that a run would replace and no run has written, or None."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(folder / ROWS) as file:
        if json.loads(file.readline())["stage"] == "run":
            return None
    return next((folder / name for name in FILES if os.path.lexists(folder / name)), None)
