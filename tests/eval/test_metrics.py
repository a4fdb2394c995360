"""Every metric on cases worked out by hand, and on what the benchmarks' own rules say of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from eval.metrics import METRICS, interval
from eval.tasks import Example


def score(name, prediction, answers, labels=()):
    example = Example("x", (), "", answers=tuple(answers), labels=tuple(labels))
    return METRICS[name]().score(prediction, list(answers), example)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 100.0),  # articles, case and punctuation do not count
        ("in the city of Paris", ["Paris"], 100 * 2 * (1 / 4) * 1 / (1 / 4 + 1)),  # in, city, of, paris
        ("paris paris", ["Paris"], 100 * 2 * 0.5 / 1.5),  # a word counts as often as it is in both
        ("London", ["Paris", "london town"], 100 * 2 * 1 * 0.5 / 1.5),  # the best of the answers
        ("Berlin", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
    ],
)
def test_qa_f1(prediction, answers, expected):
    assert score("qa_f1", prediction, answers) == pytest.approx(expected)


def test_exact_match():
    assert score("exact_match", "The answer.", ["answer"]) == 100
    assert score("exact_match", "an answer or two", ["answer"]) == 0


LONGBENCH = json.loads((Path(__file__).parent / "data" / "longbench_scores.json").read_text())
"""Made sentences, with the scores that LongBench's own code (commit f6227eb7a25c) gives them."""


@pytest.mark.parametrize("case", LONGBENCH, ids=[f"{n}-{case['metric']}" for n, case in enumerate(LONGBENCH)])
def test_scores_are_those_of_longbench(case):
    result = score(case["metric"], case["prediction"], [case["answer"]], case["labels"])
    assert result == pytest.approx(case["expected"], abs=1e-6)


def test_a_sentence_that_is_too_long_for_rouge_counts_nothing():
    assert score("rouge_l", "word " * 900, ["another word " * 450]) == 0


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("It is a City.", "City", 100.0),
        ("City or Country", "City", 50.0),  # several labels share
        ("Other entity", "Other entity", 100.0),  # a label within the right one is no other label
        ("Other entity", "entity", 50.0),  # but the longer one is
        ("Country", "City", 0.0),
    ],
)
def test_classification(prediction, answer, expected):
    labels = ("City", "Country", "entity", "Other entity")
    assert score("classification", prediction, [answer], labels) == expected


def test_retrieval_and_count():
    assert score("retrieval", "Paragraph 12", ["Paragraph 12"]) == 100
    assert score("retrieval", "Paragraph 3 or Paragraph 12", ["Paragraph 12"]) == 50
    assert score("retrieval", "the second one", ["Paragraph 2"]) == 0
    assert score("count", "There are 7 of 10", ["7"]) == 50
    assert score("count", "17", ["7"]) == 0


def test_code_similarity():
    assert score("code_similarity", "\nx = 1\ny = 2", ["x = 1"]) == 100
    assert score("code_similarity", "# a comment\n```\nx = 1", ["x = 1"]) == 100  # comments and fences are left out
    assert score("code_similarity", "abcd", ["abxy"]) == 50


def test_ruler():
    assert score("string_match", "they are 111 and 333", ["111", "222", "333", "444"]) == 50
    assert score("string_match", "A is FOO", ["foo"]) == 100
    assert score("string_match_any", "it is b", ["a", "b"]) == 100
    assert score("string_match_any", "it is c", ["a", "b"]) == 0


def test_accuracy():
    assert score("accuracy", " great", [" great"]) == 100
    assert score("accuracy", " terrible", [" great"]) == 0


@pytest.mark.parametrize("name", METRICS)
def test_each_is_an_evaluate_metric_that_loads_without_a_network(name):
    answer = "Paragraph 3"
    result = METRICS[name]().compute(predictions=[answer, "so it is"], references=[[answer], [answer]])
    assert result[name] == sum(result["scores"]) / 2
    assert result["scores"][0] == pytest.approx(100) or name == "count"
    assert result["scores"][1] < 50


def test_intervals_hold_the_mean_and_shrink_with_numbers():
    few, many = [0.0, 100.0] * 10, [0.0, 100.0] * 1000
    for scores in (few, many):
        low, high = interval(scores)
        assert low < 50 < high
        # the normal approximation of the same interval
        half = 1.96 * 50 / math.sqrt(len(scores))
        assert high - low == pytest.approx(2 * half, rel=0.15)
    assert interval([5.0]) == (5.0, 5.0)
    assert interval([5.0] * 9) == (5.0, 5.0)
