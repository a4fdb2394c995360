"""Aggregation: find the most frequent words."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..base import Draw, Example, Task
from .haystack import fitting, words


@dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """List with some frequent words, which are asked for, and many rare words.

    Args:
        common: Number of frequent words.
        often: Number of occurrences of each frequent word.
        seldom: Number of occurrences of each other word.
    """

    common: int = 10
    often: int = 30
    seldom: int = 3

    def examples(self, draw: Draw) -> Iterator[Example]:
        names = words(draw.data)
        max_words = len(names) - self.common
        for number, size in _sizes(draw, lambda k, n: self._text(draw.rng(self.name, k), names, n)[0], max_words):
            text, answers = self._text(draw.rng(self.name, number), names, size)
            question = f"\n\nWhich {self.common} words are there most often?\nAnswer:"
            yield Example(str(number), (text,), question, answers=answers)

    def _text(self, rng: random.Random, names: Sequence[str], size: int) -> tuple[str, tuple[str, ...]]:
        sample = rng.sample(names, self.common + size)
        common = sample[: self.common]
        numbered_words = common * self.often + sample[self.common :] * self.seldom
        rng.shuffle(numbered_words)
        lines = " ".join(f"{number}. {word}" for number, word in enumerate(numbered_words, start=1))
        return f"Here is a numbered list of words.\n\n{lines}", tuple(common)


@dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """Random words with frequencies that follow a zeta distribution.

    Args:
        alpha: Parameter of the distribution.
        num_requested: Number of the most frequent words to ask for.
    """

    alpha: float = 2.0
    num_requested: int = 3

    def examples(self, draw: Draw) -> Iterator[Example]:
        for number, size in _sizes(draw, lambda k, n: self._text(draw.rng(self.name, k), n)[0], 100_000):
            text, answers = self._text(draw.rng(self.name, number), size)
            question = f"\n\nWhich {self.num_requested} coded words are there most often? Dots do not count.\nAnswer:"
            yield Example(str(number), (text,), question, answers=answers)

    def _text(self, rng: random.Random, size: int) -> tuple[str, tuple[str, ...]]:
        kinds = max(self.num_requested + 1, min(1000, size))
        names: dict[str, None] = {}
        while len(names) < kinds:
            names["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        shares = [(rank + 1) ** -self.alpha for rank in range(kinds)]
        counts = [max(1, round(size * share / sum(shares))) for share in shares]
        for rank in range(self.num_requested - 1, -1, -1):  # no ties among the words to ask for
            counts[rank] = max(counts[rank], counts[rank + 1] + 1)
        coded_words = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        coded_words += ["..."] * (len(coded_words) // 10)
        rng.shuffle(coded_words)
        return f"Here is a text of coded words.\n\n{' '.join(coded_words)}", tuple(list(names)[: self.num_requested])


def _sizes(draw: Draw, make: Callable[[int, int], str], max_size: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each example and a size that fits: that of example 0, reduced if the text is too long."""
    first = fitting(draw, lambda n: make(0, n), max_size)
    for number in draw.indices(500):
        size = first
        while draw.count(make(number, size)) > draw.prefix_tokens and size > 1:
            size -= max(1, size // 50)
        yield number, size


AGGREGATION = (
    CommonWords(
        name="ruler_cwe", about="the ten most common words of a list (RULER)", metric="string_match", max_new_tokens=120
    ),
    FrequentWords(
        name="ruler_fwe", about="the three most frequent coded words (RULER)", metric="string_match", max_new_tokens=50
    ),
)
