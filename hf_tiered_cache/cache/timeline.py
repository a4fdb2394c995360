"""Trace of a cache's requests, as a file for Perfetto, Chrome's `about:tracing` and `hf-tiered-cache timeline`.

Each event has a name, a begin and a duration. The model's track holds passes, and the time between two layers' calls of
the cache, in which the model computes. The cache's track holds what the calls do, and where they wait. The disk's track
holds the time in which at least one read is in progress. On a GPU, the model's times are those of launching kernels.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..store.tree import open_file
from .stored_cache import StoredCache

logger = logging.getLogger("hf_tiered_cache")

MODEL, CACHE, DISK = "model", "cache", "disk"
TRACKS = {MODEL: 1, CACHE: 2, DISK: 3}
"""Tracks by name, with their number in the file."""
_NAMES = {
    "stall_seconds": "wait for KV",
    "select_seconds": "select",
    "match_seconds": "look up",
    "index_seconds": "build index",
    "io_seconds": "read",
}
_MARK = b'[{"name": "process_name", "ph": "M", "args": {"name": "hf_tiered_cache"}'  # first bytes of a trace


class Timeline:
    """Writer of a trace.

    The file is complete after each pass of the model, also if the process is killed. Programs accept that its list is
    not closed. If it can no longer be written, or another file has its name, the trace ends with a warning; requests go
    on.

    Args:
        path: File of the trace. An earlier trace is replaced.

    Raises:
        ConfigError: The file exists and is not a trace of this library, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))  # independent of later changes of the working directory
        self._head = f"[{_event('process_name', 'M', 0, {'name': 'hf_tiered_cache'})},\n".encode()
        try:
            if self.path.exists():
                if not (self.path.is_file() and _MARK.startswith(_beginning(self.path))):  # blank after a full disk
                    raise ConfigError(f"trace={str(path)!r} is a file of something else; name a new file")
                if self.path.stat().st_nlink > 1:
                    self.path.unlink()  # another link keeps the earlier trace
            with self.path.open("wb") as file:
                file.write(self._head)
                self._status = os.fstat(file.fileno())
        except OSError as error:
            raise ConfigError(f"trace={str(path)!r} cannot be written ({error.strerror})") from None
        self._lock = threading.Lock()
        self._lines = [_event("thread_name", "M", number, {"name": name}) for name, number in TRACKS.items()]
        self._ended = False  # whether the file could not be written

    def add(self, name: str, track: str, began: float, ended: float, **details: Any) -> None:
        """Add an event to a track, one of `TRACKS`. Times are those of `time.perf_counter`."""
        microseconds = {"ts": round(began * 1e6, 1), "dur": round((ended - began) * 1e6, 1)}
        with self._lock:
            self._lines.append(_event(name, "X", TRACKS[track], details, **microseconds))

    def flush(self) -> None:
        """Append all events so far to the file."""
        with self._lock:
            lines, self._lines = self._lines, []
            if self._ended:
                return
            try:
                self._append("".join(f"{line},\n" for line in lines).encode())
            except OSError as error:
                self._ended = True
                logger.warning("the trace %s ends here, because it cannot be written: %s", self.path, error.strerror)

    def _append(self, content: bytes) -> None:
        """Append whole lines to the file. Raises OSError, also if it is no longer this trace."""
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with open_file(self.path, flags) as file:
            fd, status = file.fileno(), os.fstat(file.fileno())
            # a new file may get the inode of a deleted one
            if not os.path.samestat(status, self._status) or os.pread(fd, len(self._head), 0) != self._head:
                raise OSError(errno.EEXIST, "another file has its name")
            try:
                while content:
                    content = content[os.write(fd, content) :]
            except OSError:
                os.ftruncate(fd, status.st_size)
                raise

    def watch(self, cache: StoredCache) -> None:
        """Trace all passes of a cache."""
        _CacheWatch(self, cache)


def _event(name: str, phase: str, track: int, details: dict[str, Any], **times: float) -> str:
    event = {"name": name, "ph": phase, "args": details, **times, "pid": os.getpid(), "tid": track}
    return json.dumps(event)


def _beginning(path: Path) -> bytes:
    """Return the bytes by which a trace is recognized."""
    with path.open("rb") as file:
        return file.read(len(_MARK))


class _CacheWatch:
    """Events of one cache. Wraps the two methods of this cache that an attached model calls."""

    def __init__(self, timeline: Timeline, cache: StoredCache) -> None:
        self._timeline = timeline
        self._cache = weakref.ref(cache)  # the cache refers to this object
        self._layer = -1  # last layer that called, in the current pass
        self._left = 0.0  # when the cache returned to the model
        cache.on_section(self._section)
        cache.run = self._run
        cache.update = self._update  # type: ignore[method-assign]

    @property
    def _watched(self) -> StoredCache:
        cache = self._cache()
        assert cache is not None  # it is being called
        return cache

    def _section(self, figure: str, began: float, ended: float) -> None:
        if figure in _NAMES:
            self._timeline.add(_NAMES[figure], DISK if figure == "io_seconds" else CACHE, began, ended)

    def _run(self, attachment: Any, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        cache, began = self._watched, time.perf_counter()
        before = cache.stats.tokens_restored, cache.stats.tokens_computed

        def traced(*arguments: Any, **named: Any) -> Any:
            self._layer, self._left = -1, time.perf_counter()
            output = forward(*arguments, **named)
            self._timeline.add(f"after layer {self._layer}", MODEL, self._left, time.perf_counter())
            return output

        try:
            return type(cache).run(cache, attachment, traced, kwargs)
        finally:
            restored, computed = cache.stats.tokens_restored - before[0], cache.stats.tokens_computed - before[1]
            self._timeline.add("pass", MODEL, began, time.perf_counter(), restored=restored, computed=computed)
            self._timeline.flush()

    def _update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache, layer, began = self._watched, layer_idx, time.perf_counter()
        name = "before layer 0" if self._layer < 0 else f"layer {self._layer} to {layer}"
        self._timeline.add(name, MODEL, self._left, began)
        output = type(cache).update(cache, key_states, value_states, layer, *arguments, **named)
        self._layer, self._left = layer, time.perf_counter()
        self._timeline.add("update", CACHE, began, self._left, layer=layer)
        return output
