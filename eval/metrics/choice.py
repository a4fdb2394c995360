"""Accuracy of multiple choice."""

from __future__ import annotations

from .base import ExampleMetric


class Accuracy(ExampleMetric):
    """Share of right choices, in percent."""

    name = "accuracy"
    about = "share of right choices, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return 100.0 * (prediction.strip() == answer.strip())
