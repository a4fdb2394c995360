"""Haystacks: sentences of books, repeated noise sentences, and word lists."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from ...data import Data
from ...errors import EvalError
from ..base import Draw

NOISE = "The hills are quiet. The river is cold. The road is long. We walk on, and we come back."
_SHIPPED = Path(__file__).parents[3] / "examples" / "data"


def filling(draw: Draw, items: Iterable[str], beside: str) -> list[str]:
    """Return the first items that, together with another text, fit into `draw.prefix_tokens` tokens.

    Args:
        draw: Settings with `prefix_tokens`.
        items: Texts to take in order, joined by spaces; may be infinite.
        beside: Text that is part of the prefix in any case.

    Raises:
        EvalError: No item fits.
    """
    room, fitting_items = draw.prefix_tokens - draw.count(beside), []
    for item in items:
        room -= draw.count(f" {item}")
        if room < 0:
            break
        fitting_items.append(item)
    if not fitting_items:
        raise EvalError(f"{draw.prefix_tokens} tokens are too few for this task; raise --prefix-tokens")
    return fitting_items


def fitting(draw: Draw, make: Callable[[int], str], max_size: int) -> int:
    """Return the largest size up to `max_size` for which `make(size)` has at most `draw.prefix_tokens` tokens.

    Raises:
        EvalError: Size 1 does not fit.
    """
    low, high = 1, 1
    while high < max_size and draw.count(make(high)) <= draw.prefix_tokens:
        low, high = high, min(max_size, 2 * high)
    while low < high:
        middle = (low + high + 1) // 2
        if draw.count(make(middle)) <= draw.prefix_tokens:
            low = middle
        else:
            high = middle - 1
    if draw.count(make(low)) > draw.prefix_tokens:
        raise EvalError(f"{draw.prefix_tokens} tokens are too few for this task; raise --prefix-tokens")
    return low


def sentences(data: Data) -> tuple[str, ...]:
    """Return the sentences of public-domain books, in order."""
    if data.folder is not None and data.has("ruler", "haystack_public_domain"):
        texts = tuple(row["text"] for row in data.rows("ruler", "haystack_public_domain", ("text",)))
    else:
        texts = tuple(path.read_text(encoding="utf-8") for path in sorted(_SHIPPED.glob("*.txt")))
    return _cut(texts)


@lru_cache(maxsize=2)
def _cut(texts: tuple[str, ...]) -> tuple[str, ...]:
    joined = " ".join(" ".join(text.split()) for text in texts)
    return tuple(s for s in re.split(r"(?<=[.!?]) ", joined) if s)


def words(data: Data) -> tuple[str, ...]:
    """Return sorted lower-case words, from the word lists in `data` if available, else from `sentences`."""
    if data.folder is not None and data.has("ruler", "words"):
        candidates = {row["word"].lower() for row in data.rows("ruler", "words", ("word",))}
    else:
        candidates = set(re.findall(r"[a-z]{4,12}", " ".join(sentences(data))))
    return tuple(sorted(word for word in candidates if word.isalpha() and word.isascii()))


def scattered(hay: Sequence[str], needles: Sequence[str], rng: random.Random) -> list[str]:
    """Insert needles at random positions of the haystack, in the given order."""
    places = sorted(rng.randrange(len(hay) + 1) for _ in needles)
    result, previous = [], 0
    for place, needle in zip(places, needles, strict=True):
        result += [*hay[previous:place], needle]
        previous = place
    return [*result, *hay[previous:]]
