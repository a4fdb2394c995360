"""Plots of metrics against shares (or measured reads) and times. Styles keep coinciding curves distinguishable."""

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
_MARKERS = "osD^vPX*<"  # one more than colors, so that pairs repeat late
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
_DODGE = 1.045
"""Factor between the x positions of neighbouring methods at the same share."""
_IN_WORDS = {"qa_f1": "F1", "qa_f1_zh": "F1", "rouge_l": "ROUGE-L", "rouge_l_zh": "ROUGE-L"}
_PANELS_A_ROW = 4
_SHARE = "share attended to or recomputed"
_MEASURED = {
    "compute": "recomputed tokens, measured, %",
    "brought": "KV read for the first token, measured",
    "answered": "KV read for the answer, measured",
}
"""X-axis labels of measured figures, which replace the share if all methods with a share have them."""
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_WIDE = 100
_LINEAR_BELOW = 1e-4
_LABELS = {"kl": "KL to full KV, nats", "top1": "same first token as full KV, %"}


@dataclass(frozen=True)
class Style:
    """Appearance of a method in all plots of a report: `place` is its index among `num_places` methods with shares."""

    color: str = "black"
    marker: str = "o"
    line: Any = "-"
    place: int = 0
    num_places: int = 1

    def x_value(self, share: float) -> float:
        return share * float(_DODGE ** (self.place - (self.num_places - 1) / 2))


def method_of(row: Row) -> str:
    """Return the method name of a variant, without its share."""
    return str(row["variant"]).split("@")[0]


def metric_label(metric: str) -> str:
    """Return the axis label of a metric."""
    return _IN_WORDS.get(metric, metric.replace("_", " ")) + ("" if metric == "perplexity" else ", %")


def styles_of(rows: list[Row]) -> dict[str, Style]:
    """Return a style for each method; full KV is a black line."""
    curves = sorted({method_of(row) for row in rows if row["budget"] is not None})
    levels = sorted({method_of(row) for row in rows} - {FULL, *curves})
    styles = {FULL: Style(marker="*")}
    for number, name in enumerate([*curves, *levels]):
        line = _LINES[number % len(_LINES)] if name in curves else (0, (2, 2))
        look = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)], line
        styles[name] = Style(*look, number if name in curves else 0, len(curves) if name in curves else 1)
    return styles


def draw_task(task: str, rows: list[Row], styles: dict[str, Style]) -> Figure:
    """Plot one task: metric and first-token divergence against the share (or its measurement), metric against TTFT."""
    figures = _figures(rows)
    figure = Figure(figsize=(4.3 * (len(figures) + 1), 4.4), layout="constrained")
    *panels, times = figure.subplots(1, len(figures) + 1)
    for axes, figure_name in zip(panels, figures, strict=True):
        _against_share(axes, rows, figure_name, styles)
        axes.set_xlabel(_MEASURED.get(_measured(rows, figure_name), _SHARE))
    _against_time(times, rows, styles)
    figure.suptitle(f"{task} ({rows[0]['examples']} examples)")
    _legend(figure, panels[0])
    return figure


