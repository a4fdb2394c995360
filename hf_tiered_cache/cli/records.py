"""Commands `conversations` and `documents`: what a store keeps under an id or a label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import suggest
from ..store.catalogue import SegmentRow
from ..store.conversations import ConversationInfo, Conversations
from ..store.documents import DocumentInfo, Documents
from ..units import format_bytes
from .contents import contents_of, contents_of_open, files_of, open_store, unique_length
from .maintain import DryRun, show_removed
from .output import (
    AsJson,
    Refused,
    StorePath,
    Table,
    add_model,
    ago,
    count,
    date,
    facts,
    model_name,
    print_json,
    printable,
)

if TYPE_CHECKING:
    from ..cache.storage import Storage


class _Command(ABC):
    """Command that lists, shows and deletes records of one kind. Cells in tables are given by heading."""

    noun: str
    argument: str
    """Field with the name that the user gave to a record; in capitals, the argument of the command."""
    is_unique = True
    """True if there is only one record of a name."""
    records: type[Conversations] | type[Documents]
    last: tuple[str, str, Callable[[float], str]]
    """Heading and field of the last time of a record, and how its details show this time."""

    @abstractmethod
    def cells(self, info: Any) -> dict[str, str]:
        """Return what is special to a record of this kind. The list leaves out the provenance."""

    @abstractmethod
    def notes(self, info: Any) -> list[str]:
        """Return notes on a record."""

    def total(self, infos: list[Any]) -> list[str]:
        """Return what all records count together, besides tokens."""
        return [count(len(infos), self.noun)]

    @abstractmethod
    def segment(self, row: SegmentRow | None) -> dict[str, str]:
        """Return the cells of one of a record's segments; None: the segment is no longer stored."""

    @abstractmethod
    def removal(self) -> tuple[Callable[[Storage, list[str]], list[SegmentRow]], Callable[..., object]]:
        """Return two functions of the names of records: the segments to delete with them, and deleting both."""

    def run(self, store: Path, action: str, names: list[str] | None, dry_run: bool, as_json: bool) -> None:
        """Run the command."""
        noun, plural, argument = self.noun, f"{self.noun}s", self.argument.upper()
        if action not in ("", "show", "rm"):
            advice = suggest(action, ("show", "rm"), f"use show {argument}, or rm {argument}")
            raise Refused(f"unknown action {action!r} for {plural}{advice}")
        if action and not names:
            raise Refused(f"missing {noun} {self.argument}; use {action} {argument}")
        if dry_run and action != "rm":
            raise Refused("--dry-run can only be used with rm")
        if action == "show" and len(names or ()) != 1:
            raise Refused(f"show takes one {noun}; use show {argument}")
        rows = contents_of(store).rows
        with files_of(store) as files:
            infos: list[Any] = list(self.records(files).listed(rows))
        known_names = {getattr(info, self.argument) for info in infos}
        if unknown := [name for name in names or () if name not in known_names]:
            raise Refused(
                f"{noun} {unknown[0]!r} does not exist; `hf-tiered-cache {plural} {store}` lists all {plural}"
            )
        if action == "rm":
            return self._remove(store, list(dict.fromkeys(names or ())), dry_run, as_json)
        if action:
            infos = [info for info in infos if getattr(info, self.argument) in (names or ())]
        if as_json:
            documents = [info.as_dict() for info in infos]
            return print_json(documents[0] if action and self.is_unique else documents)
        if not action:
            return self._list(infos)
        for info in infos:
            self._show(info, rows)

    def _list(self, infos: list[Any]) -> None:
        rows = []
        for info in infos:
            texts = {self.noun: printable(getattr(info, self.argument))}
            texts |= {"model": model_name(info.model, info.fingerprint)} | self.cells(info)
            numbers = {"tokens": f"{info.tokens_there:,}", "size": format_bytes(info.bytes)}
            heading, field, _ = self.last
            rows.append(texts | numbers | {heading: ago(getattr(info, field)), "notes": ", ".join(self.notes(info))})
        if rows:
            has_notes = any(row["notes"] for row in rows)
            columns = [name for name in rows[0] if name != "provenance" and (has_notes or name != "notes")]
            fold = {self.noun, "model", "method", "notes"}
            table = Table(*columns, right=tuple(set(columns) - fold), fold=tuple(fold))
            for row in rows:
                table.add_row(*(row[name] for name in columns))
            table.show()
            print()
        tokens = f"{sum(info.tokens_there for info in infos):,} tokens"
        print(f"total: {', '.join([*self.total(infos), tokens])}")

    def _show(self, info: Any, rows: list[SegmentRow]) -> None:
        table = facts()
        table.add_row(self.noun, printable(getattr(info, self.argument)))
        add_model(table, info.model, info.fingerprint)
        for name, cell in self.cells(info).items():
            table.add_row(name, cell)
        table.add_row("tokens", f"{info.tokens_there:,}")
        table.add_row("on disk", f"{format_bytes(info.bytes)} ({info.bytes:,} bytes)")
        table.add_row("created", date(info.created))
        heading, field, moment = self.last
        table.add_row(heading, moment(getattr(info, field)))
        table.add_row("notes", ", ".join(self.notes(info)) or "none")
        table.show()
        print()
        rows_by_id, id_length = {row.id: row for row in rows}, unique_length(row.id for row in rows)
        columns = tuple(self.segment(None))
        segments = Table("segment", *columns, right=tuple(name for name in columns if name != "notes"))
        for name in info.segments:
            segments.add_row(name[:id_length], *self.segment(rows_by_id.get(name)).values())
        segments.show()

    def _remove(self, store: Path, names: list[str], dry_run: bool, as_json: bool) -> None:
        from ..kvstore import storage_of

        segments_of, remove = self.removal()
        with open_store(store) as kv_store:
            storage = storage_of(kv_store)
            contents, rows = contents_of_open(kv_store), segments_of(storage, names)
            if not as_json:
                show_removed(contents, rows)
            if not dry_run:
                remove(storage, names)
        ids = [row.id for row in rows]
        nbytes = sum(row.nbytes for row in rows) + contents.sidecar_bytes(ids)
        if as_json:
            return print_json({"removed": names, "segments": ids, "bytes": nbytes, "dry_run": dry_run})
        summary = f"{count(len(names), self.noun)}, {count(len(rows), 'segment')}, {format_bytes(nbytes)}"
        print(f"{'would delete' if dry_run else 'deleted'} {summary}")


