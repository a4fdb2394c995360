"""COPA: cause or effect of a premise, two choices."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item


def _render(row: dict[str, Any]) -> Item:
    link = {"cause": "because", "effect": "so"}[row["question"]]
    choices = tuple(f" {text[0].lower()}{text[1:]}" for text in (row["choice1"], row["choice2"]))
    return Item(f"{row['premise'].strip().rstrip('.')} {link}", choices, row["label"])


COPA = FewShot(
    name="copa",
    about="cause or effect of a premise, two choices (SuperGLUE; IMPRESS)",
    metric="accuracy",
    dataset="copa",
    columns=("premise", "choice1", "choice2", "question", "label"),
    render=_render,
    shots=250,
    by_label=False,
)
