"""Plots and a Markdown page from the results of `eval.run`.

python -m eval.report results/
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import EvalError
from .plots import Row, draw_overview, draw_task, metric_label, styles_of
from .runner import FULL


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


_COLUMNS = (
    _Column("", "score", ".1f", interval=True),  # the heading is the name of the metric
    _Column("top-1, %", "top1", ".1f", interval=True),
    _Column("KL, nats", "kl", ".2g", interval=True),
    _Column("answer's top-1, %", "answer_top1", ".1f", interval=True),
    _Column("answer's KL, nats", "answer_kl", ".2g", interval=True),
    _Column("computed, %", "compute", ".1f"),
    _Column("read, %", "read", ".1f"),
    _Column("identified, %", "identified", ".1f", zeros=False),
    _Column("guessed, %", "guessed", ".1f", zeros=False),
    _Column("a token, %", "per_token", ".2f", zeros=False),
    _Column("index, %", "index", ".1f", zeros=False),
    _Column("TTFT, ms", "ttft", ".3g", 1e3, interval=True),
    _Column("restored tokens", "restored", ".0f"),
    _Column("attended", "attended", ".1f"),
)
_READ = (
    "`read`: share of the stored prefix's KV, in bytes of its blocks, that was read for the first token from any tier "
    "and that the token attends to. `identified`: the same for blocks that were used only to select. `guessed`: the "
    "same for blocks that were prefetched for a selection that turned out differently. `a token`: all KV that was read "
    "for each token after the first. `index`: size of the index in memory, if there is one; it was in memory before "
    "the request. `attended`: number of restored tokens that layers attended to, mean over these layers. The x-axis of "
    "plots is the share of all KV that was read for what they show. "
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Read the configuration of a run, and its metrics by task as written by `eval.run` or an earlier report.

    Raises:
        EvalError: the folder contains no run, or no metrics yet.
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
    notes = ""
    if any("compute" in row for rows in tasks.values() for row in rows):
        notes = "`computed`: of the passages' stored tokens, as measured, a mean over the layers. "
    if (half := config.get("half")) is not None:
        notes += f"Of the examples that were drawn every second one, from number {half} on. "
    if any("read" in row for rows in tasks.values() for row in rows):
        notes += _READ
    lines = [
        f"# {Path(config['model']).name}: methods against full KV",
        "",
        f"{config['dtype']}, seed {config['seed']}, prefixes of up to {config['prefix_tokens']} tokens, "
        f"{config['max_length']} with question and answer. {notes}Means, with 95 % bootstrap "
        "intervals over examples. `top-1` and `KL` compare the first new token with full KV's, `answer's` "
        "the tokens of the reference answer, fed one by one. In plots, points of several methods at one share stand "
        "side by side.",
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


def main(folder: Annotated[Path, typer.Argument(help="The --out of eval.run.")]) -> None:
    """Plot metrics and divergence against shares, metrics against TTFT; write README.md and metrics.json."""
    try:
        config, tasks = read(folder)
    except EvalError as error:
        typer.echo(f"eval.report: {error}", err=True)
        raise typer.Exit(2) from None
    all_rows = [row for rows in tasks.values() for row in rows]
    styles = styles_of(all_rows)
    for task, rows in tasks.items():
        draw_task(task, rows, styles).savefig(folder / f"{task}.png")
    if len(tasks) > 1:
        draw_overview(tasks, styles).savefig(folder / "overview.png")
    lines = ",\n".join(map(json.dumps, all_rows))
    (folder / "metrics.json").write_text(f"[{lines}]\n", encoding="utf-8")
    (folder / "README.md").write_text(page(config, tasks), encoding="utf-8")
    typer.echo(f"{folder / 'README.md'}, and its plots")


if __name__ == "__main__":
    typer.run(main)
