"""A cache in which passages are computed: a row each, alone behind the sink, or behind other text and passages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from transformers import Cache

from .errors import RestoreError
from .geometry import HASH_TOKENS
from .identity import Identity, rope_regime
from .lead import kept_lead
from .methods import Passages
from .patches.attach import attach
from .reasons import SWITCHED_OFF
from .record import Names, Rank, Recorder
from .request import DecodingCheck, Request
from .restore.history import History
from .restore.plan import Plan, RowGroup, SegmentSlice
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
    """Computes passages of one length, a row each, behind tokens whose KV is left out.

    Args:
        like: of a cache with a method for passages, which says how they are ranked and cut.
        labels: of the rows, for the headers of their segments; () for none.
        context: int `[rows, n]`, text that stands between the sink and each passage.
        before: for each row what is restored behind that, up to the passage: as many tokens in each; () for nothing.
            With text or passages before it nothing is stored, and it is `computed` that counts.
    """

    method: Passages

    def __init__(
        self,
        like: Serving,
        labels: Sequence[str],
        context: torch.Tensor | None,
        before: Sequence[tuple[SegmentSlice, ...]],
    ) -> None:
        super().__init__(like.attachment, like.store, like.method, like.options, like.collector)
        self.sink = self.method.sink_token(like.attachment.config)
        sink = torch.tensor([[] if self.sink is None else [self.sink]], dtype=torch.int64)
        text = [] if context is None else [context]
        self.context_ids = torch.cat([sink.expand(len(context) if context is not None else 1, -1), *text], dim=1)
        """What is computed before the passage, `[rows, n]` or for all rows `[1, n]`: the sink, if the model has such a
        token, and the text, or the method's lead."""
        self.computed: dict[int, list[KV]] = {}
        """Behind other text: each row's keys and values, layer by layer."""
        self.scores: dict[int, Columns] = {}
        """How each row's tokens rank, once they are computed, by the name of the ranking."""
        self._labels, self._before = tuple(labels), before
        self._in_context = context is not None or bool(before)
        self._planned = False

    def write_lead(self, tokens: int) -> None:
        """Let the method's lead stand before passages of so many tokens, as far as positions reach."""
        identity, text = self.identify(closely=False), self.method.lead - 1
        if text > 0 and self.sink is not None and not self._in_context and not isinstance(identity, str):
            written = kept_lead(self.store, self.attachment, identity.fingerprint, self.sink, text)
            self.context_ids = torch.cat([self.context_ids, written[None]], dim=1)[:, : max(1, self.positions - tokens)]

    @property
    def restored_before(self) -> int:
        """Tokens that are restored before each passage."""
        return sum(piece.count for piece in self._before[0]) if self._before else 0

    @property
    def positions(self) -> int:
        """How many the model has."""
        return getattr(self.attachment.config, "max_position_embeddings", None) or sys.maxsize

    def find(self, passages: Sequence[torch.Tensor]) -> list[SegmentRow | None]:
        """Of passages, int `[tokens]` each, the segments in which all their whole hashes are stored."""
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
        """The one of these segments that holds these prefix hashes, whole, and if there are several, the shortest."""
        found = [row for row in rows if row.chain[: row.valid_hashes * HASH_BYTES].startswith(chain)]
        for row in sorted(found, key=lambda row: (len(row.chain), row.id)):
            reader = self.store.found_passage(row)
            if reader is not None and reader.shape.whole:
                return row
        return None

    # --- a pass

    def plan(self, request: Request, sequence: SequenceState) -> Plan | None:
        """What stands before the passages is restored; they are computed. Raises RestoreError: that has failed."""
        count, columns = self.restored_before, request.columns
        if self._planned:
            raise RestoreError(self._before[0][0].reader.id, "it, or what stands beside it, cannot be restored")
        self._planned = True
        computed = np.arange(count, columns)  # int64 [passage's tokens]
        groups = tuple(RowGroup((row,), 0, pieces) for row, pieces in enumerate(self._before))
        return Plan(sequence.columns, columns, (computed,) * self.attachment.config.num_hidden_layers, groups)

    def _why_not_looked_for(self, request: Request, sequence: SequenceState) -> str:
        restores = self._before and sequence.columns == self.context_ids.shape[1]
        return "" if restores else SWITCHED_OFF

    def _new_sequence(self, cache: Cache, request: Request, identity: Identity, regime: str) -> SequenceState:
        sequence = super()._new_sequence(cache, request, identity, regime)
        sequence.tells_passages = False  # what stands before the passages is no prompt
        return sequence

    def new_recorder(self, identity: Identity, regime: str, pads: list[int], check: DecodingCheck) -> Recorder:
        """See `Serving`."""
        method, store = self.method, self.store
        hasher = store.passage_hasher(identity.fingerprint, method.passages, self.sink, regime)
        own = identity.fingerprint, method.geometry, store.submit, store.ttl, method.passages
        names = Names(identity.facts, self.options.label, self._labels)
        if self._in_context:
            before = self.context_ids.shape[1] + self.restored_before
            return _Observing(History(hasher, pads), *own, names=names, check=check).behind(before, self.computed)
        history = History(hasher, [pad + self.context_ids.shape[1] for pad in pads])  # left out like padding
        rank: Rank | None = self._rank if method.ranks_alone else None
        held = identity.weights_held
        return Recorder(history, *own, rank=rank, collector=self.collector, names=names, check=check, weights_held=held)

    def _rank(self, row: int, layers: Iterable[KV]) -> np.ndarray:
        scores = self.method.rank(layers)
        self.scores[row] = {self.method.ranked_by: scores}
        return scores

    def stored(self) -> list[str]:
        """The segment of each row, once it is computed; none where its KV can be stored under no name."""
        if self.sequence is None:
            return []
        self.sequence.recorder.seal()
        return [row[-1] for row in map(self.sequence.recorder.segments, range(self.sequence.history.rows)) if row]


