"""Cache that restores KV from a store and writes KV to it, as transformers sees it. Users create a `TieredCache`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .. import reasons
from ..errors import CacheMismatchError, ConfigError
from ..layers import DenseSource, SelectedSource, kv_sources, sources_for
from ..methods import BudgetMethod, Method
from ..patches.attach import Attachment, attach, attachment_of
from ..patches.attention import can_select
from ..patches.layers import base_model
from ..patches.scope import ServedCache, current
from ..restore.plan import Plan
from ..restore.rows import SegmentSlice
from ..stats import RequestStats
from ..store.geometry import HASH_TOKENS
from ..tiers.collector import StatsCollector
from .cache_state import CacheOptions
from .cost_model import RESTORE_ALL
from .executor import Executor
from .spot_check import deviation, held_from, tolerance
from .storage import Storage
from .suitability import cannot_mask, check_causal, check_depth, check_suits

if TYPE_CHECKING:
    from typing_extensions import Self


_THREAD = "_thread"
"""Attribute of a cache with the identifier of the thread that uses it; there is none while nobody does."""


class StoredCache(Cache, ServedCache):
    """Cache with KV from a store. See `TieredCache`, and `prepare` for the attachment and the layers."""

    def __init__(
        self, attachment: Attachment, layers: list[Any], storage: Storage, method: Method, options: CacheOptions
    ) -> None:
        super().__init__(layers=layers)
        self.kv_sources = kv_sources(layers)
        """Layers that hold KV of their own."""
        storage.note_policy(method)
        self._executor = Executor(attachment, storage, method.coded(storage.codec), options, StatsCollector())

    @classmethod
    def over(cls, model: nn.Module, storage: Storage, method: Method, options: CacheOptions) -> StoredCache:
        """Create a cache for a model. Raises the errors of `prepare`."""
        return StoredCache(*prepare(model, method), storage, method, options)

    @property
    def attachment(self) -> Attachment:
        """Attachment of the model."""
        return self._executor.attachment

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yield keys, values and sliding window of each layer, as `DynamicCache` does."""
        for layer in cast(list[DenseSource], self.layers):
            window = getattr(layer, "window", 0)
            yield layer.keys, layer.values, torch.tensor(window) if window else None

    @property
    def model(self) -> PreTrainedModel:
        """Transformers model that this cache belongs to."""
        return self.attachment.model

    @property
    def method(self) -> Method:
        """Method that restores KV."""
        return self._executor.method

    @property
    def stats(self) -> RequestStats:
        """Statistics of what this cache has restored, computed, stored and read. Prints as a table."""
        return self._executor.collector.stats

    def store_now(self) -> tuple[str, ...]:
        """Queue computed KV that is not stored yet, and return the ids of the segments of the first row's tokens."""
        return self._executor.store_now()

    def look_up(self, input_ids: torch.Tensor) -> tuple[Plan | None, str]:
        """Return what an empty cache would restore of a prompt, int `[1, tokens]`, or None and the reason."""
        arguments = {"input_ids": input_ids, "logits_to_keep": 1, **self.positions(input_ids)}
        admitted = self._executor.admit(self, arguments)
        return (None, self._executor.bypass) if admitted is None else self._executor.look_up_admitted(*admitted)

    def positions(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the argument with which `generate()` numbers tokens, int `[rows, tokens]`, that continue this cache.

        It is empty for models that number them so anyway.
        """
        return self._executor.arguments.positions(input_ids, self.get_seq_length())

    def count_into(self, total: StatsCollector | None) -> None:
        """Count everything in `total`, too, from now on; None to stop."""
        self._executor.collector.total = total

    def on_section(self, report: Callable[[str, float, float], None] | None) -> None:
        """Call `report` with the figure, begin and end of each section that `stats` times; None to stop."""
        self._executor.collector.on_section = report

    # --- called by an attached model

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, attachment: object, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the model: restore what is stored, compute the rest, record it."""
        if attachment is not self._executor.attachment:
            if getattr(attachment, "model", None) is self.model:
                raise CacheMismatchError(
                    "the model was detached after this cache was created (by detach(), or at the end of a session); "
                    "create a new cache"
                )
            raise CacheMismatchError(
                f"this cache belongs to another {type(self.model).__name__}; create one for this model"
            )
        self._claim()
        try:
            output = self._executor.run(self, forward, kwargs)
            if not self._executor.generates and self._executor.restored is not None:
                self.end_generation()
        finally:
            if not self._executor.generates:
                self.__dict__.pop(_THREAD, None)
        return output

    def _claim(self) -> None:
        """Reserve the cache for this thread. Raises CacheMismatchError if another thread uses it."""
        thread = threading.get_ident()
        if self.__dict__.setdefault(_THREAD, thread) != thread:
            raise CacheMismatchError("another thread uses this cache; create a cache of the store for each thread")

    def end_generation(self, is_complete: bool = True) -> None:
        """End a `generate()`, and unless it has failed check some restored tokens, if due (see `SpotChecks`)."""
        self._executor.generates = False
        try:
            if is_complete:
                self._check_restored()
        finally:
            self.__dict__.pop(_THREAD, None)

    def _check_restored(self) -> None:
        executor, checks = self._executor, self._executor.store.spot_checks
        run, executor.restored = executor.restored, None
        sequence = executor.sequence
        if run is None or sequence is None:
            return
        began = time.perf_counter()
        is_due = checks.is_due(sum(piece.count for piece in run.pieces), began - run.began, run.seconds)
        if not is_due or not executor.store.usable:
            return
        pad, first_held = sequence.history.pads[0], held_from(self.layers)
        choice = None if first_held is None else checks.choose(run, first_held - pad)
        if choice is None:
            return
        first, piece = choice
        tokens = sequence.history.ids()[0, pad:][: first + HASH_TOKENS]
        if len(tokens) < first + HASH_TOKENS:  # the cache was cropped
            return
        try:
            self._check(torch.from_numpy(tokens), piece)
        except Exception as error:  # the answer is complete and does not depend on the check
            executor.store.disk.warn("spot check", f"a spot check could not compute restored tokens again: {error!r}")
        checks.spend(time.perf_counter() - began)

    def _check(self, tokens: torch.Tensor, piece: SegmentSlice) -> None:
        """Compute the last 16 of the first row's `tokens`, int64 `[n]`, again, and compare them with the cache."""
        executor, sequence = self._executor, self._executor.sequence
        options = replace(executor.options, record=False, progress=False)
        again = StoredCache.over(self.model, executor.store, RESTORE_ALL, options)
        again._executor.generates, again._executor.new_prompt = True, len(tokens)  # exempt from spot checks
        with torch.no_grad():
            ids = tokens.to(executor.attachment.device)[None]  # [1, tokens]
            self.attachment.forward(ids, again, logits_to_keep=HASH_TOKENS, **again.positions(ids))
        if sequence is None or held_from(again.layers) is None:
            return
        far = deviation(self.layers, again.layers, sequence.history.pads[0], len(tokens) - HASH_TOKENS)
        if far is None:
            return
        counters = executor.store.disk.counters
        counters.add("spot_checks")
        if far > tolerance(self.model):
            counters.add("failed_spot_checks")
            executor.store.spot_checks.doubted.add(sequence.identity.fingerprint)
            executor.attachment.refresh()
            executor.store.disk.warn(
                f"spot check {sequence.identity.fingerprint}",
                f"segment {piece.reader.id} holds KV that differs from what this model computes (relative distance "
                f"{far:.2g}), so nothing stored for this model is used in this process, and the last answer may be "
                "wrong. Find what changes the model's computation without being detected, or delete the model's "
                "segments",
            )

    def continue_with(self, input_ids: torch.Tensor, copies: int = 1, mask: torch.Tensor | None = None) -> None:
        """Begin a `generate()`: keep what this cache holds of the prompt, int `[batch, n]`, and forget the rest.

        The cache has `copies` rows for each row of the prompt (beams, several sequences).

        Raises:
            CacheMismatchError: The cache is strict, and holds other tokens.
            ConfigError: The prompt has no tokens. Also see `Conversation.begin_pass`.
            ConversationInUseError: See `Conversation.begin_pass`.
        """
        if not input_ids.shape[1]:
            raise ConfigError("the prompt has no tokens; pass at least one, such as the tokenizer's bos_token_id")
        self._claim()
        try:
            self._drop_for(input_ids, copies, mask)
        except BaseException:
            self.__dict__.pop(_THREAD, None)
            raise
        self._executor.generates = True
        self._executor.new_prompt = 0 if self.get_seq_length() else input_ids.shape[1]

    def _drop_for(self, input_ids: torch.Tensor, copies: int, mask: torch.Tensor | None) -> None:
        """Forget what is not the beginning of a prompt. See `continue_with`."""
        executor = self._executor
        if executor.conversation is not None:
            executor.conversation.begin_pass(is_prompt=True, is_empty=True, ids=input_ids)
        mask = mask.repeat_interleave(copies, dim=0) if isinstance(mask, torch.Tensor) else None
        dropped = executor.num_dropped(self, input_ids.repeat_interleave(copies, dim=0), mask)
        if dropped:
            try:
                if dropped >= self.get_seq_length():
                    raise RuntimeError
                self.crop(-dropped)
            except RuntimeError:  # a window or a selection cannot be cropped: try the store
                self._start_over(executor.collector)

    # --- called by layers and generate()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values, `[batch, heads, n, dim]`, and return all that its queries may see."""
        forward_pass = self._executor.forward_pass
        if forward_pass is None:  # the model without its head, or a detached one
            self._executor.explain_once(reasons.FILLED_ELSEWHERE)
        if forward_pass is None or not forward_pass.captures or current() is not forward_pass:
            return cast(DenseSource, self.layers[layer_idx]).update(key_states, value_states)
        return forward_pass.append(layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the mask width of all layers of this kind, and the index of their first position.

        Raises:
            CacheMismatchError: Rows hold different numbers of positions, and nothing completes the mask of this pass.
        """
        scope = current()
        if any(source.unused for source in self.kv_sources):
            completes = can_select(self._executor.attachment.model)  # the replaced attention function
            if not completes or scope is None or scope.cache is not self:
                raise cannot_mask(self.method, self.model)
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a positive number is the length to keep (transformers 5.17).

        Assisted decoding passes a tensor, which may be on the GPU, and lengths are numbers.
        """
        before = self.get_seq_length()
        super().crop(int(tokens_to_remove))
        self._executor.crop(before - self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search: row i becomes the former row `beam_idx[i]`."""
        super().reorder_cache(beam_idx)
        self._executor.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to each other."""
        super().batch_repeat_interleave(repeats)
        if (history := self._executor.history) is not None:
            self._executor.select(torch.arange(history.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices`, in that order: numbers, from the end if negative, or a mask of all rows."""
        all_keys = (source.keys for source in self.kv_sources)
        if (rows := next((len(keys) for keys in all_keys if keys is not None), 0)) == 0:
            return
        indices = torch.arange(rows)[torch.as_tensor(indices, device="cpu")]
        super().batch_select_indices(indices)
        self._executor.select(indices)

    def reset(self) -> None:
        """Forget everything, for another prompt, and reset `stats`. Computed KV is stored."""
        collector = StatsCollector()
        collector.total, collector.on_section = self._executor.collector.total, self._executor.collector.on_section
        self._start_over(collector)

    def _start_over(self, collector: StatsCollector) -> None:
        self._executor.finish()
        super().reset()  # type: ignore[no-untyped-call]
        was = self._executor
        self._executor = Executor(was.attachment, was.store, was.method, was.options, collector)
        self._executor.conversation, self._executor.generates = was.conversation, was.generates

    def _new_cache(self) -> Self:
        """Return an empty cache with the same settings."""
        executor = self._executor
        return type(self)(*prepare(self.model, executor.method), executor.store, executor.method, executor.options)

    def fork(self) -> Self:
        """Return a copy that continues independently, and shares memory until one of the two caches writes."""
        executor, twin = self._executor, self._new_cache()
        twin.count_into(executor.collector.total)
        twin.layers = [layer.fork() if isinstance(layer, DenseSource) else layer for layer in self.layers]
        twin.kv_sources = kv_sources(twin.layers)
        twin._executor.bypass, twin._executor.unreported = executor.bypass, executor.unreported
        if executor.sequence is not None:
            twin._executor.follow(twin, executor.sequence.fork(twin._executor.collector))
        elif executor.history is not None:
            twin._executor.history = executor.history.fork()
        if executor.observer is not None:
            twin._executor.observer = executor.observer.fork(twin.kv_sources)
        return twin

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("a cache cannot be pickled; create one in the other process, which restores what is stored")

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()


def prepare(model: nn.Module, method: Method) -> tuple[Attachment, list[Any]]:
    """Attach a model, and create the layers of one cache for it.

    Raises:
        ConfigError: The model's attention does not suit the method.
        UnsupportedModelError: The model keeps state other than KV of single tokens, or does not support the method.
    """
    inner = base_model(model)
    attachment = attachment_of(inner)
    if attachment is None or not attachment.causal:  # visits every module; later changes are detected
        check_causal(inner)
    selects = isinstance(method, BudgetMethod) and method.selects
    layers = sources_for(inner, SelectedSource if selects else DenseSource)
    check_suits(method, inner, layers)
    attachment = attach(inner)
    attachment.causal = True
    check_depth(attachment)
    return attachment, layers
