"""ROUGE-L as in LongBench: computed by the package `rouge`, which differs from `rouge-score` in its definition."""

from __future__ import annotations

from functools import cached_property

from rouge import Rouge

from .base import ExampleMetric
from .text import chinese_words


class RougeL(ExampleMetric):
    """F-measure of the longest common subsequences of sentences (Lin 2004), maximum over the answers.

    The score is 0, as in LongBench, for a prediction without words, and for one with sentences that are too long for
    the package.
    """

    name = "rouge_l"
    about = "ROUGE-L F-measure, in percent"

    @cached_property
    def _scorer(self) -> Rouge:
        return Rouge(metrics=["rouge-l"])

    def compare(self, prediction: str, answer: str) -> float:
        try:
            return 100 * float(self._scorer.get_scores(prediction, answer)[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0


class ChineseRougeL(RougeL):
    """ROUGE-L over the words of Chinese text."""

    name = "rouge_l_zh"

    def compare(self, prediction: str, answer: str) -> float:
        return super().compare(" ".join(chinese_words(prediction)), " ".join(chinese_words(answer)))
