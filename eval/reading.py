"""What came of a prefix's KV for one answer, from whichever tier."""

from __future__ import annotations

from dataclasses import dataclass

from hf_tiered_cache import RequestStats


@dataclass(frozen=True)
class Reading:
    """Bytes in percent of what all KV of the stored prefix takes in blocks, in which padding counts as it does here.

    Args:
        read: of blocks that hold something that the prompt attends to, whole, whatever of them it is.
        identified: of blocks that the prompt's choices were made from, and that hold nothing of what was chosen.
        guessed: of blocks that came for a choice that fell otherwise.
        brought: these three together.
        answered: all that came until the answer was there.
        per_token: all that came for a generated token, a mean over these; None if none was, but the first.
        index: of the index in memory that was chosen by, in percent of the KV itself; no part of `brought`.
    """

    read: float
    identified: float
    guessed: float
    brought: float
    answered: float
    per_token: float | None
    index: float


def reading_of(whole: int, kv: int, prompt: RequestStats, answered: RequestStats, tokens: int) -> Reading:
    """What was counted, as shares.

    Args:
        whole: bytes that all KV of the prefix takes in blocks.
        kv: its own, without padding.
        prompt: when the first new token was there.
        answered: when the answer was there.
        tokens: of the answer that a pass of their own gave.
    """

    def share(nbytes: float) -> float:
        return 100 * nbytes / whole

    brought, in_vain = prompt.bytes_brought, prompt.brought_identifying + prompt.brought_guessed
    return Reading(
        read=share(brought - in_vain),
        identified=share(prompt.brought_identifying),
        guessed=share(prompt.brought_guessed),
        brought=share(brought),
        answered=share(answered.bytes_brought),
        per_token=share((answered.bytes_brought - brought) / tokens) if tokens else None,
        index=100 * prompt.index_bytes / kv,
    )
