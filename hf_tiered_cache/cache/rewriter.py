"""Background rewriting of stored segments into another geometry or order of tokens.

Methods request it: `ContiguousKV` and `Impress` order tokens by the attention that prompts paid to them. A cache that
decodes reads from its segments at each token, and memory drops the blocks of a replaced segment. A rewrite therefore
waits until no cache uses the segment. Cached blocks, indexes and scores migrate to the segment that replaces it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ..errors import IntegrityError, StoreError, reason_of
from ..passages.ranking import RANKED_IN_CONTEXT, KeptRankings
from ..store import EXACT
from ..store.codecs import coded_provenance
from ..store.conversations import Conversations
from ..store.disk import SegmentStore
from ..store.geometry import Geometry, block_groups
from ..store.lazy import torch
from ..store.relayout import join_segments
from ..store.segment import SegmentReader
from ..store.shape import TokenTables
from ..tiers.collector import StatsCollector
from ..tiers.handles import BlockRequest
from ..tiers.residency import Residency
from ..tiers.scores import TokenImportance, size_of

logger = logging.getLogger("hf_tiered_cache")

_IMPORTANCE = "importance"
"""Kind of the sidecar with the importance of a segment's tokens, and the number of prompts it comes from."""


class SegmentRewriter:
    """Worker that replaces segments by others with the same content, one at a time.

    Requests that read the old segment can read it to the end.
    """

    def __init__(
        self, disk: SegmentStore, residency: Residency, rankings: KeptRankings, conversations: Conversations
    ) -> None:
        self._disk, self._residency, self._rankings = disk, residency, rankings
        self._conversations = conversations
        self.importance = TokenImportance()
        self._lock = threading.Lock()  # guards the next two attributes
        self._users = Counter[str]()  # number of caches that use each segment
        self._due: set[str] = set()  # segments to reorder when they are no longer used
        self._thread = ThreadPoolExecutor(1, "hf-tiered-rewriter")
        self._queued: set[Future[None]] = set()

    def relayout(self, segment_id: str, geometry: Geometry) -> bool:
        """Rewrite a segment in another geometry; its codec stays. Return whether it was rewritten.

        A segment that needs no change, cannot be read (which is counted), or holds only a part of its tokens stays.
        """
        reader = self._disk.reader(segment_id)
        if reader is None or not reader.shape.whole:
            return False
        shape, tables = reader.shape, None
        geometry = replace(geometry, codec=shape.geometry.codec)
        if shape.tables is not None and not _is_prefix(reader):  # keep the ranking of a passage
            groups = block_groups(shape.layout, geometry)
            rank = -shape.tables.slot_of_token[:1].astype(np.int64)  # [1, tokens]
            tables = TokenTables.by_importance(rank[None], groups)
        differs = shape.geometry != geometry or (tables is not None and not tables.same(shape.tables))
        return differs and self._replace(segment_id, geometry, tables)

    def reorder(self, segment_id: str) -> bool:
        """Order a segment's tokens by their importance, as far as that is known. Return whether it was rewritten.

        The order of a prefix follows the attention that its tokens received; the order of a passage follows how far
        other text changes its KV.
        """
        reader = self._disk.reader(segment_id)
        if reader is None or not reader.shape.whole:
            return False
        if _is_prefix(reader):
            self.recall([reader])
            importance = self.importance.of(segment_id)
        else:
            scores = next((self._rankings.of(reader, name) for name in RANKED_IN_CONTEXT), None)
            importance = None if scores is None else scores[None, None]
        if importance is None:
            return False
        tables = TokenTables.by_importance(importance, reader.shape.block_groups)
        if tables.same(reader.shape.tables):
            return False
        return self._replace(segment_id, reader.shape.geometry, tables, hand_over=True)

    def prompt_done(self, segments: Iterable[str], interval: int) -> None:
        """Schedule the rewrites that are due after a prompt that reported its tokens' importance.

        A rewrite starts in the background as soon as no cache uses the segment. A segment that was in use ever since it
        was last due is rewritten anyway. See `TokenImportance.prompt_done` for `interval`.
        """
        for segment_id in segments:
            if not self.importance.prompt_done(segment_id, interval):
                continue
            with self._lock:
                waits = segment_id in self._users and segment_id not in self._due
                if waits:
                    self._due.add(segment_id)
                else:
                    self._due.discard(segment_id)
            if not waits:
                self._reorder_soon(segment_id)

    def _reorder_soon(self, segment_id: str) -> None:
        with suppress(RuntimeError):  # the store was closed during the request, which continues
            queued = self._thread.submit(self._reorder_quietly, segment_id)
            self._queued.add(queued)
            queued.add_done_callback(self._queued.discard)

    def begin_use(self, segments: Collection[str]) -> None:
        """Note that a cache selects from these segments: rewrites wait for `end_use`."""
        with self._lock:
            self._users.update(segments)

    def end_use(self, segments: Collection[str]) -> None:
        """Release these segments, and schedule due rewrites of those that are no longer used."""
        with self._lock:
            self._users.subtract(segments)
            self._users += Counter()  # drop zero counts
            due_segments = [name for name in segments if name in self._due and name not in self._users]
            self._due.difference_update(due_segments)
        for segment_id in due_segments:
            self._reorder_soon(segment_id)

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments; their ids may be reused."""
        with self._lock:
            self._due.difference_update(segments)

    def recall(self, readers: Collection[SegmentReader]) -> None:
        """Load the token importance kept by earlier processes, for segments without any in this process."""
        for reader in readers:
            if reader.id in self.importance:
                continue
            arrays = self._disk.sidecars.kept(reader, _IMPORTANCE, {}) or {}
            right = {"mass": (torch.float32, size_of(reader.shape)), "prompts": (torch.int64, (1,))}
            if {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()} == right:
                self.importance.load(reader.id, arrays["mass"].numpy(), int(arrays["prompts"]))

    def keep_importance(self) -> None:
        """Write changed token importance to the sidecars of the segments."""
        if not self._disk.backend.writable:
            return
        changed = self.importance.changes()
        self._disk.forget_deleted(changed)
        for segment_id, (mass, prompts) in changed.items():
            arrays = {"mass": torch.from_numpy(mass), "prompts": torch.tensor([prompts])}
            try:
                reader = self._disk.reader(segment_id) if segment_id in self.importance else None
                if reader is not None:
                    self._disk.sidecars.keep(reader, _IMPORTANCE, arrays, {})
            except Exception:  # as in `_reorder_quietly`; flush and close must continue
                logger.exception("the token importance of segment %s could not be saved", segment_id)

    def wait(self) -> None:
        """Wait until no rewrite is queued or running."""
        wait(list(self._queued))

    def close(self) -> None:
        """Finish the current rewrite and drop the others, which become due again later."""
        self._thread.shutdown(cancel_futures=True)

    def _reorder_quietly(self, segment_id: str) -> None:
        try:
            self.reorder(segment_id)
        except (StoreError, OSError) as error:  # no data is lost: the old or the new segment is stored
            message = f"segment {segment_id} could not be rewritten: {reason_of(error)}"
            self._disk.warn(f"lay out {type(error).__name__}", message)
        except Exception:  # a background job must report its failure; no data is lost
            logger.exception("segment %s could not be rewritten", segment_id)

    def _replace(self, old: str, geometry: Geometry, tables: TokenTables | None, hand_over: bool = False) -> bool:
        """Replace the segment `old` by one with another geometry or token tables (None keeps all tokens in order).

        The new segment is complete on disk, and found by lookups, before the old one is removed. Sidecars are copied,
        since they describe the same tokens. It takes over the pin and the conversations of the old one, also those of
        the meantime. With `hand_over`, it takes over what memory holds of the old one.
        """
        reader, pinned = self._disk.reader(old), old in self._disk.backend.pinned()
        if reader is None or not self._disk.backend.writable:
            return False
        sidecars = self._disk.sidecars.all_of(reader)  # before the new segment needs their room on disk
        cached_chunks = _kept_of(self._residency, reader) if hand_over else None
        header, prefix_hashes, block_groups = join_segments([reader], geometry, tables)
        try:
            if not self._disk.publish(header, prefix_hashes, block_groups):
                return False
        except (IntegrityError, OSError) as error:
            self._disk.report(old, error)
            return False
        if (replacement := self._disk.reader(header.id)) is None:
            return False  # the old segment is the only one
        if pinned:
            self._disk.pin([header.id])
        if cached_chunks is not None:  # as soon as lookups can find the new segment, which has the same keys
            content = replacement.header.digests.digest
            self._residency.index_cache.rename(old, lambda owner: (header.id, owner[1], content, owner[3]))
        for sidecar in sidecars:
            self._disk.sidecars.keep(replacement, *sidecar)  # without room it is dropped and counted
        with self._disk.backend.locked():  # until the old one is removed: whatever else keeps it takes the lock
            try:
                self._conversations.rename_segment(old, header.id)
            except (OSError, StoreError) as error:  # a record without segments would be deleted
                why = f"segment {old} was rewritten and stays, since conversations name it: {error}"
                self._disk.warn("rename", why)
                return False
            if (is_pinned := old in self._disk.backend.pinned()) != pinned:
                self._disk.backend.pin(header.id, is_pinned)
            self.importance.rename(old, header.id)
            self._disk.remove([old])
        if is_pinned and not pinned:
            self._disk.notify_stored([header.id])
        if cached_chunks is not None:
            self._migrate(reader, replacement, cached_chunks)
        return True

    def _migrate(self, old: SegmentReader, new: SegmentReader, cached_chunks: list[tuple[int, np.ndarray]]) -> None:
        """Fetch as many chunks of `new` to the host as memory kept of the old segment, which is already deleted.

        The first chunks of each KV cache group are fetched, with the most important tokens, within the host budget.
        The scores of a chunk are the mean of its tokens' old scores. Read errors are logged and otherwise ignored.
        """
        shape, requests = new.shape, list[BlockRequest]()
        for group, (num_cached, scores) in zip(shape.block_groups, cached_chunks, strict=True):
            step, tokens = shape.geometry.chunk_tokens, np.arange(shape.tokens)
            was, now = (reader.shape.slot_of_token(group, tokens) // step for reader in (old, new))
            count = shape.chunks_in(group)
            if scores.any():
                sums = np.stack([np.bincount(now, row[was], count) for row in scores])
                self._residency.scores.put(new.owners[group.index], sums / np.bincount(now, minlength=count))
            if num_cached := min(num_cached, count):
                requests.append(BlockRequest(new, group.index, np.arange(num_cached)))
        for request in requests:
            try:
                with self._residency.fetched(request, torch.device("cpu"), StatsCollector()):
                    pass  # they are in memory now
            except Exception as error:
                logger.debug("the blocks of segment %s could not be loaded into memory: %r", new.id, error)


def _kept_of(residency: Residency, segment: SegmentReader) -> list[tuple[int, np.ndarray]]:
    """Return what memory knows of each KV cache group: number of cached chunks, and scores, float64 `[2, chunks]`."""
    cached_chunks = []
    for group in segment.shape.block_groups:
        owner, chunks = segment.owners[group.index], np.arange(segment.shape.chunks_in(group))
        cached_chunks.append((residency.num_cached(owner, chunks), residency.scores.of(owner, chunks)))
    return cached_chunks


def _is_prefix(reader: SegmentReader) -> bool:
    """Return whether the segment is part of a prompt's prefix, and not a passage."""
    return reader.header.provenance == coded_provenance(EXACT, reader.shape.geometry.codec)
