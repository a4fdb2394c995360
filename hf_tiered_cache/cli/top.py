"""Command `top`: a live view of what programs do with a store."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..store.catalogue import SegmentRow
from ..units import format_bytes
from .contents import Contents, contents_of, unique_length
from .output import StorePath, ago, count, model_name, printable

_SHOWN = 15


@dataclass
class Activity:
    """Changes of a store since the command started, from look to look at its catalogue.

    Attributes:
        seconds: Time observed so far.
        uses: Number of times that segments were restored.
        stored: Number of new segments, and their bytes.
        removed: Number of segments that are gone (evicted, expired or deleted), and their bytes.
        events: Last event of each segment that was stored, restored or removed, by id.
        gone: Rows of the removed segments, by id.
    """

    seconds: float = 0.0
    uses: int = 0
    stored: tuple[int, int] = (0, 0)
    removed: tuple[int, int] = (0, 0)
    events: dict[str, str] = field(default_factory=dict)
    gone: dict[str, SegmentRow] = field(default_factory=dict)

    def observe(self, before: Contents, after: Contents, seconds: float) -> None:
        """Add what changed from one look to the next, `seconds` later."""
        old, new = ({row.id: row for row in contents.rows} for contents in (before, after))
        self.seconds += seconds
        for segment_id, row in new.items():
            if segment_id not in old:
                self.stored = self.stored[0] + 1, self.stored[1] + row.nbytes
                self.events[segment_id] = "stored"
                self.gone.pop(segment_id, None)
            num_uses = row.uses - (old[segment_id].uses if segment_id in old else 1)  # storing counts as a use
            if num_uses > 0:
                self.uses += num_uses
                self.events[segment_id] = "restored"
        for segment_id in old.keys() - new.keys():
            self.removed = self.removed[0] + 1, self.removed[1] + old[segment_id].nbytes
            self.events[segment_id] = "removed"
            self.gone[segment_id] = old[segment_id]


def draw(store: Path, contents: Contents, activity: Activity) -> Group:
    """Return the view: totals, rates, and the segments of the last events, most recent first."""
    rows = contents.rows
    free = format_bytes(shutil.disk_usage(store).free)
    totals = (
        f"{store}: {count(len(rows), 'segment')}, {sum(row.tokens for row in rows):,} tokens, "
        f"{format_bytes(sum(row.nbytes for row in rows))} on disk, {free} free"
    )
    seconds = max(activity.seconds, 1e-9)
    rates = (
        f"last {activity.seconds:.0f} s: {count(activity.uses, 'use')} ({activity.uses / seconds:.1f}/s), "
        f"stored {_sum(activity.stored)}, removed {_sum(activity.removed)}"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("segment", "event", "model", "label"):  # a terminal that is too narrow shortens long names first
        table.add_column(heading, no_wrap=heading in ("segment", "event"), overflow="ellipsis")
    for heading in ("tokens", "size", "uses", "last used"):
        table.add_column(heading, justify="right", no_wrap=True)
    recent = sorted(rows, key=lambda row: row.used)
    width = unique_length(row.id for row in rows)
    for row in [*list(activity.gone.values())[::-1], *recent[::-1]][:_SHOWN]:
        model = model_name(contents.models.get(row.fingerprint, {}), row.fingerprint)
        model = Path(model).name if Path(model).is_absolute() else model
        cells = (row.id[:width], activity.events.get(row.id, ""), model, printable(row.label), f"{row.tokens:,}")
        table.add_row(*map(Text, (*cells, format_bytes(row.nbytes), f"{row.uses:,}", ago(row.used))))
    return Group(Text(totals), Text(rates), Text(), table)


def _sum(number_and_bytes: tuple[int, int]) -> str:
    number, nbytes = number_and_bytes
    return f"{count(number, 'segment')}, {format_bytes(nbytes)}" if number else "nothing"


def top(
    store: StorePath,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the store.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="Duration, in seconds; 0: until Ctrl+C.")] = 0.0,
) -> None:
    """Watch uses, new segments and evictions of a store.

    Shows the totals of the store, what programs restored, stored and removed since the command started, and the most
    recently used segments. It reads the catalogue only, and changes nothing. In a pipe, prints the view once, at the
    end.
    """
    contents, activity = contents_of(store), Activity()
    start = looked = time.monotonic()
    console = Console(highlight=False, emoji=False)
    try:
        with Live(draw(store, contents, activity), console=console, auto_refresh=False) as live:
            while not seconds or looked - start < seconds:
                time.sleep(min(interval, seconds or interval))
                before, contents, now = contents, contents_of(store), time.monotonic()
                activity.observe(before, contents, now - looked)
                looked = now
                live.update(draw(store, contents, activity), refresh=True)
    except KeyboardInterrupt:
        pass  # the usual way to end it
    if not console.is_terminal:
        console.line()  # Live ends the last line in terminals only
