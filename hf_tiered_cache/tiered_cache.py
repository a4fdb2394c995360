"""`TieredCache`, the cache class that users create, and sessions that give one to every `generate()`.

The implementation of the cache is in `cache.stored_cache`. With a session, pipelines, servers and other callers of
`generate()` use a store without changes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import reasons
from .batching.engine import persistent_manager_of
from .batching.tiers import Engines, PagedTiers
from .cache.cache_state import CacheOptions
from .cache.conversation import Conversation
from .cache.stored_cache import StoredCache, prepare
from .cache.suitability import check_batched
from .cache.suspend import Suspended, suspend_cache
from .cache.timeline import Timeline
from .errors import StoreClosedError, TieredCacheError, check_switches
from .kvstore import KVStore, open_store, storage_of
from .methods import BudgetMethod, ForConversation, Method, make_method
from .operations.calibrate import calibrate_once
from .patches.attach import attach, attachment_of, detach
from .stats import RequestStats
from .store.conversations import conversation_name
from .tiers.collector import StatsCollector

logger = logging.getLogger("hf_tiered_cache")


class TieredCache(StoredCache):
    """KV cache for `generate()` that restores KV from a `KVStore` and stores new KV in it.

    Usage: `model.generate(**inputs, past_key_values=TieredCache(model, store))`.

    The cache restores the longest stored prefix of the prompt from device memory, host memory or disk. The model
    computes only the remaining tokens. New KV is stored, including that of generated tokens. With the default method,
    the output is that of `DynamicCache`. A cache serves one request or one ongoing conversation. It is cheap to create.

    Args:
        model: Decoder-only causal LM of transformers. It is attached (see `attach`) if it is not attached yet.
        store: `KVStore`, or the path of one. A store given by path is opened once per model and closed by `detach`.
        conversation: Id of the conversation, 1 to 200 characters. `suspend()` stores the conversation. The next cache
            with this id, in any process, continues it when it is given the full history. Only one cache can use a
            conversation at a time: a newer cache of the same process takes over. The older cache finishes its current
            answer and then raises ConversationInUseError until the newer one is suspended or garbage-collected.
        method: How KV is restored: a `Method`, the name of one, or None for exact reuse.
        restore: Whether to restore stored KV.
        record: Whether to store new KV.
        strict: Behavior if the prompt does not begin with the tokens that the cache holds. False crops the cache to the
            common prefix, restores what the store has, and continues. True raises CacheMismatchError.
        progress: Whether to show a progress bar for prompts that are computed in pieces (`KVDrive`).
        label: Text in the header of the segments that this cache stores, shown by `hf-tiered-cache ls`.
        tag: Name for the model's computation if the model has custom code without a name of its own (a steering hook, a
            replaced forward, a custom attention function). KV is shared only between caches with the same tag.
        fold_heads: Whether each decoded token computes attention with the query heads of a KV head as rows of one
            matrix. After long prompts this is faster on a CPU, for models with grouped-query attention,
            but logits equal those of `DynamicCache` only up to rounding. Caches with approximate KV always do this.
            Needs the attention implementation "sdpa".
        trace: File for a trace of the passes: computation, selection, waiting and reading, layer by layer. Open it in
            https://ui.perfetto.dev or with `hf-tiered-cache timeline`. An earlier trace is replaced.

    Raises:
        ConfigError: An argument is invalid, or the model's attention implementation does not suit the method.
        UnsupportedModelError: The model keeps state other than per-token KV, or the method cannot serve the model.
        ConversationInUseError: Another process uses the conversation.
        StoreClosedError: The store was closed, or opened before this process was forked.
    """

    def __init__(
        self,
        model: nn.Module,
        store: KVStore | str | os.PathLike[str],
        *,
        conversation: str | None = None,
        method: Method | str | None = None,
        restore: bool = True,
        record: bool = True,
        strict: bool = False,
        progress: bool = True,
        label: str = "",
        tag: str = "",
        fold_heads: bool = False,
        trace: str | os.PathLike[str] | Timeline | None = None,
    ) -> None:
        parsed_method = make_method(method)
        check_switches(restore=restore, record=record, strict=strict, progress=progress, fold_heads=fold_heads)
        if conversation is not None:
            name = conversation_name(conversation)  # also validates it
            if isinstance(parsed_method, ForConversation):
                parsed_method = parsed_method.for_conversation(name)
        attachment, layers = prepare(model, parsed_method)
        self._store = open_store(store, parsed_method, attachment.extras)
        options = CacheOptions(restore, record, strict, progress, label, tag, fold_heads)
        storage = storage_of(self._store)
        calibrate_once(storage, model, parsed_method, progress=progress, tag=tag)
        super().__init__(attachment, layers, storage, parsed_method, options)
        if conversation is not None:
            self._executor.conversation = Conversation(storage, conversation)
        if trace is not None:
            (trace if isinstance(trace, Timeline) else Timeline(trace)).watch(self)

    @property
    def store(self) -> KVStore:
        """Store that KV is restored from and written to."""
        return self._store

    @property
    def conversation(self) -> str | None:
        """Id of the cache's conversation, or None."""
        return None if self._executor.conversation is None else self._executor.conversation.id

    def suspend(self) -> Suspended:
        """Store all computed KV, save the conversation's record, and release its memory and lock.

        The cache is empty afterwards. If it is used again, it restores from the store. Tokens are stored in multiples
        of 16; the next turn computes the remaining ones. Without a conversation, KV is stored and released as well. The
        call returns when everything is durable.

        KV that was computed after a selection is not exact. So after a turn with a method that has a budget, the model
        computes the turn's tokens once more, with all stored KV in memory, and stores them (not after contexts of more
        than `prefill_tokens`).

        Returns:
            Number of tokens and bytes stored. If something could not be stored, for example because the disk is full or
            not writable, `reason` says why.

        Raises:
            StoreClosedError: The store was closed.
        """
        executor = self._executor
        with ExitStack() as stack:
            if executor.conversation is not None:
                stack.callback(executor.conversation.release)  # runs last
            stack.callback(self._start_over, executor.collector)
            started = time.perf_counter()
            self._compute_exactly()
            return suspend_cache(executor, self, started)

    def _compute_exactly(self) -> None:
        """Store the exact KV of tokens that were computed after a selection; `suspend_cache` reports the rest."""
        executor, method = self._executor, self.method
        sequence = executor.sequence or executor.ended
        if sequence is None or not isinstance(method, BudgetMethod) or method.records_approximations:
            return
        options, history = executor.options, sequence.history
        rows = [row[pad:] for row, pad in zip(history.ids(), history.pads, strict=True)]
        is_long = method.prefill_tokens and max(map(len, rows)) > method.prefill_tokens
        if not sequence.approximate or not options.record or executor.bypass or is_long:
            return
        store = partial(self.store.precompute, method=method, progress=options.progress)
        try:
            store(self.model, [torch.from_numpy(row) for row in rows], label=options.label, tag=options.tag)
        except StoreClosedError:
            raise
        except (TieredCacheError, OSError) as error:
            logger.warning("the tokens of this turn are not stored: %s", error)

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.suspend()
        except StoreClosedError as closed_error:
            if error is None:
                raise
            logger.warning("the conversation was not suspended: %s", closed_error)  # the first exception is propagated

    def _new_cache(self) -> TieredCache:
        return TieredCache(self.model, self._store, method=self.method, **asdict(self._executor.options))

    def __repr__(self) -> str:
        model = type(self.model).__name__
        conversation = "" if self.conversation is None else f", conversation={self.conversation!r}"
        method, tokens = type(self.method).__name__, self.get_seq_length()
        return f"TieredCache({model}, {self.store!r}, {method}, {tokens} tokens{conversation})"


