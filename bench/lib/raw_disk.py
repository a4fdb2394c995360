"""What a disk gives to who only reads: the yardstick of reads that also check and place what they bring."""

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
    """Read a file's tail in `threads` threads of 1 MiB reads each, with O_DIRECT or without; nothing else is done."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    view = memoryview(memory.numpy())
    starts = iter(range(0, len(view), size))

    def work() -> None:
        for start in starts:
            piece = view[start : start + size]
            done = 0
            while done < len(piece):
                done += os.preadv(fd, [piece[done:]], offset + start + done)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    started = time.perf_counter()
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    took = time.perf_counter() - started
    os.close(fd)
    return took


def fio(path: Path) -> float | None:
    """What fio reads of the same file, io_uring at depth 32, in bytes per second; None where there is no fio."""
    if shutil.which("fio") is None:
        return None
    command = [
        "fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--bs=1M", "--direct=1", "--iodepth=32",
        "--ioengine=io_uring", "--loops=5", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])
