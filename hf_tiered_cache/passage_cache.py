"""Cache that computes passages, one per row, after lead tokens without recorded KV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from transformers import Cache

from .geometry import HASH_TOKENS
from .identity import Identity, rope_regime
from .lead import kept_lead
from .methods import Passages
from .patches.attach import attach
from .record import Names, Rank, Recorder
from .request import DecodingCheck, Request
from .restore.history import History
from .restore.passages import sink_token
from .restore.rankings import Columns
from .restore.spectral import KV
from .sequence import SequenceState
from .serving import CacheOptions, Serving
from .storage import Storage
from .store.catalogue import SegmentRow
from .store.format import HASH_BYTES
from .store.writer import PendingSegment
from .stored_cache import StoredCache, prepare

_T = TypeVar("_T")


class PassageServing(Serving):
    """Executor that computes passages of one length, one per row, after lead tokens without recorded KV.

    Args:
        like: executor of a cache with a method for passages, which defines their ranking and geometry.
        labels: labels of the rows, for the headers of their segments; () for none.
        observed_behind: length of a lead that replaces the method's. If given, nothing is stored; the result is in
            `computed`.
    """

    method: Passages

    def __init__(self, like: Serving, labels: Sequence[str], observed_behind: int | None) -> None:
        super().__init__(like.attachment, like.store, like.method, like.options, like.collector)
        self.sink = self.method.sink_token(like.attachment.config)
        first = self.sink if observed_behind is None else sink_token(like.attachment.config)
        self.lead = torch.tensor([[] if first is None else [first]], dtype=torch.int64)
        """Tokens before the passages, int64 `[1, n]`: the first token, and the lead text after `write_lead`."""
        self.computed: dict[int, list[KV]] = {}
        """Keys and values of each row, layer by layer, if nothing is stored."""
        self.scores: dict[int, Columns] = {}
        """Ranking of each row's tokens by name of the ranking, once the row is computed."""
        self._labels, self._observed_behind = tuple(labels), observed_behind

    def write_lead(self, tokens: int) -> None:
        """Append the lead text for passages of `tokens` tokens, within the model's maximum position."""
        wanted = self.method.lead if self._observed_behind is None else self._observed_behind
        identity = self.identify(closely=False)
        if wanted > 1 and self.lead.shape[1] and not isinstance(identity, str):
            written = kept_lead(self.store, self.attachment, identity.fingerprint, int(self.lead[0, 0]), wanted - 1)
            positions = getattr(self.attachment.config, "max_position_embeddings", None) or sys.maxsize
            self.lead = torch.cat([self.lead, written[None]], dim=1)[:, : max(1, positions - tokens)]

    def find(self, passages: Sequence[torch.Tensor]) -> list[SegmentRow | None]:
        """Return, for each passage, int `[tokens]`, the segment that stores all its whole hashes, or None."""
        identity, store = self.identify(closely=True), self.store
        if isinstance(identity, str):
            return [None] * len(passages)
        chains, before = [], 0 if self.sink is None else self.method.lead
        for passage in passages:
            regime = rope_regime(self.attachment.config, before + len(passage)) or ""
            hasher = store.passage_hasher(identity.fingerprint, self.method.passages, self.sink, regime)
            chains.append(b"".join(hasher.hashes(passage.numpy())))
        rows: dict[bytes, list[SegmentRow]] = {}
        for row in store.disk.find(list({chain[:HASH_BYTES]: None for chain in chains if chain})):
            rows.setdefault(row.first, []).append(row)
        return [self._holding(rows.get(chain[:HASH_BYTES], ()), chain) for chain in chains]

    def _holding(self, rows: Iterable[SegmentRow], chain: bytes) -> SegmentRow | None:
        """Return the shortest complete segment that begins with the prefix hashes `chain`, or None."""
        found = [row for row in rows if row.chain[: row.valid_hashes * HASH_BYTES].startswith(chain)]
        for row in sorted(found, key=lambda row: (len(row.chain), row.id)):
            reader = self.store.found_passage(row)
            if reader is not None and reader.shape.whole:
                return row
        return None

    def _new_sequence(self, cache: Cache, request: Request, identity: Identity, regime: str) -> SequenceState:
        sequence = super()._new_sequence(cache, request, identity, regime)
        sequence.tells_passages = False  # a passage is not searched for other passages
        return sequence

    def new_recorder(self, identity: Identity, regime: str, pads: list[int], check: DecodingCheck) -> Recorder:
        """See `Serving`."""
        method, store = self.method, self.store
        hasher = store.passage_hasher(identity.fingerprint, method.passages, self.sink, regime)
        own = identity.fingerprint, method.geometry, store.submit, store.ttl, method.passages
        names = Names(identity.facts, self.options.label, self._labels)
        if self._observed_behind is not None:
            return _Observing(History(hasher, pads), *own, names=names, check=check).behind(
                self.lead.shape[1], self.computed
            )
        history = History(hasher, [pad + self.lead.shape[1] for pad in pads])  # the lead is left out like padding
        rank: Rank | None = self._rank if method.ranks_alone else None
        held = identity.weights_held
        return Recorder(history, *own, rank=rank, collector=self.collector, names=names, check=check, weights_held=held)

    def _rank(self, row: int, layers: Iterable[KV]) -> np.ndarray:
        scores = self.method.rank(layers)
        self.scores[row] = {self.method.ranked_by: scores}
        return scores

    def stored(self) -> dict[int, str]:
        """Seal the recorder, and return the segment id by row, of rows whose KV can be stored."""
        if self.sequence is None:
            return {}
        self.sequence.recorder.seal()
        segments = {row: self.sequence.recorder.segments(row) for row in range(self.sequence.history.rows)}
        return {row: of_row[-1] for row, of_row in segments.items() if of_row}


