"""Cache that computes passages, one per row, after a lead text without recorded KV.

The lead text belongs to no document. So the KV of a document holds content of no other document, and deleting a
document deletes its content.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, DynamicCache

from ..cache.cache_state import CacheOptions
from ..cache.calibrations import change_records, records_of
from ..cache.executor import Executor
from ..cache.recorder import Recorder
from ..cache.request import ForwardArguments, Request
from ..cache.sequence import SequenceState
from ..cache.storage import Storage
from ..cache.stored_cache import StoredCache, prepare
from ..identity import Identity, rope_regime
from ..layers import LayeredCache
from ..methods import Passages
from ..methods.passages import sink_token
from ..passages.ranking import KV, RankingScores, rank_tokens
from ..patches.attach import Attachment
from ..restore.hashes import History
from ..store import HASH_BYTES
from ..store.catalogue import SegmentRow
from ..store.geometry import HASH_TOKENS
from ..store.writer import PendingSegment
from .precompute import run

TEXT = (
    "The following text has been taken from a larger collection of documents, articles and notes. Each of them was "
    "written by another author, at another time, about another subject, and they stand here one behind the other in no "
    "particular order. Some are long and some are short; some tell of people and places, of films, music and books, "
    "some of history, science, law or sport. Read them with care, since a question about one or several of them may "
    "follow at the end.\n\n"
    "Harbour\nA harbour is a place on the coast where ships lie sheltered from wind and waves. Some harbours are "
    "natural, such as the mouths of large rivers; others were built with walls of stone. Goods are loaded and unloaded "
    "there, and people go on board or ashore.\n\n"
    "Bridge\nA bridge is a structure that carries a road, a railway or a path over a river, a valley or another road. "
    "The first bridges were logs and flat stones. Arches were known in ancient times; steel made much longer spans "
    "possible in the nineteenth century.\n\n"
)
"""Text that ends like a document, so that a passage begins as it does after another one."""
_MIN_TOKENS, _MAX_UNKNOWN = 16, 0.02
"""Minimum number of tokens that a tokenizer must make of the text, and maximum share of unknown tokens."""
logger = logging.getLogger("hf_tiered_cache")


def kept_lead(storage: Storage, attachment: Attachment, fingerprint: str, first: int, tokens: int) -> torch.Tensor:
    """Return the lead text that this store keeps for a model, at most `tokens` tokens after `first`: int64 `[n]`.

    The first call tokenizes the end of `TEXT` with the tokenizer in the model's folder or local cache. Without a
    tokenizer, or if it does not know the language, the model generates a text. If another process was faster, its text
    is returned.
    """

    def is_sound(record: dict[str, Any]) -> bool:
        text = record.get("text")
        return isinstance(text, list) and 0 < len(text) <= tokens and all(_is_id(attachment, token) for token in text)

    name = f"{fingerprint} lead {first} {tokens}"
    sound = list(filter(is_sound, records_of(storage, name)))
    if not sound:
        lead = [{"text": _tokenized(attachment)[-tokens:] or write(attachment, first, tokens)}]
        writable = storage.disk.backend.writable
        sound = change_records(storage, name, lambda texts: list(filter(is_sound, texts)) or lead) if writable else lead
    return torch.tensor(sound[0]["text"])


def _tokenized(attachment: Attachment) -> list[int]:
    """Return `TEXT` as token ids of the model; [] without a tokenizer that knows its words."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            attachment.model.name_or_path, local_files_only=True, trust_remote_code=False
        )
        text: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the folder may hold anything
        logger.debug("the model's tokenizer cannot be loaded: %r", error)
        return []
    num_known = sum(token != tokenizer.unk_token_id and _is_id(attachment, token) for token in text)
    return text if len(text) >= _MIN_TOKENS and num_known >= (1 - _MAX_UNKNOWN) * len(text) else []


