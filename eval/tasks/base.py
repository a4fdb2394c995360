"""Base classes of tasks. The examples of a task have uniform fields and are drawn from rows or generated."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..data import Data


@dataclass(frozen=True)
class Example:
    """Prompt with its accepted answers.

    Args:
        id: Identifier, unique within the task and stable between runs.
        segments: Texts to store KV for; joined, they are the prefix. Each retrieved passage and each few-shot
            demonstration is a segment.
        question: Text after the prefix.
        choices: Continuations to choose from; empty if the answer is generated.
        answers: The right choice, or all accepted answers.
        labels: All class names, if the answer is a generated class name.
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
    """Settings for drawing examples.

    Args:
        data: Source of rows.
        limit: Maximum number of examples, or None for all.
        seed: Random seed.
        prefix_tokens: Approximate prefix length in tokens, for tasks that can choose it.
        tokenizer: Tokenizer of the model.
    """

    data: Data
    limit: int | None
    seed: int
    prefix_tokens: int
    tokenizer: PreTrainedTokenizerBase

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def rng(self, *parts: object) -> random.Random:
        """Return a random generator that is seeded by the seed and `parts`, so it is the same in every run."""
        return random.Random(":".join(map(str, (self.seed, *parts))))

    def indices(self, rows: int) -> range:
        """Return the indices of the rows to use."""
        return range(rows if self.limit is None else min(rows, self.limit))


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Set of examples and the metric of their answers.

    Args:
        name: Name on the command line.
        about: One-line description for `--list`, with the source.
        metric: Key of `eval.metrics.METRICS`, or "perplexity".
        max_new_tokens: Maximum number of tokens of an answer.
        generates: Whether answers without choices are generated; if not, the reference answer is fed to the model.
        first_line: Whether only the first line of a generated answer counts.
        chat: Whether the chat template of the model may be applied to the prompt.
        keeps_passages: Whether a prompt that is too long keeps the beginnings of its segments, instead of its own
            beginning and end.
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
        """Yield the examples, in an order that depends only on the seed.

        Raises:
            EvalError: Rows are missing.
        """
