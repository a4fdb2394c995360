"""Stored passages anywhere in a prompt (CacheTune, Section 4): found by their tokens, in one scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig

from ..geometry import HASH_TOKENS
from ..store.catalogue import SegmentRow
from ..store.format import HASH_BYTES
from ..store.segment import SegmentReader
from .plan import SegmentSlice
from .prefix_hasher import PrefixHasher


@dataclass(frozen=True)
class PassageFinder:
    """Gives a planner the stored passages in a row.

    Args:
        hashers: that passages are hashed with, first of all the one of the row's own RoPE regime.
        sink: the token that stood before each passage when its KV was computed, or None.
        find: gives the segments that begin with one of some prefix hashes.
        reader: opens one of them, or gives None.
        begins: the tokens at which passages may begin, or None for any.
    """

    hashers: tuple[PrefixHasher, ...]
    sink: int | None
    find: Callable[[Sequence[bytes]], list[SegmentRow]]
    reader: Callable[[SegmentRow], SegmentReader | None]
    begins: tuple[int, ...] | None = None

    def __call__(self, tokens: np.ndarray, start: int) -> list[SegmentSlice]:
        """Where they stand in `tokens`, int64 `[n]`, from `start` on."""
        for number, hasher in enumerate(self.hashers):
            pieces = []
            for match in find_passages(tokens, hasher, self.find, start, self.begins):
                reader = self.reader(match.row)
                whole = 0 if reader is None else min(match.num_hashes, reader.shape.whole_hashes)
                exact = number == 0 and self._begins_with(tokens, match.at)
                if reader and whole and (exact or reader.shape.layout.position_independent):
                    pieces.append(SegmentSlice(reader, 0, whole * HASH_TOKENS, match.at, exact))
            if pieces:
                return pieces
        return []

    def _begins_with(self, tokens: np.ndarray, at: int) -> bool:
        """Whether a passage stands just where it stood when its KV was computed."""
        return at == 0 if self.sink is None else at == 1 and tokens[0] == self.sink


@dataclass(frozen=True)
class PassageMatch:
    """The first `num_hashes` hashes of a stored passage stand in the prompt from token `at` on."""

    row: SegmentRow
    at: int
    num_hashes: int

    @property
    def stop(self) -> int:
        return self.at + self.num_hashes * HASH_TOKENS


def sink_token(config: PreTrainedConfig) -> int | None:
    """What is set before a passage while its KV is computed, so that no token of it takes the part of the first."""
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, list):
            token = next(iter(token), None)
        if token is not None:
            return token
    return None


def find_passages(
    tokens: np.ndarray,
    hasher: PrefixHasher,
    find: Callable[[Sequence[bytes]], Iterable[SegmentRow]],
    start: int = 0,
    begins: Sequence[int] | None = None,
) -> list[PassageMatch]:
    """Where stored passages stand in a prompt, in order, none of them over another; the longest are taken first.

    Args:
        tokens: int64 `[n]`, the prompt.
        hasher: that passages are hashed with, each from its own beginning.
        find: gives the segments that begin with one of some prefix hashes.
        start: where to begin.
        begins: the tokens at which passages may begin, or None for any.
    """
    last = len(tokens) - HASH_TOKENS
    places = range(start, last + 1) if begins is None else sorted({i for i in begins if start <= i <= last})
    firsts = {at: hasher.hashes(tokens[at : at + HASH_TOKENS])[0] for at in places}
    known: dict[bytes, list[SegmentRow]] = {}
    for row in find(list(dict.fromkeys(firsts.values()))):
        known.setdefault(row.first, []).append(row)
    matches = []
    for at, first in firsts.items():
        rows = known.get(first, ())
        if rows:
            most = max(row.valid_hashes for row in rows)
            prefix_hashes = hasher.hashes(tokens[at : at + most * HASH_TOKENS])
            matches.append(
                max(
                    (PassageMatch(row, at, _shared(row, prefix_hashes)) for row in rows),
                    key=lambda match: match.num_hashes,
                )
            )
    return _disjoint(matches)


def _shared(row: SegmentRow, prefix_hashes: list[bytes]) -> int:
    """How many of the segment's prefix hashes these are."""
    most = min(row.valid_hashes, len(prefix_hashes))
    for i in range(most):
        if row.chain[i * HASH_BYTES : (i + 1) * HASH_BYTES] != prefix_hashes[i]:
            return i
    return most


def _disjoint(matches: list[PassageMatch]) -> list[PassageMatch]:
    """The longest ones, and of the others what stands before these: a passage's beginning is of use without its end."""
    taken: list[PassageMatch] = []
    for match in sorted(matches, key=lambda match: (-match.num_hashes, match.at)):
        if any(other.at <= match.at < other.stop for other in taken):
            continue
        room = min((other.at for other in taken if other.at > match.at), default=match.stop) - match.at
        if (num_hashes := min(match.num_hashes, room // HASH_TOKENS)) > 0:
            taken.append(PassageMatch(match.row, match.at, num_hashes))
    return sorted(taken, key=lambda match: match.at)
