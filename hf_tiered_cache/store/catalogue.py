"""Catalogue of the segments and their last use: an SQLite database shared by processes. It is never authoritative.

Everything in it, except the times of use and the eviction state of chunks, can be read again from the segment headers.
A lost or damaged catalogue therefore costs a scan and no KV. A row is valid only if the segment file agrees with it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from math import inf, isclose
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from . import HASH_BYTES, hashes_of
from .database import Database, transaction
from .kinds import json_object

if TYPE_CHECKING:
    from .format import SegmentHeader

_MOST_PARAMETERS = 500
_OWN_FIELDS = ("valid_hashes", "created", "expires", "used", "uses", "label")
"""Fields that may differ from the file: they are kept only here, or segments are not found by them."""
_FROM_THE_FUTURE = """UPDATE segments
    SET expires = expires - max(0, created - ?), created = min(created, ?), used = ? WHERE used > ?"""
_Row = TypeVar("_Row", bound=tuple[Any, ...])


@dataclass(frozen=True)
class SegmentRow:
    """Catalogue row of one segment."""

    id: str
    fingerprint: str
    provenance: str
    first: bytes
    """First prefix hash of the chain: the lookup key of the segment."""
    valid_hashes: int
    """Number of prefix hashes before the first block that failed its checksum; all of them in an intact segment."""
    tokens: int
    position: int
    nbytes: int
    """Bytes that the file actually takes on disk."""
    created: float
    expires: float | None
    used: float
    uses: int
    chain: bytes
    """All prefix hashes, concatenated."""
    label: str = ""
    """User-defined label."""
    key: str = ""
    """Id of the key that encrypts its file (see `StoreCipher.key_id`), or "" if it is not encrypted."""
    scan: bytes = b""
    """Scan hashes that find a passage in prompts (see `SegmentHeader.scan_hashes`)."""

    @classmethod
    def of(cls, header: SegmentHeader, chain: bytes, nbytes: int) -> SegmentRow:
        """Create the row of a segment that has just been written or found."""
        return cls(
            id=header.id,
            fingerprint=header.fingerprint,
            provenance=header.provenance,
            first=chain[:HASH_BYTES],
            chain=chain,
            valid_hashes=len(chain) // HASH_BYTES,
            tokens=header.shape.tokens,
            position=header.position,
            nbytes=nbytes,
            created=header.created,
            expires=header.expires,
            used=header.created,
            uses=0,
            label=header.label.encode(errors="replace").decode(),  # as in the file: it may be no valid Unicode
            key="" if header.seal is None else header.seal.key_id,
            scan=header.scan_hashes,
        )

    def fits(self, header: SegmentHeader, chain: bytes) -> bool:
        """Return whether the row agrees with its file, so that a lookup by the row finds what the file contains."""
        expected = SegmentRow.of(header, chain, self.nbytes)
        has_times = self.has_times(header.created, header.expires)
        return has_times and self == replace(expected, **{name: getattr(self, name) for name in _OWN_FIELDS})

    def has_times(self, created: float, expires: float | None) -> bool:
        """Return whether its times are those in its file, or corrected with the same lifetime (`set_right_clocks`)."""
        lifetime = inf if expires is None else expires - created
        return self.created <= created and isclose(self.lifetime, lifetime, abs_tol=1)

    @property
    def usable_tokens(self) -> int:
        """Number of tokens before the first block that failed its checksum."""
        return self.tokens * self.valid_hashes // max(1, len(self.chain) // HASH_BYTES)

    @property
    def lifetime(self) -> float:
        """Seconds from its creation to its expiry."""
        return inf if self.expires is None else self.expires - self.created

    @property
    def is_expired(self) -> bool:
        """True if its lifetime has ended."""
        return self.expires is not None and self.expires <= time.time()

    @property
    def hashes(self) -> set[bytes]:
        """Set of all prefix hashes."""
        return set(hashes_of(self.chain))


_TYPES: dict[str, Any] = {"str": str, "bytes": bytes, "int": int, "float": float, "float | None": (float, NoneType)}
_FIELD_TYPES = [_TYPES[str(field.type)] for field in fields(SegmentRow)]
_COLUMNS = ", ".join(field.name for field in fields(SegmentRow)).replace("valid_hashes", "usable_links")


class Catalogue(Database):
    """Table of the segments of one store."""

    def _rows(self, condition: str, *args: Any) -> list[SegmentRow]:
        return _rows_of(self.execute(f"SELECT {_COLUMNS} FROM segments {condition}", *args))

    # --- reading

    def beginning_with(self, prefix_hashes: Sequence[bytes]) -> list[SegmentRow]:
        """Return the usable, unexpired segments whose chain begins with one of `prefix_hashes`."""
        return _usable_rows(self.execute, "first", prefix_hashes)

    def live(self, ids: Sequence[str]) -> list[SegmentRow]:
        """Return the given segments that exist, are usable and have not expired."""
        return _usable_rows(self.execute, "id", ids)

    def passages(
        self, number: int, ids: Sequence[str]
    ) -> tuple[Hashable, list[tuple[int, str, bytes]], list[SegmentRow]]:
        """Return an identifier of the numbering, the passages after `number`, and the `live` segments of `ids`.

        The passages are in order, with number, id and scan hashes.
        """
        query = "SELECT number, id, scan FROM segments WHERE length(scan) > 0 AND number > ? ORDER BY number"

        def read(db: sqlite3.Connection) -> tuple[list[tuple[int, str, bytes]], list[SegmentRow]]:
            passages = _sound(db.execute(query, (number,)).fetchall(), (int, str, bytes))
            return passages, _usable_rows(lambda query, *args: db.execute(query, args).fetchall(), "id", ids)

        passages, rows = self.run(read)
        return (id(self), self.generation), passages, rows

    def get(self, segment_id: str) -> SegmentRow | None:
        return next(iter(self._rows("WHERE id = ?", segment_id)), None)

    def all(self) -> list[SegmentRow]:
        """Return all rows, most recently used last."""
        return self._rows("ORDER BY used, position DESC")

    def by_use(self) -> list[tuple[str, int, float | None]]:
        """Return id, bytes on disk and expiry time of every segment, most recently used last."""
        rows = self.execute("SELECT id, nbytes, expires FROM segments ORDER BY used, position DESC")
        return _sound(rows, (str, int, _TYPES["float | None"]))

    def ids(self) -> set[str]:
        return {segment_id for (segment_id,) in self.execute("SELECT id FROM segments")}

    def numbers(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the rows of these segments. A row that is added again has another number."""
        numbers: dict[str, int] = {}
        for i in range(0, len(ids), _MOST_PARAMETERS):
            batch = ids[i : i + _MOST_PARAMETERS]
            query = f"SELECT id, number FROM segments WHERE id IN ({', '.join('?' * len(batch))})"
            numbers.update(_sound(self.execute(query, *batch), (str, int)))
        return numbers

    def total_bytes(self) -> int:
        return self.execute("SELECT coalesce(sum(nbytes), 0) FROM segments")[0][0]

    def counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of segments, tokens, bytes on disk and encrypted segments."""
        sums = "coalesce(sum(tokens), 0), coalesce(sum(nbytes), 0), count(nullif(key, ''))"
        return self.execute(f"SELECT count(*), {sums} FROM segments")[0]

    def models(self) -> dict[str, dict[str, str]]:
        """Return the description of each model in the headers of stored segments, by fingerprint."""
        is_stored = "EXISTS (SELECT 1 FROM segments WHERE segments.fingerprint = models.fingerprint)"
        query = f"SELECT fingerprint, facts FROM models WHERE {is_stored}"
        return {name: json_object(facts.encode()) for name, facts in _sound(self.execute(query), (str, str))}

    def keys(self, fingerprint: str | None = None) -> set[str]:
        """Return the ids of the keys that encrypt segments of one model or of all, with "" if some are unencrypted."""

        def collect(db: sqlite3.Connection) -> set[str]:
            fingerprints = _distinct(db, "fingerprint") if fingerprint is None else [fingerprint]
            return {
                key
                for model in fingerprints
                for provenance in _distinct(db, "provenance", fingerprint=model)
                for key in _distinct(db, "key", fingerprint=model, provenance=provenance)
            }

        return self.run(collect)

    def provenances(self, fingerprint: str) -> list[str]:
        """Return the distinct provenances of the stored KV of this model, such as "exact"."""
        return self.run(lambda db: _distinct(db, "provenance", fingerprint=fingerprint))

    # --- writing

    def add(
        self, rows: Sequence[tuple[SegmentRow, Mapping[str, str]]], publish: Callable[[], None] = lambda: None
    ) -> bool:
        """Add rows, each with the description of its model ({} leaves the stored one), in one transaction.

        `publish` gives the segments' files their names. Both happen, or neither: a file without a row would not be
        found or counted. Returns True; the index returns False if this fails.
        """
        marks = ", ".join("?" * len(_FIELD_TYPES))

        def enter(db: sqlite3.Connection) -> None:
            with transaction(db):
                for row, model in rows:
                    if model:
                        facts = json.dumps(dict(model))
                        db.execute("INSERT OR REPLACE INTO models VALUES (?, ?)", (row.fingerprint, facts))
                    db.execute(f"INSERT OR REPLACE INTO segments ({_COLUMNS}) VALUES ({marks})", astuple(row))
                publish()

        self.run(enter)
        return True

    def remove(self, numbers: Mapping[str, int]) -> None:
        """Remove the rows with these numbers (see `numbers`), but none that was added since they were read."""
        query = "DELETE FROM scores WHERE segment = ? AND NOT EXISTS (SELECT 1 FROM segments WHERE id = segment)"

        def leave(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.executemany("DELETE FROM segments WHERE id = ? AND number = ?", numbers.items())
                db.executemany(query, [(segment_id,) for segment_id in numbers])

        if numbers:
            self.run(leave)

    def touch(self, ids: Iterable[str], now: float | None = None) -> None:
        """Record a use of these segments. Does nothing while the log, which counts against the quota, is long."""
        if self.is_log_long():
            return
        now = time.time() if now is None else now
        pairs = [(now, i) for i in ids]

        def note(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute(_FROM_THE_FUTURE, (max(now, time.time()),) * 4)
                db.executemany("UPDATE segments SET used = ?, uses = uses + 1 WHERE id = ?", pairs)

        self.run(note)

    def set_right_clocks(self) -> None:
        """Correct times in the future, written by a clock that was ahead: they become now, with unchanged lifetimes."""
        self.execute(_FROM_THE_FUTURE, *[time.time()] * 4)

    def scores(self) -> list[tuple[str, int, bytes]]:
        """Return segment, KV cache group and the eviction state of its chunks (see `ScoreTable`)."""
        return _sound(self.execute("SELECT segment, lane, row FROM scores"), (str, int, bytes))

    def keep_scores(self, rows: Iterable[tuple[str, int, bytes]]) -> None:
        """Store rows in the form of `scores`, for segments that still exist."""
        query = """INSERT OR REPLACE INTO scores SELECT ?, ?, ? WHERE EXISTS (SELECT 1 FROM segments WHERE id = ?)"""
        self.run(lambda db: db.executemany(query, [(*row, row[0]) for row in rows]))

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Set the bytes on disk of segments."""
        query = "UPDATE segments SET nbytes = ? WHERE id = ?"
        self.run(lambda db: db.executemany(query, [(nbytes, segment_id) for segment_id, nbytes in sizes.items()]))

    def limit(self, segment_id: str, num_hashes: int) -> None:
        """Mark only the first `num_hashes` prefix hashes of this segment as usable."""
        self.execute("UPDATE segments SET usable_links = min(usable_links, ?) WHERE id = ?", num_hashes, segment_id)


