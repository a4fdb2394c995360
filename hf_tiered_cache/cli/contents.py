"""Contents of a store, read without opening it if possible."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store.catalogue import Catalogue, SegmentRow
from ..store.kinds import PIN, SEGMENT, SEGMENT_SUFFIX, SIDECAR, sidecar_sizes
from ..store.root import StoreRoot
from ..store.settings import path_in, scheme_of
from .output import Refused

if TYPE_CHECKING:
    from ..kvstore import KVStore
    from ..store.objects import ObjectBackend
    from ..store.segment import Head

_SHORTEST = 8


@dataclass(frozen=True)
class Contents:
    """Contents of a store: segments, the most recently used last, models by fingerprint, and sidecars by kind."""

    rows: list[SegmentRow]
    models: dict[str, dict[str, str]]
    pinned: set[str]
    sidecars: dict[str, dict[str, int]]

    def describe(self, row: SegmentRow) -> dict[str, Any]:
        """Return the facts about a segment, JSON-serializable."""
        return {
            "id": row.id,
            "label": row.label,
            "fingerprint": row.fingerprint,
            "model": self.models.get(row.fingerprint, {}),
            "provenance": row.provenance,
            "tokens": row.tokens,
            "usable_tokens": row.usable_tokens,
            "position": row.position,
            "bytes": row.nbytes,
            "sidecars": self.sidecars.get(row.id, {}),
            "created": row.created,
            "used": row.used,
            "uses": row.uses,
            "expires": row.expires,
            "expired": row.is_expired,
            "pinned": row.id in self.pinned,
            "encrypted": bool(row.key),
        }

    def sidecar_bytes(self, ids: Iterable[str]) -> int:
        """Return the number of bytes that the sidecars of these segments take on disk."""
        return sum(sum(self.sidecars.get(segment_id, {}).values()) for segment_id in ids)

    def row_of(self, name: str) -> SegmentRow:
        """Return the only segment with an id that begins with `name`. Raises Refused if there is not exactly one."""
        matching_rows = [row for row in self.rows if row.id.startswith(name)] if name else []
        if len(matching_rows) != 1:
            raise Refused(
                f"{len(matching_rows) or 'no'} segments have an id that begins with {name!r}; "
                "`hf-tiered-cache ls` lists all segments"
            )
        return matching_rows[0]

    def of_model(self, name: str) -> list[SegmentRow]:
        """Return the segments of the model with this name, or a fingerprint that begins with it. Raises Refused."""
        if not name:
            raise Refused("the name of the model is empty; give the first characters of its fingerprint")
        fingerprints = self.fingerprints()
        named_fingerprints = {
            fingerprint for fingerprint in fingerprints if self.models.get(fingerprint, {}).get("name") == name
        }
        matching = named_fingerprints or {fingerprint for fingerprint in fingerprints if fingerprint.startswith(name)}
        if len(matching) > 1 and not named_fingerprints:
            raise Refused(
                f"{len(matching)} models have a fingerprint that begins with {name!r}; `hf-tiered-cache ls` lists all "
                "models"
            )
        if not matching:
            raise Refused(
                f"no model has the name {name!r}, or a fingerprint that begins with it; `hf-tiered-cache ls` lists "
                "all models"
            )
        return [row for row in self.rows if row.fingerprint in matching]

    def fingerprints(self) -> list[str]:
        """Return the fingerprints of the models; the most recently used one comes last."""
        return list(dict.fromkeys(row.fingerprint for row in reversed(self.rows)))[::-1]


def contents_of(store: Path | str) -> Contents:
    """Return the contents of a store in a folder, or at the address of a remote.

    The store is opened, which reads every header, only if the catalogue does not agree with the files.
    """
    if not scheme_of(store):
        with files_of(Path(store)) as files:
            if (contents := _catalogued(files)) is not None:
                return contents
    with open_store(store) as kv_store:
        return contents_of_open(kv_store)


def contents_of_open(store: KVStore) -> Contents:
    """Return the contents of an open store."""
    from ..kvstore import storage_of

    sidecars: dict[str, dict[str, int]] = {}
    with suppress(OSError):
        sidecars = storage_of(store).disk.sidecars.sizes()
    return Contents(store.segments(), store.models(), store.pinned(), sidecars)


def _catalogued(files: StoreRoot) -> Contents | None:
    try:
        with closing(Catalogue(files, read_only=True)) as catalogue:
            rows, models = catalogue.all(), catalogue.models()
        if {row.id + SEGMENT_SUFFIX for row in rows} != set(files.names(SEGMENT)):
            return None
    except (sqlite3.Error, OSError):
        return None
    pinned, sidecars = set[str](), dict[str, dict[str, int]]()
    with suppress(OSError):
        pinned.update(files.names(PIN))
    with suppress(OSError):
        sidecars = sidecar_sizes(files.sizes(SIDECAR))
    return Contents(rows, models, pinned, sidecars)


@contextmanager
def files_of(path: Path) -> Iterator[StoreRoot]:
    """Open the folder of a store. Raises StoreError if there is no store, instead of creating one."""
    if not path.is_dir():
        raise Refused(f"there is no store at {path}")
    with closing(StoreRoot(path, make=False)) as files:
        if not files.path.joinpath(SEGMENT.folder).is_dir():
            raise Refused(f"there is no store at {path}")
        yield files


def open_store(
    store: Path | str,
    *,
    disk_quota: str | None = None,
    key_file: Path | None = None,
    remote: str | None = None,
    create: bool = False,
) -> KVStore:
    """Open a store, or the remote at an address, for maintenance. Nothing is sent to `remote`.

    Commands that read no blocks need no key. A folder that is no store is refused, unless `create`.
    """
    from ..kvstore import KVStore
    from ..store.cipher import read_key_file

    options: dict[str, Any] = {"host_memory": 0, "disk_quota": disk_quota, "key": read_key_file(key_file)}
    if not scheme_of(store):
        if not create:
            with files_of(Path(store)):
                pass
        return KVStore(store, engine="posix", remote=remote, remote_write="never", **options)
    place = open_place(str(store))
    try:
        place.list_objects("")
    except OSError as error:
        place.close()
        raise Refused(f"{place.place} cannot be reached ({error.strerror or error})") from None
    return KVStore(backend=place, remote=None, **options)  # whatever the environment says


def open_place(address: str) -> ObjectBackend:
    """Open the remote at an address. Raises Refused or StoreError if there is none, instead of creating one."""
    from ..store.backends import open_remote

    if scheme_of(address) == "sqlite" and (path := path_in(address)) is not None and not path.exists():
        raise Refused(f"{address} holds no segments: there is no store at this path")
    return open_remote(address, make=False)


def head_of(store: Path | str, segment_id: str) -> Head:
    """Return what a segment's file holds before its blocks."""
    from ..store.folder import head_of_file
    from ..store.segment import read_head

    if not scheme_of(store):
        return read_head(head_of_file, Path(store) / SEGMENT.folder / f"{segment_id}{SEGMENT_SUFFIX}")
    with closing(open_place(str(store))) as place:
        return read_head(place.head, segment_id)


def unique_length(names: Iterable[str]) -> int:
    """Return how many leading characters distinguish the names, at least `_SHORTEST`."""
    distinct, length = set(names), _SHORTEST
    while len({name[:length] for name in distinct}) < len(distinct):
        length += 1
    return length
