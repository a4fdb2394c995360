"""Reads through the page cache, so that all processes of a machine share one copy of what is read often."""

from __future__ import annotations

from typing import ClassVar

from .posix import PosixEngine


class PageCacheEngine(PosixEngine):
    """As `PosixEngine`, without O_DIRECT: the kernel keeps what was read, outside of the store's budgets.

    With `KVStore(engine="page_cache", host_memory=0)` no process keeps a copy of its own. A block is then copied out of
    the page cache for each request, and its checksum compared each time.

    Args:
        threads: workers, each with one read in flight.
    """

    name: ClassVar[str] = "page_cache"

    def __init__(self, threads: int = 8) -> None:
        super().__init__(threads, direct=False)

    def describe(self) -> str:
        return f"page_cache ({self.threads} threads, one copy for all processes)"
