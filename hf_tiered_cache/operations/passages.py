"""Storing passages, each computed alone after a lead text and stored under its label, and ranking their tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..cache.storage import Storage
from ..errors import ConfigError, IntegrityError
from ..identity import varying_rope
from ..methods import Method, Passages, make_method
from ..passages.ranking import KV, RankingScores, rank_tokens
from ..store.catalogue import SegmentRow
from ..store.documents import DocumentRecord, passage_name
from ..store.format import is_passage
from ..store.geometry import HASH_TOKENS
from ..store.records import check_name
from ..store.segment import SegmentReader
from .contents import BATCH_TOKENS, enter_documents
from .passage_cache import PassageCache, whole_tokens
from .precompute import PrecomputeReport, PrecomputeSettings, as_prompts, bar_over

logger = logging.getLogger("hf_tiered_cache")


def passages_method(method: Method | str | None) -> Passages:
    """Return a method that reuses passages; CacheTune if `method` is None. Raises ConfigError if it does not."""
    method = make_method(method or "cache_tune")
    if not isinstance(method, Passages):
        raise ConfigError(f"{type(method).__name__} restores prefixes only; call precompute without passages=True")
    return method


def rank_stored(storage: Storage, method: Passages, ids: Iterable[str] | None, progress: bool) -> int:
    """See `KVStore.rank`.

    Passages that cannot be read, or scores that cannot be kept, are skipped and counted in the store's statistics.
    """
    if not method.ranked_by:
        raise ConfigError(f"{type(method).__name__} does not use a ranking of tokens; CacheTune does")
    if method.ranks_in_context:
        raise ConfigError(
            f"the ranking {method.ranking!r} requires the tokens of the passages, which are not stored; "
            "store.precompute(model, passages, passages=True) adds the ranking to passages that lack it"
        )
    storage.flush()
    rows = [row for row in storage.disk.index.rows() if is_passage(row.provenance)]
    requested_ids = {row.id for row in rows} if ids is None else set(ids)
    bar = tqdm([row.id for row in rows if row.id in requested_ids], unit="passage", desc="rank", disable=not progress)
    return sum(rank_one(storage, method, storage.disk.reader(name)) for name in bar)


def rank_one(
    storage: Storage, method: Passages, reader: SegmentReader | None, kv_in_context: Iterable[KV] | None = None
) -> bool:
    """Rank the tokens of a stored passage, and keep the scores in its sidecar. Return whether they are stored now.

    `reader` is None if the segment cannot be read. `kv_in_context` are the keys and values of the passage after another
    lead, for rankings that compare with these.
    """
    if reader is None or not reader.shape.whole:
        return False
    try:
        scores = rank_tokens(_stored_kv(storage, reader), method.ranking, kv_in_context)
    except (IntegrityError, OSError) as error:
        storage.disk.report(reader.id, error)
        return False
    return storage.rankings.keep(reader, {method.ranked_by: scores})


def _stored_kv(storage: Storage, reader: SegmentReader) -> Iterator[KV]:
    """Yield the unrotated keys and the values of a whole segment, layer by layer: `[heads, tokens, dim]` each.

    Raises IntegrityError or OSError if a block cannot be read.
    """
    shape, blocks = reader.shape, dict[int, torch.Tensor]()
    for layer, groups in sorted(shape.restoring_groups.items()):
        indexes = [group.index for group in groups]
        blocks = {index: blocks[index] if index in blocks else storage.blocks_of(reader, index) for index in indexes}
        heads: dict[str, dict[int, torch.Tensor]] = {"key": {}, "value": {}}  # by tensor, then by the first head
        for group in groups:
            for part in group.parts:
                if part.layer == layer:
                    heads[part.tensor][part.first_head] = shape.unpack(blocks[group.index], group, part)
        keys, values = (torch.cat([parts[first] for first in sorted(parts)]) for parts in heads.values())
        yield keys, values


@dataclass(eq=False)
class _Passage:
    """Distinct passage of a call, which may be given several times."""

    ids: torch.Tensor
    """Token ids, int64 `[tokens]`, cut to the part that is stored where possible."""
    tokens: int
    """Number of tokens as given."""
    labels: dict[str, None] = field(default_factory=dict)
    row: SegmentRow | None = None
    """Segment that stores the whole passage."""

    @property
    def stored_tokens(self) -> int:
        """Number of tokens that are stored; 0 if the passage is too short."""
        return whole_tokens(len(self.ids))


class _Call:
    """Call of `precompute_passages`: its distinct passages, and their labels. Raises ConfigError if invalid."""

    def __init__(
        self,
        storage: Storage,
        new_cache: Callable[..., PassageCache],
        input_ids: Any,
        label: str,
        labels: Sequence[str] | None,
        batch_tokens: int,
    ) -> None:
        self._storage, self._new_cache, self._label, self._batch_tokens = storage, new_cache, label, batch_tokens
        self._like = new_cache().passage
        self._method = self._like.method
        prompts = as_prompts(input_ids, empty=True)
        if labels is not None and (isinstance(labels, str) or len(labels) != len(prompts)):
            raise ConfigError(f"labels must be one for each of the {len(prompts)} passages, not {labels!r:.80}")
        for document in labels or ():
            check_name(document, "document's label", most=1000)
        self.labels = list(dict.fromkeys(labels or ()))
        is_cut = not varying_rope(self._like.attachment.config)  # otherwise RoPE frequencies may depend on the length
        by_ids: dict[tuple[int, ...], _Passage] = {}
        for number, prompt in enumerate(prompts):
            ids = prompt[: whole_tokens(len(prompt))] if is_cut and len(prompt) >= HASH_TOKENS else prompt
            passage = by_ids.setdefault(tuple(ids.tolist()), _Passage(ids, len(prompt)))
            passage.labels |= dict.fromkeys(labels[number : number + 1] if labels else ())
        self.passages = [passage for passage in by_ids.values() if passage.tokens]
        self.storable = [passage for passage in self.passages if passage.stored_tokens]
        """Passages that are long enough to be stored."""

    def find(self) -> list[_Passage]:
        """Look up which passages are stored, and return these."""
        rows = self._like.find([passage.ids for passage in self.storable])
        for passage, row in zip(self.storable, rows, strict=True):
            passage.row = row
        return [passage for passage in self.storable if passage.row is not None]

    def compute(self, passages: Iterable[_Passage], bar: tqdm) -> None:
        """Compute passages that are not stored, and queue them for storing."""
        for batch in self._batches([passage for passage in passages if passage.row is None], self._method.lead):
            cache = self._new_cache(labels=[next(iter(passage.labels), self._label) for passage in batch])
            cache.compute(torch.stack([passage.ids for passage in batch]))
            for row, segment in cache.passage.stored().items():
                if scores := cache.passage.scores.get(row):  # after the segment in the writer's queue
                    self._storage.writer.later(partial(_keep_scores, self._storage, segment, scores))
            bar.update(sum(passage.tokens for passage in batch))

    def rank(self, progress: bool) -> None:
        """Rank stored passages that lack the method's ranking. Parts of a longer segment keep its ranking."""
        storage, method = self._storage, self._method
        unranked = [passage for passage in self.storable if self._lacks_ranking(passage)]
        if not method.ranks_in_context:
            for passage in unranked:
                rank_one(storage, method, self._reader(passage))
            return
        with bar_over(sum(passage.stored_tokens for passage in unranked), progress and bool(unranked), "rank") as bar:
            for batch in self._batches(unranked, method.ranking_lead_tokens):
                cache = self._new_cache(ranking_lead=method.ranking_lead_tokens)
                cache.compute(torch.stack([passage.ids[: passage.stored_tokens] for passage in batch]))
                for row, passage in enumerate(batch):
                    if row in cache.passage.computed:
                        rank_one(storage, method, self._reader(passage), cache.passage.computed.pop(row))
                bar.update(sum(passage.stored_tokens for passage in batch))

    def records(self) -> list[DocumentRecord]:
        """Return the records of the labels, with the passages that are stored for them now.

        There are none for a model that cannot be identified: nothing of it is stored.
        """
        identity, now = self._like.identify(begins_request=False), time.time()
        if isinstance(identity, str):
            return []
        fingerprint, facts = identity.fingerprint, identity.facts
        made_with = f"{self._method.passages} {self._like.sink}"
        records = []
        for label in self.labels:
            tokens: dict[str, int] = {}  # a segment may store several passages that begin alike
            for passage in self.passages:
                if label in passage.labels and passage.row is not None:
                    name = passage_name(passage.row.chain)
                    tokens[name] = max(tokens.get(name, 0), passage.stored_tokens)
            contents = tuple(tokens), sum(tokens.values())
            records.append(DocumentRecord(label, fingerprint, made_with, *contents, now, now, model=dict(facts)))
        return records

    def incomplete(self) -> list[str]:
        """Return the labels of passages that could be stored, and are not."""
        missing_labels = {label for passage in self.storable if passage.row is None for label in passage.labels}
        return [label for label in self.labels if label in missing_labels]

    def _reader(self, passage: _Passage) -> SegmentReader | None:
        return None if passage.row is None else self._storage.disk.found([passage.row])[0]

    def _lacks_ranking(self, passage: _Passage) -> bool:
        method, reader = self._method, self._reader(passage)
        if not method.ranked_by or reader is None or reader.shape.tokens != passage.stored_tokens:
            return False
        is_rankable = reader.shape.layout.position_independent or not method.ranks_in_context
        return is_rankable and method.ranked_by not in self._storage.rankings.read(reader)

    def _batches(self, passages: Iterable[_Passage], lead: int) -> Iterator[list[_Passage]]:
        """Yield batches of passages of equal length, longest first, so that none needs padding.

        The `lead` tokens before each passage count. One passage may have more tokens than the maximum.
        """
        by_length: dict[int, list[_Passage]] = {}
        for passage in passages:
            by_length.setdefault(len(passage.ids), []).append(passage)
        for length, equal in sorted(by_length.items(), reverse=True):
            rows = max(1, self._batch_tokens // max(1, lead + length))
            yield from (equal[first : first + rows] for first in range(0, len(equal), rows))


def precompute_passages(
    storage: Storage,
    model: nn.Module,
    input_ids: Any,
    settings: PrecomputeSettings,
    labels: Sequence[str] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> PrecomputeReport:
    """See `KVStore.precompute(passages=True)`."""
    new_cache = partial(PassageCache, model, storage, passages_method(settings.method), settings.tag)
    call = _Call(storage, new_cache, input_ids, settings.label, labels, batch_tokens)
    stored_before = call.find()
    report = PrecomputeReport(
        len(call.passages),
        tokens=sum(passage.tokens for passage in call.passages),
        restored=sum(passage.stored_tokens for passage in stored_before),
        too_short=len(call.passages) - len(call.storable),
    )
    if report.too_short:
        logger.warning(
            "%d of %d passages have fewer than %d tokens, so they are not stored, but computed in each prompt",
            *(report.too_short, report.prompts, HASH_TOKENS),
        )
    with bar_over(report.tokens, settings.progress) as bar:
        bar.update(sum(passage.tokens for passage in call.passages if passage.row or not passage.stored_tokens))
        call.compute(call.storable, bar)
    storage.flush()
    call.find()
    call.rank(settings.progress)
    num_removed, kept_labels = enter_documents(storage, call.records(), call.incomplete())
    for document in kept_labels:
        logger.warning(
            "document %r was not replaced, because not all of its new passages could be stored; see the other "
            "warnings, and store it again",
            document,
        )
    if call.labels:  # a found passage may have been deleted with another label in the meantime
        call.find()
        call.compute(stored_before, bar_over(0, progress=False))
    storage.flush()
    stored_passages = call.find()
    if settings.pin:  # what no label names could not be found to be unpinned
        passages_to_pin = [
            passage for passage in stored_passages if not passage.labels or passage.labels.keys() - set(kept_labels)
        ]
        storage.disk.pin({passage.row.id for passage in passages_to_pin if passage.row is not None})
    new = [passage for passage in stored_passages if passage not in stored_before]
    return replace(
        report, stored=sum(passage.stored_tokens for passage in new), removed=num_removed, kept=len(kept_labels)
    )


def _keep_scores(storage: Storage, segment_id: str, scores: RankingScores) -> None:
    """Save the ranking of a passage's tokens as a sidecar, if the passage was stored."""
    if storage.disk.index.row(segment_id) is not None and (reader := storage.disk.reader(segment_id)) is not None:
        storage.rankings.keep(reader, scores)
