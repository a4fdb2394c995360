"""Which restored tokens a budget buys: whole chunks by the attention they get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ChunkMap:
    """The chunks that a row's restored tokens lie in, in the order of the row.

    Args:
        starts: int64 `[chunks]`, the first restored token of each chunk, counted in the row's restored tokens.
        tokens: of the row, restored.
    """

    starts: np.ndarray
    tokens: int

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 `[chunks]`, tokens of each; whole chunks but for the ragged ends of segments."""
        return np.diff(self.starts, append=self.tokens)


def budgeted_tokens(budget: float, tokens: int, chunk_tokens: int) -> int:
    """How many of `tokens` a budget buys: k = max(1, floor(budget · chunks)) whole chunks, or all there are."""
    if budget >= 1:
        return tokens
    chunks = -(-tokens // chunk_tokens)
    # a share such as 0.29 of 100 is 29 although 0.29 * 100 is a little less
    return min(tokens, max(1, int(budget * chunks + 1e-9)) * chunk_tokens)


def top_chunks(mass: np.ndarray, chunks: ChunkMap, count: int) -> np.ndarray:
    """The `count` tokens of the chunks that get most attention.

    Chunks are ranked by the mean of their tokens' mass, so that a ragged one stands no worse than it deserves; of
    equals the first wins. The last chunk is cut where the count ends, so that every row and layer has as many tokens.

    Args:
        mass: float32 `[tokens]`.
        chunks: how the tokens are cut.
        count: at most as many as there are.

    Returns:
        int64 `[count]`, ascending.
    """
    means = np.add.reduceat(mass, chunks.starts, dtype=np.float64) / chunks.counts
    order = np.argsort(-means, kind="stable")
    sizes = chunks.counts[order]
    taken = np.clip(count - (sizes.cumsum() - sizes), 0, sizes)  # of each chunk, best first
    picked = order[taken > 0]
    place = np.argsort(picked)
    starts, taken = chunks.starts[picked[place]], taken[: len(picked)][place]
    before = taken.cumsum() - taken
    return np.repeat(starts - before, taken) + np.arange(count)
