"""Few-shot tasks: long prefixes of demonstrations, shared by many questions.

The setup follows ContiguousKV (section 6.1, Table 1) and IMPRESS (section 6.1): demonstrations are drawn from each
category of the training split, and the number of questions per prefix follows a normal distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .base import Draw, Example, Task


@dataclass(frozen=True)
class Item:
    """Row as question, choices and index of the right choice."""

    question: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class FewShot(Task):
    """Multiple choice after demonstrations. The data set has the name of the task.

    Args:
        columns: Required columns.
        render: Function from a row to an item.
        shots: Maximum number of demonstrations in a prefix, limited by `prefix_tokens`.
        train: Split for demonstrations.
        test: Split for questions. If it equals `train`, every fifth row is a question and the others are
            demonstrations.
        prefixes: Number of different prefixes.
        by_label: Whether to balance the labels of the demonstrations.
    """

    metric: str = "accuracy"
    columns: tuple[str, ...]
    render: Callable[[dict[str, Any]], Item]
    shots: int
    train: str = "train"
    test: str = "validation"
    prefixes: int = 8
    by_label: bool = True

    def examples(self, draw: Draw) -> Iterator[Example]:
        train = draw.data.rows(self.name, self.train, self.columns)
        test = draw.data.rows(self.name, self.test, self.columns)
        test_indices, train_indices = list(range(len(test))), list(range(len(train)))
        if self.train == self.test:
            test_indices, train_indices = test_indices[::5], [i for i in train_indices if i % 5]
        draw.rng(self.name, "order").shuffle(test_indices)
        prefixes = [self._demonstrations(draw, train, train_indices, number) for number in range(self.prefixes)]
        reuse = draw.rng(self.name, "reuse")
        for index in (test_indices[i] for i in draw.indices(len(test_indices))):
            item = self.render(test[index])
            number = round(reuse.gauss((self.prefixes - 1) / 2, self.prefixes / 6))
            segments = prefixes[min(max(number, 0), self.prefixes - 1)]
            yield Example(f"{self.test}-{index}", segments, item.question, item.choices, (item.choices[item.label],))

    def _demonstrations(self, draw: Draw, rows: Any, indices: list[int], number: int) -> tuple[str, ...]:
        """Return the solved items of one prefix: at most `shots`, within `prefix_tokens`."""
        rng = draw.rng(self.name, "prefix", number)
        sample = rng.sample(indices, min(len(indices), 12 * self.shots))
        items = [self.render(rows[i]) for i in sample]
        if self.by_label:
            piles: dict[int, list[Item]] = {}
            for item in items:
                piles.setdefault(item.label, []).append(item)
            turns = itertools.zip_longest(*(piles[label] for label in sorted(piles)))
            items = [item for turn in turns for item in turn if item is not None]
        demonstrations: list[str] = []
        room = draw.prefix_tokens
        for item in items[: self.shots]:
            text = f"{item.question}{item.choices[item.label]}\n\n"
            room -= draw.count(text)
            if room < 0:
                break
            demonstrations.append(text)
        rng.shuffle(demonstrations)
        return tuple(demonstrations)
