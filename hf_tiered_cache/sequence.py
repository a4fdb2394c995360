"""The tokens that a cache holds: whose KV they have, what is stored of them, and how they go on."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from . import reasons
from .errors import StoreClosedError
from .geometry import HASH_TOKENS
from .identity import Identity, rope_regime
from .methods import Method
from .record import Recorder
from .request import DecodingCheck, Request
from .restore.passage_report import PassageReport
from .restore.passages import PassageFinder
from .restore.plan import Plan
from .restore.planner import make_plan
from .shape import SegmentShape
from .stats import StatsCollector
from .storage import Storage
from .store.segment import SegmentReader

logger = logging.getLogger("hf_tiered_cache")

_STORE_AT = 64
_STORE_GENERATED_AT = 512
_STORE_PROMPT_AT = 4096
"""Columns that are stored when they are computed: of a prompt, once it is whole, or of generated tokens. Chunks of a
long prompt come together into larger segments. Fewer wait for more, for a look-up that wants them, or for `flush`."""


class SequenceState:
    """The tokens of a cache, of all its rows, from the first understood pass on.

    Args:
        store: where their KV is looked for, and stored.
        method: by which it is restored, as far as it was left to measurement filled in.
        config: of the model's text part.
        identity: of the model when it began.
        regime: of its RoPE frequencies.
        recorder: of what is computed; it has their history.
        check: of masks and positions while decoding.
        segments: tokens at which passages may begin, or None for everywhere.
        layers: how many the model has.
        selects: whether a layer of the cache can attend to a part of what is restored.
    """

    def __init__(
        self,
        store: Storage,
        method: Method,
        config: PreTrainedConfig,
        identity: Identity,
        regime: str,
        recorder: Recorder,
        check: DecodingCheck,
        segments: tuple[int, ...] | None,
        layers: int,
        selects: bool,
    ) -> None:
        self.store, self.method, self.config = store, method, config
        self.identity, self.regime, self.recorder, self.check = identity, regime, recorder, check
        self.history = recorder.history
        """The tokens."""
        self._segments, self._layers, self._selects = segments, layers, selects
        self.approximate = False
        """Whether it holds a selection of its tokens, or what no cache of its method's provenance would."""
        self._asked: np.ndarray | None = None
        """What the present pass adds, int64 `[rows, columns]`, where it was looked up."""
        self.stored_in_pieces = 0
        """Tokens of the present prompt that were computed and let go again."""
        self._in_prompt = False  # whether the last pass had several columns
        self.tells_passages = bool(method.passages)
        """Whether it is told what became of the passages in a prompt."""
        self._report = PassageReport()
        self.missed = ""
        """Why stored passages were not found by the last pass, where something can be done about it."""
        self._unused = ""  # why the method cannot use all of what was found, if so

    @property
    def columns(self) -> int:
        """Of the rows, left padding included."""
        return self.history.columns

    # --- before a pass

    def plan(self, request: Request, collector: StatsCollector) -> Plan | None:
        """What a pass restores, or None if that is nothing."""
        with collector.timing("match_seconds"):
            self._asked = request.ids.to("cpu", torch.int64).numpy()
            plan, found = make_plan(
                self.history,
                self._asked,
                request.must_compute,
                self.method,
                self._layers,
                partial(self.store.match, usable=self._usable_hashes, asking=self.recorder),
                self._finder() if self.method.passages else None,
            )
        if plan is not None and plan.budget_tokens is not None and self.stored_in_pieces:
            plan = replace(plan, streamed=True)  # all pieces are exact, also the last one, however short
        for rows in found:
            for row in rows.rows:
                self.recorder.found(row, rows.held, rows.num_hashes, rows.segments)
        if plan is None or not self._selects:
            return plan and replace(plan, budget_tokens=None)
        if plan.budget_tokens and self.method.reorder:
            self.store.lay_out_after(plan.groups)
        return plan

    def _finder(self) -> PassageFinder:
        return passage_finder(
            self.store, self.method, self.config, self.identity.fingerprint, self.regime, self._segments
        )

    def _usable_hashes(self, shape: SegmentShape) -> int:
        usable = self.method.usable_hashes(shape)
        if usable * HASH_TOKENS < shape.tokens:
            merged = self.method.selects and shape.geometry.pairs
            self._unused = reasons.MERGED if merged else reasons.IN_PART
        return usable

    def why_nothing(self, request: Request) -> str:
        """Why a prompt that has no plan is not restored; "" where it goes on from what the cache holds."""
        if self.columns or not self.store.usable:
            return ""
        if self._unused:
            return self._unused
        passages = (self.method.passages, self.method.sink_token(self.config)) if self.method.passages else None
        tokens = request.ids[0, self.history.pads[0] :].to("cpu", torch.int64).numpy()
        identity, codec = self.identity, self.method.geometry.codec
        return reasons.of_a_miss(self.store, tokens, identity.fingerprint, identity.facts, self.regime, passages, codec)

    def why_otherwise(self, plan: Plan) -> str:
        """Why a plan computes other tokens than the method would choose; "" if it does not."""
        ranked_by = self.method.ranked_by
        passages = [piece for group in plan.groups for piece in group.pieces if not piece.exact]
        unranked = ranked_by and any(piece.scores is None for piece in passages)
        return reasons.unranked(ranked_by) if unranked else ""

    # --- after a pass

    def commit(self, request: Request, plan: Plan | None, collector: StatsCollector) -> str:
        """A pass is done: its tokens are known, and stored if they are many.

        Returns:
            Why from here on passes run as with any cache, or "".
        """
        self.missed = ""
        rows, columns = request.ids.shape
        restored = plan.restored_tokens if plan is not None else 0
        padding = sum(max(0, pad - self.columns) for pad in self.history.pads)
        attended = round(plan.attended_tokens) if plan is not None else 0
        if plan is not None and plan.budget_tokens is not None and not plan.streamed and self.method.reorder:
            self.store.rewriter.prompt_done({reader.id for reader in plan.readers}, self.method.reorder_every)
        before, self.stored_in_pieces = min(self.stored_in_pieces, restored), 0
        collector.add(
            tokens_restored=restored - before,
            tokens_recomputed=0 if plan is None else round(plan.recomputed_tokens),
            tokens_computed=rows * columns - padding - restored,
            tokens_attended=attended - min(before, attended),
        )
        approximations = self.method.records_approximations
        if plan is not None and not (plan.exact or approximations):
            self.recorder.enabled = False
        computed = columns if plan is None else columns - plan.restored_until
        ids, self._asked = request.ids if self._asked is None else self._asked, None  # once from the device is enough
        self.recorder.end(ids, computed, request.revocable)
        if self.tells_passages and columns > 1:
            self._tell_passages(plan, collector)
        if request.text < columns:
            self.recorder.crop(columns - request.text)
            return reasons.IMAGES
        self.approximate |= plan is not None and (plan.budget_tokens is not None or not (plan.exact or approximations))
        prompt_is_whole, self._in_prompt = columns == 1 and self._in_prompt, columns > 1
        least = _STORE_AT if prompt_is_whole else _STORE_GENERATED_AT if columns == 1 else _STORE_PROMPT_AT
        if self.recorder.unsealed >= (HASH_TOKENS if self.approximate and not approximations else least):
            try:
                self.recorder.seal()
            except StoreClosedError as error:  # the request itself goes on
                logger.warning("%s: what is computed from here on is not stored", error)
                self.recorder.enabled = False
        if self.approximate and not approximations:
            self.recorder.enabled = False
        return ""

    def _tell_passages(self, plan: Plan | None, collector: StatsCollector) -> None:
        """Say what has become of the passages up to here."""
        if plan is not None:
            self._report.add(plan.groups, plan.base)
        ids, finder = self.history.ids(), self._finder()
        rows = [row[pad:] for row, pad in zip(ids, self.history.pads, strict=True)]
        told = self._report.told(rows, finder.hashers, self._segments)
        collector.tell_passages(told)
        if self._report.joined(rows, finder.hashers):
            self.missed = reasons.JOINED
        elif plan is not None and not plan.base and not any(each.found for each in told):
            self.missed = self._why_a_prefix_alone(plan, rows, finder)

    def _why_a_prefix_alone(self, plan: Plan, rows: list[np.ndarray], finder: PassageFinder) -> str:
        """Why of a prompt nothing is restored but what it begins with; "" where passages stand in that."""
        stored = partial(reasons.has_passages, self.store, self.identity.fingerprint, self.method.passages)
        whole = plan.columns - plan.restored_until < HASH_TOKENS
        return "" if whole or not stored() or any(finder(row, 0) for row in rows) else reasons.NO_PASSAGES

    def store_piece(self, piece: Request, plan: Plan | None, collector: StatsCollector) -> None:
        """A piece of a longer prompt is computed: store it, and forget it."""
        rows, columns = piece.ids.shape
        computed = rows * columns - sum(piece.pads) - (plan.restored_tokens if plan is not None else 0)
        collector.add(tokens_computed=computed)
        self.stored_in_pieces += computed
        self.recorder.end(piece.ids, columns if plan is None else len(plan.computed[0]))
        self.recorder.seal()
        self.recorder.crop(columns)

    def common_columns(self, prompt: torch.Tensor) -> int:
        """How many columns it shares with a prompt, int `[rows, columns]`, of which at least the last is computed."""
        return min(self.history.common_columns(prompt.cpu().numpy()), prompt.shape[1] - 1)

    def fork(self, collector: StatsCollector) -> SequenceState:
        """The same tokens, going on elsewhere, and counting there."""
        twin: SequenceState = object.__new__(SequenceState)
        twin.__dict__.update(self.__dict__)
        twin.check = DecodingCheck()
        twin.recorder = self.recorder.fork(collector, twin.check)
        twin.history = twin.recorder.history
        twin._report = self._report.fork()
        return twin


def passage_finder(
    store: Storage,
    method: Method,
    config: PreTrainedConfig,
    fingerprint: str,
    regime: str,
    begins: tuple[int, ...] | None = None,
) -> PassageFinder:
    """Looks for passages under the RoPE regime of the prompt, and else under that of short ones."""
    sink = method.sink_token(config)
    regimes = dict.fromkeys((regime, rope_regime(config, 1) or ""))
    hashers = tuple(store.passage_hasher(fingerprint, method.passages, sink, each) for each in regimes)
    ranked_by = method.ranked_by

    def scores(reader: SegmentReader) -> np.ndarray | None:
        return store.rankings.of(reader).get(ranked_by) if ranked_by else None

    return PassageFinder(hashers, sink, store.find_parts, store.found_passage, begins, scores)


def asks_for_all(kwargs: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether a pass asks for outputs that only computing every token gives."""
    asked = ((kwargs.get(name), name) for name in ("output_hidden_states", "output_attentions"))
    return any(getattr(config, name, False) if said is None else said for said, name in asked)
