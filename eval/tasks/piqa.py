"""PIQA: physical common sense, two ways to reach a goal."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item


def _render(row: dict[str, Any]) -> Item:
    return Item(
        f"Goal: {row['goal'].strip()}\nWay:", (f" {row['sol1'].strip()}", f" {row['sol2'].strip()}"), row["label"]
    )


PIQA = FewShot(
    name="piqa",
    about="physical common sense, two choices (Bisk et al. 2020; IMPRESS)",
    metric="accuracy",
    dataset="piqa",
    columns=("goal", "sol1", "sol2", "label"),
    render=_render,
    shots=120,
    train="validation",
    by_label=False,
)
