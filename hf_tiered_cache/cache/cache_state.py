"""State of a cache between passes: the tokens that it holds, and what its next pass can store and restore."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .. import reasons
from ..conversations.distances import AttentionDistances
from ..errors import CacheMismatchError, StoreClosedError
from ..identity import Identity, fingerprinter_of, rope_regime
from ..layers import LayeredCache
from ..methods import ForConversation, Method, Passages
from ..patches.attach import Attachment
from ..patches.layers import is_compiled
from ..patches.scope import follows_cache
from ..restore.hashes import History, PrefixHasher
from ..tiers.collector import StatsCollector
from .conversation import Conversation
from .cost_model import with_measured_settings
from .observed import Pace
from .recorder import Recorder
from .request import ForwardArguments, Request, parse_request
from .sequence import SequenceState, num_common
from .storage import Storage
from .suitability import cannot_observe

logger = logging.getLogger("hf_tiered_cache")


@dataclass(frozen=True)
class CacheOptions:
    """Options of a cache. See `TieredCache`."""

    restore: bool = True
    record: bool = True
    strict: bool = False
    progress: bool = True
    label: str = ""
    tag: str = ""
    fold_heads: bool = False


class CacheState:
    """Tokens of a cache, and admission of its passes. It receives the cache at each call, and keeps no reference."""

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
        self.history: History | None = None
        """All tokens in the cache: those of the sequence, if there is one. None if they are not known."""
        self.conversation: Conversation | None = None
        """Conversation that the cache continues, if it has an id."""
        self.unreported = True
        """True if a prompt begins with the next pass, or its first pass is not reported yet."""
        self.new_prompt = 0
        """Number of positions of the prompt that `generate()` began with an empty cache; 0 if none is known."""
        self.observer: AttentionDistances | None = method.observer() if isinstance(method, ForConversation) else None
        """Observer of the queries of supported passes, if the method has one."""
        if self.observer is not None and (why := cannot_observe(attachment.model)):
            self.observer.cannot_see(why)
        self._finish: Callable[[], None] = lambda: None
        self.arguments = ForwardArguments.of(attachment)
        self._pace: Pace = attachment.extras.setdefault("pace", Pace())

    # --- before a pass

    def admit(self, cache: LayeredCache, kwargs: dict[str, Any]) -> tuple[Request, SequenceState] | None:
        """Return the request of a pass and its sequence, or None if the pass runs without the store.

        That is the case if its KV can be neither stored nor restored.
        """
        if self.bypass and cache.get_seq_length():
            return None
        self.bypass = ""  # an empty cache takes any prompt
        ids = kwargs.get("input_ids")
        identity = self.identify(begins_request=self.unreported or ids is None or ids.shape[-1] > 1)
        admitted = identity if isinstance(identity, str) else self._parse(cache, kwargs, identity)
        if not isinstance(admitted, str):
            return admitted
        self._run_plain(admitted)
        if not self.unreported:
            self.explain(admitted)
        return None

    def identify(self, begins_request: bool) -> Identity | str:
        """Return the current identity of the model, or the reason why its KV can be neither stored nor restored.

        With `begins_request`, a part of the weights is read again, as at the beginning of a prompt.
        """
        attachment = self.attachment
        reason = reasons.TRAINING if attachment.model.training else ""
        if not reason and fingerprinter_of(attachment).rows_have_adapters():
            reason = reasons.ROW_ADAPTERS
        if reason:
            attachment.compiled = is_compiled(attachment.model)
            return reason
        with attachment.excluding_engine_passes:
            identity = fingerprinter_of(attachment).look(self.options.tag, begins_request)
        attachment.compiled = identity.compiles
        if identity.training:
            return reasons.TRAINING
        if identity.looks_ahead:
            return reasons.LOOKS_AHEAD
        if identity.fingerprint in self.store.spot_checks.doubted:
            return reasons.DOUBTED
        return reasons.nameless(identity.problem) if identity.problem else identity

    def _parse(
        self, cache: LayeredCache, kwargs: dict[str, Any], identity: Identity
    ) -> tuple[Request, SequenceState] | str:
        """Return the request and the sequence that it begins or continues, or the reason why there is none."""
        sequence, num_positions = self.sequence, cache.get_seq_length()
        if any(source.is_edited for source in cache.kv_sources):
            return reasons.EDITED
        if num_positions != (0 if sequence is None else sequence.history.num_positions):
            return reasons.FILLED_ELSEWHERE
        if sequence is not None:
            sequence.recorder.end_interrupted()
        if not num_positions:
            sequence = None  # rows, padding and model may differ from those before a crop or a failed pass
        pads, check = (None, None) if sequence is None else (sequence.history.pads, sequence.recorder.check)
        request = parse_request(kwargs, num_positions, pads, self.arguments, check)
        if isinstance(request, str):
            return request
        if check is not None and request.num_positions > 1 and check.odd():  # nothing may be restored after it
            return reasons.ODD_MASK
        if sequence is not None:
            sequence.history.pads = request.pads  # more, in rows without a token so far
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
        method, calibration = with_measured_settings(self.method, store, fingerprint, attachment, request.num_positions)
        self.method = method
        recorder = self.new_recorder(identity, regime, request.pads)
        return SequenceState(
            store,
            method,
            attachment,
            identity,
            regime,
            recorder,
            attachment.tables_of(fingerprint, method.lossless),
            layers=len(cache.layers),
            selects=any(source.selects for source in cache.kv_sources),
            calibration=calibration,
            pace=self._pace,
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
        self.sequence, self.history = sequence, sequence.recorder.history
        if self.options.record:
            self.store.register(sequence.recorder)
            self._finish = weakref.finalize(cache, self.store.writer.soon, sequence.recorder.finish)

    # --- between passes

    def store_now(self) -> tuple[str, ...]:
        """Queue computed KV that is not stored yet, and return the ids of the segments of the first row's tokens."""
        if self.sequence is None:
            return ()
        self.sequence.recorder.seal()
        return self.sequence.recorder.segments(0)

    def num_dropped(self, cache: LayeredCache, prompt: torch.Tensor, mask: torch.Tensor | None) -> int:
        """Return how many cached positions a prompt, int `[rows, positions]`, lacks; at least all if that is not known.

        Raises CacheMismatchError if there are such positions, and the cache is strict, or if the prompt is only the
        tokens that follow those of the cache, and its mask covers others.
        """
        self.unreported = True
        sequence, num_positions = self.sequence, cache.get_seq_length()
        if mask is not None and follows_cache(prompt, mask):
            if self.collector.stats.requests and mask.shape[1] != num_positions + prompt.shape[1]:
                raise CacheMismatchError(
                    f"the attention mask covers {mask.shape[1]} tokens, but this cache holds {num_positions} and the "
                    f"prompt has {prompt.shape[1]}; pass the whole conversation so far, or all tokens that the cache "
                    "does not hold"
                )
            return 0
        if (history := self.history) is None:
            return 0
        if num_positions != history.num_positions:  # interrupted between a pass and its bookkeeping
            if sequence is not None:
                sequence.recorder.abandon()
            return max(num_positions, history.num_positions)
        shared = num_common(history, prompt, None if sequence is None else mask)
        if sequence is not None and sequence.identity.rope_varies:
            length = prompt.shape[1] - min(history.pads)
            if rope_regime(self.attachment.config, length) != sequence.regime:  # other frequencies in all positions
                shared = 0
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
                self.observer.crop(self.sequence.history.num_positions)
        elif self.history is not None:
            self.history.crop(min(count, self.history.num_positions))

    def select(self, rows: torch.Tensor) -> None:
        """Reorder the rows: row i becomes the former row `rows[i]`."""
        if self.sequence is not None:
            self.sequence.recorder.select(rows)
            if self.observer is not None:
                self.observer.select(rows)
        elif self.history is not None:
            self.history.select(rows.tolist())

    def finish(self) -> None:
        """Store the computed KV before the cache is cleared, so that the next lookup finds it."""
        self._finish()
        if self.sequence is not None:
            self.sequence.recorder.finish()

    # --- reporting

    def _run_plain(self, reason: str, suffix_ids: torch.Tensor | None = None) -> None:
        """Run later passes without the store. Append cached tokens, `suffix_ids`, int `[rows, n]`, to the history."""
        self.bypass = reason
        if (ended := self.sequence) is not None:
            self.history, self.sequence, self.ended = ended.history.fork(), None, ended
            if suffix_ids is not None:
                self.history.append(suffix_ids)
            with suppress(StoreClosedError):  # the request itself continues
                ended.recorder.seal()

    def _note_plain(self, cache: LayeredCache, ids: torch.Tensor | None) -> None:
        """Note the tokens of a pass without the store, int `[rows, n]`, if all cached tokens are known."""
        before = 0 if self.history is None else self.history.num_positions
        if ids is None or ids.ndim != 2 or before + ids.shape[1] != cache.get_seq_length():
            return
        if self.history is None or not before:
            self.history = History(PrefixHasher(()), [0] * len(ids))
        self.history.append(ids)

    def _report_prompt(self, reason: str, tokens_kept: int = 0) -> None:
        """Count a prompt after its first pass, and report the result."""
        self.unreported = False
        self.collector.add(requests=1, tokens_kept=tokens_kept)
        if reason:
            self.explain(reason)
        stats = self.collector.stats
        is_selected = stats.tokens_attended != stats.tokens_restored
        logger.info(
            "%d tokens restored (slowest tier: %s)%s, %d computed, %.0f ms waiting for KV%s",
            stats.tokens_restored,
            stats.tier,
            f", {stats.tokens_attended} of them attended to" if is_selected else "",
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
        self.store.warn_of(reason)
