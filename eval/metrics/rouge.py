"""ROUGE-L, by rouge-score."""

from __future__ import annotations

from functools import cached_property

from rouge_score.rouge_scorer import RougeScorer

from .base import ExampleMetric


class RougeL(ExampleMetric):
    """F-measure of the longest common subsequence of words (Lin 2004), without stemming, best over the answers."""

    name = "rouge_l"
    about = "ROUGE-L F-measure, in percent"

    @cached_property
    def _scorer(self) -> RougeScorer:
        return RougeScorer(["rougeL"])

    def compare(self, prediction: str, answer: str) -> float:
        return 100 * self._scorer.score(answer, prediction)["rougeL"].fmeasure
