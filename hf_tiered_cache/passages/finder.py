"""Search for stored passages anywhere in a prompt (CacheTune, Section 4): found by any part, in one scan.

An index in memory holds the scan hashes of all stored passages. It is updated at each lookup.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..restore.hashes import PassageHasher
from ..store import HASH_BYTES
from ..store.catalogue import SegmentRow
from ..store.disk import SegmentStore
from ..store.format import has_lead_text
from ..store.geometry import HASH_TOKENS

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


class _Run:
    """Scan hashes, uint32 `[n]`, ascending, with the passage and the part of it that each belongs to, int32 `[n]`."""

    def __init__(self, hashes: np.ndarray, passages: np.ndarray, parts: np.ndarray) -> None:
        order = np.argsort(hashes, kind="stable")
        self.arrays = self.hashes, self.passages, self.parts = hashes[order], passages[order], parts[order]
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
        offsets = np.cumsum(count) - count
        place = np.repeat(first - offsets, count) + np.arange(count.sum())
        return np.repeat(at, count), self.passages[place].astype(np.int64), self.parts[place].astype(np.int64)


class PassageIndex:
    """Scan hashes of all passages in a store. Changes by other processes are seen at the next lookup."""

    def __init__(self, disk: SegmentStore) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._generation: Hashable = None
        self._reset()

    def seeds(self, hashes: np.ndarray) -> Seeds:
        """Return the candidate parts of passages in a prompt with these scan hashes, uint32 `[n]`.

        Segments that this process fails to read have no part that can be used.
        """
        while True:
            with self._lock:
                at, passage, part = map(np.concatenate, zip(*(run.find(hashes) for run in self._runs), strict=True))
                numbers, passage_index = np.unique(passage, return_inverse=True)
                ids = [self._names[number] for number in numbers]
                answer = self._disk.index.passages(self._last, ids)
                if answer is None:  # the catalogue fails
                    empty = np.empty(0, np.int64)
                    return Seeds(empty, empty, empty, [])
                generation, new_passages, rows = answer
                if generation != self._generation:
                    self._generation = generation
                    self._reset()
                    continue
                by_id = {row.id: row for row in rows}
                self._forget([number for number, name in zip(numbers.tolist(), ids, strict=True) if name not in by_id])
                self._add(new_passages)
            if not new_passages and len(by_id) == len(ids):
                rows = [by_id[name] for name in ids]
                usable = [replace(row, valid_hashes=0) if self._disk.is_hidden(row.id) else row for row in rows]
                return Seeds(at, passage_index, part, usable)

    def _reset(self) -> None:
        self._last = 0  # number of the last passage read from the catalogue
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}  # last index of each name in `_names`
        self._runs = [_run([], 0), _run([], 0)]  # the second one has recent passages, and is joined to the first

    def _add(self, new_passages: Sequence[tuple[int, str, bytes]]) -> None:
        """Add passages with these numbers, ids and scan hashes."""
        if not new_passages:
            return
        self._last = new_passages[-1][0]
        names = [name for _, name, _ in new_passages]
        self._forget([self._numbers[name] for name in names if name in self._numbers])  # stored again
        self._numbers |= zip(names, range(len(self._names), len(self._names) + len(names)), strict=True)
        run = _run([scan for *_, scan in new_passages], len(self._names))
        self._names += names
        main, recent = self._runs[0], _joined(self._runs[1], run)
        is_long = len(recent.hashes) > max(_FEW, len(main.hashes) // 4)
        self._runs = [_joined(main, recent), _run([], 0)] if is_long else [main, recent]

    def _forget(self, numbers: Collection[int]) -> None:
        """Remove passages that were deleted or replaced."""
        for place, run in enumerate(self._runs if numbers else ()):
            is_kept = ~np.isin(run.passages, sorted(numbers))
            if not is_kept.all():
                self._runs[place] = _Run(*(values[is_kept] for values in run.arrays))


def _run(scans: Sequence[bytes], first: int) -> _Run:
    """Create the run of passages with these scan hashes, numbered from `first` on."""
    hashes = [np.frombuffer(scan, "<u4") for scan in scans] or [np.empty(0, np.uint32)]
    lengths = [len(passage_hashes) for passage_hashes in hashes]
    passages = np.repeat(np.arange(first, first + len(hashes), dtype=np.int32), lengths)
    parts = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return _Run(np.concatenate(hashes).astype(np.uint32), passages, parts)


def _joined(first: _Run, second: _Run) -> _Run:
    return _Run(*map(np.concatenate, zip(first.arrays, second.arrays, strict=True)))


@dataclass(frozen=True)
class PassageMatch:
    """Match of `num_hashes` hashes of a stored passage, from index `first` on, with the prompt from token `at` on."""

    row: SegmentRow
    at: int
    first: int
    num_hashes: int

    @property
    def stop(self) -> int:
        return self.at + self.num_hashes * HASH_TOKENS

    @property
    def begin(self) -> int:
        """Prompt token at which the passage would begin; negative if its beginning is cut off."""
        return self.at - self.first * HASH_TOKENS

    def is_exact(self, tokens: np.ndarray, hasher: PassageHasher) -> bool:
        """Return whether the passage has the same position and preceding tokens as when its KV was computed."""
        sink = hasher.sink
        if self.begin != (0 if sink is None else 1) or (sink is not None and tokens[0] != sink):
            return False
        if has_lead_text(self.row.provenance):
            return False
        prefix_bytes = self.first * HASH_BYTES
        return b"".join(hasher.hashes(tokens[self.begin : self.at])) == self.row.chain[:prefix_bytes]


def find_passages(
    tokens: np.ndarray,
    hasher: PassageHasher,
    seeds: Callable[[np.ndarray], Seeds],
    start: int = 0,
) -> list[PassageMatch]:
    """Return the matches of stored passages in a prompt, in order and without overlap. Longer matches take precedence.

    If a passage occurs in changed form, each run of unchanged hashes is a match of its own.

    Args:
        tokens: int64 `[n]`, the prompt.
        hasher: Hasher of the passages.
        seeds: Returns the candidates for scan hashes, uint32 `[n - 15]`. Candidates are verified.
        start: First token to search.
    """
    candidates = seeds(hasher.scan(tokens[start:]))
    at, passage, part = candidates.at + start, candidates.passage, candidates.part
    valid = np.array([row.valid_hashes for row in candidates.rows], np.int64)
    keep = part < valid[passage] if len(valid) else np.zeros(0, bool)
    run = _longest_runs(at[keep], passage[keep], part[keep])
    matches: list[PassageMatch] = []
    for row_index, begin, first, count in zip(*(values.tolist() for values in run), strict=True):
        matches += _verify(tokens, hasher, PassageMatch(candidates.rows[row_index], begin, first, count), start)
    return _without_overlap(matches, len(tokens))


def _longest_runs(at: np.ndarray, passage: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, ...]:
    """Join consecutive parts into runs. Among parts that begin at the same token, keep the one in the longest run.

    Returns:
        For each run its passage, first token, first part and number of parts: int64 `[runs]` each.
    """
    for is_last_round in (False, True):
        begin = at - part * HASH_TOKENS
        order = np.lexsort((part, begin, passage))
        at, passage, part, begin = (values[order] for values in (at, passage, part, begin))
        is_continued = (np.diff(passage) == 0) & (np.diff(begin) == 0) & (np.diff(part) == 1)
        heads = np.flatnonzero(np.concatenate([[True] * bool(len(at)), ~is_continued]))
        counts = np.diff(np.append(heads, len(at)))
        if is_last_round:
            break
        run = np.repeat(np.arange(len(heads)), counts)
        order = np.lexsort((run, -counts[run], at))
        best = order[np.flatnonzero(np.diff(at[order], prepend=-1))]
        at, passage, part = at[best], passage[best], part[best]
    return passage[heads], at[heads], part[heads], counts


def _verify(tokens: np.ndarray, hasher: PassageHasher, match: PassageMatch, start: int) -> Iterator[PassageMatch]:
    """Yield the verified runs of a match, extended while further hashes match."""
    row, step, begin = match.row, HASH_TOKENS, match.begin

    def are_equal(first: int, stop: int) -> list[bool]:
        hashes = enumerate(hasher.hashes(tokens[begin + first * step : begin + stop * step]), first)
        return [row.chain[number * HASH_BYTES : (number + 1) * HASH_BYTES] == value for number, value in hashes]

    first, stop = match.first, match.first + match.num_hashes
    is_equal = are_equal(first, stop)
    if is_equal[0]:
        while first > 0 and begin + (first - 1) * step >= start and all(are_equal(first - 1, first)):
            first, is_equal = first - 1, [True, *is_equal]
    if is_equal[-1]:
        max_hashes = min(row.valid_hashes, (len(tokens) - begin) // step)
        while stop < max_hashes and all(are_equal(stop, stop + 1)):
            stop, is_equal = stop + 1, [*is_equal, True]
    for low, high in _true_runs(is_equal):
        yield PassageMatch(row, begin + (first + low) * step, first + low, high - low)


def _true_runs(values: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of true values."""
    at = 0
    for value, run in groupby(values):
        stop = at + sum(1 for _ in run)
        if value:
            yield at, stop
        at = stop


def _without_overlap(matches: list[PassageMatch], tokens: int) -> list[PassageMatch]:
    """Return matches without overlap. Shorter matches keep only the hashes that no longer match covers."""
    disjoint_matches: list[PassageMatch] = []
    covered = np.zeros(tokens, bool)
    for match in sorted(matches, key=lambda match: (-match.num_hashes, match.at)):
        span = covered[match.at : match.stop]
        for low, high in _true_runs([not part.any() for part in span.reshape(-1, HASH_TOKENS)]):
            at = match.at + low * HASH_TOKENS
            disjoint_matches.append(PassageMatch(match.row, at, match.first + low, high - low))
        span[:] = True
    return sorted(disjoint_matches, key=lambda match: match.at)
