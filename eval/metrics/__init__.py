"""The metrics, each an `evaluate.Metric`; one file for each family and one row here.

Two figures come with every task and need no answers: agreement with full KV and, where answers are generated, the
perplexity of the reference answer (see `eval.scoring`).
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
