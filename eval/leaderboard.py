"""Page that compares all methods on pretrained models, from the results of several runs of `eval.run`.

python -m eval.leaderboard eval/results/real-* --out docs/leaderboard.md
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import EvalError
from .files import check_file, write
from .plots import Row, mean_over, method_of, metric_label
from .report import read
from .runner import FULL

_INTRODUCTION = """# Leaderboard

All methods on all pretrained models, one table for each run. [Choosing a method](choosing.md) has the summary.
A heading names the model, the tasks, and the tokens of a stored prefix or of the passages, at most. At each share, the
method with the smallest divergence comes first.
`make eval-real DATA=folder` measures, and `make leaderboard` writes this page.

- *same token, %*: how often the first new token is the same as with full KV. *KL, nats*: divergence of its distribution
  from that of full KV. Both are means over the tasks. The link of a table leads to intervals, plots and times.
- *KV read, %*: share of the stored prefix's KV that was read for the first token, including what the selection was made
  from. An index in memory has its own column. *computed, %*: share of the passages' stored tokens that was recomputed.
- For running text, these figures are means over the next 32 tokens, which are fed one by one, and the KV read is the
  total for these tokens. Methods that reselect for each token can therefore be compared with those that select once.
- Methods have their defaults and the options in their names. `.paper` means the settings of the paper.
"""


def page(folders: list[Path], out: Path) -> str:
    """Return the Markdown page.

    Args:
        folders: Output folders of the runs.
        out: Path of the page; links are relative to its folder.

    Raises:
        EvalError: A folder contains no results of a run.
    """
    parts = [_INTRODUCTION]
    for folder in folders:
        config, tasks = read(folder)
        rows = [row for row in mean_over(tasks) if row["budget"] is not None or row["variant"] == FULL]
        link = os.path.relpath(folder / "README.md", out.parent)
        weights = config.get("weights", {}).get("sha256", "")[:12]
        examples = sum(rows_of_task[0]["examples"] for rows_of_task in tasks.values())
        longest = f"{config['prefix_tokens']:,} tokens" if config.get("prefix_tokens") else "prefixes of any length"
        parts.append(
            f"## {Path(config['model']).name}: {', '.join(tasks)}, {longest}\n\n"
            f"{config['dtype']}, weights {weights or 'of the hub'}, seed {config['seed']}, {examples} examples. "
            f"[All results]({link}).\n\n{_table(rows)}"
        )
    return "\n".join(parts)


def _table(rows: list[Row]) -> str:
    """Return a Markdown table, sorted by share, then by divergence."""
    scored = len({row["metric"] for row in rows}) == 1
    agreement, divergence, bytes_read, heading = _figures_of(rows)
    headings = ["share", "method", "same token, %", "KL, nats", heading]
    if any(_mean(row, "index") for row in rows):
        headings.append("index, %")
    if scored:
        headings.append(metric_label(rows[0]["metric"]))
    lines = [f"| {' | '.join(headings)} |", "| ---: | --- |" + " ---: |" * (len(headings) - 2)]
    for row in sorted(rows, key=lambda row: (row["budget"] or 0, _mean(row, divergence) or 0)):
        share = "" if row["budget"] is None else f"{row['budget']:.0%}"
        cells = [share, f"`{method_of(row)}`", _figure(row, agreement, ".0f"), _figure(row, divergence, ".2g")]
        cells.append(_figure(row, bytes_read, ".1f"))
        if "index, %" in headings:
            cells.append(_figure(row, "index", ".1f"))
        if scored:
            cells.append(_figure(row, "score", ".1f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figures_of(rows: list[Row]) -> tuple[str, str, str, str]:
    """Return the names of the agreement, divergence and cost figures, and the heading of the cost column."""
    if any("compute" in row for row in rows):
        return "top1", "kl", "compute", "computed, %"
    if any("answer_kl" in row and row["metric"] == "perplexity" for row in rows):
        return "answer_top1", "answer_kl", "answered", "KV read, %"
    return "top1", "kl", "brought", "KV read, %"


def _mean(row: Row, name: str) -> float | None:
    figure: dict[str, Any] | None = row.get(name)
    return None if figure is None else float(figure["mean"])


def _figure(row: Row, name: str, form: str) -> str:
    mean = _mean(row, name)
    return "" if mean is None else f"{mean:{form}}"


def main(
    folders: Annotated[list[Path], typer.Argument(help="Results folder of each run: the --out of eval.run.")],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path(__file__).parents[1] / "docs" / "leaderboard.md",
) -> None:
    """Write a page that compares methods over several runs."""
    try:
        check_file(out, re.escape(_INTRODUCTION.partition(",")[0]))
        text = page(folders, out)
    except EvalError as error:
        typer.echo(f"eval.leaderboard: {error}", err=True)
        raise typer.Exit(2) from None
    write(out, text)
    typer.echo(f"{out}: {len(folders)} runs")


if __name__ == "__main__":
    typer.run(main)
