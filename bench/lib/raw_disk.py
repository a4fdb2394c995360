"""Bandwidth of plain reads, as a reference for reads that also check and place their data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import torch


def direct_read(
    path: Path, offset: int, memory: torch.Tensor, threads: int = 8, size: int = 1 << 20, direct: bool = True
) -> float:
    """Read the end of a file in `threads` threads with calls of `size` bytes. Return the seconds.

    Args:
        path: File to read.
        offset: First byte to read.
        memory: uint8 buffer to fill; its size is the number of bytes to read.
        threads: Number of threads.
        size: Bytes per call.
        direct: Whether to use O_DIRECT.
    """
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    view = memoryview(memory.numpy())
    starts = iter(range(0, len(view), size))

    def work() -> None:
        for start in starts:
            piece = view[start : start + size]
            nbytes = 0
            while nbytes < len(piece):
                nbytes += os.preadv(fd, [piece[nbytes:]], offset + start + nbytes)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    started = time.perf_counter()
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    took = time.perf_counter() - started
    os.close(fd)
    return took


def fio(path: Path) -> float | None:
    """Return the bandwidth of fio for the same file in bytes per second (io_uring, depth 32); None without fio."""
    if shutil.which("fio") is None:
        return None
    command = [
        "fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--bs=1M", "--direct=1", "--iodepth=32",
        "--ioengine=io_uring", "--loops=5", "--output-format=json",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        return None
    return float(json.loads(process.stdout[process.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])
