"""The folder of segments: publish, find, open, forget. Faults of the disk end here as counted misses.

<store>/segments/<id>.kv   immutable segment files        <store>/pins/<id>       segments never to evict
<store>/tmp/               files being written            <store>/catalogue.sqlite  rebuilt from headers if lost
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout

from ..errors import (
    FormatError,
    IntegrityError,
    NotOursError,
    OtherKeyError,
    QuotaError,
    RestoreError,
    StoreBusyError,
    StoreError,
)
from ..stats import Counters
from . import quota
from .catalogue import Catalogue, SegmentRow
from .cipher import Plain
from .digest import Guard, content_of
from .engines import Engine
from .files import (
    allocate,
    fsync,
    is_of_the_process,
    lock_beside,
    open_file,
    out_of_descriptors,
    publish_name,
    write_all,
)
from .folder import Folder
from .format import SegmentHeader, encode_head, lay_out
from .process import OpenSegments
from .segment import SegmentReader, is_there, read_head

_LOCK_SECONDS = 30.0
"""How long to wait for the store's lock, which nobody needs for more than a moment; once in vain, then no longer than
`_LOCK_SECONDS_AFTERWARDS` until it was had again."""
_LOCK_SECONDS_AFTERWARDS = 1.0
_LOCK_POLL_SECONDS = 0.005
_HIDDEN_SECONDS = 60.0
"""How long a segment that failed to be read is left alone."""
_MOST_UNSYNCED = 1000
Written = Callable[[int, torch.Tensor, int], None]
"""Told of a lane that was written: its number, its blocks, and the content that `SegmentReader.owner` will name."""


class SegmentStore(Folder):
    """The segments under one folder, shared with any number of processes.

    Args:
        root: the folder; made, for its owner only, if missing.
        engine: reads blocks.
        verify: whether the checksum of every block is compared when it is read.
        limits: quota, watermarks and free-space floor.
        ttl: seconds a new segment lives, or None for ever.
        counters: where faults and traffic are counted.
        cipher: what blocks are encrypted with, if they are. Files of another key, or of none, are left alone.

    Raises:
        StoreError: `root` is not a folder and cannot become one.
    """

    def __init__(
        self,
        root: Path,
        *,
        engine: Engine,
        verify: bool,
        limits: quota.Limits,
        ttl: float | None,
        counters: Counters,
        cipher: Plain | None = None,
    ) -> None:
        super().__init__(root, counters)
        self.engine = engine
        self.verify_reads = verify
        self.limits = limits
        self.ttl = ttl
        self.cipher = cipher or Plain()
        self.readers = OpenSegments()
        self.on_gone: list[Callable[[Collection[str]], None]] = []
        """Told of segments whose file is gone, or another one now."""
        self._lock = threading.RLock()
        self._unsynced: dict[Path, None] = {}
        self._hidden: dict[str, float] = {}  # segments that failed in this process, and until when they are left alone
        self._lock_seconds = _LOCK_SECONDS
        self._keys = set(self.ask(Catalogue.keys, ())) - {""}  # of what was there when it was opened

    # --- finding and reading

    def find(self, links: Sequence[bytes]) -> list[SegmentRow]:
        """The live segments whose chain begins with one of `links`; none if the catalogue fails."""
        return [row for row in self.ask(lambda c: c.beginning_with(links), []) if not self._is_hidden(row.id)]

    def _is_hidden(self, segment_id: str) -> bool:
        return self._hidden.get(segment_id, 0.0) > time.monotonic()

    def reader(self, segment_id: str) -> SegmentReader | None:
        """An open segment, or None (counted, and reported) if its file cannot be used."""
        reader = self.readers.get(segment_id)
        if reader is not None and not reader.is_at(self.path(segment_id)):
            self.let_go([segment_id])
            reader = None
        if reader is None:
            try:
                reader = self._open(segment_id)
            except (FormatError, OSError, MemoryError) as error:
                self.report(segment_id, error)
                return None
            self.readers.keep(reader)
        return reader

    def found(self, row: SegmentRow) -> SegmentReader | None:
        """The segment that a row stands for, opened, or None (counted) if it cannot be used, or is another.

        Of the two only the file is believed: a row that says otherwise would have other tokens' KV served.
        """
        reader = self.reader(row.id)
        if reader is None or row.fits(reader.header, reader.chain):
            return reader
        self.counters.add("catalogue_errors")
        self.warn("row", f"the catalogue says of segment {row.id} what its file does not; it is entered anew")
        self._adopt([self.path(row.id)])
        return None

    def _open(self, segment_id: str) -> SegmentReader:
        try:
            reader = SegmentReader(self.path(segment_id), self.engine, self.verify_reads, self.cipher)
        except OSError as error:
            if not out_of_descriptors(error):
                raise
            self.readers.close_others()
            reader = SegmentReader(self.path(segment_id), self.engine, self.verify_reads, self.cipher)
        if reader.id != segment_id:
            raise FormatError(f"{segment_id} calls itself {reader.id}")
        return reader

    def report(self, segment_id: str, error: BaseException) -> None:
        """Note that a segment could not be used: from now on only what stands before the fault is offered.

        One that was read and found without a whole beginning is deleted, so that it can be stored anew. A read error
        may pass, so it hides the segment from this process alone, and for a while. What is no fault of the file has no
        consequence for it.
        """
        if not isinstance(error, OSError | FormatError | IntegrityError | RestoreError):
            self.warn(f"{type(error).__name__} {error}", f"segment {segment_id} was not restored: {error!r}")
            return
        damaged = isinstance(error, IntegrityError | FormatError) and not isinstance(error, NotOursError)
        not_ours = "other_key_files" if isinstance(error, OtherKeyError) else "newer_files"
        fault = "verification_failures" if damaged else "read_errors"
        self.counters.add(not_ours if isinstance(error, NotOursError) else fault)
        self.warn(segment_id, f"segment {segment_id} cannot be used: {error}; its tokens are computed again")
        self.readers.drop(segment_id)
        if damaged:
            self._judge(segment_id, error)
        elif isinstance(error, FileNotFoundError):
            if self.segments_dir.is_dir():
                self.let_go([segment_id])
                self.ask(lambda c: c.remove([segment_id]), None)
        elif not is_of_the_process(error):
            self._hidden[segment_id] = time.monotonic() + _HIDDEN_SECONDS if isinstance(error, OSError) else inf

    def _judge(self, segment_id: str, error: BaseException) -> None:
        """Limit or delete a damaged segment, unless another process has put a whole one in its place."""
        whole_links = error.whole_links if isinstance(error, IntegrityError) else 0
        try:
            if not self._is_damaged(segment_id, error):
                return
            if whole_links:
                self.ask(lambda c: c.limit(segment_id, whole_links), None)
                return
            self._hidden[segment_id] = inf
            if self.writable:
                self.remove([segment_id])
                self._hidden.pop(segment_id, None)
        except OSError:  # a disk that has become read-only, or no descriptor is left to look
            self._hidden.setdefault(segment_id, time.monotonic() + _HIDDEN_SECONDS)

    def _is_damaged(self, segment_id: str, error: BaseException) -> bool:
        """Whether the file that is there now is the one that was found wrong."""
        if isinstance(error, IntegrityError):
            return error.file is None or is_there(self.path(segment_id), error.file)
        try:
            return read_head(self.path(segment_id), self.cipher).header.id != segment_id
        except NotOursError:
            return False
        except FormatError:
            return True

    def other_key(self) -> str | None:
        """The key that all encrypted segments here are of, if this store has a key and it is not theirs."""
        others = self._keys - {self.cipher.key_id}
        return min(others) if self.cipher.key_id and others == self._keys != set() else None

    def touch(self, ids: Iterable[str]) -> None:
        """Note a use of these segments, for LRU eviction."""
        self.ask(lambda c: c.touch(ids), None)
        self.catch_up()

    # --- writing

    def publish(
        self,
        header: SegmentHeader,
        links: list[bytes],
        lanes: Iterable[torch.Tensor],
        ancestors: Iterable[str] = (),
        written: Written = lambda lane, blocks, content: None,
    ) -> bool:
        """Write a segment and make it visible, whole or not at all.

        Args:
            header: without its sections.
            links: its links of the hash chain.
            lanes: for each lane its blocks, uint8 `[chunks, block_bytes]` on the CPU.
            ancestors: segments it continues; counted as used with it, so that they are not evicted before it.
            written: is told of each lane. The file may still come to nothing.

        Returns:
            Whether the segment is in the store now. A full disk, the quota, an unwritable folder or a lock that is not
            to be had drop the write: counted, and said once.
        """
        header = lay_out(replace(header, seal=self.cipher.new_seal()), len(links))
        if not self.writable:
            self.counters.add("dropped_writes")
            return False
        self.catch_up()
        self._warn_of_a_mixture()
        try:
            self._write(header, links, lanes, written)
        except FileExistsError:
            self.counters.add("duplicate_writes")
            if self.ask(lambda c: c.get(header.id), None) is None:
                self._adopt([self.path(header.id)])
        except (OSError, QuotaError, StoreBusyError) as error:
            self.counters.add("dropped_writes")
            self.warn(type(error).__name__, f"a segment of {header.file_bytes} bytes was not stored: {error}")
            if out_of_descriptors(error):
                self.readers.close_others()  # so that the next one is
            return False
        self.touch([*ancestors, header.id])
        if len(self._unsynced) >= _MOST_UNSYNCED:
            with suppress(StoreError):
                self.sync()
        return True

    def _warn_of_a_mixture(self) -> None:
        if not self.cipher.key_id and self._keys:
            self.warn(
                "mixture",
                f"{self.root} was opened without a key: what is stored there now is not encrypted, as others are",
            )

    def _write(
        self, header: SegmentHeader, links: list[bytes], lanes: Iterable[torch.Tensor], written: Written
    ) -> None:
        """Write to a temporary file and give it its name; raises FileExistsError where another was first."""
        final, guard = self.path(header.id), self.cipher.guard(header.seal)
        replaces = self._makes_way(final)
        if not self.shares_catalogue():
            raise StoreBusyError("the catalogue cannot be opened, so nobody would find it")
        with self._reserved(header.file_bytes) as (fd, tmp):
            digests = []
            offset = header.blocks.offset
            for lane, blocks in enumerate(lanes):
                digests.append(_write_lane(fd, offset, guard, lane * header.shape.chunks, blocks))
                written(lane, blocks, content_of(digests[-1]))
                offset += blocks.numel()
            write_all(fd, memoryview(encode_head(header, links, np.concatenate(digests), guard)), 0)
            row = SegmentRow.of(header, b"".join(links), os.fstat(fd).st_blocks * 512)
            # before the temporary name goes, so that its room stays reckoned
            self._publish(header, row, tmp, replaces)
        self.counters.add("segments_written")
        self.counters.add("bytes_written", row.nbytes)
        if replaces:
            self.let_go([header.id])
        with self._lock:
            self._hidden.pop(header.id, None)
            self._unsynced[final] = None

    def _publish(self, header: SegmentHeader, row: SegmentRow, tmp: Path, replaces: bool) -> None:
        """Name and row at once. A file that nobody could be told of is none."""
        final, done = self.path(header.id), False

        def publish() -> None:
            nonlocal done
            if not done:  # it may be asked again, of a catalogue that has taken the place of the first
                publish_name(tmp, final, replaces)
                done = True

        def enter(catalogue: Catalogue) -> bool:
            catalogue.add(row, header.model, publish)
            return True

        told = False
        try:
            told = self.ask(enter, False)
        finally:  # a Ctrl-C comes before a row is entered, or behind it
            if done and not told and not replaces and self.ask(lambda c: c.get(header.id), None) is None:
                final.unlink(missing_ok=True)
        if not told:
            raise StoreBusyError("the catalogue cannot be told of it; end the process that keeps it locked")

    def _makes_way(self, final: Path) -> bool:
        """Whether what stands at `final` is damaged, expired or failing. Raises FileExistsError where it serves."""
        known = self.ask(lambda c: c.get(final.stem), None)
        try:
            header = read_head(final, self.cipher).header
        except FileNotFoundError:
            return False
        except NotOursError:
            raise FileExistsError(final) from None
        except FormatError:
            return True
        except OSError:
            if self._is_hidden(final.stem):
                return True
            raise
        expires = header.expires if known is None else known.expires  # a clock that was ahead is set right there
        if self._is_hidden(final.stem) or (known is not None and not known.usable_links):
            return True
        if expires is not None and expires <= time.time():
            return True
        raise FileExistsError(final)

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
                stack.callback(_forget, Path(lock.lock_file))
                stack.enter_context(lock.acquire(timeout=0))
                fd = stack.enter_context(open_file(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL)).fileno()
                stack.callback(_forget, tmp)
                allocate(fd, nbytes)
            yield fd, tmp

    def sync(self) -> None:
        """Make what was published durable: data first, then the names."""
        with self._lock:
            paths, self._unsynced = list(self._unsynced), {}
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
                # the folder's own is asked for with any file's
                self._unsynced = dict.fromkeys(paths[done:] or paths[-1:]) | self._unsynced
            raise StoreError(
                f"{self.root} cannot be made durable ({error.strerror}); check the disk and call flush() again"
            ) from error

    # --- forgetting

    def remove(self, ids: Iterable[str]) -> int:
        """Delete segments. Returns how many files there were. Raises OSError where one could not be deleted."""
        gone, removed, failed = [], 0, None
        for segment_id in ids:
            try:
                with suppress(FileNotFoundError):
                    self.path(segment_id).unlink()
                    removed += 1
                gone.append(segment_id)
                (self.pins_dir / segment_id).unlink(missing_ok=True)
            except OSError as error:
                failed = error
            with self._lock:
                self._unsynced.pop(self.path(segment_id), None)
        self.let_go(gone)
        self.ask(lambda c: c.remove(gone), None)
        if failed is not None:
            raise failed
        return removed

    def let_go(self, ids: Collection[str]) -> None:
        """The files of these segments are gone, or others: so is what this process has of them."""
        for segment_id in ids:
            if (reader := self.readers.get(segment_id)) is not None:
                reader.gone = True
                self.readers.drop(segment_id)
        for tell in self.on_gone:
            tell(ids)

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
        opened = [(segment_id, self.readers.get(segment_id)) for segment_id in self.readers]
        lost = [name for name, reader in opened if reader is not None and not reader.is_at(self.path(name))]
        if lost:
            self.let_go(lost)

    def pinned(self) -> set[str]:
        """Which segments are pinned. Raises OSError: what cannot be listed is not to be taken for none."""
        try:
            return set(os.listdir(self.pins_dir))
        except FileNotFoundError:
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
        self.readers.clear()
        self.catalogue.close()


def _write_lane(fd: int, offset: int, guard: Guard, first: int, blocks: torch.Tensor) -> np.ndarray:
    """Write a lane's blocks, numbered from `first` on, and return their digests."""
    digests = []
    for piece, table in guard.seal(first, blocks):
        write_all(fd, piece.numpy().data.cast("B"), offset)
        offset += piece.numel()
        digests.append(table)
    return np.concatenate(digests)


def _forget(path: Path) -> None:
    """Delete a temporary file, or leave it to the next who cleans up."""
    with suppress(OSError):
        path.unlink()
