"""Aligned columns of text. A row takes microseconds; a row of a rich table takes a millisecond."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "


class Table:
    """Table of text with headings, without lines.

    Args:
        headings: Headings of the columns, in order.
        right: Headings of the columns that are aligned to the right.
        fold: Headings of the columns that may continue on a second line. All others are never cut off.
        has_heading: Whether headings are shown. If not, the first column is shown dim.
    """

    def __init__(
        self, headings: Sequence[str], right: Collection[str] = (), fold: Collection[str] = (), has_heading: bool = True
    ) -> None:
        self._headings = tuple(headings)
        self._is_right = [heading in right for heading in headings]
        self._foldable = [column for column, heading in enumerate(headings) if heading in fold]
        self._has_heading = has_heading
        self._rows: list[tuple[str, ...]] = [self._headings] if has_heading else []

    def add_row(self, *cells: str) -> None:
        """Add a row with one cell per column, each a single line of text."""
        self._rows.append(cells)

    def show(self) -> None:
        """Print the table, fitted to the terminal's width. In a pipe, nothing is folded."""
        console = Console(markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            for line in self._lines(self._widths()):
                print(line)
            return
        widths = self._fitted(console.width)
        for number, line in enumerate(self._lines(widths, console)):
            if not self._has_heading or not number:
                text = Text(line)
                text.stylize("dim", end=None if self._has_heading else widths[0])
                console.print(text, soft_wrap=True)
            else:
                print(line)

    def _widths(self) -> list[int]:
        """Return the width of each column, in terminal cells."""
        return [max(map(cell_len, cells)) for cells in zip(*self._rows, strict=True)]

    def _fitted(self, width: int) -> list[int]:
        """Return the widths of columns after the widest foldable ones are narrowed until the table fits."""
        widths = self._widths()
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        for _ in range(excess if self._foldable else 0):
            widest = max(self._foldable, key=widths.__getitem__)
            widths[widest] = max(1, widths[widest] - 1)
        return widths

    def _lines(self, widths: list[int], console: Console | None = None) -> Iterator[str]:
        """Yield the lines of all rows. Without a console, every cell fits its width."""
        for cells in self._rows:
            if console is None or all(cell_len(cells[column]) <= widths[column] for column in self._foldable):
                yield self._line(cells, widths)
                continue
            wrapped = {column: _wrap(cells[column], widths[column], console) for column in self._foldable}
            for number in range(max(map(len, wrapped.values()))):
                parts = [
                    "".join(wrapped[column][number : number + 1]) if column in wrapped else "" if number else cell
                    for column, cell in enumerate(cells)
                ]
                yield self._line(parts, widths)

    def _line(self, cells: Sequence[str], widths: list[int]) -> str:
        padded = []
        for cell, width, is_right in zip(cells, widths, self._is_right, strict=True):
            padding = " " * (width - cell_len(cell))
            padded.append(padding + cell if is_right else cell + padding)
        return _GAP.join(padded).rstrip()


def _wrap(cell: str, width: int, console: Console) -> list[str]:
    """Return the lines of a cell, broken between words where possible."""
    return [line.plain.rstrip() for line in Text(cell).wrap(console, width, overflow="fold")]
