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
    _, order = _best_first(mass, chunks)
    sizes = chunks.counts[order]
    taken = np.clip(count - (sizes.cumsum() - sizes), 0, sizes)  # of each chunk, best first
    picked = order[taken > 0]
    place = np.argsort(picked)
    starts, taken = chunks.starts[picked[place]], taken[: len(picked)][place]
    before = taken.cumsum() - taken
    return np.repeat(starts - before, taken) + np.arange(count)


def tokens_of_mass(mass: np.ndarray, chunks: ChunkMap, share: float) -> int:
    """How many tokens the fewest chunks have that hold a share of what all tokens get; best first, as `top_chunks`.

    Args:
        mass: float32 `[tokens]`, not negative.
        chunks: how the tokens are cut.
        share: above 0 and at most 1.

    Returns:
        Those of one chunk at least.
    """
    sums, order = _best_first(mass, chunks)
    held = sums[order].cumsum()
    enough = int(np.searchsorted(held, share * held[-1])) + 1
    return int(chunks.counts[order[:enough]].sum())


def _best_first(mass: np.ndarray, chunks: ChunkMap) -> tuple[np.ndarray, np.ndarray]:
    """What each chunk gets, float64 `[chunks]`, and the chunks by the mean of their tokens, int64 `[chunks]`."""
    sums = np.add.reduceat(mass, chunks.starts, dtype=np.float64)
    return sums, np.argsort(-(sums / chunks.counts), kind="stable")
