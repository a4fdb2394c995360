"""TREC: type of a question, six classes."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item

_KINDS = (" Abbreviation", " Entity", " Description", " Human", " Location", " Number")


def _render(row: dict[str, Any]) -> Item:
    return Item(f"Question: {row['text'].strip()}\nType:", _KINDS, row["coarse_label"])


TREC = FewShot(
    name="trec",
    about="type of a question, six classes (Li and Roth 2002; ContiguousKV Table 1: 120 demonstrations, 5k tokens)",
    metric="accuracy",
    dataset="trec",
    columns=("text", "coarse_label"),
    render=_render,
    shots=120,
    test="test",
)
