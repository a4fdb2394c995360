"""Execution of the passes of one cache: restore what is stored, compute the rest, record it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from .. import reasons
from ..errors import CacheMismatchError, EvictedError, LayerOrderError, LostKVError, RestoreError
from ..layers import LayeredCache
from ..methods import BudgetMethod, Passages, PrefixMethod
from ..patches.scope import leave
from ..restore.plan import BudgetPlan, PassagesPlan, Plan
from ..store.geometry import HASH_TOKENS
from .cache_state import CacheState
from .cost_model import calibration_for, choose_strategy, recomputing, required_recompute, warn_of_slow_restore
from .forward_pass import ForwardPass, RefiningForward, RestoringForward
from .observed import Work, observed_ratios, renew_costs
from .request import Request, asks_for_all, count_tokens
from .sequence import SequenceState
from .spot_check import RestoredRun
from .unstored import ComputedPrefix

REPLANS = 4
"""Number of times a pass is planned again after a failed restore, around the failure; then all of it is computed."""
PREFILL_TRIES = 2
"""Number of times that prefill goes back because stored pieces have disappeared; then the rest is computed at once."""


_ROUTER_LOGITS = "output_router_logits"
"""Argument, and setting of the configuration, for an output that `generate()` discards."""


class _DisturbedError(Exception):
    """Pass during which the first pass of an engine of continuous batching began. It is admitted and run again.

    The engine may also have changed the model while it was identified.
    """


class Executor(CacheState):
    """Executor of a cache's passes."""

    forward_pass: ForwardPass | None = None
    """Pass that is running, or None."""
    generates = False
    """True while `generate()` runs."""
    restored: RestoredRun | None = None
    """Segments restored by the pass of the last prompt, for a spot check."""
    _unstored: ComputedPrefix | None = None  # that of the last pass, until it is committed
    _excludes_engine = False  # whether an engine had begun a pass before this one was admitted

    # --- one pass

    def run(self, cache: LayeredCache, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the model; `kwargs` holds all its arguments by name."""
        if self.generates and not self.new_prompt and not cache.get_seq_length():
            raise CacheMismatchError(
                "this cache was emptied while generate() used it; call suspend() or reset() after generate()"
            )
        conversation, is_prompt = self.conversation, self.unreported
        discards = is_prompt and self.generates and kwargs.get(_ROUTER_LOGITS) is None
        if discards and getattr(self.attachment.config, _ROUTER_LOGITS, False):
            kwargs = kwargs | {_ROUTER_LOGITS: False}
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
        self._excludes_engine = bool(self.attachment.batched_passes)
        if str(self.attachment.config._attn_implementation).startswith("paged|"):
            self._run_plain(reasons.PAGED_ATTENTION)
            output = self._run_without_store(cache, forward, kwargs)
            self.explain_once(reasons.PAGED_ATTENTION)
            return output
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
        if request.base:  # the costs may have been corrected since the last prompt
            fingerprint, method = sequence.identity.fingerprint, sequence.method
            sequence.calibration = calibration_for(self.store, fingerprint, self.attachment, method)
        reason, replans, before = self._lookup_refusal(request, sequence), REPLANS, Work.of(self.collector.stats)
        in_pieces = not reason and sequence.can_be_cut(request)
        if in_pieces:
            self._run_pieces(cache, request, sequence, forward)
        is_chunk = request.base + request.num_positions < self.new_prompt  # `generate()` passes the rest later
        while True:
            plan = None
            if not reason and replans:
                plan = sequence.plan(request, whole=is_chunk and not in_pieces)
            if type(plan) is Plan:  # the other kinds restore only what is completely stored
                plan, reason = choose_strategy(plan, sequence)
            try:
                output, plan = self._run_planned(cache, request, sequence, plan, forward)
                break
            except RestoreError as error:
                replans = self.replans_after(error, replans)
            except LayerOrderError:
                reason = reasons.LAYER_ORDER
        reason = self._why_less(request, sequence, plan, reason, replans)
        self.store.note_uses()
        self._commit(cache, request, sequence, plan)
        if plan is not None:
            # rows of a batch restore their own prefixes; `restored_until` is what all of them restore, maybe nothing
            stop, work = request.base + plan.restored_until or request.num_positions, before.until(self.collector.stats)
            if work.restored > 0:  # not a piece of a long prompt that was computed before
                saved = work.saved(stop, sequence.seconds_to_compute(stop), sequence.calibration.device)
                self.collector.add(seconds_saved=saved)
                warn_of_slow_restore(sequence, saved)
        for why in sequence.passage_reasons:
            self.explain_once(why)
        if self.unreported:
            tokens_kept = sequence.history.tokens_in(request.base) if request.base else 0
            self._report_prompt(self.bypass or reason, tokens_kept)
        else:
            self.explain_once(reason)
        if is_chunk and plan is not None and isinstance(self.method, BudgetMethod):
            self.explain_once(reasons.IN_CHUNKS)
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
        if end - (stored := _suffix(sequence.plan(request))) <= step:
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
        plan = sequence.plan(piece)
        before = _suffix(plan)
        if before <= stored - HASH_TOKENS:
            return before
        if plan is not None:
            plan = plan.streamed()
        try:
            self._run_planned(cache, piece, sequence, plan, forward)
        except RestoreError as error:
            self.collector.add(recomputed=1)
            self.store.disk.report(error.segment, error.__cause__ or error)
            return max(0, min(_suffix(sequence.plan(piece)), stored - HASH_TOKENS))
        sequence.store_piece(piece, plan)
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
            device, fingerprint = sequence.calibration.device, sequence.identity.fingerprint
            with self._pace.measuring(device, fingerprint, request.ids.numel()):
                output = self._run(cache, forward_pass, forward, request.kwargs)
            self._observe_costs(request, sequence, None, before)
            return output, None
        output = self._run(cache, forward_pass, forward, request.only(plan.computed[0], plan.suffix is not None))
        self._observe_costs(request, sequence, plan, before)
        self.restored = RestoredRun.of(forward_pass.plan, before.seconds)
        self._unstored = forward_pass.unstored
        if forward_pass.selection is not None and not forward_pass.selection.index_fits:
            self.explain_once(reasons.no_room_for_index(self.store.residency.index_cache.budget))
        return output, forward_pass.plan

    def _observe_costs(self, request: Request, sequence: SequenceState, plan: Plan | None, before: Work) -> None:
        """Correct the calibrated costs by the times of a prompt since `before`. A GPU's times are not known here."""
        learns = self.conversation is not None or (isinstance(self.method, PrefixMethod) and self.method.calibrates)
        device = sequence.calibration.device
        if not learns or request.base or device.type != "cpu":
            return
        work = before.until(self.collector.stats)
        tokens = request.num_positions if plan is None else plan.restored_until
        if (costs := sequence.calibration.at(tokens)) is not None:
            ratios = observed_ratios(plan, tokens, costs, work)
            self.store.writer.later(partial(renew_costs, self.store, sequence.identity.fingerprint, device, ratios))

    def _forward_pass(
        self, cache: LayeredCache, request: Request, sequence: SequenceState, plan: Plan | None
    ) -> ForwardPass:
        """Create the forward pass that follows a plan, or that computes all tokens if there is no plan."""
        is_recorded = plan is None or plan.exact or sequence.method.records_approximations
        if isinstance(plan, BudgetPlan) and not is_recorded:
            is_recorded = len(plan.inexact_rows) < len(request.ids)
        recorder = sequence.recorder if is_recorded and sequence.recorder.enabled else None
        first = request.base + (0 if plan is None else plan.restored_until)
        common = cache, self.attachment, self.collector, sequence.tables, recorder, first
        if plan is None:
            forward_pass = ForwardPass(*common)
        else:
            if isinstance(self.method, BudgetMethod):
                for geometry in {reader.shape.geometry for reader in plan.readers} - {self.method.geometry}:
                    if warning := self.method.geometry_warning(geometry):
                        self.store.disk.warn(warning, warning)
            kind = RefiningForward if isinstance(plan, PassagesPlan) else RestoringForward
            forward_pass = kind(*common, plan=plan, store=self.store, method=self.method)
        if request.num_positions > 1:
            forward_pass.tap.numbers = partial(request.numbers, None if plan is None else plan.computed[0])
        may_round = sequence.approximate or sequence.method.records_approximations
        forward_pass.folds = may_round or self.options.fold_heads
        if self.observer is not None and (plan is None or all(positions.ndim == 1 for positions in plan.computed)):
            stop, pads = request.base + request.num_positions, sequence.history.pads
            forward_pass.observer = self.observer.begin(cache.kv_sources, first, stop, pads)
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
            with self.attachment.excluding_engine_passes:
                output = forward_pass.run(forward, kwargs)
                if self.attachment.batched_passes and not self._excludes_engine:
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
            reason = sequence.commit(request, plan)
            if self._unstored is not None and not reason:
                confirmed = partial(sequence.identity.weights_held, time.monotonic())
                keep_unstored = partial(self.store.unstored.put, self._unstored, confirmed)
                self.store.writer.later(keep_unstored, self._unstored.end())
        else:
            sequence.recorder.abandon()
            self.collector.add(tokens_computed=request.ids.numel())
            reason = reasons.OTHER_TOKENS
        self._unstored = None
        if reason:
            self._run_plain(reason, request.ids[:, request.text :])

    def look_up_admitted(self, request: Request, sequence: SequenceState) -> tuple[Plan | None, str]:
        """Return the plan that would restore an admitted prompt and "", or None and the reason."""
        reason = self._lookup_refusal(request, sequence)
        plan = None if reason else sequence.plan(request)
        if plan is not None:
            chosen_plan, reason = choose_strategy(plan, sequence)
            plan = chosen_plan and (plan if plan.suffix is None else recomputing(plan, required_recompute(plan)))
        self.store.note_uses()
        return plan, "" if plan is not None else reason or self._no_plan_reason(request, sequence)

    def replans_after(self, error: RestoreError, replans: int) -> int:
        """Note a failed restore, so that the next plan avoids its block. Return how many of the `replans` remain."""
        if isinstance(error.__cause__, EvictedError):
            self.store.unstored.forget([error.segment])
            return replans
        self.collector.add(recomputed=1)
        self.store.disk.report(error.segment, error.__cause__ or error)
        return replans - 1 if self.store.usable else 0  # a store that was closed meanwhile cannot serve another plan

    def _lookup_refusal(self, request: Request, sequence: SequenceState) -> str:
        """Return the reason why a pass does not look up stored KV, or an empty string."""
        if sequence.approximate and not isinstance(sequence.method, Passages):  # passages are restored after any KV
            return reasons.APPROXIMATE
        if not self.options.restore:
            return reasons.SWITCHED_OFF
        if asks_for_all(request.kwargs, self.attachment.model.config):
            return reasons.ALL_STATES
        if HASH_TOKENS <= request.num_positions <= request.must_compute:
            can_keep = "logits_to_keep" in self.attachment.signature.parameters
            return reasons.ALL_LOGITS if can_keep else reasons.NO_LOGITS_TO_KEEP
        return ""

    def _why_less(self, request: Request, sequence: SequenceState, plan: Plan | None, reason: str, replans: int) -> str:
        """Return why a prompt was not restored, or only in part. `reason` says why no plan was followed, if known."""
        if replans < REPLANS:
            return reasons.DAMAGED
        if plan is not None:
            if self.conversation is None or request.base:
                return ""
            return self.conversation.why_less(plan.restored_until)
        if self.unreported or reason == reasons.LAYER_ORDER:
            return reason or self._no_plan_reason(request, sequence)
        return ""

    def _no_plan_reason(self, request: Request, sequence: SequenceState) -> str:
        """Return the reason why a prompt has no plan."""
        reason = sequence.why_nothing(request)
        if reason.startswith((reasons.NOTHING, reasons.NOT_FETCHED)) and self.conversation is not None:
            return self.conversation.why_nothing(sequence.identity, sequence.method) or reason
        return reason


def _suffix(plan: Plan | None) -> int:
    """Return the first position that every layer computes by a plan of a suffix; 0 if nothing is restored."""
    return 0 if plan is None else plan.suffix or 0
