"""Aligned and page-locked memory for direct I/O, and transfers of small tensors between host and device."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from .faults import Notices
from .geometry import ALIGNMENT
from .lazy import torch

HUGE_PAGE = 2 << 20

_notices = Notices()


def aligned_bytes(nbytes: int, *, pin: bool = False, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate uninitialised memory, uint8 `[nbytes]`, that starts on a 4 KiB boundary.

    Large host memory starts on a huge page boundary, and uses huge pages for its whole multiples of 2 MiB, no more than
    `nbytes`. A direct read pins every page that it writes to, and few large ones take less time.

    With `pin`, host memory is page-locked, so that a GPU can copy from it asynchronously. If CUDA refuses, it is
    pageable: copies are slower, but correct.
    """
    size = nbytes + ALIGNMENT
    with torch.inference_mode(False):  # threads outside the caller's inference mode also write to the tensor
        memory = try_page_lock(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)) if pin else None
        if memory is None and torch.device(device).type == "cpu" and nbytes >= HUGE_PAGE:
            return _huge_pages(nbytes)[2]
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


def _huge_pages(nbytes: int) -> tuple[mmap.mmap, memoryview, torch.Tensor]:
    """Map memory, uint8 `[nbytes]`. The tensor holds the view, and the view the mapping."""
    # a mapping is sure to be aligned to huge pages only if its size is a multiple of them, so one more page is mapped
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(pages)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    with suppress(OSError):  # the kernel has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return pages, view, memory[start : start + nbytes]


_MADV_WIPEONFORK = 18
"""A forked child gets zeros, and the parent keeps its own pages, which the GPU uses.

With `MADV_DONTFORK` the child could map other memory there, and lose it when its copy of the mapping is freed.
"""


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate page-locked memory like `aligned_bytes`, but outside PyTorch's allocators, for long-lived buffers.

    Only the GPU `device` is initialized. The caller must keep the memory until the GPU has finished all copies. If CUDA
    refuses to lock the pages, the result of `aligned_bytes` is returned.
    """
    if nbytes >= HUGE_PAGE:
        with torch.inference_mode(False):
            pages, view, memory = _huge_pages(nbytes)
        with suppress(OSError):
            pages.madvise(_MADV_WIPEONFORK)
        portable = 1  # cudaHostRegisterPortable: for all GPUs of the process
        if _cudart(device, "cudaHostRegister", memory.data_ptr(), nbytes, portable):
            # the finalizer holds the mapping: an address that is mapped again must not be locked still
            weakref.finalize(view, _unregister, pages, memory.data_ptr(), device, os.getpid()).atexit = False
            return memory
    return aligned_bytes(nbytes, pin=True)


def _cudart(device: torch.device, function: str, *args: int) -> bool:
    """Call a function of the CUDA runtime on `device`. Return False if it fails."""
    # a RuntimeError: CUDA is not usable, e.g. in a child forked after its parent used CUDA
    with suppress(RuntimeError), torch.cuda.device(device):
        if int(getattr(torch.cuda.cudart(), function)(*args)) == 0:
            return True
        # the error stays the last one of the thread, and PyTorch would raise it at the model's next kernel: this
        # kernel raises it here, which clears it
        torch.ones(1, device=device)
    return False


def _unregister(pages: mmap.mmap, pointer: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no CUDA context of its parent
        _cudart(device, "cudaHostUnregister", pointer)


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
