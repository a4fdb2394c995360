"""LongBench's own rules (Bai et al. 2023): classification, retrieval, counting, similarity of code."""

from __future__ import annotations

import re

from rapidfuzz import fuzz

from ..tasks.base import Example
from .base import ExampleMetric


class Classification(ExampleMetric):
    """The label is named in the answer. Where several are, each counts for its share.

    A label that is part of the right one does not count as another.
    """

    name = "classification"
    about = "label named, in percent"

    def score(self, prediction: str, answers: list[str], example: Example | None = None) -> float:
        labels = example.labels if example is not None and example.labels else tuple(answers)
        return max((self._named(prediction, answer, labels) for answer in answers), default=0.0)

    def compare(self, prediction: str, answer: str) -> float:
        return self._named(prediction, answer, (answer,))

    @staticmethod
    def _named(prediction: str, answer: str, labels: tuple[str, ...]) -> float:
        named = [label for label in labels if label in prediction]
        named = [label for label in named if label == answer or label not in answer]
        return 100 / len(named) if answer in named else 0.0


class Retrieval(ExampleMetric):
    """Of the numbers in the answer, the share that is the right paragraph's."""

    name = "retrieval"
    about = "numbers that are the right paragraph's, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return _share(prediction, re.findall(r"(?:Paragraph |段落)(\d+)", answer)[0])


class Count(ExampleMetric):
    """Of the numbers in the answer, the share that is the right count."""

    name = "count"
    about = "numbers that are the right count, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return _share(prediction, str(answer))


class CodeSimilarity(ExampleMetric):
    """Similarity of the first line of code (fences and comments left out), as the share of an edit distance."""

    name = "code_similarity"
    about = "similarity of the first line, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        lines = prediction.lstrip("\n").split("\n")
        first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
        return float(round(fuzz.ratio(first, answer)))


def _share(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return 100 * numbers.count(wanted) / len(numbers) if numbers else 0.0
