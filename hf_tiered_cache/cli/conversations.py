"""Command `conversations`: the conversations that a store keeps under an id."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..store.catalogue import SegmentRow
from ..store.conversations import ConversationInfo, Conversations
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


def conversations(
    store: StorePath,
    action: Annotated[
        str, typer.Argument(metavar="show|rm", help="Action to perform. Default: list all conversations.")
    ] = "",
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of conversations, in full.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """List, show or delete conversations.

    TieredCache(model, store, conversation=ID) continues a conversation. `rm` deletes a conversation and the segments
    that no other conversation uses, except pinned ones. Conversations in use are not deleted.
    """
    check_action(action, "conversations", "ID")
    if action and not ids:
        raise Refused(f"missing conversation id; use {action} ID")
    if action == "rm":
        return _remove(store, list(dict.fromkeys(ids or ())), dry_run, as_json)
    if dry_run:
        raise Refused("--dry-run can only be used with rm")
    contents = contents_of(store)
    with files_of(store) as files:
        infos = Conversations(files).listed(contents.rows)
    if not action:
        return print_json([info.as_dict() for info in infos]) if as_json else _list(infos)
    if ids is None or len(ids) != 1:
        raise Refused("show takes one conversation; use show ID")
    matching_infos = [info for info in infos if info.id == ids[0]]
    if not matching_infos:
        raise Refused(
            f"conversation {ids[0]!r} does not exist; `hf-tiered-cache conversations {store}` lists all conversations"
        )
    return print_json(matching_infos[0].as_dict()) if as_json else _show(matching_infos[0], contents.rows)


def _list(infos: list[ConversationInfo]) -> None:
    notes = [_notes(info) for info in infos]
    note_columns = ("notes",) if any(notes) else ()
    text_columns, number_columns = ("conversation", "model", "method"), ("turns", "tokens", "size", "last used")
    table = figures(
        *text_columns, *number_columns, *note_columns, right=number_columns, fold=(*text_columns, *note_columns)
    )
    for info, note in zip(infos, notes, strict=True):
        names = printable(info.id), model_name(info.model, info.fingerprint), printable(info.method)
        cells = f"{info.turns:,}", f"{info.tokens_there:,}", format_bytes(info.bytes), ago(info.used)
        table.add_row(*names, *cells, *[note] * len(note_columns))
    if infos:
        table.show()
        print()
    print(f"total: {count(len(infos), 'conversation')}, {sum(info.tokens_there for info in infos):,} tokens")


def _notes(info: ConversationInfo) -> str:
    """Return notes, such as "in use by process 4711, evicted: 64 of 960 tokens left"."""
    notes = []
    if info.in_use_by is not None:
        notes.append(f"in use by process {info.in_use_by}" if info.in_use_by else "in use")
    if info.tokens_there < info.tokens:
        notes.append(f"evicted: {info.tokens_there:,} of {info.tokens:,} tokens left")
    return ", ".join(notes)


def _show(info: ConversationInfo, rows: list[SegmentRow]) -> None:
    table = facts()
    table.add_row("conversation", printable(info.id))
    add_model(table, info.model, info.fingerprint)
    table.add_row("method", printable(info.method))
    table.add_row("provenance", printable(info.provenance))
    table.add_row("turns", f"{info.turns:,}")
    table.add_row("tokens", f"{info.tokens_there:,}")
    table.add_row("on disk", f"{format_bytes(info.bytes)} ({info.bytes:,} bytes)")
    table.add_row("created", date(info.created))
    table.add_row("last used", ago(info.used))
    table.add_row("notes", _notes(info) or "none")
    table.show()
    print()
    rows_by_id, id_length = {row.id: row for row in rows}, unique_length(row.id for row in rows)
    segments = figures("segment", "tokens", "from", "size", "notes", right=("tokens", "from", "size"))
    for name in info.segments:
        if (row := rows_by_id.get(name)) is None:
            segments.add_row(name[:id_length], "", "", "", "evicted")
        else:
            segments.add_row(name[:id_length], f"{row.tokens:,}", f"{row.position:,}", format_bytes(row.nbytes), "")
    segments.show()


def _remove(store: Path, ids: list[str], dry_run: bool, as_json: bool) -> None:
    from ..kvstore import storage_of

    with open_store(store) as kv_store:
        storage = storage_of(kv_store)
        contents, rows = contents_of_open(kv_store), storage.segments_of_conversations(ids)
        if not as_json:
            show_removed(contents, rows)
        if not dry_run:
            storage.remove_conversations(ids)
    nbytes = sum(row.nbytes for row in rows)
    if as_json:
        return print_json({"removed": ids, "segments": [row.id for row in rows], "bytes": nbytes, "dry_run": dry_run})
    summary = f"{count(len(ids), 'conversation')}, {count(len(rows), 'segment')}, {format_bytes(nbytes)}"
    print(f"{'would delete' if dry_run else 'deleted'} {summary}")
