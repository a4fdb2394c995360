"""The folder of segments: publish, find, open, forget. Faults of the disk end here as counted misses.

<store>/segments/<id>.kv   immutable segment files        <store>/pins/<id>       segments never to evict
<store>/tmp/               files being written            <store>/catalogue.sqlite  rebuilt from headers if lost
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from filelock import FileLock, Timeout

from ..errors import FormatError, IntegrityError, NewerFormatError, QuotaError, StoreBusyError, StoreError
from ..stats import Counters
from . import quota
from .catalogue import Catalogue, SegmentRow
from .digest import block_digests
from .engines import Engine
from .files import allocate, fsync, lock_beside, publish_name, write_all
from .format import SegmentHeader, encode_head, lay_out
from .segment import SegmentReader, read_head

logger = logging.getLogger("hf_tiered_cache")

SUFFIX = ".kv"
_OPEN_SEGMENTS = 256
_LOCK_SECONDS = 30.0
"""How long to wait for the store's lock, which nobody needs for more than a moment; once in vain, then no longer than
`_LOCK_SECONDS_AFTERWARDS` until it was had again."""
_LOCK_SECONDS_AFTERWARDS = 1.0
_LOCK_POLL_SECONDS = 0.005
_T = TypeVar("_T")
_Default = TypeVar("_Default")


class SegmentStore:
    """The segments under one folder, shared with any number of processes.

    Args:
        root: the folder; made, for its owner only, if missing.
        engine: reads blocks.
        verify: whether the checksum of every block is compared when it is read.
        limits: quota, watermarks and free-space floor.
        ttl: seconds a new segment lives, or None for ever.
        counters: where faults and traffic are counted.

    Raises:
        StoreError: `root` is not a folder and cannot become one.
    """

    def __init__(
        self, root: Path, *, engine: Engine, verify: bool, limits: quota.Limits, ttl: float | None, counters: Counters
    ) -> None:
        self.root = root
        self.segments_dir, self.tmp_dir, self.pins_dir = root / "segments", root / "tmp", root / "pins"
        self._lock_path = root / "lock"
        self.engine = engine
        self.verify_reads = verify
        self.limits = limits
        self.ttl = ttl
        self.counters = counters
        self._readers: OrderedDict[str, SegmentReader] = OrderedDict()
        self._lock = threading.RLock()
        self._unsynced: list[Path] = []
        self._hidden: set[str] = set()  # segments whose file failed to read in this process
        self.unlisted: list[Path] = []
        """Files among the segments that are none: damaged, or of a newer format."""
        self._warned: set[str] = set()
        self._lock_seconds = _LOCK_SECONDS
        self.writable = self._make_folders()
        self.catalogue = self._open_catalogue()
        self.scan()

    # --- opening

    def _make_folders(self) -> bool:
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is a file; give KVStore the path of a folder")
        try:
            for folder in (self.root, self.segments_dir, self.tmp_dir, self.pins_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            return True
        except OSError as error:
            if not self.root.is_dir():
                raise StoreError(f"{self.root} cannot be made ({error.strerror}); choose another folder") from error
            self.warn("unwritable", f"{self.root} cannot be written ({error.strerror}): nothing new is stored")
            return False

    def _open_catalogue(self) -> Catalogue:
        if self.writable:
            try:
                return Catalogue(self.root / "catalogue.sqlite")
            except (sqlite3.Error, OSError) as error:
                self.counters.add("catalogue_errors")
                self.warn("catalogue", f"the catalogue cannot be opened ({error}); this process keeps one in memory")
        return Catalogue(None)

    def scan(self) -> None:
        """Bring the catalogue in line with the files: read headers it lacks, drop rows whose file is gone."""
        known: set[str] = self.ask(Catalogue.ids, set())
        present = {path.stem: path for path in self.segment_files()}
        self.ask(lambda c: c.remove(known - present.keys()), None)
        strangers = [present[i] for i in present.keys() - known]
        self.unlisted = [path for path in strangers if not self._adopt(path)]

    def segment_files(self) -> Iterator[Path]:
        with suppress(OSError):
            for entry in os.scandir(self.segments_dir):
                if entry.name.endswith(SUFFIX):
                    yield Path(entry.path)

    def _adopt(self, path: Path) -> bool:
        """Enter a file that the catalogue does not know. Returns whether it is a segment we can read."""
        try:
            header, chain, _, nbytes = read_head(path)
            if header.id != path.stem:
                raise FormatError(f"{path.name} calls itself {header.id}")
        except NewerFormatError as error:
            self.counters.add("newer_files")
            self.warn("newer", f"{path.name}: {error}")
        except FormatError as error:
            self.counters.add("damaged_files")
            self.warn("damaged", f"{path.name} is no whole segment ({error}); `hf-tiered-cache gc` removes it")
        except OSError as error:
            self.counters.add("read_errors")
            self.warn("unreadable", f"{path.name} cannot be read ({error.strerror})")
        else:
            self.ask(lambda c: c.add(SegmentRow.of(header, chain, nbytes), header.model), None)
            return True
        return False

    # --- finding and reading

    def find(self, links: Sequence[bytes]) -> list[SegmentRow]:
        """The live segments whose chain begins with one of `links`; none if the catalogue fails."""
        return [row for row in self.ask(lambda c: c.beginning_with(links), []) if row.id not in self._hidden]

    def reader(self, segment_id: str) -> SegmentReader | None:
        """An open segment, or None (counted, and forgotten) if its file is gone or damaged."""
        with self._lock:
            reader = self._readers.get(segment_id)
            if reader is not None:
                self._readers.move_to_end(segment_id)
                return reader
        try:
            reader = SegmentReader(self.path(segment_id), self.engine, self.verify_reads)
            if reader.id != segment_id:
                raise FormatError(f"{segment_id} calls itself {reader.id}")
        except (FormatError, OSError) as error:
            self.report(segment_id, error)
            return None
        with self._lock:
            self._readers[segment_id] = reader
            while len(self._readers) > _OPEN_SEGMENTS:
                self._readers.popitem(last=False)
        return reader

    def report(self, segment_id: str, error: BaseException) -> None:
        """Note that a segment could not be used: from now on only what stands before the fault is offered.

        One without a whole beginning is deleted, so that it can be stored anew. A read error may pass, so it hides
        the segment from this process alone.
        """
        damaged = isinstance(error, IntegrityError | FormatError) and not isinstance(error, NewerFormatError)
        whole_links = error.whole_links if isinstance(error, IntegrityError) else 0
        newer = isinstance(error, NewerFormatError)
        self.counters.add("newer_files" if newer else "verification_failures" if damaged else "read_errors")
        self.warn(segment_id, f"segment {segment_id} cannot be used: {error}; its tokens are computed again")
        with self._lock:
            self._readers.pop(segment_id, None)
        if whole_links:
            self.ask(lambda c: c.limit(segment_id, whole_links), None)
        elif isinstance(error, FileNotFoundError):
            self.ask(lambda c: c.remove([segment_id]), None)
        else:
            self._hidden.add(segment_id)
            if damaged and self.writable:
                with suppress(OSError):  # a disk that has become read-only
                    self.remove([segment_id])
                    self._hidden.discard(segment_id)

    def touch(self, ids: Iterable[str]) -> None:
        """Note a use of these segments, for LRU eviction."""
        self.ask(lambda c: c.touch(ids), None)

    def path(self, segment_id: str) -> Path:
        return self.segments_dir / f"{segment_id}{SUFFIX}"

    # --- writing

    def publish(
        self, header: SegmentHeader, links: list[bytes], lanes: Iterable[torch.Tensor], ancestors: Iterable[str] = ()
    ) -> bool:
        """Write a segment and make it visible, whole or not at all.

        Args:
            header: without its sections.
            links: its links of the hash chain.
            lanes: for each lane its blocks, uint8 `[chunks, block_bytes]` on the CPU.
            ancestors: segments it continues; counted as used with it, so that they are not evicted before it.

        Returns:
            Whether the segment is in the store now. A full disk, the quota, an unwritable folder or a lock that is not
            to be had drop the write: counted, and said once.
        """
        header = lay_out(header, len(links))
        if not self.writable:
            self.counters.add("dropped_writes")
            return False
        try:
            self._write(header, links, lanes)
        except FileExistsError:
            self.counters.add("duplicate_writes")
            if self.ask(lambda c: c.get(header.id), None) is None:
                self._adopt(self.path(header.id))
        except (OSError, QuotaError, StoreBusyError) as error:
            self.counters.add("dropped_writes")
            self.warn(type(error).__name__, f"a segment of {header.file_bytes} bytes was not stored: {error}")
            return False
        self.touch([*ancestors, header.id])
        return True

    def _write(self, header: SegmentHeader, links: list[bytes], lanes: Iterable[torch.Tensor]) -> None:
        """Write to a temporary file and give it its name; raises FileExistsError where another was first."""
        final = self.path(header.id)
        self._make_way(final)
        with self._reserved(header.file_bytes) as (fd, tmp):
            digests = []
            offset = header.blocks.offset
            for blocks in lanes:
                digests.append(block_digests(blocks))
                write_all(fd, blocks.numpy().data.cast("B"), offset)
                offset += blocks.numel()
            write_all(fd, memoryview(encode_head(header, links, np.concatenate(digests))), 0)
            row = SegmentRow.of(header, b"".join(links), os.fstat(fd).st_blocks * 512)
            publish_name(tmp, final)
            # before the temporary name goes, so that its room stays reckoned
            self.ask(lambda c: c.add(row, header.model), None)
        self.counters.add("segments_written")
        self.counters.add("bytes_written", row.nbytes)
        with self._lock:
            self._unsynced.append(final)

    def _make_way(self, final: Path) -> None:
        """Raise FileExistsError for a segment that serves; one that is damaged, expired or failing makes way."""
        segment_id = final.stem
        try:
            expires = read_head(final)[0].expires
            if segment_id not in self._hidden and (expires is None or expires > time.time()):
                raise FileExistsError(final)
        except (FileExistsError, NewerFormatError):
            raise FileExistsError(final) from None
        except FileNotFoundError:
            return
        except (FormatError, OSError):
            pass
        final.unlink(missing_ok=True)  # not `remove`: a pin on it stays
        self.ask(lambda c: c.remove([segment_id]), None)
        with self._lock:
            self._readers.pop(segment_id, None)
            self._hidden.discard(segment_id)

    @contextmanager
    def _reserved(self, nbytes: int) -> Iterator[tuple[int, Path]]:
        """A temporary file of `nbytes`, its room taken from the quota and from the disk before a byte is written.

        The lock beside it is held while it is written: a file whose lock can be had belongs to a process that has died.
        """
        tmp = self.tmp_dir / f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        lock = lock_beside(tmp)
        with ExitStack() as stack:
            with self.locked():
                quota.make_room(self, nbytes)
                stack.callback(Path(lock.lock_file).unlink, missing_ok=True)
                stack.enter_context(lock.acquire(timeout=0))
                fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                stack.callback(tmp.unlink, missing_ok=True)
                allocate(fd, nbytes)
            yield fd, tmp

    def sync(self) -> None:
        """Make what was published durable: data first, then the names."""
        with self._lock:
            paths, self._unsynced = self._unsynced, []
        done = 0
        try:
            for path in paths:
                with suppress(FileNotFoundError):  # evicted meanwhile
                    fsync(path, data_only=True)
                done += 1
            if paths:
                fsync(self.segments_dir)
        except OSError as error:
            with self._lock:
                self._unsynced[:0] = paths[done:] or paths[-1:]  # the folder's own is asked for with any file's
            raise StoreError(
                f"{self.root} cannot be made durable ({error.strerror}); check the disk and call flush() again"
            ) from error

    # --- forgetting

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments. Returns how many files there were."""
        ids, removed = list(ids), 0
        for segment_id in ids:
            with suppress(FileNotFoundError):
                self.path(segment_id).unlink()
                removed += 1
            (self.pins_dir / segment_id).unlink(missing_ok=True)
            with self._lock:
                self._readers.pop(segment_id, None)
        self.ask(lambda c: c.remove(ids), None)
        return removed

    def pin(self, ids: Iterable[str], pinned: bool = True) -> None:
        """Keep segments from eviction, or let them go again. A pin is a file, so it outlives the catalogue."""
        for segment_id in ids:
            pin = self.pins_dir / segment_id
            if pinned:
                pin.touch(mode=0o600)
            else:
                pin.unlink(missing_ok=True)

    def forget_lost_readers(self) -> None:
        """Let go of segments that another process has deleted: an open file keeps its room on the disk."""
        with self._lock:
            for segment_id in [i for i in self._readers if not self.path(i).exists()]:
                del self._readers[segment_id]

    def pinned(self) -> set[str]:
        with suppress(OSError):
            return set(os.listdir(self.pins_dir))
        return set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among processes and threads: while room is reckoned and made.

        Raises:
            StoreBusyError: another has had the lock all the time that this one waited for it.
        """
        lock = FileLock(self._lock_path, mode=0o600)
        try:
            lock.acquire(timeout=self._lock_seconds, poll_interval=_LOCK_POLL_SECONDS)
        except Timeout:
            waited, self._lock_seconds = self._lock_seconds, _LOCK_SECONDS_AFTERWARDS
            raise StoreBusyError(
                f"{self._lock_path} was not free within {waited:g} s; end the process that hangs with this store open"
            ) from None
        self._lock_seconds = _LOCK_SECONDS
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        with self._lock:
            self._readers.clear()
        self.catalogue.close()

    # --- faults

    def ask(self, action: Callable[[Catalogue], _T], default: _Default) -> _T | _Default:
        """Run `action` on the catalogue; if the database fails, rebuild it once, then do without."""
        try:
            return action(self.catalogue)
        except sqlite3.OperationalError as error:  # locked, full, read-only: may pass
            self.counters.add("catalogue_errors")
            self.warn("catalogue", f"the catalogue failed ({error})")
        except sqlite3.DatabaseError as error:
            self.counters.add("catalogue_errors")
            self.warn("catalogue", f"the catalogue is damaged ({error}); rebuilding it")
            with suppress(sqlite3.Error):
                self.catalogue.close()
            self.catalogue = self._open_catalogue()
            self.scan()
            with suppress(sqlite3.Error):
                return action(self.catalogue)
        return default

    def warn(self, topic: str, message: str) -> None:
        """Say it the first time; later occurrences are only counted."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s", message)
