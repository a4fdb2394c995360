"""Command `documents`: the passages that a store keeps under labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..store.catalogue import SegmentRow
from ..store.documents import DocumentInfo, Documents
from ..units import format_bytes
from .contents import contents_of, contents_of_open, files_of, open_store, unique_length
from .maintain import DryRun, show_removed
from .output import (
    AsJson,
    Refused,
    StorePath,
    add_model,
    ago,
    check_action,
    count,
    date,
    facts,
    figures,
    model_name,
    print_json,
    printable,
)


def documents(
    store: StorePath,
    action: Annotated[
        str, typer.Argument(metavar="show|rm", help="Action to perform. Default: list all documents.")
    ] = "",
    labels: Annotated[list[str] | None, typer.Argument(metavar="LABEL", help="Labels of documents, in full.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """List, show or delete documents.

    A document consists of the passages that store.precompute(model, passages, passages=True, labels=[...]) stored under
    one label. `rm` deletes it, including the passages that no other label uses. To replace a document, precompute its
    new passages under the same label.
    """
    check_action(action, "documents", "LABEL")
    if action and not labels:
        raise Refused(f"missing document label; use {action} LABEL")
    if action == "rm":
        return _remove(store, list(dict.fromkeys(labels or ())), dry_run, as_json)
    if dry_run:
        raise Refused("--dry-run can only be used with rm")
    contents = contents_of(store)
    if not action:
        with files_of(store) as files:
            infos = Documents(files).listed(contents.rows)
        return print_json([info.as_dict() for info in infos]) if as_json else _list(infos)
    if labels is None or len(labels) != 1:
        raise Refused("show takes one document; use show LABEL")
    with files_of(store) as files:
        infos = [info for info in Documents(files).listed(contents.rows) if info.label == labels[0]]
    if not infos:
        raise Refused(f"document {labels[0]!r} does not exist; `hf-tiered-cache documents {store}` lists all documents")
    if as_json:
        return print_json([info.as_dict() for info in infos])
    for info in infos:
        _show(info, contents.rows)


def _list(infos: list[DocumentInfo]) -> None:
    notes = [_notes(info) for info in infos]
    note_columns = ("notes",) if any(notes) else ()
    text_columns, number_columns = ("document", "model"), ("passages", "tokens", "size", "changed")
    table = figures(
        *text_columns, *number_columns, *note_columns, right=number_columns, fold=(*text_columns, *note_columns)
    )
    for info, note in zip(infos, notes, strict=True):
        cells = f"{info.passages:,}", f"{info.tokens_there:,}", format_bytes(info.bytes), ago(info.changed)
        table.add_row(
            printable(info.label), model_name(info.model, info.fingerprint), *cells, *[note] * len(note_columns)
        )
    if infos:
        table.show()
        print()
    passages = sum(info.passages for info in infos)
    tokens = sum(info.tokens_there for info in infos)
    print(f"total: {count(len(infos), 'document')}, {count(passages, 'passage')}, {tokens:,} tokens")


def _notes(info: DocumentInfo) -> str:
    """Return notes, such as "evicted: 1 of 3 passages, 1 shared with another label"."""
    notes = []
    if info.evicted:
        notes.append(f"evicted: {info.evicted:,} of {count(info.passages, 'passage')}")
    elif info.tokens_there < info.tokens:
        notes.append(f"damaged or expired: {info.tokens_there:,} of {info.tokens:,} tokens left")
    if info.shared:
        notes.append(f"{info.shared:,} shared with another label")
    return ", ".join(notes)


def _show(info: DocumentInfo, rows: list[SegmentRow]) -> None:
    table = facts()
    table.add_row("document", printable(info.label))
    add_model(table, info.model, info.fingerprint)
    table.add_row("provenance", printable(info.made))
    table.add_row("passages", f"{info.passages:,}")
    table.add_row("tokens", f"{info.tokens_there:,}")
    table.add_row("on disk", f"{format_bytes(info.bytes)} ({info.bytes:,} bytes)")
    table.add_row("created", date(info.created))
    table.add_row("changed", date(info.changed))
    table.add_row("notes", _notes(info) or "none")
    table.show()
    print()
    rows_by_id, id_length = {row.id: row for row in rows}, unique_length(row.id for row in rows)
    segments = figures("segment", "tokens", "size", "last used", "uses", right=("tokens", "size", "last used", "uses"))
    for name in info.segments:
        row = rows_by_id[name]
        segments.add_row(name[:id_length], f"{row.tokens:,}", format_bytes(row.nbytes), ago(row.used), f"{row.uses:,}")
    segments.show()


def _remove(store: Path, labels: list[str], dry_run: bool, as_json: bool) -> None:
    from ..kvstore import storage_of
    from ..operations.documents import remove_documents, segments_of_documents

    with open_store(store) as kv_store:
        storage = storage_of(kv_store)
        contents, rows = contents_of_open(kv_store), segments_of_documents(storage, labels)
        if not as_json:
            show_removed(contents, rows)
        if not dry_run:
            remove_documents(storage, labels)
    nbytes = sum(row.nbytes for row in rows)
    if as_json:
        document = {"removed": labels, "segments": [row.id for row in rows], "bytes": nbytes, "dry_run": dry_run}
        return print_json(document)
    summary = f"{count(len(labels), 'document')}, {count(len(rows), 'segment')}, {format_bytes(nbytes)}"
    print(f"{'would delete' if dry_run else 'deleted'} {summary}")
