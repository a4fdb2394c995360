"""Output of all commands: arguments, aligned tables, JSON and the error class."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import humanize
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..errors import TieredCacheError
from ..store import KEY_FILE_VARIABLE
from ..store.settings import scheme_of, without_secrets

_GAP = "  "
_NO_TIME = "unknown"  # text for a number that is no time, as in a damaged catalogue


class Table:
    """Table of text with headings, without lines.

    Args:
        headings: Headings of the columns, in order.
        right: Headings of the columns that are aligned to the right.
        fold: Headings of the columns that may continue on a second line. All others are never cut off.
        has_heading: Whether headings are shown. If not, the first column is shown dim.
    """

    def __init__(
        self, *headings: str, right: Collection[str] = (), fold: Collection[str] = (), has_heading: bool = True
    ) -> None:
        self._folds = [heading in fold for heading in headings]
        self._widths = [cell_len(heading) if has_heading else 0 for heading in headings]
        self._table = RichTable(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), show_header=has_heading)
        self._table.header_style = "dim"
        for number, heading in enumerate(headings):
            self._table.add_column(
                heading,
                justify="right" if heading in right else "left",
                no_wrap=heading not in fold,
                overflow="fold",
                style="" if has_heading or number else "dim",
            )

    def add_row(self, *cells: str) -> None:
        """Add a row with one cell per column, each a single line of text."""
        self._widths = list(map(max, self._widths, map(cell_len, cells)))
        self._table.add_row(*map(Text, cells))

    def show(self) -> None:
        """Print the table, fitted to the terminal's width. In a pipe, nothing is folded."""
        console = Console(markup=False, highlight=False, emoji=False)
        gaps = len(_GAP) * (len(self._widths) - 1)
        least = gaps + sum(1 if folds else width for folds, width in zip(self._folds, self._widths, strict=True))
        console.width = max(console.width, least) if console.is_terminal else gaps + sum(self._widths)
        with console.capture() as capture:
            console.print(self._table)
        for line in capture.get().splitlines():
            print(line.rstrip())


KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar=KEY_FILE_VARIABLE,
        metavar="PATH",
        help="File with the encryption key of the store: 32 bytes, or 64 hexadecimal digits. Needed if encrypted.",
    ),
]


def path(store: str) -> Path:
    """Return the folder of a store. Raises Refused for an address, which the command does not take."""
    if scheme_of(store):
        raise Refused(
            f"{without_secrets(store)} is an address, and this command takes folders only; in Python, "
            "KVStore(address) has the same operations"
        )
    return Path(store)


StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.", parser=path)]
StoreAddress = Annotated[
    str,
    typer.Argument(metavar="STORE", help="Folder of the store, or the address of a remote, such as s3://bucket/kv."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document, for scripts.")]


class Refused(TieredCacheError):
    """Error for a command line that asks for something that does not exist, or is unsafe."""


def facts() -> Table:
    """Return an empty table of names and values."""
    return Table("name", "fact", fold=("fact",), has_heading=False)


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
    try:
        return humanize.naturaltime(max(0.0, time.time() - moment))
    except (ValueError, OverflowError):
        return _NO_TIME


def date(moment: float) -> str:
    """Return a time as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return _NO_TIME


def confirm(question: str) -> bool:
    """Ask the user at the terminal. Raises Refused if there is no terminal."""
    if not sys.stdin.isatty():
        raise Refused(
            f"{question} Confirmation requires a terminal: pass --yes, or --dry-run to see what would be deleted"
        )
    return typer.confirm(question, err=True)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises Refused if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"--text {path} is not a UTF-8 text file") from error


def plotting() -> Any:
    """Return `matplotlib.pyplot`. Raises Refused if it is missing, so call this before measuring."""
    try:
        import matplotlib
    except ImportError as error:
        raise Refused("--plot requires matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def picture(plot: Path) -> Path:
    """Return the file of a picture, by default a .png.

    Raises Refused if it is not a .png, .svg or .pdf file of a folder, cannot be written, or exists and `plot` does not
    name it.
    """
    if plot.is_dir():
        raise Refused(f"--plot {plot} is a folder; name a file in it")
    path = plot if plot.suffix else Path(f"{str(plot).rstrip('.')}.png")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Refused(f"--plot {plot} is no name of a picture; end it with .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise Refused(f"the folder of --plot {plot} does not exist; create it, or name another one")
    if path != plot and path.exists():
        raise Refused(f"{path} exists; replace it with --plot {path}, or name another file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise Refused(f"{path} cannot be written ({error.strerror}); name another file with --plot") from error
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which then takes the place of `path`. Other links to that keep what they had."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    temporary.open("xb").close()  # raises FileExistsError instead of replacing a file of somebody
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
