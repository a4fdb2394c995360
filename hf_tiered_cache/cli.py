"""`hf-tiered-cache`: look into a store, check it, clean it up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .errors import TieredCacheError
from .integrations import command
from .kvstore import KVStore, parse_bytes
from .stats import format_bytes
from .store.catalogue import SegmentRow
from .store.format import EXACT, sections
from .store.segment import read_head

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look into a KV store, check it, clean it up. Every command takes --json for scripts.",
)

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one document, in place of a table.")]


@app.command("ls")
def list_segments(store: StorePath, as_json: AsJson = False) -> None:
    """List the segments of a store, last used last.

    A segment is a run of tokens whose KV lies in one file: a prompt, or what one prompt adds to another.
    """
    with _open(store) as opened:
        pinned = opened.disk.pinned()
        rows = [_describe(row, row.id in pinned) for row in opened.segments()]
    if as_json:
        return _print_json(rows)
    table = Table("segment", "model", "tokens", "from token", "on disk", "used", "uses", "notes", box=None)
    for row in rows:
        notes = [note for note in ("pinned", "expired") if row[note]]
        if row["provenance"] != EXACT:
            notes.append(row["provenance"])
        if row["usable_tokens"] < row["tokens"]:
            notes.append(f"{row['usable_tokens']} tokens usable")
        table.add_row(
            row["id"],
            row["fingerprint"][:8],
            str(row["tokens"]),
            str(row["position"]),
            format_bytes(row["bytes"]),
            _ago(row["used"]),
            str(row["uses"]),
            ", ".join(notes),
        )
    _print(table)


@app.command("stat")
def show(
    store: StorePath,
    segment: Annotated[
        str, typer.Argument(help="A segment's id, or the beginning of one. Without: the whole store.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show what a store holds, or what one segment is: its model, geometry, layers and sections."""
    with _open(store) as opened:
        if not segment:
            stats = opened.stats
            return _print_json(stats.as_dict()) if as_json else print(stats)
        row = _one(opened.segments(), segment)
        header, *_ = read_head(opened.disk.path(row.id))
        described = _describe(row, row.id in opened.disk.pinned()) | {
            "parent": header.parent.hex(),
            "geometry": dict(zip(_GEOMETRY, header.shape.geometry.to_json(), strict=True)),
            "layout": header.shape.layout.to_json(),
            "chunks": header.shape.chunks,
            "lanes": [{"layers": list(lane.layers), "block_bytes": lane.block_bytes} for lane in header.shape.lanes],
            "sections": {
                name: {"offset": section.offset, "bytes": section.nbytes} for name, section in sections(header).items()
            },
        }
    if as_json:
        return _print_json(described)
    table = Table(box=None, show_header=False)
    for name, value in described.items():
        if name in ("created", "used", "expires") and value is not None:
            value = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        table.add_row(name.replace("_", " "), str(value))
    _print(table)


_GEOMETRY = ("chunk_tokens", "layers_per_block", "heads_per_block", "split_kv")


