"""Which restored tokens a budget buys: whole chunks by the attention they get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """The chunks that a row's restored tokens lie in: one set of them for all kv heads, or one for each.

    Args:
        chunk: int64 `[sets, tokens]`, the number of each token's chunk.
        place: int64 `[sets, tokens]`, how many tokens of the row stand before it in that chunk.
    """

    chunk: np.ndarray
    place: np.ndarray

    @classmethod
    def by_slot(cls, slots: np.ndarray, chunk_tokens: int) -> ChunkMap:
        """Make the map of chunks that hold tokens of consecutive slots.

        Args:
            slots: int64 `[sets, tokens]`, in each set distinct.
            chunk_tokens: slots of a chunk. Some may hold no token of the row.
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
        """How many tokens of the row are restored."""
        return self.chunk.shape[1]

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 `[sets, chunks]`, tokens of each; none of the last ones of a set that has fewer chunks than others."""
        return self.sums(np.ones(self.chunk.shape)).astype(np.int64)

    def sums(self, mass: np.ndarray) -> np.ndarray:
        """Return what the tokens of each chunk get together: float64 `[rows, chunks]`.

        Args:
            mass: float `[rows, tokens]`, a row for each set, or several where one set serves all.
        """
        rows, chunks = len(mass), self._chunks
        apart = self.chunk + chunks * np.arange(rows)[:, None]  # [rows, tokens]
        return np.bincount(apart.ravel(), mass.ravel(), rows * chunks).reshape(rows, chunks)

    @cached_property
    def _chunks(self) -> int:
        return int(self.chunk.max()) + 1


def budgeted_tokens(budget: float, tokens: int, chunk_tokens: int) -> int:
    """How many of `tokens` a budget buys: k = max(1, floor(budget · chunks)) whole chunks, or all there are."""
    if budget >= 1:
        return tokens
    chunks = -(-tokens // chunk_tokens)
    # a share such as 0.29 of 100 is 29 although 0.29 * 100 is a little less
    return min(tokens, max(1, int(budget * chunks + 1e-9)) * chunk_tokens)


def top_chunks(mass: np.ndarray, chunks: ChunkMap, count: int) -> np.ndarray:
    """Choose the `count` tokens of the chunks that get most attention, for each row of `mass` by itself.

    Chunks are ranked by the mean of their tokens' mass, so that a ragged one stands no worse than it deserves; of
    equals the first wins. The last chunk is cut where the count ends, so that every row and layer has as many tokens.

    Args:
        mass: float32 `[rows, tokens]`, not negative; a row for each set of chunks, or several where one serves all.
        chunks: how the tokens are cut.
        count: at most as many as there are.

    Returns:
        int64 `[rows, count]`, ascending.
    """
    _, order, sizes = _best_first(mass, chunks)
    before = sizes.cumsum(axis=1) - sizes
    taken = np.empty_like(sizes)  # of each chunk so many tokens
    np.put_along_axis(taken, order, np.clip(count - before, 0, sizes), 1)
    chunk, place = (np.broadcast_to(each, mass.shape) for each in (chunks.chunk, chunks.place))
    return np.nonzero(place < np.take_along_axis(taken, chunk, 1))[1].reshape(len(mass), count)


def tokens_of_mass(mass: np.ndarray, chunks: ChunkMap, share: float) -> int:
    """How many tokens the fewest chunks have that hold a share of what all tokens get; best first, as `top_chunks`.

    Args:
        mass: float32 `[rows, tokens]`, not negative. Rows take as many chunks, which hold the share in the mean.
        chunks: how the tokens are cut.
        share: above 0 and at most 1.

    Returns:
        Those of one chunk at least.
    """
    sums, order, sizes = _best_first(mass, chunks)
    held = np.take_along_axis(sums, order, 1).cumsum(axis=1).sum(axis=0)  # of so many chunks, all rows together
    enough = int(np.searchsorted(held, share * held[-1])) + 1
    return int(sizes[:, :enough].sum(axis=1).max())


def _best_first(mass: np.ndarray, chunks: ChunkMap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each chunk gets, the chunks by the mean of their tokens, and then their tokens: all `[rows, chunks]`."""
    sums = chunks.sums(mass)
    counts = np.broadcast_to(chunks.counts, sums.shape)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -1)
    order = np.argsort(-means, axis=1, kind="stable")
    return sums, order, np.take_along_axis(counts, order, 1)
