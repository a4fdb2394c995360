"""Plots of metrics against shares and times, in which curves that coincide can be told apart."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from .runner import FULL

Row = dict[str, Any]

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F4F24", "#999999")
_MARKERS = "osD^vPX*<"  # one more than colors, so that pairs do not repeat soon
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
_DODGE = 1.045
"""By which factor points of neighbouring methods at one share stand apart."""
_IN_WORDS = {"qa_f1": "F1", "rouge_l": "ROUGE-L"}
_PANELS_A_ROW = 4
_SHARE = "share attended to or computed anew"
_COMPUTE = "computed of what is stored, measured, %"
_LINEAR_BELOW = 1e-4
_KL = "KL to full KV, nats"


@dataclass(frozen=True)
class Style:
    """How a method looks, in all plots of a report; `place` is where it stands among `of` methods with shares."""

    color: str = "black"
    marker: str = "o"
    line: Any = "-"
    place: int = 0
    of: int = 1

    def at(self, share: float) -> float:
        return share * float(_DODGE ** (self.place - (self.of - 1) / 2))


def method_of(row: Row) -> str:
    """The method of a variant, without its share."""
    return str(row["variant"]).split("@")[0]


def metric_label(metric: str) -> str:
    """A metric as an axis names it."""
    return _IN_WORDS.get(metric, metric.replace("_", " ")) + ("" if metric == "perplexity" else ", %")


def styles_of(rows: list[Row]) -> dict[str, Style]:
    """A style for each method; full KV is a black line."""
    curves = sorted({method_of(row) for row in rows if row["budget"] is not None})
    levels = sorted({method_of(row) for row in rows} - {FULL, *curves})
    styles = {FULL: Style(marker="*")}
    for number, name in enumerate([*curves, *levels]):
        line = _LINES[number % len(_LINES)] if name in curves else (0, (2, 2))
        look = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)], line
        styles[name] = Style(*look, number if name in curves else 0, len(curves) if name in curves else 1)
    return styles


def draw_task(task: str, rows: list[Row], styles: dict[str, Style]) -> Figure:
    """One task: its metric and the divergence against the share, its metric against the time to the first token."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    scores, divergences, times = figure.subplots(1, 3)
    _against_share(scores, rows, "score", styles)
    _against_share(divergences, rows, "kl", styles)
    _against_time(times, rows, styles)
    scores.set_xlabel(_COMPUTE if _are_measured(rows) else _SHARE)
    divergences.set_xlabel(_COMPUTE if _are_measured(rows) else _SHARE)
    figure.suptitle(f"{task} ({rows[0]['examples']} examples)")
    _legend(figure, scores)
    return figure


