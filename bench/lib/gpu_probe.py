"""Probe of a machine in 20 seconds: its parts, and how fast bytes move without this library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.common import seconds
from lib.gpu_run import Run
from lib.pages import machine
from lib.raw_disk import direct_read

from hf_tiered_cache.store.memory import aligned_bytes

PACKAGES = ("torch", "transformers", "kvikio-cu13", "kvikio-cu12", "safetensors", "numpy", "pytest", "hypothesis")
_QUERY = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"


def device_of(run: Run) -> torch.device:
    """Return the device of the models."""
    name = run.device if run.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def probe(run: Run) -> None:
    """Record versions, then measure bandwidths in order of importance."""
    device = device_of(run)
    small = run.shapes[0] == "tiny"
    nbytes = 16 << 20 if small else 512 << 20
    run.row("machine", **machine(device, run.folder), **versions(), ram_bytes=_memory(), nbytes=nbytes)
    probes: list[tuple[str, Callable[[], Any]]] = [
        ("copies", lambda: copies(run, device, nbytes)),
        ("disk", lambda: disk(run, run.folder, "disk", nbytes, device)),
        ("/dev/shm", lambda: disk(run, Path("/dev/shm"), "/dev/shm", nbytes // 4, device)),
    ]
    for label, action in probes:
        run.check()
        try:
            action()
        except (OSError, RuntimeError) as error:
            run.skip(label, f"{type(error).__name__}: {error}"[:300])


def versions() -> dict[str, Any]:
    """Return the versions of packages, CUDA and the driver; None for a missing one."""
    packages: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    driver = None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        try:
            driver = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
        except subprocess.TimeoutExpired:
            driver = "nvidia-smi did not answer"
    return {
        "packages": packages,
        "cuda": torch.version.cuda,
        "driver": driver,
        "nvidia_fs": Path("/proc/driver/nvidia-fs/stats").exists(),
    }


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def copies(run: Run, device: torch.device, nbytes: int) -> None:
    """Measure copies between host and device and within the device, and the cost of page-locking."""

    def record(label: str, action: Callable[[], Any], copied_bytes: int = nbytes, times: int = 3) -> None:
        for _ in range(times):
            run.check()
            took = seconds(action, device)
            run.row(label, seconds=took, nbytes=copied_bytes, bytes_per_s=copied_bytes / took)

    host = torch.empty(nbytes, dtype=torch.uint8)
    host[::4096] = 1
    host_copy = torch.empty_like(host)
    host_copy[::4096] = 1
    record("copy in host memory", lambda: host_copy.copy_(host))
    if device.type != "cuda":
        run.skip("H2D, pinned", "no GPU")
        return
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    twin = torch.empty_like(on_device)
    record("pinning", lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), times=1)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    record("H2D, pinned", lambda: on_device.copy_(pinned, non_blocking=True), times=5)
    record("D2H, pinned", lambda: pinned.copy_(on_device, non_blocking=True))
    record("H2D, pageable", lambda: on_device.copy_(host), times=2)
    record("copy in device memory", lambda: twin.copy_(on_device), copied_bytes=2 * nbytes, times=5)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    a @ a
    for _ in range(3):
        took = seconds(lambda: a @ a, device)
        run.row("bfloat16 matmul", seconds=took, flops_per_s=2 * 8192**3 / took)


def disk(run: Run, folder: Path, name: str, nbytes: int, device: torch.device) -> None:
    """Write a file, and read it with O_DIRECT into pinned memory, and from the page cache."""
    if shutil.disk_usage(folder).free < 2 * nbytes:
        run.skip(name, f"{folder} has no room for {nbytes >> 20} MiB")
        return
    path, pin = folder / f"on-gpu-probe-{os.getpid()}", device.type == "cuda"
    memory = aligned_bytes(nbytes, pin=pin)
    memory.fill_(1)
    try:
        started = time.perf_counter()
        with open(path, "wb") as file:
            file.write(memory.numpy().data)
            os.fsync(file.fileno())
        took = time.perf_counter() - started
        run.row(f"{name}, write", seconds=took, nbytes=nbytes, bytes_per_s=nbytes / took)
        for direct in (True, False):
            label = f"{name}, {'O_DIRECT' if direct else 'page cache'} into {'pinned' if pin else 'host'} memory"
            _read(run, label, path, memory, direct)
    finally:
        path.unlink(missing_ok=True)


def _read(run: Run, label: str, path: Path, memory: torch.Tensor, direct: bool) -> None:
    try:  # one call first: what threads raise goes nowhere
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            os.preadv(fd, [memory[: 1 << 20].numpy().data], 0)
        finally:
            os.close(fd)
    except OSError as error:
        run.skip(label, str(error))
        return
    for _ in range(3):
        run.check()
        if direct:
            _forget(path)
        took = direct_read(path, 0, memory, direct=direct)
        run.row(label, seconds=took, nbytes=memory.numel(), bytes_per_s=memory.numel() / took)


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
