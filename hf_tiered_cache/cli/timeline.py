"""Command `timeline`: a trace (`TieredCache(..., trace="trace.json")`) as a picture and as sums."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Refused, Table, picture, plotting, printable, replacing

TRACKS = ("model", "cache", "disk")
_MARK = "hf-tiered-cache timeline"  # name of this program in the pictures that it draws, which it may overwrite
_COLORS = {
    "update": "#4c78a8", "select": "#f58518", "wait for KV": "#e45756", "look up": "#72b7b2", "build index": "#b279a2",
    "read": "#54a24b",
}  # fmt: skip
_MODEL_COLORS = ("#9d9d9d", "#c9c9c9")
"""Colors of the model's computation, in turns, so that layers can be told apart."""


@dataclass
class Pass:
    """Events of one forward pass.

    Attributes:
        began: Begin, in microseconds.
        ended: End.
        restored: Number of tokens whose KV it restored.
        computed: Number of tokens that it computed.
        events: Track, name, begin and duration of each event, in microseconds.
    """

    began: float
    ended: float
    restored: int
    computed: int
    events: list[tuple[str, str, float, float]] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """Duration of the pass."""
        return (self.ended - self.began) / 1e3

    def sums(self) -> dict[str, float]:
        """Return the milliseconds spent on each kind of event; the model's computation as "compute"."""
        total: dict[str, float] = defaultdict(float)
        for track, name, _, duration in self.events:
            total["compute" if track == "model" else name] += duration / 1e3
        return dict(total)


def read_trace(path: Path) -> list[Pass]:
    """Return the passes of a trace, in order. Raises Refused if the file is not a trace of this library."""
    try:
        text = path.read_text(encoding="utf-8").rstrip()
        text = text if text.endswith("]") else f"{text.rstrip(',')}]"
        document = json.loads(text, parse_constant=int)  # int("NaN") raises ValueError
        name_events = [event for event in document if event.get("ph") == "M"]
        name_events = [event for event in name_events if event["name"] == "thread_name"]
        tracks = {event["tid"]: TRACKS[TRACKS.index(event["args"]["name"])] for event in name_events}
        events = [event for event in document if event.get("ph") == "X"]
        passes = sorted((_pass(event) for event in events if event["name"] == "pass"), key=lambda entry: entry.began)
        begins = [entry.began for entry in passes]
        for event in events if passes else ():
            owner = passes[max(0, bisect_right(begins, event["ts"]) - 1)]  # the last one that began before
            if event["name"] != "pass" and owner.began <= event["ts"] <= owner.ended:
                name, duration = printable(event["name"]), float(event["dur"])
                owner.events.append((tracks[event["tid"]], name, float(event["ts"]), duration))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Refused(f"{path} is not a trace; make one with TieredCache(..., trace='trace.json')") from error
    if not passes:
        raise Refused(f"{path} holds no pass yet")
    return passes


def _pass(event: dict[str, Any]) -> Pass:
    counts = event["args"]
    start, duration = float(event["ts"]), float(event["dur"])
    return Pass(start, start + duration, int(counts["restored"]), int(counts["computed"]))


def typical(passes: list[Pass]) -> dict[str, Pass]:
    """Return the pass that restored most, and the median pass of one token, by a title."""
    prompt = max(passes, key=lambda entry: (entry.restored, entry.computed))
    by_title = {f"prompt: {prompt.restored:,} tokens restored, {prompt.computed:,} computed": prompt}
    tokens = sorted(
        (entry for entry in passes if entry.computed <= 1 and not entry.restored), key=lambda entry: entry.milliseconds
    )
    if tokens:
        by_title[f"one token (median of {len(tokens):,})"] = tokens[len(tokens) // 2]
    return by_title


def draw(by_title: dict[str, Pass], out: Path) -> None:
    """Draw passes below one another: a row for each track, and time to the right."""
    plt = plotting()
    figure, rows = plt.subplots(len(by_title), 1, figsize=(11, 2.4 * len(by_title) + 0.6), squeeze=False)
    for axes, (title, entry) in zip(rows[:, 0], by_title.items(), strict=True):
        number = 0
        for track, name, start, duration in sorted(entry.events, key=lambda event: event[2]):
            color = _COLORS.get(name)
            if track == "model":
                color, number = _MODEL_COLORS[number % 2], number + 1
            height = 0.8 if name in ("update", "read") or track == "model" else 0.5  # sections lie within an update
            axes.barh(
                TRACKS.index(track), duration / 1e3, left=(start - entry.began) / 1e3, height=height, color=color,
                label=name if track != "model" else "compute", zorder=3 if height < 0.8 else 2,
            )  # fmt: skip
        axes.set(title=f"{title}, {entry.milliseconds:.1f} ms", xlabel="ms", xlim=(0, entry.milliseconds))
        axes.set_yticks(range(len(TRACKS)), TRACKS)
        axes.set_ylim(len(TRACKS) - 0.5, -0.5)
        by_name = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(by_name.values(), by_name.keys(), fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    with replacing(out) as temporary:
        figure.savefig(temporary, dpi=120, metadata={"Software": _MARK} if out.suffix == ".png" else None)
    plt.close(figure)


def timeline(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, help="File of TieredCache(trace=...).")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write. Default: the name of the trace, with the ending .png.")
    ] = None,
) -> None:
    """Draw a trace, and show where time was spent.

    Shows the pass that restored most tokens, and the median pass of one token. For every event, open the trace in
    https://ui.perfetto.dev.
    """
    out = picture(trace.with_suffix(".png") if plot is None else plot)
    by_title = typical(read_trace(trace))
    if plot is None and out.exists() and not (out.is_file() and _MARK.encode() in out.read_bytes()[:4096]):
        raise Refused(f"{out} exists, and this command did not draw it; name another file with --plot")
    sums = {title: entry.sums() for title, entry in by_title.items()}
    kinds = list(dict.fromkeys(kind for entry in sums.values() for kind in entry))
    table = Table("pass", "ms", *kinds, right=("ms", *kinds))
    for title, entry in by_title.items():
        table.add_row(title, f"{entry.milliseconds:.1f}", *(f"{sums[title].get(kind, 0.0):.1f}" for kind in kinds))
    table.show()
    draw(by_title, out)
    print(f"\nwrote {out}; times of select, wait for KV and look up can be a part of update")
