"""Planning of a pass: finds the longest stored prefix of each row, and lets the method decide what to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..store import HASH_BYTES
from ..store.catalogue import SegmentRow
from ..store.geometry import HASH_TOKENS
from ..store.segment import SegmentReader
from .hashes import History
from .plan import DeferredChoice, Plan, PlanContext, Positions, RowGroup, SegmentSlice


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


Find = Callable[[np.ndarray, int], list[SegmentSlice]]
"""Function that returns the stored passages in a row's tokens, from a given token on: in order and without overlap."""

Match = Callable[[list[bytes], int], list[tuple[MatchedRun, SegmentReader]]]
"""Function that returns the segments that store a sequence of prefix hashes, without a gap from a given index on."""


@dataclass(frozen=True)
class PrefixLookup:
    """Lookup result of some rows: `segments` store their prefix hashes from `held` up to `num_hashes`."""

    rows: tuple[int, ...]
    held: int
    num_hashes: int
    segments: tuple[str, ...]


def make_plan(
    history: History,
    ids: np.ndarray,
    must_compute: int,
    compute: Callable[[PlanContext], tuple[Positions, ...]],
    layers: int,
    match: Match,
    find: Find | None = None,
    defer: Callable[[PlanContext], DeferredChoice | None] | None = None,
) -> tuple[Plan | None, list[PrefixLookup]]:
    """Plan a pass.

    Args:
        history: Tokens in the cache.
        ids: int64 `[rows, positions]`, tokens that the pass adds.
        must_compute: Number of last positions with requested outputs.
        compute: Returns the positions that each layer computes (see `Method.positions_to_compute`).
        layers: Number of layers of the model.
        match: Looks up prefix hashes.
        find: Finds passages after the matched prefix, or None.
        defer: Returns the choice that an inexact plan defers (see `Passages.deferred_choice`), or None.

    Returns:
        The plan, or None if nothing can be restored; and the lookup results.
    """
    base, num_positions = history.num_positions, ids.shape[1]
    whole_rows = np.concatenate([history.ids(), ids], axis=1)
    alike: dict[tuple[int, bytes], list[int]] = {}
    for row, pad in enumerate(history.pads):
        alike.setdefault((pad, whole_rows[row][pad:].tobytes()), []).append(row)
    groups, lookups, restorable = [], [], num_positions
    for (pad, _), rows in alike.items():
        cached_hashes = max(0, base - pad) // HASH_TOKENS
        pieces, tokens = [], cached_hashes * HASH_TOKENS
        row_tokens = whole_rows[rows[0]][pad:]
        for run, reader in match(history.prefix_hashes_of(rows[0], row_tokens), cached_hashes):
            pieces.append(SegmentSlice(reader, 0, run.num_hashes * HASH_TOKENS, run.start * HASH_TOKENS))
            tokens = (run.start + run.num_hashes) * HASH_TOKENS
        lookups.append(
            PrefixLookup(tuple(rows), cached_hashes, tokens // HASH_TOKENS, tuple(piece.reader.id for piece in pieces))
        )
        if find is not None:  # a part of a passage may begin among cached tokens
            cached_tokens = base - pad
            start = tokens if tokens > cached_tokens else max(0, cached_tokens - (HASH_TOKENS - 1))
            pieces += find(row_tokens, start)
        groups.append(RowGroup(tuple(rows), pad, tuple(pieces)))
        restorable = min(restorable, max(0, pad + tokens - base))
    if not any(group.pieces for group in groups):
        return None, lookups  # padding alone is not worth a plan
    context = PlanContext(base, num_positions, restorable, must_compute, layers, tuple(groups))
    plan = Plan(base, num_positions, compute(context), tuple(groups))
    if defer is not None and not plan.exact:
        choice = defer(context)
        plan = plan if choice is None else plan.with_choice(choice)
    if not plan.restored_tokens and plan.computed[-1].shape[-1] == num_positions:
        return None, lookups
    return plan, lookups