class TieredSession:
    """Session in which every `generate()` without a cache uses the store: `with tiered(model, store) as session:`.

    Each such call gets a new `TieredCache`; `session.stats` sums over them. Calls that request something else
    (`past_key_values`, `cache_implementation`, `use_cache=False`, `custom_generate`) run unchanged.
    They count as requests too, with the reason why the store is not used. A call with its own `TieredCache` counts only
    in the `stats` of that cache.

    Continuous batching (`generate_batch()`, `init_continuous_batching()`) restores KV into its pages, and stores the KV
    that it computes. It needs the exact method.

    Args:
        model: A causal LM of transformers.
        store: A `KVStore`, or the path of one.
        method, restore, record, label, tag: As for `TieredCache`.
        trace: As for `TieredCache`; the file holds all requests of the session, except those of continuous batching.

    Raises:
        ConfigError, StoreClosedError: As for `TieredCache`.
    """

    def __init__(
        self,
        model: nn.Module,
        store: KVStore | str | os.PathLike[str],
        *,
        method: Method | str | None = None,
        restore: bool = True,
        record: bool = True,
        label: str = "",
        tag: str = "",
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        timeline = None if trace is None else Timeline(trace)
        self.method = make_method(method)
        self._options = CacheOptions(restore, record, label=label, tag=tag)
        self._account = StatsCollector()
        self._engines = Engines()
        was_attached = attachment_of(model) is not None
        self._attachment = attach(model)
        if not was_attached:
            self._attachment.by_session = True
        try:
            self.store = open_store(store, self.method, self._attachment.extras)
            settings = {"method": self.method, "trace": timeline, **asdict(self._options)}
            self._new_cache = partial(TieredCache, self._attachment.model, self.store, **settings)
            self._new_cache()  # raises here, not in the first generate()
        except BaseException:
            self._leave()
            raise
        self._attachment.sessions.append(self)

    @contextmanager
    def call(self, setting: str = "", value: Any = None) -> Iterator[TieredCache | None]:
        """Enclose one `generate()` of the model. See `patches.scope.Session`."""
        account, cache = StatsCollector(self._account), None
        if not setting:
            cache = self._new_cache()
            cache.count_into(account)  # also counts copies that generate() makes of the cache
        yield cache
        if not account.stats.requests:
            reason = reasons.bypassed(setting, value)
            account.add(requests=1)
            account.explain(reason)
            logger.info("the store is not used: %s", reason)
            storage_of(self.store).warn_of(reason)

    def batching(self, create: Callable[[], Any]) -> Any:
        """Serve the requests of a manager of continuous batching. See `patches.scope.Session`."""
        check_batched(self.method)
        engines: Engines = self._attachment.extras.setdefault("batching", Engines())
        if engines.of(persistent_manager_of(self.model)) is not None:
            return create()  # a persistent manager, with a session that has not ended
        storage = storage_of(self.store)
        tiers = PagedTiers(self._attachment, storage, self.method, self._options, self._account, create)
        engines.add(tiers)
        self._engines.add(tiers)
        return tiers.manager

    def count_batched(self, manager: Any, request_id: str) -> RequestStats:
        """Return the statistics of a request that is going to be added to a manager of continuous batching."""
        engines: Engines = self._attachment.extras.get("batching", Engines())
        tiers = engines.of(manager)
        return RequestStats() if tiers is None else tiers.collect(request_id).stats

    @property
    def model(self) -> PreTrainedModel:
        """Model that the session serves."""
        return self._attachment.model

    @property
    def stats(self) -> RequestStats:
        """Sum over all requests so far. Prints as a table."""
        return self._account.stats

    def count_into(self, total: StatsCollector | None) -> None:
        """Count everything in `total`, too, from now on; None to stop."""
        self._account.total = total

    def close(self) -> None:
        """End the session: the model works as before, and computed KV is still stored."""
        self._engines.close()
        if self in self._attachment.sessions:
            self._attachment.sessions.remove(self)
            self._leave()

    def _leave(self) -> None:
        attachment = self._attachment
        if attachment.active and attachment.by_session and not attachment.sessions:  # the last session ends
            detach(attachment.model)

    def __enter__(self) -> TieredSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a session cannot be pickled; open one in the other process, with the path of the store")

    def __repr__(self) -> str:
        return f"TieredSession({type(self.model).__name__}, {self.store!r}, {type(self.method).__name__})"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()


tiered = TieredSession
"""Name of `TieredSession` for callers: `with tiered(model, store) as session:`, or `session = tiered(model, store)`."""