@torch.no_grad()
def write(attachment: Attachment, first: int, tokens: int) -> list[int]:
    """Generate `tokens` tokens after `first` by sampling from the model, with a fixed seed, without special tokens."""
    cache, text = DynamicCache(config=attachment.config), [first]
    generator = torch.Generator().manual_seed(0)
    special, arguments = _special_tokens(attachment), ForwardArguments.of(attachment)
    for _ in range(tokens):
        ids = torch.tensor([text[-1:]], device=attachment.device)  # [1, 1]
        positions = arguments.positions(ids, len(text) - 1)
        logits = attachment.forward(ids, cache, logits_to_keep=1, **positions).logits[0, -1]
        probabilities = logits.float().cpu().index_fill(0, special, -torch.inf).softmax(0)  # [vocabulary]
        text.append(int(probabilities.multinomial(1, generator=generator)))
    return text[1:]


def _special_tokens(attachment: Attachment) -> torch.Tensor:
    """Return the token ids that configurations have a name for, int64 `[n]`, such as those of BOS, EOS and images."""
    model, token_ids = attachment.model, set[int]()
    for config in (attachment.config, model.config, getattr(model, "generation_config", None)):
        for name, value in vars(config).items() if config is not None else ():
            if name.endswith(("_token_id", "_token_index")):
                values = value if isinstance(value, list) else [value]
                token_ids.update(token_id for token_id in values if _is_id(attachment, token_id))
    return torch.tensor(sorted(token_ids), dtype=torch.int64)


def _is_id(attachment: Attachment, value: object) -> bool:
    return isinstance(value, int) and 0 <= value < attachment.config.vocab_size


class PassageExecutor(Executor):
    """Executor that computes passages of one length, one per row, after lead tokens without recorded KV.

    Args:
        like: Executor of a cache with a method for passages, which defines their ranking and geometry.
        labels: Labels of the rows, for the headers of their segments; () for none.
        ranking_lead: Length of a lead that replaces the method's. If given, nothing is stored; the result is in
            `computed`.
    """

    method: Passages

    def __init__(self, like: Executor, labels: Sequence[str], ranking_lead: int | None) -> None:
        super().__init__(like.attachment, like.store, like.method, like.options, like.collector)
        self.sink = self.method.sink_token(like.attachment.config)
        first = self.sink if ranking_lead is None else sink_token(like.attachment.config)
        self.lead = torch.tensor([[] if first is None else [first]], dtype=torch.int64)
        """Tokens before the passages, int64 `[1, n]`: the first token, and the lead text after `write_lead`."""
        self.computed: dict[int, list[KV]] = {}
        """Keys and values of each row, layer by layer, if nothing is stored."""
        self.scores: dict[int, RankingScores] = {}
        """Ranking of each row's tokens by name of the ranking, once the row is computed."""
        self._labels, self._ranking_lead = tuple(labels), ranking_lead

    def write_lead(self, tokens: int) -> None:
        """Append the lead text for passages of `tokens` tokens, within the model's maximum position."""
        lead_tokens = self.method.lead if self._ranking_lead is None else self._ranking_lead
        identity = self.identify(begins_request=False)
        if lead_tokens > 1 and self.lead.shape[1] and not isinstance(identity, str):
            text = kept_lead(self.store, self.attachment, identity.fingerprint, int(self.lead[0, 0]), lead_tokens - 1)
            positions = getattr(self.attachment.config, "max_position_embeddings", None) or sys.maxsize
            self.lead = torch.cat([self.lead, text[None]], dim=1)[:, : max(1, positions - tokens)]

    def find(self, passages: Sequence[torch.Tensor]) -> list[SegmentRow | None]:
        """Return, for each passage, int `[tokens]`, the segment that stores all its whole hashes, or None."""
        identity, store = self.identify(begins_request=True), self.store
        if isinstance(identity, str):
            return [None] * len(passages)
        chains, lead_tokens = [], 0 if self.sink is None else self.method.lead
        for passage in passages:
            regime = rope_regime(self.attachment.config, lead_tokens + len(passage)) or ""
            hasher = store.passage_hasher(identity.fingerprint, self.method.passages, self.sink, regime)
            chains.append(b"".join(hasher.hashes(passage.numpy())))
        rows: dict[bytes, list[SegmentRow]] = {}
        for row in store.disk.find(list({chain[:HASH_BYTES]: None for chain in chains if chain})):
            rows.setdefault(row.first, []).append(row)
        return [self._find_segment(rows.get(chain[:HASH_BYTES], ()), chain) for chain in chains]

    def _find_segment(self, rows: Iterable[SegmentRow], chain: bytes) -> SegmentRow | None:
        """Return the shortest complete segment that begins with the prefix hashes `chain`, or None."""
        matching_rows = [row for row in rows if row.chain[: row.valid_hashes * HASH_BYTES].startswith(chain)]
        for row in sorted(matching_rows, key=lambda row: (len(row.chain), row.id)):
            (reader,) = self.store.found([row])
            if reader is not None and reader.shape.whole:
                return row
        return None

    def _new_sequence(self, cache: LayeredCache, request: Request, identity: Identity, regime: str) -> SequenceState:
        sequence = super()._new_sequence(cache, request, identity, regime)
        sequence.reports_passages = False  # a passage is not searched for other passages
        return sequence

    def new_recorder(self, identity: Identity, regime: str, pads: list[int]) -> Recorder:
        method, store, lead_tokens = self.method, self.store, self.lead.shape[1]
        hasher = store.passage_hasher(identity.fingerprint, method.passages, self.sink, regime)
        if self._ranking_lead is not None:
            arguments = identity.fingerprint, method.geometry, store.submit, store.ttl, method.passages
            history = History(hasher, pads)
            return _InMemoryRecorder(lead_tokens, self.computed, history, *arguments, collector=self.collector)
        return replace(
            super().new_recorder(identity, regime, pads),
            history=History(hasher, [pad + lead_tokens for pad in pads]),  # the lead is left out like padding
            provenance=method.passages,
            rank=self._rank if method.ranked_by and not method.ranks_in_context else None,  # no second computation
            labels=self._labels or self.options.label,
        )

    def _rank(self, row: int, layers: Iterable[KV]) -> np.ndarray:
        scores = rank_tokens(layers, self.method.ranking)
        self.scores[row] = {self.method.ranked_by: scores}
        return scores

    def stored(self) -> dict[int, str]:
        """Seal the recorder, and return the segment id by row, of rows whose KV can be stored."""
        if self.sequence is None:
            return {}
        self.sequence.recorder.seal()
        segments = {row: self.sequence.recorder.segments(row) for row in range(self.sequence.history.rows)}
        return {row: ids[-1] for row, ids in segments.items() if ids}


