"""State of the tokens that a cache holds: the model that computed them, what is stored of them, how they continue."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from .. import reasons
from ..errors import StoreClosedError
from ..identity import Identity, differing_facts, rope_regime
from ..methods import BudgetMethod, Method, Passages
from ..passages.finder import find_passages
from ..passages.report import PassageReport
from ..patches.attach import Attachment
from ..patches.rope import TableCache
from ..restore.hashes import History, PassageHasher
from ..restore.plan import BudgetPlan, Plan, RowBudget
from ..restore.rows import PlanContext, RowGroup, SegmentSlice
from ..store import EXACT
from ..store.codecs import codec_in, coded_provenance
from ..store.format import is_passage
from ..store.geometry import HASH_TOKENS
from ..store.shape import SegmentShape
from ..tiers.collector import StatsCollector
from .calibrations import PrefixCalibration
from .observed import Pace
from .recorder import Recorder
from .request import Request, left_padding
from .storage import Storage

logger = logging.getLogger("hf_tiered_cache")

_MOST_MODELS = 64  # maximum number of other models that a prompt without a match is looked up for, to explain the miss
_STORE_AT = 64
STORE_GENERATED_AT = 512
_STORE_PROMPT_AT = 4096
"""Number of captured positions to store at once: after a prompt, of generated tokens, and within a prompt.

