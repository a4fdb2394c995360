"""Choosing chunks by an index of their keys, for each kv head its own (KVDRIVE, Section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import ConfigError
from ..transfers import to_host
from .clusters import ClusterIndex
from .decode_index import DecodeIndex, rank
from .selector import Selection, SelectionInput, Selector

WindowSizes = tuple[tuple[float, ...], ...]
"""Of each layer of a model those of its kv heads, in multiples of what is chosen; () where nothing is chosen."""


@dataclass(frozen=True)
class Span:
    """What of a row's restored tokens is chosen: the first and the last ones always, and chunks between them.

    Args:
        tokens: restored.
        first: so many tokens in front, whole chunks.
        last: so many at the end.
        chunks: so many chunks of those between.
        chunk_tokens: tokens of a chunk.
        grown: chunks of computed tokens, which may be chosen, too.
    """

    tokens: int
    first: int
    last: int
    chunks: int
    chunk_tokens: int
    grown: range = range(0)

    @property
    def candidates(self) -> range:
        """The chunks that may be chosen. Where the last tokens do not begin with a chunk, the one they cut is none."""
        return range(self.first // self.chunk_tokens, (self.tokens - self.last) // self.chunk_tokens)

    def tokens_of(self, chunks: np.ndarray) -> np.ndarray:
        """int64 `[heads, tokens]`: those in front, those of chunks, int64 `[heads, chunks]`, and those at the end."""
        heads = len(chunks)
        inside = (chunks[..., None] * self.chunk_tokens + np.arange(self.chunk_tokens)).reshape(heads, -1)
        ends = np.arange(self.first), np.arange(self.tokens - self.last, self.tokens)
        first, last = (np.broadcast_to(end, (heads, len(end))) for end in ends)
        return np.concatenate([first, inside, last], axis=1)


@dataclass(frozen=True)
class ByIndex(Selector):
    """For each kv head the chunks that an index ranks first for the queries of its group.

    Args:
        kind: of the index: one of `DECODE_INDEXES`.
        chunk_tokens: tokens of a chunk.
        sinks: tokens in front that are chosen always, as whole chunks.
        local: tokens at the end that are chosen always, at least.
        window: entries that a head keeps in device memory while decoding, in multiples of those that are chosen.
        eviction: by which entries leave that window (see `Window`).
        pool: how many candidates are ranked for each chunk that is chosen: what the window keeps goes by these.
        window_sizes: of each layer and kv head instead of `window`, likewise; () for none.
        trace: is told the layer and the candidates of each step of each row, int64 `[kv_heads, M]`, best first; at the
            beginning the chunks that the prompt has chosen.
    """

    kind: type[DecodeIndex] = ClusterIndex
    chunk_tokens: int = 8
    sinks: int = 4
    local: int = 64
    pool: float = 1.25
    window: float = 2
    eviction: str = "lookahead"
    window_sizes: WindowSizes = ()
    trace: Callable[[int, np.ndarray], None] | None = field(default=None, compare=False)

    @property
    def index(self) -> tuple[type[DecodeIndex], int]:
        return self.kind, self.chunk_tokens

    def budgeted_tokens(self, budget: float, tokens: int) -> int:
        """How many of a row's restored tokens are held, where a share `budget` of the chunks is chosen: never none."""
        step = self.chunk_tokens
        first, last = self._first, tokens - max(0, tokens - self.local) // step * step
        chunks = max(1, int(budget * -(-tokens // step) + 1e-9))
        return min(tokens, first + chunks * step + last)

    def span(self, tokens: int, count: int) -> Span | None:
        """How `count` of a row's `tokens` are chosen; None if that is all of them."""
        if count >= tokens:
            return None
        chunks = (count - self._first - self.local) // self.chunk_tokens
        return Span(tokens, self._first, count - self._first - chunks * self.chunk_tokens, chunks, self.chunk_tokens)

    def capacities(self, layer: int, heads: int, chunks: int) -> np.ndarray:
        """Entries that each kv head keeps while decoding, of which `chunks` are chosen: int64 `[heads]`.

        Raises:
            ConfigError: there are sizes by head, and none for these.
        """
        sizes = self.window_sizes[layer : layer + 1] if self.window_sizes else ((self.window,) * heads,)
        if not sizes or len(sizes[0]) != heads:
            raise ConfigError(f"there are no window sizes for layer {layer} with {heads} kv heads")
        times = np.minimum(sizes[0], 1 if self.eviction == "none" else np.inf)  # [heads]
        return np.where(times >= 1, times * chunks, 0).astype(np.int64)

    def choose(self, asked: SelectionInput) -> Selection:
        span, mass = self.span(asked.chunks.tokens, asked.count), np.zeros((1, asked.chunks.tokens), np.float32)
        if span is None:
            return Selection(np.arange(asked.count)[None], mass)
        (ranked,) = to_host(self.rank(asked.indexes(), asked.query, asked.scaling, span))
        return Selection(span.tokens_of(np.sort(self.candidates(ranked, span)[:, : span.chunks], axis=1)), mass)

    def rank(
        self, indexes: Sequence[DecodeIndex], query: torch.Tensor, scaling: float | None, span: Span
    ) -> torch.Tensor:
        """Chunks by how much queries, `[heads, n, dim]`, want them, best first: int64 `[kv_heads, n]`, on the device.

        Among these are enough of `candidates`, whichever of the others rank high.
        """
        every = sum(index.chunks for index in indexes)
        others = every - len(span.candidates) - len(span.grown)
        return rank(indexes, query, scaling, min(every, int(self.pool * span.chunks) + others))[0]

    def candidates(self, ranked: np.ndarray, span: Span) -> np.ndarray:
        """Those of int64 `[..., n]` that may be chosen, in their order: as many of each row as there are at least."""
        wanted, grown = span.candidates, span.grown
        out = (ranked < wanted.start) | (ranked >= wanted.stop)
        if len(grown):
            out &= (ranked < grown.start) | (ranked >= grown.stop)
        order = out.argsort(axis=-1, kind="stable")
        return np.take_along_axis(ranked, order, -1)[..., : ranked.shape[-1] - int(out.sum(axis=-1).max())]

    @property
    def _first(self) -> int:
        return -(-self.sinks // self.chunk_tokens) * self.chunk_tokens
