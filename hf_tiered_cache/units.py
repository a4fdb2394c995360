"""Sizes, durations and tables as text; no other module converts between numbers of bytes and text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_SIZE = re.compile(r"(\d+|\d*\.?\d+(?= *[a-z])) *([a-z]*)", re.IGNORECASE | re.ASCII)
"""A whole number of bytes, or a number and a unit."""
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtpe", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_bytes(size: int | str, name: str) -> int:
    """Return a size in bytes.

    Args:
        size: An int, or a string such as "10GiB" (2^30 each), "10GB" or "10G" (10^9); case does not matter.
        name: Name of the setting, for the error message.

    Raises:
        ConfigError: The size is not valid.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match and (unit := match[2].lower()) in _UNITS:
        return int(Decimal(match[1]) * _UNITS[unit])
    raise ConfigError(
        f"{name}={size!r} is not a valid size; pass bytes as an int, or a string such as '10GiB' or '500MB'"
    )


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` in binary units, such as "1.5 MiB"."""
    import humanize  # with rich, only needed to print: measurements run without both

    return humanize.naturalsize(nbytes, binary=True)


def format_seconds(seconds: float) -> str:
    """Return a duration in milliseconds or seconds, such as "1.5 ms"."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def render(table: Table) -> str:
    """Render a table as plain text."""
    from rich.console import Console

    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def render_html(table: Table) -> str:
    """Render a table as HTML, for notebooks."""

    def row(tag: str, cells: Iterable[object]) -> str:
        styled = zip(cells, table.columns, strict=True)
        return "".join(f'<{tag} style="text-align: {c.justify}">{html.escape(str(cell))}</{tag}>' for cell, c in styled)

    title = f"<caption>{html.escape(str(table.title))}</caption>" if table.title else ""
    head = f"<tr>{row('th', (c.header for c in table.columns))}</tr>" if table.show_header else ""
    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in zip(*(c.cells for c in table.columns), strict=True))
    return f"<table>{title}{head}{body}</table>"


def listing(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table
