"""Plots and a page from the results of `eval.run`.

python -m eval.report results/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import EvalError
from .plots import Row, draw_overview, draw_task, metric_label, styles_of
from .runner import FULL

_COLUMNS = ("method", "score", "top-1, %", "KL, nats", "computed, %", "TTFT, ms", "restored tokens")


def read(folder: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """A run's configuration, and its metrics by task: those that `eval.run` left, or a report before.

    Raises EvalError if there is no run.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise EvalError(f"{folder} holds no run of eval.run: it has no config.json") from None
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*/metrics.json"))]
    if not found and (folder / "metrics.json").exists():
        found = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if not found:
        raise EvalError(f"{folder} holds a run without metrics; let eval.run finish first")
    rows: dict[str, list[Row]] = {}
    for row in found:
        rows.setdefault(row["task"], []).append(row)
    return config, rows


def page(config: dict[str, Any], tasks: dict[str, list[Row]]) -> str:
    """The Markdown page."""
    together = ""
    if any("compute" in row for rows in tasks.values() for row in rows):
        how = "all prompts were stored as a corpus" if config.get("corpus") else "each prompt were stored together"
        together = (
            f"Passages of {how}. `computed`: of their stored tokens, as measured, a mean over the layers; a question's "
            "own pass counts. "
        )
    if (half := config.get("half")) is not None:
        together += f"Of the examples that were drawn every second one, from number {half} on. "
    lines = [
        f"# {Path(config['model']).name}: methods against full KV",
        "",
        f"{config['dtype']}, seed {config['seed']}, prefixes of up to {config['prefix_tokens']} tokens, "
        f"{config['max_length']} with question and answer. {together}Means, with 95 % bootstrap "
        "intervals over examples. `top-1` and `KL` compare the first new token with full KV's. In plots, points of "
        "several methods at one share stand side by side.",
    ]
    if len(tasks) > 1:
        lines += ["", "![all tasks](overview.png)"]
    for task, rows in tasks.items():
        first = rows[0]
        headings = [metric_label(first["metric"]) if name == "score" else name for name in _COLUMNS]
        lines += ["", f"## {task}", "", f"{first['examples']} examples.", "", f"![{task}]({task}.png)", ""]
        lines += [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
        for row in sorted(rows, key=lambda r: (r["variant"] != FULL, r["variant"])):
            cells = [row["variant"], _cell(row, "score", ".1f"), _cell(row, "top1", ".1f"), _cell(row, "kl", ".2g")]
            cells += [_cell(row, "compute", ".1f", interval=False), _cell(row, "ttft", ".3g", 1e3)]
            cells += [_cell(row, "restored", ".0f", interval=False)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row, name: str, form: str, unit: float = 1, interval: bool = True) -> str:
    value = row.get(name)
    if value is None:
        return ""
    low_high = f" ({unit * value['low']:{form}}–{unit * value['high']:{form}})" if interval else ""
    return f"{unit * value['mean']:{form}}{low_high}"


def main(folder: Annotated[Path, typer.Argument(help="The --out of eval.run.")]) -> None:
    """Draw metrics and divergence against shares, metrics against TTFT; write README.md and metrics.json beside."""
    try:
        config, tasks = read(folder)
    except EvalError as error:
        typer.echo(f"eval.report: {error}", err=True)
        raise typer.Exit(2) from None
    every = [row for rows in tasks.values() for row in rows]
    styles = styles_of(every)
    for task, rows in tasks.items():
        draw_task(task, rows, styles).savefig(folder / f"{task}.png")
    if len(tasks) > 1:
        draw_overview(tasks, styles).savefig(folder / "overview.png")
    lines = ",\n".join(map(json.dumps, every))
    (folder / "metrics.json").write_text(f"[{lines}]\n", encoding="utf-8")
    (folder / "README.md").write_text(page(config, tasks), encoding="utf-8")
    typer.echo(f"{folder / 'README.md'}, and its plots")


if __name__ == "__main__":
    typer.run(main)
