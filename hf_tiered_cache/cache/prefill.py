"""Chunked prefill for prompts that exceed memory: each piece is computed, stored and released before the next one.

Each piece attends to all earlier tokens, which are read from the store layer by layer (`selection/streamed.py`). Memory
therefore holds one piece and two runs of one layer, and the disk bounds the prompt length (KVDRIVE, Section 7).
"""

from __future__ import annotations

from collections.abc import Callable

from tqdm.auto import tqdm

from ..methods import BudgetMethod
from ..store.geometry import HASH_TOKENS
from .request import Request
from .sequence import SequenceState

_TRIES = 2
"""Number of times that prefill goes back because stored pieces have disappeared; then the rest is computed at once."""


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
