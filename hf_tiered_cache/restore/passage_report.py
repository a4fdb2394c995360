"""What became of the stored passages that stand in a prompt: how much of each was found, and why not all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..geometry import HASH_TOKENS
from ..stats import PassageStats
from ..store.format import HASH_BYTES, is_passage
from ..store.segment import SegmentReader
from .plan import RowGroup, SegmentSlice
from .prefix_hasher import PassageHasher

CUT = "cut off by the prompt's beginning or end"
UNREADABLE = "damaged, or not stored"
COVERED = "under a stored prefix or another passage, or where a chunk of the prompt ended"
CHANGED = "changed, or merged by the tokenizer where texts were joined: take build_prompt()"
NOTHING_BEGINS = "nothing is stored that begins here"
TOO_SHORT = f"fewer than {HASH_TOKENS} tokens, which are never stored"
_DRIFT = 64
"""Tokens that a part of a passage may be off from where the part before says that it stands: some were put in, or left
out."""


@dataclass
class _Passage:
    """A stored passage in a row: which of its parts were found, and at which tokens."""

    row: int
    reader: SegmentReader
    at: dict[int, int] = field(default_factory=dict)

    def takes(self, row: int, reader: SegmentReader, part: int, at: int) -> bool:
        """Whether a part may be one of this passage that stands behind those that are known."""
        if (row, reader.id) != (self.row, self.reader.id):
            return False
        last = max(self.at)
        drift = at - self.at[last] - (part - last) * HASH_TOKENS
        return part > last and abs(drift) <= _DRIFT


class PassageReport:
    """The passages of a cache's prompt, filled in pass by pass."""

    def __init__(self) -> None:
        self._passages: list[_Passage] = []

    def fork(self) -> PassageReport:
        """A copy that goes its own way."""
        twin = PassageReport()
        twin._passages = [replace(passage, at=dict(passage.at)) for passage in self._passages]
        return twin

    def add(self, groups: Sequence[RowGroup], base: int) -> None:
        """Take in what a pass behind `base` columns has restored; what is known of later ones was taken back."""
        for passage in self._passages:
            passage.at = {part: at for part, at in passage.at.items() if at < base}
        self._passages = [passage for passage in self._passages if passage.at]
        for group in groups:
            for piece in group.pieces:
                if is_passage(piece.reader.header.provenance):
                    self._add(group.rows[0], piece)

    def _add(self, row: int, piece: SegmentSlice) -> None:
        first = piece.first // HASH_TOKENS
        known = (each for each in reversed(self._passages) if each.takes(row, piece.reader, first, piece.at))
        if (passage := next(known, None)) is None:
            passage = _Passage(row, piece.reader)
            self._passages.append(passage)
        for number in range(piece.count // HASH_TOKENS):
            passage.at[first + number] = piece.at + number * HASH_TOKENS

    def joined(self, rows: Sequence[np.ndarray], hashers: Sequence[PassageHasher]) -> bool:
        """Whether some passage stands in a row, but for its first or last tokens: so it looks where texts were joined.

        Its first tokens alone are no sign of that: passages may begin alike, with a heading.

        Args:
            rows, hashers: as for `told`.
        """
        for passage in self._passages:
            ends = {0, passage.reader.shape.tokens // HASH_TOKENS - 1}
            changed = _missed(passage, rows[passage.row], hashers).get(CHANGED)
            if changed and ends.issuperset(changed) and max(passage.at) > 0:
                return True
        return False

    def told(
        self, rows: Sequence[np.ndarray], hashers: Sequence[PassageHasher], begins: Sequence[int] | None
    ) -> list[PassageStats]:
        """What is known of each.

        Args:
            rows: the tokens of each row, int64 `[n]`, without padding.
            hashers: that passages are hashed with.
            begins: the tokens at which passages were said to begin, or None.
        """
        found = [_told(passage, rows[passage.row], hashers) for passage in self._passages]
        if begins is not None:
            for row, tokens in enumerate(rows):
                found += _unknown(row, len(tokens), begins, {each.at for each in found if each.row == row})
        return sorted(found, key=lambda each: (each.row, each.at))


def _told(passage: _Passage, tokens: np.ndarray, hashers: Sequence[PassageHasher]) -> PassageStats:
    reader, missed = passage.reader, _missed(passage, tokens, hashers)
    first = min(passage.at)
    begin = passage.at[first] - first * HASH_TOKENS
    why = "; ".join(f"{len(parts) * HASH_TOKENS} tokens {reason}" for reason, parts in missed.items())
    found = len(passage.at) * HASH_TOKENS
    return PassageStats(passage.row, begin, reader.shape.tokens, found, why, reader.id, reader.header.label)


def _missed(passage: _Passage, tokens: np.ndarray, hashers: Sequence[PassageHasher]) -> dict[str, list[int]]:
    """The parts of a passage that were not found, by the reason why."""
    reader, missed = passage.reader, dict[str, list[int]]()
    first = min(passage.at)
    offset = passage.at[first] - first * HASH_TOKENS
    for part in range(reader.shape.tokens // HASH_TOKENS):
        if part in passage.at:
            offset = passage.at[part] - part * HASH_TOKENS
        else:
            why = _why(reader, part, tokens, offset + part * HASH_TOKENS, hashers)
            missed.setdefault(why, []).append(part)
    return missed


def _why(reader: SegmentReader, part: int, tokens: np.ndarray, at: int, hashers: Sequence[PassageHasher]) -> str:
    """Why a part of a passage was not found at a token."""
    if at < 0 or at + HASH_TOKENS > len(tokens):
        return CUT
    mine = reader.chain[part * HASH_BYTES : (part + 1) * HASH_BYTES]
    if not any(hasher.hashes(tokens[at : at + HASH_TOKENS]) == [mine] for hasher in hashers):
        return CHANGED
    return COVERED if part < reader.shape.whole_hashes else UNREADABLE


def _unknown(row: int, tokens: int, begins: Sequence[int], known: set[int]) -> list[PassageStats]:
    """The passages that were said to begin somewhere, and do not."""
    inside = sorted({begin for begin in begins if 0 <= begin < tokens})
    ends = [*inside[1:], tokens]
    found = []
    for begin, end in zip(inside, ends, strict=True):
        if begin not in known:
            why = NOTHING_BEGINS if end - begin >= HASH_TOKENS else TOO_SHORT
            found.append(PassageStats(row, begin, end - begin, 0, why))
    return found