def _rows_of(values: list[tuple[Any, ...]]) -> list[SegmentRow]:
    return [SegmentRow(*row) for row in _sound(values, _FIELD_TYPES)]


def _usable_rows(execute: Callable[..., list[Any]], column: str, values: Sequence[Any]) -> list[SegmentRow]:
    """Return the usable, unexpired segments with one of these values in a column. `execute` runs a query."""
    rows: list[SegmentRow] = []
    for i in range(0, len(values), _MOST_PARAMETERS):
        batch, now = values[i : i + _MOST_PARAMETERS], time.time()
        is_one = f"{column} IN ({', '.join('?' * len(batch))})"
        query = f"SELECT {_COLUMNS} FROM segments WHERE {is_one} AND usable_links > 0 AND coalesce(expires, ?) >= ?"
        rows += _rows_of(execute(query, *batch, now, now))
    return rows


def _sound(rows: list[_Row], types: Sequence[Any]) -> list[_Row]:
    """Return rows, or raise sqlite3.DatabaseError if a value has another type: SQLite itself does not check that."""
    if not all(isinstance(value, kind) for row in rows for value, kind in zip(row, types, strict=True)):
        raise sqlite3.DatabaseError("a value has another type than its column")
    return rows


def _distinct(db: sqlite3.Connection, column: str, **values: str) -> list[str]:
    """Return the distinct values of a column of the index `by_kind`, ascending, in rows with these values before it.

    SQLite's own DISTINCT reads every row. This query seeks each value, so its time depends on their number.
    """
    is_counted = "".join(f"{name} = :{name} AND " for name in values)
    query = f"""WITH RECURSIVE seek(value) AS (
            SELECT min({column}) FROM segments WHERE {is_counted}TRUE
            UNION ALL
            SELECT (SELECT min({column}) FROM segments WHERE {is_counted}{column} > seek.value)
            FROM seek WHERE value IS NOT NULL
        )
        SELECT value FROM seek WHERE value IS NOT NULL"""
    return [row[0] for row in db.execute(query, values).fetchall()]
