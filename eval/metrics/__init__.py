"""Metrics as `evaluate.Metric` classes; each family has its own file.

Two other figures need no metric class: agreement with full KV and, in tasks without choices, the likelihood of the
reference answer (see `eval.runner`).
"""

from __future__ import annotations

from .base import ExampleMetric, interval
from .choice import Accuracy
from .longbench import Classification, CodeSimilarity, Count, Retrieval
from .qa import ChineseQaF1, ExactMatch, QaF1
from .rouge import ChineseRougeL, RougeL
from .ruler import StringMatch, StringMatchAny

METRICS: dict[str, type[ExampleMetric]] = {
    metric.name: metric
    for metric in (
        *(Accuracy, QaF1, ChineseQaF1, ExactMatch, RougeL, ChineseRougeL),
        *(Classification, Retrieval, Count, CodeSimilarity),
        *(StringMatch, StringMatchAny),
    )
}

__all__ = ["METRICS", "ExampleMetric", "interval"]