class PassageCache(StoredCache):
    """A cache for passages (see `PassageServing`)."""

    def __init__(
        self,
        model: nn.Module,
        storage: Storage,
        method: Passages,
        tag: str,
        *,
        label: str = "",
        labels: Sequence[str] = (),
        context: torch.Tensor | None = None,
        before: Sequence[tuple[SegmentSlice, ...]] = (),
    ) -> None:
        options = CacheOptions(restore=bool(before), label=label, tag=tag, progress=False)
        super().__init__(*prepare(model, method), storage, method, options)
        self.passage = self._serving = PassageServing(self._serving, labels, context, before)

    def compute(self, passages: torch.Tensor) -> None:
        """Compute passages, int `[rows, tokens]`, and have them stored, or kept in `passage.computed`.

        Raises:
            RestoreError: what stands before them cannot be read.
        """
        serving, rows = self.passage, len(passages)
        serving.write_lead(passages.shape[1])
        context = serving.context_ids.expand(rows, -1)  # [rows, sink and text]
        hidden = passages[:, :1].expand(-1, serving.restored_before)  # in the place of what is restored: never seen
        passes = [torch.cat([hidden, passages], dim=1)]
        if hidden.shape[1] and context.shape[1]:
            passes.insert(0, context)
        else:
            passes[0] = torch.cat([context, passes[0]], dim=1)
        device = attach(self.model).device_of(0)  # an offloaded model's own is `meta`
        with torch.no_grad():
            for ids in passes:
                self.model(input_ids=ids.to(device), past_key_values=self, use_cache=True, logits_to_keep=1)
        self.store_now()


class _Observing(Recorder):
    """Hands on what is computed behind other text, instead of making segments of it."""

    def behind(self, columns: int, computed: dict[int, list[KV]]) -> Recorder:
        """This recorder, which puts what follows so many columns into `computed`, row by row, layer by layer."""
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
    """How many of a passage's tokens are stored."""
    return tokens // HASH_TOKENS * HASH_TOKENS


def batches(items: Iterable[_T], lengths: Callable[[_T], tuple[int, ...]], most_tokens: int) -> list[list[_T]]:
    """Items of equal lengths together, the longest first.

    Nothing is padded: passages are cut to whole hashes before, so that many have one length, and what a padded batch
    would compute in vain is not computed.

    Args:
        lengths: of an item: the tokens that are computed of it first of all.
        most_tokens: of a batch, unless a single item has more.
    """
    found: list[list[_T]] = []
    for (tokens, *_), alike in groupby(sorted(items, key=lengths, reverse=True), lengths):
        every, rows = list(alike), max(1, most_tokens // max(1, tokens))
        found += [every[first : first + rows] for first in range(0, len(every), rows)]
    return found
