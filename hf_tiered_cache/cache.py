"""TieredCache: the face that transformers sees, and the life of one request."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .calibrate import calibrated_ratio
from .errors import CacheMismatchError, RestoreError, StoreClosedError
from .fingerprint import Fingerprinter, rope_regime, rows_have_adapters
from .geometry import LayerKV
from .kvstore import KVStore
from .layer import TieredLayer, layers_for
from .methods import Method, make_method
from .patches.attach import Attachment, ServedCache, attach, base_model
from .patches.rotary import RotaryTap
from .patches.scope import Scope, current, entered
from .record import Recorder
from .request import Request, understand
from .restore.history import History
from .restore.passages import PassageFinder, sink_token
from .restore.plan import Plan
from .restore.planner import make_plan
from .restoring import Restoring, choosing_layers
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

    Raises:
        UnsupportedModelError: the model keeps state that is no KV of single tokens.
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
    ) -> None:
        self.method = make_method(method)
        super().__init__(layers=layers_for(base_model(model)))
        self._attachment = attach(model)
        self.store = store if isinstance(store, KVStore) else _store_at(self._attachment, store)
        self._restores, self._records = restore, record
        self._segments = None if segments is None else tuple(segments)
        self._begin()

    def _begin(self) -> None:
        self._account = Account()
        self._history: History | None = None
        self._recorder: Recorder | None = None
        self._finish: Callable[[], None] | None = None
        self._regime = ""
        self._plain = ""  # why what this cache holds can be neither stored nor restored, if so
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
        self._account.add(tokens_stored=self._recorder.seal())
        return self._recorder.segments(0)

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
                return self._pass(forward, kwargs, None, None)
            restores = self._restores
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
                    self._account.add(recomputed=1)
                    cause = error.__cause__ or error
                    if not isinstance(cause, MemoryError | RuntimeError):  # no fault of the segment's
                        self.store.disk.report(error.segment, cause)
                    restores = self.store.usable  # closed under way, it has failed this pass, and finds no other plan
            self._note(request, plan)
            return output

    def _understand(self, kwargs: dict[str, Any]) -> Request | None:
        """What a pass asks for, or None if its KV can be neither stored nor restored: it runs as with any cache."""
        if self._plain:
            return None
        columns = self.get_seq_length()
        request = self._unusual(columns)
        request = request or understand(kwargs, columns, None if self._history is None else self._history.pads)
        reason = request if isinstance(request, str) else self._changed(request, columns)
        if not reason:
            return request
        self._plain = reason
        logger.debug("nothing more of this prompt is restored or stored: %s", reason)
        if self._recorder is not None:
            self._recorder.seal()
            self._history = self._recorder = None
        return None

    def _changed(self, request: Request, columns: int) -> str:
        """Why the pass's KV is of another kind than what this cache holds, or ""; the first one decides on that."""
        regime = rope_regime(self._attachment.config, columns + request.columns - min(request.pads))
        if regime is None or (self._history is not None and regime != self._regime):
            return "its RoPE frequencies depend on its length"
        if self._history is None:
            self._open(request, regime)
        elif request.columns > 1 and self._fingerprint() != self._recorder.fingerprint:
            return "the model has changed since the cache was begun"
        return ""

    def _unusual(self, columns: int) -> str:
        if self.model.training:
            return "the model is in training mode"
        if columns == 0 and rows_have_adapters(self.model):
            return "its rows have adapters of their own"
        if columns != (0 if self._history is None else self._history.columns):
            return "the cache was filled outside of the model's passes"
        return ""

    def _open(self, request: Request, regime: str) -> None:
        """The first pass of a sequence: from here on its tokens are known."""
        self._regime = regime
        fingerprint = self._fingerprint()
        found = partial(calibrated_ratio, self.store, fingerprint, self.model.device, request.columns)
        self.method = self.method.tuned(found)
        recorder = self._new_recorder(fingerprint, request.pads)
        self._history = recorder.history
        self._follow(recorder)

    def _new_recorder(self, fingerprint: str, pads: list[int]) -> Recorder:
        method, store = self.method, self.store
        history = History(store.chain(fingerprint, method.provenance, self._regime), pads)
        return Recorder(
            history, fingerprint, method.geometry, store.submit, store.ttl, method.provenance, self._records
        )

    def _fingerprint(self) -> str:
        return self._attachment.extras.setdefault("fingerprinter", Fingerprinter(self.model))()

    def _follow(self, recorder: Recorder) -> None:
        self._recorder = recorder
        if self._records:
            self.store.register(recorder)
            self._finish = weakref.finalize(self, recorder.finish)

    def _plan(self, request: Request) -> Plan | None:
        """What this pass restores, or None if that is nothing."""
        if request.must_compute >= request.columns or self._asks_for_all(request.kwargs):
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

    def _finder(self) -> PassageFinder:
        """Looks for passages under the RoPE regime of the prompt, and else under that of short ones."""
        config, fingerprint = self._attachment.config, self._fingerprint()
        sink = sink_token(config)
        regimes = dict.fromkeys((self._regime, rope_regime(config, 1)))
        chains = tuple(self.store.chain(fingerprint, f"{self.method.passages} {sink}", regime) for regime in regimes)
        return PassageFinder(chains, sink, self.store.find, self.store.disk.reader, self._segments)

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
        now = self._now = _Pass(scope, exact and self._recorder.enabled)
        with ExitStack() as stack:
            stack.callback(self._end_pass)
            if now.records:
                self._recorder.begin(self._history.columns + first)
            if plan is not None:
                kwargs = request.only(plan.computed[0], plan.base, self._history.pads)
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
        for layer, mark in zip(self._kv_layers(), marks, strict=True):
            layer.back_to(mark)
        self._recorder.abandon()

    def _note(self, request: Request, plan: Plan | None) -> None:
        """A pass is done: its tokens are known, and stored if they are many."""
        rows, columns = request.ids.shape
        restored = plan.restored_tokens if plan is not None else 0
        padding = sum(max(0, pad - self._history.columns) for pad in self._history.pads)
        self._account.add(tokens_restored=restored, tokens_computed=rows * columns - padding - restored)
        if plan is not None and plan.attended is not None:
            attended = sum(len(g.rows) * min(plan.attended, max(0, plan.suffix - g.pad)) for g in plan.groups)
            self._account.add(tokens_attended=attended)
            if self.method.reorder:
                self.store.upkeep.prompt_done({piece.reader.id for group in plan.groups for piece in group.pieces})
            self._approximate()
        else:
            self._account.add(tokens_attended=restored)
            if plan is not None and not plan.exact:
                self._approximate()
        computed = columns if plan is None else len(plan.computed[0])
        self._recorder.end(request.ids, computed, request.revocable)
        prompt_is_whole, self._in_prompt = columns == 1 and self._in_prompt, columns > 1
        least = _STORE_AT if prompt_is_whole else _STORE_GENERATED_AT if columns == 1 else _STORE_PROMPT_AT
        if self._recorder.unsealed >= least:
            try:
                self.store_now()
            except StoreClosedError as error:  # the request itself goes on
                logger.warning("%s: what is computed from here on is not stored", error)
                self._recorder.enabled = False

    def _approximate(self) -> None:
        """From here on this cache computes what no exact cache would: it stores nothing and restores nothing more."""
        self._recorder.enabled = self._restores = False

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

    def check_continues(self, input_ids: torch.Tensor) -> None:
        """Refuse a prompt that does not go on from what this cache holds."""
        if self._history is None or not self._history.columns:
            return
        held, prompt = self._history.ids(), input_ids.cpu().numpy()
        prompt = prompt.repeat(max(1, len(held) // len(prompt)), axis=0)  # generate() gives each row several times
        longer = prompt.shape[0] == held.shape[0] and prompt.shape[1] > held.shape[1]
        if not longer or (prompt[:, : held.shape[1]] != held).any():
            raise CacheMismatchError(
                f"this cache holds {held.shape[1]} tokens of another prompt; make a new TieredCache for each prompt "
                "(it is cheap, and finds what is stored), or pass the whole conversation so far to go on with this one"
            )

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
        """Forget everything, for another prompt. What was computed is stored."""
        if self._finish is not None:
            self._finish()
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
        )
        twin.layers = [layer.fork() if isinstance(layer, TieredLayer) else layer for layer in self.layers]
        twin._plain, twin._regime = self._plain, self._regime
        if self._recorder is not None:
            twin._follow(self._recorder.fork())
            twin._history = twin._recorder.history
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"TieredCache({model}, {self.store!r}, {self.method}, {self.get_seq_length()} tokens)"

    def _kv_layers(self) -> list[TieredLayer]:
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]


def _store_at(attachment: Attachment, path: str | os.PathLike[str]) -> KVStore:
    """The store at `path`, opened once for each attached model."""
    key = f"store {Path(path).expanduser().resolve()}"
    store = attachment.extras.get(key)
    if store is None or not store.usable:  # closed, or opened before this process was forked
        store = attachment.extras[key] = KVStore(path)
    return store
