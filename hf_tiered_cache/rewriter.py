"""Rewrites stored segments in the background, in another geometry or order of tokens.

Methods ask for it: `ContiguousKV` and `Impress` lay tokens out by the attention that prompts paid them. Who decodes
comes back to a segment at each token, and what memory has of one that was replaced goes, so this waits until nobody
uses it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

import torch

from .codecs import coded_provenance
from .errors import IntegrityError, StoreError
from .geometry import Geometry, block_groups
from .restore.rankings import KeptRankings
from .restore.spectral import RANKED_IN_CONTEXT
from .shape import SegmentShape, TokenTables
from .store.disk import SegmentStore
from .store.format import EXACT
from .store.relayout import relayout_segment
from .store.segment import SegmentReader
from .tiers.handover import Handover
from .tiers.importance import TokenImportance, size_of
from .tiers.residency import Residency

_IMPORTANCE = "importance"
"""Kind of the arrays beside a segment that say how important its tokens were, and to how many prompts."""
logger = logging.getLogger("hf_tiered_cache")


class SegmentRewriter:
    """Replaces segments by others with the same content, one at a time; whoever reads the old one reads it to the end.

    Args:
        disk: the segments.
        residency: the tiers before them.
        rankings: of passages' tokens.
    """

    def __init__(self, disk: SegmentStore, residency: Residency, rankings: KeptRankings) -> None:
        self._disk, self._residency, self._rankings = disk, residency, rankings
        self.importance = TokenImportance()
        self._lock = threading.Lock()  # of the next two
        self._users = Counter[str]()  # of segments that are to be laid out when these are gone
        self._due: set[str] = set()  # segments that are to be laid out by importance
        self._thread = ThreadPoolExecutor(1, "hf-tiered-rewriter")
        self._queued: set[Future[None]] = set()

    def relayout(self, segment_id: str, geometry: Geometry) -> bool:
        """Cut a segment in another way; its codec stays.

        Returns:
            Whether it was. One that cannot be read, which counts, or that holds a part of its tokens, is left.
        """
        reader = self._disk.reader(segment_id)
        if reader is None or not reader.shape.whole:
            return False
        shape, tables = reader.shape, None
        geometry = replace(geometry, codec=shape.geometry.codec)
        if shape.tables is not None and not _is_prefix(reader):  # a passage's ranking stays with it
            groups = block_groups(shape.layout, geometry)
            tables = TokenTables.by_layer(shape.tables.slot_of_token[:1], groups, shape.tables.importance)
        return _differs(shape, geometry, tables) and self._replace(segment_id, geometry, tables)

    def reorder(self, segment_id: str) -> bool:
        """Lay a segment's tokens out by their importance, as far as that is known. Returns whether it was done.

        A prefix goes by the attention that its tokens got, a passage by how far other text moves them.
        """
        reader = self._disk.reader(segment_id)
        if reader is None or not reader.shape.whole:
            return False
        if _is_prefix(reader):
            self.recall([reader])
            importance = self.importance.of(segment_id)
        else:
            scores = next((self._rankings.of(reader).get(name) for name in RANKED_IN_CONTEXT), None)
            importance = None if scores is None else scores[None, None]
        if importance is None:
            return False
        tables = TokenTables.by_importance(importance, reader.shape.block_groups)
        if tables.same(reader.shape.tables):
            return False
        return self._replace(segment_id, reader.shape.geometry, tables, hand_over=True)

    def prompt_done(self, segments: Iterable[str], every: int) -> None:
        """A prompt that told of its tokens' importance is through: what is due is laid out anew, in the background.

        As soon as nobody uses it; what was always in use since it was due last is laid out all the same.
        """
        for segment_id in segments:
            if not self.importance.prompt_done(segment_id, every):
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
        with suppress(RuntimeError):  # the store was closed under the request, which goes on
            queued = self._thread.submit(self._reorder_quietly, segment_id)
            self._queued.add(queued)
            queued.add_done_callback(self._queued.discard)

    def begin_use(self, segments: Collection[str]) -> None:
        """A cache begins to choose from these segments: they stay as they are until `end_use`."""
        with self._lock:
            self._users.update(segments)

    def end_use(self, segments: Collection[str]) -> None:
        """Lay out those that are due and that nobody uses any more."""
        with self._lock:
            self._users.subtract(segments)
            self._users += Counter()  # without those that nobody uses
            due = [name for name in segments if name in self._due and name not in self._users]
            self._due.difference_update(due)
        for segment_id in due:
            self._reorder_soon(segment_id)

    def forget(self, segments: Collection[str]) -> None:
        """These are gone: what has their names next is another's work."""
        with self._lock:
            self._due.difference_update(segments)

    def recall(self, readers: Collection[SegmentReader]) -> None:
        """Take in what earlier processes knew of these segments' tokens, where this one knows nothing of them."""
        for reader in readers:
            if reader.id in self.importance:
                continue
            kept = self._disk.beside.kept(reader, _IMPORTANCE, {}) or {}
            right = {"mass": (torch.float32, size_of(reader.shape)), "prompts": (torch.int64, (1,))}
            if {name: (array.dtype, tuple(array.shape)) for name, array in kept.items()} == right:
                self.importance.load(reader.id, kept["mass"].numpy(), int(kept["prompts"]))

    def keep_importance(self) -> None:
        """Keep what is known of segments' tokens beside them, as far as it has changed since."""
        if not self._disk.backend.writable:
            return
        changed = self.importance.changes()
        self._disk.forget_deleted(changed)
        for segment_id, (mass, prompts) in changed.items():
            arrays = {"mass": torch.from_numpy(mass), "prompts": torch.tensor([prompts])}
            try:
                reader = self._disk.reader(segment_id) if segment_id in self.importance else None
                if reader is not None:
                    self._disk.beside.keep(reader, _IMPORTANCE, arrays, {})
            except Exception:  # as below; the store is to be flushed, and closed, all the same
                logger.exception("the importance of the tokens of segment %s was not kept", segment_id)

    def wait(self) -> None:
        """Until nothing is under way."""
        wait(list(self._queued))

    def close(self) -> None:
        """Finish what is under way and drop the rest: it is due again another time."""
        self._thread.shutdown(cancel_futures=True)

    def _reorder_quietly(self, segment_id: str) -> None:
        try:
            self.reorder(segment_id)
        except (StoreError, OSError) as error:  # nothing is lost: the old form is there, or the new one, or both
            self._disk.warn(f"lay out {type(error).__name__}", f"laying segment {segment_id} out anew failed: {error}")
        except Exception:  # a background job must say what happened to it; nothing is lost
            logger.exception("segment %s was not laid out anew", segment_id)

    def _replace(
        self,
        old: str,
        geometry: Geometry,
        tables: TokenTables | None,
        hand_over: bool = False,
    ) -> bool:
        """The new segment is whole on disk, and found by look-ups, before the old one goes.

        What is kept beside the old one is kept beside the new one: it is of the same tokens.

        Args:
            hand_over: whether what memory has of the old one goes to the front of the new one.
        """
        reader, pinned = self._disk.reader(old), old in self._disk.pinned()
        if reader is None or not self._disk.backend.writable:
            return False
        if tables is not None and tables.same(None):
            tables = None
        beside = self._disk.beside.all_of(reader)  # before its room is wanted for the new one
        handover = Handover(self._residency, reader) if hand_over else None
        header, prefix_hashes, block_groups = relayout_segment(reader, geometry, tables)
        try:
            if not self._disk.publish(header, prefix_hashes, block_groups):
                return False
        except (IntegrityError, OSError) as error:
            self._disk.report(old, error)
            return False
        self._disk.pin([header.id] if pinned else [])
        if (made := self._disk.reader(header.id)) is not None:
            if handover is not None:
                handover.give_indexes_to(made)
            for kept in beside:
                self._disk.beside.keep(made, *kept)  # without room it is not kept, which is counted
        self.importance.rename(old, header.id)
        self._disk.remove([old])
        if handover is not None and made is not None:
            handover.give_to(made)
        return True


def _differs(shape: SegmentShape, geometry: Geometry, tables: TokenTables | None) -> bool:
    """Whether a segment of a shape is to be laid out anew; without tables for another geometry alone."""
    return shape.geometry != geometry or (tables is not None and not tables.same(shape.tables))


def _is_prefix(reader: SegmentReader) -> bool:
    """Whether it is a run of a prompt's tokens, and no passage."""
    return reader.header.provenance == coded_provenance(EXACT, reader.shape.geometry.codec)
