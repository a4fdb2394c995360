"""Scores of chunks, in memory or not: their importance, and how often selectors chose them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import numpy as np

Owner = tuple[str, int, int]
"""Segment id, KV cache group, and a checksum of its content.

Together with a chunk number this identifies a block. The checksum distinguishes contents stored under the same id at
different times."""

_MOST_OWNERS = 1 << 16


class ScoreTable:
    """Importance I and accesses F of each chunk (ContiguousKV, Section 4.4), by segment and KV cache group.

    Scores survive eviction, so a reloaded block keeps its history.

    Args:
        learn: computes the new importance, see `EvictionPolicy.learn`.
    """

    def __init__(self, learn: Callable[..., np.ndarray]) -> None:
        self._learn = learn
        self._rows: OrderedDict[tuple[str, int], np.ndarray] = (
            OrderedDict()
        )  # float64 [2, chunks]: importance, accesses
        self._changed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def note(self, owner: Owner, count: int, chunks: np.ndarray, mass: np.ndarray, share: np.ndarray) -> None:
        """Record that chunks of a KV cache group were chosen.

        Args:
            owner: the segment and KV cache group.
            count: number of chunks of the KV cache group.
            chunks: the chosen chunks.
            mass: attention to each chosen chunk.
            share: fraction of each chunk's tokens that was chosen.
        """
        name = owner[:2]
        with self._lock:
            row = self._rows.setdefault(name, np.zeros((2, count)))
            self._rows.move_to_end(name)
            row[0, chunks] = self._learn(*row[:, chunks], mass, share)
            row[1, chunks] += 1
            self._changed.add(name)
            while len(self._rows) > _MOST_OWNERS:
                self._changed.discard(self._rows.popitem(last=False)[0])

    def of(self, owner: Owner, chunks: np.ndarray) -> np.ndarray:
        """Return importance and accesses of chunks, float64 `[2, len(chunks)]`; zeros if unknown."""
        with self._lock:
            row = self._rows.get(owner[:2])
            return np.zeros((2, len(chunks))) if row is None else row[:, chunks]

    def put(self, owner: Owner, known: np.ndarray) -> None:
        """Replace the scores of all chunks of a KV cache group by `known`, float64 `[2, chunks]`."""
        with self._lock:
            self._rows[owner[:2]] = known
            self._changed.add(owner[:2])

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments."""
        with self._lock:
            for name in [name for name in self._rows if name[0] in segments]:
                del self._rows[name]
                self._changed.discard(name)

    def changes(self) -> list[tuple[str, int, bytes]]:
        """Return segment, KV cache group and scores, as float32 bytes, of each entry changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return [(*name, self._rows[name].astype("<f4").tobytes()) for name in changed]

    def load(self, rows: Iterable[tuple[str, int, bytes]]) -> None:
        """Load what `changes` returned in an earlier process. Existing entries are kept."""
        with self._lock:
            for segment, block_group, data in rows:
                row = np.frombuffer(data, "<f4").astype(np.float64).reshape(2, -1)
                self._rows.setdefault((segment, block_group), row)
