"""Finds the longest stored prefix of a prompt by a walk over the tree of segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..store.catalogue import SegmentRow
from ..store.format import HASH_BYTES


@dataclass(frozen=True)
class MatchedRun:
    """The first `num_hashes` of a segment's prefix hashes are the prompt's from number `start` on."""

    row: SegmentRow
    start: int
    num_hashes: int

    @property
    def stop(self) -> int:
        return self.start + self.num_hashes


def longest_prefix(prefix_hashes: Sequence[bytes], rows: Iterable[SegmentRow], start: int = 0) -> list[MatchedRun]:
    """The fewest runs of segments that cover as many of the prompt's prefix hashes from `start` on as can be covered.

    A segment is a node, found under its first prefix hash. Usually the next node begins where the last one ends or
    where the prompt leaves it; where writers raced, nodes overlap, and then the one that reaches furthest is taken.

    Args:
        prefix_hashes: of the prompt.
        rows: the segments whose first prefix hash is one of `prefix_hashes`.
        start: prefix hashes before it are held already; the first run may begin among them.
    """
    nodes: dict[bytes, list[SegmentRow]] = {}
    for row in rows:
        nodes.setdefault(row.first, []).append(row)
    runs: list[MatchedRun] = []
    covered, furthest = start, None
    for at, prefix_hash in enumerate(prefix_hashes):
        for row in nodes.get(prefix_hash, ()):
            run = MatchedRun(row, at, _shared(row, prefix_hashes, at))
            if furthest is None or run.stop > furthest.stop:
                furthest = run
        if at == covered:
            if furthest is None or furthest.stop <= covered:
                break
            if runs:
                runs[-1] = replace(runs[-1], num_hashes=furthest.start - runs[-1].start)
            runs.append(furthest)
            covered = furthest.stop
    return runs


def _shared(row: SegmentRow, prefix_hashes: Sequence[bytes], at: int) -> int:
    """How many prefix hashes of the segment are the prompt's from `at` on."""
    most = min(row.valid_hashes, len(prefix_hashes) - at)
    for i in range(most):
        if row.chain[i * HASH_BYTES : (i + 1) * HASH_BYTES] != prefix_hashes[at + i]:
            return i
    return most
