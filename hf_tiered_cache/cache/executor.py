"""Execution of the passes of one cache: restore what is stored, compute the rest, record it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from .. import reasons
from ..conversations.distances import AttentionDistances
from ..errors import CacheMismatchError, EvictedError, LayerOrderError, LostKVError, RestoreError, StoreClosedError
from ..identity import Identity, fingerprinter_of, rope_regime
from ..layers import LayeredCache
from ..methods import BudgetMethod, ForConversation, Method, Passages, PrefixMethod
from ..patches.attach import Attachment
from ..patches.scope import leave
from ..restore.hashes import History, PrefixHasher
from ..restore.plan import BudgetPlan, PassagesPlan, Plan
from ..stats import StatsCollector
from ..store.geometry import HASH_TOKENS
from .conversation import Conversation
from .cost_model import choose_strategy, costs_of, warn_of_slow_restore, with_measured_settings, with_required_recompute
from .forward_pass import ForwardPass, RefiningForward, RestoringForward
from .fronts import ComputedFront
from .observed import Pace, Work, observed_ratios, renew_costs, seconds_to_compute
from .recorder import Recorder
from .request import ForwardArguments, Request, asks_for_all, count_tokens, parse_request
from .sequence import SequenceState, num_common
from .spot_check import RestoredRun
from .storage import Storage
from .suitability import cannot_observe

logger = logging.getLogger("hf_tiered_cache")

REPLANS = 4
"""Number of times a pass is planned again after a failed restore, around the failure; then all of it is computed."""
PREFILL_TRIES = 2
"""Number of times that prefill goes back because stored pieces have disappeared; then the rest is computed at once."""


class _DisturbedError(Exception):
    """Pass during which the first pass of an engine of continuous batching began. It is undone and run again."""


@dataclass(frozen=True)
class CacheOptions:
    """Options of a cache. See `TieredCache`."""

    restore: bool = True
    record: bool = True
    segments: tuple[int, ...] | None = None
    strict: bool = False
    progress: bool = True
    label: str = ""
    tag: str = ""
    fold_heads: bool = False


class Executor:
    """Executor of a cache's passes. It receives the cache at each pass, and keeps no reference to it."""

    def __init__(
        self, attachment: Attachment, store: Storage, method: Method, options: CacheOptions, collector: StatsCollector
    ) -> None:
        self.attachment, self.store, self.method = attachment, store, method
        self.options, self.collector = options, collector
        self.sequence: SequenceState | None = None
        """State of the tokens in the cache; None before the first pass, and if the cache runs without the store."""
        self.bypass = ""
        """Reason why the content of the cache can be neither stored nor restored, or an empty string."""
        self.ended: SequenceState | None = None
        """State of the tokens before the cache began to run without the store, if there are any."""
        self.plain: History | None = None
        """All tokens of a cache that runs without the store, without padding; None if they are not known."""
        self.conversation: Conversation | None = None
        """Conversation that the cache continues, if it has an id."""
        self.unreported = True
        """True if a prompt begins with the next pass, or its first pass is not reported yet."""
        self.forward_pass: ForwardPass | None = None
        """Pass that is running, or None."""
        self.observer: AttentionDistances | None = None
        """Observer of the queries of supported passes, if the method has one."""
        if isinstance(method, ForConversation):
            self.observer = method.observer()
        if self.observer is not None and (why := cannot_observe(attachment.model)):
            self.observer.cannot_see(why)
        self.restored: RestoredRun | None = None
        """Segments restored by the pass of the last prompt, for a spot check."""
        self._front: ComputedFront | None = None  # that of the last pass, until it is committed
        self._finish: Callable[[], None] = lambda: None
        self.arguments = ForwardArguments.of(attachment)
        self._pace: Pace = attachment.extras.setdefault("pace", Pace())

    # --- one pass

    def run(self, cache: LayeredCache, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the model; `kwargs` holds all its arguments by name."""
        conversation, is_prompt = self.conversation, self.unreported
        if conversation is not None:
            conversation.begin_pass(is_prompt, not cache.get_seq_length(), kwargs.get("input_ids"))
        with torch.no_grad():  # stored KV has no gradient
            try:
                output = self._admit_and_run(cache, forward, kwargs, is_prompt)
            except _DisturbedError:  # passes of the engine and this one exclude each other from now on
                output = self._admit_and_run(cache, forward, kwargs, is_prompt)
        if conversation is not None:
            conversation.turns += is_prompt and not self.unreported
        return output

    def _admit_and_run(
        self, cache: LayeredCache, forward: Callable[..., Any], kwargs: dict[str, Any], is_prompt: bool
    ) -> Any:
        admitted = self.admit(cache, kwargs)
        if admitted is None:
            return self._run_without_store(cache, forward, kwargs)
        if admitted[0].num_positions > 1 or is_prompt:
            return self._prefill(cache, *admitted, forward)
        forward_pass = self._forward_pass(cache, *admitted, None)  # a decoded token looks up nothing
        output = self._run(cache, forward_pass, forward, admitted[0].kwargs)
        self._commit(cache, *admitted, None)
        return output

    def _run_without_store(self, cache: LayeredCache, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        output = self._run(cache, ForwardPass(cache, self.attachment, self.collector), forward, kwargs)
        self._note_plain(cache, kwargs.get("input_ids"))
        self.collector.add(tokens_computed=count_tokens(kwargs))
        if self.unreported:
            self._report_prompt(self.bypass)
        return output

    def _prefill(
        self, cache: LayeredCache, request: Request, sequence: SequenceState, forward: Callable[..., Any]
    ) -> Any:
        """Run a pass of a prompt: plan it, and plan it again if a restore fails."""
        reason, replans, before = self._why_not_looked_for(request, sequence), REPLANS, Work.of(self.collector.stats)
        if not reason and sequence.can_be_cut(request):
            self._run_pieces(cache, request, sequence, forward)
        while True:
            plan = None if reason or not replans else sequence.plan(request, self.collector)
            if plan is not None:
                plan, reason = choose_strategy(plan, sequence)
            try:
                output, plan = self._run_planned(cache, request, sequence, plan, forward)
                break
            except RestoreError as error:
                replans = self.replans_after(error, replans)
            except LayerOrderError:
                reason = reasons.LAYER_ORDER
        if replans < REPLANS:
            reason = reasons.DAMAGED
        elif plan is None and (self.unreported or reason == reasons.LAYER_ORDER):
            reason = reason or self._why_nothing(request, sequence)
        else:
            reason = ""
        self.store.note_uses()
        self._commit(cache, request, sequence, plan)
        if plan is not None:
            # rows of a batch restore their own prefixes; `restored_until` is what all of them restore, maybe nothing
            stop, work = request.base + plan.restored_until or request.num_positions, self._work_since(before)
            if work.restored > 0:  # not a piece of a long prompt that was computed before
                saved = work.saved(stop, sequence.seconds_to_compute(stop), self.attachment.model.device)
                self.collector.add(seconds_saved=saved)
                warn_of_slow_restore(sequence, stop, saved)
        if sequence.reports_passages:
            for why in ("" if plan is None else sequence.why_otherwise(plan), sequence.miss_reason):
                self.explain_once(why)
        if self.unreported:
            tokens_kept = sequence.history.tokens_in(request.base) if request.base else 0
            self._report_prompt(self.bypass or reason, tokens_kept)
        return output

    def _run_pieces(
        self, cache: LayeredCache, request: Request, sequence: SequenceState, forward: Callable[..., Any]
    ) -> None:
        """Compute and store all pieces of long prompts but the last ones, row by row, so that each has its own.

        Each piece attends to all earlier ones, which are read from the store layer by layer (`StreamedPrefix`). Memory
        holds one piece and two runs of one layer, and the disk bounds the prompt length (KVDRIVE, Section 7).
        """
        rows_of: dict[bytes, list[int]] = {}
        for row, ids in enumerate(request.ids.cpu().numpy()):
            rows_of.setdefault(ids[request.pads[row] :].tobytes(), []).append(row)
        stored_in_pieces: dict[int, int] = {}
        for rows in rows_of.values():
            row_request = request.of_row(rows[0])
            if not sequence.can_be_cut(row_request):
                continue
            recorder = self.new_recorder(sequence.identity, sequence.regime, row_request.pads)
            self.sequence = replace(sequence, recorder=recorder, stored_in_pieces={})
            try:
                self._run_row_in_pieces(cache, row_request, self.sequence, forward)
                stored_in_pieces |= dict.fromkeys(rows, self.sequence.stored_in_pieces.get(0, 0))
            finally:
                self.sequence = sequence
        sequence.stored_in_pieces = stored_in_pieces

    def _run_row_in_pieces(
        self, cache: LayeredCache, request: Request, sequence: SequenceState, forward: Callable[..., Any]
    ) -> None:
        """Compute and store all pieces of a prompt, one row, but the last, which is left to the caller."""
        method = sequence.method
        assert isinstance(method, BudgetMethod)
        step, end, tries = method.prefill_tokens, request.num_positions, PREFILL_TRIES
        if end - (stored := _suffix(sequence.plan(request, self.collector))) <= step:
            return
        shortest = max(request.must_compute, min(step // 2, method.observed))  # minimum length of the last piece
        progress = self.options.progress
        with tqdm(total=end, initial=stored, unit="token", desc="prefill", disable=not progress) as bar:
            while end - stored > step and tries:
                stop = min(stored + step, end - shortest) // HASH_TOKENS * HASH_TOKENS
                before = self._run_piece(cache, request.beginning(stop), sequence, forward, stored)
                if before <= stored - HASH_TOKENS:
                    stored, tries = before, tries - 1
                else:
                    stored = stop
                bar.update(stored - bar.n)
            bar.update(end - bar.n)

    def _run_piece(
        self, cache: LayeredCache, piece: Request, sequence: SequenceState, forward: Callable[..., Any], stored: int
    ) -> int:
        """Compute and store the end of a piece, and release it, unless fewer than `stored` positions are stored.

        Return the number of positions that were stored.
        """
        plan = sequence.plan(piece, self.collector)
        before = _suffix(plan)
        if before <= stored - HASH_TOKENS:
            return before
        if plan is not None:
            plan = plan.within_budget([0], [True])
        try:
            self._run_planned(cache, piece, sequence, plan, forward)
        except RestoreError as error:
            self.collector.add(recomputed=1)
            self.store.disk.report(error.segment, error.__cause__ or error)
            return max(0, min(_suffix(sequence.plan(piece, self.collector)), stored - HASH_TOKENS))
        sequence.store_piece(piece, plan, self.collector)
        for source in cache.kv_sources:
            source.reset()
        return before

    def _run_planned(
        self,
        cache: LayeredCache,
        request: Request,
        sequence: SequenceState,
        plan: Plan | None,
        forward: Callable[..., Any],
    ) -> tuple[Any, Plan | None]:
        """Run the model on what the plan computes. Returns its output, and the plan as it was followed."""
        forward_pass = self._forward_pass(cache, request, sequence, plan)
        before = Work.of(self.collector.stats)
        if plan is None or not isinstance(forward_pass, RestoringForward):
            end = self._pace.begin(self.attachment.model.device)
            output = self._run(cache, forward_pass, forward, request.kwargs)
            end(sequence.identity.fingerprint, request.ids.numel())
            self._observe_costs(request, sequence, None, self._work_since(before))
            return output, None
        output = self._run(cache, forward_pass, forward, request.only(plan.computed[0], plan.suffix is not None))
        self._observe_costs(request, sequence, plan, self._work_since(before))
        self.restored = RestoredRun.of(forward_pass.plan, before.seconds)
        self._front = forward_pass.front
        if forward_pass.selection is not None and not forward_pass.selection.index_fits:
            self.explain_once(reasons.no_room_for_index(self.store.residency.index_cache.budget))
        return output, forward_pass.plan

    def _work_since(self, before: Work) -> Work:
        return Work.of(self.collector.stats).since(before)

    def _observe_costs(self, request: Request, sequence: SequenceState, plan: Plan | None, work: Work) -> None:
        """Correct the calibrated costs by the times of a prompt. A GPU's times are not known here."""
        learns = self.conversation is not None or (isinstance(self.method, PrefixMethod) and self.method.calibrates)
        device = self.attachment.model.device
        if not learns or request.base or device.type != "cpu":
            return
        tokens = request.num_positions if plan is None else plan.restored_until
        if (costs := costs_of(sequence, tokens)) is not None:
            ratios = observed_ratios(plan, tokens, costs, work)
            self.store.writer.later(partial(renew_costs, self.store, sequence.identity.fingerprint, device, ratios))

    def _forward_pass(
        self, cache: LayeredCache, request: Request, sequence: SequenceState, plan: Plan | None
    ) -> ForwardPass:
        """Create the forward pass that follows a plan, or that computes all tokens if there is no plan."""
        recorder: Recorder | None = sequence.recorder
        is_recorded = plan is None or plan.exact or sequence.method.records_approximations
        if isinstance(plan, BudgetPlan) and not is_recorded:
            is_recorded = len(plan.inexact_rows) < len(request.ids)
        if not sequence.recorder.enabled or not is_recorded:
            recorder = None
        first = request.base + (0 if plan is None else plan.restored_until)
        common = cache, self.attachment, self.collector, sequence.tables, recorder, first
        if plan is None:
            forward_pass = ForwardPass(*common)
        else:
            if isinstance(self.method, BudgetMethod):
                for geometry in {reader.shape.geometry for reader in plan.readers}:
                    if warning := self.method.geometry_warning(geometry):
                        self.store.disk.warn(warning, warning)
            kind = RefiningForward if isinstance(plan, PassagesPlan) else RestoringForward
            forward_pass = kind(*common, plan=plan, store=self.store, method=self.method)
        may_round = sequence.approximate or sequence.method.records_approximations
        forward_pass.folds = may_round or self.options.fold_heads
        if self.observer is not None:
            forward_pass.watch(self.observer, request.base + request.num_positions, sequence.history.pads)
        return forward_pass

    def _run(
        self, cache: LayeredCache, forward_pass: ForwardPass, forward: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a pass, and undo it if it fails."""
        sources = cache.kv_sources
        for source in sources:
            if source.decode_selector is not None:
                source.offload()
        snapshots = [vars(source).copy() for source in sources]
        self.forward_pass = forward_pass
        try:
            with self.attachment.apart_from_batches():
                batched_passes = self.attachment.batched_passes
                output = forward_pass.run(forward, kwargs)
                if self.attachment.batched_passes != batched_passes:
                    raise _DisturbedError
            if forward_pass.observer is not None:
                forward_pass.observer.end()
            for source in sources:
                source.note_content()
            return output
        except BaseException as error:
            forward_pass.close()
            leave(cache)
            for source, snapshot in zip(sources, snapshots, strict=True):
                source.rollback(snapshot)
            if self.sequence is not None:
                self.sequence.recorder.abandon()
            if forward_pass.observer is not None:
                forward_pass.observer.undo()
            if isinstance(error, LostKVError) and isinstance(error.__cause__, RestoreError):
                self.store.disk.report(error.segment, error.__cause__.__cause__ or error.__cause__)
            raise
        finally:
            forward_pass.observer = self.forward_pass = None

    def _commit(self, cache: LayeredCache, request: Request, sequence: SequenceState, plan: Plan | None) -> None:
        """Record a completed pass, if the model has appended the request's tokens and no others."""
        if cache.get_seq_length() == request.base + request.num_positions:
            reason = sequence.commit(request, plan, self.collector)
            if self._front is not None and not reason:
                confirmed = partial(sequence.identity.weights_held, time.monotonic())
                self.store.writer.later(partial(self.store.fronts.put, self._front, confirmed), self._front.end())
        else:
            sequence.recorder.abandon()
            self.collector.add(tokens_computed=request.ids.numel())
            reason = reasons.OTHER_TOKENS
        self._front = None
        if reason:
            self._run_plain(reason, request.ids[:, request.text :])

    def look_up_admitted(self, request: Request, sequence: SequenceState) -> tuple[Plan | None, str]:
        """Return the plan that would restore an admitted prompt and "", or None and the reason."""
        reason = self._why_not_looked_for(request, sequence)
        plan = None if reason else sequence.plan(request, self.collector)
        if plan is not None:
            chosen_plan, reason = choose_strategy(plan, sequence)
            plan = chosen_plan and (plan if plan.suffix is None else with_required_recompute(plan))
        self.store.note_uses()
        return plan, "" if plan is not None else reason or sequence.why_nothing(request)

    def replans_after(self, error: RestoreError, replans: int) -> int:
        """Note a failed restore, so that the next plan avoids its block. Return how many of the `replans` remain."""
        if isinstance(error.__cause__, EvictedError):
            self.store.fronts.forget([error.segment])
            return replans
        self.collector.add(recomputed=1)
        self.store.disk.report(error.segment, error.__cause__ or error)
        return replans - 1 if self.store.usable else 0  # a store that was closed meanwhile cannot serve another plan

    # --- before a pass

    def admit(self, cache: LayeredCache, kwargs: dict[str, Any]) -> tuple[Request, SequenceState] | None:
        """Return the request of a pass and its sequence, or None if the pass runs without the store.

        That is the case if its KV can be neither stored nor restored.
        """
        if self.bypass and cache.get_seq_length():
            return None
        self.bypass = ""  # an empty cache takes any prompt
        ids = kwargs.get("input_ids")
        identity = self.identify(closely=self.unreported or ids is None or ids.shape[-1] > 1)
        admitted = identity if isinstance(identity, str) else self._understand(cache, kwargs, identity)
        if not isinstance(admitted, str):
            return admitted
        self._run_plain(admitted)
        if not self.unreported:
            self.explain(admitted)
        return None

    def identify(self, closely: bool) -> Identity | str:
        """Return the current identity of the model, or the reason why its KV can be neither stored nor restored.

        With `closely`, a part of the weights is read again, as at the beginning of a prompt.
        """
        attachment = self.attachment
        if attachment.model.training:
            return reasons.TRAINING
        fingerprinter = fingerprinter_of(attachment)
        if fingerprinter.rows_have_adapters():
            return reasons.ROW_ADAPTERS
        with attachment.apart_from_batches():
            identity = fingerprinter.look(self.options.tag, closely)
        if identity.training:
            return reasons.TRAINING
        if identity.looks_ahead:
            return reasons.LOOKS_AHEAD
        if identity.fingerprint in self.store.spot_checks.doubted:
            return reasons.DOUBTED
        return reasons.nameless(identity.problem) if identity.problem else identity

    def _understand(
        self, cache: LayeredCache, kwargs: dict[str, Any], identity: Identity
    ) -> tuple[Request, SequenceState] | str:
        """Return the request and the sequence that it begins or continues, or the reason why there is none."""
        sequence, num_positions = self.sequence, cache.get_seq_length()
        if num_positions != (0 if sequence is None else sequence.history.num_positions):
            return reasons.FILLED_ELSEWHERE
        if sequence is not None:
            sequence.recorder.end_interrupted()
        if any(source.is_edited for source in cache.kv_sources):
            return reasons.EDITED
        if not num_positions:
            sequence = None  # rows, padding and model may differ from those before a crop or a failed pass
        pads, check = (None, None) if sequence is None else (sequence.history.pads, sequence.recorder.check)
        request = parse_request(kwargs, num_positions, pads, self.arguments, check)
        if isinstance(request, str):
            return request
        if check is not None and request.num_positions > 1 and check.odd():  # nothing may be restored behind it
            return reasons.ODD_MASK
        regime: str | None = ""
        if identity.rope_varies:
            length = num_positions + request.num_positions - min(request.pads)
            regime = rope_regime(self.attachment.config, length)
        if regime is None:
            return reasons.LENGTH_ROPE
        if sequence is None:
            sequence = self._new_sequence(cache, request, identity, regime)
            self.follow(cache, sequence)
        elif regime != sequence.regime:
            return reasons.LENGTH_ROPE
        elif identity.fingerprint != sequence.identity.fingerprint:
            return reasons.MODEL_CHANGED
        return request, sequence

    def _new_sequence(self, cache: LayeredCache, request: Request, identity: Identity, regime: str) -> SequenceState:
        """Create the state of a sequence at its first pass, with the method's measured settings filled in."""
        store, attachment, fingerprint = self.store, self.attachment, identity.fingerprint
        method = with_measured_settings(self.method, store, fingerprint, attachment, request.num_positions)
        self.method = method
        recorder = self.new_recorder(identity, regime, request.pads)
        return SequenceState(
            store,
            method,
            attachment,
            identity,
            regime,
            recorder,
            attachment.tables_of(fingerprint),
            self.options.segments,
            layers=len(cache.layers),
            selects=any(source.selects for source in cache.kv_sources),
            seconds_to_compute=partial(seconds_to_compute, store, self._pace, fingerprint, attachment.model.device),
            reports_passages=isinstance(method, Passages),
        )

    def new_recorder(self, identity: Identity, regime: str, pads: list[int]) -> Recorder:
        """Create the recorder for a sequence with the given left padding."""
        method, store, provenance = self.method, self.store, self.method.provenance
        return Recorder(
            History(store.hasher(identity.fingerprint, provenance, regime), pads),
            identity.fingerprint,
            method.geometry,
            store.submit,
            store.ttl,
            provenance,
            self.options.record,
            collector=self.collector,
            model=identity.facts,
            labels=self.options.label,
            weights_held=identity.weights_held,
        )

    def follow(self, cache: LayeredCache, sequence: SequenceState) -> None:
        """Attach a sequence to the cache. Its computed KV is stored even after the cache is garbage collected."""
        self.sequence = sequence
        if self.options.record:
            self.store.register(sequence.recorder)
            self._finish = weakref.finalize(cache, sequence.recorder.leave_to, self.store.writer)

    def _why_not_looked_for(self, request: Request, sequence: SequenceState) -> str:
        """Return the reason why a pass does not look up stored KV, or an empty string."""
        if sequence.approximate and not isinstance(sequence.method, Passages):  # passages are restored after any KV
            return reasons.APPROXIMATE
        if not self.options.restore:
            return reasons.SWITCHED_OFF
        if asks_for_all(request.kwargs, self.attachment.model.config):
            return reasons.ALL_STATES
        if request.must_compute >= request.num_positions:
            return reasons.SHORT if request.num_positions < HASH_TOKENS else reasons.ALL_LOGITS
        return ""

    def _why_nothing(self, request: Request, sequence: SequenceState) -> str:
        """Return the reason why a prompt has no plan."""
        reason = sequence.why_nothing(request)
        if reason == reasons.NOTHING and self.conversation is not None:
            return self.conversation.why_nothing(sequence.identity, sequence.method)
        return reason

    # --- between passes

    def store_now(self) -> tuple[str, ...]:
        """Queue computed KV that is not stored yet, and return the ids of the segments of the first row's tokens."""
        if self.sequence is None:
            return ()
        self.sequence.recorder.seal()
        return self.sequence.recorder.segments(0)

    def num_dropped(self, cache: LayeredCache, prompt: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Return how many cached positions a prompt, int `[rows, positions]`, lacks; at least all if that is not known.

        Raises CacheMismatchError if there are such positions, and the cache is strict.
        """
        self.unreported = True
        sequence, num_positions = self.sequence, cache.get_seq_length()
        history = self.plain if sequence is None else sequence.history
        if history is None:
            return 0
        if num_positions != history.num_positions:  # interrupted between a pass and its bookkeeping
            if sequence is not None:
                sequence.recorder.abandon()
            return max(num_positions, history.num_positions)
        shared = num_common(history, prompt, None if sequence is None else mask)
        dropped = num_positions - shared
        if dropped > 0 and self.options.strict:
            raise CacheMismatchError(
                f"this cache holds {num_positions} tokens, but the prompt begins with only {shared} of them; create a "
                "new TieredCache for each prompt (it is cheap, and finds stored KV), pass the whole conversation so "
                "far to continue this one, or use strict=False"
            )
        if dropped and sequence is None:  # masks and images of these tokens are not known
            shared, dropped = 0, num_positions
        self.collector.add(tokens_dropped=history.tokens_in(num_positions) - history.tokens_in(shared))
        return dropped

    def crop(self, count: int) -> None:
        """Remove the last `count` positions."""
        if self.sequence is not None:
            self.sequence.recorder.crop(count)
            if self.observer is not None:
                self.observer.crop(self.sequence.num_positions)
        elif self.plain is not None:
            self.plain.crop(min(count, self.plain.num_positions))

    @property
    def rows(self) -> int:
        """Number of rows of the known tokens; 0 if there are none."""
        history = self.plain if self.sequence is None else self.sequence.history
        return 0 if history is None else history.rows

    def select(self, rows: torch.Tensor) -> None:
        """Reorder the rows: row i becomes the former row `rows[i]`."""
        if self.sequence is not None:
            self.sequence.recorder.select(rows)
            if self.observer is not None:
                self.observer.select(rows)
        elif self.plain is not None:
            self.plain.select(rows.tolist())

    def finish(self) -> None:
        """Store the computed KV before the cache is cleared, so that the next lookup finds it."""
        self._finish()
        if self.sequence is not None:
            self.sequence.recorder.finish()

    # --- reporting

    def _run_plain(self, reason: str, rest: torch.Tensor | None = None) -> None:
        """Run later passes without the store. `rest` are cached tokens that the history lacks, int `[rows, n]`."""
        self.bypass = reason
        if (ended := self.sequence) is not None:
            self.plain, self.sequence, self.ended = ended.history.fork(), None, ended
            if rest is not None:
                self.plain.append(rest)
            with suppress(StoreClosedError):  # the request itself continues
                ended.recorder.seal()

    def _note_plain(self, cache: LayeredCache, ids: torch.Tensor | None) -> None:
        """Note the tokens of a pass without the store, int `[rows, n]`, if all cached tokens are known."""
        before = 0 if self.plain is None else self.plain.num_positions
        if ids is None or ids.ndim != 2 or before + ids.shape[1] != cache.get_seq_length():
            return
        if self.plain is None or not before:
            self.plain = History(PrefixHasher(()), [0] * len(ids))
        self.plain.append(ids)

    def _report_prompt(self, reason: str, tokens_kept: int = 0) -> None:
        """Count a prompt after its first pass, and report the result."""
        self.unreported = False
        self.collector.add(requests=1, tokens_kept=tokens_kept)
        if reason:
            self.explain(reason)
        stats = self.collector.stats
        logger.info(
            "%d tokens restored (slowest tier: %s), %d computed, %.0f ms waiting for KV%s",
            stats.tokens_restored,
            stats.tier,
            stats.tokens_computed,
            1e3 * stats.stall_seconds,
            reason and f"; {reason}",
        )

    def explain_once(self, reason: str) -> None:
        """Report a reason, unless it is empty or was reported for this cache before."""
        if reason and reason not in self.collector.stats.reasons:
            self.explain(reason)

    def explain(self, reason: str) -> None:
        """Count a reason, and report it unless it is expected."""
        self.collector.explain(reason)
        if not reasons.is_expected(reason):
            self.store.disk.warn(reason, reason)


def _suffix(plan: Plan | None) -> int:
    """Return the first position that every layer computes by a plan of a suffix; 0 if nothing is restored."""
    return 0 if plan is None else plan.suffix or 0
