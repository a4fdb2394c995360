"""Command `copy`: segments from a folder to a remote, and back."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..store.address import scheme_of
from ..units import format_bytes
from .contents import contents_of_open, open_store
from .output import AsJson, KeyFile, Refused, count, print_json

if TYPE_CHECKING:
    from ..kvstore import KVStore


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder of a store, or address of a remote.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The other: an address, or a folder.")],
    segments: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of segments of the folder, or their first characters; of a remote, whole ids."),
    ] = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy segments from a folder to a remote, or back.

    What the target has is left out. Segments from a remote are verified, so the key is needed if they are encrypted.
    Segments of compacted conversations are not copied: no other store can use them. The exit status is 1 if a segment
    could not be copied.
    """
    to_remote = bool(scheme_of(target))
    if to_remote == bool(scheme_of(source)):
        raise Refused("copy needs a folder and the address of a remote, such as s3://bucket/prefix")
    copied, nbytes, present, failed = (_send if to_remote else _fetch)(source, target, segments or [], key_file)
    if as_json:
        print_json({"copied": copied, "bytes": nbytes, "present": present, "failed": failed})
    else:
        print(f"copied {count(copied, 'segment')}, {format_bytes(nbytes)}; {present:,} were there already")
        for segment, reason in failed.items():
            print(f"  {segment}: {reason}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


Copied = tuple[int, int, int, dict[str, str]]
"""Numbers of segments copied, of their bytes, and of segments that were there; reasons by segment that failed."""


def _send(source: str, target: str, names: list[str], key_file: Path | None) -> Copied:
    from tqdm.auto import tqdm

    from ..errors import FormatError
    from ..kvstore import storage_of
    from ..remote.write_back import send_segment
    from ..store.backends import open_remote

    copied, nbytes, present, failed = 0, 0, 0, dict[str, str]()
    with open_store(source, key_file=key_file) as store, closing(open_remote(target)) as remote:
        contents = contents_of_open(store)
        rows = [contents.row_of(name) for name in names] or contents.rows
        for row in tqdm(rows, unit="segment", disable=None):
            try:
                sent = send_segment(storage_of(store).disk.backend, remote, row.id)
            except (OSError, FormatError) as error:
                failed[row.id] = str(error)
                continue
            if sent is not None:
                copied, nbytes, present = copied + bool(sent.nbytes), nbytes + sent.nbytes, present + (not sent.nbytes)
    return copied, nbytes, present, failed


def _fetch(source: str, target: str, names: list[str], key_file: Path | None) -> Copied:
    from tqdm.auto import tqdm

    from ..kvstore import storage_of

    copied, present, failed = 0, 0, dict[str, str]()
    with _opened(target, source, key_file) as store:
        storage = storage_of(store)
        tier = storage.remote
        assert tier is not None
        local = {row.id for row in store.segments()}
        for name in tqdm(names or sorted(tier.remote.names()), unit="segment", disable=None):
            if name in local:
                present += 1
            elif reason := tier.fetch(name):
                failed[name] = reason
            else:
                copied += 1
        nbytes = store.stats.remote.bytes_read
    return copied, nbytes, present, failed


def _opened(folder: str, remote: str, key_file: Path | None) -> KVStore:
    """Open the folder of a store, a new one if there is none, with its remote."""
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        return open_store(folder, key_file=key_file, remote=remote)
    from ..kvstore import KVStore
    from ..store.cipher import read_key_file

    return KVStore(
        folder, engine="posix", host_memory=0, key=read_key_file(key_file), remote=remote, remote_write="never"
    )
