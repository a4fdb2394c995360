"""Storing passages: each computed alone, behind a sink token, with a ranking of its tokens."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from .geometry import HASH_TOKENS
from .identity import Identity, rope_regime
from .methods import Method, Passages
from .precompute import PrecomputeReport, as_prompts, bar_over, fill
from .ranking import check_ranks, passages_method, rank_one
from .record import Names, Rank, Recorder, Submit
from .request import DecodingCheck
from .restore.history import History
from .restore.rankings import Columns
from .restore.spectral import KV, RANKED_IN_CONTEXT
from .serving import CacheOptions, Serving
from .storage import Storage
from .store.format import HASH_BYTES
from .store.segment import SegmentReader
from .stored_cache import StoredCache, prepare

logger = logging.getLogger("hf_tiered_cache")

CONTEXT_TOKENS = 512
"""Of other text, at most, that stands before a passage while it is seen how that changes it."""


def precompute_passages(
    storage: Storage,
    model: nn.Module,
    input_ids: Any,
    *,
    method: Method | str | None,
    progress: bool,
    pin: bool,
    label: str,
    tag: str,
) -> PrecomputeReport:
    """See `KVStore.precompute(segments=True)`."""
    storage.check_open()
    passages, method = _distinct(input_ids), passages_method(method)
    report = PrecomputeReport(len(passages))
    if short := sum(len(passage) < HASH_TOKENS for passage in passages):
        report = replace(report, too_short=short)
        logger.warning(
            "%d of %d passages have fewer than %d tokens: they are not stored, and computed in each prompt",
            *(short, len(passages), HASH_TOKENS),
        )
    with bar_over(passages, progress) as bar:
        for number, passage in enumerate(passages):
            cache = PassageCache(model, storage, method, label, tag)
            reader = cache.passage.find(passage)
            if reader is None and len(passage) >= HASH_TOKENS:
                cache.passage.kv_in_context = kv_behind_others(cache, passages, number)
                fill(storage, cache, torch.cat([cache.passage.context_ids, passage]), pin)
                if cache.passage.scores:  # behind the segment in the writer's queue
                    (segment,) = cache.store_now()
                    storage.writer.later(partial(_keep_scores, storage, segment, cache.passage.scores))
            elif reader is not None and method.ranked_by and method.ranked_by not in storage.rankings.of(reader):
                rank_one(storage, method, reader, kv_behind_others(cache, passages, number))
            restored = 0 if reader is None else len(passage) // HASH_TOKENS * HASH_TOKENS
            report = report.with_prompt(len(passage), restored, cache.stats.tokens_stored)
            bar.update(len(passage))
    storage.flush()
    return report


def rank_passages(
    storage: Storage, model: nn.Module, input_ids: Any, method: Passages, tag: str, progress: bool
) -> int:
    """Rank stored passages among those that are given. Returns how many of these are stored, and ranked now."""
    check_ranks(method)
    storage.flush()
    passages, done = _distinct(input_ids), 0
    with bar_over(passages, progress, "rank") as bar:
        for number, passage in enumerate(passages):
            cache = PassageCache(model, storage, method, "", tag)  # of the store's codec, if the method names none
            if (reader := cache.passage.find(passage)) is not None:
                done += rank_one(storage, method, reader, kv_behind_others(cache, passages, number))
            bar.update(len(passage))
    return done


def _distinct(input_ids: Any) -> list[torch.Tensor]:
    """Each passage once: int64 `[tokens]`."""
    return list({tuple(passage.tolist()): passage for passage in as_prompts(input_ids)}.values())


def _keep_scores(storage: Storage, segment_id: str, columns: Columns) -> None:
    """Keep how a passage's tokens rank beside it, if it was stored."""
    if storage.disk.index.row(segment_id) is not None and (reader := storage.disk.reader(segment_id)) is not None:
        storage.rankings.keep(reader, columns)


