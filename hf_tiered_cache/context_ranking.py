"""Ranking stored passages by how far others change their KV.

The others' text stands before them, where the caller gives it. Of those that were stored earlier nobody knows the
tokens: their stored KV stands there, which says somewhat less, for each of them saw nothing but itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from .errors import IntegrityError, RestoreError
from .identity import rope_regime, varying_rope
from .methods import Passages
from .passage_cache import PassageCache, batches
from .ranking import stored_kv
from .restore.neighbours import CONTEXT_TOKENS, Corpus, Neighbours, tails
from .restore.plan import SegmentSlice
from .storage import Storage
from .store.catalogue import SegmentRow
from .store.documents import by_passage
from .store.segment import SegmentReader

logger = logging.getLogger("hf_tiered_cache")
_ATTEMPTS = 3
"""Times that passages are ranked behind others when some of these turn out to be gone."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """A stored passage that is to be ranked.

    Args:
        ids: int64 `[tokens]`, all of which are stored.
        name: see `passage_name`.
        given: the names of the passages that are to stand before it, the nearest first; () to choose from the corpus.
    """

    ids: torch.Tensor
    name: str
    given: tuple[str, ...] = ()


class ContextRanker:
    """Ranks passages of a model behind others of its corpus: all that is stored of this model, computed in this way.

    Args:
        storage: where they are. What was computed lately is flushed.
        method: whose ranking it is.
        batch_tokens: of passages of one length that are computed in one pass.
        tag: as for `TieredCache`.
        texts: by name the passages whose tokens are known, int64 `[tokens]` each.
    """

    def __init__(
        self,
        storage: Storage,
        model: nn.Module,
        method: Passages,
        batch_tokens: int,
        tag: str,
        texts: Mapping[str, torch.Tensor],
    ) -> None:
        self._storage, self._model, self._method, self._tag = storage, model, method, tag
        self._batch_tokens, self._texts = batch_tokens, texts
        self._like = PassageCache(model, storage, method, tag).passage
        identity = self._like.identify(closely=True)
        self._fingerprint = None if isinstance(identity, str) else identity.fingerprint
        self.look()

    def look(self) -> None:
        """See what the corpus is now."""
        provenance, rows = self._like.method.passages, self._storage.segments()
        mine = [row for row in rows if (row.fingerprint, row.provenance) == (self._fingerprint, provenance)]
        live = {row.id for row in self._storage.disk.index.live([row.id for row in mine]) or ()}
        self._rows: dict[str, SegmentRow] = {}
        for name, found in by_passage(mine).items():
            whole = [row for row in found if row.id in live and row.valid_hashes * len(row.first) == len(row.chain)]
            if whole:
                self._rows[name] = min(whole, key=lambda row: row.id)
        self._corpus = Corpus({name: row.tokens for name, row in self._rows.items()})

    def stale(self, wanted: Wanted) -> bool:
        """Whether a passage is not ranked, or behind others than it would be now, or behind their stored KV where their
        text is known now. Given ones count as long as they are there.
        """
        reader, ranking = self._reader(wanted.name), self._method.ranked_by
        if reader is None or not reader.shape.layout.position_independent:
            return False
        known = self._storage.rankings.neighbours(reader, ranking)
        if known is None or ranking not in self._storage.rankings.of(reader):
            return True
        if known.given and not wanted.given:
            return not all(name in self._corpus for name in known.names)
        now = self._neighbours(wanted)
        return (known.names, known.given) != (now.names, now.given) or (now.computed and not known.computed)

    def rank(self, wanted: Iterable[Wanted], bar: tqdm) -> int:
        """Rank passages. Returns how many are ranked now; what cannot be read is not, which is counted."""
        left, done = list(wanted), 0
        for attempt in range(_ATTEMPTS):
            if attempt:
                self.look()
            again: list[Wanted] = []
            chosen = [(one, self._neighbours(one)) for one in left]
            for batch in batches(chosen, self._lengths, self._batch_tokens):
                try:
                    done += self._rank_batch(batch)
                except RestoreError:  # reported, and gone by now
                    again += [one for one, _ in batch]
                else:
                    bar.update(sum(len(one.ids) for one, _ in batch))
            left = again
        if left:
            logger.warning("%d passages were not ranked: what stood before them could not be read", len(left))
        return done

    def _room(self, tokens: int) -> int:
        """For other tokens before a passage of so many."""
        config, room = self._like.attachment.config, CONTEXT_TOKENS
        if varying_rope(config) is not None:  # under the frequencies of short prompts, as what stands before it
            while room > 0 and rope_regime(config, 1 + room + tokens) != rope_regime(config, 1):
                room -= 1
        return max(0, min(room, self._like.positions - 1 - tokens))

    def _neighbours(self, wanted: Wanted) -> Neighbours:
        given = tuple(name for name in wanted.given if name in self._corpus and name != wanted.name)
        chosen = given or self._corpus.choose(wanted.name, self._room(len(wanted.ids))) or (wanted.name,)
        return Neighbours(chosen, bool(given), all(name in self._texts for name in chosen))

    def _counts(self, wanted: Wanted, neighbours: Neighbours) -> list[int]:
        """How many stored tokens of each neighbour stand before a passage; of itself its second half."""
        lengths = [self._corpus.tokens.get(name, 0) // (2 if name == wanted.name else 1) for name in neighbours.names]
        return tails(lengths, self._room(len(wanted.ids)))

    def _text(self, wanted: Wanted, neighbours: Neighbours) -> torch.Tensor:
        """Of computed neighbours what stands before a passage, int64 `[n]`; of itself its second half."""
        texts = [self._texts[name] for name in reversed(neighbours.names)]
        if neighbours.names == (wanted.name,):
            texts = [texts[0][len(texts[0]) // 2 :]]
        text = torch.cat(texts)
        return text[max(0, len(text) - self._room(len(wanted.ids))) :]

    def _lengths(self, job: tuple[Wanted, Neighbours]) -> tuple[int, int, int]:
        """What passages that are computed together have in common: how many tokens are computed, how many are restored
        before them, and their own.
        """
        own = len(job[0].ids)
        if job[1].computed:
            return len(self._text(*job)) + own, 0, own
        return own, sum(self._counts(*job)), own

    def _reader(self, name: str) -> SegmentReader | None:
        row = self._rows.get(name)
        return None if row is None else self._storage.disk.found(row)

    def _rank_batch(self, batch: Sequence[tuple[Wanted, Neighbours]]) -> int:
        """Raises RestoreError: what stands before them cannot be read."""
        readers = [self._reader(one.name) for one, _ in batch]
        whole = [reader is not None and reader.shape.layout.position_independent for reader in readers]
        batch = [job for job, there in zip(batch, whole, strict=True) if there]
        if not batch:
            return 0
        if any(neighbours.names == (one.name,) for one, neighbours in batch):
            logger.warning("a passage by itself is ranked by its own second half; store several")
        computed, restored, own = self._lengths(batch[0])
        if computed + restored == own:  # no position is left for anything before them
            return sum(self._keep(one, neighbours, np.zeros(len(one.ids), np.float32)) for one, neighbours in batch)
        cache = self._cache(batch)
        cache.compute(torch.stack([one.ids for one, _ in batch]))
        done = 0
        for row, (one, neighbours) in enumerate(batch):
            reader = self._reader(one.name)
            if reader is None or row not in cache.passage.computed:
                continue
            try:
                scores = self._method.rank(stored_kv(self._storage, reader), cache.passage.computed.pop(row))
            except (IntegrityError, OSError) as error:
                self._storage.disk.report(reader.id, error)
                continue
            done += self._keep(one, neighbours, scores)
        return done

    def _cache(self, batch: Sequence[tuple[Wanted, Neighbours]]) -> PassageCache:
        """For passages that have as much before them. Raises RestoreError: some of it is gone."""
        if not batch[0][1].computed:
            before = [self._pieces(*job) for job in batch]
            return PassageCache(self._model, self._storage, self._method, self._tag, before=before)
        context = torch.stack([self._text(*job) for job in batch])  # int64 [rows, n]
        return PassageCache(self._model, self._storage, self._method, self._tag, context=context)

    def _pieces(self, wanted: Wanted, neighbours: Neighbours) -> tuple[SegmentSlice, ...]:
        at, pieces = self._like.context_ids.shape[1], []
        for name, count in reversed(list(zip(neighbours.names, self._counts(wanted, neighbours), strict=True))):
            reader = self._reader(name)
            if reader is None:
                raise RestoreError(name, "it is gone")
            if count:  # as if it were exact: what is computed behind it is looked at, and not stored
                pieces.append(SegmentSlice(reader, reader.shape.tokens - count, count, at))
            at += count
        return tuple(pieces)

    def _keep(self, wanted: Wanted, neighbours: Neighbours, scores: np.ndarray) -> bool:
        """Keep how a passage's tokens rank. Returns whether it is there now."""
        reader, ranking = self._reader(wanted.name), self._method.ranked_by
        return reader is not None and self._storage.rankings.keep(reader, {ranking: scores}, {ranking: neighbours})
