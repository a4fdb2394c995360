"""RULER's rule (Hsieh et al. 2024): which of the wanted strings stand in the answer, whatever the case."""

from __future__ import annotations

from ..tasks.base import Example
from .base import ExampleMetric


class StringMatch(ExampleMetric):
    """Share of the wanted strings that are there."""

    name = "string_match"
    about = "wanted strings that are there, in percent"

    def score(self, prediction: str, answers: list[str], example: Example | None = None) -> float:
        return sum(self.compare(prediction, answer) for answer in answers) / max(1, len(answers))

    def compare(self, prediction: str, answer: str) -> float:
        return 100.0 * (answer.lower() in prediction.lower())


class StringMatchAny(StringMatch):
    """Whether any of the wanted strings is there."""

    name = "string_match_any"
    about = "any wanted string there, in percent"

    def score(self, prediction: str, answers: list[str], example: Example | None = None) -> float:
        return max((self.compare(prediction, answer) for answer in answers), default=0.0)
