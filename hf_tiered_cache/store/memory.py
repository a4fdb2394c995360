"""Memory that direct I/O can write to, fast."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from ..geometry import ALIGNMENT
from .notices import Notices

HUGE_PAGE = 2 << 20

_notices = Notices()


def aligned_bytes(nbytes: int, *, pin: bool = False, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uninitialised memory, uint8 `[nbytes]`, that begins on a 4 KiB boundary.

    Large host memory is of huge pages as far as whole ones go, and begins with one: a direct read pins every page it
    writes to, and with pages of 4 KiB that took half of the time of a read at 5 GB/s. It takes no more than `nbytes`.

    Args:
        nbytes: how many.
        pin: whether to page-lock host memory, so that a GPU can copy from it asynchronously. Where CUDA refuses, the
            memory is ordinary: copies take longer, and are correct.
        device: where.
    """
    with torch.inference_mode(False):  # threads that are not in the caller's inference mode write to it too
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
    """Return the page-locked memory that `allocate` gets, or None where CUDA refuses it. Says so once.

    CUDA refuses in a child that was forked after its parent had used it, and where no more pages may be locked.
    """
    try:
        return allocate()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        _notices.warn("page lock", f"no memory can be page-locked ({reason}); copies from and to a GPU take longer")
        return None


def _huge_pages(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    # a mapping begins with a huge page where its size is a multiple of theirs, or by luck: the last may not be used
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return pages, memory[start : start + nbytes]


def page_locked(nbytes: int) -> torch.Tensor:
    """The same as `aligned_bytes`, page-locked, for memory that is kept: no PyTorch allocator knows of it.

    It is of huge pages where `aligned_bytes` would be. The caller keeps it until the GPU has done all copies. Where
    CUDA refuses to lock it, it is what `aligned_bytes` gets.
    """
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with torch.inference_mode(False):
            pages, memory = _huge_pages(nbytes)
        if _register(memory.data_ptr(), nbytes):
            weakref.finalize(pages, _unregister, memory.data_ptr(), os.getpid()).atexit = False
            return memory
    return aligned_bytes(nbytes, pin=True)


def _register(pointer: int, nbytes: int) -> bool:
    """Lock pages in memory for every GPU of the process. Returns False where CUDA refuses."""
    portable = 1  # cudaHostRegisterPortable
    try:
        return int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, portable)) == 0
    except RuntimeError:  # CUDA cannot be used at all, as in a child forked after its parent had used it
        return False


def _unregister(pointer: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has none of its parent's CUDA
        torch.cuda.cudart().cudaHostUnregister(pointer)
