"""Table and figure of docs/choosing.md, from committed results on pretrained models.

python -m eval.choosing
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from hf_tiered_cache.cli.output import replacing

from .errors import EvalError
from .files import check_picture, write
from .plots import Row, mean_over, method_of
from .report import read

ROOT = Path(__file__).parents[1]
_RESULTS = ROOT / "eval" / "results"
_CONVERSATIONS = ROOT / "bench" / "results" / "conversation-answers-smollm2-135m-float32-replay.json"
_PREFIX, _LONG_PREFIX = ("real-smollm2-135m",), ("real-4k-smollm2-135m",)
_TEXT, _INDEX = ("real-text-smollm2-135m",), ("real-index-smollm2-135m",)
_PASSAGES = ("real-passages-hotpotqa-smollm2-135m", "real-passages-musique-smollm2-135m")
_MARKS = ("<!-- table by eval.choosing -->", "<!-- end of table -->")


@dataclass(frozen=True)
class _Figures:
    """Figures by which methods are compared.

    Args:
        cost: Name of the figure that a method saves.
        prefix: Prefix of the names of agreement and divergence: "answer_" for means over several tokens.
        text: Format of the cost.
    """

    cost: str
    prefix: str
    text: str


_FIRST_TOKEN = _Figures("brought", "", "{:.0f} % of the KV read")
_ANSWER = _Figures("answered", "answer_", "{:.0f} % of the KV read")
_COMPUTED = _Figures("compute", "", "{:.0f} % computed")


@dataclass(frozen=True)
class Recommendation:
    """Row of the table: a method for a situation, and what it cost in the results of `folders`."""

    situation: str
    method: str
    folders: tuple[str, ...]
    variant: str
    figures: _Figures = _FIRST_TOKEN
    over: str = "first token of {} questions"
    """Tokens that agreement and divergence are means over, with a place for the number of examples."""


RECOMMENDATIONS = (
    Recommendation("prompts that begin alike", "Exact()", _PREFIX, "exact"),
    Recommendation("the same, and loading takes too long", "ContiguousKV(0.25)", _PREFIX, "contiguous_kv@0.25"),
    Recommendation("the same, with 4,000 stored tokens", "ContiguousKV(0.1)", _LONG_PREFIX, "contiguous_kv@0.1"),
    Recommendation(
        *("the same, with longer answers", "ContiguousKV(0.25)", _TEXT, "contiguous_kv@0.25", _ANSWER),
        over="32 tokens of {} texts",
    ),
    Recommendation(
        *("a context larger than memory", "KVDrive(1 / 16)", _INDEX, "kv_drive@0.0625", _ANSWER),
        over="31 tokens of {} texts",
    ),
    Recommendation("passages in any order", "CacheTune(0.3)", _PASSAGES, "cache_tune@0.3", _COMPUTED),
    Recommendation("the same, closer to full recompute", "CacheTune(0.5)", _PASSAGES, "cache_tune@0.5", _COMPUTED),
)
CONVERSATIONS = (
    ("conversations that come back, in less space", 'Exact(codec="int8")', "int8"),
    ("the same, as small as possible", "Krul(recompute=0.4)", "front 0.4 int8"),
)
"""Situation, method, and the name of the method in the results of bench/conversation_answers.py."""


@dataclass(frozen=True)
class _Panel:
    """Panel of the figure: divergence of methods against what they save."""

    title: str
    folders: tuple[str, ...]
    methods: tuple[str, ...]
    """Variant names of the curves."""
    figures: _Figures
    axis: str


_PANELS = (
    _Panel(
        "A stored prefix of 1,000 tokens\nfirst token of 72 questions",
        _PREFIX,
        ("contiguous_kv", "contiguous_kv.paper", "impress:probe_heads=2", "h2o"),
        _FIRST_TOKEN,
        "KV read, % of the prefix",
    ),
    _Panel(
        "A stored prefix of 1,000 tokens\n32 tokens of 8 texts",
        _TEXT,
        ("contiguous_kv", "contiguous_kv.paper", "kv_drive", "h2o"),
        _ANSWER,
        "KV read for all tokens, % of the prefix",
    ),
    _Panel(
        "Passages in any order\nfirst token of 100 questions",
        _PASSAGES,
        ("cache_tune", "cache_blend", "epic"),
        _COMPUTED,
        "passage tokens computed, %",
    ),
)
_LOOKS = {
    "contiguous_kv": ("ContiguousKV", "#0072B2", "o"),
    "contiguous_kv.paper": ("ContiguousKV.paper", "#56B4E9", "s"),
    "impress:probe_heads=2": ("Impress", "#CC79A7", "D"),
    "h2o": ("H2O", "#999999", "^"),
    "kv_drive": ("KVDrive", "#009E73", "v"),
    "cache_tune": ("CacheTune", "#D55E00", "o"),
    "cache_blend": ("CacheBlend", "#E69F00", "s"),
    "epic": ("Epic", "#7F4F24", "D"),
}
"""Label, color and marker of each method."""


def tasks_of(folders: tuple[str, ...]) -> dict[str, list[Row]]:
    """Return the results of several runs by task."""
    return {task: rows for folder in folders for task, rows in read(_RESULTS / folder)[1].items()}


def table(page: Path) -> str:
    """Return the Markdown table.

    Args:
        page: Path of the page; links are relative to its folder.

    Raises:
        EvalError: A result is missing.
    """
    headings = ("you have", "use", "cost", "same token, %", "KL, nats", "measured")
    lines = [f"| {' | '.join(headings)} |", "| --- | --- | --- | ---: | ---: | --- |"]
    for item in RECOMMENDATIONS:
        tasks = tasks_of(item.folders)
        row = next((row for row in mean_over(tasks) if row["variant"] == item.variant), None)
        if row is None:
            raise EvalError(f"{' and '.join(item.folders)} have no {item.variant}")
        names = item.figures.cost, f"{item.figures.prefix}top1", f"{item.figures.prefix}kl"
        cost, top1, divergence = (row[name]["mean"] for name in names)
        over = item.over.format(sum(rows[0]["examples"] for rows in tasks.values()))
        sources = [_RESULTS / folder / "README.md" for folder in item.folders]
        figures = item.figures.text.format(cost), f"{top1:.0f}", _loss(divergence), _measured(over, sources, page)
        lines.append(f"| {item.situation} | `{item.method}` | {' | '.join(figures)} |")
    ways = json.loads(_CONVERSATIONS.read_text(encoding="utf-8"))["found"]["chat"]
    for situation, method, name in CONVERSATIONS:
        way = ways[name]
        size = 100 * sum(way["file bytes a token"]) / sum(ways["full"]["file bytes a token"])
        top1, divergence = fmean(way["top 1"]), fmean(way["KL"])
        measurement = _measured(f"48 tokens of {len(way['KL'])} chats", [_CONVERSATIONS.with_suffix(".md")], page)
        figures = f"{size:.0f} % of the bytes stored", f"{top1:.0f}", _loss(divergence), measurement
        lines.append(f"| {situation} | `{method}` | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _loss(divergence: float) -> str:
    if divergence < 1e-6:  # rounding of the softmax
        return "0"
    return f"{divergence:#.2g}" if divergence >= 1e-4 else "below 0.0001"


def _measured(over: str, sources: list[Path], page: Path) -> str:
    """Return what was measured, with a link for each source."""
    addresses = [Path(os.path.relpath(source, page.parent)).as_posix() for source in sources]
    return f"[{over}]({addresses[0]})" + "".join(f", [more]({address})" for address in addresses[1:])


def draw() -> Figure:
    """Draw the loss of each method against what it reads or computes."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(_PANELS), sharey=True), _PANELS, strict=True):
        rows = mean_over(tasks_of(panel.folders))
        for variant in panel.methods:
            label, color, marker = _LOOKS[variant]
            points = sorted(
                (row[panel.figures.cost]["mean"], row[f"{panel.figures.prefix}kl"]["mean"])
                for row in rows
                if method_of(row) == variant and row["budget"] is not None
            )
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markerfacecolor="white", label=label)
        _dress(axes, panel)
    figure.axes[0].set_ylabel("KL divergence from full KV, nats")
    return figure


