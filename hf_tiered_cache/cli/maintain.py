"""Commands `verify`, `gc`, `rm` and `copy`: maintenance of a store."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..store.catalogue import SegmentRow
from ..store.settings import scheme_of, without_secrets
from ..units import format_bytes, parse_bytes
from .contents import Contents, contents_of_open, open_place, open_store, unique_length
from .output import AsJson, KeyFile, Refused, StoreAddress, Table, confirm, count, print_json, printable

if TYPE_CHECKING:
    from ..store.backend import SegmentBackend

DryRun = Annotated[bool, typer.Option("--dry-run", help="Delete nothing; only list what would be deleted.")]


def verify(
    store: StoreAddress,
    repair: Annotated[bool, typer.Option("--repair", help="Remove damaged files.")] = False,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a store and compare every checksum.

    Without --repair, nothing is changed. Removed segments are computed and stored again when they are next requested.
    Damaged records of conversations and documents are removed without the segments that they name. Files that cannot be
    read are kept. The exit status is 1 if damaged or unreadable files remain. Otherwise it is 2 if encrypted segments
    were not checked, because --key-file is missing or holds another key.
    """
    with open_store(store, key_file=key_file) as kv_store:
        report = kv_store.verify(progress=not as_json, repair=repair)
    if as_json:
        print_json(report.as_dict())
    else:
        num_damaged, num_unreadable = len(report.bad) - len(report.unreadable), len(report.unreadable)
        verdict = f"{num_damaged} damaged" if num_damaged else "no damage found"
        verdict += f", {num_unreadable} could not be read" if num_unreadable else ""
        amount = f"{count(report.segments, 'segment')}, {count(report.blocks, 'block')}"
        sidecars = f", {count(report.sidecars, 'sidecar')}" if report.sidecars else ""
        records = f", {count(report.records, 'record')}" if report.records else ""
        print(f"{amount}{sidecars}{records}, {format_bytes(report.nbytes)}: {verdict}")
        for segment, reason in report.bad.items():
            print(f"  {segment}: {reason}{' (removed)' if segment in report.removed else ''}")
        _show_unknown(report.unknown)
        if num_damaged and not repair:
            print(f"run `hf-tiered-cache verify {without_secrets(store)} --repair` to remove them")
    if report.ok and report.unread:
        reason = "no --key-file was given" if key_file is None else "they are encrypted with another key"
        raise Refused(f"{count(report.unread, 'segment')} could not be checked: {reason}")
    if report.ok and report.other_format:
        files = count(report.other_format, "file")
        raise Refused(f"{files} could not be checked: another version, or a package with their codec, is needed")
    raise typer.Exit(0 if report.ok else 1)


