"""The curve of a training run, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from .language import LONG_KINDS

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Plot losses and right answers over the steps of a run."""
    figure, (losses_axes, right_axes) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    steps = [point["step"] for point in curve]
    for name in ("answers", "text"):
        losses_axes.plot(steps, [point[name] for point in curve], label=name)
    losses_axes.set(xlabel="step", ylabel="loss, nats", yscale="log")
    for kind in LONG_KINDS:
        known = [(point["step"], point["right"][kind]) for point in curve if kind in point["right"]]
        if known:
            right_axes.plot(*zip(*known, strict=True), label=kind)
    right_axes.set(xlabel="step", ylabel="share of answer tokens that are right")
    before = None
    for point in curve:
        if point["length"] != before:
            before = point["length"]
            right_axes.axvline(point["step"], color="0.85", zorder=0)
            right_axes.text(point["step"], 0.02, f" {before}", color="0.4", fontsize=8)
    losses_axes.legend()
    right_axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
