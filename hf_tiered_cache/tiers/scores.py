"""What is known of chunks whether or not they are in memory: the attention they got, and how often they were chosen."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

Owner = tuple[str, int]
"""Segment id and lane: with a chunk number, the name of a block."""

_MOST_OWNERS = 1 << 16


class ScoreTable:
    """Importance I and accesses F of each chunk (ContiguousKV, Section 4.4), by segment and lane.

    The entries outlive the blocks' stay in memory, so that one that comes back is not a stranger.

    Args:
        learn: makes importance of what is told, see `EvictionPolicy.learn`.
    """

    def __init__(self, learn: Callable[..., np.ndarray]) -> None:
        self._learn = learn
        self._rows: OrderedDict[Owner, np.ndarray] = OrderedDict()  # float64 [2, chunks]: importance, accesses
        self._changed: set[Owner] = set()
        self._lock = threading.Lock()

    def note(self, owner: Owner, count: int, chunks: np.ndarray, mass: np.ndarray, share: np.ndarray) -> None:
        """`chunks` of a lane with `count` were chosen, such a share of each, and got so much attention."""
        with self._lock:
            row = self._rows.setdefault(owner, np.zeros((2, count)))
            self._rows.move_to_end(owner)
            row[0, chunks] = self._learn(*row[:, chunks], mass, share)
            row[1, chunks] += 1
            self._changed.add(owner)
            while len(self._rows) > _MOST_OWNERS:
                self._changed.discard(self._rows.popitem(last=False)[0])

    def of(self, owner: Owner, chunks: np.ndarray) -> np.ndarray:
        """float64 `[2, len(chunks)]`: importance and accesses; zeros of what is not known."""
        with self._lock:
            row = self._rows.get(owner)
            return np.zeros((2, len(chunks))) if row is None else row[:, chunks]

    def forget(self, segment_id: str) -> None:
        """A segment is gone."""
        with self._lock:
            for owner in [owner for owner in self._rows if owner[0] == segment_id]:
                del self._rows[owner]
                self._changed.discard(owner)

    def changes(self) -> list[tuple[str, int, bytes]]:
        """Segment, lane and row, as bytes, of what has changed since this was asked last."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return [(*owner, self._rows[owner].astype("<f4").tobytes()) for owner in changed]

    def load(self, rows: Iterable[tuple[str, int, bytes]]) -> None:
        """Take in what `changes` gave, in an earlier process."""
        with self._lock:
            for segment, lane, data in rows:
                row = np.frombuffer(data, "<f4").astype(np.float64).reshape(2, -1)
                self._rows.setdefault((segment, lane), row)
