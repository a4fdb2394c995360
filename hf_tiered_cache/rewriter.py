"""Rewrites stored segments in the background, in another geometry or order of tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

from .codecs import coded_provenance
from .errors import IntegrityError
from .geometry import Geometry, block_groups
from .shape import TokenTables
from .store.disk import SegmentStore
from .store.format import EXACT
from .store.relayout import relayout_segment
from .store.segment import SegmentReader
from .tiers.importance import TokenImportance

logger = logging.getLogger("hf_tiered_cache")


class SegmentRewriter:
    """Replaces segments by others with the same content, one at a time; whoever reads the old one reads it to the end.

    Args:
        disk: the segments.
    """

    def __init__(self, disk: SegmentStore) -> None:
        self._disk = disk
        self.importance = TokenImportance()
        self._thread = ThreadPoolExecutor(1, "hf-tiered-rewriter")
        self._queued: set[Future[None]] = set()

    def relayout(self, segment_id: str, geometry: Geometry) -> bool:
        """Cut a segment in another way; its codec stays.

        Returns:
            Whether it was cut. One that cannot be read, which counts, or that holds a part of its tokens, is left.
        """
        reader = self._disk.reader(segment_id)
        if reader is None or not reader.shape.whole:
            return False
        shape, tables = reader.shape, None
        if shape.geometry == replace(geometry, codec=shape.geometry.codec):
            return False
        if not _is_prefix(reader) and shape.tables is not None:  # a passage's ranking stays with it
            groups = block_groups(shape.layout, geometry)
            tables = TokenTables.by_layer(shape.tables.slot_of_token[:1], groups, shape.tables.importance)
        return self._replace(segment_id, geometry, tables)

    def reorder(self, segment_id: str) -> bool:
        """Lay a segment's tokens out by their importance, as far as that is known. Returns whether it was done."""
        reader, importance = self._disk.reader(segment_id), self.importance.of(segment_id)
        if reader is None or importance is None or not _is_prefix(reader) or not reader.shape.whole:
            return False
        tables = TokenTables.by_importance(importance, reader.shape.block_groups)
        return not tables.same(reader.shape.tables) and self._replace(segment_id, reader.shape.geometry, tables)

    def prompt_done(self, segments: Iterable[str]) -> None:
        """A prompt that told of its tokens' importance is through: what is due is laid out anew, in the background."""
        for segment_id in segments:
            if self.importance.prompt_done(segment_id):
                with suppress(RuntimeError):  # the store was closed under the request, which goes on
                    queued = self._thread.submit(self._quietly, segment_id)
                    self._queued.add(queued)
                    queued.add_done_callback(self._queued.discard)

    def wait(self) -> None:
        """Until nothing is under way."""
        wait(list(self._queued))

    def close(self) -> None:
        """Finish what is under way and drop the rest: it is due again another time."""
        self._thread.shutdown(cancel_futures=True)

    def _quietly(self, segment_id: str) -> None:
        try:
            self.reorder(segment_id)
        except Exception:  # a background job must say what happened to it; nothing is lost
            logger.exception("segment %s was not laid out anew", segment_id)

    def _replace(self, old: str, geometry: Geometry, tables: TokenTables | None) -> bool:
        """The new segment is whole on disk, and found by look-ups, before the old one goes."""
        reader, pinned = self._disk.reader(old), old in self._disk.pinned()
        if reader is None:
            return False
        header, prefix_hashes, block_groups = relayout_segment(reader, geometry, tables)
        try:
            if not self._disk.publish(header, prefix_hashes, block_groups):
                return False
        except (IntegrityError, OSError) as error:
            self._disk.report(old, error)
            return False
        self._disk.pin([header.id] if pinned else [])
        self.importance.rename(old, header.id)
        self._disk.remove([old])
        return True


def _is_prefix(reader: SegmentReader) -> bool:
    """Whether it is a run of a prompt's tokens, and no passage."""
    return reader.header.provenance == coded_provenance(EXACT, reader.shape.geometry.codec)
