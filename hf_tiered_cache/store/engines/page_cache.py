"""Engine that reads through the page cache: all processes of a machine share one copy of frequently read data."""

from __future__ import annotations

from typing import ClassVar

from .posix import PosixEngine


class PageCacheEngine(PosixEngine):
    """`PosixEngine` without O_DIRECT: the kernel caches what was read, outside of the store's budgets.

    With `KVStore(engine="page_cache", host_memory=0)` no process keeps its own copy. Each request then copies its
    blocks out of the page cache and compares their checksums.

    Args:
        threads: number of workers, each with one read in flight.
    """

    name: ClassVar[str] = "page_cache"

    def __init__(self, threads: int = 8) -> None:
        super().__init__(threads, direct=False)

    def describe(self) -> str:
        return f"page_cache ({self.threads} threads, one copy for all processes)"