@app.command()
def verify(store: StorePath, as_json: AsJson = False) -> None:
    """Read every byte of a store and compare every checksum. Exit status 1 if a segment is damaged.

    Damage costs no more than the damaged tokens: they are computed and stored again when they are next asked for.
    """
    with _open(store) as opened:
        report = opened.verify(progress=not as_json)
    if as_json:
        _print_json(report.as_dict())
    else:
        print(f"{report.segments} segments, {report.blocks} blocks, {format_bytes(report.nbytes)}: ", end="")
        print("all whole" if report.ok else f"{len(report.bad)} damaged")
        for segment, reason in report.bad.items():
            print(f"  {segment}: {reason}")
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def gc(
    store: StorePath,
    quota: Annotated[str | None, typer.Option(help="Also evict until the store fits, e.g. 100GiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete what no request can use: expired and damaged segments, and files of writers that have died."""
    with _open(store, disk_quota=quota) as opened:
        report = opened.gc()
    if as_json:
        return _print_json(report.as_dict())
    print(
        f"deleted {report.expired} expired and {report.damaged} damaged segments, "
        f"{format_bytes(report.temporary_bytes)} of unfinished files; evicted {report.evicted} segments"
    )


@app.command()
def rm(
    store: StorePath,
    segments: Annotated[list[str] | None, typer.Argument(help="Ids of segments, or beginnings of them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All segments, pinned ones too.")] = False,
    model: Annotated[
        str | None, typer.Option(help="All segments of the model whose fingerprint begins like this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete segments. Programs that have them open finish undisturbed."""
    with _open(store) as opened:
        rows = opened.segments()
        if everything:
            chosen = rows
        elif model is not None:
            chosen = [row for row in rows if row.fingerprint.startswith(model)]
        elif segments:
            chosen = [_one(rows, name) for name in segments]
        else:
            raise _Refused("name segments, or give --model or --all")
        removed = opened.remove([row.id for row in chosen])
    if as_json:
        return _print_json({"removed": removed, "bytes": sum(row.nbytes for row in chosen)})
    print(f"deleted {removed} segments, {format_bytes(sum(row.nbytes for row in chosen))}")


@app.command()
def calibrate(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder; made if missing.")],
    model: Annotated[str, typer.Option(help="A causal LM: a name on the hub, or a folder.")],
    passages: Annotated[int, typer.Option(min=1, help="In the prompt that is measured.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Of each passage.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 3,
    memory: Annotated[str, typer.Option(help="Host memory of the store.")] = "1GiB",
    warm: Annotated[bool, typer.Option(help="Let passages come from memory, in place of the disk.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the model, such as bfloat16; auto: as it was saved.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how much of a passage to compute, and how much to load, so that the first token comes soonest.

    What is found is kept in the store, for this model on this device and prompts of this length; other lengths may be
    measured too. CacheTune(recompute="auto") takes it, and between two lengths what lies between. Random passages are
    stored for the time of the measurement.
    """
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    except (OSError, ValueError) as error:
        raise _Refused(f"the model {model!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    with KVStore(store, host_memory=memory) as opened:
        found = opened.calibrate(
            loaded, passages=passages, tokens=tokens, repeats=repeats, cold=not warm, progress=not as_json
        )
    if as_json:
        return _print_json(found.as_dict())
    table = Table("share computed", "time to first token, ms", "", box=None)
    for ratio, seconds in sorted(found.seconds.items()):
        notes = {0.0: "full reuse", 1.0: "full recompute"}.get(ratio, "")
        table.add_row(f"{ratio:.3f}", f"{1e3 * seconds:.0f}", "taken" if ratio == found.ratio else notes)
    _print(table)
    print(
        f"kept for this model and device, prompts of {found.tokens} tokens: {found.ratio:.3f} "
        f"(computing and loading balance at {found.balanced:.3f})"
    )


app.command("lm-eval", context_settings=command.PASS_ON)(command.lm_eval)


class _Refused(TieredCacheError):
    """The command line asks for what is not there."""


def _open(path: Path, *, disk_quota: str | None = None) -> KVStore:
    if not (path / "segments").is_dir():
        raise _Refused(f"there is no store at {path}")
    if disk_quota is not None:
        parse_bytes(disk_quota, "--quota")
    return KVStore(path, engine="posix", host_memory=0, disk_quota=disk_quota)


def _one(rows: list[SegmentRow], name: str) -> SegmentRow:
    found = [row for row in rows if row.id.startswith(name)]
    if len(found) != 1:
        raise _Refused(f"{len(found) or 'no'} segments begin with {name!r}; `hf-tiered-cache ls` lists them")
    return found[0]


def _describe(row: SegmentRow, pinned: bool) -> dict[str, Any]:
    links = len(row.chain) // len(row.first)
    return {
        "id": row.id,
        "fingerprint": row.fingerprint,
        "provenance": row.provenance,
        "tokens": row.tokens,
        "usable_tokens": row.tokens * row.usable_links // links,
        "position": row.position,
        "bytes": row.nbytes,
        "created": row.created,
        "used": row.used,
        "uses": row.uses,
        "expires": row.expires,
        "expired": row.expires is not None and row.expires <= time.time(),
        "pinned": pinned,
    }


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _print(table: Table) -> None:
    Console(width=None if Console().is_terminal else 140).print(table)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def main() -> None:
    """The entry point: errors that the user can mend are one line, and exit status 2."""
    try:
        app(standalone_mode=True)
    except TieredCacheError as error:
        typer.echo(f"hf-tiered-cache: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
