"""Comparison of two folders of results: which times of a benchmark became longer or shorter beyond noise."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LEAST_SAMPLES = 3
LEAST_CHANGE = 0.03
"""Smallest relative change of a median that is reported."""
_RESAMPLES = 2000
_MANY_ROWS = 8
"""Longer lists of results are requests of a trace: their times are samples of one quantity for each system."""


@dataclass(frozen=True)
class Change:
    """Times of one quantity in two folders.

    Attributes:
        name: Result and path within its JSON file.
        before: Median of the first folder, in seconds.
        after: Median of the second folder, in seconds.
        low: Lower bound of the 95 % interval of `after / before`, by bootstrap.
        high: Upper bound.
    """

    name: str
    before: float
    after: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Verdict "slower" or "faster"; "" if the interval includes changes below `LEAST_CHANGE`."""
        if self.low > 1 + LEAST_CHANGE:
            return "slower"
        return "faster" if self.high < 1 - LEAST_CHANGE else ""


def samples(document: Any) -> dict[str, list[float]]:
    """Return the lists of times in a JSON document of results, by path.

    A time has "seconds", "times", or a name that ends with "_s" in its path.
    """
    samples_by_path: dict[str, list[float]] = defaultdict(list)
    for path, values in _lists(document, ()):
        if any(part in ("seconds", "times") or part.endswith("_s") for part in path):
            samples_by_path[" / ".join(path)] += values
    return {
        name: values for name, values in samples_by_path.items() if len(values) >= LEAST_SAMPLES and min(values) > 0
    }


def _lists(value: Any, path: tuple[str, ...], many: bool = False) -> Iterator[tuple[tuple[str, ...], list[float]]]:
    """Yield lists of floats with their paths; single floats only within many rows."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _lists(child, (*path, key), many)
    elif isinstance(value, list) and value and all(isinstance(number, float) for number in value):
        yield path, value
    elif isinstance(value, list):
        rows_are_many = len(value) > _MANY_ROWS
        for row in value:
            yield from _lists(row, (*path, *_labels(row, rows_are_many)), rows_are_many)
    elif isinstance(value, float) and many:
        yield path, [value]


def _labels(row: Any, many: bool) -> list[str]:
    """Name a row: by its first text if there are many rows, else by its first two values that are no lists."""
    if not isinstance(row, dict):
        return []
    kinds = str if many else (str, int, float)
    values = [(key, entry) for key, entry in row.items() if isinstance(entry, kinds) and not key.endswith("_s")]
    return [entry if isinstance(entry, str) else f"{key} {entry:g}" for key, entry in values[: 1 if many else 2]]


def compare(before: Path, after: Path) -> list[Change]:
    """Return the changes of all times that both folders have, largest increase first."""
    changes = []
    for path in sorted(before.glob("*.json")):
        if (other_path := after / path.name).exists():
            old, new = (samples(json.loads(file.read_text())) for file in (path, other_path))
            changes += [_change(f"{path.stem}: {name}", old[name], new[name]) for name in old if name in new]
    return sorted(changes, key=lambda change: -change.after / change.before)


def _change(name: str, before: list[float], after: list[float]) -> Change:
    random = np.random.default_rng(0)
    medians = [
        np.median(random.choice(values, (_RESAMPLES, len(values))), axis=1)  # [resamples]
        for values in (np.array(before), np.array(after))
    ]
    low, high = np.quantile(medians[1] / medians[0], (0.025, 0.975))
    return Change(name, float(np.median(before)), float(np.median(after)), float(low), float(high))
