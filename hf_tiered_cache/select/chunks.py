"""Which restored tokens a budget buys: whole chunks by the attention they get."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..transfers import to_device


@dataclass(frozen=True)
class ChunkMap:
    """The chunks that a row's restored tokens lie in, in the order of the row.

    Args:
        starts: int64 `[chunks]`, the first restored token of each chunk, counted in the row's restored tokens.
        tokens: of the row, restored.
    """

    starts: np.ndarray
    tokens: int

    _on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def counts(self) -> np.ndarray:
        """int64 `[chunks]`, tokens of each; whole chunks but for the ragged ends of segments."""
        return np.diff(self.starts, append=self.tokens)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of each chunk, int64 `[chunks, most]`, filled up with `tokens`, and `counts`; made once."""
        if device not in self._on:
            counts = self.counts
            inside = np.arange(counts.max())
            table = np.where(inside < counts[:, None], self.starts[:, None] + inside, self.tokens)
            self._on[device] = to_device(table, device), to_device(counts, device)
        return self._on[device]


def budgeted_tokens(budget: float, tokens: int, chunk_tokens: int) -> int:
    """How many of `tokens` a budget buys: k = max(1, floor(budget · chunks)) whole chunks, or all there are."""
    if budget >= 1:
        return tokens
    chunks = -(-tokens // chunk_tokens)
    # a share such as 0.29 of 100 is 29 although 0.29 * 100 is a little less
    return min(tokens, max(1, int(budget * chunks + 1e-9)) * chunk_tokens)


def top_chunks(mass: torch.Tensor, chunks: ChunkMap, count: int) -> torch.Tensor:
    """The `count` tokens of the chunks that get most attention, found on the device of `mass` without a wait.

    Chunks are ranked by the mean of their tokens' mass, so that a ragged one stands no worse than it deserves; of
    equals the first wins. The last chunk is cut where the count ends, so that every row and layer has as many tokens.

    Args:
        mass: float32 `[tokens]`.
        chunks: how the tokens are cut.
        count: at most as many as there are.

    Returns:
        int64 `[count]`, ascending.
    """
    table, counts = chunks.on(mass.device)
    padded = torch.cat([mass.double(), mass.new_zeros(1, dtype=torch.float64)])
    order = (padded[table].sum(1) / counts).argsort(descending=True, stable=True)
    sizes = counts[order]
    before = sizes.cumsum(0) - sizes
    taken = torch.empty_like(counts).scatter_(0, order, (count - before).clamp(min=0).minimum(sizes))  # of each chunk
    chosen = torch.arange(table.shape[1], device=mass.device) < taken[:, None]
    marks = torch.zeros(chunks.tokens + 1, dtype=torch.uint8, device=mass.device)
    marks.index_put_((table,), chosen.to(torch.uint8), accumulate=True)
    return marks[:-1].argsort(descending=True, stable=True)[:count]
