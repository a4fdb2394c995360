"""Space of a store: its limits, eviction and deletion."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigError, QuotaError, StoreError, as_store_error
from .backend import SegmentBackend, Upload
from .cipher import Plain
from .faults import Counters
from .index import Index
from .segment import OpenSegments
from .sidecars import Sidecars

CATALOGUE_GROWTH = 256 << 10
"""Bytes reserved within the quota for growth of the catalogue and its log until usage is measured again."""
_PAUSE_PER_LOOK = 20
"""While there is room, looking for segments that other processes deleted takes at most one in so many seconds."""
Use = tuple[str, int, float | None]
"""Id of a segment, its size in bytes, and its expiry in Unix seconds, or None."""


@dataclass(frozen=True)
class Limits:
    """Limits of the disk space that a store may use: bytes of its folder, and bytes that always stay free."""

    quota: int | None = None
    high: float = 0.95  # share of the quota above which eviction starts
    low: float = 0.85  # share of the quota down to which it evicts
    floor: int = 256 << 20

    def shortfall(self, nbytes: int, usage: int, free: int | None) -> tuple[int, int]:
        """Return the bytes that must be evicted, and that should be, before `nbytes` are written; none if not positive.

        The store uses `usage` bytes, which counts only with a quota. `free` bytes are free, or None: unlimited.
        """
        needed = 0 if free is None else nbytes + self.floor - free
        desired = needed + nbytes if needed > 0 else needed  # room for two such writes, so that not every write evicts
        if self.quota is not None:
            needed = max(needed, usage + nbytes - self.quota)
            if usage + nbytes > self.quota * self.high:
                desired = max(desired, needed, usage + nbytes - int(self.quota * self.low))
        return needed, desired

    def overflow(self, usage: int) -> int:
        """Return the bytes to evict to get down to the share `low`; 0 if `usage` is not above the share `high`."""
        over = self.quota is not None and usage > self.quota * self.high
        return usage - int(self.quota * self.low) if self.quota is not None and over else 0


def victims(uses: Sequence[Use], nbytes: int, spared: Collection[str], now: float) -> list[tuple[str, int]]:
    """Select segments to evict until `nbytes` are freed: expired ones first, then the least recently used.

    `uses` are all segments, most recently used last; with equal times, the segment at the larger position first.
    Returns ids and sizes in bytes.
    """
    rows = [row for row in uses if row[0] not in spared]
    rows.sort(key=lambda row: row[2] is None or row[2] > now)  # a stable sort: the order of use is kept
    freed = accumulate((size for _, size, _ in rows), initial=0)
    return [(segment_id, size) for (segment_id, size, _), before in zip(rows, freed, strict=False) if before < nbytes]


class Space:
    """Space that a store takes: usage, quota, eviction and deletion."""

    def __init__(self, backend: SegmentBackend, limits: Limits, cipher: Plain) -> None:
        self.backend, self.place, self.limits, self.cipher = backend, backend.place, limits, cipher
        self.counters = Counters()
        self.warn = self.counters.warn
        self.readers = OpenSegments()
        self.on_gone: list[Callable[[Collection[str]], None]] = []
        """Callbacks that receive the ids of deleted or replaced segments."""
        self.on_kept: list[Callable[[Collection[str]], None]] = []
        """Callbacks that receive the ids of segments that were stored or pinned."""
        self.index = Index(backend, self.counters)
        self.sidecars = Sidecars(backend, cipher, self.counters, self.reserved)
        self._removed: deque[str] = deque(maxlen=1024)  # segments that this process deleted recently
        self._next_look = 0.0  # time when `make_room` looks for lost readers again, by `time.monotonic`

    def used_bytes(self) -> int:
        """Return the bytes of segments, sidecars and catalogue on disk, plus the catalogue's growth. Raises OSError."""
        usage = self.backend.usage()  # first: a file that is published meanwhile must count twice rather than never
        segment_bytes = self.index.listed_bytes()
        if segment_bytes is None:  # no shared catalogue, or a new one, which may lack segments of other processes
            total = sum(map(self.nbytes_of, self.backend.names()))
        else:
            total = segment_bytes + sum(map(self.nbytes_of, filter(self.index.is_stored, self.index.unlisted)))
        return total + CATALOGUE_GROWTH + usage + sum(self.backend.sidecars().values())

    def nbytes_of(self, segment_id: str) -> int:
        """Return the bytes that a segment takes on disk; 0 if it is gone. Raises OSError."""
        stored = self.backend.find(segment_id)
        return 0 if stored is None else stored.nbytes

    def correct_sizes(self) -> bool:
        """Compare the sizes in a shared catalogue with the files. Returns whether some were wrong. Raises OSError."""
        uses = self.index.by_use() if self.index.catalogue.is_shared else []
        sizes = {segment_id: self.nbytes_of(segment_id) for segment_id, *_ in uses}
        wrong = {segment_id: sizes[segment_id] for segment_id, nbytes, _ in uses if nbytes != sizes[segment_id]}
        if wrong:
            self.index.set_sizes(wrong)
        return bool(wrong)

    def make_room(self, nbytes: int, spared: Collection[str] = ()) -> None:
        """Evict segments until `nbytes` more fit, except pinned ones and `spared`. The caller holds the backend's lock.

        Raises QuotaError, before anything is evicted, if that would not free enough, or OSError.
        """
        self.clean_up()
        if time.monotonic() >= self._next_look:
            self.forget_lost_readers()
        usage = 0 if self.limits.quota is None else self.used_bytes()
        if self.limits.shortfall(nbytes, usage, self.backend.free())[1] <= 0:
            return
        self.forget_lost_readers()
        if self.correct_sizes() and self.limits.quota is not None:
            usage = self.used_bytes()
        needed, desired = self.limits.shortfall(nbytes, usage, self.backend.free())
        if desired <= 0:
            return
        swept = sum(self.sidecars.sweep().values())
        needed, desired = needed - swept, desired - swept
        candidates = self.victims(desired, spared)
        if sum(nbytes for _, nbytes in candidates) < needed:
            free = self.backend.free()
            facts = [] if free is None else [f"{free} bytes are free, and free_space_floor is {self.limits.floor}"]
            if self.limits.quota is not None:
                facts.append(f"disk_quota is {self.limits.quota}, of which {usage} are used or kept for the catalogue")
            raise QuotaError(
                f"no room for {nbytes} bytes ({'; '.join(facts)}); raise disk_quota, lower free_space_floor, or free "
                "space on the disk"
            )
        self.remove([segment_id for segment_id, _ in candidates], "evicted_segments")

    def victims(self, nbytes: int, but: Collection[str] = ()) -> list[tuple[str, int]]:
        """Select the segments to evict until `nbytes` are freed, except pinned ones: ids, and bytes with sidecars."""
        sidecars = self.sidecars.by_segment()
        uses = [(name, size + sidecars.get(name, 0), expires) for name, size, expires in self.index.by_use()]
        return victims(uses, nbytes, self.backend.pinned().union(but), time.time())

    def clean_up(self, dry_run: bool = False) -> dict[str, int]:
        """Delete unfinished files of dead processes, unless `dry_run`, and return the bytes of each. Needs the lock."""
        file_sizes, published = self.backend.clean_up(dry_run)
        if published and not dry_run:  # killed after the file was published, and before its row was added
            self.index.scan()
        return file_sizes

    def check_writable(self) -> None:
        """Raise StoreError if the store cannot be written."""
        if not self.backend.writable:
            raise StoreError(f"{self.place} is not writable, so nothing in it can be changed; check its permissions")

    @contextmanager
    def reserved(self, name: str, nbytes: int, spared: Collection[str] = ()) -> Iterator[Upload]:
        """Reserve room for `nbytes`, and yield the upload to write to. Segments in `spared` are not evicted for it."""
        with ExitStack() as stack:
            with self.backend.locked():
                self.make_room(nbytes, spared)
                upload = stack.enter_context(self.backend.write(name, nbytes))
            yield upload

    # --- deletion

    def remove(self, ids: Iterable[str], figure: str = "") -> int:
        """Delete segments and their sidecars. Returns their number, which is also added to a figure of the statistics.

        Raises StoreError if the store is not writable, or OSError if one remains; the others are deleted.
        """
        self.check_writable()
        names, removed_ids, num_removed, failed = list(ids), [], 0, None
        self._removed.extend(names)
        self.sidecars.remove(names)  # first, so that no sidecar remains without its segment
        for segment_id in names:
            try:
                num_removed += self.backend.delete(segment_id)
                removed_ids.append(segment_id)
                self.backend.pin(segment_id, False)
            except OSError as error:
                failed = error
        self.forget(removed_ids)
        self.index.remove(removed_ids)
        if figure:
            self.counters.add(figure, num_removed)
        if failed is not None:
            raise failed
        return num_removed

    def forget(self, ids: Collection[str]) -> None:
        """Drop everything that this process holds of deleted or replaced segments."""
        for segment_id in ids:
            (reader,) = self.readers.get(segment_id)
            if reader is not None:
                reader.gone = True
                self.readers.drop(segment_id)
        for tell in self.on_gone:
            tell(ids)

    def forget_lost_readers(self) -> None:
        """Close segments that other processes deleted or replaced: an open file still takes disk space."""
        started = time.monotonic()
        open_readers = self.readers.get(*self.readers)
        if lost_ids := [reader.id for reader in open_readers if reader is not None and not reader.is_current()]:
            self.forget(lost_ids)
        now = time.monotonic()
        self._next_look = now + _PAUSE_PER_LOOK * (now - started)

    def forget_deleted(self, ids: Iterable[str]) -> None:
        """Drop the given segments that other processes deleted."""
        with suppress(OSError):  # an error proves nothing
            if lost_ids := [segment_id for segment_id in ids if self.backend.find(segment_id) is None]:
                self.forget(lost_ids)

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Pin segments, which protects them from eviction, or unpin them. Raises ConfigError or StoreError."""
        self.check_writable()
        ids = list(ids)
        with as_store_error(f"pins cannot be changed in {self.place}"), self.backend.locked():
            # under the lock: none can be evicted that was just pinned
            stored_ids = self.index.ids() if pinned else None
            unknown = set[str]() if stored_ids is None else set(ids) - stored_ids
            if not unknown:
                for segment_id in ids:
                    self.backend.pin(segment_id, pinned)
                unknown = {name for name in ids if pinned and self.backend.find(name) is None}  # deleted meanwhile
                for segment_id in unknown:
                    self.backend.pin(segment_id, False)
        if unknown:
            raise ConfigError(
                f"segment {min(map(str, unknown))!r} does not exist; store.segments() lists all segments, and "
                "store.precompute(model, input_ids, pin=True) pins a prompt"
            )
        if pinned:
            self.notify_stored(ids)

    def notify_stored(self, ids: Collection[str]) -> None:
        """Tell that segments were stored or pinned."""
        for tell in self.on_kept:
            tell(ids)