def gc(
    store: StoreAddress,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Also evict segments until the store fits, e.g. 100GiB.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete files that no request can use, and make room.

    Deletes expired and damaged segments, files left by terminated writers or deleted segments, and conversations
    without segments. With --quota, also evicts the least recently used segments until the store is well below the
    quota. Pinned segments are kept. Nothing is evicted if the store would still exceed the quota.

    Files to be deleted are listed first. Files that this library did not write are listed, too, but not changed.
    Segments that cannot be read are listed, and kept with the conversations and documents that may need them; the exit
    status is then 1. In a remote, which does not record uses, the oldest segments are evicted, and lookup entries
    without a segment deleted.
    """
    from ..kvstore import storage_of

    if quota is not None:
        parse_bytes(quota, "--quota")
    with open_store(store, disk_quota=quota) as kv_store:
        report = kv_store.gc(dry_run=True)
        if not as_json:
            for path, reason in report.deleted.items():
                print(f"{printable(path)}: {reason}", flush=True)
        report = report if dry_run else kv_store.gc()
        _sweep_entries(storage_of(kv_store).disk.backend, dry_run)
    if as_json:
        print_json(report.as_dict())
        raise typer.Exit(1 if report.unreadable else 0)
    _show_unknown(report.unknown)
    print(
        f"{'would delete' if dry_run else 'deleted'} {report.expired} expired and "
        f"{count(report.damaged, 'damaged segment')}, {format_bytes(report.temporary_bytes)} of unfinished files, "
        f"and {'evict' if dry_run else 'evicted'} {count(report.evicted, 'segment')}; "
        f"{format_bytes(report.freed_bytes)} in all"
        + (f"; no segments are left of {count(report.conversations, 'conversation')}" if report.conversations else "")
        + (f"; no passages are left of {count(report.documents, 'document')}" if report.documents else "")
    )
    if report.not_evicted:
        print(printable(report.not_evicted))
    for reason in report.unreadable:
        print(f"{printable(reason)}; it is kept, with the conversations and documents that may need it")
    raise typer.Exit(1 if report.unreadable else 0)


def rm(
    store: StoreAddress,
    segments: Annotated[list[str] | None, typer.Argument(help="Ids of segments, or their first characters.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="All segments of the model with this name, or with a fingerprint that begins like this."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All segments, including pinned and damaged ones.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation with --all.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete segments. Programs that have them open can finish reading them.

    The segments to be deleted are listed first, with the segments that continue them, which cannot be restored without
    them.
    """
    from ..kvstore import storage_of
    from ..store.maintain import continuing, unlisted_damaged

    if bool(segments) + (model is not None) + everything != 1:
        raise Refused("specify one of: ids of segments, --model, or --all")
    with open_store(store) as kv_store:
        contents, disk = contents_of_open(kv_store), storage_of(kv_store).disk
        damaged: list[str] = []
        if everything:
            rows, damaged = disk.index.complete_rows(), unlisted_damaged(disk)
        elif model is not None:
            rows = contents.of_model(model)
        else:
            rows = list({row.id: row for row in map(contents.row_of, segments or ())}.values())
        ids = [*(row.id for row in rows), *damaged]
        nbytes = sum(row.nbytes for row in rows) + sum(map(disk.nbytes_of, damaged)) + contents.sidecar_bytes(ids)
        summary = f"{count(len(ids), 'segment')}, {format_bytes(nbytes)}"
        question = f"Delete all segments of {without_secrets(store)} ({summary})?"
        continuations = continuing(disk, rows)
        if not as_json:
            show_removed(contents, rows)
            for name in damaged:
                print(f"{printable(disk.backend.where(name))}: damaged")
            if continuations:
                print(f"cannot be restored without {'it' if len(rows) == 1 else 'them'}:")
                show_removed(contents, continuations)
        if everything and ids and not (yes or dry_run) and not confirm(question):
            raise Refused("nothing was deleted")
        num_removed = 0 if dry_run else kv_store.remove(ids)
        if num_removed:
            _sweep_entries(disk.backend)
    if as_json:
        names = {"ids": ids, "continuing": [row.id for row in continuations]}
        return print_json({"removed": num_removed, "bytes": nbytes} | names | {"dry_run": dry_run})
    print(f"{'would delete' if dry_run else 'deleted'} {summary}")


def _sweep_entries(place: SegmentBackend, dry_run: bool = False) -> None:
    from ..remote.entries import sweep_entries
    from ..store.objects import ObjectBackend

    if isinstance(place, ObjectBackend):
        sweep_entries(place, dry_run)


def _show_unknown(paths: list[str]) -> None:
    if paths:
        print(f"{count(len(paths), 'file')} not written by this library, left unchanged:")
        for path in paths:
            print(f"  {printable(path)}")


def show_removed(contents: Contents, rows: list[SegmentRow]) -> None:
    """Print the segments that are deleted."""
    letters = unique_length(row.id for row in contents.rows)
    table = Table("segment", "tokens", "size", "model", "label", right=("tokens", "size"), fold=("model", "label"))
    for row in rows:
        name = contents.models.get(row.fingerprint, {}).get("name") or row.fingerprint[:letters]
        size = format_bytes(row.nbytes)
        table.add_row(row.id[:letters], f"{row.tokens:,}", size, printable(name), printable(row.label))
    if rows:
        table.show()


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

    The address sqlite:///path/of/a/file makes a single file of them. What the target has is left out. Segments are
    verified first, those of a folder only if the key is given or not needed. Segments from a remote need the key if
    they are encrypted.
    Segments of compacted conversations are not copied, since no other store can use them, but listed. The records of
    conversations and documents stay: the target restores their KV by its tokens, but does not list them. The exit
    status is 1 if a segment could not be copied.
    """
    to_remote = bool(scheme_of(target))
    if to_remote == bool(scheme_of(source)):
        raise Refused("copy needs a folder and the address of a remote, such as s3://bucket/prefix or file:///folder")
    result = (_send if to_remote else _fetch)(source, target, segments or [], key_file)
    if as_json:
        print_json(asdict(result))
    else:
        copied = count(result.copied, "segment")
        print(f"copied {copied}, {format_bytes(result.bytes)}; {result.present:,} were there already")
        if result.left_out:
            left_out = count(len(result.left_out), "segment")
            print(f"not copied, since only this store can use them: {left_out} of compacted conversations")
            for conversation in sorted({*result.left_out.values()} - {""}):
                print(f"  {printable(conversation)}")
        if result.records:
            records = count(result.records, "record")
            print(f"not copied: {records} of conversations and documents; the target finds their KV by its tokens")
        for segment, reason in result.failed.items():
            print(f"  {segment}: {reason}", file=sys.stderr)
    raise typer.Exit(1 if result.failed else 0)


@dataclass
class Copied:
    """Result of `copy`."""

    copied: int = 0
    bytes: int = 0
    present: int = 0
    """Number of segments that the target had."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Compacted segments, which are not copied, with the ids of their conversations; "" if no record names it."""
    records: int = 0
    """Number of conversations and documents with copied segments. Their records are not copied."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason by segment that could not be copied."""


def _send(source: str, target: str, names: list[str], key_file: Path | None) -> Copied:
    from tqdm.auto import tqdm

    from ..errors import FormatError, IntegrityError, reason_of
    from ..kvstore import storage_of
    from ..remote.write_back import send_segment
    from ..store.backends import open_remote
    from ..store.maintain import check

    result = Copied()
    with ExitStack() as stack:
        store = stack.enter_context(open_store(source, key_file=key_file))
        contents, disk = contents_of_open(store), storage_of(store).disk
        records = storage_of(store).conversations.all()
        conversations = {segment: record.id for record in records for segment in record.segments}
        segments_of_records = [info.segments for info in store.conversations()]
        segments_of_records += [info.segments for info in store.documents()]
        ids = [contents.row_of(name).id for name in names]
        if not names:
            ids = [row.id for row in contents.rows]
            ids += [name for name in set(disk.backend.names()) - set(ids) if disk.index.is_stored(name)]  # not readable
        remote = stack.enter_context(closing(open_remote(target)))  # last, since this may create a folder
        for segment_id in tqdm(ids, unit="segment", disable=None):
            try:
                check(disk, segment_id)
                upload = send_segment(disk.backend, remote, segment_id)
            except (OSError, FormatError, IntegrityError) as error:
                result.failed[segment_id] = reason_of(error)
                continue
            if upload is None:
                result.left_out[segment_id] = conversations.get(segment_id, "")
            else:
                result.copied += bool(upload.nbytes)
                result.bytes += upload.nbytes
                result.present += not upload.nbytes
        copied = set(ids) - result.failed.keys() - result.left_out.keys()
        result.records = sum(not copied.isdisjoint(segments) for segments in segments_of_records)
    return result


def _fetch(source: str, target: str, names: list[str], key_file: Path | None) -> Copied:
    from tqdm.auto import tqdm

    from ..kvstore import storage_of

    if wrong := [name for name in names if not re.fullmatch("[0-9a-f]{32}", name)]:
        raise Refused(f"{wrong[0]!r} is no whole id of a segment; `hf-tiered-cache ls` lists all segments")
    with closing(open_place(source)) as remote:  # first, since the folder becomes a store
        names = names or sorted(remote.names())
    if not names:
        raise Refused(f"{without_secrets(source)} holds no segments")
    result = Copied()
    with open_store(target, key_file=key_file, remote=source, create=True) as store:
        storage = storage_of(store)
        tier = storage.remote
        assert tier is not None
        local = {row.id for row in store.segments()}
        for name in tqdm(names, unit="segment", disable=None):
            if name in local:
                result.present += 1
            elif reason := tier.fetch(name):
                result.failed[name] = reason
            else:
                result.copied += 1
        result.bytes = store.stats.remote.bytes_read
    return result
