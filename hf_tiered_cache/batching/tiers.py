"""Store of continuous batching: stored KV is written into pages, and new KV is recorded.

The engine's thread calls `PagedTiers` (see `Listener`). It never reads the store: lookups and fetches run in other
threads. Their requests wait in line meanwhile, for at most `PATIENCE_SECONDS` each.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .. import reasons
from ..cache.cache_state import CacheOptions
from ..cache.executor import Executor
from ..cache.sequence import STORE_GENERATED_AT
from ..cache.storage import Storage
from ..errors import StoreClosedError
from ..identity import Identity
from ..methods import Method
from ..patches.attach import Attachment
from ..store.geometry import HASH_TOKENS
from ..tiers.collector import StatsCollector
from .engine import Engine, Listener, parent_id_of
from .lookups import LayerRotations, Lookups, observe_rotations, windows_of
from .packed import GraphKV, Packed, PackedKV, PassCapture, PassJoiner, without_biases
from .requests import BatchedRequest, Restored

logger = logging.getLogger("hf_tiered_cache")

_MOST_CAPTURED_BYTES = 1 << 30
"""Captured KV of all requests from which on all is stored: the pages of a GPU leave little memory."""


class PagedTiers(Listener):
    """Store of one manager of continuous batching, which `create` makes once the model was observed.

    Until then, the model must not run in continuous batching. `check_batched` accepts the method, and `total` collects
    the statistics of all requests.
    """

    def __init__(
        self,
        attachment: Attachment,
        storage: Storage,
        method: Method,
        options: CacheOptions,
        total: StatsCollector,
        create: Callable[[], Any],
    ) -> None:
        self._attachment, self._storage = attachment, storage
        self._method, self._options, self._total = method.coded(storage.codec), options, total
        self._lock = threading.RLock()
        self._requests: dict[str, BatchedRequest] = {}
        self._leaving: list[BatchedRequest] = []  # gone, and their lookup has not ended
        self._leaders: dict[bytes, BatchedRequest] = {}
        self._collectors: dict[str, StatsCollector] = {}
        self._joiner, self._windows = PassJoiner(), windows_of(attachment)
        self._identifier = self._new_executor(StatsCollector())
        self._capture: PassCapture | None = None  # of the running `forward`
        self._passed: PassCapture | GraphKV | None = None  # holds the KV of the latest pass
        self._graph_kv: GraphKV | None = None
        self._token_bytes = 0  # of the KV of a token
        self._closed = False
        self.reason = ""
        """Reason why the engine runs without the store, or an empty string."""
        rotations = self._observe()
        self.manager = create()  # may switch to another attention function, which rotations do not depend on
        self._fingerprint = self._identify()  # of the last pass
        ahead_bytes = self._method.ahead_bytes
        self._lookups = Lookups(attachment, storage, ahead_bytes, rotations, self._fingerprint, self._wake)
        self._engine = Engine(self.manager, self)
        self._changed = not self._engine.is_fresh  # whether pages may hold KV of another state of the model

    def _observe(self) -> LayerRotations | None:
        """Return the rotations of the layers, or None if the engine runs without the store."""
        identity, lossless = self._identifier.identify(begins_request=True), self._method.lossless
        observed = identity if isinstance(identity, str) else observe_rotations(self._attachment, identity, lossless)
        if isinstance(observed, str):
            self.refused(observed)
            return None
        return observed

    def _identify(self) -> str | None:
        """Return the fingerprint of the model, or None if its KV can be neither stored nor restored."""
        identity = self._identifier.identify(begins_request=False)
        return identity.fingerprint if isinstance(identity, Identity) else None

    def _note_model(self) -> str | None:
        """Return the fingerprint of the model. If it has changed, pages hold KV of another state of the model."""
        fingerprint = None if self._closed else self._identify()
        if fingerprint != self._fingerprint:
            self._fingerprint, self._changed = fingerprint, True
            for request in self._requests.values():
                request.stop_recording()
        return fingerprint

    def collect(self, request_id: str) -> StatsCollector:
        """Return the collector of a request that is going to be added."""
        collector = self._collectors[request_id] = StatsCollector(self._total)
        return collector

    def close(self) -> None:
        """Leave the manager as it was, and submit the captured KV to the store."""
        if self._closed:
            return
        self._closed = True
        self._engine.detach()
        with self._lock:
            requests = [*self._requests.values(), *self._leaving]
        self._lookups.close(requests)
        with self._lock, self._engine.on_stream():
            for request in list(self._requests.values()):
                self._end(request)
            self._store_leaving()

    # --- events of the engine

    def refused(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._storage.warn_of(reason)

    def failed(self) -> None:
        with self._lock:
            self.refused(reasons.ENGINE_FAILED)
            for request in self._requests.values():
                request.note_reason(self.reason)
                request.report()

    def arrived(self, state: Any) -> None:
        if self._closed:
            return
        with self._lock:
            request_id = state.request_id
            before = self._requests.get(request_id)
            if before is not None and before.state is state:  # its KV was moved to host memory by the engine
                return
            collector = self._collectors.pop(request_id, None) or StatsCollector(self._total)
            if before is not None:  # begins again with the tokens so far
                collector = before.executor.collector
                self._end(before)
            request = BatchedRequest(state, self._new_executor(collector))
            if before is not None:
                request.reported, request.matched = before.reported, before.matched
            if self.reason:
                request.note_reason(self.reason)
                request.report()
                return
            self._requests[request_id] = request
            request.admit()
            self._look_up(request)

    def may_be_scheduled(self, state: Any) -> bool:
        request = self._requests.get(state.request_id)
        if request is None or request.state is not state or request.decided:
            return True
        with self._lock:
            leader = request.leader
            if leader is not None:
                if not leader.decided and time.monotonic() < request.deadline:
                    return False
                request.leader = None
                request.note_reason(leader.reason)
                self._look_up(request, follows=False, waits=leader.placed or leader.gone)
                if request.decided:
                    return True
            if request.lookup is None or time.monotonic() > request.deadline:
                self._lookups.note_overdue(request)
                request.decided = True
                return True
            if not request.lookup.done():
                return False
            if request.restored is None:
                request.decided = True
                return True
            return self._has_room(request, request.held) or not self._engine.has_active_requests

    def matched(self, state: Any, tokens: int) -> int:
        request = self._requests.get(state.request_id)
        if request is None or request.state is not state or self._closed:
            return tokens
        with self._lock:
            request.note_match(tokens)
            if not tokens and not self._has_room(request, tokens):
                return tokens  # it waits for pages
            request.decided = True
            self._note_model()
            if self._changed and self._engine.pages.held(request.prompt):  # it gets pages of another state of the model
                request.note_reason(reasons.ENGINE_CHANGED)
                request.stop_recording()
                self._lookups.release(request)
            try:
                return tokens if request.restored is None else self._place(request, request.restored, tokens)
            finally:
                self._lookups.release(request)

    def between_steps(self) -> None:
        if self._closed:
            return
        with self._lock, self._engine.on_stream():
            for request_id, request in list(self._requests.items()):
                if not self._engine.holds(request_id):
                    self._end(request)
                    continue
                is_due = not request.reported or request.num_captured >= STORE_GENERATED_AT
                if is_due and request.prompt_is_computed and request.is_looked_up:
                    request.report()
                    self._store(request)
            captured = sum(request.num_captured for request in self._requests.values())
            if captured * self._token_bytes > _MOST_CAPTURED_BYTES:
                for request in self._requests.values():
                    self._store(request)
            self._store_leaving()

    def step(self, run: Callable[[], None], rows: Sequence[Packed]) -> None:
        fingerprint = self._note_model()
        self._passed = None
        with self._attachment.batched_pass():
            run()
        last_pass, self._passed = self._passed, None
        packed = None
        if last_pass is not None and fingerprint is not None:
            with self._engine.on_stream():
                layers = last_pass.layers(sum(row.num_tokens for row in rows))
                layers = without_biases(layers, self._attachment.tables_of(fingerprint, self._method.lossless))
            if len(layers) == self._attachment.depth:
                packed = PackedKV(fingerprint, layers)
        self._note(rows, packed)

    def forward(self, run: Callable[[], None], graphed: bool, compiled: bool) -> None:
        if self._closed or not self._options.record:
            run()
            return
        if graphed and self._graph_kv is None:
            self._graph_kv = GraphKV(self._engine.pages.cache.max_batch_tokens)
        tables = self._attachment.tables_of(self._fingerprint or "", self._method.lossless or graphed)
        self._passed = self._capture = PassCapture(tables, self._windows, self._graph_kv if graphed else None)
        try:
            with self._attachment.watching_compiled() if compiled else nullcontext():
                self._capture.enclose(run)
        finally:
            self._capture = None

    def graph_kv(self) -> GraphKV | None:
        return self._graph_kv

    def replays(self, graph_kv: GraphKV | None) -> None:
        self._passed = graph_kv
        if graph_kv is None and self._options.record:
            self._storage.disk.warn("graphs", reasons.OLDER_GRAPH)

    def computed(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._capture is not None:
            self._capture.add(layer, keys, values)

    # --- recording

    def _note(self, rows: Sequence[Packed], packed: PackedKV | None) -> None:
        with self._lock:
            row = 0
            for state, first, num_tokens in rows:
                request = self._requests.get(state.request_id)
                if request is None or request.state is not state:
                    request = self._fork(state)
                if request is not None:
                    request.note_pass(packed, row, first, num_tokens)
                    request.decided = True
                    self._lookups.release(request)  # if it was computed for lack of pages
                row += num_tokens
            if packed is not None:
                self._token_bytes = packed.token_bytes
                self._joiner.add(packed)

    def _fork(self, state: Any) -> BatchedRequest | None:
        """Return the request of a further sequence of a known request, or None."""
        parent = self._requests.get(parent_id_of(state))
        if parent is None or self._closed:
            return None
        request = parent.fork(state, self._new_executor(StatsCollector(self._total)))
        request.admit()
        self._requests[request.id] = request
        self._look_up(request, waits=False)
        return request

    def _store(self, request: BatchedRequest) -> None:
        """Store what is captured of a request, unless its lookup has not ended."""
        if not request.is_looked_up or not request.num_captured:
            return
        try:
            request.store(self._storage.recent_segments)
        except StoreClosedError as error:
            logger.warning("%s: KV computed from now on is not stored", error)
            request.stop_recording()
        except Exception as error:  # the answer does not depend on it
            self._storage.disk.warn("batching", f"computed KV of continuous batching was not stored: {error!r}")
            request.stop_recording()

    def _end(self, request: BatchedRequest) -> None:
        """Count a request that the engine has finished or cancelled, and store what is captured of it."""
        self._requests.pop(request.id, None)
        request.gone = True
        request.decided = True
        request.report()
        self._leaving.append(request)

    def _store_leaving(self) -> None:
        waiting = [request for request in self._leaving if request.lookup is not None and not request.is_looked_up]
        ended = [request for request in self._leaving if request not in waiting]  # lookups may end meanwhile
        self._leaving = waiting
        for request in ended:
            self._store(request)
            self._lookups.release(request)

    # --- restoring

    def _new_executor(self, collector: StatsCollector) -> Executor:
        return Executor(self._attachment, self._storage, self._method, self._options, collector)

    def _look_up(self, request: BatchedRequest, follows: bool = True, waits: bool = True) -> None:
        """Start the lookup of a request, or if it `follows` let it wait for another one that restores the same tokens.

        Unless it `waits` for its restore, only its computed KV is recorded.
        """
        prompt, are_shared = request.prompt, self._engine.pages.are_shared
        num_held = self._engine.pages.held(prompt) if are_shared else 0
        follows = are_shared and (follows or num_held > request.held)
        request.held = num_held
        if waits and (self._lookups.are_hung or time.monotonic() > request.deadline):
            request.note_reason(reasons.SLOW_LOOKUP)
            waits = False
        waits = waits and self._options.restore
        if not waits or len(prompt) - 1 - num_held < HASH_TOKENS:
            request.decided = True
        elif follows:
            key = torch.tensor(prompt[: num_held + HASH_TOKENS]).numpy().tobytes()
            leader = self._leaders.get(key)
            if leader is not None and not leader.decided:
                request.leader = leader
                return
            self._leaders[key] = request
            if len(self._leaders) > len(self._requests):
                self._leaders = {key: leader for key, leader in self._leaders.items() if not leader.decided}
        self._lookups.start(request)

    def _wake(self) -> None:
        if not self._closed:
            self._engine.wake()

    def _has_room(self, request: BatchedRequest, num_held: int) -> bool:
        """Return whether there are pages for the whole prompt, of which its pages hold the first `num_held` tokens."""
        return self._engine.pages.has_room(len(request.prompt) + 1, num_held)

    def _place(self, request: BatchedRequest, restored_kv: Restored, num_held: int) -> int:
        """Write restored KV from token `num_held` on into pages, and return the number of tokens that they hold.

        It must have been computed by the model of the next pass, and continue what the pages hold.
        """
        sequence = request.executor.sequence
        if sequence is None or sequence.identity.fingerprint != self._fingerprint:
            request.note_reason(reasons.ENGINE_CHANGED)
            return num_held
        engine, pages, state, stop = self._engine, self._engine.pages, request.state, restored_kv.stop
        continues = restored_kv.first <= num_held < stop and self._has_room(request, num_held)
        if not continues or not pages.allocate(state, num_held, stop):
            return num_held
        try:
            engine.write(request.id, stop, restored_kv.since(num_held))
        except Exception as error:
            self._storage.disk.warn("pages", f"restored KV could not be written into pages: {error!r}")
            request.note_reason(reasons.NOT_WRITTEN)
            if not num_held:
                pages.cache.free_blocks(request.id)
            return num_held
        pages.complete(state, stop - num_held)
        request.placed = True
        request.executor.collector.add(tokens_restored=stop - num_held, tokens_attended=stop - num_held)
        return stop


class Engines(weakref.WeakSet[PagedTiers]):
    """Stores of managers of continuous batching. They live as long as their managers."""

    def of(self, manager: Any) -> PagedTiers | None:
        """Return the one that serves a manager, or None."""
        return next((tiers for tiers in self if tiers.manager is manager and not tiers._closed), None)

    def close(self) -> None:
        """Leave all managers as they were."""
        for tiers in list(self):
            tiers.close()
