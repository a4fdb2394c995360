"""Share of a prefix's KV that was read for one answer, from any tier."""

from __future__ import annotations

from dataclasses import dataclass

from hf_tiered_cache import RequestStats


@dataclass(frozen=True)
class Reading:
    """Bytes read, in percent of all blocks with KV of the stored prefix. Padding of blocks counts in both.

    Args:
        read: Blocks with at least one token that the prompt attends to, counted in full.
        identified: Blocks that were read only to select tokens, without any selected token.
        brought: Sum of `read` and `identified`.
        answered: All blocks that were read until the answer was complete.
        per_token: Mean over the answer tokens after the first; None if there are none.
        index: Size of the index in memory that selections used, in percent of the KV without padding; not part of
            `brought`.
    """

    read: float
    identified: float
    brought: float
    answered: float
    per_token: float | None
    index: float


def reading_of(prefix_bytes: int, kv: int, prompt: RequestStats, answered: RequestStats, tokens: int) -> Reading:
    """Convert byte counts of one request into percentages.

    Args:
        prefix_bytes: bytes of all blocks with KV of the prefix.
        kv: bytes of the KV of the prefix, without padding.
        prompt: Statistics at the first new token.
        answered: Statistics at the end of the answer.
        tokens: Number of forward passes after that of the prompt, one per answer token.
    """

    def share(nbytes: float) -> float:
        return 100 * nbytes / prefix_bytes

    delivered, identifying = prompt.details.bytes_delivered, prompt.details.bytes_delivered_identifying
    return Reading(
        read=share(delivered - identifying),
        identified=share(identifying),
        brought=share(delivered),
        answered=share(answered.details.bytes_delivered),
        per_token=share((answered.details.bytes_delivered - delivered) / tokens) if tokens else None,
        index=100 * prompt.details.index_bytes / kv,
    )
