"""Shared by all commands: arguments, tables, JSON, and the error for what cannot be done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import humanize
import typer

from ..errors import TieredCacheError
from ..store import KEY_FILE_VARIABLE
from .table import Table

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar=KEY_FILE_VARIABLE,
        metavar="PATH",
        help="The file of the store's key, if it is encrypted: 32 bytes, or 64 hexadecimal digits.",
    ),
]
StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]


class Refused(TieredCacheError):
    """The command line asks for what is not there, or not wise."""


def figures(*columns: str, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> Table:
    """Return an empty table. Its columns are never cut; those of `fold` may go on in a second line."""
    return Table(columns, right, fold)


def facts() -> Table:
    """Return an empty table of names and what they are."""
    return Table(("name", "fact"), fold=("fact",), has_heading=False)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def printable(text: str) -> str:
    """In one line, and without what a terminal would take for a command."""
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))


def model_name(model: Mapping[str, str], fingerprint: str) -> str:
    """What a model is called, from what is known of it."""
    return printable(model.get("name") or model.get("class") or fingerprint[:8])


def add_model(table: Table, model: Mapping[str, str], fingerprint: str) -> None:
    """Rows that say all of it."""
    table.add_row("model", model_name(model, fingerprint))
    for name, value in sorted(model.items()):
        if name != "name" and value:
            table.add_row(f"  {printable(name)}", printable(value))
    table.add_row("fingerprint", fingerprint)


def count(number: int, noun: str) -> str:
    """As "1 segment" or "2,048 segments"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ago(moment: float) -> str:
    """How long ago that was, in words."""
    return humanize.naturaltime(max(0.0, time.time() - moment))


def date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def confirm(question: str) -> bool:
    """Ask at the terminal. Raises Refused where nobody sits at one."""
    if not sys.stdin.isatty():
        raise Refused(f"{question} There is no terminal to ask at: give --yes, or --dry-run to see what would go")
    return typer.confirm(question, err=True)


def read_text(path: Path) -> str:
    """Return a file's text. Raises Refused if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"--text {path} is no text in UTF-8") from error


def plotting() -> Any:
    """Return `matplotlib.pyplot`. Raises Refused if it is missing: to be called before anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise Refused("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
