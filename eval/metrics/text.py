"""How answers are made comparable."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain(text: str) -> str:
    """Lower case, without punctuation, articles and spare blanks: SQuAD's rule, which LongBench and others keep."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def overlap_f1(prediction: list[str], answer: list[str]) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it stands in both; 0 to 1."""
    shared = sum((Counter(prediction) & Counter(answer)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)
