"""The remote tier: brings segments of a prompt from other machines to the local disk, before the prompt is matched.

A segment that is fetched is published as one of the local store, with the same checks as any other. Everything else,
such as quota, tiers and GPUDirect Storage, sees a local segment.

A remote never fails a request, and delays it by no more than it can save: a prompt waits for the remote as long as
computing the tokens takes, and for a lookup a fifth of that. After half of this time, or, once the bandwidth is known,
a few times as long as a fetch should take, it waits only while the fetch keeps a pace at which it will be in time. What
comes too late is there for the next prompt.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import cache, partial

from ..errors import FormatError, IntegrityError, NotOursError
from ..restore.hashes import MatchedRun, longest_prefix
from ..stats import RemoteStats
from ..store import hashes_of
from ..store.catalogue import SegmentRow
from ..store.container import Group, PackedBlocks
from ..store.disk import SegmentStore, Written
from ..store.geometry import HASH_TOKENS, BlockGroup
from ..store.lazy import torch
from ..store.objects import ObjectBackend
from ..store.segment import SegmentReader
from ..store.shape import SegmentShape
from ..store.threads import DaemonPool
from .entries import Entry, beginning_of, delete_entry, entry_names
from .link import FAILED, LATE, UNAVAILABLE, Breaker, Link, LookUps
from .write_back import WriteBack

_LOOK_UP_SHARE = 0.2  # share of the time to compute the missing tokens that a lookup may take
_UNKNOWN_SECONDS = 5.0
"""Seconds that computing is assumed to take before any prompt was computed here, or costs were calibrated."""
_PLANS = 3
"""Number of attempts to find segments for a prompt: those that turn out to be gone are left out of the next one."""
_HIDDEN_SECONDS = 60.0  # seconds for which a segment that could not be fetched is not tried again
_MOST_SECONDS = 600.0  # maximum number of seconds that a prompt waits for the remote
_MOST_MISSED = 1024  # number of prompts for which it is kept why nothing was fetched
_FETCHES = 4  # number of segments that are fetched at a time
_TRIAL_SHARE = 0.5
"""Share of the time to compute the missing tokens after which a fetch of unknown bandwidth is judged by its pace."""
_LEAST_WAIT = 0.25
"""Seconds that a prompt waits for a fetch in any case, if computing takes longer: those of round trips and checks. Also
the seconds between two judgments of its pace."""
_CLOSE_SECONDS = 5.0

ABSENT = "not in the remote"
SLOW_FETCH = "fetching is slower than computing"
UNUSABLE = "the segment was damaged, gone, or could not be stored here"

Seconds = Callable[[int], float | None]
"""Function that returns the seconds to compute a prompt of so many tokens, or None if nothing is known."""


class _FetchError(Exception):
    """Failure to read a segment of the remote. It is no error of the local store that the segment is written to."""


class RemoteTier:
    """Tier of a store that several machines share: the place `remote`, which is closed with this object.

    `write` is one of `WRITES`. `admit` receives what is fetched, for the memory tiers.
    """

    def __init__(self, remote: ObjectBackend, disk: SegmentStore, write: str, admit: Written) -> None:
        self.remote, self.place, self._disk, self._admit = remote, remote.place, disk, admit
        self.link = Link()
        self.fetch_breaker = Breaker()  # not that of lookups: small objects may arrive while large ones hang
        self._stats = RemoteStats()
        self._lock = threading.Lock()
        # by segment id and number of prefix hashes, with the bytes
        self._fetching: dict[tuple[str, int], tuple[Future[str], int]] = {}
        self._hidden: dict[str, float] = {}
        self._missed: OrderedDict[bytes, str] = OrderedDict()  # by last prefix hash of the prompt
        self.look_ups = LookUps(remote, partial(self._fail, "lookup"))
        self._fetches = DaemonPool(_FETCHES, "hf-tiered-fetch")
        remote.writable &= write != "never"  # a store that only reads it leaves what is in it to others
        self.writes = WriteBack(remote, disk, write, self._count, self.look_ups.forget)
        disk.on_kept.append(self.writes.offer)

    # --- before a prompt is matched

    def fetch_for_prompt(
        self, prefix_hashes: Sequence[bytes], rows: Sequence[SegmentRow], start: int, seconds: Seconds
    ) -> bool:
        """Fetch segments that continue what the local store has of a prompt. Returns whether it has more of it now.

        `rows` are the local segments that `SegmentStore.find` returns, `start` is the index of the first prefix hash to
        match, and `seconds` returns the time to compute a prompt.
        """
        start_time, runs = time.monotonic(), longest_prefix(prefix_hashes, rows, start)
        stop = runs[-1].stop if runs else start
        if stop >= len(prefix_hashes) or not self._disk.backend.writable:
            return False
        saved_seconds = partial(_saved, cache(seconds), stop)
        names = [prefix_hash.hex() for prefix_hash in prefix_hashes]
        entries = self.look_ups.find(names, _LOOK_UP_SHARE * saved_seconds(len(prefix_hashes)))
        if isinstance(entries, str):
            reasons = [entries]
        else:
            fetch_runs = partial(self._fetch_runs, prefix_hashes, rows, entries, start, saved_seconds, start_time)
            reasons = [fetch_runs()]
            while reasons[-1] == UNUSABLE and len(reasons) < _PLANS:
                reasons.append(fetch_runs())
        reason = reasons[-1] and reasons[0]
        self._count(lookups=1, hits=not reason, waiting_seconds=time.monotonic() - start_time)
        with self._lock:
            self._missed.pop(prefix_hashes[-1], None)
            if reason:
                self._stats.misses[reason] = self._stats.misses.get(reason, 0) + 1
                self._missed[prefix_hashes[-1]] = reason
            if len(self._missed) > _MOST_MISSED:
                self._missed.popitem(last=False)
        return not reason

    def why_missed(self, prefix_hashes: Sequence[bytes]) -> str:
        """Return why the last lookup of a prompt fetched nothing; "" if it was not looked up, or long ago."""
        return self._missed.get(prefix_hashes[-1], "") if prefix_hashes else ""

    def _fetch_runs(
        self,
        prefix_hashes: Sequence[bytes],
        rows: Sequence[SegmentRow],
        entries: Sequence[Entry],
        start: int,
        saved_seconds: Callable[[int], float],
        start_time: float,
    ) -> str:
        """Fetch the segments that continue a prompt furthest, and return the reason if none was fetched, or "".

        For arguments see `fetch_for_prompt`. `saved_seconds` returns the seconds saved if so many prefix hashes are
        stored. The prompt waits since `start_time`.
        """
        local, now = {row.id for row in rows}, time.monotonic()
        missing_rows = [entry.row for entry in entries if entry.row.id not in local]
        usable = [row for row in missing_rows if self._hidden.get(row.id, 0.0) <= now]
        runs = longest_prefix(prefix_hashes, [*rows, *usable], start)
        if not {run.row.id for run in runs} - local:
            return ABSENT if len(usable) == len(missing_rows) else UNUSABLE
        if self.fetch_breaker.is_open:
            if self.fetch_breaker.wants_probe():
                self._fetch(next(run for run in runs if run.row.id not in local))  # nothing waits for it
            return UNAVAILABLE
        waiting: list[tuple[SegmentRow, Future[str]]] = []
        nbytes, stop = 0, 0
        for run in runs:  # in order: a later one is of no use without those before it
            if run.row.id not in local:
                nbytes += _nbytes(run)
                if self.link.fetch_seconds(nbytes) >= saved_seconds(run.stop):
                    if not waiting and self.link.bandwidth.wants_measurement():
                        self._fetch(run)  # nothing waits for it
                    break
                waiting.append((run.row, self._fetch(run)))
                stop = run.stop
        if not waiting:
            return SLOW_FETCH
        deadline = start_time + saved_seconds(stop)
        if self.link.bandwidth.value is None:
            trial = start_time + max(_LEAST_WAIT, _TRIAL_SHARE * saved_seconds(stop))
        else:  # as many segments as there are threads share the bandwidth, and arrive unevenly
            in_flight = self.link.fetch_seconds(self._nbytes_in_flight())
            trial = time.monotonic() + _LEAST_WAIT + _FETCHES * in_flight
        is_in_time = self._pace(deadline)
        for fetched, (row, future) in enumerate(waiting):
            try:
                if _result(future, trial, deadline, is_in_time):
                    return "" if fetched else UNUSABLE
            except (FutureTimeoutError, CancelledError):
                self._hide(row.id)  # nobody else waits for it
                self._fail("fetch", self.fetch_breaker, f"{row.nbytes} bytes did not arrive in time")
                return "" if fetched else LATE
            except Exception as error:  # whatever a client library raises
                self._hide(row.id)
                self._fail("fetch", self.fetch_breaker, repr(error))
                return "" if fetched else FAILED
        return ""

    # --- fetching

    def _fetch(self, run: MatchedRun) -> Future[str]:
        """Fetch the beginning of a segment in the background, once for all prompts that wait for it."""
        row, key = run.row, (run.row.id, run.num_hashes)
        with self._lock:
            if key in self._fetching:
                return self._fetching[key][0]
            try:
                future = self._fetches.submit(self.fetch, row.id, row, run.num_hashes)
            except RuntimeError:  # the store is being closed
                future = Future()
                future.cancel()
            self._fetching[key] = future, _nbytes(run)
            future.add_done_callback(lambda _: self._fetching.pop(key, None))
            return future

    def _nbytes_in_flight(self) -> int:
        with self._lock:
            return sum(nbytes for _, nbytes in list(self._fetching.values()))

    def _pace(self, deadline: float) -> Callable[[], bool]:
        """Return a function that tells whether all that is being fetched now will be here in time, at its pace."""
        start_time, before, nbytes = time.monotonic(), self.remote.bytes_read, self._nbytes_in_flight()

        def is_in_time() -> bool:
            now, arrived = time.monotonic(), self.remote.bytes_read - before
            return arrived > 0 and now + (now - start_time) * max(0, nbytes - arrived) / arrived < deadline

        return is_in_time

    def fetch(self, segment_id: str, row: SegmentRow | None = None, num_hashes: int | None = None) -> str:
        """Store a segment of the remote, or its first `num_hashes`, here. Returns the reason if that fails, or ""."""
        for is_last in (False, True):  # it may be replaced during the first attempt
            try:
                if self._publish(segment_id, row, num_hashes):
                    return ""
                reason = "there is no room for it, or it cannot be written"
                break
            except (FormatError, IntegrityError, OSError) as error:
                reason = str(error)
                if is_last:
                    self._judge(segment_id, row, error)
        self._hide(segment_id)
        return reason

    def _hide(self, segment_id: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._hidden = {name: until for name, until in self._hidden.items() if until > now}
            self._hidden[segment_id] = now + _HIDDEN_SECONDS

    def _publish(self, segment_id: str, row: SegmentRow | None, num_hashes: int | None) -> bool:
        """Read and verify a segment of the remote, and store it here. Raises FormatError, IntegrityError or OSError."""
        start_time = time.monotonic()
        with self.link.fetching() as note_bytes:
            reader = SegmentReader(self.remote, segment_id, True, self._disk.cipher)
            if row is not None and not reader.chain.startswith(row.chain):
                raise FormatError(f"segment {segment_id} does not have the tokens of its entry")
            hashes = hashes_of(reader.chain)
            header = beginning_of(reader.header, hashes, num_hashes or len(hashes))
            hashes = hashes[: -(-header.shape.tokens // HASH_TOKENS)]
            is_whole = header is reader.header
            nbytes = header.file_bytes if is_whole else header.blocks.offset + header.shape.blocks_bytes
            try:
                groups = _groups(reader, header.shape)
                is_stored = self._disk.publish(header, hashes, groups, written=self._admit, is_new=False)
            except _FetchError as error:
                assert isinstance(error.__cause__, IntegrityError | OSError)
                raise error.__cause__ from None
            note_bytes(nbytes)
        self.fetch_breaker.succeeded()
        self._count(segments_read=1, bytes_read=nbytes, read_seconds=time.monotonic() - start_time)
        return is_stored

    def _judge(self, segment_id: str, row: SegmentRow | None, error: FormatError | IntegrityError | OSError) -> None:
        """Handle a segment that could not be fetched: delete what is damaged or leads to nothing."""
        names = [] if row is None else entry_names(row.chain)
        self.look_ups.forget(names)
        is_answer = not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
        is_damaged = isinstance(error, FormatError | IntegrityError) and not isinstance(error, NotOursError)
        if is_damaged:
            self._count(damaged=1)
            self._disk.warn("damaged remote", f"segment {segment_id} of {self.place} is damaged: {error}")
        if not is_answer:
            self._fail("fetch", self.fetch_breaker, error)
        else:
            self.fetch_breaker.succeeded()  # the remote answers
        if not self.remote.writable:
            return
        try:
            if is_damaged:
                self.remote.delete(segment_id)
            if is_damaged or isinstance(error, FileNotFoundError):
                for name in names:
                    delete_entry(self.remote, name, segment_id)
        except OSError as failure:
            self._fail("deletion", self.fetch_breaker, failure)

    # --- removal, and the end

    def remove(self, rows: Sequence[SegmentRow]) -> None:
        """Delete segments that the user has deleted here from the remote, in the background."""
        self.look_ups.forget([name for row in rows for name in entry_names(row.chain)])
        self.writes.remove(rows)

    def close(self) -> None:
        """Send what waits to be sent, and release the threads."""
        self.look_ups.close()
        self._fetches.close(_CLOSE_SECONDS)
        self.writes.close()
        self.remote.close()

    # --- figures

    def stats(self) -> RemoteStats:
        """Return the figures of the tier."""
        with self._lock:
            stats = replace(self._stats, misses=dict(self._stats.misses))
        stats.queued_writes = self.writes.queued
        stats.hedged_reads = sum(reads.hedged for reads in self.remote.hedges)
        stats.won_hedges = sum(reads.won for reads in self.remote.hedges)
        return stats

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def _fail(self, operation: str, breaker: Breaker, error: object) -> None:
        """Count a failure of the remote, and tell the breaker."""
        breaker.failed()
        self._count(errors=1)
        message = f"a {operation} of {self.remote.place} failed ({error}); prompts are computed"
        self._disk.warn(f"remote {operation}", message)


def _groups(reader: SegmentReader, shape: SegmentShape) -> Iterator[Group]:
    """Yield the first verified blocks of each KV cache group, and read the next ones meanwhile. Raises _FetchError."""

    def begin(group: BlockGroup) -> tuple[int, torch.Tensor, Future[int]]:
        blocks = shape.room_for(group)
        return group.index, blocks, reader.read(group.index, [(0, blocks)])

    try:
        reads = map(begin, shape.block_groups)
        next_read = next(reads, None)
        while next_read is not None:
            (number, blocks, future), next_read = next_read, next(reads, None)
            future.result()
            lin64 = reader.digests[number]["lin64"][: len(blocks)].view("<i8")
            yield blocks if reader.header.seal is not None else PackedBlocks(blocks, lin64)
    except (IntegrityError, OSError) as error:
        raise _FetchError from error


def _result(future: Future[str], trial: float, deadline: float, is_in_time: Callable[[], bool]) -> str:
    """Return the result of a fetch. Raises TimeoutError if it is too slow, after `trial` or at `deadline`."""
    until = trial
    while True:
        try:
            return future.result(max(0.0, min(until, deadline) - time.monotonic()))
        except FutureTimeoutError:
            if future.done() or not is_in_time():
                raise
        until = time.monotonic() + _LEAST_WAIT


def _nbytes(run: MatchedRun) -> int:
    """Return the number of bytes that are fetched for a run."""
    return run.row.nbytes * run.num_hashes // run.row.valid_hashes


def _saved(seconds: Seconds, start: int, num_hashes: int) -> float:
    """Return the seconds to compute the tokens of the prefix hashes from `start` to `num_hashes`."""
    total, before = seconds(num_hashes * HASH_TOKENS), seconds(start * HASH_TOKENS)
    return _UNKNOWN_SECONDS if total is None or before is None else min(max(0.0, total - before), _MOST_SECONDS)
