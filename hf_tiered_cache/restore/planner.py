"""From a prompt to a plan: look up what is stored of each row, and let the method say what to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..geometry import HASH_TOKENS
from ..store.segment import SegmentReader
from .columns import Columns
from .history import History
from .match import MatchedRun
from .plan import Plan, PlanContext, RowGroup, SegmentSlice, UnderWay

Find = Callable[[np.ndarray, int], list[SegmentSlice]]
"""Returns where stored passages stand in a row's tokens, from that one on: in order, apart from one another."""

Match = Callable[[list[bytes], int], list[tuple[MatchedRun, SegmentReader]]]
"""Returns what is stored of a sequence of prefix hashes, without a gap from that number on."""


class Rules(Protocol):
    """What a method has to say on a plan (see `Method`)."""

    def positions_to_compute(self, context: PlanContext) -> tuple[Columns, ...]: ...

    def under_way(self, context: PlanContext) -> UnderWay | None: ...

    def token_budget(self, prefix_tokens: int) -> int: ...

    def streams(self, tokens: int) -> bool: ...


@dataclass(frozen=True)
class PrefixLookup:
    """What is stored of some rows: `segments` hold their prefix hashes from `held` up to `num_hashes`."""

    rows: tuple[int, ...]
    held: int
    num_hashes: int
    segments: tuple[str, ...]


def make_plan(
    history: History,
    ids: np.ndarray,
    must_compute: int,
    rules: Rules,
    layers: int,
    match: Match,
    find: Find | None = None,
) -> tuple[Plan | None, list[PrefixLookup]]:
    """Plan a pass.

    Args:
        history: what the cache holds.
        ids: int64 `[rows, columns]`, what the pass adds.
        must_compute: columns at the end whose outputs are asked for.
        rules: say what to compute, and how much of the rest may be attended to.
        layers: of the model.
        match: looks up.
        find: looks for passages behind what is matched; or None.

    Returns:
        The plan, or None if nothing can be restored; and what was found.
    """
    base, columns = history.columns, ids.shape[1]
    whole_rows = np.concatenate([history.ids(), ids], axis=1)
    alike: dict[tuple[int, bytes], list[int]] = {}
    for row, pad in enumerate(history.pads):
        alike.setdefault((pad, whole_rows[row][pad:].tobytes()), []).append(row)
    groups, found, restorable = [], [], columns
    for (pad, _), rows in alike.items():
        held = max(0, base - pad) // HASH_TOKENS
        pieces, tokens = [], held * HASH_TOKENS
        for run, reader in match(history.prefix_hashes_with(rows[0], ids[rows[0]]), held):
            pieces.append(SegmentSlice(reader, 0, run.num_hashes * HASH_TOKENS, run.start * HASH_TOKENS))
            tokens = run.stop * HASH_TOKENS
        found.append(PrefixLookup(tuple(rows), held, tokens // HASH_TOKENS, tuple(piece.reader.id for piece in pieces)))
        if find is not None:  # of what the cache holds a part's beginning may be known
            known = base - pad
            start = tokens if tokens > known else max(0, known - (HASH_TOKENS - 1))
            pieces += find(whole_rows[rows[0]][pad:], start)
        groups.append(RowGroup(tuple(rows), pad, tuple(pieces)))
        restorable = min(restorable, max(0, pad + tokens - base))
    if not any(group.pieces for group in groups):
        return None, found  # padding alone, which every row may have, is no plan
    context = PlanContext(base, columns, restorable, must_compute, layers, tuple(groups))
    plan = Plan(base, columns, rules.positions_to_compute(context), tuple(groups))
    if not plan.exact:
        plan = replace(plan, under_way=rules.under_way(context))
    if not plan.restored_tokens and plan.computed[-1].shape[-1] == columns:
        return None, found
    longest = (plan.suffix or 0) - min(history.pads)  # of a batch's rows: all attend to as many tokens as it may
    if base == 0 and longest > 0 and (budget := rules.token_budget(longest)) < longest:
        plan = replace(plan, budget_tokens=budget, streamed=rules.streams(columns - (plan.suffix or 0)))
    return plan, found
