"""Selection of chunks by an index, for each head at each token, with a window in device memory (KVDRIVE, Section 4).

`ByIndex` selects for a prompt, `WindowDecodeSelector` for the tokens after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..store.memory import to_host
from .clusters import ClusterIndex
from .decode import Choice, DecodeSelector
from .decode_index import DecodeIndex, build_index, check_ranking, rank
from .held import INDEXED_TOKENS, HeldChunks, OffloadedChunks, Window
from .indexes import RowIndexes
from .selectors import Selection, SelectionInput, Selector, budgeted_tokens

_CANDIDATES = 1.25  # number of candidates that are ranked per selected chunk. The window's eviction uses their order


@dataclass(frozen=True)
class Span:
    """Division of a row's restored tokens: leading and trailing tokens, always attended to, and chunks to select.

    Args:
        tokens: Number of restored tokens.
        first: Number of leading tokens, in whole chunks, that are always attended to.
        last: Number of trailing tokens that are always attended to.
        chunks: Number of chunks to select between them.
        chunk_tokens: Tokens per chunk.
        offloaded: Chunks of offloaded generated KV, which may be selected, too.
    """

    tokens: int
    first: int
    last: int
    chunks: int
    chunk_tokens: int
    offloaded: range = range(0)

    @property
    def candidates(self) -> range:
        """Chunks that may be selected. A chunk that overlaps the trailing tokens is excluded."""
        return range(self.first // self.chunk_tokens, (self.tokens - self.last) // self.chunk_tokens)

    def tokens_of(self, chunks: np.ndarray) -> np.ndarray:
        """Return leading tokens, those of `chunks`, int64 `[heads, n]`, and trailing ones: int64 `[heads, tokens]`."""
        heads = len(chunks)
        inside = (chunks[..., None] * self.chunk_tokens + np.arange(self.chunk_tokens)).reshape(heads, -1)
        ends = np.arange(self.first), np.arange(self.tokens - self.last, self.tokens)
        first, last = (np.broadcast_to(end, (heads, len(end))) for end in ends)
        return np.concatenate([first, inside, last], axis=1)


@dataclass(frozen=True)
class ByIndex(Selector):
    """Selector of the chunks that a decode index ranks first, for each KV head by the queries of its group.

    Args:
        kind: Type of the index: a value of `DECODE_INDEXES`.
        chunk_tokens: Tokens per chunk.
        sinks: Number of leading tokens that are always selected, rounded up to whole chunks.
        local: Minimum number of trailing tokens that are always selected.
        window: Number of chunks that a head keeps in device memory while decoding, in multiples of the selected chunks.
        eviction: Eviction policy of that window (see `Window`).
    """

    kind: type[DecodeIndex] = ClusterIndex
    chunk_tokens: int = 8
    sinks: int = 4
    local: int = 64
    window: float = 2
    eviction: str = "lookahead"

    @property
    def index(self) -> tuple[type[DecodeIndex], int]:
        return self.kind, self.chunk_tokens

    def budgeted_tokens(self, budget: float, tokens: int) -> int:
        """Return the number of a row's restored tokens that are held if a share `budget` of its chunks is selected.

        At least one chunk is selected. Sinks and local tokens are counted, too.
        """
        last = tokens - max(0, tokens - self.local) // self.chunk_tokens * self.chunk_tokens
        return min(tokens, self._first + budgeted_tokens(budget, tokens, self.chunk_tokens) + last)

    def span(self, tokens: int, count: int) -> Span | None:
        """Return how `count` of a row's `tokens` restored tokens are selected, or None if all of them are."""
        if count >= tokens:
            return None
        chunks = (count - self._first - self.local) // self.chunk_tokens
        return Span(tokens, self._first, count - self._first - chunks * self.chunk_tokens, chunks, self.chunk_tokens)

    def choose(self, request: SelectionInput) -> Selection:
        span, mass = self.span(request.chunks.tokens, request.count), np.zeros((1, request.chunks.tokens), np.float32)
        if span is None:
            return Selection(np.arange(request.count)[None], mass)
        indexes = request.indexes()
        (ranked,) = to_host(self.rank(indexes, request.query, request.scaling, span))
        check_ranking(indexes, ranked)
        return Selection(span.tokens_of(np.sort(self.candidates(ranked, span)[:, : span.chunks], axis=1)), mass)

    def rank(
        self, indexes: Sequence[DecodeIndex], query: torch.Tensor, scaling: float | None, span: Span
    ) -> torch.Tensor:
        """Rank chunks for queries, `[heads, n, dim]`, best first: int64 `[kv_heads, n]`, on the device.

        The result contains enough of `candidates`, however high the other chunks rank.
        """
        num_candidates = len(span.candidates) + len(span.offloaded)
        total_chunks = sum(index.chunks for index in indexes)
        excluded_chunks = total_chunks - num_candidates
        return rank(indexes, query, scaling, min(total_chunks, int(_CANDIDATES * span.chunks) + excluded_chunks))

    def candidates(self, ranked: np.ndarray, span: Span) -> np.ndarray:
        """Return the selectable chunks of rankings, int64 `[..., n]`, in their order, cut to the shortest row."""
        restored_chunks, offloaded_chunks = span.candidates, span.offloaded
        excluded = (ranked < restored_chunks.start) | (ranked >= restored_chunks.stop)
        if len(offloaded_chunks):
            excluded &= (ranked < offloaded_chunks.start) | (ranked >= offloaded_chunks.stop)
        order = excluded.argsort(axis=-1, kind="stable")
        return np.take_along_axis(ranked, order, -1)[..., : ranked.shape[-1] - int(excluded.sum(axis=-1).max())]

    @property
    def _first(self) -> int:
        return -(-self.sinks // self.chunk_tokens) * self.chunk_tokens


@dataclass(frozen=True, eq=False)
class WindowDecodeSelector(DecodeSelector):
    """Decode selector of chunks that an index ranks first, for each kv head, with a window of recently selected ones.

    The first and last tokens of the prefix are fixed, and so are the generated ones, until they are offloaded.
    """

    selector: ByIndex
    indexes: RowIndexes

    may_stay = False

    def row(self, layer: int, prefix: int, tokens: np.ndarray, first: int) -> HeldChunks | None:
        if (span := self.selector.span(self.prefixes[prefix].tokens, self.budgets[prefix])) is None:
            return None
        inside = tokens[:, span.first : tokens.shape[1] - span.last : span.chunk_tokens]
        capacity = int(self.selector.window * span.chunks) if self.selector.window >= 1 else 0
        window = Window(span.chunks, len(tokens), capacity, span.candidates.stop, self.selector.eviction)
        window.commit(window.plan(inside // span.chunk_tokens))
        return HeldChunks(prefix, window, first + span.first, span.chunk_tokens)

    def select(
        self, layer: int, rows: Mapping[int, HeldChunks], query: torch.Tensor, keys: torch.Tensor, scaling: float | None
    ) -> dict[int, Choice]:
        """See `DecodeSelector`. Ranks the chunks of all rows, and waits once for the results."""
        selector, ranked = self.selector, []
        for row, state in rows.items():
            indexes: Sequence[DecodeIndex] = self.indexes.held(layer, state.prefix)
            span = selector.span(self.prefixes[state.prefix].tokens, self.budgets[state.prefix])
            assert span is not None, "a row that holds all tokens has no state"
            if state.offloaded is not None:
                indexes = [*indexes, *state.offloaded.indexes]
                span = replace(span, offloaded=state.offloaded.numbers)
            ranked.append((row, span, indexes, selector.rank(indexes, query[row], scaling, span)))
        choices: dict[int, Choice] = {}
        for (row, span, indexes, _), ranking in zip(ranked, to_host(*(entry[3] for entry in ranked)), strict=True):
            check_ranking(indexes, ranking)
            pool = selector.candidates(ranking, span)
            choices[row] = pool[:, : span.chunks], pool
        return choices

    def num_to_offload(self, row: HeldChunks | None, num_computed: int) -> int:
        """Return how many of the `num_computed` tokens that a layer holds of a row to offload now, the oldest first.

        The last `selector.local` tokens stay; all stay if the row does not select (None).
        """
        excess = max(0, num_computed - max(1, self.selector.local)) if row is not None else 0
        return excess // INDEXED_TOKENS * INDEXED_TOKENS

    def offload(self, row: HeldChunks, keys: torch.Tensor, values: torch.Tensor) -> HeldChunks:
        """Offload rotated keys and values, `[kv_heads, n, dim]`, of a row in a layer, and return its new state."""
        size, before = self.selector.chunk_tokens, row.offloaded
        index = build_index(self.selector.kind, keys, size)
        self.residency.index_cache.track(index)
        blocks = [tensor.unflatten(1, (-1, size)).cpu() for tensor in (keys, values)]
        if before is None:
            first = sum(-(-piece.count // size) for piece in self.prefixes[row.prefix].pieces)  # chunks of the indexes
            offloaded = OffloadedChunks(first, blocks[0].clone(), blocks[1].clone(), (index,))
        else:
            blocks = [torch.cat(pair, dim=1) for pair in zip((before.keys, before.values), blocks, strict=True)]
            offloaded = OffloadedChunks(before.first, blocks[0], blocks[1], (*before.indexes, index))
        row.window.grow(offloaded.numbers.stop)
        return replace(row, offloaded=offloaded)