def draw_overview(tasks: dict[str, list[Row]], styles: dict[str, Style]) -> Figure:
    """All tasks side by side, and their mean where one metric serves them all; the metric above, divergence below."""
    panels = dict(tasks)
    if len({row["metric"] for rows in tasks.values() for row in rows}) == 1:
        panels[f"mean of {len(tasks)} tasks"] = mean_over(tasks)
    columns = min(_PANELS_A_ROW + 1, len(panels))
    bands = -(-len(panels) // columns)
    size = (3.2 * columns, 5.4 * bands + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(2 * bands, columns, squeeze=False)
    for number, (name, rows) in enumerate(panels.items()):
        band, column = divmod(number, columns)
        upper, lower = grid[2 * band][column], grid[2 * band + 1][column]
        _against_share(upper, rows, "score", styles)
        _against_share(lower, rows, "kl", styles)
        lower.set_xlabel(_COMPUTE if _are_measured(rows) else _SHARE, fontsize="small")
        upper.set_title(name, fontsize="medium", fontweight="bold" if name not in tasks else "normal")
        if column:
            lower.set_ylabel("")
            if rows[0]["metric"] == list(panels.values())[number - 1][0]["metric"]:
                upper.set_ylabel("")
    for unused in range(len(panels), bands * columns):
        band, column = divmod(unused, columns)
        grid[2 * band][column].set_visible(False)
        grid[2 * band + 1][column].set_visible(False)
    top = max(axes.get_ylim()[1] for axes in grid[1::2].flat if axes.get_visible())
    for axes in grid[1::2].flat:
        axes.set_ylim(top=top)
    _legend(figure, grid[0][0])
    return figure


def mean_over(tasks: dict[str, list[Row]]) -> list[Row]:
    """The mean of what every task has, variant by variant; without intervals."""
    found: dict[str, list[Row]] = {}
    for rows in tasks.values():
        for row in rows:
            found.setdefault(row["variant"], []).append(row)
    means = []
    for of_each in found.values():
        if len(of_each) == len(tasks):
            mean = {name: of_each[0][name] for name in ("variant", "metric", "budget")}
            for name in ("score", "kl", "compute"):
                if all(row.get(name) for row in of_each):
                    middle = fmean(row[name]["mean"] for row in of_each)
                    mean[name] = {"mean": middle, "low": middle, "high": middle}
            means.append(mean)
    return means


def _against_share(axes: Axes, rows: list[Row], up: str, styles: dict[str, Style]) -> None:
    """A curve for each method over its shares, or over what they made it compute; a level for one that has none."""
    shares, measured = sorted({row["budget"] for row in rows if row["budget"] is not None}), _are_measured(rows)
    for name, found in _by_method(rows, up, styles):
        style, means = styles[name], [row[up]["mean"] for row in found]
        if found[0]["budget"] is None:
            width = 1.0 if name == FULL else 1.6
            axes.axhline(means[0], color=style.color, linestyle=style.line, linewidth=width, label=name, zorder=1)
            continue
        across = [row["compute"]["mean"] if measured else style.at(row["budget"]) for row in found]
        _curve(axes, across, means, _around(found, up), name, style)
    if not measured:
        axes.set_xscale("log")
    if measured:
        axes.set_xlim(left=0)
    elif shares:
        axes.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
        axes.set_xlim(shares[0] / 1.35, shares[-1] * 1.35)
    else:
        axes.set_xticks([])
    axes.xaxis.set_minor_locator(NullLocator())
    if up == "kl":
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
        axes.set_ylim(-_LINEAR_BELOW / 5, 2 * max([5 * _LINEAR_BELOW, *(row[up]["high"] for row in rows if up in row)]))
        axes.set_ylabel(_KL)
    else:
        _name_metric(axes, rows)
    _bare(axes)


def _are_measured(rows: list[Row]) -> bool:
    """Whether it was counted what methods with a share compute: then that is what they are drawn against."""
    counted = ["compute" in row for row in rows if row["budget"] is not None]
    return bool(counted) and all(counted)


def _against_time(axes: Axes, rows: list[Row], styles: dict[str, Style]) -> None:
    for name, found in _by_method(rows, "score", styles):
        timed = [row for row in found if row.get("ttft")]
        milliseconds = [1e3 * row["ttft"]["mean"] for row in timed]
        _curve(axes, milliseconds, [r["score"]["mean"] for r in timed], _around(timed, "score"), name, styles[name])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time to first token, ms")
    _name_metric(axes, rows)
    _bare(axes)


def _curve(
    axes: Axes, across: list[float], up: list[float], around: list[list[float]], name: str, style: Style
) -> None:
    axes.errorbar(
        across,
        up,
        around,
        color=style.color,
        marker=style.marker,
        markersize=6,
        markerfacecolor="white",
        linestyle=style.line,
        linewidth=1.6,
        elinewidth=0.9,
        capsize=2,
        label=name,
    )


def _by_method(rows: list[Row], up: str, styles: dict[str, Style]) -> list[tuple[str, list[Row]]]:
    """The rows of each method that have this figure, by their shares."""
    found = {
        name: sorted((r for r in rows if method_of(r) == name and r.get(up)), key=lambda r: r["budget"] or 0)
        for name in styles
    }
    return [(name, some) for name, some in found.items() if some]


def _around(rows: list[Row], name: str) -> list[list[float]]:
    """Distances from the mean to the ends of the interval: `[2, rows]`."""
    values = [row[name] for row in rows]
    return [[max(0.0, v["mean"] - v["low"]) for v in values], [max(0.0, v["high"] - v["mean"]) for v in values]]


def _name_metric(axes: Axes, rows: list[Row]) -> None:
    metric = rows[0]["metric"]
    axes.set_ylabel(metric_label(metric))
    if metric != "perplexity":
        axes.set_ylim(-4, 104)


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = 4 if figure.get_figwidth() > 9 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="medium")
