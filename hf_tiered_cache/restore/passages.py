"""Search for stored passages anywhere in a prompt (CacheTune, Section 4): found by any part, in one scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from transformers import PreTrainedConfig

from ..geometry import HASH_TOKENS
from ..store.catalogue import SegmentRow
from ..store.format import HASH_BYTES, is_behind_text
from ..store.segment import SegmentReader
from .passage_index import Seeds
from .plan import SegmentSlice
from .prefix_hasher import PassageHasher


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


@dataclass(frozen=True)
class PassageFinder:
    """Finder of the stored passages in a row, for the planner.

    Args:
        hashers: Hashers of the passages, the one for the row's own RoPE regime first.
        sink: First token that preceded each passage when its KV was computed, or None.
        seeds: Returns the candidate parts of passages for scan hashes.
        reader: Opens the segment of a catalogue row, or returns None.
        begins: Token positions at which passages may begin, or None for any.
        scores: Returns the scores of a segment's tokens under the requested ranking, or None.
    """

    hashers: tuple[PassageHasher, ...]
    sink: int | None
    seeds: Callable[[np.ndarray], Seeds]
    reader: Callable[[SegmentRow], SegmentReader | None]
    begins: tuple[int, ...] | None = None
    scores: Callable[[SegmentReader], np.ndarray | None] = lambda reader: None

    def __call__(self, tokens: np.ndarray, start: int) -> list[SegmentSlice]:
        """Return the segment slices of the passages in `tokens`, int64 `[n]`, from token `start` on."""
        for number, hasher in enumerate(self.hashers):
            pieces = []
            for match in find_passages(tokens, hasher, self.seeds, start, self.begins):
                reader = self.reader(match.row)
                count = 0 if reader is None else min(match.num_hashes, reader.shape.whole_hashes - match.first)
                exact = number == 0 and self._is_exact(tokens, match, hasher)
                if reader and count > 0 and (exact or reader.shape.layout.position_independent):
                    first = match.first * HASH_TOKENS
                    scores = None if exact else self.scores(reader)
                    pieces.append(SegmentSlice(reader, first, count * HASH_TOKENS, match.at, exact, scores))
            if pieces:
                return pieces
        return []

    def _is_exact(self, tokens: np.ndarray, match: PassageMatch, hasher: PassageHasher) -> bool:
        """Return whether a passage has the same position and preceding tokens as when its KV was computed."""
        if is_behind_text(match.row.provenance):
            return False
        if match.begin != (0 if self.sink is None else 1) or (self.sink is not None and tokens[0] != self.sink):
            return False
        before = match.first * HASH_BYTES
        return b"".join(hasher.hashes(tokens[match.begin : match.at])) == match.row.chain[:before]


def sink_token(config: PreTrainedConfig) -> int | None:
    """Return the BOS, else EOS token, which precedes a passage while its KV is computed; None if there is none.

    It serves as the attention sink, so that no token of the passage does.
    """
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, list):
            token = next(iter(token), None)
        if token is not None:
            return token
    return None


def find_passages(
    tokens: np.ndarray,
    hasher: PassageHasher,
    seeds: Callable[[np.ndarray], Seeds],
    start: int = 0,
    begins: tuple[int, ...] | None = None,
) -> list[PassageMatch]:
    """Return the matches of stored passages in a prompt, in order and without overlap. Longer matches take precedence.

    If a passage occurs in changed form, each run of unchanged hashes is a match of its own.

    Args:
        tokens: int64 `[n]`, the prompt.
        hasher: Hasher of the passages.
        seeds: Returns the candidates for scan hashes, uint32 `[n - 15]`. Candidates are verified.
        start: First token to search.
        begins: Token positions at which passages may begin, or None for any.
    """
    found = seeds(hasher.scan(tokens[start:]))
    at, passage, part = found.at + start, found.passage, found.part
    valid = np.array([row.valid_hashes for row in found.rows], np.int64)
    keep = part < valid[passage] if len(valid) else np.zeros(0, bool)
    if begins is not None:
        keep &= np.isin(at - part * HASH_TOKENS, begins)
    run = _longest_runs(at[keep], passage[keep], part[keep])
    matches: list[PassageMatch] = []
    for one, begin, first, count in zip(*(each.tolist() for each in run), strict=True):
        matches += _compared(tokens, hasher, PassageMatch(found.rows[one], begin, first, count), start)
    return _disjoint(matches, len(tokens))


def _longest_runs(at: np.ndarray, passage: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, ...]:
    """Join consecutive parts into runs. Of parts that begin at the same token, keep the one in the longest run.

    Returns:
        For each run its passage, first token, first part and number of parts: int64 `[runs]` each.
    """
    for again in (False, True):
        begin = at - part * HASH_TOKENS
        order = np.lexsort((part, begin, passage))
        at, passage, part, begin = (each[order] for each in (at, passage, part, begin))
        goes_on = (np.diff(passage) == 0) & (np.diff(begin) == 0) & (np.diff(part) == 1)
        heads = np.flatnonzero(np.concatenate([[True] * bool(len(at)), ~goes_on]))
        counts = np.diff(np.append(heads, len(at)))
        if again:
            break
        run = np.repeat(np.arange(len(heads)), counts)
        order = np.lexsort((run, -counts[run], at))
        best = order[np.flatnonzero(np.diff(at[order], prepend=-1))]
        at, passage, part = at[best], passage[best], part[best]
    return passage[heads], at[heads], part[heads], counts


def _compared(tokens: np.ndarray, hasher: PassageHasher, match: PassageMatch, start: int) -> Iterator[PassageMatch]:
    """Yield the verified runs of a match, extended while further hashes match."""
    row, step, begin = match.row, HASH_TOKENS, match.begin

    def same(number: int) -> bool:
        at = begin + number * step
        return hasher.hashes(tokens[at : at + step]) == [row.chain[number * HASH_BYTES : (number + 1) * HASH_BYTES]]

    first, stop = match.first, match.first + match.num_hashes
    mine = hasher.hashes(tokens[match.at : match.stop])
    theirs = row.chain[first * HASH_BYTES : stop * HASH_BYTES]
    right = [True] * len(mine)
    if b"".join(mine) != theirs:
        right = [one == theirs[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i, one in enumerate(mine)]
    if right[0]:
        while first > 0 and begin + (first - 1) * step >= start and same(first - 1):
            first, right = first - 1, [True, *right]
    if right[-1]:
        most = min(row.valid_hashes, (len(tokens) - begin) // step)
        while stop < most and same(stop):
            stop, right = stop + 1, [*right, True]
    for low, high in _true_runs(right):
        yield PassageMatch(row, begin + (first + low) * step, first + low, high - low)


def _true_runs(values: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of true values."""
    at = 0
    for value, run in groupby(values):
        stop = at + sum(1 for _ in run)
        if value:
            yield at, stop
        at = stop


def _disjoint(matches: list[PassageMatch], tokens: int) -> list[PassageMatch]:
    """Return matches without overlap: the longest ones, and of the others the hashes with no token covered by these."""
    taken: list[PassageMatch] = []
    covered = np.zeros(tokens, bool)
    for match in sorted(matches, key=lambda match: (-match.num_hashes, match.at)):
        span = covered[match.at : match.stop]
        if not span.any():
            taken.append(match)
        else:
            free = [not bool(part.any()) for part in span.reshape(-1, HASH_TOKENS)]
            for low, high in _true_runs(free):
                at = match.at + low * HASH_TOKENS
                taken.append(PassageMatch(match.row, at, match.first + low, high - low))
        span[:] = True
    return sorted(taken, key=lambda match: match.at)
