"""Metrics of LongBench (Bai et al. 2023): classification, retrieval, counting, similarity of code."""

from __future__ import annotations

import re

from rapidfuzz import fuzz

from ..tasks.base import Example
from .base import ExampleMetric


class Classification(ExampleMetric):
    """Score for naming the right label in the answer, divided by the number of labels that are named.

    A label that is a substring of the right label does not count as another label.
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
        named_labels = [label for label in labels if label in prediction]
        named_labels = [label for label in named_labels if label == answer or label not in answer]
        return 100 / len(named_labels) if answer in named_labels else 0.0


class Retrieval(ExampleMetric):
    """Share of numbers in the prediction that equal the number of the right paragraph."""

    name = "retrieval"
    about = "numbers that are the right paragraph's, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return _share(prediction, re.findall(r"(?:Paragraph |段落)(\d+)", answer)[0])


class Count(ExampleMetric):
    """Share of numbers in the prediction that equal the right count."""

    name = "count"
    about = "numbers that are the right count, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return _share(prediction, str(answer))


class CodeSimilarity(ExampleMetric):
    """Edit similarity (`fuzz.ratio`) of the first line of code, without fences and comments."""

    name = "code_similarity"
    about = "similarity of the first line, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        lines = prediction.lstrip("\n").split("\n")
        first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
        return float(round(fuzz.ratio(first, answer)))


def _share(prediction: str, answer: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return 100 * numbers.count(answer) / len(numbers) if numbers else 0.0