def _dress(axes: Axes, panel: _Panel) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, 60 if panel.figures is _COMPUTED else 105)
    axes.set_xlabel(panel.axis)
    axes.set_title(panel.title, fontsize="medium")
    axes.grid(axis="y", color="0.9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def inserted(text: str, new_table: str) -> str:
    """Return the text of a page with its table replaced.

    Raises:
        EvalError: The page has no place for a table.
    """
    begin, end = _MARKS
    place = f"{re.escape(begin)}.*?{re.escape(end)}"
    text, count = re.subn(place, lambda _: f"{begin}\n\n{new_table}\n{end}", text, flags=re.S)
    if count != 1:
        raise EvalError(f"the page must have {_MARKS[0]} and {_MARKS[1]} once")
    return text


def main(
    page: Annotated[Path, typer.Option(help="Page with the table; the figure is written beside it.")] = (
        ROOT / "docs" / "choosing.md"
    ),
) -> None:
    """Write the table and the figure of the page on choosing a method."""
    picture = page.with_suffix(".png")
    try:
        text = inserted(page.read_text(encoding="utf-8"), table(page))
        check_picture(picture, page)
    except EvalError as error:
        typer.echo(f"eval.choosing: {error}", err=True)
        raise typer.Exit(2) from None
    write(page, text)
    with replacing(picture) as temporary:
        draw().savefig(temporary, dpi=110)
    typer.echo(f"{page}, {picture.name}")


if __name__ == "__main__":
    typer.run(main)
