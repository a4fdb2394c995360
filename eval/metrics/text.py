"""How answers are made comparable."""

from __future__ import annotations

import logging
import re
import string
import unicodedata
from collections import Counter

import jieba

jieba.setLogLevel(logging.WARNING)  # it tells of its dictionary when it is first used

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain(text: str) -> str:
    """Lower case, without punctuation, articles and spare blanks: SQuAD's rule, which LongBench and others keep."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def chinese_words(text: str) -> list[str]:
    """Return the words of Chinese text, which has no blanks between them; punctuation counts as words."""
    return list(jieba.cut(text))


def plain_chinese(word: str) -> str:
    """Lower case, without blanks, punctuation and the symbols of full width: LongBench's rule."""
    return "".join(letter for letter in word.lower() if not letter.isspace() and not _is_punctuation(letter))


def _is_punctuation(letter: str) -> bool:
    wide_symbol = unicodedata.category(letter)[0] == "S" and unicodedata.east_asian_width(letter) in "FW"
    return letter in string.punctuation or unicodedata.category(letter)[0] == "P" or wide_symbol


def overlap_f1(prediction: list[str], answer: list[str]) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it stands in both; 0 to 1."""
    shared = sum((Counter(prediction) & Counter(answer)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)
