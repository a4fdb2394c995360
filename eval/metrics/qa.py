"""Metrics of question answering: F1 over words, and exact match."""

from __future__ import annotations

from .base import ExampleMetric
from .text import chinese_words, overlap_f1, plain, plain_chinese


class QaF1(ExampleMetric):
    """F1 over words after SQuAD's normalisation (Rajpurkar et al. 2016), maximum over the answers."""

    name = "qa_f1"
    about = "F1 over words, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return 100 * overlap_f1(plain(prediction).split(), plain(answer).split())


class ChineseQaF1(ExampleMetric):
    """F1 over words of Chinese text, without punctuation (LongBench), maximum over the answers."""

    name = "qa_f1_zh"
    about = "F1 over words, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        predicted_words, answer_words = (
            [w for w in map(plain_chinese, chinese_words(text)) if w] for text in (prediction, answer)
        )
        return 100 * overlap_f1(predicted_words, answer_words)


class ExactMatch(ExampleMetric):
    """Exact match with an accepted answer, after SQuAD's normalisation."""

    name = "exact_match"
    about = "exact match, in percent"

    def compare(self, prediction: str, answer: str) -> float:
        return 100.0 * (plain(prediction) == plain(answer))
