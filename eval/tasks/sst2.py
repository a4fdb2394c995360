"""SST-2: sentiment of a sentence of a film review."""

from __future__ import annotations

from typing import Any

from .fewshot import FewShot, Item


def _render(row: dict[str, Any]) -> Item:
    return Item(f"{row['sentence'].strip()} It was", (" terrible", " great"), row["label"])


SST2 = FewShot(
    name="sst2",
    about="sentiment of a sentence (GLUE; ContiguousKV Table 1: 100 demonstrations, 3.8k tokens)",
    metric="accuracy",
    dataset="sst2",
    columns=("sentence", "label"),
    render=_render,
    shots=100,
)
