"""TieredCache: the face that transformers sees, and the life of one request."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from . import reasons
from .calibrate import calibrated_ratio
from .errors import CacheMismatchError, RestoreError, StoreClosedError
from .geometry import LINK_TOKENS, LayerKV
from .identity import Fingerprinter, Identity, rope_regime
from .kvstore import KVStore, open_store
from .layer import TieredLayer, layers_for
from .methods import Method, make_method
from .patches.attach import Attachment, ServedCache, attach, base_model
from .patches.rotary import RotaryTap
from .patches.scope import Scope, current, entered, leave
from .record import Names, Recorder
from .request import DecodingCheck, Request, count_tokens, placeholder_tokens, understand
from .restore.history import History
from .restore.passages import PassageFinder, sink_token
from .restore.plan import Plan
from .restore.planner import make_plan
from .restoring import Restoring, check_depth, check_suits, choosing_layers
from .stats import Account, RequestStats

logger = logging.getLogger("hf_tiered_cache")

_REPLANS = 4
"""Times a pass whose restore failed is planned again, around what failed; then all of it is computed."""
_STORE_AT = 64
_STORE_GENERATED_AT = 512
_STORE_PROMPT_AT = 4096
"""Columns that are stored when they are computed: of a prompt, once it is whole, or of generated tokens. Chunks of a
long prompt come together into larger segments. Fewer wait for more, for a look-up that wants them, or for `flush`."""


@dataclass(eq=False)
class _Pass:
    """The pass under way."""

    scope: Scope
    stack: ExitStack
    """What is to be undone when it ends."""
    records: bool = False
    restoring: Restoring | None = None


class TieredCache(Cache, ServedCache):
    """A cache whose KV outlives it: `model.generate(**inputs, past_key_values=TieredCache(model, store))`.

    The longest stored prefix of the prompt is restored from device memory, host memory or disk, only the rest is
    computed, and what is new is stored, generated tokens too. The output is `DynamicCache`'s. A cache serves one
    request, or one conversation that goes on; it is cheap to make.

    Args:
        model: any decoder-only causal LM of transformers; it is attached (see `attach`) if it is not yet.
        store: a `KVStore`, or the path of one. A path's store is opened once for each model, and closed by `detach`.
        method: how KV is restored: a `Method`, its name, or None for exact reuse.
        restore: whether stored KV is used.
        record: whether new KV is stored.
        segments: for methods that reuse passages, the tokens of the prompt at which stored ones may begin; None looks
            for them everywhere.
        strict: what happens when the cache is given a prompt that does not begin with what it holds. False crops it to
            what the two have in common, restores what the store has, and goes on; True raises CacheMismatchError.
        label: stands in the header of the segments that this cache stores, for `hf-tiered-cache ls`.
        tag: a name for what the model computes, where that has none of its own (a hook that steers it, a replaced
            forward, an attention function of the user's). KV is shared only under the same tag.

    Raises:
        ConfigError: an argument is not valid, or the model's attention does not suit the method.
        UnsupportedModelError: the model keeps state that is no KV of single tokens, or the method cannot serve it.
    """

    def __init__(
        self,
        model: nn.Module,
        store: KVStore | str | os.PathLike[str],
        *,
        method: Method | str | None = None,
        restore: bool = True,
        record: bool = True,
        segments: Sequence[int] | None = None,
        strict: bool = False,
        label: str = "",
        tag: str = "",
    ) -> None:
        self.method = make_method(method)
        inner = base_model(model)
        super().__init__(layers=layers_for(inner))
        check_suits(self.method, inner)
        self._attachment = attach(inner)
        check_depth(self._attachment)
        self.store = open_store(store, self.method, self._attachment.extras)
        self._restores, self._records, self._strict, self._label = restore, record, strict, label
        self._tag = tag
        self._segments = None if segments is None else tuple(segments)
        self._placeholders = placeholder_tokens(self.model.config)
        self._account = Account()
        self._begin()

    def _begin(self) -> None:
        self._history: History | None = None
        self._recorder: Recorder | None = None
        self._finish: Callable[[], None] | None = None
        self._regime = ""
        self._identity: Identity | None = None  # of the model, as of the pass under way
        self._check = DecodingCheck()
        self._plain = ""  # why what this cache holds can be neither stored nor restored, if so
        self._approximate = False  # whether what it holds is what no exact cache would
        self._untold = True  # whether a prompt has begun of which nothing was said yet
        self._now: _Pass | None = None
        self._in_prompt = False  # whether the last pass had several columns

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model this cache belongs to."""
        return self._attachment.model

    @property
    def stats(self) -> RequestStats:
        """What this cache has restored, computed, stored and read. Printed, it is a table."""
        return self._account.stats

    def store_now(self) -> tuple[str, ...]:
        """Queue what is computed and not stored yet. Returns the segments that the first row's tokens stand in."""
        if self._recorder is None:
            return ()
        self._recorder.seal()
        return self._recorder.segments(0)

    def look_up(self, input_ids: torch.Tensor) -> tuple[Plan | None, str]:
        """What a fresh cache would restore of a prompt, int `[1, tokens]`, or None and why nothing."""
        request = self._understand({"input_ids": input_ids, "logits_to_keep": 1})
        if request is None:
            return None, self._plain
        plan = self._plan(request)
        return plan, self._why_nothing(request) if plan is None else ""

    def count_into(self, total: Account | None) -> None:
        """Let everything that is counted from now on be counted there, too."""
        self._account.total = total

    # --- one pass

    @torch.compiler.disable
    def run(self, attachment: Attachment, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """One forward pass of the model: restore what is stored, compute the rest, record it."""
        if attachment is not self._attachment:
            raise CacheMismatchError(
                f"this cache belongs to another {type(self.model).__name__}; make one for this model"
            )
        with torch.no_grad():  # stored KV has no gradient
            request = self._understand(kwargs)
            if request is None:
                marks = [layer.mark() for layer in self._kv_layers()]
                try:
                    output = self._pass(forward, kwargs, None, None)
                except BaseException:
                    self._undo(marks)
                    raise
                self._account.add(tokens_computed=count_tokens(kwargs))
                if self._untold:
                    self._tell(self._plain)
                return output
            failed, restores = False, True
            for replans_left in range(_REPLANS, -1, -1):
                plan = self._plan(request) if replans_left and restores else None
                marks = [layer.mark() for layer in self._kv_layers()]
                try:
                    output = self._pass(forward, kwargs, request, plan)
                    break
                except BaseException as error:
                    self._undo(marks)
                    if not isinstance(error, RestoreError):
                        raise
                    failed = True
                    self._account.add(recomputed=1)
                    self.store.disk.report(error.segment, error.__cause__ or error)
                    restores = self.store.usable  # closed under way, it has failed this pass, and finds no other plan
            reason = reasons.DAMAGED if failed else self._why_nothing(request) if plan is None and self._untold else ""
            if request.text < request.columns:
                reason = reasons.IMAGES
            kept = self._history.columns * self._history.rows
            self._note(request, plan)
            if self._untold:
                self._account.add(tokens_kept=kept)
                self._tell(self._plain or reason)
            return output

    def _understand(self, kwargs: dict[str, Any]) -> Request | None:
        """What a pass asks for, or None if its KV can be neither stored nor restored: it runs as with any cache."""
        if self._plain:
            return None
        columns = self.get_seq_length()
        ids = kwargs.get("input_ids")
        request = self._unusual(columns, closely=self._untold or ids is None or ids.shape[-1] > 1)
        pads = None if self._history is None else self._history.pads
        request = request or understand(kwargs, columns, pads, self._placeholders, self._check)
        reason = request if isinstance(request, str) else self._changed(request, columns)
        if not reason:
            return request
        self._run_plain(reason)
        if not self._untold:
            self._explain(reason)
        return None

    def _run_plain(self, reason: str) -> None:
        """From here on passes run as with any cache."""
        self._plain = reason
        if self._recorder is not None:
            self._recorder.seal()
            self._history = self._recorder = None

    def _tell(self, reason: str) -> None:
        """The first pass of a prompt is done: count it, and say what came of it."""
        self._untold = False
        self._account.add(requests=1)
        if reason:
            self._explain(reason)
        stats = self.stats
        logger.info(
            "%d tokens restored (slowest tier: %s), %d computed, %.0f ms waiting for KV%s",
            stats.tokens_restored,
            stats.tier,
            stats.tokens_computed,
            1e3 * stats.stall_seconds,
            reason and f"; {reason}",
        )

    def _explain(self, reason: str) -> None:
        self._account.explain(reason)
        if not reasons.is_expected(reason):
            self.store.disk.warn(reason, reason)

    def _changed(self, request: Request, columns: int) -> str:
        """Why the pass's KV is of another kind than what this cache holds, or ""; the first one decides on that."""
        regime = rope_regime(self._attachment.config, columns + request.columns - min(request.pads))
        if regime is None or (self._history is not None and regime != self._regime):
            return reasons.LENGTH_ROPE
        if self._history is None:
            self._open(request, regime)
        elif self._identity.fingerprint != self._recorder.fingerprint:
            return reasons.MODEL_CHANGED
        return ""

    def _unusual(self, columns: int, closely: bool) -> str:
        """Why a pass is none whose KV can be stored or restored, seen from the model and the cache, or ""."""
        if self.model.training:
            return reasons.TRAINING
        if self._fingerprinter.rows_have_adapters():
            return reasons.ROW_ADAPTERS
        identity = self._identity = self._fingerprinter.look(self._tag, closely)
        if identity.training:
            return reasons.TRAINING
        if identity.looks_ahead:
            return reasons.LOOKS_AHEAD
        if identity.nameless:
            return reasons.nameless(identity.nameless)
        if columns != (0 if self._history is None else self._history.columns):
            return reasons.FILLED_ELSEWHERE
        return ""

    def _open(self, request: Request, regime: str) -> None:
        """The first pass of a sequence: from here on its tokens are known."""
        self._regime = regime
        fingerprint = self._identity.fingerprint
        found = partial(calibrated_ratio, self.store, fingerprint, self.model.device, request.columns)
        self.method = self.method.tuned(found)
        recorder = self._new_recorder(fingerprint, request.pads)
        self._history = recorder.history
        self._follow(recorder)

    def _new_recorder(self, fingerprint: str, pads: list[int]) -> Recorder:
        method, store = self.method, self.store
        history = History(store.chain(fingerprint, method.provenance, self._regime), pads)
        return Recorder(
            history,
            fingerprint,
            method.geometry,
            store.submit,
            store.ttl,
            method.provenance,
            self._records,
            account=self._account,
            names=self._names(),
            check=self._check,
        )

    def _names(self) -> Names:
        return Names(self._identity.facts, self._label)

    @property
    def _fingerprinter(self) -> Fingerprinter:
        extras = self._attachment.extras
        if "fingerprinter" not in extras:  # making one reads all weights
            extras["fingerprinter"] = Fingerprinter(self.model)
        return extras["fingerprinter"]

    def _follow(self, recorder: Recorder) -> None:
        self._recorder = recorder
        if self._records:
            self.store.register(recorder)
            self._finish = weakref.finalize(self, recorder.leave_to, self.store.writer)

    def _plan(self, request: Request) -> Plan | None:
        """What this pass restores, or None if that is nothing."""
        if self._why_not_looked_for(request):
            return None
        with self._account.timing("match_seconds"):
            plan, found = make_plan(
                self._history,
                request.ids.to("cpu", torch.int64).numpy(),
                request.must_compute,
                self.method,
                len(self.layers),
                partial(self.store.match, asking=self._recorder),
                self._finder() if self.method.passages else None,
            )
        for rows in found:
            for row in rows.rows:
                self._recorder.found(row, rows.held, rows.links, rows.segments)
        if plan is not None and not choosing_layers(self.layers):
            return replace(plan, attended=None)
        return plan

    def _why_not_looked_for(self, request: Request) -> str:
        if self._approximate:
            return reasons.APPROXIMATE
        if not self._restores:
            return reasons.SWITCHED_OFF
        if self._asks_for_all(request.kwargs):
            return reasons.ALL_STATES
        if request.must_compute >= request.columns:
            return reasons.SHORT if request.columns < LINK_TOKENS else reasons.ALL_LOGITS
        return ""

    def _why_nothing(self, request: Request) -> str:
        """Why a prompt that has no plan is not restored; "" where it goes on from what the cache holds."""
        reason = self._why_not_looked_for(request)
        if reason or self._history.columns or not self.store.usable:
            return reason
        passages = (self.method.passages, sink_token(self._attachment.config)) if self.method.passages else None
        tokens = request.ids[0, self._history.pads[0] :].to("cpu", torch.int64).numpy()
        fingerprint = self._recorder.fingerprint
        return reasons.of_a_miss(self.store, tokens, fingerprint, self._identity.facts, self._regime, passages)

    def _finder(self) -> PassageFinder:
        """Looks for passages under the RoPE regime of the prompt, and else under that of short ones."""
        config, fingerprint = self._attachment.config, self._identity.fingerprint
        sink = sink_token(config)
        regimes = dict.fromkeys((self._regime, rope_regime(config, 1)))
        chains = tuple(self.store.chain(fingerprint, f"{self.method.passages} {sink}", regime) for regime in regimes)
        return PassageFinder(chains, sink, self.store.find, self.store.disk.found, self._segments)

    def _asks_for_all(self, kwargs: dict[str, Any]) -> bool:
        """Whether outputs are asked for that only computing every token gives."""
        for name in ("output_hidden_states", "output_attentions"):
            asked = kwargs.get(name)
            if asked or (asked is None and getattr(self.model.config, name, False)):
                return True
        return False

    def _pass(
        self, forward: Callable[..., Any], kwargs: dict[str, Any], request: Request | None, plan: Plan | None
    ) -> Any:
        """Run the model on what the plan has computed."""
        scope = Scope(self, RotaryTap())
        first = 0 if plan is None else plan.suffix
        exact = request is not None and first is not None and (plan is None or plan.exact)
        with ExitStack() as stack:
            now = self._now = _Pass(scope, stack, exact and self._recorder.enabled)
            stack.callback(self._end_pass)
            if now.records:
                self._recorder.begin(self._history.columns + first)
            if plan is not None:
                kwargs = request.only(plan.computed[0], plan.base, self._history.pads, plan.suffix is not None)
                now.restoring = Restoring(
                    plan, self.layers, scope, self._attachment, self.store, self.method, self._account
                )
                now.restoring.begin(stack)
            stack.enter_context(self._attachment.running_eagerly())
            stack.enter_context(entered(scope))
            try:
                output = forward(**kwargs)
            except RuntimeError as error:
                if now.restoring is None or not now.restoring.waiting:
                    raise
                raise now.restoring.cannot_choose() from error
            if now.restoring is not None and now.restoring.waiting:
                raise now.restoring.cannot_choose()
            return output

    def _end_pass(self) -> None:
        self._now = None
        for layer in self._kv_layers():
            layer.expect()

    def _undo(self, marks: list[dict[str, Any]]) -> None:
        """A pass failed midway: leave no trace of it."""
        if self._now is not None:  # a Ctrl-C came on the way out
            self._now.stack.close()
        self._end_pass()
        leave(self)
        for layer, mark in zip(self._kv_layers(), marks, strict=True):
            layer.back_to(mark)
        if self._recorder is not None:
            self._recorder.abandon()
        if not self.get_seq_length():
            self._plain = ""  # the next prompt may be another, and plain no more

    def _note(self, request: Request, plan: Plan | None) -> None:
        """A pass is done: its tokens are known, and stored if they are many."""
        rows, columns = request.ids.shape
        if self.get_seq_length() != self._history.columns + columns:
            self._recorder.abandon()
            self._run_plain(reasons.OTHER_TOKENS)
            self._account.add(tokens_computed=rows * columns)
            return
        restored = plan.restored_tokens if plan is not None else 0
        padding = sum(max(0, pad - self._history.columns) for pad in self._history.pads)
        self._account.add(tokens_restored=restored, tokens_computed=rows * columns - padding - restored)
        if plan is not None and plan.attended is not None:
            attended = sum(len(g.rows) * min(plan.attended, max(0, plan.suffix - g.pad)) for g in plan.groups)
            self._account.add(tokens_attended=attended)
            if self.method.reorder:
                self.store.upkeep.prompt_done({piece.reader.id for group in plan.groups for piece in group.pieces})
        else:
            self._account.add(tokens_attended=restored)
        if plan is not None and not plan.exact:
            self._approximate, self._recorder.enabled = True, False
        computed = columns if plan is None else len(plan.computed[0])
        self._recorder.end(request.ids, computed, request.revocable)
        if request.text < columns:
            self._recorder.crop(columns - request.text)
            self._run_plain(reasons.IMAGES)
            return
        prompt_is_whole, self._in_prompt = columns == 1 and self._in_prompt, columns > 1
        least = _STORE_AT if prompt_is_whole else _STORE_GENERATED_AT if columns == 1 else _STORE_PROMPT_AT
        if self._recorder.unsealed >= least:
            try:
                self.store_now()
            except StoreClosedError as error:  # the request itself goes on
                logger.warning("%s: what is computed from here on is not stored", error)
                self._recorder.enabled = False

    # --- what layers and generate() ask of a cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, `[batch, heads, n, dim]`; return all that its queries may see."""
        layer, now = self.layers[layer_idx], self._now
        if now is None or current() is not now.scope or not (now.records or now.restoring):
            return layer.update(key_states, value_states)
        bare = now.scope.tap.take(key_states, value_states)
        kind = LayerKV(
            key_states.shape[1],
            key_states.shape[3],
            value_states.shape[1],
            value_states.shape[3],
            layer.window,
            bare.rotated,
            bare.dims,
            bare.movable,
        )
        if now.records:
            self._recorder.catch(layer_idx, kind, bare.keys, bare.values)
        if now.restoring is None:
            return layer.update(key_states, value_states)
        return now.restoring.take(layer_idx, kind, bare, key_states, value_states)

    def continue_with(self, input_ids: torch.Tensor, copies: int = 1) -> None:
        """`generate()` begins with these ids: keep what this cache holds of them, and forget the rest.

        Args:
            input_ids: int `[batch, n]`.
            copies: rows of the cache for each of these (beams, several sequences).

        Raises:
            CacheMismatchError: the cache is strict, and holds other tokens.
        """
        self._untold = True
        if self._history is not None and self.get_seq_length() != self._history.columns:
            self._recorder.abandon()  # a Ctrl-C came between a pass and what is noted of it
            self._start_over()
        if self._history is None or not self._history.columns:
            return
        columns, prompt = self._history.columns, input_ids.cpu().numpy().repeat(copies, axis=0)
        kept = min(self._history.common_columns(prompt), prompt.shape[1] - 1)
        dropped = columns - kept
        if not dropped:
            return
        if self._strict:
            raise CacheMismatchError(
                f"this cache holds {columns} tokens, of which the prompt begins with {kept}; make a new "
                "TieredCache for each prompt (it is cheap, and finds what is stored), pass the whole conversation so "
                "far to go on with this one, or leave strict=False"
            )
        self._account.add(tokens_dropped=dropped * self._history.rows)
        try:
            if not kept:
                raise RuntimeError
            self.crop(-dropped)
        except RuntimeError:  # a window, or a selection of the prompt, does not go back: the store may have it
            self._start_over()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a positive number (as in 5.17) is what stays."""
        before = self.get_seq_length()
        super().crop(tokens_to_remove)
        if self._recorder is not None:
            self._recorder.crop(before - self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was (beam search)."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        super().batch_repeat_interleave(repeats)
        if self._history is not None:
            self._select(torch.arange(self._history.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows `indices`, in that order."""
        super().batch_select_indices(indices)
        self._select(indices)

    def _select(self, rows: torch.Tensor) -> None:
        if self._recorder is not None:
            self._recorder.select(rows)

    def reset(self) -> None:
        """Forget everything, for another prompt; `stats` begin anew. What was computed is stored."""
        self._start_over()
        total = self._account.total
        self._account = Account()
        self._account.total = total

    def _start_over(self) -> None:
        if self._finish is not None:
            self._finish()
        if self._recorder is not None:
            self._recorder.finish()  # now, so that the next look-up finds it
        super().reset()
        self._begin()

    def fork(self) -> TieredCache:
        """A cache that goes on from here on its own, and shares memory with this one until one of the two writes."""
        twin = TieredCache(
            self.model,
            self.store,
            method=self.method,
            restore=self._restores,
            record=self._records,
            segments=self._segments,
            strict=self._strict,
            label=self._label,
            tag=self._tag,
        )
        twin.count_into(self._account.total)
        twin.layers = [layer.fork() if isinstance(layer, TieredLayer) else layer for layer in self.layers]
        twin._plain, twin._regime, twin._approximate = self._plain, self._regime, self._approximate
        twin._untold, twin._in_prompt, twin._identity = self._untold, self._in_prompt, self._identity
        if self._recorder is not None:
            twin._follow(self._recorder.fork(twin._account, twin._check))
            twin._history = twin._recorder.history
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"TieredCache({model}, {self.store!r}, {type(self.method).__name__}, {self.get_seq_length()} tokens)"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    def _kv_layers(self) -> list[TieredLayer]:
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]
