"""Lookups of prompts in the store, in threads of their own, and the stored KV as the pages hold it: rotated."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from .. import reasons
from ..cache.executor import REPLANS
from ..cache.forward_pass import kind_of
from ..cache.storage import Storage
from ..errors import RestoreError, TieredCacheError
from ..identity import Identity, varying_rope
from ..layers import DenseSource, sources_for
from ..patches.attach import Attachment
from ..patches.scope import Scope, enter, leave_to
from ..patches.tap import PreRopeKV, RotaryTap
from ..restore.fetch import Fetcher
from ..restore.plan import Plan
from ..restore.prefetch import Prefetch, restore_layer
from ..store.geometry import HASH_TOKENS, LayerKV
from ..store.threads import DaemonPool
from .engine import PagedKV
from .requests import PATIENCE_SECONDS, BatchedRequest, Restored

logger = logging.getLogger("hf_tiered_cache")

_THREADS = 4
_MOST_RESTORED_BYTES = 1 << 30  # bytes of restored KV that wait to be written to pages, from which on lookups wait


class Lookups:
    """Lookups of the requests of one engine. After each, `wake` is called in any thread.

    Nothing is restored without `rotations`, or of a model with another fingerprint than theirs. At most `ahead_bytes`
    bytes are fetched ahead for a request.
    """

    def __init__(
        self,
        attachment: Attachment,
        storage: Storage,
        ahead_bytes: int,
        rotations: LayerRotations | None,
        fingerprint: str | None,
        wake: Callable[[], None],
    ) -> None:
        self._attachment, self._storage, self._ahead_bytes = attachment, storage, ahead_bytes
        self._rotations, self._fingerprint, self._wake = rotations, fingerprint, wake
        self._threads = DaemonPool(_THREADS, "hf-tiered-batching")  # a store that hangs keeps no process alive
        weakref.finalize(self, self._threads.close, 0.0).atexit = False
        self._overdue: list[Future[None]] = []  # lookups that requests no longer wait for
        self._restored_bytes = 0
        self._room = threading.Condition()

    @property
    def are_hung(self) -> bool:
        """True if lookups do not end, so that no further request should wait for one."""
        self._overdue = [lookup for lookup in self._overdue if not lookup.done()]
        return bool(self._overdue)

    def start(self, request: BatchedRequest) -> None:
        """Start the lookup of a request. Unless it is decided already, restore what its pages do not hold."""
        with suppress(RuntimeError):  # closed meanwhile
            request.lookup = self._threads.submit(self._look_up, request, not request.decided)
            request.lookup.add_done_callback(lambda lookup: self._wake())

    def note_overdue(self, request: BatchedRequest) -> None:
        """Note that a request no longer waits for its lookup."""
        if request.lookup is not None and not request.lookup.done():
            request.note_reason(reasons.SLOW_LOOKUP)
            self._overdue.append(request.lookup)

    def release(self, request: BatchedRequest) -> None:
        """Release the restored KV of a request."""
        with self._room:
            restored_kv, request.restored = request.restored, None
            if restored_kv is not None:
                self._restored_bytes -= restored_kv.nbytes
                self._room.notify_all()

    def close(self, requests: Iterable[BatchedRequest]) -> None:
        """End all lookups, and wait for those that run."""
        for request in requests:
            request.decided = True
        with self._room:
            self._room.notify_all()
        self._threads.close(0.0)
        wait([request.lookup for request in requests if request.lookup is not None], PATIENCE_SECONDS)

    def _look_up(self, request: BatchedRequest, restores: bool) -> None:
        restored_kv: Restored | None = None
        reason = ""
        try:
            restored_kv, reason = self._restore(request, restores)
        except (TieredCacheError, OSError) as error:
            reason = reasons.DAMAGED
            self._storage.disk.warn("lookup", f"prompts of continuous batching are computed without the store: {error}")
        except Exception:
            reason = reasons.LOOKUP_FAILED
            logger.exception("a prompt of continuous batching is computed, because its lookup has failed")
        request.note_reason(reason)
        with self._room:
            request.restored = restored_kv
            self._restored_bytes += 0 if restored_kv is None else restored_kv.nbytes

    def _restore(self, request: BatchedRequest, restores: bool) -> tuple[Restored | None, str]:
        """Look a request up. Return the KV that the store holds after what the pages hold, and why there is none."""
        executor, replans = request.executor, REPLANS
        if request.admitted is None:
            return None, executor.bypass
        sequence, rotations = request.admitted[1], self._rotations
        while replans:
            plan, reason = executor.look_up_admitted(*request.admitted)
            if replans < REPLANS:
                reason = reasons.DAMAGED
            stop = None if plan is None or not restores or request.decided else plan.suffix
            if plan is None or stop is None or stop - request.held < HASH_TOKENS:
                return None, reason
            if rotations is None or sequence.identity.fingerprint != self._fingerprint:
                return None, reasons.ENGINE_CHANGED
            with self._room:  # wait while much restored KV waits to be written to pages
                self._room.wait_for(
                    lambda: self._restored_bytes < _MOST_RESTORED_BYTES or request.decided, PATIENCE_SECONDS
                )
            try:
                kv = self._assemble(request, plan, rotations)
            except RestoreError as error:
                replans = executor.replans_after(error, replans)
                continue
            return None if kv is None else Restored(request.held, stop, kv), reason
        return None, reasons.DAMAGED

    def _assemble(self, request: BatchedRequest, full: Plan, rotations: LayerRotations) -> PagedKV | None:
        """Fetch what a plan of one row restores after the tokens that the pages hold, and rotate its keys.

        Return None if the request no longer waits. Layers compute exactly the suffix; those with a sliding window begin
        where its view begins. Raises RestoreError if a block could not be fetched or is damaged.
        """
        devices = self._attachment.devices
        plan = full.with_recompute_lengths([request.held] * len(devices))  # pages hold the beginning
        kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        collector = request.executor.collector
        fetcher = Fetcher(self._storage.residency, collector, devices.__getitem__, self._ahead_bytes)
        try:
            prefetch = Prefetch(plan, fetcher)
            prefetch.start()
            with torch.no_grad():
                for layer, (kind, like) in rotations.layers.items():
                    if request.decided:
                        return None
                    device, dtype = devices[layer], like.keys.dtype
                    begin, end = plan.restored_span(layer, kind.window)
                    count = end - begin
                    keys = torch.empty(1, kind.key_heads, count, kind.key_dim, dtype=dtype, device=device)
                    values = torch.empty(1, kind.value_heads, count, kind.value_dim, dtype=dtype, device=device)
                    rotate_ = partial(rotations.tap.rotate_, like)
                    restore_layer(prefetch, layer, kind, dtype, keys, values, begin, rotate_)
                    kv[layer] = keys, values
            fetcher.confirm()
            for device in {keys.device for keys, _ in kv.values()}:
                if device.type != "cpu":
                    torch.get_device_module(device.type).current_stream(device).synchronize()
            return kv
        finally:
            fetcher.cancel()


class LayerRotations:
    """Layout and rotation of each layer's KV, as observed in one pass of `generate()`'s kind over a few tokens.

    Pages hold rotated keys, and are written before the pass that reads them. So the rotation must be known before. The
    model must not run in continuous batching at the moment.
    """

    def __init__(self, attachment: Attachment, fingerprint: str, lossless: bool) -> None:
        self.tap = RotaryTap(attachment.tables_of(fingerprint, lossless))
        self.tap.numbers = lambda: torch.arange(HASH_TOKENS).unsqueeze(0)
        cache = _ObservingCache(attachment, self.tap)
        token = enter(Scope(cache, self.tap))
        try:
            with torch.no_grad(), attachment.excluding_engine_passes, _unpaged_attention(attachment.config):
                ids = torch.zeros(1, HASH_TOKENS, dtype=torch.int64, device=attachment.device)
                attachment.forward(ids, cache)
        finally:
            leave_to(token)
        self.layers: dict[int, tuple[LayerKV, PreRopeKV]] = cache.observed


@contextmanager
def _unpaged_attention(config: Any) -> Iterator[None]:
    """Replace paged attention in a configuration: some versions of transformers raise if it has no pages.

    A model has it from the beginning, or from an engine that has not ended.
    """
    attention = config._attn_implementation
    if not str(attention).startswith("paged|"):
        yield
        return
    config._attn_implementation = attention.removeprefix("paged|")
    try:
        yield
    finally:
        config._attn_implementation = attention


def observe_rotations(attachment: Attachment, identity: Identity, lossless: bool) -> LayerRotations | str:
    """Return the rotations of a model's layers, or the reason why its KV cannot be restored into pages."""
    if varying_rope(attachment.config):
        return reasons.VARYING_ROPE
    rotations = LayerRotations(attachment, identity.fingerprint, lossless)
    return rotations if len(rotations.layers) == attachment.depth else reasons.SHARED_LAYERS


def windows_of(attachment: Attachment) -> list[int]:
    """Return the sliding window of each layer in tokens; 0 for full attention."""
    return [source.window for source in sources_for(attachment.model, DenseSource)]


class _ObservingCache(DynamicCache):
    """Cache of one pass that keeps the layout and the unrotated KV of each layer."""

    def __init__(self, attachment: Attachment, tap: RotaryTap) -> None:
        super().__init__(config=attachment.config)
        self._tap, self._windows = tap, windows_of(attachment)
        self.observed: dict[int, tuple[LayerKV, PreRopeKV]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pre_rope = self._tap.take(layer_idx, key_states, value_states)
        self.observed[layer_idx] = kind_of(pre_rope, key_states, value_states, self._windows[layer_idx]), pre_rope
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
