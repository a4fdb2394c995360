"""Which stored passages hold a scan hash, and where: in memory, brought up to date at each look-up."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..store.catalogue import SegmentRow

_MOST_PLACES = 32
"""Places of one hash that are looked at: a heading may stand in many passages, which their other parts tell apart."""
_FEW = 4096
_FILTER_BITS = 10, 26


class Seeds(NamedTuple):
    """Parts of passages that may stand in a prompt; the numbers are int64 `[n]` each."""

    at: np.ndarray
    """Which of the hashes that were looked for: the prompt's token that such a part may begin at."""
    passage: np.ndarray
    """Which of `rows` it is of."""
    part: np.ndarray
    """Which prefix hash of that, from 0 on."""
    rows: list[SegmentRow]


class Listed(Protocol):
    """What the catalogue says of passages (see `Index`)."""

    @property
    def generation(self) -> Hashable: ...

    def passages_since(self, number: int) -> list[tuple[int, str, bytes]]: ...

    def live(self, ids: Sequence[str]) -> list[SegmentRow] | None: ...


class _Run:
    """Hashes, ascending, and where they stand.

    Args:
        hashes: uint32 `[n]`, in any order.
        passages, parts: int32 `[n]`.
    """

    def __init__(self, hashes: np.ndarray, passages: np.ndarray, parts: np.ndarray) -> None:
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.passages, self.parts = hashes[order], passages[order], parts[order]
        low, high = _FILTER_BITS
        bits = min(high, max(low, 4 + len(hashes).bit_length()))
        self._shift = np.uint32(32 - bits)
        self._filter = np.zeros(1 << bits, bool)  # by the first bits of a hash: whether there is any such
        self._filter[self.hashes >> self._shift] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which of `hashes`, uint32 `[n]`, are here, and of what: int64 `[found]` each."""
        at = np.flatnonzero(self._filter[hashes >> self._shift])
        first = np.searchsorted(self.hashes, hashes[at], "left")
        count = np.minimum(np.searchsorted(self.hashes, hashes[at], "right") - first, _MOST_PLACES)
        before = np.cumsum(count) - count
        place = np.repeat(first - before, count) + np.arange(count.sum())
        return np.repeat(at, count), self.passages[place].astype(np.int64), self.parts[place].astype(np.int64)


class PassageIndex:
    """The scan hashes of all stored passages. What other processes store and remove is seen at the next look-up.

    Args:
        listed: says what is stored.
    """

    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._lock = threading.Lock()
        self._generation: Hashable = None
        self._begin_anew()

    def seeds(self, hashes: np.ndarray) -> Seeds:
        """Where parts of passages may stand in a prompt with these scan hashes, uint32 `[n]`."""
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
                if names is self._names:  # else all was read anew
                    self._forget(gone)

    def _begin_anew(self) -> None:
        self._last = 0  # number of the last passage that is known
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}  # of each name the last place in the list
        self._main = self._recent = _run([], 0)

    def _catch_up(self) -> None:
        """Take in what has come since the last time."""
        if (generation := self._listed.generation) != self._generation:
            self._begin_anew()
            self._generation = generation
        new = self._listed.passages_since(self._last)
        if not new:
            return
        self._last = new[-1][0]
        names = [name for _, name, _ in new]
        self._forget([self._numbers[name] for name in names if name in self._numbers])  # stored anew
        self._numbers |= zip(names, range(len(self._names), len(self._names) + len(names)), strict=True)
        run = _run([scan for *_, scan in new], len(self._names))
        self._names += names
        self._recent = _joined(self._recent, run)
        if len(self._recent.hashes) > max(_FEW, len(self._main.hashes) // 4):
            self._main, self._recent = _joined(self._main, self._recent), _run([], 0)

    def _forget(self, gone: Collection[int]) -> None:
        """These passages are not stored any more, or others now."""
        for name in ("_main", "_recent") if gone else ():
            run: _Run = getattr(self, name)
            stay = ~np.isin(run.passages, np.array(sorted(gone)))
            if not stay.all():
                setattr(self, name, _Run(run.hashes[stay], run.passages[stay], run.parts[stay]))


def _run(scans: Sequence[bytes], first: int) -> _Run:
    """Of passages with these scan hashes, which are numbered from `first` on."""
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
