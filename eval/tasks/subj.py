"""SUBJ: objective or subjective sentence."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item


def _render(row: dict[str, Any]) -> Item:
    return Item(f"{row['text'].strip()} This is", (" objective", " subjective"), row["label"])


SUBJ = FewShot(
    name="subj",
    about="subjective or objective sentence (Pang and Lee 2004; ContiguousKV Table 1: 110 demonstrations, 4.4k tokens)",
    metric="accuracy",
    dataset="subj",
    columns=("text", "label"),
    render=_render,
    shots=110,
    test="test",
)
