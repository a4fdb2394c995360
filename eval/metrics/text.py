"""Text normalization and word overlap for metrics."""

from __future__ import annotations

import logging
import re
import string
import unicodedata
from collections import Counter

import jieba

jieba.setLogLevel(logging.WARNING)  # on first use it logs that it loads its dictionary

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain(text: str) -> str:
    """Normalize text as SQuAD and LongBench do: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def chinese_words(text: str) -> list[str]:
    """Split Chinese text, which has no spaces between words, into words. Punctuation marks count as words."""
    return list(jieba.cut(text))


def plain_chinese(word: str) -> str:
    """Normalize a Chinese word as LongBench does: lower case, no spaces, punctuation or full-width symbols."""
    return "".join(letter for letter in word.lower() if not letter.isspace() and not _is_punctuation(letter))


def _is_punctuation(letter: str) -> bool:
    wide_symbol = unicodedata.category(letter)[0] == "S" and unicodedata.east_asian_width(letter) in "FW"
    return letter in string.punctuation or unicodedata.category(letter)[0] == "P" or wide_symbol


def overlap_f1(prediction: list[str], answer: list[str]) -> float:
    """Return the F1 score of two word lists, from 0 to 1. Repeated words count as often as both lists contain them."""
    num_shared = sum((Counter(prediction) & Counter(answer)).values())
    if not num_shared:
        return 0.0
    precision, recall = num_shared / len(prediction), num_shared / len(answer)
    return 2 * precision * recall / (precision + recall)
