"""Metrics of RULER (Hsieh et al. 2024): case-insensitive search for the expected strings in the prediction."""

from __future__ import annotations

from ..tasks.base import Example
from .base import ExampleMetric


class StringMatch(ExampleMetric):
    """Share of expected strings that the prediction contains."""

    name = "string_match"
    about = "wanted strings that are there, in percent"

    def score(self, prediction: str, answers: list[str], example: Example | None = None) -> float:
        return sum(self.compare(prediction, answer) for answer in answers) / max(1, len(answers))

    def compare(self, prediction: str, answer: str) -> float:
        return 100.0 * (answer.lower() in prediction.lower())


class StringMatchAny(StringMatch):
    """Score of 100 if the prediction contains any expected string, else 0."""

    name = "string_match_any"
    about = "any wanted string there, in percent"

    def score(self, prediction: str, answers: list[str], example: Example | None = None) -> float:
        return max((self.compare(prediction, answer) for answer in answers), default=0.0)
