"""Which restored tokens a budget buys: whole chunks by the attention they get."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
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
    counts = chunks.counts
    means = np.add.reduceat(mass.astype(np.float64), chunks.starts) / counts
    order = np.argsort(-means, kind="stable")
    cumulated = np.cumsum(counts[order])
    last = int(np.searchsorted(cumulated, count))
    taken = counts[order[: last + 1]].copy()
    taken[-1] -= cumulated[last] - count
    starts = chunks.starts[order[: last + 1]]
    # for each chunk its tokens from the first on: repeat starts, and count inside each
    inside = np.arange(count) - np.repeat(np.cumsum(taken) - taken, taken)
    return np.sort(np.repeat(starts, taken) + inside)
