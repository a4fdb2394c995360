"""Plot of the training curve."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

from .language import LONG_KINDS

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Plot losses and shares of right answer tokens over the steps of a run."""
    figure, (losses_axes, right_axes) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    steps = [point["step"] for point in curve]
    for name in ("answers", "text"):
        losses_axes.plot(steps, [point[name] for point in curve], label=name)
    losses_axes.set(xlabel="step", ylabel="loss, nats", yscale="log")
    for kind in LONG_KINDS:
        shares = [point["right"].get(kind, math.nan) for point in curve]  # NaN leaves a gap if the kind was not asked
        if not all(map(math.isnan, shares)):
            right_axes.plot(steps, shares, label=kind)
    right_axes.set(xlabel="step", ylabel="share of answer tokens that are right")
    previous_length, at_the_top = None, right_axes.get_xaxis_transform()
    for point in curve:
        if point["length"] != previous_length:
            previous_length = point["length"]
            right_axes.axvline(point["step"], color="0.85", zorder=0)
            right_axes.text(
                point["step"], 1, f" {previous_length}", color="0.4", fontsize=7, rotation=90, transform=at_the_top
            )
    losses_axes.legend()
    right_axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
