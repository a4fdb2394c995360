"""In-memory index of the scan hashes of all stored passages, updated at each lookup."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..store.catalogue import SegmentRow

_MOST_PLACES = 32
"""Maximum number of occurrences examined per hash: many passages may share a heading and differ elsewhere."""
_FEW = 4096
_FILTER_BITS = 10, 26


class Seeds(NamedTuple):
    """Candidate parts of stored passages in a prompt. Each array is int64 `[n]`."""

    at: np.ndarray
    """Index of the matching scan hash: the prompt token at which the part may begin."""
    passage: np.ndarray
    """Index of the passage in `rows`."""
    part: np.ndarray
    """Index of the matching prefix hash within the passage."""
    rows: list[SegmentRow]


class Listed(Protocol):
    """Catalogue interface for stored passages (see `Index`)."""

    @property
    def generation(self) -> Hashable: ...

    def passages_since(self, number: int) -> list[tuple[int, str, bytes]]: ...

    def live(self, ids: Sequence[str]) -> list[SegmentRow] | None: ...


class _Run:
    """Scan hashes, ascending, with the passage and part that each belongs to.

    Args:
        hashes: uint32 `[n]`, in any order.
        passages: int32 `[n]`, passage number of each hash.
        parts: int32 `[n]`, index of each hash within its passage.
    """

    def __init__(self, hashes: np.ndarray, passages: np.ndarray, parts: np.ndarray) -> None:
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.passages, self.parts = hashes[order], passages[order], parts[order]
        low, high = _FILTER_BITS
        bits = min(high, max(low, 4 + len(hashes).bit_length()))
        self._shift = np.uint32(32 - bits)
        self._filter = np.zeros(1 << bits, bool)  # by leading bits: whether any hash begins with them
        self._filter[self.hashes >> self._shift] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the index into `hashes`, uint32 `[n]`, the passage and the part of each match: int64 `[found]`."""
        at = np.flatnonzero(self._filter[hashes >> self._shift])
        first = np.searchsorted(self.hashes, hashes[at], "left")
        count = np.minimum(np.searchsorted(self.hashes, hashes[at], "right") - first, _MOST_PLACES)
        before = np.cumsum(count) - count
        place = np.repeat(first - before, count) + np.arange(count.sum())
        return np.repeat(at, count), self.passages[place].astype(np.int64), self.parts[place].astype(np.int64)


class PassageIndex:
    """Scan hashes of all stored passages. Changes by other processes are seen at the next lookup.

    Args:
        listed: Catalogue of the stored passages.
    """

    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._lock = threading.Lock()
        self._generation: Hashable = None
        self._begin_anew()

    def seeds(self, hashes: np.ndarray) -> Seeds:
        """Return the candidate parts of passages in a prompt with these scan hashes, uint32 `[n]`."""
        while True:
            with self._lock:
                self._catch_up()
                runs = [run.find(hashes) for run in (self._main, self._recent)]
                names = self._names
            at, passage, part = (np.concatenate(parts) for parts in zip(*runs, strict=True))
            numbers, which = np.unique(passage, return_inverse=True)
            ids = [names[number] for number in numbers]
            rows = self._listed.live(ids) if ids else []
            if rows is None:
                none = np.empty(0, np.int64)
                return Seeds(none, none, none, [])
            by_id = {row.id: row for row in rows}
            gone = [number for number, name in zip(numbers.tolist(), ids, strict=True) if name not in by_id]
            if not gone:
                return Seeds(at, which, part, [by_id[name] for name in ids])
            with self._lock:
                if names is self._names:  # otherwise the index was rebuilt meanwhile
                    self._forget(gone)

    def _begin_anew(self) -> None:
        self._last = 0  # number of the last passage read from the catalogue
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}  # last index of each name in `_names`
        self._main = self._recent = _run([], 0)

    def _catch_up(self) -> None:
        """Add the passages stored since the last lookup. Rebuild if the catalogue has a new generation."""
        if (generation := self._listed.generation) != self._generation:
            self._begin_anew()
            self._generation = generation
        new = self._listed.passages_since(self._last)
        if not new:
            return
        self._last = new[-1][0]
        names = [name for _, name, _ in new]
        self._forget([self._numbers[name] for name in names if name in self._numbers])  # stored again
        self._numbers |= zip(names, range(len(self._names), len(self._names) + len(names)), strict=True)
        run = _run([scan for *_, scan in new], len(self._names))
        self._names += names
        self._recent = _joined(self._recent, run)
        if len(self._recent.hashes) > max(_FEW, len(self._main.hashes) // 4):
            self._main, self._recent = _joined(self._main, self._recent), _run([], 0)

    def _forget(self, gone: Collection[int]) -> None:
        """Remove passages that were deleted or replaced."""
        for name in ("_main", "_recent") if gone else ():
            run: _Run = getattr(self, name)
            stay = ~np.isin(run.passages, np.array(sorted(gone)))
            if not stay.all():
                setattr(self, name, _Run(run.hashes[stay], run.passages[stay], run.parts[stay]))


def _run(scans: Sequence[bytes], first: int) -> _Run:
    """Create the run of passages with these scan hashes, numbered from `first` on."""
    hashes = [np.frombuffer(scan, "<u4") for scan in scans] or [np.empty(0, np.uint32)]
    lengths = [len(each) for each in hashes]
    passages = np.repeat(np.arange(first, first + len(hashes), dtype=np.int32), lengths)
    parts = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return _Run(np.concatenate(hashes).astype(np.uint32), passages, parts)


def _joined(one: _Run, other: _Run) -> _Run:
    return _Run(
        np.concatenate([one.hashes, other.hashes]),
        np.concatenate([one.passages, other.passages]),
        np.concatenate([one.parts, other.parts]),
    )