class PassageCache(StoredCache):
    """Cache for passages (see `PassageServing`)."""

    def __init__(
        self,
        model: nn.Module,
        storage: Storage,
        method: Passages,
        tag: str,
        *,
        labels: Sequence[str] = (),
        observed_behind: int | None = None,
    ) -> None:
        options = CacheOptions(restore=False, tag=tag, progress=False)
        super().__init__(*prepare(model, method), storage, method, options)
        self.passage = self._serving = PassageServing(self._serving, labels, observed_behind)

    def compute(self, passages: torch.Tensor) -> None:
        """Compute passages, int `[rows, tokens]`, and queue them for storing, or keep them in `passage.computed`."""
        self.passage.write_lead(passages.shape[1])
        ids = torch.cat([self.passage.lead.expand(len(passages), -1), passages], dim=1)  # [rows, lead and tokens]
        with torch.no_grad():
            device = attach(self.model).device_of(0)  # `model.device` is `meta` if it is offloaded
            self.model(input_ids=ids.to(device), past_key_values=self, use_cache=True, logits_to_keep=1)
        self.store_now()


class _Observing(Recorder):
    """Recorder that keeps KV computed after a lead in memory, instead of making segments of it."""

    def behind(self, columns: int, computed: dict[int, list[KV]]) -> Recorder:
        """Set the lead length and the dict for the KV after it, by row and layer. Return this recorder."""
        self._before, self._computed_rows = columns, computed
        return self

    def _take_unsealed(self) -> list[PendingSegment]:
        start = max(0, self._before - self._first)
        tokens = whole_tokens(self._count - start)
        if not self._in_pass and tokens > 0:
            self._come_after()
            for row in range(self.history.rows):
                self._computed_rows[row] = list(self._pairs(row, start, tokens))
        if not self._in_pass:
            self._forget()
            self._first = self.history.columns
        return []


def whole_tokens(tokens: int) -> int:
    """Return the number of a passage's tokens that are stored, a multiple of 16."""
    return tokens // HASH_TOKENS * HASH_TOKENS


def batches(items: Iterable[_T], lengths: Callable[[_T], tuple[int, ...]], most_tokens: int) -> list[list[_T]]:
    """Group items of equal lengths into batches, longest first.

    Batches need no padding: passages are cut to whole hashes beforehand, so that many have the same length.

    Args:
        items: items to group.
        lengths: function that returns the lengths of an item; the first is the number of tokens to compute.
        most_tokens: maximum number of tokens per batch, unless a single item has more.
    """
    found: list[list[_T]] = []
    for (tokens, *_), alike in groupby(sorted(items, key=lengths, reverse=True), lengths):
        every, rows = list(alike), max(1, most_tokens // max(1, tokens))
        found += [every[first : first + rows] for first in range(0, len(every), rows)]
    return found
