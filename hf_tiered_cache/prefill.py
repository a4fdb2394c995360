"""Prompts longer than memory: computed in pieces, each of which is stored, and let go, before the next is computed.

A piece attends to all that stands before it, which comes from the store layer by layer (`restore/streamed.py`). So
memory holds a piece and two runs of a layer, and the prompt's length is bounded by the disk (KVDRIVE, Section 7).
"""

from __future__ import annotations

from collections.abc import Callable

from tqdm.auto import tqdm

from .geometry import HASH_TOKENS
from .identity import rope_regime
from .request import Request
from .sequence import SequenceState

_TRIES = 2
"""Times that pieces are computed anew because they are not stored any more; then the rest is computed at once."""


def can_be_cut(request: Request, sequence: SequenceState) -> bool:
    """Whether a prompt is computed in pieces, which gives the KV that computing it at once would give."""
    step = sequence.method.prefill_tokens
    shortest = step - max(request.pads)
    return (
        sequence.method.selects
        and 0 < step < request.columns
        and sequence.columns == 0
        and sequence.recorder.enabled
        and request.text == request.columns
        and request.must_compute <= step // 2
        and shortest > 0
        and rope_regime(sequence.config, shortest) == sequence.regime
    )


def in_pieces(
    request: Request, sequence: SequenceState, run: Callable[[Request, int], int], found: int, progress: bool
) -> None:
    """Compute and store a prompt up to its last piece, which is left to the caller.

    Args:
        request: asks for the whole prompt.
        sequence: is empty between pieces.
        run: computes a beginning of the prompt behind so many of its columns, stores it, and forgets it; unless fewer
            are stored: then it does nothing. Returns how many are stored before.
        found: columns of the prompt that are stored.
        progress: whether to show a bar.
    """
    step, end, tries = sequence.method.prefill_tokens, request.columns, _TRIES
    sequence.stored_in_pieces = 0
    if end - found <= step:
        return
    rest = max(request.must_compute, min(step // 2, sequence.method.observed))  # of the last piece, at least
    with tqdm(total=end, initial=found, unit="token", desc="prefill", disable=not progress) as bar:
        while end - found > step and tries:
            stop = min(found + step, end - rest) // HASH_TOKENS * HASH_TOKENS
            before = run(request.beginning(stop), found)
            if before <= found - HASH_TOKENS:
                found, tries = before, tries - 1
            else:
                found = stop
            bar.update(found - bar.n)
        bar.update(end - bar.n)
