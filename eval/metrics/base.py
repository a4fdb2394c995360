"""Base class of the metrics: an `evaluate.Metric` that loads without a network."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats

from ..tasks.base import Example


class ExampleMetric(evaluate.Metric):  # type: ignore[misc]
    """Metric that is a mean over examples.

    `predictions` are strings; `references` are lists of accepted answers. `compute` returns the mean, in percent if
    the metric is a share, and the score of each example.
    """

    about = ""
    higher_is_better = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.about,
            citation="",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        scores = [self.score(text, answers) for text, answers in zip(predictions, references, strict=True)]
        return {self.name: float(np.mean(scores)), "scores": scores}

    def score(self, prediction: str, answers: list[str], example: Example | None = None) -> float:
        """Return the score of one prediction, in percent: by default the maximum over the accepted answers."""
        return max((self.compare(prediction, answer) for answer in answers), default=0.0)

    @abstractmethod
    def compare(self, prediction: str, answer: str) -> float:
        """Return the score of one prediction against one answer, in percent."""


def interval(scores: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the mean (percentiles of 2,000 resamples, fixed seed)."""
    if len(scores) < 2 or min(scores) == max(scores):
        return (float(np.mean(scores)),) * 2
    result = stats.bootstrap(
        (np.array(scores),), np.mean, n_resamples=2000, confidence_level=confidence, method="percentile", rng=0
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
