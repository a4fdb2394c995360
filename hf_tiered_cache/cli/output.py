"""Arguments, tables, JSON output and the error class that all commands share."""

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
    """Error for a command line that asks for something that does not exist, or is unsafe."""


def figures(*columns: str, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> Table:
    """Return an empty table. Columns are never cut off; those of `fold` may continue on a second line."""
    return Table(columns, right, fold)


def facts() -> Table:
    """Return an empty table of names and values."""
    return Table(("name", "fact"), fold=("fact",), has_heading=False)


def print_json(document: Any) -> None:
    """Print a document as indented JSON."""
    print(json.dumps(document, indent=2))


def printable(text: str) -> str:
    """Return text as one line, without characters that a terminal could interpret as commands."""
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))


def model_name(model: Mapping[str, str], fingerprint: str) -> str:
    """Return the name of a model, from the known facts about it."""
    return printable(model.get("name") or model.get("class") or fingerprint[:8])


def add_model(table: Table, model: Mapping[str, str], fingerprint: str) -> None:
    """Add rows with all known facts about a model."""
    table.add_row("model", model_name(model, fingerprint))
    for name, value in sorted(model.items()):
        if name != "name" and value:
            table.add_row(f"  {printable(name)}", printable(value))
    table.add_row("fingerprint", fingerprint)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 segment" or "2,048 segments"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ago(moment: float) -> str:
    """Return how long ago a time was, in words."""
    return humanize.naturaltime(max(0.0, time.time() - moment))


def date(moment: float) -> str:
    """Return a time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def confirm(question: str) -> bool:
    """Ask the user at the terminal. Raises Refused if there is no terminal."""
    if not sys.stdin.isatty():
        raise Refused(f"{question} There is no terminal to ask at: give --yes, or --dry-run to see what would go")
    return typer.confirm(question, err=True)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises Refused if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"--text {path} is no text in UTF-8") from error


def plotting() -> Any:
    """Return `matplotlib.pyplot`. Raises Refused if it is missing, so call this before measuring."""
    try:
        import matplotlib
    except ImportError as error:
        raise Refused("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
