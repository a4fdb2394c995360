"""Lookups of prompts in the store, and fetches of what it holds, in threads of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from .. import reasons
from ..cache.executor import REPLANS
from ..cache.storage import Storage
from ..errors import RestoreError, TieredCacheError
from ..patches.attach import Attachment
from ..store.geometry import HASH_TOKENS
from .requests import PATIENCE_SECONDS, BatchedRequest, Restored
from .restoring import LayerRotations, assemble

logger = logging.getLogger("hf_tiered_cache")

_THREADS = 4
_MOST_RESTORED_BYTES = 1 << 30
"""Bytes of restored KV that wait to be written to pages, from which on lookups wait."""


class Lookups:
    """Lookups of the requests of one engine.

    Args:
        attachment: Attachment of the model.
        storage: Store with the KV.
        ahead_bytes: Maximum number of bytes that are fetched ahead for a request.
        rotations: Rotations of the layers, or None if nothing is restored.
        wake: Called after each lookup, in any thread.
    """

    def __init__(
        self,
        attachment: Attachment,
        storage: Storage,
        ahead_bytes: int,
        rotations: LayerRotations | None,
        wake: Callable[[], None],
    ) -> None:
        self._attachment, self._storage, self._ahead_bytes = attachment, storage, ahead_bytes
        self._rotations, self._wake = rotations, wake
        self._threads = ThreadPoolExecutor(_THREADS, "hf-tiered-batching")
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
            self._overdue.append(request.lookup)

    def release(self, request: BatchedRequest) -> None:
        """Release the restored KV of a request."""
        with self._room:
            restored, request.restored = request.restored, None
            if restored is not None:
                self._restored_bytes -= restored.nbytes
                self._room.notify_all()

    def close(self, requests: Iterable[BatchedRequest]) -> None:
        """End all lookups, and wait for those that run."""
        for request in requests:
            request.gone = True
        with self._room:
            self._room.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        wait([request.lookup for request in requests if request.lookup is not None], PATIENCE_SECONDS)

    def _look_up(self, request: BatchedRequest, restores: bool) -> None:
        try:
            restored = self._restore(request, restores)
        except (TieredCacheError, OSError) as error:
            request.reason = request.reason or reasons.DAMAGED
            self._storage.disk.warn("lookup", f"prompts of continuous batching are computed without the store: {error}")
            return
        except Exception:
            logger.exception("a prompt of continuous batching is computed, because its lookup has failed")
            return
        with self._room:
            request.restored = restored
            self._restored_bytes += 0 if restored is None else restored.nbytes

    def _restore(self, request: BatchedRequest, restores: bool) -> Restored | None:
        """Look a request up, and return the KV that the store holds after what the pages hold."""
        executor, replans = request.executor, REPLANS
        if request.admitted is None:
            request.reason = executor.bypass
            return None
        sequence, rotations = request.admitted[1], self._rotations
        while replans:
            plan, request.reason = executor.look_up_admitted(*request.admitted)
            if replans < REPLANS:
                request.reason = reasons.DAMAGED
            stop = None if plan is None or not (restores and request.waits) else plan.suffix
            if plan is None or stop is None or stop - request.held < HASH_TOKENS:
                return None
            if rotations is None or sequence.identity.fingerprint != rotations.fingerprint:
                request.reason = reasons.MODEL_CHANGED
                return None
            self._await_room(request)
            common = rotations, self._storage, self._attachment, executor.collector, self._ahead_bytes
            try:
                kv = assemble(plan, request.held, *common, lambda: request.waits)
            except RestoreError as error:
                replans = executor.replans_after(error, replans)
                continue
            return None if kv is None else Restored(request.held, stop, kv)
        return None

    def _await_room(self, request: BatchedRequest) -> None:
        """Wait while much restored KV waits to be written to pages."""
        with self._room:
            self._room.wait_for(
                lambda: self._restored_bytes < _MOST_RESTORED_BYTES or not request.waits, PATIENCE_SECONDS
            )
