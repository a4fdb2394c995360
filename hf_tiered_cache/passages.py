"""Storing passages: each computed alone, behind a sink token, with a ranking of its tokens, under its label."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .context_ranking import ContextRanker, Wanted
from .documents import Entry, enter_documents
from .errors import ConfigError
from .geometry import HASH_TOKENS
from .identity import varying_rope
from .methods import Method, Passages
from .passage_cache import PassageCache, batches, whole_tokens
from .precompute import PrecomputeReport, as_prompts, bar_over
from .ranking import check_ranks, passages_method, rank_one
from .restore.rankings import Columns
from .storage import Storage
from .store.catalogue import SegmentRow
from .store.documents import check_label, passage_name

logger = logging.getLogger("hf_tiered_cache")

BATCH_TOKENS = 4096
"""Of passages of one length, so many are computed in one pass."""


@dataclass(eq=False)
class _Passage:
    """A passage of a call, whatever number of times it is given there."""

    ids: torch.Tensor
    """int64 `[tokens]`, as far as they are stored."""
    text: torch.Tensor
    """int64 `[tokens]`, as it was given."""
    labels: dict[str, None] = field(default_factory=dict)
    given: dict[int | str, None] = field(default_factory=dict)
    """Its neighbours: numbers of passages in the call, or labels."""
    row: SegmentRow | None = None
    """In which all of it is stored."""

    @property
    def tokens(self) -> int:
        """As it was given."""
        return len(self.text)

    @property
    def is_stored(self) -> bool:
        """Whether it is long enough to be."""
        return len(self.ids) >= HASH_TOKENS

    @property
    def name(self) -> str:
        """See `passage_name`; "" if it is not stored."""
        return "" if self.row is None else passage_name(self.row.chain)


class _Call:
    """What a call gives: distinct passages, and what is said of them.

    Args:
        like: a cache of the model's, which says how passages are computed.
        input_ids: see `KVStore.precompute`.
        labels, neighbours: of each; None for none.

    Raises:
        ConfigError: these are not for each passage one, or not to be understood.
    """

    def __init__(
        self,
        like: PassageCache,
        input_ids: Any,
        labels: Sequence[str] | None,
        neighbours: Sequence[Sequence[int | str]] | None,
    ) -> None:
        self.like = like.passage
        prompts = as_prompts(input_ids, empty=True)
        for what, given in (("labels", labels), ("neighbours", neighbours)):
            if given is not None and (isinstance(given, str) or len(given) != len(prompts)):
                raise ConfigError(f"{what} are one for each passage: {len(prompts)}, not {given!r:.80}")
        for label in labels or ():
            check_label(label)
        self.labels = list(dict.fromkeys(labels or ()))
        cut = varying_rope(self.like.attachment.config) is None  # else frequencies may follow the length
        by_ids: dict[tuple[int, ...], _Passage] = {}
        self.given: list[_Passage] = []
        """In order, as often as they are given."""
        for number, prompt in enumerate(prompts):
            ids = prompt[: whole_tokens(len(prompt))] if cut and len(prompt) >= HASH_TOKENS else prompt
            passage = by_ids.setdefault(tuple(ids.tolist()), _Passage(ids, prompt))
            passage.labels |= dict.fromkeys(labels[number : number + 1] if labels else ())
            passage.given |= dict.fromkeys(neighbours[number] if neighbours else ())
            self.given.append(passage)
        self.passages = [passage for passage in by_ids.values() if passage.tokens]
        for passage in self.passages:
            if any(not isinstance(one, str) and not -len(prompts) <= one < len(prompts) for one in passage.given):
                said = f"{list(passage.given)!r:.80}"
                raise ConfigError(f"a neighbour is a label, or a number below {len(prompts)}, not {said}")

    @property
    def stored(self) -> list[_Passage]:
        """Those that are long enough to be stored."""
        return [passage for passage in self.passages if passage.is_stored]

    def find(self) -> None:
        """See which are stored."""
        passages = self.stored
        for passage, row in zip(passages, self.like.find([passage.ids for passage in passages]), strict=True):
            passage.row = row

    def wanted(self) -> list[Wanted]:
        """Those that are stored by themselves, to be ranked."""
        named = {one for passage in self.passages for one in passage.given if isinstance(one, str)}
        by_label = {label: [p.name for p in self.passages if label in p.labels] for label in named}
        if unknown := {label for label, names in by_label.items() if not names}:
            for record in self.like.store.documents.all():
                if record.label in unknown and record.key == self.key(record.label):
                    by_label[record.label] = list(record.passages)
        for label in unknown:
            if not by_label[label]:
                raise ConfigError(f"no document of this model is called {label!r}; store.documents() lists them")
        found = []
        for passage in self.stored:
            if passage.row is None or passage.row.tokens != whole_tokens(len(passage.ids)):
                continue  # a part of another passage goes by that one's ranking
            names = [by_label[one] if isinstance(one, str) else [self.given[one].name] for one in passage.given]
            given = tuple(dict.fromkeys(name for some in names for name in some if name))
            ids = passage.ids[: passage.row.tokens]
            found.append(Wanted(ids, passage.name, given))
        return found

    def texts(self) -> dict[str, torch.Tensor]:
        """By name those that are stored by themselves."""
        stored = [p for p in self.stored if p.row is not None and p.row.tokens == whole_tokens(len(p.ids))]
        return {passage.name: passage.text for passage in stored}

    def key(self, label: str) -> tuple[str, str, str]:
        """Of a label's record."""
        identity = self.like.identify(closely=False)
        fingerprint = "" if isinstance(identity, str) else identity.fingerprint
        return label, fingerprint, f"{self.like.method.passages} {self.like.sink}"

    def entries(self) -> list[Entry]:
        """What the labels stand for now."""
        identity = self.like.identify(closely=False)
        facts = {} if isinstance(identity, str) else identity.facts
        found = []
        for label in self.labels:
            mine = [passage for passage in self.passages if label in passage.labels and passage.row is not None]
            names = tuple(dict.fromkeys(passage.name for passage in mine))
            tokens = sum(whole_tokens(len(passage.ids)) for passage in mine)
            found.append(Entry(self.key(label), names, tokens, facts))
        return found


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
    labels: Sequence[str] | None = None,
    neighbours: Sequence[Sequence[int | str]] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> PrecomputeReport:
    """See `KVStore.precompute(segments=True)`."""
    storage.check_open()
    wanted_method = passages_method(method)
    call = _Call(PassageCache(model, storage, wanted_method, tag), input_ids, labels, neighbours)
    call.find()
    found = [passage for passage in call.stored if passage.row is not None]
    report = PrecomputeReport(
        len(call.passages),
        tokens=sum(passage.tokens for passage in call.passages),
        restored=sum(whole_tokens(len(passage.ids)) for passage in found),
        too_short=len(call.passages) - len(call.stored),
    )
    if report.too_short:
        logger.warning(
            "%d of %d passages have fewer than %d tokens: they are not stored, and computed in each prompt",
            *(report.too_short, report.prompts, HASH_TOKENS),
        )
    compute = partial(_compute, storage, model, wanted_method, label=label, tag=tag)
    with bar_over(report.tokens, progress) as bar:
        bar.update(sum(passage.tokens for passage in call.passages if passage.row or not passage.is_stored))
        for batch in batches([p for p in call.stored if p.row is None], _length, batch_tokens):
            report = replace(report, stored=report.stored + compute(batch))
            bar.update(sum(passage.tokens for passage in batch))
    storage.flush()
    call.find()
    if pin:
        storage.pin({passage.row.id for passage in call.stored if passage.row is not None})
    _rank(storage, model, call, wanted_method, tag, progress, batch_tokens)
    report = replace(report, removed=enter_documents(storage, call.entries()))
    if call.labels:  # what was found may have been another label's alone, which was deleted before this one had it
        call.find()
        for batch in batches([p for p in found if p.row is None], _length, batch_tokens):
            report = replace(report, stored=report.stored + compute(batch))
    storage.flush()
    return report


