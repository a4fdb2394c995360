"""RTE: textual entailment between two sentences."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item


def _render(row: dict[str, Any]) -> Item:
    question = f"{row['sentence1'].strip()}\nIt follows that: {row['sentence2'].strip()}\nTrue or false?"
    return Item(question, (" true", " false"), row["label"])


RTE = FewShot(
    name="rte",
    about="textual entailment (GLUE; ContiguousKV Table 1: 80 demonstrations, 6k tokens; IMPRESS)",
    metric="accuracy",
    dataset="rte",
    columns=("sentence1", "sentence2", "label"),
    render=_render,
    shots=80,
)
