"""Plots and a page from the results of `eval.run`.

python -m eval.report results/
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

from .errors import EvalError
from .runner import FULL

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Row = dict[str, Any]

_LOOKS = (
    ("budget", "score", "share attended to, or computed anew", "score"),
    ("budget", "kl", "share attended to, or computed anew", "KL of the first token to full KV (nats)"),
    ("ttft", "score", "time to first token (s)", "score"),
)
"""Of each plot: what is on either axis, and how the axes are called."""


def read(folder: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """A run's configuration, and its metrics by task. Raises EvalError if there is no run."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise EvalError(f"{folder} holds no run of eval.run: it has no config.json") from None
    rows: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*/*/metrics.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        rows.setdefault(row["task"], []).append(row)
    if not rows:
        raise EvalError(f"{folder} holds a run without metrics; let eval.run finish first")
    return config, rows


def draw(rows: list[Row], across: str, up: str, labels: tuple[str, str], axes: Any) -> None:
    """One line for each method, over its budgets, with intervals; methods without one are points or levels."""
    methods: dict[str, list[Row]] = {}
    for row in rows:
        if row.get(up) is not None:
            methods.setdefault(row["variant"].split("@")[0], []).append(row)
    for number, (method, found) in enumerate(sorted(methods.items())):
        color = f"C{number}"
        place: Callable[[Row], float | None] = lambda r: r["budget"] if across == "budget" else r[across]["mean"]  # noqa: E731
        found = sorted(found, key=lambda r: place(r) or 0)
        means = [r[up]["mean"] for r in found]
        if place(found[0]) is None:  # no budget: the whole prefix
            axes.axhline(means[0], color=color, linestyle="--", label=method)
            axes.axhspan(found[0][up]["low"], found[0][up]["high"], color=color, alpha=0.08)
            continue
        around = [[m - r[up]["low"] for m, r in zip(means, found, strict=True)]]
        around.append([r[up]["high"] - m for m, r in zip(means, found, strict=True)])
        axes.errorbar([place(r) for r in found], means, around, color=color, marker="o", capsize=3, label=method)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    if up == "kl":
        axes.set_yscale("symlog", linthresh=1e-4)


def page(config: dict[str, Any], tasks: dict[str, list[Row]]) -> str:
    """The Markdown page."""
    lines = [f"# {Path(config['model']).name}: methods against full KV", ""]
    together = "Passages of all prompts were stored together, as a corpus. " * config.get("corpus", False)
    lines += [
        f"{config['dtype']}, seed {config['seed']}, prefixes of up to {config['prefix_tokens']} tokens, "
        f"{config['max_length']} with question and answer. {together}Means, with 95 % bootstrap "
        "intervals over examples. `top-1` and `KL` compare the first new token with full KV's.",
        "",
        "| task | method | examples | metric | score | top-1, % | KL, nats | TTFT, s | restored tokens |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for task, rows in tasks.items():
        for row in sorted(rows, key=lambda r: (r["variant"] != FULL, r["variant"])):
            cells = [task, row["variant"], str(row["examples"]), row["metric"]]
            cells += [_cell(row, "score", ".1f"), _cell(row, "top1", ".1f"), _cell(row, "kl", ".2g")]
            cells += [_cell(row, "ttft", ".3g"), _cell(row, "restored", ".0f", interval=False)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [""] + [f"![{task}]({task}.png)" for task in tasks]
    return "\n".join(lines) + "\n"


def _cell(row: Row, name: str, form: str, interval: bool = True) -> str:
    value = row.get(name)
    if value is None:
        return ""
    low_high = f" ({value['low']:{form}}–{value['high']:{form}})" if interval else ""
    return f"{value['mean']:{form}}{low_high}"


def main(folder: Annotated[Path, typer.Argument(help="The --out of eval.run.")]) -> None:
    """Draw scores and agreement against budget, scores against TTFT; write README.md and metrics.json beside them."""
    try:
        config, tasks = read(folder)
    except EvalError as error:
        typer.echo(f"eval.report: {error}", err=True)
        raise typer.Exit(2) from None
    for task, rows in tasks.items():
        figure, all_axes = plt.subplots(1, len(_LOOKS), figsize=(13, 4.2), layout="constrained")
        for axes, (across, up, *labels) in zip(all_axes, _LOOKS, strict=True):
            draw(rows, across, up, tuple(labels), axes)
        figure.suptitle(task)
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(folder / f"{task}.png", dpi=100)
        plt.close(figure)
    every = [row for rows in tasks.values() for row in rows]
    lines = ",\n".join(map(json.dumps, every))
    (folder / "metrics.json").write_text(f"[{lines}]\n", encoding="utf-8")
    (folder / "README.md").write_text(page(config, tasks), encoding="utf-8")
    typer.echo(f"{folder / 'README.md'} and {len(tasks)} plots")


if __name__ == "__main__":
    typer.run(main)
