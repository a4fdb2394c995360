"""OpenBookQA: elementary science, four choices."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item


def _render(row: dict[str, Any]) -> Item:
    choices = tuple(f" {text.strip()}" for text in row["choices"]["text"])
    return Item(f"{row['question_stem'].strip()}", choices, row["choices"]["label"].index(row["answerKey"]))


OPENBOOKQA = FewShot(
    name="openbookqa",
    about="elementary science, four choices (Mihaylov et al. 2018; IMPRESS)",
    metric="accuracy",
    dataset="openbookqa",
    columns=("question_stem", "choices", "answerKey"),
    render=_render,
    shots=250,
    test="test",
    by_label=False,
)
