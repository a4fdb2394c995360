"""A cache whose KV comes from a store and goes to it: what transformers sees. Users make a `TieredCache`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .errors import CacheMismatchError
from .geometry import HASH_TOKENS
from .methods import Exact, Method
from .patches.attach import Attachment, ServedCache, attach, attachment_of, base_model
from .patches.attention import can_select
from .patches.scope import current
from .restore.plan import Plan, SegmentSlice
from .serving import CacheOptions, Serving
from .sources import DenseSource, SelectedSource, kv_sources, sources_for
from .spot_check import deviation, held_from, tolerance
from .stats import RequestStats, StatsCollector
from .storage import Storage
from .suitability import cannot_mask, check_causal, check_depth, check_suits

if TYPE_CHECKING:
    from typing_extensions import Self


class StoredCache(Cache, ServedCache):
    """See `TieredCache`.

    Args:
        attachment, layers: as `prepare` gives them.
        storage: where KV is looked for, and stored.
        method: how it is restored.
        options: of the cache.
    """

    def __init__(
        self, attachment: Attachment, layers: list[Any], storage: Storage, method: Method, options: CacheOptions
    ) -> None:
        super().__init__(layers=layers)
        self._generates = False  # whether `generate()` runs passes
        storage.note_policy(method)
        self._serving = Serving(attachment, storage, method.coded(storage.codec), options, StatsCollector())

    @classmethod
    def over(cls, model: nn.Module, storage: Storage, method: Method, options: CacheOptions) -> StoredCache:
        """A cache for a model. Raises what `prepare` does."""
        return StoredCache(*prepare(model, method), storage, method, options)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model this cache belongs to."""
        return self._serving.attachment.model

    @property
    def method(self) -> Method:
        """How it is restored."""
        return self._serving.method

    @property
    def stats(self) -> RequestStats:
        """What this cache has restored, computed, stored and read. Printed, it is a table."""
        return self._serving.collector.stats

    def store_now(self) -> tuple[str, ...]:
        """Queue what is computed and not stored yet. Returns the segments that the first row's tokens stand in."""
        return self._serving.store_now()

    def look_up(self, input_ids: torch.Tensor) -> tuple[Plan | None, str]:
        """What a fresh cache would restore of a prompt, int `[1, tokens]`, or None and why nothing."""
        return self._serving.look_up(self, input_ids)

    def count_into(self, total: StatsCollector | None) -> None:
        """Let everything that is counted from now on be counted there, too."""
        self._serving.collector.total = total

    # --- what an attached model asks

    @torch.compiler.disable
    def run(self, attachment: Attachment, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """One forward pass of the model: restore what is stored, compute the rest, record it."""
        if attachment is not self._serving.attachment:
            raise CacheMismatchError(
                f"this cache belongs to another {type(self.model).__name__}; make one for this model"
            )
        output = self._serving.run(self, forward, kwargs)
        if not self._generates:
            self.end_generation()
        return output

    def end_generation(self) -> None:
        """`generate()` is done: check something of what it restored, if that is due (see `SpotChecks`)."""
        self._generates = False
        serving, checks = self._serving, self._serving.store.spot_checks
        run, serving.restored = serving.restored, None
        sequence = serving.sequence
        if run is None or sequence is None or not serving.store.usable:
            return
        began = time.perf_counter()
        if not checks.is_due(sum(piece.count for piece in run.pieces), began - run.began, run.seconds):
            return
        pad, held = sequence.history.pads[0], held_from(self.layers)
        chosen = None if held is None else checks.choose(run, held - pad)
        if chosen is None:
            return
        first, piece = chosen
        tokens = sequence.history.ids()[0, pad:][: first + HASH_TOKENS]
        if len(tokens) < first + HASH_TOKENS:  # the cache was cropped
            return
        try:
            self._check(torch.from_numpy(tokens), piece)
        except Exception as error:  # the answer is there: nothing of it depends on this
            serving.store.disk.warn("spot check", f"restored tokens could not be computed again: {error!r}")
        checks.spend(time.perf_counter() - began)

    def _check(self, tokens: torch.Tensor, piece: SegmentSlice) -> None:
        """Compute the last 16 of these tokens of the first row, int64 `[n]`, and compare them with what is held."""
        serving, sequence = self._serving, self._serving.sequence
        options = replace(serving.options, record=False, progress=False)
        again = StoredCache.over(self.model, serving.store, Exact(recompute=0.0, decline=False), options)
        again._generates = True  # it is not checked in turn
        with torch.no_grad():
            ids = tokens.to(serving.attachment.device_of(0))[None]  # [1, tokens]
            self.model(input_ids=ids, past_key_values=again, logits_to_keep=HASH_TOKENS)
        if sequence is None or held_from(again.layers) is None:
            return
        far = deviation(self.layers, again.layers, sequence.history.pads[0], len(tokens) - HASH_TOKENS)
        if far is None:
            return
        counters = serving.store.disk.counters
        counters.add("spot_checks")
        if far > tolerance(self.model):
            counters.add("failed_spot_checks")
            serving.store.spot_checks.doubted.add(sequence.identity.fingerprint)
            serving.attachment.refresh()
            serving.store.disk.warn(
                f"spot check {sequence.identity.fingerprint}",
                f"segment {piece.reader.id} holds KV that this model does not compute (relative distance {far:.2g}): "
                "nothing stored under this model's name is used in this process; the last answer may be wrong. "
                "Look for what changes the model's computation unseen, or delete the model's segments",
            )

    def continue_with(self, input_ids: torch.Tensor, copies: int = 1) -> None:
        """`generate()` begins with these ids: keep what this cache holds of them, and forget the rest.

        Args:
            input_ids: int `[batch, n]`.
            copies: rows of the cache for each of these (beams, several sequences).

        Raises:
            CacheMismatchError: the cache is strict, and holds other tokens.
        """
        serving, self._generates = self._serving, True
        dropped = serving.dropped_columns(self, input_ids.repeat_interleave(copies, dim=0))
        if not dropped:
            return
        try:
            if dropped >= self.get_seq_length():
                raise RuntimeError
            self.crop(-dropped)
        except RuntimeError:  # a window, or a selection of the prompt, does not go back: the store may have it
            self._start_over(serving.collector)

    # --- what layers and generate() ask of a cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, `[batch, heads, n, dim]`; return all that its queries may see."""
        forward_pass = self._serving.forward_pass
        if forward_pass is None or current() is not forward_pass:
            return cast(DenseSource, self.layers[layer_idx]).update(key_states, value_states)
        return forward_pass.append(layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of the mask of all layers like this one, and the number of the first of them.

        Raises:
            CacheMismatchError: these layers hold different numbers of columns, and nobody cuts what the pass masks.
        """
        columns, first = super().get_mask_sizes(query_length, layer_idx)
        layer, scope, asks = self.layers[layer_idx], current(), can_select(self._serving.attachment.config)
        if not isinstance(layer, SelectedSource) or (asks and scope is not None and scope.cache is self):
            return columns, first  # the registered attention function cuts it
        spared = {source.spared for source in self.layers if isinstance(source, SelectedSource)}
        if len(spared) == 1:
            return columns - layer.spared, first + layer.spared
        if not asks or query_length > 1 or layer.padding > first:
            raise cannot_mask(self.method, self.model)
        return columns, first  # of one token, which sees all: no mask is made

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; a positive number (as in 5.17) is what stays."""
        before = self.get_seq_length()
        super().crop(tokens_to_remove)
        self._serving.crop(before - self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was (beam search)."""
        super().reorder_cache(beam_idx)
        self._serving.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        super().batch_repeat_interleave(repeats)
        if (sequence := self._serving.sequence) is not None:
            self._serving.select(torch.arange(sequence.history.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows `indices`, in that order."""
        super().batch_select_indices(indices)
        self._serving.select(indices)

    def reset(self) -> None:
        """Forget everything, for another prompt; `stats` begin anew. What was computed is stored."""
        collector = StatsCollector()
        collector.total = self._serving.collector.total
        self._start_over(collector)

    def _start_over(self, collector: StatsCollector) -> None:
        self._serving.finish()
        super().reset()
        was = self._serving
        self._serving = Serving(was.attachment, was.store, was.method, was.options, collector)
        self._serving.conversation = was.conversation

    def _fresh(self) -> Self:
        """One like this, empty."""
        mine = self._serving
        return type(self)(*prepare(self.model, mine.method), mine.store, mine.method, mine.options)

    def fork(self) -> Self:
        """A cache that goes on from here on its own, and shares memory with this one until one of the two writes."""
        mine, twin = self._serving, self._fresh()
        twin.count_into(mine.collector.total)
        twin.layers = [layer.fork() if isinstance(layer, DenseSource) else layer for layer in self.layers]
        twin._serving.bypass, twin._serving.untold = mine.bypass, mine.untold
        if mine.sequence is not None:
            twin._serving.follow(twin, mine.sequence.fork(twin._serving.collector))
        if mine.observer is not None:
            twin._serving.observer = mine.observer.fork(kv_sources(twin.layers))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()


def prepare(model: nn.Module, method: Method) -> tuple[Attachment, list[Any]]:
    """Attach a model, and make the layers of one cache for it.

    Raises:
        ConfigError: the model's attention does not suit the method.
        UnsupportedModelError: the model keeps state that is no KV of single tokens, or the method cannot serve it.
    """
    inner = base_model(model)
    attachment = attachment_of(inner)
    if attachment is None or not attachment.causal:  # a look at every module: one that changes later is noticed
        check_causal(inner)
    layers = sources_for(inner, method.source)
    check_suits(method, inner)
    attachment = attach(inner)
    attachment.causal = True
    check_depth(attachment)
    return attachment, layers