class PassageCache(StoredCache):
    """Cache for passages (see `PassageExecutor`)."""

    def __init__(
        self,
        model: nn.Module,
        storage: Storage,
        method: Passages,
        tag: str,
        *,
        labels: Sequence[str] = (),
        ranking_lead: int | None = None,
    ) -> None:
        options = CacheOptions(restore=False, tag=tag, progress=False)
        super().__init__(*prepare(model, method), storage, method, options)
        self.passage = self._executor = PassageExecutor(self._executor, labels, ranking_lead)

    def compute(self, passages: torch.Tensor) -> None:
        """Compute passages, int `[rows, tokens]`, and queue them for storing, or keep them in `passage.computed`."""
        self.passage.write_lead(passages.shape[1])
        ids = torch.cat([self.passage.lead.expand(len(passages), -1), passages], dim=1)  # [rows, lead and tokens]
        run(self, ids)
        self.store_now()


class _InMemoryRecorder(Recorder):
    """Recorder that keeps KV computed after a lead in memory, in `computed`, and creates no segments."""

    def __init__(self, lead_tokens: int, computed: dict[int, list[KV]], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lead_tokens, self._computed_rows = lead_tokens, computed

    def _take_unsealed(self) -> list[PendingSegment]:
        start = max(0, self._lead_tokens - self._first)
        tokens = whole_tokens(self.num_unsealed - start)
        if not self._in_pass and tokens > 0:
            self.captured.await_work()
            for row in range(self.history.rows):
                self._computed_rows[row] = list(self.captured.pairs(row, start, tokens))
        if not self._in_pass:
            self._clear()
            self._first = self.history.num_positions
        return []


def whole_tokens(tokens: int) -> int:
    """Return the number of a passage's tokens that are stored, a multiple of 16."""
    return tokens // HASH_TOKENS * HASH_TOKENS
