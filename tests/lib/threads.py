"""Threads of tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_in_threads(work: Callable[[Any], object], arguments: Sequence[Any]) -> None:
    """Call `work` with each argument in a separate thread simultaneously; raise the first error."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        for future in [pool.submit(work, argument) for argument in arguments]:
            future.result()
