"""Storing passages: each computed alone, behind a sink token, with a ranking of its tokens."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from .errors import ConfigError
from .geometry import HASH_TOKENS
from .identity import Identity, rope_regime
from .methods import Method, Passages, make_method
from .precompute import PrecomputeReport, as_prompts, bar_over, fill
from .record import Names, Rank, Recorder, Submit
from .request import DecodingCheck
from .restore.history import History
from .restore.passages import sink_token
from .restore.spectral import KV, RANKED_IN_CONTEXT
from .sequence import passage_finder
from .serving import CacheOptions, Serving
from .storage import Storage
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
    distinct = {tuple(passage.tolist()): passage for passage in as_prompts(input_ids)}
    passages, method = list(distinct.values()), make_method(method or "cache_tune")
    if not isinstance(method, Passages):
        raise ConfigError(f"{type(method).__name__} restores prefixes only; precompute for it without segments=True")
    report = PrecomputeReport(len(passages))
    with bar_over(passages, progress) as bar:
        for number, passage in enumerate(passages):
            cache = PassageCache(model, storage, method, label, tag)
            restored = cache.passage.stored_tokens(passage)
            if restored < len(passage) // HASH_TOKENS * HASH_TOKENS:
                restored = 0
                if method.ranking in RANKED_IN_CONTEXT:
                    if len(passages) == 1:
                        logger.warning(
                            "a passage by itself is ranked by its own second half; store several in one call"
                        )
                    others = neighbours(passages, number, cache.passage.positions)
                    cache.passage.kv_in_context = kv_after_context(model, storage, method, passage, others, tag)
                fill(storage, cache, torch.cat([cache.passage.context_ids, passage]), pin)
            report = report.with_prompt(len(passage), restored, cache.stats.tokens_stored)
            bar.update(len(passage))
    storage.flush()
    return report


class PassageServing(Serving):
    """Computes one passage behind tokens whose KV is left out, and stores it.

    Args:
        like: of a cache with a method for passages, which says how it is ranked and cut.
        context: int `[n]`, what stands between the sink and the passage; if any, nothing is stored.
    """

    method: Passages

    def __init__(self, like: Serving, context: torch.Tensor | None) -> None:
        super().__init__(like.attachment, like.store, like.method, like.options, like.collector)
        self.sink = sink_token(like.attachment.config)
        sink = torch.tensor([] if self.sink is None else [self.sink], dtype=torch.int64)
        self.context_ids = sink if context is None else torch.cat([sink, context])
        """What is computed before the passage: the sink, if the model has such a token, and the context."""
        self.computed: list[KV] = []
        """With a context: the passage's keys and values, layer by layer."""
        self.kv_in_context: list[KV] | None = None
        """The same of another cache, for the ranking."""
        self._in_context = context is not None

    @property
    def positions(self) -> int:
        """How many the model has."""
        return getattr(self.attachment.config, "max_position_embeddings", None) or sys.maxsize

    def stored_tokens(self, passage: torch.Tensor) -> int:
        """How many tokens of a passage, int `[tokens]`, are stored already."""
        config, identity = self.attachment.config, self.identify(closely=True)
        if isinstance(identity, str):
            return 0
        regime = rope_regime(config, len(passage)) or ""
        find = passage_finder(self.store, self.method, config, identity.fingerprint, regime, (0,))
        pieces = find(passage.numpy(), 0)
        return pieces[0].count if pieces else 0

    def new_recorder(self, identity: Identity, regime: str, pads: list[int], check: DecodingCheck) -> Recorder:
        """See `Serving`."""
        method, store = self.method, self.store
        hasher = store.hasher(identity.fingerprint, f"{method.passages} {self.sink}", regime)
        history = History(hasher, [pad + len(self.context_ids) for pad in pads])  # left out like padding
        submit: Submit = _drop if self._in_context else store.submit
        rank: Rank = self._keep if self._in_context else partial(method.rank, kv_in_context=self.kv_in_context)
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
