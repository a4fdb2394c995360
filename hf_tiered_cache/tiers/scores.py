"""Scores of chunks, in memory or not: the attention they got, and how often they were chosen."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import numpy as np

Owner = tuple[str, int, int]
"""Segment id, block group, and a checksum of its content: with a chunk number, the name of a block. The checksum keeps
what is stored anew under the same id apart from what was there before."""

_MOST_OWNERS = 1 << 16


class ScoreTable:
    """Importance I and accesses F of each chunk (ContiguousKV, Section 4.4), by segment and block group.

    Scores survive eviction, so a reloaded block keeps its history.

    Args:
        learn: makes importance of what is told, see `EvictionPolicy.learn`.
    """

    def __init__(self, learn: Callable[..., np.ndarray]) -> None:
        self._learn = learn
        self._rows: OrderedDict[tuple[str, int], np.ndarray] = (
            OrderedDict()
        )  # float64 [2, chunks]: importance, accesses
        self._changed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def note(self, owner: Owner, count: int, chunks: np.ndarray, mass: np.ndarray, share: np.ndarray) -> None:
        """`chunks` of a block group with `count` were chosen, such a share of each, and got so much attention."""
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
        """float64 `[2, len(chunks)]`: importance and accesses; zeros of what is not known."""
        with self._lock:
            row = self._rows.get(owner[:2])
            return np.zeros((2, len(chunks))) if row is None else row[:, chunks]

    def put(self, owner: Owner, known: np.ndarray) -> None:
        """Take in what is known of all chunks of a block group, float64 `[2, chunks]`, in place of what was."""
        with self._lock:
            self._rows[owner[:2]] = known
            self._changed.add(owner[:2])

    def forget(self, segments: Collection[str]) -> None:
        """These segments are gone."""
        with self._lock:
            for name in [name for name in self._rows if name[0] in segments]:
                del self._rows[name]
                self._changed.discard(name)

    def changes(self) -> list[tuple[str, int, bytes]]:
        """Segment, block group and row, as bytes, of what has changed since this was asked last."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return [(*name, self._rows[name].astype("<f4").tobytes()) for name in changed]

    def load(self, rows: Iterable[tuple[str, int, bytes]]) -> None:
        """Take in what `changes` gave, in an earlier process."""
        with self._lock:
            for segment, block_group, data in rows:
                row = np.frombuffer(data, "<f4").astype(np.float64).reshape(2, -1)
                self._rows.setdefault((segment, block_group), row)
