"""What is stored of a prompt: the longest prefix, as a walk over the tree of segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..store.catalogue import SegmentRow
from ..store.format import LINK_BYTES


@dataclass(frozen=True)
class MatchedRun:
    """The first `links` links of a segment are the prompt's links from number `start` on."""

    row: SegmentRow
    start: int
    links: int

    @property
    def stop(self) -> int:
        return self.start + self.links


def longest_prefix(links: Sequence[bytes], rows: Iterable[SegmentRow], start: int = 0) -> list[MatchedRun]:
    """The fewest runs of segments that cover as many of the prompt's links from `start` on as can be covered.

    A segment is a node, found under its first link. Usually the next node begins where the last one ends or where
    the prompt leaves it; where writers raced, nodes overlap, and then the one that reaches furthest is taken.

    Args:
        links: of the prompt.
        rows: the segments whose first link is one of `links`.
        start: links before it are held already; the first run may begin among them.
    """
    nodes: dict[bytes, list[SegmentRow]] = {}
    for row in rows:
        nodes.setdefault(row.first, []).append(row)
    runs: list[MatchedRun] = []
    covered, furthest = start, None
    for at, link in enumerate(links):
        for row in nodes.get(link, ()):
            run = MatchedRun(row, at, _shared(row, links, at))
            if furthest is None or run.stop > furthest.stop:
                furthest = run
        if at == covered:
            if furthest is None or furthest.stop <= covered:
                break
            if runs:
                runs[-1] = replace(runs[-1], links=furthest.start - runs[-1].start)
            runs.append(furthest)
            covered = furthest.stop
    return runs


def _shared(row: SegmentRow, links: Sequence[bytes], at: int) -> int:
    """How many links of the segment are the prompt's from `at` on."""
    most = min(row.usable_links, len(links) - at)
    for i in range(most):
        if row.chain[i * LINK_BYTES : (i + 1) * LINK_BYTES] != links[at + i]:
            return i
    return most
