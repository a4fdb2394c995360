"""Link to a remote: look-up entries, its measured bandwidth, a circuit breaker, and look-ups of prompts.

An entry is the beginning of a segment, under some of its prefix hashes. A prompt is looked up by asking for the entries
of all its prefix hashes at once. An entry is a hint: the segment that it names is checked when it is read. Segments
themselves are stored under their ids, as in a folder.

A segment of n prefix hashes has entries under the first, second, fourth, eighth, ... and under the last one. Many
segments share their first tokens, such as a system prompt, and under a hash that they share only the longest of them
is found. Under its last hash each of them is found, and a prompt that diverges from a segment finds at least half of
what they share.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from ..errors import FormatError, NotOursError
from ..store import EXACT, HASH_BYTES, PASSAGE, hashes_of
from ..store.catalogue import SegmentRow
from ..store.format import HEADER_BYTES, SegmentHeader, decode_header, end_of_chain, is_passage, segment_id
from ..store.geometry import HASH_TOKENS
from ..store.kinds import SEGMENT_MAGIC, FileKind
from ..store.objects import ObjectBackend
from ..store.threads import DaemonPool

ENTRY = FileKind("prefixes", re.compile("[0-9a-f]{32}"), lambda _, beginning: beginning.startswith(SEGMENT_MAGIC))
"""Kind of the look-up entries. Their names are prefix hashes."""
_MOST_HASHES = 4096
"""Maximum number of prefix hashes of an entry: the first 65,536 tokens of a segment are found."""
ENTRY_BYTES = HEADER_BYTES + _MOST_HASHES * HASH_BYTES
_SWEPT = 256


@dataclass(frozen=True)
class Entry:
    """A segment in a remote, with `num_hashes` prefix hashes. The chain of `row` has at most `_MOST_HASHES` of them."""

    row: SegmentRow
    num_hashes: int


def is_found_by_prefix(provenance: str) -> bool:
    """Return whether prompts look up KV of this provenance by their prefix hashes."""
    return provenance.partition(" ")[0] == EXACT


def is_shared(header: SegmentHeader) -> bool:
    """Return whether other machines can use a segment: complete KV of a prompt, or a passage.

    What a method has compacted belongs to a conversation of this store, and may lack tokens.
    """
    return header.provenance.partition(" ")[0] in (EXACT, PASSAGE)


def encode_entry(beginning: bytes) -> bytes:
    """Return the entry of a segment, given the beginning of its file up to the blocks."""
    _, num_hashes = decode_header(beginning[:HEADER_BYTES])
    return beginning[: HEADER_BYTES + min(num_hashes, _MOST_HASHES) * HASH_BYTES]


def entry_names(chain: bytes) -> list[str]:
    """Return the names of a segment's entries, in the order of its tokens, from its prefix hashes, concatenated."""
    count = min(len(chain) // HASH_BYTES, _MOST_HASHES)
    counts = {1 << power for power in range(count.bit_length())} | {count}
    return [chain[(number - 1) * HASH_BYTES : number * HASH_BYTES].hex() for number in sorted(counts)]


def find_entries(remote: ObjectBackend, names: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of prefix hashes that exist and have not expired. Raises OSError."""
    entries = _read(remote, names)
    return {name: entry for name, entry in entries.items() if entry is not None and not entry.row.is_expired}


def delete_entry(remote: ObjectBackend, name: str, segment_id: str, chain: bytes | None = None) -> str:
    """Delete the entry of a prefix hash if it names a segment, or, given its `chain`, another one of the same tokens.

    The segment in the remote may have another geometry, and so another id. Returns the id that the entry named, or ""
    if it was not deleted. Raises OSError.
    """
    for entry in _read(remote, [name]).values():
        is_named = entry is None or entry.row.id == segment_id
        if entry is not None and chain is not None:
            is_named |= entry.num_hashes * HASH_BYTES == len(chain) and chain.startswith(entry.row.chain)
        if is_named:
            remote.records.delete(ENTRY, name)
            return segment_id if entry is None else entry.row.id
    return ""


def sweep_entries(remote: ObjectBackend, dry_run: bool = False) -> list[str]:
    """Delete the entries whose segments are gone, unless `dry_run`, and return their names. Raises OSError."""
    names = remote.records.names(ENTRY)
    ids = set(remote.names())  # listed last: a segment is stored before its entries
    dangling = []
    for start in range(0, len(names), _SWEPT):
        entries = _read(remote, names[start : start + _SWEPT])
        swept = [name for name, entry in entries.items() if entry is None or entry.row.id not in ids]
        for name in () if dry_run else swept:
            remote.records.delete(ENTRY, name)
        dangling += swept
    return dangling


def _read(remote: ObjectBackend, names: Sequence[str]) -> dict[str, Entry | None]:
    """Return the entries of prefix hashes that exist, None for a damaged one. Raises OSError.

    Those that a newer version of this library wrote are left out, and so left alone.
    """
    paths = {f"{ENTRY.folder}/{name}": name for name in names}
    contents = remote.get_beginnings(list(paths), ENTRY_BYTES)
    entries: dict[str, Entry | None] = {}
    for path, content in contents.items():
        with suppress(NotOursError):
            entries[paths[path]] = _decode(paths[path], content)
    return entries


def _decode(name: str, content: bytes) -> Entry | None:
    try:
        header, num_hashes = decode_header(content[:HEADER_BYTES])
    except NotOursError:
        raise
    except FormatError:
        return None
    chain = content[HEADER_BYTES:][: min(num_hashes, _MOST_HASHES) * HASH_BYTES]
    chain = chain[: len(chain) // HASH_BYTES * HASH_BYTES]
    if bytes.fromhex(name) in hashes_of(chain) and is_found_by_prefix(header.provenance):
        return Entry(SegmentRow.of(header, chain, header.file_bytes), num_hashes)
    return None


_MOST_SHARE = 0.75
"""Share of a segment above which it is fetched as a whole."""


def beginning_of(header: SegmentHeader, prefix_hashes: Sequence[bytes], num_hashes: int) -> SegmentHeader:
    """Return the header of the first chunks of a segment, which cover `num_hashes` of its prefix hashes.

    It is the header of a segment of fewer tokens, with blocks that are the first ones of each KV cache group. If most
    of the segment is needed, or if its tokens are not in order, the header itself is returned.
    """
    shape = header.shape
    step = lcm(shape.geometry.chunk_tokens, HASH_TOKENS)
    tokens = -(-num_hashes * HASH_TOKENS // step) * step
    if tokens > _MOST_SHARE * shape.tokens or shape.tables is not None or shape.geometry.pairs:
        return header
    if is_passage(header.provenance):
        return header
    shape = replace(shape, tokens=tokens)
    last = end_of_chain(prefix_hashes[: tokens // HASH_TOKENS], header.provenance)
    return replace(header, id=segment_id(header.parent, last, shape, header.provenance), shape=shape)


# --- measurements

_WEIGHT = 0.5
_MEASURED_SECONDS = 60.0
"""Seconds after which a measurement is repeated, whatever it showed."""
_FAILURES = 3
_OPEN_SECONDS, _MOST_OPEN_SECONDS = 5.0, 60.0
"""Seconds before an open breaker lets one call through, at first and at most."""


class Estimate:
    """Moving mean of a quantity. It is kept, so that nobody waits for what was slow before."""

    def __init__(self) -> None:
        self.value: float | None = None
        """Mean of the latest measurements; None if there are none."""
        self._measured = self._requested = float("-inf")

    def add(self, value: float) -> None:
        """Add a measurement. Measurements that are old do not count any more."""
        mixed = self.value is not None and not self.is_old
        self.value = _WEIGHT * value + (1 - _WEIGHT) * (self.value or 0.0) if mixed else value
        self._measured = time.monotonic()

    @property
    def is_old(self) -> bool:
        """True if the last measurement was long ago."""
        return time.monotonic() - self._measured >= _MEASURED_SECONDS

    def wants_measurement(self) -> bool:
        """Return whether the caller is to measure it again, in the background. Returns True once in a while."""
        now = time.monotonic()
        if not self.is_old or now - self._requested < _MEASURED_SECONDS:
            return False
        self._requested = now
        return True


class Link:
    """Measured bandwidth of a remote."""

    def __init__(self) -> None:
        self.bandwidth = Estimate()
        """Bytes per second of all segments that are fetched at the same time."""
        self._lock = threading.Lock()
        self._fetches, self._nbytes, self._began = 0, 0, 0.0

    def fetch_seconds(self, nbytes: int) -> float:
        """Return the seconds to fetch as many bytes; 0 if nothing was measured, so that it is tried."""
        bandwidth = self.bandwidth.value
        return nbytes / bandwidth if bandwidth else 0.0

    @contextmanager
    def fetching(self) -> Iterator[Callable[[int], None]]:
        """Measure a fetch, with those at the same time. Yields a function that takes the bytes of a segment."""
        with self._lock:
            if not self._fetches:
                self._nbytes, self._began = 0, time.monotonic()
            self._fetches += 1
        try:
            yield self._note
        finally:
            with self._lock:
                self._fetches -= 1
                took = time.monotonic() - self._began
                if not self._fetches and self._nbytes and took > 0:
                    self.bandwidth.add(self._nbytes / took)

    def _note(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes


class Breaker:
    """Circuit breaker: after several failures, calls are refused, except one from time to time, which is a probe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._seconds = _OPEN_SECONDS

    @property
    def is_open(self) -> bool:
        """True if calls are to be refused, except a probe."""
        return self._failures >= _FAILURES

    def wants_probe(self) -> bool:
        """Return whether it is time for a probe, and begin to wait for the next one, longer each time.

        A probe that is never reported, for example because its segment was evicted, does not keep the breaker open.
        """
        with self._lock:
            now = time.monotonic()
            if not self.is_open or now < self._until:
                return False
            self._seconds = min(2 * self._seconds, _MOST_OPEN_SECONDS)
            self._until = now + self._seconds
            return True

    def succeeded(self) -> None:
        """Report that the remote has answered, whatever it said."""
        with self._lock:
            self._failures, self._seconds = 0, _OPEN_SECONDS

    def failed(self) -> None:
        """Report a call that failed, or took too long."""
        with self._lock:
            self._failures += 1
            if self._failures == _FAILURES:
                self._until = time.monotonic() + self._seconds


_ABSENT_SECONDS, _PRESENT_SECONDS = 3.0, 60.0
"""Seconds for which the result of a look-up counts, for a prefix hash that was not found, and for one that was."""
_MOST_ABSENT, _MOST_PRESENT = 1 << 16, 1 << 10
"""Maximum numbers of results that are kept. Those that were found take up to 64 KiB each."""
_THREADS = 8

SLOW = "a look-up takes longer than it can save"
LATE = "the remote did not answer in time"
FAILED = "the remote failed"
UNAVAILABLE = "the remote is not used for a while, after several failures"


class LookUps:
    """Look-ups of entries, each one call in a thread for all prefix hashes. Answers are kept for seconds."""

    def __init__(self, remote: ObjectBackend, failed: Callable[[Breaker, object], None]) -> None:
        self._remote, self._failed = remote, failed
        self.breaker, self.seconds = Breaker(), Estimate()
        self._lock = threading.Lock()
        self._absent: OrderedDict[str, float] = OrderedDict()  # time of expiry by name
        self._present: OrderedDict[str, tuple[float, Entry]] = OrderedDict()
        self._threads = DaemonPool(_THREADS, "hf-tiered-look-up")

    def find(self, names: Sequence[str], limit: float) -> list[Entry] | str:
        """Return the entries of prefix hashes in hexadecimal, or why they are not known within `limit` seconds."""
        known, unknown = self._known(names)
        if unknown:
            look_up = partial(self._look_up, unknown)
            if self.breaker.is_open:
                if self.breaker.wants_probe():
                    self._begin(look_up)
                return UNAVAILABLE
            if (self.seconds.value or 0.0) > limit:
                if self.seconds.wants_measurement():
                    self._begin(look_up)
                return SLOW
            try:
                known |= self._threads.submit(look_up).result(limit)
            except (FutureTimeoutError, CancelledError):
                self._failed(self.breaker, f"no answer within {limit:.3g} s")
                return LATE
            except Exception:  # whatever a client library raises; it is counted
                return FAILED
        return list({entry.row.id: entry for entry in known.values()}.values())

    def forget(self, names: Sequence[str]) -> None:
        """Look up these prefix hashes again."""
        with self._lock:
            for name in names:
                self._absent.pop(name, None)
                self._present.pop(name, None)

    def close(self) -> None:
        """Drop the look-ups that wait, and release the threads."""
        self._threads.close(0.0)

    def _begin(self, look_up: Callable[[], object]) -> None:
        """Begin a look-up that nothing waits for."""
        with suppress(RuntimeError):  # the store is being closed
            self._threads.submit(look_up)

    def _known(self, names: Sequence[str]) -> tuple[dict[str, Entry], list[str]]:
        """Return the entries that are known to exist, and the names that are to be looked up."""
        now, known, unknown = time.monotonic(), dict[str, Entry](), list[str]()
        with self._lock:
            for name in names:
                expires, entry = self._present.get(name, (0.0, None))
                if entry is not None and expires > now and not entry.row.is_expired:
                    known[name] = entry
                elif self._absent.get(name, 0.0) <= now:
                    unknown.append(name)
        return known, unknown

    def _look_up(self, names: list[str]) -> dict[str, Entry]:
        """Ask the remote for entries, and note the results and how long it took. Raises what the client raises."""
        began = time.monotonic()
        try:
            entries = find_entries(self._remote, names)
        except Exception as error:
            self._failed(self.breaker, error)
            raise
        now = time.monotonic()
        self.seconds.add(now - began)
        self.breaker.succeeded()
        shared = {entry.row.id: entry for entry in entries.values()}  # a segment has several entries
        entries = {name: shared[entry.row.id] for name, entry in entries.items()}
        self.forget(names)
        with self._lock:
            self._present.update((name, (now + _PRESENT_SECONDS, entry)) for name, entry in entries.items())
            self._absent.update((name, now + _ABSENT_SECONDS) for name in names if name not in entries)
            for results, most in (self._present, _MOST_PRESENT), (self._absent, _MOST_ABSENT):
                while len(results) > most:
                    results.popitem(last=False)
        return entries