Chunks of a long prompt are joined into larger segments. Fewer positions wait for more, for a lookup that needs them, or
for `flush`.
"""


@dataclass(eq=False)
class SequenceState:
    """State of the tokens of a cache, in all rows, from the first supported pass on.

    Args:
        method: Method that restores KV, with calibrated settings filled in.
        identity, regime, tables: The model, its RoPE frequencies and its rotary tables at the first pass.
        selects: Whether a cache layer can attend to a part of what is restored.
        calibration, pace: What was measured, and observed, of restoring and computing.
        reports_passages: Whether the passages of a prompt are reported.
    """

    store: Storage
    method: Method
    attachment: Attachment
    identity: Identity
    regime: str
    recorder: Recorder
    tables: TableCache
    layers: int
    selects: bool
    calibration: PrefixCalibration
    pace: Pace
    reports_passages: bool
    approximate: bool = False
    """True if the cache holds a selection of its tokens, or KV that the method's provenance does not cover."""
    stored_in_pieces: dict[int, int] = field(default_factory=dict)
    """Number of tokens of the current prompt that were computed, stored and released, by row."""
    passage_reasons: tuple[str, ...] = ()
    """Reasons why the last pass did not restore passages as the method would, if the user can change that."""
    _unusable_reason: str = ""  # reason why the method cannot use all of the match, if so
    _looked_up_at: float = math.inf  # time of the last lookup (`time.monotonic`); the pass may end much later
    _in_prompt: bool = False  # whether the last pass had several positions
    _report: PassageReport = field(default_factory=PassageReport)

    @cached_property
    def history(self) -> History:
        """History of the tokens."""
        return self.recorder.history

    # --- before a pass

    def seconds_to_compute(self, tokens: int) -> float | None:
        """Return the seconds to compute a prompt: by the calibration, else by the observed pace, else None."""
        if (costs := self.calibration.at(tokens)) is not None:
            return float(costs.computing(tokens))
        per_token = self.pace.per_token(self.identity.fingerprint)
        return None if per_token is None else tokens * per_token

    def plan(self, request: Request, whole: bool = False) -> Plan | None:
        """Return the plan of a pass, or None if it restores nothing. `whole` restores the match without a budget."""
        with self.recorder.collector.timing("match_seconds"):
            self._looked_up_at = time.monotonic()
            groups, restorable = self._look_up(request.host_ids)
            has_pieces = any(group.pieces for group in groups)
            plan = self._plan_restore(request, groups, restorable, whole) if has_pieces else None
        if isinstance(plan, BudgetPlan):
            if isinstance(self.method, BudgetMethod) and self.method.reorder:
                self.store.lay_out_after(plan.groups)
            return plan
        unstored = self.store.unstored
        return unstored.added_to(plan, self.attachment.devices) if plan is not None and unstored.segments else plan

    def _look_up(self, ids: np.ndarray) -> tuple[tuple[RowGroup, ...], int]:
        """Find the longest stored prefix of each row, and the passages after it, for new tokens.

        Return groups of equal rows, and the first position of the pass that some row cannot restore.
        """
        history, base = self.history, self.history.num_positions
        whole_rows = np.concatenate([history.ids(), ids], axis=1)
        alike: dict[tuple[int, bytes], list[int]] = {}
        for row, pad in enumerate(history.pads):
            alike.setdefault((pad, whole_rows[row][pad:].tobytes()), []).append(row)
        groups, restorable = [], ids.shape[1]
        for (pad, _), rows in alike.items():
            tokens, cached_hashes = whole_rows[rows[0]][pad:], max(0, base - pad) // HASH_TOKENS
            hashes = history.prefix_hashes_of(rows[0], tokens)
            usable, seconds = self._usable_hashes, self.seconds_to_compute
            matched = self.store.match(hashes, cached_hashes, usable, self.recorder, seconds)
            pieces = [
                SegmentSlice(reader, 0, run.num_hashes * HASH_TOKENS, run.start * HASH_TOKENS)
                for run, reader in matched
            ]
            num_hashes = matched[-1][0].stop if matched else cached_hashes
            for row in rows:
                self.recorder.note_stored(row, cached_hashes, num_hashes, tuple(reader.id for _, reader in matched))
            end, cached = num_hashes * HASH_TOKENS, base - pad
            if isinstance(self.method, Passages):  # a part of a passage may begin among cached tokens
                pieces += self._find_passages(tokens, end if end > cached else max(0, cached - (HASH_TOKENS - 1)))
            groups.append(RowGroup(tuple(rows), pad, tuple(pieces)))
            restorable = min(restorable, max(0, end - cached))
        return tuple(groups), restorable

    def _plan_restore(
        self, request: Request, groups: tuple[RowGroup, ...], restorable: int, whole: bool
    ) -> Plan | None:
        """Let the method decide what to compute. Return None if that is everything. See `plan`."""
        method, base, num_positions = self.method, request.base, request.num_positions
        context = PlanContext(base, num_positions, restorable, request.must_compute, self.layers, groups)
        may_select = self.selects and not whole
        if may_select and isinstance(method, BudgetMethod) and (budgets := method.budgets(context)) is not None:
            plan: Plan = self._plan_within(context, method, budgets)
        else:
            plan = method.plan(context)
        if plan.computed[-1].shape[-1] < num_positions or plan.restored_tokens:
            return plan
        approximate = any(not piece.exact for group in groups for piece in group.pieces)
        why = reasons.ALL_COMPUTED if approximate else reasons.OTHER_ROWS if len(groups) > 1 else ""
        self._unusable_reason = self._unusable_reason or why
        return None

    def can_be_cut(self, request: Request) -> bool:
        """Return whether a prompt is computed in pieces, with the same KV as in a single pass."""
        method = self.method
        if not isinstance(method, BudgetMethod):
            return False
        step = method.prefill_tokens
        return (
            0 < step < request.num_positions - min(request.pads)
            and method.selects
            and request.base == 0
            and self.recorder.enabled
            and request.text == request.num_positions
            and request.must_compute <= step // 2
            and rope_regime(self.attachment.config, step) == self.regime
        )

    def _plan_within(self, context: PlanContext, method: BudgetMethod, budgets: list[int]) -> BudgetPlan:
        """Return the plan in which layers hold so many restored tokens of each group's rows."""
        row_budgets = []
        for group, tokens, budget in zip(context.groups, context.own_prefixes, budgets, strict=True):
            computed = context.num_positions - group.pad - tokens
            # all pieces of a long prompt are exact, also the last one, however short
            in_pieces = self.stored_in_pieces.get(group.rows[0], 0) > 0
            streamed = budget < tokens and (in_pieces or method.streams(computed))
            row_budgets.append(RowBudget(group, tokens, computed, budget, streamed))
        positions = context.own_suffixes()
        return BudgetPlan(context.base, context.num_positions, positions, context.groups, tuple(row_budgets))

    @cached_property
    def _hashers(self) -> list[PassageHasher]:
        """Hashers of passages under the RoPE regime of the prompt, and under the regime of short prompts."""
        assert isinstance(self.method, Passages)
        sink, provenance = self.method.sink_token(self.attachment.config), self.method.passages
        short = rope_regime(self.attachment.config, 1) or "" if self.identity.rope_varies else self.regime
        regimes = dict.fromkeys((self.regime, short))
        return [self.store.passage_hasher(self.identity.fingerprint, provenance, sink, name) for name in regimes]

    def _find_passages(self, tokens: np.ndarray, start: int) -> list[SegmentSlice]:
        """Return the slices of the stored passages in a row's `tokens`, int64 `[n]`, from token `start` on."""
        method, store = self.method, self.store
        assert isinstance(method, Passages)
        for hasher in self._hashers:
            matches = find_passages(tokens, hasher, store.passage_index.seeds, start)
            are_exact = [hasher is self._hashers[0] and match.is_exact(tokens, hasher) for match in matches]
            readers = store.found([match.row for match in matches])
            pieces = []
            for match, exact, reader in zip(matches, are_exact, readers, strict=True):
                count = 0 if reader is None else min(match.num_hashes, reader.shape.whole_hashes - match.first)
                if reader and count > 0 and (exact or reader.shape.layout.position_independent):
                    is_ranked = method.ranked_by and not exact
                    scores = store.rankings.of(reader, method.ranked_by) if is_ranked else None
                    first = match.first * HASH_TOKENS
                    pieces.append(SegmentSlice(reader, first, count * HASH_TOKENS, match.at, exact, scores))
            if pieces:
                return pieces
        return []

    def _usable_hashes(self, shape: SegmentShape) -> int:
        usable = self.method.usable_hashes(shape)
        if usable * HASH_TOKENS < shape.tokens:
            selects = isinstance(self.method, BudgetMethod) and self.method.selects
            self._unusable_reason = reasons.MERGED if selects and shape.geometry.pairs else reasons.IN_PART
        return usable

    def why_nothing(self, request: Request) -> str:
        """Return why a prompt without a plan is not restored, or "" if it continues from what the cache holds."""
        if request.base or not self.store.usable:
            return ""
        if self._unusable_reason:
            return self._unusable_reason
        rows = [ids[pad:] for ids, pad in zip(request.host_ids, self.history.pads, strict=True)]
        if max(map(len, rows)) < HASH_TOKENS:
            return reasons.SHORT
        disk, remote = self.store.disk, self.store.remote
        hashes = [self.history.prefix_hashes_of(row, tokens) for row, tokens in enumerate(rows)]
        if any(disk.hid_any(chain, self._looked_up_at) for chain in hashes):
            return reasons.UNREADABLE
        if reason := self._stored_otherwise(rows) or self._other_keys():
            return reason
        if disk.index.is_incomplete:
            return reasons.UNREADABLE
        if self._has_passages():
            return reasons.NO_PASSAGES
        missed = filter(None, map(remote.why_missed, hashes)) if remote is not None else iter(())
        return next((reasons.NOT_FETCHED + miss for miss in missed), reasons.NOTHING)

    def _stored_otherwise(self, rows: list[np.ndarray]) -> str:
        """Return where else tokens of a row, int64 `[n]` each, are stored: for another model, codec or lead; or ""."""
        catalogue, method, fingerprint = self.store.disk.index, self.method, self.identity.fingerprint
        own_codec, models = method.geometry.codec, catalogue.models() or {}
        for other_model in [name for name in models if name != fingerprint][:_MOST_MODELS]:
            if self._begins(rows, other_model, own_codec):
                differing = differing_facts(self.identity.facts, models[other_model])
                parts = " and ".join(differing) or "facts that the store does not record"
                return f"these tokens are stored for another state of the model, which differs in {parts}"
        provenances = catalogue.provenances(fingerprint)
        for codec in sorted({codec_in(provenance) for provenance in provenances} - {own_codec}):
            if self._begins(rows, fingerprint, codec):
                return reasons.other_codec(codec)
        if not isinstance(method, Passages):
            return ""
        for provenance in filter(is_passage, provenances):
            sink, codec = method.sink_token(self.attachment.config), codec_in(provenance)
            hasher = self.store.passage_hasher(fingerprint, provenance, sink, self.regime)
            seeds = self.store.passage_index.seeds
            if provenance != method.passages and any(find_passages(tokens, hasher, seeds) for tokens in rows):
                return reasons.OTHER_LEAD if codec == codec_in(method.passages) else reasons.other_codec(codec)
        return ""

    def _begins(self, rows: list[np.ndarray], fingerprint: str, codec: str) -> bool:
        """Return whether a stored prefix with this model and codec begins with the same tokens as some row."""
        hasher = self.store.hasher(fingerprint, coded_provenance(EXACT, codec), self.regime)
        return bool(self.store.disk.find([first for tokens in rows for first in hasher.hashes(tokens[:HASH_TOKENS])]))

    def _other_keys(self) -> str:
        """Return the reason if all KV of the model is stored with other encryption keys, or an empty string.

        Prefix hashes depend on the key, so the KV cannot be found without it.
        """
        disk = self.store.disk
        keys, own_key = disk.index.keys(self.identity.fingerprint), disk.cipher.key_id
        if not keys or own_key in keys:
            return ""
        return reasons.NO_KEY if not own_key else reasons.OTHER_KEY if keys - {""} else reasons.NOT_ENCRYPTED

    def _has_passages(self) -> bool:
        """Return whether the method reuses passages, and some of the model are stored under its provenance."""
        method, provenances = self.method, self.store.disk.index.provenances
        return isinstance(method, Passages) and method.passages in provenances(self.identity.fingerprint)

    # --- after a pass

    def commit(self, request: Request, plan: Plan | None) -> str:
        """Record a completed pass: count and append its tokens, and store them if there are enough.

        Return the reason why later passes run without the store, or an empty string.
        """
        self.passage_reasons = ()
        rows, num_positions = request.ids.shape
        tokens = rows * num_positions - sum(max(0, pad - request.base) for pad in self.history.pads)
        approximations = self.method.records_approximations
        if plan is None:
            num_computed = num_positions
            self.recorder.collector.add(tokens_computed=tokens)
        else:
            num_computed = self._count_restored(plan, tokens)
            exact = plan.exact
            self.approximate |= isinstance(plan, BudgetPlan) or not (exact or approximations)
            if not (exact or approximations):
                self.recorder.enabled = False
                if isinstance(plan, BudgetPlan):
                    self.recorder.exclude(plan.inexact_rows)
        self.stored_in_pieces = {}
        ids = vars(request).get("host_ids", request.ids)  # without a copy to the host
        self.recorder.end(ids, num_computed, request.revocable)
        if self.reports_passages and num_positions > 1:
            self._report_passages(plan)
        if request.text < num_positions:
            self.recorder.crop(num_positions - request.text)
            return reasons.IMAGES
        prompt_is_whole, self._in_prompt = num_positions == 1 and self._in_prompt, num_positions > 1
        threshold = _STORE_AT if prompt_is_whole else STORE_GENERATED_AT if num_positions == 1 else _STORE_PROMPT_AT
        if self.recorder.num_unsealed >= (HASH_TOKENS if self.approximate and not approximations else threshold):
            try:
                self.recorder.seal()
            except StoreClosedError as error:  # the request itself continues
                logger.warning("%s: KV computed from now on is not stored", error)
                self.recorder.enabled = False
        if self.approximate and not approximations:
            self.recorder.enabled = False
        return ""

    def _count_restored(self, plan: Plan, tokens: int) -> int:
        """Count the tokens of a pass that followed a plan, in all rows and without padding.

        Return the number of positions at the end that every layer computed.
        """
        if isinstance(plan, BudgetPlan) and not plan.streams_all:
            assert isinstance(self.method, BudgetMethod)
            if self.method.reorder:
                self.store.rewriter.prompt_done({reader.id for reader in plan.readers}, self.method.reorder_every)
        num_restored, num_attended = plan.restored_tokens, plan.attended_tokens
        before = min(sum(self.stored_in_pieces.values()), num_restored)
        self.recorder.collector.add(
            tokens_restored=num_restored - before,
            tokens_recomputed=round(plan.recomputed_tokens),
            tokens_computed=tokens - num_restored,
            tokens_attended=num_attended - min(before, num_attended),
        )
        return plan.num_positions - plan.restored_until

    def _report_passages(self, plan: Plan | None) -> None:
        """Report what became of the passages so far."""
        rows = [row[pad:] for row, pad in zip(self.history.ids(), self.history.pads, strict=True)]
        if plan is not None:
            self._report.add(plan.groups, plan.base, self.history.pads)
        passages, is_joined = self._report.passage_stats(rows, self._hashers)
        self.recorder.collector.stats.passages = passages
        pieces = [] if plan is None else [piece for group in plan.groups for piece in group.pieces if not piece.exact]
        assert isinstance(self.method, Passages)
        if (ranking := self.method.ranked_by) and any(piece.scores is None for piece in pieces):
            self.passage_reasons = (reasons.unranked(ranking),)
        if is_joined:
            self.passage_reasons += (reasons.JOINED,)
        elif plan is not None and not plan.base and not any(passage.tokens_found for passage in passages):
            is_prefix_alone = plan.num_positions - plan.restored_until >= HASH_TOKENS and self._has_passages()
            if is_prefix_alone and not any(self._find_passages(row, 0) for row in rows):  # nor does the prefix have any
                self.passage_reasons += (reasons.NO_PASSAGES,)

    def store_piece(self, piece: Request, plan: Plan | None) -> None:
        """Store a computed piece of a longer prompt, a single row, and remove it from the history."""
        num_computed = piece.num_positions - (0 if plan is None else plan.restored_tokens)
        self.recorder.collector.add(tokens_computed=num_computed)
        self.stored_in_pieces[0] = self.stored_in_pieces.get(0, 0) + num_computed
        self.recorder.end(piece.ids, piece.num_positions if plan is None else len(plan.computed[0]))
        self.recorder.seal()
        self.recorder.crop(piece.num_positions)

    def fork(self, collector: StatsCollector) -> SequenceState:
        """Return a copy that continues independently, with its own statistics."""
        return replace(self, recorder=self.recorder.fork(collector), _report=self._report.fork())


def num_common(history: History, prompt: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Return the number of leading positions that a cache with this history shares with a prompt.

    The last position of the prompt, int `[rows, positions]`, is not counted, since it has to be computed. A prompt with
    other left padding in its mask (None if unknown), or one that shares only the padding of a row, shares nothing.
    """
    if mask is not None and mask.shape == prompt.shape and left_padding(mask, prompt, 0) != history.pads:
        return 0
    shared = min(history.num_common(prompt.cpu().numpy()), prompt.shape[1] - 1)
    return shared if shared > max(history.pads) else 0
