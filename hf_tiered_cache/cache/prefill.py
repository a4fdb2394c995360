"""Chunked prefill for prompts that exceed memory: each piece is computed, stored and released before the next one.

Each piece attends to all earlier tokens, which are read from the store layer by layer (`selection/streamed.py`). Memory
therefore holds one piece and two runs of one layer, and the disk bounds the prompt length (KVDRIVE, Section 7).
"""

from __future__ import annotations

from collections.abc import Callable

from tqdm.auto import tqdm

from ..identity import rope_regime
from ..methods import BudgetMethod
from ..restore.plan import Plan
from ..stats import StatsCollector
from ..store.geometry import HASH_TOKENS
from .request import Request
from .sequence import SequenceState

_TRIES = 2
"""Number of times that prefill goes back because stored pieces have disappeared; then the rest is computed at once."""


def can_be_cut(sequence: SequenceState, request: Request) -> bool:
    """Return whether a prompt is computed in pieces, with the same KV as in a single pass."""
    method = sequence.method
    if not isinstance(method, BudgetMethod):
        return False
    step = method.prefill_tokens
    return (
        0 < step < request.num_positions - min(request.pads)
        and method.selects
        and sequence.num_positions == 0
        and sequence.recorder.enabled
        and request.text == request.num_positions
        and request.must_compute <= step // 2
        and rope_regime(sequence.config, step) == sequence.regime
    )


def in_pieces(
    request: Request, sequence: SequenceState, run: Callable[[Request, int], int], stored: int, progress: bool
) -> None:
    """Compute and store all pieces of a prompt, one row, but the last, which is left to the caller.

    Args:
        request: Request for the whole prompt.
        sequence: State of the cache, which is empty between pieces.
        run: Called with the request for a beginning of the prompt, and the number of its positions that should be
            stored. Computes and stores the rest and clears the cache, or does nothing if fewer positions are stored.
            Returns the number of positions that were stored.
        stored: Number of positions of the prompt that are stored already.
        progress: Whether to show a progress bar.
    """
    method = sequence.method
    assert isinstance(method, BudgetMethod)
    step, end, tries = method.prefill_tokens, request.num_positions, _TRIES
    sequence.stored_in_pieces = {}
    if end - stored <= step:
        return
    shortest = max(request.must_compute, min(step // 2, method.observed))  # minimum length of the last piece
    with tqdm(total=end, initial=stored, unit="token", desc="prefill", disable=not progress) as bar:
        while end - stored > step and tries:
            stop = min(stored + step, end - shortest) // HASH_TOKENS * HASH_TOKENS
            before = run(request.beginning(stop), stored)
            if before <= stored - HASH_TOKENS:
                stored, tries = before, tries - 1
            else:
                stored = stop
            bar.update(stored - bar.n)
        bar.update(end - bar.n)


def store_piece(sequence: SequenceState, piece: Request, plan: Plan | None, collector: StatsCollector) -> None:
    """Store a computed piece of a longer prompt, a single row, and remove it from the history."""
    rows, num_positions = piece.ids.shape
    computed = rows * num_positions - sum(piece.pads) - (plan.restored_tokens if plan is not None else 0)
    collector.add(tokens_computed=computed)
    sequence.stored_in_pieces[0] = sequence.stored_in_pieces.get(0, 0) + computed
    sequence.recorder.end(piece.ids, num_positions if plan is None else len(plan.computed[0]))
    sequence.recorder.seal()
    sequence.recorder.crop(num_positions)
