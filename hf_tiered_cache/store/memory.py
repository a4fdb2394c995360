"""Aligned and page-locked memory for direct I/O, and transfers of small tensors between host and device."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from .faults import Notices
from .geometry import ALIGNMENT

HUGE_PAGE = 2 << 20

_notices = Notices()


def aligned_bytes(nbytes: int, *, pin: bool = False, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate uninitialised memory, uint8 `[nbytes]`, that starts on a 4 KiB boundary.

    Large host memory starts on a huge page boundary, and uses huge pages for its whole multiples of 2 MiB. A direct
    read pins every page that it writes to: with 4 KiB pages, pinning took half of the time of a read at 5 GB/s. No more
    than `nbytes` of memory are used.

    Args:
        nbytes: size in bytes.
        pin: whether to page-lock host memory, so that a GPU can copy from it asynchronously. If CUDA refuses, the
            memory is pageable: copies are slower, but correct.
        device: device of the memory.
    """
    with torch.inference_mode(False):  # threads outside the caller's inference mode also write to the tensor
        return _aligned_bytes(nbytes, pin, torch.device(device))


def _aligned_bytes(nbytes: int, pin: bool, device: torch.device) -> torch.Tensor:
    size = nbytes + ALIGNMENT
    memory = try_page_lock(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)) if pin else None
    if memory is None and device.type == "cpu" and nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        return _huge_pages(nbytes)[1]
    if memory is None:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def try_page_lock(allocate: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return the page-locked memory from `allocate`, or None, with one warning, if CUDA refuses to lock it.

    CUDA refuses in a child that was forked after its parent used CUDA, and when no more pages may be locked.
    """
    try:
        return allocate()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        _notices.warn("page lock", f"memory cannot be page-locked ({reason}), so copies from and to a GPU take longer")
        return None


def _huge_pages(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    # a mapping is sure to be aligned to huge pages only if its size is a multiple of them, so one more page is mapped
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    with suppress(OSError):  # the kernel has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return pages, memory[start : start + nbytes]


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate page-locked memory like `aligned_bytes`, but outside PyTorch's allocators, for long-lived buffers.

    Huge pages are used under the same conditions as in `aligned_bytes`. The caller must keep the memory until the GPU
    has finished all copies. If CUDA refuses to lock the pages, the result of `aligned_bytes` is returned.

    Args:
        nbytes: size in bytes.
        device: GPU that copies from and to the memory. No other GPU is initialized.
    """
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with torch.inference_mode(False):
            pages, memory = _huge_pages(nbytes)
        if _register(memory.data_ptr(), nbytes, device):
            weakref.finalize(pages, _unregister, memory.data_ptr(), os.getpid()).atexit = False
            return memory
    return aligned_bytes(nbytes, pin=True)


def _register(pointer: int, nbytes: int, device: torch.device) -> bool:
    """Page-lock memory for all GPUs of the process. Returns False if CUDA refuses."""
    portable = 1  # cudaHostRegisterPortable
    try:
        with torch.cuda.device(device):
            return int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, portable)) == 0
    except RuntimeError:  # CUDA is not usable, e.g. in a child forked after its parent used CUDA
        return False


def _unregister(pointer: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no CUDA context of its parent
        torch.cuda.cudart().cudaHostUnregister(pointer)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy of `array` on `device`, without a wait of GPU or thread; on the CPU, share the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    locked = try_page_lock(tensor.pin_memory)
    return (tensor if locked is None else locked).to(device, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return the values of tensors of one device as arrays, and wait for them once."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tuple(copy.numpy() for copy in copies)
