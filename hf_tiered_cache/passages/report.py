"""Report on the stored passages of a prompt: how many tokens of each were found, and why the others were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..restore.hashes import PassageHasher
from ..restore.rows import RowGroup
from ..stats import PassageStats
from ..store import HASH_BYTES
from ..store.format import is_passage
from ..store.geometry import HASH_TOKENS
from ..store.segment import SegmentReader

CUT = "cut off by the prompt's beginning or end"
UNREADABLE = "damaged, or not stored"
COVERED = "covered by a stored prefix or another passage, or at the end of a chunk of the prompt"
CHANGED = "changed, or merged by the tokenizer where texts were joined; use build_prompt()"
_DRIFT = 64
"""Maximum distance in tokens between a part and the position predicted by the part before it: tokens may have been
inserted or removed."""


@dataclass
class _Passage:
    """Stored passage in a row, with the token positions of the parts found."""

    row: int
    reader: SegmentReader
    at: dict[int, int] = field(default_factory=dict)

    def takes(self, row: int, reader: SegmentReader, part: int, at: int) -> bool:
        """Return whether a part may be a later part of this passage."""
        if (row, reader.id) != (self.row, self.reader.id):
            return False
        last = max(self.at)
        drift = at - self.at[last] - (part - last) * HASH_TOKENS
        return part > last and abs(drift) <= _DRIFT


@dataclass
class PassageReport:
    """Passages of a cache's prompt, updated pass by pass."""

    _passages: list[_Passage] = field(default_factory=list)

    def fork(self) -> PassageReport:
        """Return an independent copy."""
        return PassageReport([replace(passage, at=dict(passage.at)) for passage in self._passages])

    def add(self, groups: Sequence[RowGroup], base: int, pads: Sequence[int]) -> None:
        """Record what a pass restored. Discard earlier records of positions that it computes again.

        The pass began after `base` positions, which include the left padding `pads` of each row.
        """
        for passage in self._passages:
            row_base = base - pads[passage.row]  # in the row's own tokens
            passage.at = {part: at for part, at in passage.at.items() if at < row_base}
        self._passages = [passage for passage in self._passages if passage.at]
        pieces = [(group.rows[0], piece) for group in groups for piece in group.pieces]
        for row, piece in [(row, piece) for row, piece in pieces if is_passage(piece.reader.header.provenance)]:
            first, key = piece.first // HASH_TOKENS, (row, piece.reader)
            known_passage = next((entry for entry in self._passages[::-1] if entry.takes(*key, first, piece.at)), None)
            if known_passage is None:
                self._passages.append(known_passage := _Passage(*key))
            for number in range(piece.count // HASH_TOKENS):
                known_passage.at[first + number] = piece.at + number * HASH_TOKENS

    def passage_stats(
        self, rows: Sequence[np.ndarray], hashers: Sequence[PassageHasher]
    ) -> tuple[list[PassageStats], bool]:
        """Return the statistics of each passage, and whether tokens seem to have changed where texts were joined.

        That is suggested by a passage that was found except for its first or last part. A match of the first part alone
        does not count: passages may begin alike, for example with a heading.

        Args:
            rows: Tokens of each row, int64 `[n]`, without padding.
            hashers: Hashers of the passages.
        """
        stats, is_joined = list[PassageStats](), False
        for passage in self._passages:
            reader, first = passage.reader, min(passage.at)
            begin, tokens = passage.at[first] - first * HASH_TOKENS, reader.shape.tokens
            missing_parts = _missing_parts(passage, rows[passage.row], hashers)
            if (changed := missing_parts.get(CHANGED)) and max(passage.at) > 0:
                is_joined |= {0, tokens // HASH_TOKENS - 1}.issuperset(changed)
            reasons = "; ".join(
                f"{len(parts) * HASH_TOKENS} tokens {reason}" for reason, parts in missing_parts.items()
            )
            num_found = len(passage.at) * HASH_TOKENS
            statistics = PassageStats(passage.row, begin, tokens, num_found, reasons, reader.id, reader.header.label)
            stats.append(statistics)
        return sorted(stats, key=lambda entry: (entry.row, entry.start)), is_joined


def _missing_parts(passage: _Passage, tokens: np.ndarray, hashers: Sequence[PassageHasher]) -> dict[str, list[int]]:
    """Return the parts of a passage that were not found, by reason."""
    reader, missing_parts = passage.reader, dict[str, list[int]]()
    first = min(passage.at)
    offset = passage.at[first] - first * HASH_TOKENS
    for part in range(reader.shape.tokens // HASH_TOKENS):
        if part in passage.at:
            offset = passage.at[part] - part * HASH_TOKENS
        else:
            reason = _reason(reader, part, tokens, offset + part * HASH_TOKENS, hashers)
            missing_parts.setdefault(reason, []).append(part)
    return missing_parts


def _reason(reader: SegmentReader, part: int, tokens: np.ndarray, at: int, hashers: Sequence[PassageHasher]) -> str:
    """Return the reason why a part of a passage was not found at a token position."""
    if at < 0 or at + HASH_TOKENS > len(tokens):
        return CUT
    stored_hash = reader.chain[part * HASH_BYTES : (part + 1) * HASH_BYTES]
    if not any(hasher.hashes(tokens[at : at + HASH_TOKENS]) == [stored_hash] for hasher in hashers):
        return CHANGED
    return COVERED if part < reader.shape.whole_hashes else UNREADABLE
