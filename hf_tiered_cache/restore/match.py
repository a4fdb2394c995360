"""Search for the longest stored prefix of a prompt in the tree of segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..store.catalogue import SegmentRow
from ..store.format import HASH_BYTES


@dataclass(frozen=True)
class MatchedRun:
    """Run of a segment's first `num_hashes` prefix hashes that equal those of the prompt from index `start` on."""

    row: SegmentRow
    start: int
    num_hashes: int

    @property
    def stop(self) -> int:
        return self.start + self.num_hashes


def longest_prefix(prefix_hashes: Sequence[bytes], rows: Iterable[SegmentRow], start: int = 0) -> list[MatchedRun]:
    """Return the fewest segment runs that cover the longest stored run of prefix hashes from `start` on.

    A segment is a node, found by its first prefix hash. Usually the next node begins where the last one ends or where
    the prompt diverges from it. After a race of writers nodes overlap; then the one that reaches furthest is taken.

    Args:
        prefix_hashes: Prefix hashes of the prompt.
        rows: Segments whose first prefix hash is in `prefix_hashes`.
        start: Index of the first prefix hash that the cache does not hold yet; the first run may begin before it.
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
    """Return the number of leading prefix hashes of the segment that equal the prompt's from `at` on."""
    most = min(row.valid_hashes, len(prefix_hashes) - at)
    for i in range(most):
        if row.chain[i * HASH_BYTES : (i + 1) * HASH_BYTES] != prefix_hashes[at + i]:
            return i
    return most
