"""ROUGE-L as LongBench has it: by the package `rouge`, whose definition differs from that of `rouge-score`."""

from __future__ import annotations

from functools import cached_property

from rouge import Rouge

from .base import ExampleMetric
from .text import chinese_words


class RougeL(ExampleMetric):
    """F-measure of the longest common subsequences of sentences (Lin 2004), best over the answers.

    LongBench counts 0 for a prediction without words, and for one whose sentences are too long for the package.
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
    """The same over the words of Chinese text."""

    name = "rouge_l_zh"

    def compare(self, prediction: str, answer: str) -> float:
        return super().compare(" ".join(chinese_words(prediction)), " ".join(chinese_words(answer)))
