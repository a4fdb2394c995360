"""What a task is: examples with uniform columns, drawn from rows or generated."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..data import Data


@dataclass(frozen=True)
class Example:
    """One thing to ask.

    Args:
        id: unique within the task and stable between runs.
        segments: texts whose KV is worth storing; set one after the other they are the prefix. Retrieved passages and
            few-shot demonstrations are segments of their own.
        question: what comes after the prefix.
        choices: continuations to choose from; empty where the answer is generated.
        answers: the right choice, or all generated answers that count as right.
        labels: of a generated classification, all names that there are.
    """

    id: str
    segments: tuple[str, ...]
    question: str
    choices: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        return "".join(self.segments)


@dataclass(frozen=True)
class Draw:
    """How examples are drawn.

    Args:
        data: where rows come from.
        limit: examples at most, or None for all.
        seed: of everything random.
        prefix_tokens: about how long prefixes are made, where a task can choose.
        tokenizer: of the model.
    """

    data: Data
    limit: int | None
    seed: int
    prefix_tokens: int
    tokenizer: PreTrainedTokenizerBase

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def rng(self, *what: object) -> random.Random:
        """A generator of its own for each use, the same in every run."""
        return random.Random(":".join(map(str, (self.seed, *what))))

    def some(self, rows: int) -> range:
        """Indices of the rows to use."""
        return range(rows if self.limit is None else min(rows, self.limit))


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A set of examples and how answers to them are scored.

    Args:
        name: as on the command line.
        about: one line for `--list`, with the source.
        metric: a name of `eval.metrics.METRICS`.
        max_new_tokens: of an answer.
        generates: whether an answer without choices is generated; if not, the reference answer is followed.
        first_line: whether only the first line of a generated answer counts.
        chat: whether the prompt may be put into the model's chat template.
        keeps_passages: whether a prompt that is too long keeps the beginnings of its segments, not its own two ends.
    """

    name: str
    about: str
    metric: str
    max_new_tokens: int = 1
    generates: bool = True
    first_line: bool = False
    chat: bool = False
    keeps_passages: bool = False

    @abstractmethod
    def examples(self, draw: Draw) -> Iterator[Example]:
        """The examples, in an order that depends on the seed alone.

        Raises:
            EvalError: rows are missing.
        """
