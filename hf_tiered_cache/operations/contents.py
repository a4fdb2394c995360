"""Contents of a store: what is listed, verified, removed and cleaned up, without a model.

Users call the methods of `StoreContents` on a `KVStore`. The functions add, replace and delete labels of documents, and
the passages that no other label names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..cache.conversation import remove_conversations
from ..cache.storage import Storage
from ..errors import ConfigError, StoreError, as_store_error, naming_place
from ..stats import StoreStats
from ..store import maintain
from ..store.catalogue import SegmentRow
from ..store.conversations import ConversationInfo
from ..store.documents import DocumentInfo, DocumentRecord, by_passage
from ..store.geometry import ALIGNMENT, aligned

if TYPE_CHECKING:
    from typing_extensions import Self

BATCH_TOKENS = 4096
"""Maximum number of tokens computed in one pass, for passages of equal length."""


class StoreContents:
    """Contents and lifetime of an open store. See `KVStore`."""

    _storage: Storage

    def segments(self) -> list[SegmentRow]:
        """Return the stored segments, most recently used last. Raises StoreError if not all are known."""
        return self._opened.disk.index.complete_rows(but_unreadable=True)

    @naming_place
    def verify(self, *, progress: bool = False, repair: bool = False) -> maintain.VerifyReport:
        """Read all stored bytes, verify all checksums, and report damaged segments.

        Segments that the store's key cannot decrypt are counted but not read.

        Args:
            progress: Whether to show a progress bar.
            repair: Whether to remove damaged segments.

        Raises:
            StoreClosedError: The store was closed meanwhile, so that its files could not be read.
        """
        storage = self._opened
        storage.writer.flush()
        try:
            return maintain.verify(storage.disk, progress=progress, repair=repair)
        finally:
            storage.check_open()

    @naming_place
    def gc(self, *, dry_run: bool = False) -> maintain.GcReport:
        """Delete data that no request can use, and evict segments above the quota, unless that would not be enough.

        Segments that cannot be read are reported, and kept with the conversations and documents that may name them.

        Args:
            dry_run: Whether to only report what would be deleted.

        Raises:
            StoreError: Not all stored segments are known; then no record and no segment is deleted.
            StoreClosedError: The store was closed meanwhile.
        """
        storage = self._opened
        try:
            sidecars = storage.disk.sidecars.by_segment()
            replaced, documents = finish_documents(storage, dry_run)
            # before anything is deleted, as in a dry run
            stored_ids = {row.id for row in storage.disk.index.complete_rows(but_unreadable=True)}
            conversations = storage.conversations.sweep(stored_ids | maintain.unlisted_intact(storage.disk), dry_run)
            replaced_bytes = {row.id: row.nbytes + sidecars.get(row.id, 0) for row in replaced}
            report = maintain.gc(storage.disk, replaced_bytes, dry_run=dry_run)
            report.conversations, report.documents = len(conversations), len(documents)
            report.deleted |= {storage.disk.backend.where(row.id): "its document was replaced" for row in replaced}
            report.deleted |= dict.fromkeys(conversations, "its segments no longer exist")
            report.deleted |= dict.fromkeys(documents, "its passages no longer exist")
            return report
        finally:
            storage.check_open()

    @naming_place
    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments by id. Return the number of segments deleted."""
        return self._opened.remove(ids)

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Protect segments from eviction, or with `pinned=False` remove the protection.

        Raises:
            ConfigError: An id to be pinned is unknown.
        """
        self._opened.disk.pin(ids, pinned)

    @naming_place
    def conversations(self) -> list[ConversationInfo]:
        """Return the suspended conversations, most recently used last. Raises StoreError if not all are known."""
        return self._storage.conversations.listed(self.segments())

    @naming_place
    def remove_conversation(self, conversation_id: str) -> int:
        """Delete a conversation, and its unpinned segments that no other conversation uses.

        Prompts without a conversation may share these segments. They are computed again.

        Returns:
            Number of segments deleted.

        Raises:
            ConfigError: There is no conversation with this id.
            ConversationInUseError: A cache uses the conversation.
            StoreError: Not all stored segments are known, or another conversation's record is unreadable, damaged or of
                a newer version of the library.
        """
        return remove_conversations(self._opened, [conversation_id])

    @naming_place
    def documents(self, label: str | None = None) -> list[DocumentInfo]:
        """Return the documents that passages are stored under, and the state of each, sorted by label.

        Args:
            label: Label of the documents to return (one for each model and way of computing); None for all.

        Raises:
            StoreError: Not all documents are known.
        """
        infos = self._storage.documents.listed(self.segments())
        return [info for info in infos if label in (None, info.label)]

    @naming_place
    def remove_document(self, label: str) -> int:
        """Delete a document, and its passages that no other label names, including pinned ones.

        Passages that were also stored without a label are deleted too, and computed again when needed.

        Returns:
            Number of segments deleted.

        Raises:
            ConfigError: There is no document with this label.
            StoreError: Not all stored segments are known, or another document's record is unreadable, damaged or of a
                newer version of the library.
        """
        return remove_documents(self._opened, [label])

    def models(self) -> dict[str, dict[str, str]]:
        """Return the known facts about each model with segments, by fingerprint. Raises as `segments` does."""
        self.segments()
        return self._opened.disk.index.known(self._opened.disk.index.models())

    @naming_place
    def pinned(self) -> set[str]:
        """Return the ids of the pinned segments."""
        return self._opened.disk.backend.pinned()

    def reorder(self, ids: Iterable[str] | None = None, *, progress: bool = True) -> int:
        """Reorder the tokens of segments by the attention they got from prompts, highest first.

        `ContiguousKV` requests this in the background after 1, 2, 4, ... prompts of a segment, `Impress` after 4, 8,
        16, ... Passages are ordered by their ranking "context", so that the blocks of recomputed tokens are not read.

        Args:
            ids: Ids of the segments to reorder; None for all.
            progress: Whether to show a progress bar.

        Returns:
            Number of segments that were rewritten. Unreadable segments are left unchanged and counted in the
            statistics.
        """
        return self._rewrite_segments(self._storage.rewriter.reorder, ids, "reorder", progress)

    @naming_place
    def _rewrite_segments(
        self, action: Callable[[str], bool], ids: Iterable[str] | None, name: str, progress: bool
    ) -> int:
        """Apply `action` to segments, to all if `ids` is None, and return the number of those that it changed."""
        storage = self._opened
        storage.disk.check_writable()
        storage.flush()
        segments = [row.id for row in storage.disk.index.rows()] if ids is None else list(ids)
        num_changed = sum(action(old) for old in tqdm(segments, unit="segment", desc=name, disable=not progress))
        storage.disk.sync()
        return num_changed

    @naming_place
    def clear(self, *, disk: bool = False) -> None:
        """Drop all blocks from host and device memory.

        Args:
            disk: Whether to also delete all segments on disk, including pinned and damaged ones, but those of another
                format.

        Raises:
            StoreError: Not all segments on disk are known; then nothing on disk is deleted.
        """
        storage = self._opened
        if disk:
            storage.disk.check_writable()
        storage.flush()
        if disk:
            ids = [row.id for row in storage.disk.index.complete_rows()]
            storage.remove([*ids, *maintain.unlisted_damaged(storage.disk)])
            storage.conversations.sweep(())
            storage.documents.sweep(())
        storage.residency.clear()

    # --- lifecycle

    def flush(self) -> None:
        """Write all computed KV, make it durable, and wait for background work, such as sending it to the remote."""
        self._storage.flush()

    def close(self) -> None:
        """Write all computed KV, and release files, threads and memory."""
        self._storage.close()

    def __reduce__(self) -> Any:
        raise TypeError("a store cannot be pickled; pass its path, and open it in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _opened(self) -> Storage:
        """The storage. Raises StoreClosedError if the store was closed, or was opened by another process."""
        self._storage.check_open()
        return self._storage

    @property
    def place(self) -> str:
        """Path or address of the store."""
        return self._storage.place

    @property
    def usable(self) -> bool:
        """True if the store is open and was opened by this process."""
        return self._storage.usable

    @property
    def encrypted(self) -> bool:
        """True if the store was opened with a key."""
        return bool(self._storage.disk.cipher.key_id)

    def __repr__(self) -> str:
        if not hasattr(self, "_storage"):  # opening failed, and a traceback prints this object
            return "KVStore(not open)"
        notes = [
            self._storage.disk.backend.reads_with,
            *([] if self._storage.remote is None else [f"remote {self._storage.remote.place}"]),
            *["encrypted"] * self.encrypted,
            *["closed"] * self._storage.is_closed,
        ]
        return f"KVStore({self.place!r}, {', '.join(notes)})"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    @property
    def stats(self) -> StoreStats:
        """Contents of the store, and counters since it was opened."""
        stats, disk = self._storage.disk.counters.snapshot(), self._storage.disk
        residency, writer = self._storage.residency, self._storage.writer
        if not self._storage.is_closed:
            counts = disk.index.counts() if self.usable else None  # a forked child cannot read the catalogue
            stats.segments, stats.tokens, nbytes, stats.encrypted_segments = counts or (None,) * 4
            stats.disk.bytes = None
            with suppress(OSError):
                stats.disk.bytes = None if nbytes is None else nbytes + sum(disk.sidecars.by_segment().values())
        stats.disk.budget = disk.limits.quota
        stats.host.bytes, stats.host.budget = residency.host.allocated, residency.host.budget
        stats.device.bytes, stats.device.budget = residency.device_bytes
        stats.index.bytes, stats.index.budget = residency.index_cache.allocated, residency.index_cache.budget
        stats.unbudgeted_index_bytes = residency.index_cache.unbudgeted
        stats.evicted_blocks, stats.evicted_indexes = residency.evicted, residency.index_cache.evicted
        stats.queued_bytes, stats.queued_device_bytes = writer.queued_bytes, writer.queued_device_bytes
        stats.remote = stats.remote if self._storage.remote is None else self._storage.remote.stats()
        return stats


# --- documents


def enter_documents(
    storage: Storage, records: Sequence[DocumentRecord], incomplete: Collection[str] = ()
) -> tuple[int, list[str]]:
    """Save the records of labels, and delete replaced passages unless other labels name them.

    The new passages must be durable. At any time, a label names either its old or its new passages, even if a process
    is killed. In that case, `gc` or the next save of the label deletes the replaced passages.

    Args:
        storage: Storage of the documents.
        records: New records.
        incomplete: Labels of which not all new passages are stored. They are not saved if some old passages are stored.

    Returns:
        Number of deleted segments, and the labels that were not saved.

    Raises:
        StoreError: Not all labels were saved.
    """
    if not records:
        return 0, []
    if not storage.disk.backend.writable:
        raise StoreError(f"{storage.place} is not writable, so labels cannot be saved")
    documents = storage.documents
    with (
        as_store_error(f"labels cannot be saved in {storage.place}, but stored passages stay"),
        storage.disk.backend.locked(),
    ):
        before = {record.label: documents.read(*record.key) for record in records}
        rows = storage.disk.index.rows()
        kept = [label for label in incomplete if (old := before[label]) is not None and rows_of(old.passages, rows)]
        records = [record.in_place_of(before[record.label]) for record in records if record.label not in kept]
        passage_names = {name for record in records for name in record.passages}
        kept_ids = [row.id for row in rows_of(passage_names, rows)]
        storage.disk.make_room(sum(aligned(len(record.encode()), ALIGNMENT) for record in records), kept_ids)
        documents.write(records)
        return len(_delete_replaced(storage, [record for record in records if record.leaving])), kept


def find_documents(storage: Storage, labels: Collection[str]) -> list[DocumentRecord]:
    """Return the records of labels. Raise ConfigError if a label has none."""
    records = [record for record in storage.documents.all() if record.label in labels]
    if unknown := set(labels) - {record.label for record in records}:
        raise ConfigError(f"document {min(unknown)!r} does not exist; store.documents() lists all documents")
    return records


def segments_of_documents(storage: Storage, labels: Collection[str]) -> list[SegmentRow]:
    """Return the segments that only these labels name. Raise ConfigError if a label does not exist."""
    records = find_documents(storage, labels)
    names = {name for record in records for name in (*record.passages, *record.leaving)}
    return rows_of(storage.documents.only_of(records, names), storage.disk.index.complete_rows())


def remove_documents(storage: Storage, labels: Collection[str]) -> int:
    """Delete documents and the segments that only they name. Return the number of segments deleted.

    Raises ConfigError if a label does not exist; then nothing is deleted.
    """
    storage.disk.check_writable()
    storage.flush()
    with storage.disk.backend.locked():
        records, rows = find_documents(storage, labels), segments_of_documents(storage, labels)
        num_removed = storage.remove(row.id for row in rows)  # before the records: the process may be killed here
        for record in records:
            storage.documents.delete(*record.key)
    return num_removed


def finish_documents(storage: Storage, dry_run: bool) -> tuple[list[SegmentRow], list[str]]:
    """Delete replaced passages that a killed process did not delete, and records without stored passages.

    Return the segments, and the files of the records, that were deleted, or with `dry_run` would be.
    """
    if not dry_run:
        storage.disk.check_writable()
    with storage.disk.backend.locked():
        pending = [record for record in storage.documents.all() if record.leaving]
        replaced = _delete_replaced(storage, pending, dry_run)
        rows = storage.disk.index.complete_rows(but_unreadable=True)
        # which passages these are is not known
        return replaced, [] if maintain.unlisted_intact(storage.disk) else storage.documents.sweep(rows, dry_run)


def rows_of(names: Collection[str], rows: Iterable[SegmentRow]) -> list[SegmentRow]:
    """Return the segments of passages, given the names of the passages and the rows of all stored segments."""
    rows_by_passage = by_passage(rows)
    return [row for name in sorted(names) for row in rows_by_passage.get(name, ())]


def _delete_replaced(storage: Storage, records: Sequence[DocumentRecord], dry_run: bool = False) -> list[SegmentRow]:
    """Delete the replaced passages of these records, and update the records. Return the deleted segments."""
    if not records:
        return []
    rows: list[SegmentRow] = []
    try:
        unshared_names = storage.documents.only_of((), {name for record in records for name in record.leaving})
        rows = rows_of(unshared_names, storage.disk.index.complete_rows())
        if dry_run:
            return rows
        storage.remove(row.id for row in rows)
        storage.documents.write([replace(record, leaving=()) for record in records])
    except (StoreError, OSError) as error:  # an unreadable record may name any passage
        storage.disk.warn("documents", f"replaced passages of documents could not be deleted yet: {error}")
    return [row for row in rows if storage.disk.index.row(row.id) is None]