def rank_passages(
    storage: Storage,
    model: nn.Module,
    input_ids: Any,
    method: Passages,
    tag: str,
    progress: bool,
    neighbours: Sequence[Sequence[int | str]] | None = None,
    stale: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> int:
    """Rank stored passages. Returns how many of those that are given are stored, and ranked now.

    Args:
        stale: whether only those are that are not ranked, or behind others than they would be now.
    """
    check_ranks(method)
    storage.flush()
    call = _Call(PassageCache(model, storage, method, tag), input_ids, None, neighbours)
    call.find()
    if method.ranks_alone:
        return sum(_rank_alone(storage, method, passage, stale) for passage in call.stored)
    ranker = ContextRanker(storage, model, method, batch_tokens, tag, call.texts())
    wanted = [one for one in call.wanted() if not stale or ranker.stale(one)]
    with bar_over(sum(len(one.ids) for one in wanted), progress, "rank") as bar:
        return ranker.rank(wanted, bar)


def _compute(
    storage: Storage,
    model: nn.Module,
    method: Passages,
    batch: Sequence[_Passage],
    *,
    label: str,
    tag: str,
) -> int:
    """Compute passages of one length, and have them stored. Returns how many tokens are."""
    labels = [next(iter(passage.labels), label) for passage in batch]
    cache = PassageCache(model, storage, method, tag, labels=labels)
    cache.compute(torch.stack([passage.ids for passage in batch]))
    for row, segment in enumerate(cache.passage.stored()):
        if columns := cache.passage.scores.get(row):  # behind the segment in the writer's queue
            storage.writer.later(partial(_keep_scores, storage, segment, columns))
    return cache.stats.tokens_stored


def _rank(
    storage: Storage,
    model: nn.Module,
    call: _Call,
    method: Passages,
    tag: str,
    progress: bool,
    batch_tokens: int,
) -> None:
    """Rank what is stored now and not ranked yet, as the method asks for."""
    if method.ranks_alone:
        for passage in call.stored:
            _rank_alone(storage, method, passage, missing=True)
    elif method.ranks_in_context:
        unranked = {p.name for p in call.stored if p.row is not None and _lacks(storage, method, p.row)}
        wanted = [one for one in call.wanted() if one.name in unranked]
        if wanted:
            with bar_over(sum(len(one.ids) for one in wanted), progress, "rank") as bar:
                ContextRanker(storage, model, method, batch_tokens, tag, call.texts()).rank(wanted, bar)


def _rank_alone(storage: Storage, method: Passages, passage: _Passage, missing: bool) -> bool:
    """Rank a stored passage by its own KV, or with `missing` only if it is not. Returns whether it was."""
    if passage.row is None or (missing and not _lacks(storage, method, passage.row)):
        return False
    reader = storage.disk.found(passage.row)
    return reader is not None and rank_one(storage, method, reader)


def _lacks(storage: Storage, method: Passages, row: SegmentRow) -> bool:
    """Whether a passage has not been ranked so."""
    reader = storage.disk.found(row)
    return reader is not None and method.ranked_by not in storage.rankings.of(reader)


def _length(passage: _Passage) -> tuple[int]:
    return (len(passage.ids),)


def _keep_scores(storage: Storage, segment_id: str, columns: Columns) -> None:
    """Keep how a passage's tokens rank beside it, if it was stored."""
    if storage.disk.index.row(segment_id) is not None and (reader := storage.disk.reader(segment_id)) is not None:
        storage.rankings.keep(reader, columns)
