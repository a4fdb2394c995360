"""Selection of whole chunks within a token budget, by the attention that their tokens get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """Chunks that hold a row's restored tokens: one set for all KV heads, or one per KV head.

    Args:
        chunk: Chunk number of each token, int64 `[sets, tokens]`.
        place: Index of each token among the row's tokens in its chunk, in the order of slots, int64 `[sets, tokens]`.
    """

    chunk: np.ndarray
    place: np.ndarray

    @classmethod
    def by_slot(cls, slots: np.ndarray, chunk_tokens: int) -> ChunkMap:
        """Create the map of chunks that consist of consecutive slots.

        Args:
            slots: Slot of each token, int64 `[sets, tokens]`, distinct within a set.
            chunk_tokens: Slots per chunk. Some slots may hold no token of the row.
        """
        order = np.argsort(slots, axis=1, kind="stable")  # [sets, tokens]: tokens by slot
        number = np.take_along_axis(slots, order, 1) // chunk_tokens
        begins = np.diff(number, axis=1, prepend=-1) > 0
        first = np.maximum.accumulate(np.where(begins, np.arange(slots.shape[1]), 0), axis=1)
        chunk, place = np.empty_like(slots), np.empty_like(slots)
        np.put_along_axis(chunk, order, np.cumsum(begins, axis=1) - 1, 1)
        np.put_along_axis(place, order, np.arange(slots.shape[1]) - first, 1)
        return cls(chunk, place)

    @property
    def tokens(self) -> int:
        """Number of restored tokens of the row."""
        return self.chunk.shape[1]

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of tokens per chunk, int64 `[sets, chunks]`; 0 for trailing chunks of sets with fewer chunks."""
        return self.sums(np.ones(self.chunk.shape)).astype(np.int64)

    def sums(self, mass: np.ndarray) -> np.ndarray:
        """Return the mass of each chunk: float64 `[rows, chunks]`.

        Args:
            mass: Mass of each token, float `[rows, tokens]`: one row per set, or several rows if there is a single set.
        """
        rows, chunks = len(mass), self._chunks
        apart = self.chunk + chunks * np.arange(rows)[:, None]  # [rows, tokens]
        return np.bincount(apart.ravel(), mass.ravel(), rows * chunks).reshape(rows, chunks)

    @cached_property
    def _chunks(self) -> int:
        return int(self.chunk.max()) + 1


def budgeted_tokens(budget: float, tokens: int, chunk_tokens: int) -> int:
    """Return the number of tokens that a budget buys: max(1, floor(budget · chunks)) whole chunks, or all."""
    if budget >= 1:
        return tokens
    chunks = -(-tokens // chunk_tokens)
    # 1e-9 corrects floating-point error: 0.29 * 100 is slightly less than 29
    return min(tokens, max(1, int(budget * chunks + 1e-9)) * chunk_tokens)


def top_chunks(mass: np.ndarray, chunks: ChunkMap, count: int) -> np.ndarray:
    """Select the `count` tokens of the chunks with the most attention, separately for each row of `mass`.

    Chunks are ranked by the mean mass of their tokens, so a shorter chunk has no disadvantage. The first chunk wins
    ties. The last selected chunk is truncated, so that every row and layer has the same number of tokens.

    Args:
        mass: float32 `[rows, tokens]`, non-negative: one row per set of chunks, or several rows if there is a single
            set.
        chunks: Chunks that hold the tokens.
        count: Number of tokens to select, at most the number of tokens.

    Returns:
        Selected tokens, int64 `[rows, count]`, ascending.
    """
    _, order, sizes = _best_first(mass, chunks)
    before = sizes.cumsum(axis=1) - sizes
    taken = np.empty_like(sizes)  # number of tokens taken from each chunk
    np.put_along_axis(taken, order, np.clip(count - before, 0, sizes), 1)
    chunk, place = (np.broadcast_to(each, mass.shape) for each in (chunks.chunk, chunks.place))
    return np.nonzero(place < np.take_along_axis(taken, chunk, 1))[1].reshape(len(mass), count)


def tokens_of_mass(mass: np.ndarray, chunks: ChunkMap, share: float) -> int:
    """Return the number of tokens in the fewest chunks that hold a share of the mass, best first as in `top_chunks`.

    Args:
        mass: float32 `[rows, tokens]`, non-negative. All rows take the same number of chunks; the share is of all rows
            together.
        chunks: Chunks that hold the tokens.
        share: Share of the total mass, above 0 and at most 1.

    Returns:
        Largest number of tokens of a row; at least one chunk is taken.
    """
    sums, order, sizes = _best_first(mass, chunks)
    held = np.take_along_axis(sums, order, 1).cumsum(axis=1).sum(axis=0)  # mass of the best n chunks, summed over rows
    enough = int(np.searchsorted(held, share * held[-1])) + 1
    return int(sizes[:, :enough].sum(axis=1).max())


def _best_first(mass: np.ndarray, chunks: ChunkMap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return chunk masses, chunk numbers by mean token mass, best first, and their token counts: `[rows, chunks]`."""
    sums = chunks.sums(mass)
    counts = np.broadcast_to(chunks.counts, sums.shape)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -1)
    order = np.argsort(-means, axis=1, kind="stable")
    return sums, order, np.take_along_axis(counts, order, 1)