_Action = Annotated[str, typer.Argument(metavar="show|rm", help="Action to perform. Default: list all.")]
_Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of conversations, in full.")]
_Labels = Annotated[list[str] | None, typer.Argument(metavar="LABEL", help="Labels of documents, in full.")]


class _Conversations(_Command):
    noun, argument, records, last = "conversation", "id", Conversations, ("last used", "used", ago)

    def cells(self, info: ConversationInfo) -> dict[str, str]:
        method, provenance = printable(info.method), printable(info.provenance)
        return {"method": method, "provenance": provenance, "turns": f"{info.turns:,}"}

    def notes(self, info: ConversationInfo) -> list[str]:
        """Return notes such as "in use by process 4711" and "evicted: 64 of 960 tokens left"."""
        notes = []
        if info.in_use_by is not None:
            notes.append(f"in use by process {info.in_use_by}" if info.in_use_by else "in use")
        if info.tokens_there < info.tokens:
            notes.append(f"evicted: {info.tokens_there:,} of {info.tokens:,} tokens left")
        return notes

    def segment(self, row: SegmentRow | None) -> dict[str, str]:
        if row is None:
            return dict.fromkeys(("tokens", "from", "size"), "") | {"notes": "evicted"}
        return {"tokens": f"{row.tokens:,}", "from": f"{row.position:,}", "size": format_bytes(row.nbytes), "notes": ""}

    def removal(self) -> Any:
        from ..cache.conversation import remove_conversations, segments_of_conversations

        return segments_of_conversations, remove_conversations


def conversations(
    store: StorePath, action: _Action = "", ids: _Ids = None, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """List, show or delete conversations.

    TieredCache(model, store, conversation=ID) continues a conversation. `rm` deletes a conversation and the segments
    that no other conversation uses, except pinned ones. Conversations in use are not deleted.
    """
    _Conversations().run(store, action, ids, dry_run, as_json)


class _Documents(_Command):
    noun, argument, records, last = "document", "label", Documents, ("changed", "changed", date)
    is_unique = False

    def cells(self, info: DocumentInfo) -> dict[str, str]:
        return {"provenance": printable(info.made), "passages": f"{info.passages:,}"}

    def notes(self, info: DocumentInfo) -> list[str]:
        """Return notes such as "evicted: 1 of 3 passages" and "1 shared with another label"."""
        notes = []
        if info.evicted:
            notes.append(f"evicted: {info.evicted:,} of {count(info.passages, 'passage')}")
        elif info.tokens_there < info.tokens:
            notes.append(f"damaged or expired: {info.tokens_there:,} of {info.tokens:,} tokens left")
        if info.shared:
            notes.append(f"{info.shared:,} shared with another label")
        return notes

    def total(self, infos: list[DocumentInfo]) -> list[str]:
        return [*super().total(infos), count(sum(info.passages for info in infos), "passage")]

    def segment(self, row: SegmentRow | None) -> dict[str, str]:
        if row is None:
            return dict.fromkeys(("tokens", "size", "last used", "uses"), "")
        sizes = {"tokens": f"{row.tokens:,}", "size": format_bytes(row.nbytes)}
        return sizes | {"last used": ago(row.used), "uses": f"{row.uses:,}"}

    def removal(self) -> Any:
        from ..operations.contents import remove_documents, segments_of_documents

        return segments_of_documents, remove_documents


def documents(
    store: StorePath, action: _Action = "", labels: _Labels = None, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """List, show or delete documents.

    A document consists of the passages that store.precompute(model, passages, passages=True, labels=[...]) stored under
    one label. `rm` deletes it, including the passages that no other label uses. To replace a document, precompute its
    new passages under the same label.
    """
    _Documents().run(store, action, labels, dry_run, as_json)