class PassageServing(Serving):
    """Computes one passage behind tokens whose KV is left out, and stores it.

    Args:
        like: of a cache with a method for passages, which says how it is ranked and cut.
        context: int `[n]`, what stands between the sink and the passage; if any, nothing is stored.
    """

    method: Passages

    def __init__(self, like: Serving, context: torch.Tensor | None) -> None:
        super().__init__(like.attachment, like.store, like.method, like.options, like.collector)
        self.sink = self.method.sink_token(like.attachment.config)
        sink = torch.tensor([] if self.sink is None else [self.sink], dtype=torch.int64)
        self.context_ids = sink if context is None else torch.cat([sink, context])
        """What is computed before the passage: the sink, if the model has such a token, and the context."""
        self.computed: list[KV] = []
        """With a context: the passage's keys and values, layer by layer."""
        self.kv_in_context: list[KV] | None = None
        """The same of another cache, for the ranking."""
        self.scores: Columns = {}
        """How the passage's tokens rank, once it is computed, by the name of the ranking."""
        self._in_context = context is not None

    @property
    def positions(self) -> int:
        """How many the model has."""
        return getattr(self.attachment.config, "max_position_embeddings", None) or sys.maxsize

    def find(self, passage: torch.Tensor) -> SegmentReader | None:
        """The segment in which all whole hashes of a passage, int `[tokens]`, are stored, or None."""
        identity, store = self.identify(closely=True), self.store
        if isinstance(identity, str):
            return None
        regime = rope_regime(self.attachment.config, len(passage)) or ""
        hasher = store.passage_hasher(identity.fingerprint, self.method.passages, self.sink, regime)
        chain = b"".join(hasher.hashes(passage.numpy()))
        for row in store.disk.find([chain[:HASH_BYTES]]) if chain else ():
            if row.chain[: row.valid_hashes * HASH_BYTES].startswith(chain):
                reader = store.found_passage(row)
                if reader is not None and reader.shape.whole:
                    return reader
        return None

    def new_recorder(self, identity: Identity, regime: str, pads: list[int], check: DecodingCheck) -> Recorder:
        """See `Serving`."""
        method, store = self.method, self.store
        hasher = store.passage_hasher(identity.fingerprint, method.passages, self.sink, regime)
        history = History(hasher, [pad + len(self.context_ids) for pad in pads])  # left out like padding
        submit: Submit = _drop if self._in_context else store.submit
        rank: Rank | None = self._keep if self._in_context else self._rank if method.ranked_by else None
        return Recorder(
            history,
            identity.fingerprint,
            method.geometry,
            submit,
            store.ttl,
            method.passages,
            rank=rank,
            collector=self.collector,
            names=Names(identity.facts, self.options.label),
            check=check,
        )

    def _keep(self, layers: Iterable[KV]) -> None:
        self.computed.extend(layers)

    def _rank(self, layers: Iterable[KV]) -> np.ndarray:
        scores = self.method.rank(layers, self.kv_in_context)
        self.scores = {self.method.ranked_by: scores}
        return scores


class PassageCache(StoredCache):
    """A cache for one passage (see `PassageServing`)."""

    def __init__(
        self,
        model: nn.Module,
        storage: Storage,
        method: Passages,
        label: str,
        tag: str,
        context: torch.Tensor | None = None,
    ) -> None:
        options = CacheOptions(restore=False, label=label, tag=tag)
        super().__init__(*prepare(model, method), storage, method, options)
        self.passage = self._serving = PassageServing(self._serving, context)


def _drop(pending: object, wait: bool = True) -> None:
    """Of KV that is only looked at."""


def kv_after_context(
    model: nn.Module, storage: Storage, method: Passages, passage: torch.Tensor, context: torch.Tensor, tag: str
) -> list[KV]:
    """The passage's keys and values where other text stands before it."""
    cache = PassageCache(model, storage, method, "", tag, context)
    fill(storage, cache, torch.cat([cache.passage.context_ids, passage]), pin=False)
    return cache.passage.computed


def kv_behind_others(cache: PassageCache, passages: list[torch.Tensor], number: int) -> list[KV] | None:
    """The KV of passage `number` behind some of the others, if the method's ranking looks at that."""
    method, serving, passage = cache.passage.method, cache.passage, passages[number]
    if not method.ranked_by or method.ranking not in RANKED_IN_CONTEXT or len(passage) < HASH_TOKENS:
        return None
    if len(passages) == 1:
        logger.warning("a passage by itself is ranked by its own second half; store several in one call")
    others = neighbours(passages, number, serving.positions)
    return kv_after_context(cache.model, serving.store, method, passage, others, serving.options.tag)


def neighbours(passages: list[torch.Tensor], number: int, positions: int) -> torch.Tensor:
    """What else may stand before a passage: other ones, drawn at random, the last one whole if there is room.

    Args:
        passages: int `[tokens]` each; of a single one it is its own second half.
        number: of the passage.
        positions: that the model has.
    """
    mine = passages[number]
    room = max(0, min(CONTEXT_TOKENS, positions - 1 - len(mine)))
    drawn = random.Random(number).sample(range(len(passages)), min(len(passages), CONTEXT_TOKENS // HASH_TOKENS))
    others = [passages[other] for other in reversed(drawn) if other != number] or [mine[len(mine) // 2 :]]
    text = torch.cat(others)
    return text[max(0, len(text) - room) :]
