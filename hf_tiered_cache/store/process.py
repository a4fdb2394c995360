"""Open files of all stores of this process: file descriptors are limited, and POSIX file locks are lost, per process.

This is the only state that is shared by all stores. A forked child starts with empty state and never uses its parent's.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

_MOST_OPEN_SEGMENTS = 256


_Database = TypeVar("_Database")
_Segment = TypeVar("_Segment")


class _Process:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # for `segments`; finalizers acquire it too
        self.opening = threading.RLock()  # for `databases`
        self.databases: dict[Path, Any] = {}
        self.owning = threading.RLock()  # for `conversations`
        self.conversations: weakref.WeakValueDictionary[Path | str, Any] = weakref.WeakValueDictionary()
        self.segments: OrderedDict[tuple[object, str], Any] = OrderedDict()


_ours = _Process()
_parents: list[_Process] = []  # kept, so that a forked child does not close its parent's files


def _process() -> _Process:
    global _ours
    if _ours.pid != os.getpid():
        _parents.append(_ours)
        _ours = _Process()
    return _ours


def shared_database(path: Path, open_it: Callable[[], _Database]) -> _Database:
    """Return the shared database at a resolved path, opened on first use. Release it with `release_database`."""
    process = _process()
    with process.opening:
        if path not in process.databases:
            process.databases[path] = open_it()
        process.databases[path].users += 1
        return process.databases[path]


def has_database(path: Path) -> bool:
    """Return whether this process has opened the database at a path. If so, only SQLite may open its files."""
    return path in _process().databases


def release_database(database: Any) -> None:
    """Release a shared database. The last user closes it."""
    process = _process()
    with process.opening:
        database.users -= 1
        ours = [path for path, opened in process.databases.items() if opened is database]
        if ours and not database.users:  # otherwise it is the parent's
            del process.databases[ours[0]]
            database.close()


@contextmanager
def ownerships() -> Iterator[MutableMapping[Path | str, Any]]:
    """Yield the conversations that this process owns, by lock path, while holding the lock on them."""
    process = _process()
    with process.owning:
        yield process.conversations


class OpenSegments(Generic[_Segment]):
    """Open segments of a store, of which the process holds a limited number: those used last."""

    def __init__(self) -> None:
        self._store = object()
        # no __del__: modules may already be unloaded when the interpreter exits
        weakref.finalize(self, _close_segments, self._store).atexit = False

    def __iter__(self) -> Iterator[str]:
        process = _process()
        with process.lock:
            return iter([name for store, name in process.segments if store is self._store])

    def get(self, segment_id: str) -> _Segment | None:
        process = _process()
        with process.lock:
            reader: _Segment | None = process.segments.get((self._store, segment_id))
            if reader is not None:
                process.segments.move_to_end((self._store, segment_id))
            return reader

    def keep(self, segment_id: str, reader: _Segment) -> None:
        process = _process()
        with process.lock:
            process.segments[self._store, segment_id] = reader
        self.close_others(most_open_segments())

    def drop(self, segment_id: str) -> None:
        process = _process()
        with process.lock:
            process.segments.pop((self._store, segment_id), None)

    def clear(self) -> None:
        _close_segments(self._store)

    def close_others(self, but: int = 0) -> None:
        """Close the segments of the process, except the `but` most recently used ones. Reads are finished first."""
        process = _process()
        with process.lock:
            while len(process.segments) > but:
                process.segments.popitem(last=False)


def _close_segments(store: object) -> None:
    process = _process()
    with process.lock:
        for key in [key for key in process.segments if key[0] is store]:
            del process.segments[key]


def most_open_segments() -> int:
    """Return the maximum number of open segments: at most a quarter of the process's file descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN_SEGMENTS if soft < 0 else max(1, min(_MOST_OPEN_SEGMENTS, soft // 4))
