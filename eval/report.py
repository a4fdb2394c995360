"""Draw plots and write a Markdown page from the results of `eval.run`.

python -m eval.report results/
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_tiered_cache.cli.output import replacing

from .errors import EvalError
from .files import check_file, check_picture, write
from .plots import Row, draw_overview, draw_task, metric_label, styles_of
from .runner import FULL

_TITLE = ": methods compared with full KV"
"""End of the first line of a report."""


@dataclass(frozen=True)
class _Column:
    """Column of a results table."""

    heading: str
    name: str
    form: str
    unit: float = 1
    interval: bool = False
    zeros: bool = True
    """True if the column is shown even if it is 0 in all rows."""
    about: str = ""
    """Explanation below the title of the page, with the column's name."""


_COLUMNS = (
    _Column("", "score", ".1f", interval=True),  # the heading is the name of the metric
    _Column(
        "top-1, %",
        "top1",
        ".1f",
        interval=True,
        about="`top-1`: how often the most likely first new token is that of full KV.",
    ),
    _Column(
        "KL, nats",
        "kl",
        ".2g",
        interval=True,
        about="`KL`: KL divergence of the first new token's distribution from that of full KV.",
    ),
    _Column(
        "answer's top-1, %",
        "answer_top1",
        ".1f",
        interval=True,
        about="`answer's top-1`, `answer's KL`: means over the tokens of the reference answer, which is fed token by "
        "token.",
    ),
    _Column("answer's KL, nats", "answer_kl", ".2g", interval=True),
    _Column(
        "computed, %",
        "compute",
        ".1f",
        about="`computed`: share of the passages' stored tokens that was recomputed, mean over the layers.",
    ),
    _Column(
        "read, %",
        "read",
        ".1f",
        about="`read`: share of the stored prefix's KV that was read for the first token, from any tier. Blocks with "
        "at least one token that it attends to count in full.",
    ),
    _Column(
        "identified, %",
        "identified",
        ".1f",
        zeros=False,
        about="`identified`: the same for blocks that were read only to select.",
    ),
    _Column(
        "a token, %",
        "per_token",
        ".2f",
        zeros=False,
        about="`a token`: KV that was read for each token after the first, in percent of the prefix's KV.",
    ),
    _Column(
        "index, %",
        "index",
        ".1f",
        zeros=False,
        about="`index`: size of the index that was in memory before the request, in percent of the KV without padding.",
    ),
    _Column("TTFT, ms", "ttft", ".3g", 1e3, interval=True),
    _Column("restored tokens", "restored", ".0f"),
    _Column(
        "attended",
        "attended",
        ".1f",
        about="`attended`: number of restored tokens that a layer attended to, mean over the layers.",
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Read the configuration of a run, and its metrics by task as written by `eval.run` or an earlier report.

    Raises:
        EvalError: The folder contains no run, or no metrics yet.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise EvalError(f"{folder} holds no run of eval.run: it has no config.json") from None
    metrics = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*/metrics.json"))]
    if not metrics and (folder / "metrics.json").exists():
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if not metrics:
        raise EvalError(f"{folder} holds a run without metrics; let eval.run finish first")
    rows: dict[str, list[Row]] = {}
    for row in metrics:
        rows.setdefault(row["task"], []).append(row)
    return config, rows


def page(config: dict[str, Any], tasks: dict[str, list[Row]]) -> str:
    """Return the Markdown page."""
    half = config.get("half")
    selection = "" if half is None else f"Every second example, starting with number {half}. "
    rows_of_all = [row for rows in tasks.values() for row in rows]
    lines = [
        f"# {Path(config['model']).name}{_TITLE}",
        "",
        f"{config['dtype']}, seed {config['seed']}, prefixes of up to {config['prefix_tokens']} tokens, "
        f"{config['max_length']} with question and answer. {selection}Cells are means, with 95 % bootstrap intervals "
        "over the examples.",
        "",
        *(f"- {column.about}" for column in _columns_of(rows_of_all) if column.about),
        "- The x-axis of plots is the measured share, if there is one. Otherwise it is the share in the method's name, "
        "and methods with the same share are drawn side by side.",
    ]
    if len(tasks) > 1:
        lines += ["", "![all tasks](overview.png)"]
    for task, rows in tasks.items():
        first = rows[0]
        columns = list(_columns_of(rows))
        headings = ["method", *(column.heading or metric_label(first["metric"]) for column in columns)]
        lines += ["", f"## {task}", "", f"{first['examples']} examples.", "", f"![{task}]({task}.png)", ""]
        lines += [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
        for row in sorted(rows, key=lambda r: (r["variant"] != FULL, r["variant"])):
            cells = [row["variant"], *(_cell(row, column) for column in columns)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _columns_of(rows: list[Row]) -> Iterator[_Column]:
    """Yield the columns that at least one row has. A column of zeros is omitted unless it has `zeros`."""
    for column in _COLUMNS:
        means = [row[column.name]["mean"] for row in rows if row.get(column.name)]
        if any(means) or (means and column.zeros):
            yield column


def _cell(row: Row, column: _Column) -> str:
    value, unit, form = row.get(column.name), column.unit, column.form
    if value is None:
        return ""
    low_high = f" ({unit * value['low']:{form}}–{unit * value['high']:{form}})" if column.interval else ""
    return f"{unit * value['mean']:{form}}{low_high}"


def main(folder: Annotated[Path, typer.Argument(help="Results folder of a run: the --out of eval.run.")]) -> None:
    """Draw plots of a run, and write its README.md and metrics.json.

    Plots show metric and KL divergence over the share that was read, attended to or recomputed, and the metric over the
    time to first token.
    """
    report, metrics = folder / "README.md", folder / "metrics.json"
    try:
        config, tasks = read(folder)
        all_rows = [row for rows in tasks.values() for row in rows]
        styles = styles_of(all_rows)
        figures = {f"{task}.png": partial(draw_task, task, rows, styles) for task, rows in tasks.items()}
        if len(tasks) > 1:
            figures["overview.png"] = partial(draw_overview, tasks, styles)
        check_file(report, f"# .*{_TITLE}\n")
        check_file(metrics, r'\[\{\s*"task":')
        for name in figures:
            check_picture(folder / name, report)
    except EvalError as error:
        typer.echo(f"eval.report: {error}", err=True)
        raise typer.Exit(2) from None
    write(metrics, "[" + ",\n".join(map(json.dumps, all_rows)) + "]\n")
    write(report, page(config, tasks))  # first, since it shows that the pictures are its own
    for name, draw in figures.items():
        with replacing(folder / name) as temporary:
            draw().savefig(temporary)
    typer.echo(f"wrote {report} and its plots")


if __name__ == "__main__":
    typer.run(main)