def draw_overview(tasks: dict[str, list[Row]], styles: dict[str, Style]) -> Figure:
    """Plot all tasks side by side, metrics above first-token figures. Add their mean if all have the same metric."""
    panels = dict(tasks)
    if len({row["metric"] for rows in tasks.values() for row in rows}) == 1:
        panels[f"mean of {len(tasks)} tasks"] = mean_over(tasks)
    figures = _figures([row for rows in tasks.values() for row in rows])
    columns, high = min(_PANELS_A_ROW + 1, len(panels)), len(figures)
    bands = -(-len(panels) // columns)
    size = (3.2 * columns, 2.7 * high * bands + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(high * bands, columns, squeeze=False)
    for number, (name, rows) in enumerate(panels.items()):
        band, column = divmod(number, columns)
        panel = grid[high * band : high * (band + 1), column]
        under = [_MEASURED.get(_measured(rows, figure_name), _SHARE) for figure_name in figures]
        for place, (axes, figure_name) in enumerate(zip(panel, figures, strict=True)):
            _against_share(axes, rows, figure_name, styles)
            if under[place] not in under[place + 1 :]:  # only below the lowest panel with this label
                axes.set_xlabel(under[place], fontsize="small")
            if column and (place or rows[0]["metric"] == list(panels.values())[number - 1][0]["metric"]):
                axes.set_ylabel("")
        panel[0].set_title(name, fontsize="medium", fontweight="bold" if name not in tasks else "normal")
    for unused in range(len(panels), bands * columns):
        band, column = divmod(unused, columns)
        for axes in grid[high * band : high * (band + 1), column]:
            axes.set_visible(False)
    divergences = grid[high - 1 :: high].flat
    top = max(axes.get_ylim()[1] for axes in divergences if axes.get_visible())
    for axes in grid[high - 1 :: high].flat:
        axes.set_ylim(top=top)
    _legend(figure, grid[0][0])
    return figure


def mean_over(tasks: dict[str, list[Row]]) -> list[Row]:
    """Return the mean over tasks of each variant that all tasks have. Intervals have zero width."""
    rows_by_variant: dict[str, list[Row]] = {}
    for rows in tasks.values():
        for row in rows:
            rows_by_variant.setdefault(row["variant"], []).append(row)
    means = []
    for variant_rows in rows_by_variant.values():
        if len(variant_rows) == len(tasks):
            mean = {name: variant_rows[0][name] for name in ("variant", "metric", "budget")}
            for name in ("score", "top1", "kl", "answer_top1", "answer_kl", "answered", "index", *_MEASURED):
                if all(row.get(name) for row in variant_rows):
                    middle = fmean(row[name]["mean"] for row in variant_rows)
                    mean[name] = {"mean": middle, "low": middle, "high": middle}
            means.append(mean)
    return means


def _against_share(axes: Axes, rows: list[Row], figure_name: str, styles: dict[str, Style]) -> None:
    """Draw a curve of each method over its shares (or measured figures); a horizontal line for one without shares."""
    figure_key, shares = _measured(rows, figure_name), list[float]()
    for name, method_rows in _by_method(rows, figure_name, styles):
        style, means = styles[name], [row[figure_name]["mean"] for row in method_rows]
        if method_rows[0]["budget"] is None:
            width = 1.0 if name == FULL else 1.6
            axes.axhline(means[0], color=style.color, linestyle=style.line, linewidth=width, label=name, zorder=1)
            continue
        x_values = [row[figure_key]["mean"] if figure_key else style.x_value(row["budget"]) for row in method_rows]
        if figure_key in ("brought", "answered"):
            x_values = [percent / 100 for percent in x_values]
        shares += x_values if figure_key else [row["budget"] for row in method_rows]
        _curve(axes, x_values, means, _errors(method_rows, figure_name), name, style)
    if figure_key == "compute":
        axes.set_xlim(left=0)
    else:
        axes.set_xscale("log")
        low, high = min(shares, default=1.0) / 1.35, max(shares, default=1.0) * 1.35
        wide = high > _WIDE * low  # labels of three ticks per power of ten would overlap
        ticks = [tick for tick in _TICKS[:: 3 if wide else 1] if low <= tick <= high]
        if not figure_key:
            ticks = sorted(set(shares))
        axes.set_xticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
        axes.set_xlim(low, high)
    axes.xaxis.set_minor_locator(NullLocator())
    if figure_name == "kl":
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
        axes.set_ylim(
            -_LINEAR_BELOW / 5,
            2 * max([5 * _LINEAR_BELOW, *(row[figure_name]["high"] for row in rows if figure_name in row)]),
        )
        axes.set_ylabel(_LABELS[figure_name])
    elif figure_name == "top1":
        axes.set_ylim(-4, 104)
        axes.set_ylabel(_LABELS[figure_name])
    else:
        _name_metric(axes, rows)
    _bare(axes)


def _figures(rows: list[Row]) -> tuple[str, ...]:
    """Return the figures to plot against shares. `top1` is included if KV reads for the first token were measured."""
    return ("score", "top1", "kl") if _measured(rows, "top1") == "brought" else ("score", "kl")


def _measured(rows: list[Row], figure_name: str) -> str:
    """Return the measured x-axis figure for `figure_name` if all rows with a share have it, else ""."""
    budgeted = [row for row in rows if row["budget"] is not None]
    for name in ("compute", "answered" if figure_name == "score" else "brought"):
        if budgeted and all(name in row for row in budgeted):
            return name
    return ""


def _against_time(axes: Axes, rows: list[Row], styles: dict[str, Style]) -> None:
    for name, method_rows in _by_method(rows, "score", styles):
        timed = [row for row in method_rows if row.get("ttft")]
        milliseconds = [1e3 * row["ttft"]["mean"] for row in timed]
        _curve(axes, milliseconds, [r["score"]["mean"] for r in timed], _errors(timed, "score"), name, styles[name])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time to first token, ms")
    _name_metric(axes, rows)
    _bare(axes)


def _curve(
    axes: Axes, x_values: list[float], y_values: list[float], errors: list[list[float]], name: str, style: Style
) -> None:
    axes.errorbar(
        x_values,
        y_values,
        errors,
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


def _by_method(rows: list[Row], figure_name: str, styles: dict[str, Style]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each method that have figure `figure_name`, sorted by share."""
    rows_by_method = {
        name: sorted((r for r in rows if method_of(r) == name and r.get(figure_name)), key=lambda r: r["budget"] or 0)
        for name in styles
    }
    return [(name, method_rows) for name, method_rows in rows_by_method.items() if method_rows]


def _errors(rows: list[Row], name: str) -> list[list[float]]:
    """Return the distances from the mean to the ends of the interval, `[2, rows]`."""
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
